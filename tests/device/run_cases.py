"""Launches what `launch_cases.write_cases` has written, on a card or on its emulation.

usage: run_cases.py FOLDER --native _native.so --out LAUNCHED.json [--emulate N] [--plant]

This is the process that compute-sanitizer looks into, so it is kept small: no torch, memory of the card
straight from the driver, each piece of it an allocation of its own, so that a step over its end is one out of
bounds. LAUNCHED.json counts the launches of every kernel, and is written when all are through.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

ALIGN = 128
PLANTED_BYTES = 64
"""Of the arena that `--plant` leaves: less than the operands of any kernel."""


class HostMemory:
    """Memory for the emulation."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def put(self, content: bytes) -> int:
        """The address of a copy."""
        held = ctypes.create_string_buffer(len(content) + ALIGN)
        self._held.append(held)
        address = ctypes.addressof(held)
        address += -address % ALIGN
        self.write(address, content)
        return address

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def wait(self) -> None:
        """Until everything launched is done."""

    def free(self) -> None:
        """All of it."""
        self._held.clear()


class CardMemory:
    """Memory of the card whose context is current."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._held: list[ctypes.c_uint64] = []

    def put(self, content: bytes) -> int:
        """The address of a copy."""
        address = ctypes.c_uint64()
        self._require("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(len(content), 1)))
        self._held.append(address)
        self.write(address.value, content)
        return address.value

    def write(self, address: int, content: bytes) -> None:
        if content:
            self._require("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))

    def wait(self) -> None:
        """Until everything launched is done."""
        self._require("cuCtxSynchronize")

    def free(self) -> None:
        """All of it."""
        for address in self._held:
            self._require("cuMemFree_v2", address)
        self._held.clear()

    def _require(self, call: str, *arguments: Any) -> None:
        if code := getattr(self._driver, call)(*arguments):
            raise SystemExit(f"run_cases: {call} answers with error {code}")


Memory = HostMemory | CardMemory


def run_case(
    native: Any, device: Any, memory: Memory, case: dict[str, Any], content: memoryview
) -> list[str]:
    """Every step of a case; returns the kernels launched."""

    def piece(span: Sequence[int]) -> bytes:
        return bytes(content[span[0] : span[0] + span[1]])

    def bound(span: Sequence[int]) -> tuple[int, int]:
        return memory.put(piece(span)), span[1]

    inputs = memory.put(piece(case["steps"][0]))
    weights = {name: bound(span) for name, span in case["weights"].items()}
    arena = memory.put(piece([case["arena"][0], case.get("arena_left", case["arena"][1])]))
    program = native.DeviceProgram(
        case["plan"], weights, (arena, case["arena"][1]), bound(case["state"]), inputs, device
    )
    for step in case["steps"]:
        memory.write(inputs, piece(step))
        program.run(0)
        memory.wait()
    return program.kernels * len(case["steps"])


def run_sampler(native: Any, device: Any, memory: Memory) -> list[str]:
    """Three rows that choose in different ways, the last of them masked; returns the kernels launched."""
    rows, vocabulary, ring_length, draws = 3, 5000, 2, 3
    draw = random.Random(0)
    logits = array("f", (draw.gauss(0, 3) for _ in range(rows * vocabulary))).tobytes()
    state = b"".join(
        native.sample_row(temperature, top_p, 7, 0, 9, [1, 2])
        for temperature, top_p in ((0.0, 1.0), (1.0, 0.9), (0.7, 1.0))
    )
    inputs = array("i", [0] * rows + [5] * rows + [1, 1, 0])
    sampler = native.DeviceSampler(
        device,
        (memory.put(logits), len(logits)),
        rows,
        memory.put(state),
        memory.put(bytes(8 * rows * vocabulary)),
        memory.put(inputs.tobytes()),
        memory.put(array("i", [native.NOTHING_YET] * ring_length * rows).tobytes()),
        ring_length,
        rows,
    )
    for _ in range(draws):
        sampler.run(0)
        memory.wait()
    return sampler.kernels * draws


def load_native(path: Path) -> Any:
    """The extension alone, without the package around it."""
    loader = ExtensionFileLoader("_native", str(path))
    spec = spec_from_loader("_native", loader)
    assert spec is not None
    native = module_from_spec(spec)
    loader.exec_module(native)
    return native


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--native", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--emulate", type=int, default=0, help="multiprocessors of the emulation")
    parser.add_argument("--plant", action="store_true", help="one case only, with less memory than it uses")
    options = parser.parse_args()
    native = load_native(options.native)
    if options.emulate:
        device, memory = native.open_emulation(options.emulate), HostMemory()
    else:
        fatbins = sorted(map(str, (options.native.parent / "kernels").glob("*.fatbin")))
        device, memory = native.open_cuda(0, fatbins), CardMemory()
    cases = json.loads((options.folder / "cases.json").read_text(encoding="utf-8"))
    content = memoryview((options.folder / "memory.bin").read_bytes())
    if options.plant:
        cases = [{**cases[0], "arena_left": PLANTED_BYTES}]
    launched: Counter[str] = Counter()
    for at, case in enumerate(cases):
        print(f"{at + 1}/{len(cases)} {case['name']}", file=sys.stderr, flush=True)
        launched.update(run_case(native, device, memory, case, content))
        memory.free()
    if not options.plant:
        print("sampling", file=sys.stderr, flush=True)
        launched.update(run_sampler(native, device, memory))
    report = {"cases": len(cases), "launches": dict(sorted(launched.items()))}
    options.out.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
