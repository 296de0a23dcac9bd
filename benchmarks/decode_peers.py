"""Others that run V4's layers on the same card: transformers eager, and dequantise-then-matmul in torch.

A peer gives the microseconds of a layer of each kind and of the rest of a step.
"""

from __future__ import annotations

import functools
import inspect
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from device_bench import node_us, plan_step
from torch import Tensor, nn
from torch.nn import functional as F

from rewright.frontend.config import ModelConfig
from rewright.ir.launch_bytes import ops_of
from rewright.ir.op import registry
from rewright.ir.types import DType, ValueType
from rewright.random_model import Maker, reduced

KINDS = (0, 4, 128)
WARMUP, STEPS = 3, 10
_LEFT_OUT = ("quantization_config", "expert_dtype", "num_nextn_predict_layers", "model_type")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def transformers_model(config: ModelConfig, experts: int, device: str, implementation: str) -> nn.Module:
    """`DeepseekV4ForCausalLM` of the configuration in bf16, random weights, all routing spread."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    given = {k: v for k, v in config.to_dict().items() if k not in _LEFT_OUT}
    given["n_routed_experts"] = min(experts, config.n_routed_experts)
    made = DeepseekV4Config(**given, attn_implementation="eager", experts_implementation=implementation)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = DeepseekV4ForCausalLM(made)
    finally:
        torch.set_default_dtype(before)
    model = model.eval().requires_grad_(False)
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in kept for part in name.split(".")):
            tensor.data = tensor.data.float()
        if name.endswith("tid2eid"):
            keys = torch.rand(len(tensor), given["n_routed_experts"], device=tensor.device)
            tensor.copy_(keys.topk(tensor.shape[1], dim=-1).indices)
    return model


class _Marks:
    """Events at the beginning and end of every layer and of the whole model."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList):
        self.events: dict[Any, list[Any]] = defaultdict(list)
        for key, module in [("whole", model), *enumerate(layers)]:
            module.register_forward_pre_hook(lambda *_, k=key: self._mark(k))
            module.register_forward_hook(lambda *_, k=key: self._mark(k))

    def _mark(self, key: Any) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events[key].append(event)

    def us(self, key: Any) -> list[float]:
        """Microseconds between the two marks of each call."""
        events = self.events[key]
        return [a.elapsed_time(b) * 1e3 for a, b in zip(events[::2], events[1::2], strict=True)]


def decode_steps(
    model: nn.Module, context: int, batch: int, steps: int, device: str, vocabulary: int
) -> Tensor:
    """Prefill all but the last tokens of a context, then decode; the last logits."""
    cached = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.randint(0, vocabulary, (batch, context), device=device)
    # (some versions hand f32 streams to bf16 matrices)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        out = model(input_ids=ids[:, : context - steps], use_cache=True, logits_to_keep=1)
        for i in range(context - steps, context):
            out = model(input_ids=ids[:, i : i + 1], use_cache=True, **{cached: getattr(out, cached)})
    return out.logits


def transformers_eager(
    config: ModelConfig, context: int, batch: int, experts: int, implementation: str = "eager"
) -> dict[str, Any]:
    """transformers' own model: one layer of each kind and the head."""
    import transformers

    small = reduced(config, KINDS, hash_layers=1)
    model = transformers_model(small, experts, "cuda", implementation)
    decode_steps(model, 64, batch, WARMUP, "cuda", config.vocab_size)
    marks = _Marks(model, model.model.layers)  # type: ignore[union-attr,arg-type]
    steps = WARMUP + STEPS
    logits = decode_steps(model, context, batch, steps, "cuda", config.vocab_size)
    torch.cuda.synchronize()
    if not logits.isfinite().all():
        raise RuntimeError("logits are not finite")
    us = {f"t{kind}": statistics.median(marks.us(i)[-STEPS:]) for i, kind in enumerate(KINDS)}
    us["rest"] = statistics.median(marks.us("whole")[-STEPS:]) - sum(us.values())
    return {
        "us": us,
        "notes": f"transformers {transformers.__version__}, bf16 weights, experts_implementation "
        f"{implementation}, one layer of each kind, {min(experts, config.n_routed_experts)} experts held; "
        "time from events around each layer, waits for the host included",
    }


@functools.cache
def _e2m1_values(device: torch.device) -> Tensor:
    """bf16 value of each e2m1 code; kept, because a CUDA graph cannot record the copy."""
    return torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.bfloat16, device=device)


def dequantize(codes: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    """bf16 matrices of e4m3 codes with scales per 128 x 128, or of packed e2m1 with scales per 1 x 32."""
    factor = (scale.view(torch.uint8).int() << 23).view(torch.float32).bfloat16()
    if dtype is DType.F8E4M3:
        n, k = codes.shape
        blocks = codes.bfloat16().view(n // 128, 128, k // 128, 128)
        return (blocks * factor[:, None, :, None]).view(n, k)
    values = _e2m1_values(codes.device)
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).int()
    dense = values[pairs].view(*scale.shape, 32)
    return (dense * factor[..., None]).flatten(-2)


def dequantise_then_matmul(config: ModelConfig, context: int, batch: int, experts: int) -> dict[str, Any]:
    """Every matrix of a layer dequantised to bf16 and multiplied, a layer in a CUDA graph; nothing else."""
    small = reduced(config, (0, *KINDS), hash_layers=1)
    plan = plan_step(small, context, batch).plan
    types = {n: p.type for n, p in plan.values.items() if p.space == "weight"}
    maker = Maker("cuda", 5, experts=config.n_routed_experts)
    us: dict[str, float] = {}
    for layer, kind in enumerate(KINDS, start=1):
        work = _matmuls(plan, types, f"layers.{layer}.", maker, batch)

        def run(work: list[Callable[[], None]] = work) -> None:
            for one in work:
                one()

        us[f"t{kind}"] = node_us([run] * 4)
        del work, run
        torch.cuda.empty_cache()
    head = maker.make("head.weight", types)
    x = torch.empty(batch, head.shape[1], dtype=torch.bfloat16, device="cuda").normal_()
    us["rest"] = node_us([_product(x, head, None, DType.BF16)] * 4)
    return {
        "us": us,
        "notes": "torch, matrix products of the layers and the head only, weights dequantised to bf16 before "
        "each; a layer of each kind in a CUDA graph; expected number of distinct experts",
    }


def _matmuls(
    plan: Any, types: Mapping[str, ValueType], prefix: str, maker: Maker, batch: int
) -> list[Callable[[], None]]:
    """The products of a layer."""
    work: list[Callable[[], None]] = []
    for launch in plan.launches:
        for planned in ops_of(launch):
            if planned.op not in ("linear", "grouped_linear", "expert_linear"):
                continue
            named = dict(zip(registry()[planned.op].operands, planned.reads, strict=True))
            name, scale_name = named["weight"], named["scale"]
            if name is None or not name.startswith(prefix):
                continue
            type = types[name]
            x = torch.empty(batch, type.shape[-1], dtype=torch.bfloat16, device=maker.device).normal_()
            weight = maker.make(name, types)
            scale = None if scale_name is None else maker.make(scale_name, types)
            if planned.op == "expert_linear":
                count, k = type.shape[0], _choices(plan, named["experts"])
                reached = round(count * (1 - (1 - k / count) ** batch))
                chosen = torch.randperm(count)[:reached].tolist()
                work += [
                    _product(x, weight[e], None if scale is None else scale[e], type.dtype) for e in chosen
                ]
            else:
                work.append(_product(x, weight, scale, type.dtype))
    return work


def _choices(plan: Any, ids: str | None) -> int:
    assert ids is not None
    return plan.values[ids].type.shape[-1]


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, dtype: DType) -> Callable[[], None]:
    def run() -> None:
        F.linear(x, weight if scale is None else dequantize(weight, scale, dtype))

    return run


PEERS: dict[str, Callable[[ModelConfig, int, int, int], dict[str, Any]]] = {
    "transformers, eager": transformers_eager,
    "transformers, grouped_mm experts": lambda *a: transformers_eager(*a, implementation="grouped_mm"),
    "torch, dequantise then matmul": dequantise_then_matmul,
}
