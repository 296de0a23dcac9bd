"""What nvcc made of the kernels: no spills, registers that fit, nothing newer than SM80.

The build records it beside the .fatbin files (csrc/cmake/compile_kernel.py), so that no tool of the CUDA
toolkit is needed here.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kernel_sources import KernelSource, kernel_sources

from rewright.runtime import _native

SOURCES = kernel_sources()
FOLDER = Path(_native.__file__).parent / "kernels"
ARCHITECTURES = {"sm_80", "sm_90"}

# Of a multiprocessor of SM80. A warp is given registers in pieces of 256.
REGISTERS, THREADS, SHARED_BYTES = 1 << 16, 2048, 164 << 10
WARP, PIECE = 32, 256

_AROUND = "two blocks share a multiprocessor; kept around the loop over weights, not in it"
SPILLS: dict[str, tuple[int, str]] = {
    "expert_sums_one": (32, _AROUND),
    "expert_sums_many": (32, _AROUND),
    "stream_experts_one": (32, _AROUND),
    "stream_experts_many": (32, _AROUND),
}
"""Kernels that may spill registers: most bytes a thread stores or loads, and the reason."""
STACK: dict[str, str] = {}
"""Kernels that may keep something on the stack, with the reason; none of them streams weights."""


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, Any]]:
    """The record of each .fatbin file by its stem."""
    if not FOLDER.is_dir():
        assert shutil.which("nvcc") is None, "nvcc is on PATH, and the package was built without kernels"
        pytest.skip("the package was built where no nvcc was")
    return {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(FOLDER.glob("*.json"))}


def code_of(built: dict[str, dict[str, Any]], name: str) -> dict[str, dict[str, int]]:
    return built[SOURCES[name].fatbin]["kernels"][name]["code"]


def test_every_kernel_is_in_the_record(built: dict[str, dict[str, Any]]) -> None:
    recorded = {(stem, name) for stem, record in built.items() for name in record["kernels"]}
    assert recorded == {(source.fatbin, name) for name, source in SOURCES.items()}
    assert {path.stem for path in FOLDER.glob("*.fatbin")} == set(built)


@pytest.mark.parametrize("name", SOURCES)
def test_launch_bounds_are_those_of_the_source(built: dict[str, dict[str, Any]], name: str) -> None:
    source = SOURCES[name]
    record = built[source.fatbin]["kernels"][name]
    assert (record["threads"], record["blocks"]) == (source.threads, source.blocks)


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_is_spilled(built: dict[str, dict[str, Any]], name: str) -> None:
    code = code_of(built, name)
    assert set(code) == ARCHITECTURES
    for architecture, found in code.items():
        most, _ = SPILLS.get(name, (0, ""))
        assert max(found["spill_stores"], found["spill_loads"]) <= most, architecture
        if name not in {*STACK, *SPILLS}:
            assert found["stack"] == 0, architecture


def test_what_may_spill_exists() -> None:
    assert {*SPILLS, *STACK} <= set(SOURCES)
    assert all(SOURCES[name].family != "stream" for name in STACK)


@pytest.mark.parametrize("name", SOURCES)
def test_its_blocks_fit_a_multiprocessor(built: dict[str, dict[str, Any]], name: str) -> None:
    source, found = SOURCES[name], code_of(built, name)["sm_80"]
    assert 0 < found["registers"] <= 255
    assert registers_of_a_block(source, found["registers"]) * source.blocks <= REGISTERS
    assert source.threads * source.blocks <= THREADS
    assert found["shared"] * source.blocks <= SHARED_BYTES
    assert found["shared"] <= 48 << 10  # static memory of a block


def registers_of_a_block(source: KernelSource, registers: int) -> int:
    warps = -(-source.threads // WARP)
    return warps * -(-registers * WARP // PIECE) * PIECE


def test_ptx_is_made_for_sm80(built: dict[str, dict[str, Any]]) -> None:
    for stem, record in built.items():
        assert record["ptx"] == ["sm_80"], stem


def test_files_hold_ptx_of_sm80_and_code_of_two_architectures(built: dict[str, dict[str, Any]]) -> None:
    for stem in built:
        assert entries((FOLDER / f"{stem}.fatbin").read_bytes()) == [
            ("code", 80),
            ("code", 90),
            ("ptx", 80),
        ], stem


def entries(fatbin: bytes) -> list[tuple[str, int]]:
    """What a .fatbin file holds: kind and architecture of every entry, sorted.

    NVIDIA documents no more than the file's magic number; the fields below have been at their places in all
    releases from 7 to 13.
    """
    magic, version, at, size = struct.unpack_from("<IHHQ", fatbin)
    assert (magic, version, at + size) == (0xBA55ED50, 1, len(fatbin))
    found = []
    while at < len(fatbin):
        kind, _, header, content = struct.unpack_from("<HHIQ", fatbin, at)
        (architecture,) = struct.unpack_from("<I", fatbin, at + 28)
        found.append(({1: "ptx", 2: "code"}[kind], architecture))
        at += header + content
    return sorted(found)


REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for called
    24 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 24 bytes cumulative stack size, 132 bytes smem
ptxas info    : Compile time = 17.408 ms
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, 408 bytes cmem[0]
"""

PTX = """\
.version 9.0
.target sm_80
.visible .entry first(
	.param .align 8 .b8 first_param_0[56]
)
.maxntid 256, 1, 1
.minnctapersm 2
{
}
.visible .entry second(
	.param .u64 second_param_0
)
{
}
"""


@pytest.fixture(scope="module")
def recorder(repo_root: Path) -> ModuleType:
    path = repo_root / "csrc" / "cmake" / "compile_kernel.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_report_of_spills_is_read(recorder: ModuleType) -> None:
    assert recorder.code_of(REPORT) == {
        "first": {
            "sm_90": {"registers": 40, "stack": 24, "spill_stores": 12, "spill_loads": 12, "shared": 132},
            "sm_80": {"registers": 22, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 0},
        }
    }


def test_targets_and_bounds_are_read(recorder: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.ptx").write_text(PTX)
    assert recorder.ptx_of(tmp_path) == {
        "targets": ["sm_80"],
        "bounds": {"first": {"threads": 256, "blocks": 2}, "second": {"threads": 0, "blocks": 0}},
    }
