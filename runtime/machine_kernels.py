"""The kernels of target sm80 that this build brought, and the compiler that makes them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rewright.runtime.check import Check

_TIMEOUT_SECONDS = 20
_INSTALL = "rewright was installed without nvcc: install it again with one"


def kernel_checks(files: list[Path]) -> list[Check]:
    """What the .fatbin files hold: one check for all, one for each.

    Args:
        files: as `card.kernel_files` names them; beside each lies a .json file of what its kernels take.
    """
    if not files:
        return [Check("kernels sm80", None, "none in this build", _INSTALL)]
    found = [_file_check(path) for path in files]
    made = _first_line(files[0].with_name("nvcc.txt"))
    count = sum(len(check.data.get("kernels", ())) for check in found)
    text = f"{count} in {len(files)} files" + (f" by nvcc {made}" if made else "")
    return [Check("kernels sm80", None, text, data={"files": len(files), "nvcc": made}), *found]


def _file_check(path: Path) -> Check:
    name = f"kernels {path.stem}"
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        by_arch: dict[str, list[dict[str, int]]] = {}
        for kernel in record["kernels"].values():
            for arch, code in kernel["code"].items():
                by_arch.setdefault(arch, []).append(code)
        said = {arch: _most(codes) for arch, codes in sorted(by_arch.items())}
        ptx = [str(target) for target in record["ptx"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return Check(name, None, f"no record of its code ({type(e).__name__})", "install Rewright again")
    count = len(record["kernels"])
    text = "; ".join(
        [f"{count} kernel{'s' * (count != 1)}, PTX of {', '.join(ptx)}", *map(_text, said.items())]
    )
    return Check(name, None, text, data={"kernels": record["kernels"], "most": said, "ptx": ptx})


def _text(most_of_arch: tuple[str, dict[str, int]]) -> str:
    arch, most = most_of_arch
    spilled = f", {most['spilled']:,} B spilled" if most["spilled"] else ""
    return f"{arch}: up to {most['registers']} registers, {most['shared']:,} B shared{spilled}"


def _most(codes: list[dict[str, int]]) -> dict[str, int]:
    """The largest of each figure over kernels: registers of a thread, bytes of static shared memory of a
    block, bytes of registers that a thread spills."""
    return {
        "registers": max(code["registers"] for code in codes),
        "shared": max(code["shared"] for code in codes),
        "spilled": max(code["spill_stores"] for code in codes),
    }


def nvcc_check() -> Check:
    """The nvcc that installing Rewright here would take."""
    for path in _compilers():
        try:
            done = subprocess.run(
                [path, "--version"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as e:
            return Check("nvcc", None, f"{path} does not run ({type(e).__name__})", "install another one")
        version = re.search(r"V([0-9.]+)", done.stdout)
        said = version[1] if version else "of an unknown version"
        return Check("nvcc", None, f"{said}, {path}", data={"version": version[1] if version else None})
    return Check("nvcc", None, "none; only installing Rewright needs one", data={"version": None})


def _compilers() -> Iterator[str]:
    """Where nvcc may be, in the order of csrc/cmake/kernels.cmake."""
    if named := os.environ.get("CUDACXX"):
        yield named
    if found := shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin"):
        yield found
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from map(str, sorted(Path(folder).glob("*/bin/nvcc")))


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")[0]
    except OSError:
        return None
