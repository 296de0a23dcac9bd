"""Driver, cards, and whether cards reach each other's memory."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from rewright.runtime.card import unfit
from rewright.runtime.check import Check

PROBE_BYTES = 16 << 20
_DRIVER = Path("/proc/driver/nvidia/version")


def driver_check() -> Check:
    """The NVIDIA driver, and the CUDA that it offers."""
    try:
        text = _DRIVER.read_text(encoding="utf-8", errors="replace").split("\n")[0]
    except OSError:
        text = ""
    version = text.removeprefix("NVRM version: ").strip()
    cuda = _driver_cuda()
    parts = [version or "none", *([f"for CUDA {cuda}"] if cuda else [])]
    return Check("driver", None, ", ".join(parts), data={"version": version or None, "cuda": cuda})


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver's library offers; it need not be started for that."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        found = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(found)) != 0:
            return None
    except (OSError, AttributeError):  # there is no library, or it is another
        return None
    return f"{found.value // 1000}.{found.value % 1000 // 10}"


def card_checks() -> list[Check]:
    """Every card that torch sees, and how those of several reach each other."""
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "no usable driver or card"
        return [Check("gpu", None, f"none ({why})")]
    count = torch.cuda.device_count()
    found = [_card_check(i) for i in range(count)]
    return [*found, *peer_checks(count)] if count > 1 else found


def _card_check(ordinal: int) -> Check:
    name = f"gpu {ordinal}"
    try:
        p = torch.cuda.get_device_properties(ordinal)
        free, total = torch.cuda.mem_get_info(ordinal)
    except RuntimeError as e:  # lost, or taken by a program that wants it alone
        return Check(name, False, f"cannot be used ({_first_line(e)})", "see what nvidia-smi says")
    text = (
        f"{p.name}, SM{p.major}{p.minor}, {p.multi_processor_count} multiprocessors, "
        f"{p.total_memory / 1e9:.1f} GB, {free / 1e9:.1f} free"
    )
    data = {
        "name": p.name,
        "capability": [p.major, p.minor],
        "multiprocessors": p.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
    }
    if refusal := unfit(p):
        return Check(name, False, f"{text}; {refusal.what}", refusal.fix, data)
    return Check(name, True, f"{text}; {_code(p.major)}", data=data)


def _code(major: int) -> str:
    """Which of the embedded code a card takes: a card runs that of its own generation, else the PTX."""
    return f"runs sm_{major}0 code" if major in (8, 9) else "its driver compiles the PTX when it is opened"


def peer_checks(count: int) -> list[Check]:
    """Which cards reach the memory of which, and whether what is copied between them arrives.

    A driver can offer access that an IOMMU or a virtual machine breaks: copies then say that they are done
    and leave other bytes.
    """
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    reach, wrong = {}, []
    for i, j in pairs:
        try:
            reach[i, j] = torch.cuda.can_device_access_peer(i, j)
            if bad := wrong_bytes(torch.device("cuda", i), torch.device("cuda", j)):
                wrong.append(f"{i} to {j}: {bad:,} of {PROBE_BYTES:,} bytes are wrong")
        except RuntimeError as e:
            reach.setdefault((i, j), False)
            wrong.append(f"{i} to {j}: {_first_line(e)}")
    matrix = [[i == j or reach[i, j] for j in range(count)] for i in range(count)]
    rows = (
        f"{i}: {' '.join('-' if i == j else 'yn'[not ok] for j, ok in enumerate(row))}"
        for i, row in enumerate(matrix)
    )
    access = Check("peer access", None, "; ".join(rows), data={"matrix": matrix})
    if wrong:
        fix = "switch off the IOMMU or ACS of the host, or use one card (CUDA_VISIBLE_DEVICES)"
        return [access, Check("peer copies", False, "; ".join(wrong), fix, {"wrong": wrong})]
    said = f"{PROBE_BYTES >> 20} MiB between each two of {count} cards arrived as written"
    return [access, Check("peer copies", True, said, data={"wrong": []})]


def wrong_bytes(source: torch.device, target: torch.device, size: int = PROBE_BYTES) -> int:
    """Write random bytes on one device, copy them to another, read them there; how many are not the same."""
    generator = torch.Generator().manual_seed(1)
    written = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    there = torch.bitwise_not(written).to(target)  # no byte is right before it is copied
    there.copy_(written.to(source))
    for device in {source, target}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return int((there.cpu() != written).sum())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
