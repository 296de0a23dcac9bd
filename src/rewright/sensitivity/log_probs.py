"""Log-probabilities of every predicted token, in a file that has no name."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

BYTES = 4
"""Of one value, fp32: in half precision one of -10 is off by up to 0.004, as much as is measured."""


class LogProbs:
    """f32[rows, vocabulary], mapped: the kernel writes it out where memory is short.

    The file has no name, so nothing is left of it however the process ends.

    Args:
        rows: predicted tokens.
        vocabulary: tokens that there are.

    Raises:
        OSError: no room for it in the folder of temporary files.
    """

    def __init__(self, rows: int, vocabulary: int):
        size = rows * vocabulary * BYTES
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
        self._values = torch.frombuffer(mapped, dtype=torch.float32).view(rows, vocabulary)

    def write(self, row: int, values: Tensor) -> None:
        """Store the values from a row on."""
        self._values[row : row + len(values)] = values

    def read(self, row: int, count: int) -> Tensor:
        """The values from a row on."""
        return self._values[row : row + count]
