"""Checkpoint tensors as graph weights: every stored format, and everything that does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import write_shard
from safetensors.torch import load_file, save_file
from stepper import Stepper, load_weights
from torch import Tensor

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.frontend.storage import scale_shape
from rewright.ir.errors import BadInput, CompilerBug, ProblemList
from rewright.ir.printer import print_graph
from rewright.ir.types import DType
from rewright.ir.variant import Variant

Tensors = dict[str, Tensor]

CONFIG = {
    "compress_ratios": [4, 0],
    "n_routed_experts": 4,
    "num_hidden_layers": 2,
    "num_hash_layers": 1,
    "vocab_size": 32,
}
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
EXPERT = re.compile(r"layers\.\d+\.ffn\.experts\.\d+\.w[123]")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]) -> Path:
    """FP8 matrices, FP4 experts, E8M0 scales; not to be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("storage") / "base", CONFIG)


@pytest.fixture
def rewritten(made: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], None]], Path]:
    """Write the checkpoint anew with its tensors changed."""

    def write(change: Callable[[Tensors], None]) -> Path:
        tensors = tensors_of(made)
        change(tensors)
        folder = tmp_path / "changed"
        folder.mkdir()
        (folder / "config.json").write_text((made / "config.json").read_text())
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


def tensors_of(folder: Path) -> Tensors:
    (shard,) = folder.glob("*.safetensors")
    return load_file(shard)


def logits(folder: Path, numerics: str = "faithful") -> Tensor:
    return Stepper.open(folder, numerics, max_context=128, chunk=16).scores(IDS)


def opened(folder: Path, numerics: Numerics = Numerics.FAITHFUL) -> ModelSource:
    return ModelSource.open(folder, numerics, max_context=128, chunk=16)


def problems(folder: Path, numerics: Numerics = Numerics.FAITHFUL) -> list[str]:
    with pytest.raises(ProblemList) as caught:
        opened(folder, numerics)
    assert caught.value.where == str(folder)
    assert (caught.value.exit_code, caught.value.what[:11]) == (3, "the tensors")
    return caught.value.problems


# -- dequantisation, written down a second time -----------------------------------------------


def scale_values(scale: Tensor) -> Tensor:
    if scale.dtype == torch.float8_e8m0fnu:
        return torch.exp2(scale.view(torch.uint8).double() - 127)
    return scale.double()


def fp8_values(codes: Tensor, scale: Tensor) -> Tensor:
    s = scale_values(scale)
    rows, cols = codes.shape
    return codes.double() * s[torch.arange(rows) // 128][:, torch.arange(cols) // 128]


def fp4_values(packed: Tensor, scale: Tensor) -> Tensor:
    byte = packed.view(torch.uint8).long()
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([magnitude, -magnitude])
    values = torch.empty(byte.shape[0], 2 * byte.shape[1], dtype=torch.float64)
    values[:, 0::2], values[:, 1::2] = table[byte % 16], table[byte // 16]
    return values * scale_values(scale)[:, torch.arange(values.shape[1]) // 32]


def stored_values(tensors: Tensors, base: str) -> Tensor:
    """Exact values of a stored matrix, in fp64."""
    weight, scale = tensors[f"{base}.weight"], tensors.get(f"{base}.scale")
    if scale is None:
        return weight.double()
    return fp8_values(weight, scale) if weight.dtype == torch.float8_e4m3fn else fp4_values(weight, scale)


def matrices(tensors: Tensors) -> Iterator[str]:
    """Names, without `.weight`, of the matrices that have a scale."""
    return (n.removesuffix(".scale") for n in sorted(tensors) if n.endswith(".scale"))


@pytest.mark.parametrize(
    "storage", [{}, {"experts": "fp8"}, {"scale_dtype": "f32"}, {"experts": "bf16", "dense": "f32"}]
)
def test_fp32_dequantisation_is_exact(
    tmp_path: Path, make_checkpoint: Callable[..., Path], storage: dict[str, str]
) -> None:
    folder = make_checkpoint(tmp_path / "c", CONFIG, **storage)
    tensors = tensors_of(folder)
    loaded = load_weights(opened(folder, Numerics.FP32))
    compared = set()
    for name, weight in loaded.items():
        if name.startswith("rope."):
            continue
        base = name.removesuffix(".weight")
        if ".experts." in name:
            head, _, projection = base.rpartition(".")
            names = [f"{head}.{e}.{projection}" for e in range(4)]
            wanted = torch.stack([stored_values(tensors, n) for n in names])
            compared |= {f"{n}.{part}" for n in names for part in ("weight", "scale")}
        elif f"{base}.scale" in tensors:
            wanted = stored_values(tensors, base)
            compared |= {f"{base}.weight", f"{base}.scale"}
        else:
            wanted = tensors[name].double()
            compared.add(name)
        assert weight.dtype == (torch.int64 if name.endswith("tid2eid") else torch.float32), name
        assert torch.equal(weight.double(), wanted), name
    assert tensors.keys() <= compared


def test_faithful_weights_are_the_stored_bytes(made: Path) -> None:
    tensors = tensors_of(made)
    loaded = load_weights(opened(made))
    for name, weight in loaded.items():
        if name.startswith("rope."):
            continue
        head, _, tail = name.partition(".experts.")
        names = [f"{head}.experts.{e}.{tail}" for e in range(4)] if tail else [name]
        wanted = b"".join(tensors[n].reshape(-1).view(torch.uint8).numpy().tobytes() for n in names)
        assert weight.reshape(-1).view(torch.uint8).numpy().tobytes() == wanted, name
    source = opened(made)
    assert source.weights().names() == list(loaded) == list(source.weight_types())
    assert [
        len(list(source.weights().parts(n))) for n in ("layers.0.ffn.experts.w2.scale", "norm.weight")
    ] == [4, 1]


# -- one model in many formats ----------------------------------------------------------------


def rename_scales(suffix: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for base in list(matrices(tensors)):
            tensors[f"{base}.{suffix}"] = tensors.pop(f"{base}.scale")

    return change


def widen_scales(tensors: Tensors) -> None:
    for base in matrices(tensors):
        tensors[f"{base}.scale"] = scale_values(tensors[f"{base}.scale"]).float()


def unsigned_fp4(tensors: Tensors) -> None:
    for name in [n for n, t in tensors.items() if t.dtype == torch.int8]:
        tensors[name] = tensors[name].view(torch.uint8)


def experts_as_fp8(tensors: Tensors) -> None:
    """The same values in FP8; exact, as the scales of a block span few octaves."""
    for base in [b for b in matrices(tensors) if EXPERT.fullmatch(b)]:
        values = stored_values(tensors, base)
        scale = scale_values(tensors[f"{base}.scale"])
        rows, cols = values.shape
        assert rows % 128 == cols % 128 == 0
        block = scale.view(rows // 128, 128, -1, 4).amax((1, 3)) / 64
        codes = values / block.repeat_interleave(128, 0).repeat_interleave(128, 1)
        tensors[f"{base}.weight"] = codes.to(torch.float8_e4m3fn)
        tensors[f"{base}.scale"] = (block.log2() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        assert torch.equal(stored_values(tensors, base), values)


def narrow_table(tensors: Tensors) -> None:
    name = "layers.0.ffn.gate.tid2eid"
    tensors[name] = tensors[name].int()


def wide_floats(tensors: Tensors) -> None:
    for name in [n for n, t in tensors.items() if t.dtype == torch.bfloat16]:
        tensors[name] = tensors[name].float()


SAME_MODEL = {
    "weight_scale": rename_scales("weight_scale"),
    "weight_scale_inv": rename_scales("weight_scale_inv"),
    "scales in f32": widen_scales,
    "FP4 as U8": unsigned_fp4,
    "FP8 experts": experts_as_fp8,
    "table in i32": narrow_table,
}


@pytest.mark.parametrize("change", SAME_MODEL.values(), ids=SAME_MODEL)
def test_formats_of_the_same_values_give_the_same_logits(
    made: Path, rewritten: Callable[..., Path], change: Callable[[Tensors], None]
) -> None:
    folder = rewritten(change)
    assert tensors_of(folder).keys() != tensors_of(made).keys() or any(
        a.dtype != b.dtype
        for a, b in zip(tensors_of(folder).values(), tensors_of(made).values(), strict=True)
    )
    for numerics in ("faithful", "fp32"):
        assert torch.equal(logits(folder, numerics), logits(made, numerics)), numerics


def test_fp4_stored_as_f4(made: Path, tmp_path: Path) -> None:
    """A dtype of safetensors that torch lacks, with the logical shape."""
    names = {
        torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e8m0fnu: "F8_E8M0", torch.int8: "F4",
    }  # fmt: skip
    entries = {}
    for name, tensor in tensors_of(made).items():
        shape = list(tensor.shape)
        if tensor.dtype == torch.int8:
            shape[-1] *= 2
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        entries[name] = (names[tensor.dtype], shape, data)
    write_shard(tmp_path / "model.safetensors", entries)
    (tmp_path / "config.json").write_text((made / "config.json").read_text())
    assert torch.equal(logits(tmp_path), logits(made))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dequantised_weights_give_the_same_model_in_fp32(
    made: Path, rewritten: Callable[..., Path], dtype: torch.dtype
) -> None:
    """All scales are powers of two, so bf16 holds every weight exactly."""

    def change(tensors: Tensors) -> None:
        for base in list(matrices(tensors)):
            tensors[f"{base}.weight"] = stored_values(tensors, base).to(dtype)
            del tensors[f"{base}.scale"]

    folder = rewritten(change)
    assert torch.equal(logits(folder, "fp32"), logits(made, "fp32"))
    # As floats they get no activation quantisation: another model in `faithful`.
    formats = {n.dtype for n in opened(folder).weight_types().values()}
    assert not formats & {DType.F8E4M3, DType.E2M1, DType.E8M0}
    ops = print_graph(opened(folder).graph(Variant(1, 1, 128)))
    assert "block=128" not in ops
    assert "block=64" in ops, "keys are rounded as ever"
    assert not torch.equal(logits(folder), logits(made))


def test_wider_floats_give_the_same_model_in_fp32(made: Path, rewritten: Callable[..., Path]) -> None:
    folder = rewritten(wide_floats)
    assert torch.equal(logits(folder, "fp32"), logits(made, "fp32"))
    assert opened(folder).weight_types()["norm.weight"].dtype is DType.F32


@pytest.mark.parametrize("stated", [None, "fp4", "fp8"])
def test_expert_dtype_of_the_configuration_decides_nothing(
    made: Path, rewritten: Callable[..., Path], stated: str | None
) -> None:
    folder = rewritten(lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    del config["expert_dtype"]
    if stated is not None:
        config["expert_dtype"] = stated
    (folder / "config.json").write_text(json.dumps(config))
    assert opened(folder).weight_types() == opened(made).weight_types()
    assert torch.equal(logits(folder), logits(made))


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_configuration_alone_assumes_the_release(
    tmp_path: Path, make_checkpoint: Callable[..., Path], experts: str, numerics: Numerics
) -> None:
    """The graph of a bare config.json is the one of its checkpoint."""
    folder = make_checkpoint(tmp_path / "c", CONFIG, experts=experts)
    bare, full = opened(folder / "config.json", numerics), opened(folder, numerics)
    assert bare.weight_types() == full.weight_types()
    variant = Variant(1, 1, 128)
    assert print_graph(bare.graph(variant)) == print_graph(full.graph(variant))
    with pytest.raises(CompilerBug):
        bare.weights()


def test_a_float_configuration_alone(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(tmp_path / "c", CONFIG, dense="bf16", experts="bf16")
    assert opened(folder / "config.json").weight_types() == opened(folder).weight_types()


@pytest.mark.parametrize(
    ("weight", "shape", "wanted"),
    [
        (DType.F8E4M3, (256, 512), (2, 4)),
        (DType.F8E4M3, (192, 320), (2, 3)),
        (DType.F8E4M3, (7, 129, 128), (7, 2, 1)),
        (DType.E2M1, (192, 320), (192, 10)),
        (DType.E2M1, (7, 5, 64), (7, 5, 2)),
    ],
)
def test_scale_shape(weight: DType, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert scale_shape(weight, shape) == wanted


# -- what does not fit ------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_misspelt_tensor_is_reported_from_both_sides(
    rewritten: Callable[..., Path], numerics: Numerics
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["hc_head_bse"] = tensors.pop("hc_head_base")

    assert problems(rewritten(change), numerics) == [
        "hc_head_base: is not in the checkpoint",
        "hc_head_bse: no parameter of the model has this name",
    ]


def test_a_misspelt_matrix_and_expert(rewritten: Callable[..., Path]) -> None:
    """What is there of a refused weight, and its sound neighbours, are not reported as left over."""

    def change(tensors: Tensors) -> None:
        tensors["layers.1.attn.wqa.weight"] = tensors.pop("layers.1.attn.wq_a.weight")
        tensors["layers.0.ffn.experts.4.w2.weight"] = tensors.pop("layers.0.ffn.experts.0.w2.weight")
        del tensors["layers.0.ffn.experts.2.w2.scale"]

    missing, left = "not in the checkpoint", "no parameter of the model has this name"
    wanted = {
        "layers.0.ffn.experts.0.w2.weight": missing,
        "layers.0.ffn.experts.2.w2.weight": "without a scale",
        "layers.1.attn.wq_a.weight": missing,
        "layers.0.ffn.experts.4.w2.weight": left,
        "layers.1.attn.wqa.weight": left,
    }
    found = problems(rewritten(change))
    assert [p.split(":")[0] for p in found] == list(wanted)
    assert all(text in p for text, p in zip(wanted.values(), found, strict=True))


def test_everything_that_does_not_fit_is_listed_together(rewritten: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["embed.weight"] = tensors["embed.weight"][:, :-1].contiguous()
        tensors["layers.0.attn.compressor.ape"] = tensors["layers.0.attn.compressor.ape"].T.contiguous()
        tensors["layers.1.attn.wkv.weight"] = tensors["layers.1.attn.wkv.weight"][:64].contiguous()
        tensors["layers.1.ffn.shared_experts.w1.scale"] = torch.ones(2, 2)
        tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].float()
        tensors["norm.weight"] = tensors["norm.weight"].long()
        del tensors["layers.1.ffn.gate.bias"]
        tensors["extra.weight"] = torch.ones(1)

    listed = problems(rewritten(change))
    found = {p.split(":")[0]: p for p in listed}
    assert len(found) == len(listed), "each tensor once"
    shapes = {
        "embed.weight": ("[32, 255]", "[32, 256]"),
        "layers.0.attn.compressor.ape": ("[256, 4]", "[4, 256]"),
        "layers.1.attn.wkv.weight": ("[64, 256]", "[128, 256]"),
        "layers.1.ffn.shared_experts.w1.scale": ("[2, 2]", "[1, 2]"),
        "layers.0.ffn.gate.tid2eid": ("F32", "I64"),
        "norm.weight": ("I64", "BF16"),
    }
    assert found.keys() == shapes.keys() | {"layers.1.ffn.gate.bias", "extra.weight"}
    for name, (stored, accepted) in shapes.items():
        assert stored in found[name].replace(",", ", ").replace("  ", " "), found[name]
        assert accepted in found[name], found[name]


def test_a_layer_too_many_or_too_few(made: Path, rewritten: Callable[..., Path]) -> None:
    folder = rewritten(lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    for layers, ratios, text in ((1, [4], "no parameter"), (3, [4, 0, 0], "not in the checkpoint")):
        changed = {**config, "num_hidden_layers": layers, "compress_ratios": ratios}
        (folder / "config.json").write_text(json.dumps(changed))
        found = problems(folder)
        assert {p.split(".")[1] for p in found} == {str(min(layers, 2))}
        assert all(text in p for p in found)
        assert len(found) >= 20


@pytest.mark.parametrize("numerics", list(Numerics))
def test_experts_in_different_formats(rewritten: Callable[..., Path], numerics: Numerics) -> None:
    def change(tensors: Tensors) -> None:
        base = "layers.1.ffn.experts.2.w3"
        tensors[f"{base}.weight"] = stored_values(tensors, base).bfloat16()
        del tensors[f"{base}.scale"]

    (found,) = problems(rewritten(change), numerics)
    assert found.startswith("layers.1.ffn.experts.w3: experts are stored in different formats")
    assert "bf16 with no scale" in found
    assert "e2m1 with e8m0 scale" in found


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("value", [-1, 4])
def test_a_table_that_names_no_expert(rewritten: Callable[..., Path], value: int, numerics: Numerics) -> None:
    name = "layers.0.ffn.gate.tid2eid"

    def change(tensors: Tensors) -> None:
        tensors[name][5, 1] = value

    weights = opened(rewritten(change), numerics).weights()
    with pytest.raises(
        BadInput, match=re.escape(f"holds {value} at index [5, 1], there are 4 experts")
    ) as caught:
        weights.load(name)
    assert caught.value.where == name


def test_a_float_with_a_scale_and_a_weight_with_two(rewritten: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        base = "layers.0.attn.wo_a"
        tensors[f"{base}.weight"] = stored_values(tensors, base).bfloat16()
        tensors["layers.1.attn.wq_b.weight_scale"] = tensors["layers.1.attn.wq_b.scale"].clone()
        tensors["layers.1.attn.wo_b.scale"] = tensors["layers.1.attn.wo_b.scale"].view(torch.uint8).bfloat16()

    refused = problems(rewritten(change))
    assert [p.split(":")[0] for p in refused] == [
        "layers.0.attn.wo_a.weight",
        "layers.1.attn.wq_b.weight",
        "layers.1.attn.wo_b.scale",
    ]
    assert "yet there is a scale" in refused[0]
    assert "2 scales" in refused[1]
    assert "F8_E8M0 or F32" in refused[2]


# -- MTP blocks -------------------------------------------------------------------------------


def test_mtp_tensors_are_left_out_and_said_so(made: Path, rewritten: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("layers.1.")]:
            tensors[name.replace("layers.1.", "mtp.0.")] = tensors[name].clone()
        tensors["mtp.0.enorm.weight"] = torch.ones(256).bfloat16()

    folder = rewritten(change)
    source = opened(folder)
    count = sum(n.startswith("mtp.") for n in tensors_of(folder))
    assert count > 50
    (note,) = [n for n in source.notes if "mtp" in n]
    assert str(count) in note
    assert "left out" in note
    assert source.weight_types() == opened(made).weight_types()
    assert torch.equal(logits(folder), logits(made))


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"o_lora_rank": 96}, "layers.0.attn.wo_b"),
        ({"q_lora_rank": 96}, "layers.0.attn.wq_b"),
        ({"moe_intermediate_size": 96}, "layers.0.ffn.experts.w2"),
        ({"hidden_size": 192}, "layers.0.attn.wq_a"),
    ],
)
def test_inputs_that_cannot_be_quantised_in_blocks(
    make_checkpoint: Callable[..., Path], tmp_path: Path, overrides: dict[str, int], names: str
) -> None:
    folder = make_checkpoint(tmp_path / "odd", overrides)
    with pytest.raises(ProblemList, match=rf"{names}: stored with scales.* no multiple of"):
        ModelSource.open(folder, Numerics.FAITHFUL)
    ModelSource.open(folder, Numerics.FP32)  # widened: nothing is quantised
