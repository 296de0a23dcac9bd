"""The card that the sm80 target runs on, or this CPU in its place (REWRIGHT_EMULATE=1)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rewright.ir.errors import MachineError, UsageError
from rewright.runtime import _native
from rewright.runtime.memory import total_bytes

EMULATE = "REWRIGHT_EMULATE"
"""Environment variable that puts this CPU in the place of a card: slow, for tests and for looking into
problems."""

EMULATED_MULTIPROCESSORS = 4
CAPABILITY = (8, 0)
SHARED_BYTES = 163 << 10
"""Shared memory that a block of the kernels may have."""

_HOST = "run it on a machine with an A100 or newer data-centre card, or compile for --target host"


@dataclass(frozen=True, slots=True)
class Card:
    """An opened card.

    Attributes:
        device: what kernels are launched on.
        where: torch's device, on which its memory is allocated.
        name: for people.
        memory_bytes: all of its memory.
    """

    device: _native.Device
    where: torch.device
    name: str
    memory_bytes: int

    @property
    def emulated(self) -> bool:
        return self.where.type == "cpu"

    @property
    def stream(self) -> int:
        """torch's current stream, as launches take it."""
        return 0 if self.emulated else torch.cuda.current_stream(self.where).cuda_stream

    def free_bytes(self) -> int:
        """Memory that nobody holds yet; what torch keeps for reuse counts as free."""
        if self.emulated:
            return self.memory_bytes
        free, _ = torch.cuda.mem_get_info(self.where)
        return free + torch.cuda.memory_reserved(self.where) - torch.cuda.memory_allocated(self.where)

    def require_memory(self, needed: int, what: str) -> None:
        """Refuse what the card cannot hold; `MachineError` has both numbers."""
        if needed > (free := self.free_bytes()):
            raise MachineError(
                f"{what} need {needed:,} bytes, {self.name} has {free:,} free",
                where="memory of the card",
                fix="end what else uses the card, or choose a smaller --max-context or --max-batch",
            )


def kernel_files() -> list[Path]:
    """The .fatbin files that this build brought."""
    return sorted((Path(_native.__file__).parent / "kernels").glob("*.fatbin"))


def emulating() -> bool:
    """Whether this CPU stands in for a card.

    Raises:
        UsageError: REWRIGHT_EMULATE is neither 0 nor 1.
    """
    given = os.environ.get(EMULATE, "")
    if given not in ("", "0", "1"):
        raise UsageError(f"{given!r} is neither 0 nor 1", where=EMULATE)
    return given == "1"


def card_refusal() -> MachineError | None:
    """Why no kernel of the sm80 target runs here; None where some does. Opens nothing."""
    if emulating():
        return None
    if not kernel_files():
        return _refused(
            "this build of Rewright has no kernels of target sm80: nvcc was not found when it was installed",
            "install it again with nvcc on PATH, or after: pip install nvidia-cuda-nvcc nvidia-cuda-crt "
            "nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl (all of one release)",
        )
    if torch.version.cuda is None:
        return _refused(
            "torch is a CPU build, which cannot hold memory of a card",
            f"install a CUDA build of torch {torch.__version__.partition('+')[0]}",
        )
    if not torch.cuda.is_available():
        return _refused(
            f"torch for CUDA {torch.version.cuda} finds no card: the NVIDIA driver is missing or "
            "too old for it, or sees none",
            f"see what nvidia-smi says; CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}",
        )
    return unfit(torch.cuda.get_device_properties(torch.cuda.current_device()))


def unfit(card: Any) -> MachineError | None:
    """Why the kernels do not run on a card with these properties of torch's; None where they do."""
    if (card.major, card.minor) < CAPABILITY:
        return _refused(f"{card.name} is SM{card.major}{card.minor}; the kernels need SM80 or newer", _HOST)
    shared = int(getattr(card, "shared_memory_per_block_optin", SHARED_BYTES))
    if (card.major, card.minor) in ((8, 6), (8, 7), (8, 9)) or shared < SHARED_BYTES:
        return _refused(
            f"a block of {card.name} (SM{card.major}{card.minor}) has {shared:,} bytes of shared memory; the "
            f"kernels are made for {SHARED_BYTES:,}",
            _HOST,
        )
    return None


def open_card() -> Card:
    """torch's current card with the kernels of this build, or the emulation.

    Raises:
        MachineError: there is none that can be used.
    """
    if emulating():
        device = _native.open_emulation(EMULATED_MULTIPROCESSORS)
        return Card(device, torch.device("cpu"), "this CPU in the place of a card", total_bytes())
    if refusal := card_refusal():
        raise refusal
    ordinal = torch.cuda.current_device()
    torch.cuda.init()
    properties = torch.cuda.get_device_properties(ordinal)
    try:
        device = _native.open_cuda(ordinal, [str(path) for path in kernel_files()])
    except _native.DeviceError as e:
        raise _refused(str(e), "update the NVIDIA driver, or install Rewright with an older nvcc") from e
    return Card(device, torch.device("cuda", ordinal), properties.name, properties.total_memory)


def _refused(what: str, fix: str) -> MachineError:
    return MachineError(what, where="target sm80", fix=fix)
