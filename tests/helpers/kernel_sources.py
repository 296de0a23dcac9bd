"""What the CUDA sources say of themselves: the kernels in them and their launch bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
_KERNEL = re.compile(r"^KERNEL\((\w+), \w+, (\d+), (\d+)\)", re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A kernel as its source defines it.

    Attributes:
        family: its folder in csrc/kernels.
        file: the stem of its .cu file.
        threads, blocks: of a block at most, and of a multiprocessor at least.
    """

    family: str
    file: str
    threads: int
    blocks: int

    @property
    def fatbin(self) -> str:
        """Stem of the files that the build makes of its source."""
        return f"{self.family}_{self.file}"


def kernel_sources() -> dict[str, KernelSource]:
    """Every kernel by name. A definition of which the bounds are no numbers is an error, not left out."""
    found: dict[str, KernelSource] = {}
    for path in sorted(SOURCES.rglob("*.cu")):
        text = path.read_text(encoding="utf-8")
        kernels = _KERNEL.findall(text)
        assert len(kernels) == text.count("KERNEL("), f"{path}: a KERNEL( that is not understood"
        for name, threads, blocks in kernels:
            assert name not in found, f"there are two kernels {name}"
            found[name] = KernelSource(path.parent.name, path.stem, int(threads), int(blocks))
    if not found:
        raise FileNotFoundError(f"{SOURCES} has no kernels: run this in the repository")
    return found
