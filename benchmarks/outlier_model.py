"""A checkpoint with one channel far larger than all others, made of one that has none.

In the routed experts of every layer one row of the up projection is multiplied by a power of two and the
matching column of the down projection divided by it, so that the values between them differ and little else
does. Up projections have a scale for each row and stay exact; down projections are stored as FP8, in which a
column can be that small: codes that it would take below the least one lose their last bits. Clamping of the
gated activation, which would cut the channel off, is taken out. The channel is the one that is largest on
given texts, so that what is left is small beside it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rewright.calibration.model import CalibrationModel
from rewright.calibration.run import Watch, run_texts
from rewright.calibration.sites import find_sites
from rewright.calibration.statistics import SiteStatistics
from rewright.ir.formats import E4M3_MAX, block_scale_exponent, dequantize_weight

FACTOR = 512
"""The power of two next to 500."""

NO_CLAMP = 1e30
_UP = re.compile(r"layers\.(\d+)\.ffn\.experts\.\d+\.w3\.scale")
_DOWN = re.compile(r"(layers\.(\d+)\.ffn\.experts\.\d+\.w2)\.weight")
_SITE = "ffn.experts.w2.x"


def largest_channels(checkpoint: Path, text: Path) -> dict[int, int]:
    """By layer the channel between the products of the routed experts that gets largest on texts."""
    model = CalibrationModel.open(checkpoint)
    sites = [site for site in find_sites(model.graph) if site.kind == _SITE]
    seen = {site.layer: SiteStatistics(site) for site in sites}
    texts = [encoded.ids for encoded in model.read_texts(text)]
    watch = Watch(sites, lambda site, rows: seen[site.layer].add(rows))
    run_texts(model.graph, model.weights, texts, watch, lambda count: None)
    return {layer: int(statistics.channel_amax.argmax()) for layer, statistics in seen.items()}


def write_outlier_model(checkpoint: Path, out: Path, channels: dict[int, int]) -> None:
    """Copy a checkpoint with FP4 experts into a new folder; `channels` are the outliers by layer."""
    out.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, out)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"swiglu_limit": NO_CLAMP, "expert_dtype": "fp8"}
    (out / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for path in sorted(checkpoint.glob("model*.safetensors")):
        tensors |= load_file(path)
    for name, tensor in list(tensors.items()):
        if match := _UP.fullmatch(name):
            tensors[name] = _row_times(tensor, channels[int(match[1])])
        elif match := _DOWN.fullmatch(name):
            scale, channel = f"{match[1]}.scale", channels[int(match[2])]
            tensors[name], tensors[scale] = _as_fp8(_column_divided(tensor, tensors[scale], channel))
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(tensors, out / "model.safetensors")


def _row_times(scale: Tensor, channel: int) -> Tensor:
    """Scales e8m0[N,K/32] of a matrix whose row `channel` is `FACTOR` times as large."""
    codes = scale.view(torch.uint8).clone()
    codes[channel] += FACTOR.bit_length() - 1
    return codes.view(scale.dtype)


def _column_divided(weight: Tensor, scale: Tensor, channel: int) -> Tensor:
    """f32[N,K] of a packed e2m1 matrix with column `channel` divided by `FACTOR`."""
    values = dequantize_weight(weight.view(torch.uint8), scale)
    values[:, channel] /= FACTOR
    return values


def _as_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3[N,K] and e8m0[N/128,K/128] of f32[N,K], N and K multiples of 128."""
    blocks = values.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))  # [N/128,128,K/128,128]
    exponent = block_scale_exponent(blocks.abs().amax((1, 3)), "e4m3")
    scaled = torch.ldexp(blocks, -exponent[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
    return codes, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
