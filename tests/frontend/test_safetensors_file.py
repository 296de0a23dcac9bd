"""Headers of single shards: what is accepted, and one distinct error for each way to be broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rewright.frontend.safetensors_file import ReadStats, TensorInfo, read_header, read_tensor
from rewright.frontend.value_check import check_values
from rewright.ir.errors import BadInput

ShardWriter = Callable[..., Path]


@pytest.fixture
def shard(tmp_path: Path, write_shard: ShardWriter) -> Path:
    """Two tensors, 24 and 8 bytes."""
    tensors = {"a": ("F32", [2, 3], bytes(24)), "b": ("I64", [1], bytes(8))}
    return write_shard(tmp_path / "model.safetensors", tensors)


def header_of(*entries: tuple[str, str, list[int], list[int]]) -> bytes:
    return json.dumps({n: {"dtype": d, "shape": s, "data_offsets": o} for n, d, s, o in entries}).encode()


def test_header(tmp_path: Path, write_shard: ShardWriter) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": ("F32", [2, 3], bytes(24)),
        "b": ("F4", [2, 32], bytes(32)),
        "none": ("BF16", [0, 4], b""),
    }
    write_shard(path, tensors, {"format": "pt"})
    stats = ReadStats()
    header = read_header(path, stats)
    base = path.stat().st_size - 56
    assert header.tensors == {
        "a": TensorInfo("a", path, "F32", (2, 3), base, base + 24),
        "b": TensorInfo("b", path, "F4", (2, 32), base + 24, base + 56),
        "none": TensorInfo("none", path, "BF16", (0, 4), base + 56, base + 56),
    }
    assert header.metadata == {"format": "pt"}
    assert stats == ReadStats(headers_read=1, data_reads=0, data_bytes=0)


def test_digest_follows_the_header_only(tmp_path: Path, write_shard: ShardWriter) -> None:
    def digest(name: str, tensor: tuple[str, list[int], bytes]) -> str:
        return read_header(write_shard(tmp_path / name, {"a": tensor})).digest

    first = digest("1", ("F32", [2], bytes(8)))
    assert first == digest("2", ("F32", [2], b"\x01" * 8))
    assert first != digest("3", ("F32", [2, 1], bytes(8)))


def test_every_stored_dtype_is_read(tmp_path: Path) -> None:
    codes = torch.arange(64, dtype=torch.uint8)
    written = {
        "e4m3": codes.clone().view(torch.float8_e4m3fn).view(8, 8),
        "e8m0": codes.clone().view(torch.float8_e8m0fnu).view(2, 32),
        "u8": codes,
        "bf16": codes.to(torch.bfloat16).view(4, 16),
        "f16": codes.to(torch.float16),
        "f32": codes.to(torch.float32),
        "f64": codes.to(torch.float64),
        "i64": codes.to(torch.int64).view(1, 64),
        "i32": codes.to(torch.int32),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    path = tmp_path / "model.safetensors"
    save_file({**written, "i8": codes.clone().view(torch.int8)}, path)
    header, stats = read_header(path), ReadStats()
    for name, tensor in written.items():
        read = read_tensor(header.tensors[name], stats)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert read.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    packed = read_tensor(header.tensors["i8"], stats)
    assert packed.dtype == torch.uint8
    assert packed.equal(codes)
    assert stats.data_reads == len(header.tensors)
    assert stats.data_bytes == sum(t.nbytes for t in header.tensors.values())


def test_f4_counts_elements(tmp_path: Path, write_shard: ShardWriter) -> None:
    path = write_shard(tmp_path / "s.safetensors", {"a": ("F4", [2, 4], bytes([1, 2, 3, 4]))})
    read = read_tensor(read_header(path).tensors["a"])
    assert read.dtype == torch.uint8
    assert read.tolist() == [[1, 2], [3, 4]]


def test_truncated_by_16_bytes(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-16])
    with pytest.raises(BadInput, match="truncated, 16 bytes missing") as caught:
        read_header(shard)
    assert caught.value.where == str(shard)
    assert caught.value.exit_code == 3


def test_truncated_inside_the_header(shard: Path) -> None:
    whole = shard.read_bytes()
    shard.write_bytes(whole[:50])
    missing = len(whole) - 32 - 50
    with pytest.raises(BadInput, match=f"truncated inside the header, {missing} bytes of the header"):
        read_header(shard)


def test_trailing_bytes(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes() + bytes(5))
    with pytest.raises(BadInput, match="5 trailing bytes after the last tensor"):
        read_header(shard)


def test_unknown_dtype(tmp_path: Path, write_shard: ShardWriter) -> None:
    path = write_shard(tmp_path / "s.safetensors", {"layers.0.x": ("F8_E5M2", [4], bytes(4))})
    with pytest.raises(BadInput, match=r"tensor layers\.0\.x has dtype F8_E5M2, unknown to this reader"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file (it has 0 bytes)"),
        (b"1234567", "not a safetensors file (it has 7 bytes)"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "not a safetensors file (it would have a header of",
        ),
        (bytes(64), "not a safetensors file (it would have a header of 0 bytes)"),
        (
            (20).to_bytes(8, "little") + b"[" * 20,
            "not a safetensors file (its header does not start with '{')",
        ),
    ],
)
def test_not_a_safetensors_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_header(path)
    assert message in caught.value.what


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a": ', "not JSON"),
        (b'{"\xff": 1}', "not JSON"),
        (b'{"a":' + b"[" * 100_000, "not JSON"),
        (b'{"a": 3}', "the entry of a is not an object"),
        (b'{"__metadata__": {"n": 1}}', "__metadata__ is not an object of strings"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', "the entry of a needs dtype, shape and two data_offsets"),
        (header_of(("a", "F32", [2], [0])), "the entry of a needs"),
        (header_of(("a", "F32", [-2], [0, 8])), "the entry of a needs"),
        (header_of(("a", "F32", [2], [0, 4])), "tensor a spans 4 bytes, F32[2] needs 8"),
        (header_of(("a", "F32", [2], [8, 0])), "tensor a spans -8 bytes, F32[2] needs 8"),
        (header_of(("a", "F4", [3], [0, 2])), "tensor a is F4[3], rows that do not fill whole bytes"),
        (header_of(("a", "U8", [2], [0, 2]), ("b", "U8", [2], [6, 8])), "gap of 4 bytes before tensor b"),
        (header_of(("a", "U8", [8], [2, 10])), "gap of 2 bytes before tensor a"),
        (header_of(("a", "U8", [6], [0, 6]), ("b", "U8", [4], [4, 8])), "overlap of 2 bytes before tensor b"),
    ],
)
def test_invalid_header(tmp_path: Path, write_raw_shard: ShardWriter, header: bytes, message: str) -> None:
    path = write_raw_shard(tmp_path / "s.safetensors", header, bytes(8))
    with pytest.raises(BadInput, match="invalid header") as caught:
        read_header(path)
    assert message in caught.value.what


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot be read \(No such file"):
        read_header(tmp_path / "s.safetensors")


def test_file_that_shrinks_after_its_header_was_read(shard: Path) -> None:
    info = read_header(shard).tensors["b"]
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(BadInput, match="truncated while b was read, 3 bytes missing"):
        read_tensor(info)


@pytest.mark.parametrize(
    ("dtype", "code", "shown"),
    [
        (torch.float8_e4m3fn, 0x7F, "NaN (code 0x7F)"),
        (torch.float8_e4m3fn, 0xFF, "NaN (code 0xFF)"),
        (torch.float8_e8m0fnu, 0xFF, "NaN (code 0xFF)"),
        (torch.bfloat16, 0x7FC0, "NaN (code 0x7FC0)"),
        (torch.bfloat16, 0xFF80, "-inf (code 0xFF80)"),
        (torch.float16, 0x7C00, "inf (code 0x7C00)"),
        (torch.float32, 0x7F800001, "NaN (code 0x7F800001)"),
        (torch.float64, 0xFFF0000000000000, "-inf (code 0xFFF0000000000000)"),
    ],
)
def test_first_bad_value_is_named(dtype: torch.dtype, code: int, shown: str) -> None:
    tensor = torch.zeros(700, 500 * dtype.itemsize, dtype=torch.uint8).view(dtype)  # more than one chunk
    for row, column in ((600, 7), (650, 0)):
        raw = torch.tensor(list(code.to_bytes(dtype.itemsize, "little")), dtype=torch.uint8)
        tensor.view(torch.uint8).view(700, 500, dtype.itemsize)[row, column] = raw
    with pytest.raises(BadInput) as caught:
        check_values(tensor, "layers.3.attn.wkv.weight")
    assert caught.value.where == "layers.3.attn.wkv.weight"
    assert caught.value.what == f"holds {shown} at index [600, 7]"


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(torch.float8_e4m3fn, {0x7F, 0xFF}), (torch.float8_e8m0fnu, {0xFF}), (torch.uint8, set())],
)
def test_all_other_codes_are_good(dtype: torch.dtype, bad: set[int]) -> None:
    codes = torch.tensor([c for c in range(256) if c not in bad], dtype=torch.uint8)
    check_values(codes.view(dtype), "w")


def test_largest_and_smallest_floats_are_good() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        limits = torch.finfo(dtype)
        check_values(torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=dtype), "w")
