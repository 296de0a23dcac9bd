"""Packed rows of keys: sizes, places, and that rounded rows come back bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rewright.ir.errors import CompilerBug
from rewright.ir.formats import dequantize_blocks, quantize_blocks
from rewright.ir.kv_format import RowFormat, holds, row_format, rows_of, state_rows, store_rows
from rewright.ir.types import DType, ValueType

KEYS, INDEX, LOSSY = RowFormat("e4m3", 64, 448), RowFormat("e2m1", 32, 128), RowFormat("e2m1", 32, 448)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def rounded(packed: RowFormat, rows: Tensor) -> Tensor:
    """Rows as the model has them: rounded to the format, the plain dims as they are."""
    codes, scale = quantize_blocks(rows[..., : packed.coded], packed.fmt, packed.block)
    values = dequantize_blocks(codes, scale, packed.block).bfloat16()
    return torch.cat([values, rows[..., packed.coded :]], dim=-1)


def rows_of_every_size(count: int, columns: int, seed: int) -> Tensor:
    """bf16 rows from 2^-140 to 2^100, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, columns, generator=generator)
    exponents = torch.randint(-140, 100, (count, columns // 32 + 1), generator=generator)
    rows *= 2.0 ** exponents.repeat_interleave(32, 1)[:, :columns]
    rows[torch.rand(rows.shape, generator=generator) < 0.1] = -0.0
    rows[0] = 0.0
    return rows.bfloat16()


class TestSizes:
    def test_rows_of_the_released_model(self) -> None:
        assert KEYS.row_bytes(512) == 448 + 7 + 128 == 583
        assert INDEX.row_bytes(128) == 64 + 4 == 68
        assert LOSSY.row_bytes(512) == 224 + 14 + 128 == 366

    @pytest.mark.parametrize(("packed", "columns"), [(KEYS, 512), (KEYS, 448), (INDEX, 128), (LOSSY, 512)])
    def test_columns_from_bytes(self, packed: RowFormat, columns: int) -> None:
        assert packed.columns(packed.row_bytes(columns)) == columns

    @pytest.mark.parametrize("row_bytes", [454, 456, 0])
    def test_no_row_has_so_many_bytes(self, row_bytes: int) -> None:
        with pytest.raises(CompilerBug, match=f"no row of {row_bytes} bytes is e4m3:64:448"):
            KEYS.columns(row_bytes)

    def test_rows_of_a_slot_fill_words(self) -> None:
        """So that every plane of every slot is aligned."""
        assert [state_rows(n, KEYS) for n in (1, 8, 9, 128)] == [8, 8, 16, 128]
        assert state_rows(9, None) == 9

    def test_what_a_state_holds(self) -> None:
        packed, plain = ValueType(DType.BYTE, (2, 8, 583)), ValueType(DType.BF16, (2, 8, 512))
        assert holds(packed, DType.BF16, 512, "e4m3:64:448")
        assert holds(plain, DType.BF16, 512, "")
        assert not holds(packed, DType.F32, 512, "e4m3:64:448"), "plain dims are bf16"
        assert not holds(packed, DType.BF16, 512, "")
        assert not holds(packed, DType.BF16, 511, "e4m3:64:448")
        assert not holds(packed, DType.BF16, 64, "e4m3:64:448")
        assert not holds(plain, DType.BF16, 512, "e4m3:64:448")


class TestText:
    @pytest.mark.parametrize("packed", [KEYS, INDEX, LOSSY])
    def test_it_is_read_back(self, packed: RowFormat) -> None:
        assert row_format(str(packed)) == packed
        assert rows_of({"window_rows": str(packed)}, "window") == packed

    def test_none(self) -> None:
        assert row_format("") is None
        assert rows_of({}, "cache") is None

    @pytest.mark.parametrize(
        "text", ["e4m3", "e4m3:64", "e4m3:0:448", "e4m3:64:448:1", "e5m2:64:448", "e4m3:64:100"]
    )
    def test_no_format(self, text: str) -> None:
        with pytest.raises(CompilerBug, match="is no format of rows"):
            row_format(text)


class TestBytes:
    @pytest.mark.parametrize("columns_behind", [0, 64])
    @pytest.mark.parametrize(
        "packed", [KEYS, INDEX, LOSSY, RowFormat("e4m3", 128, 128), RowFormat("e2m1", 64, 128)]
    )
    def test_rounded_rows_come_back_bit_for_bit(self, packed: RowFormat, columns_behind: int) -> None:
        rows = rounded(packed, rows_of_every_size(96, packed.coded + columns_behind, seed=3))
        state = packed.pack(rows[None])
        assert torch.equal(bits(packed.load(state[0], slice(None))), bits(rows))
        again = packed.pack(packed.load(state[0], slice(None))[None])
        assert torch.equal(again, state), "what comes back is packed to the same bytes"

    def test_other_rows_are_rounded(self) -> None:
        rows = rows_of_every_size(32, 512, seed=4)
        loaded = KEYS.load(KEYS.pack(rows[None])[0], slice(None))
        assert torch.equal(bits(loaded), bits(rounded(KEYS, rows)))
        assert not torch.equal(bits(loaded), bits(rows))

    def test_every_part_lies_in_its_plane(self) -> None:
        packed, rows = RowFormat("e2m1", 32, 64), rows_of_every_size(8, 66, seed=5)
        codes, scale = quantize_blocks(rows[:, :64], "e2m1", 32)
        slot = packed.pack(rows[None])[0].flatten().view(torch.uint8)
        assert torch.equal(slot[: 8 * 4], bits(rows[:, 64:]).flatten())
        assert torch.equal(slot[8 * 4 : 8 * 36], codes.flatten())
        assert torch.equal(slot[8 * 36 :], bits(scale).flatten())

    @pytest.mark.parametrize("count", [7, 8])
    def test_writing_leaves_other_rows_and_slots_alone(self, count: int) -> None:
        """Also where an odd number of rows leaves a slot at an odd address."""
        state = torch.full((2, count, 583), -1, dtype=torch.int8)
        rows = rounded(KEYS, rows_of_every_size(2, 512, seed=6))
        store_rows(state[1], torch.tensor([6, 2]), rows, str(KEYS))
        assert (state[0] == -1).all()
        assert torch.equal(bits(KEYS.load(state[1], torch.tensor([2, 6]))), bits(rows.flip(0)))
        written = torch.cat([(plane != -1).any(1, keepdim=True) for plane in KEYS.planes(state[1])], dim=1)
        assert written.any(1).nonzero().flatten().tolist() == [2, 6]
