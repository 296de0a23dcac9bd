"""Opening a checkpoint folder: what is read, what is refused, and what is said about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rewright.frontend.checkpoint import Checkpoint
from rewright.frontend.config import load_config
from rewright.ir.errors import BadInput, ProblemList

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of one layer in three shards; not to be changed."""
    overrides = {"num_hidden_layers": 1, "n_routed_experts": 4, "vocab_size": 32}
    return make_checkpoint(tmp_path_factory.mktemp("made") / "ckpt", overrides, shards=3)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(made, tmp_path / "ckpt"))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def edit_shard(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def problems(folder: Path) -> list[str]:
    with pytest.raises(ProblemList) as caught:
        Checkpoint.open(folder)
    assert caught.value.where == str(folder)
    assert caught.value.exit_code == 3
    return caught.value.problems


def test_opening_reads_each_header_once_and_no_data(made: Path) -> None:
    checkpoint = Checkpoint.open(made)
    assert (checkpoint.stats.headers_read, checkpoint.stats.data_reads, checkpoint.stats.data_bytes) == (
        3,
        0,
        0,
    )
    assert checkpoint.config == load_config(made)[0]
    assert checkpoint.notes == []
    assert list(checkpoint.tensors) == sorted(json.loads((made / INDEX).read_text())["weight_map"])
    assert not checkpoint.mtp_tensors


def test_read_gives_the_stored_tensors(made: Path) -> None:
    checkpoint = Checkpoint.open(made)
    for shard in SHARDS:
        with safe_open(made / shard, "pt") as f:
            for name in f.keys():  # noqa: SIM118  (not a dict)
                expected = f.get_tensor(name)
                if expected.dtype == torch.int8:
                    expected = expected.view(torch.uint8)
                read = checkpoint.read(name)
                assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
                raw = expected.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert checkpoint.read_bytes(name) == raw
                assert read.reshape(-1).view(torch.uint8).numpy().tobytes() == raw
    assert checkpoint.stats.data_reads == 2 * len(checkpoint.tensors)
    assert checkpoint.stats.data_bytes == 2 * sum(t.nbytes for t in checkpoint.tensors.values())
    assert checkpoint.stats.headers_read == 3


def test_the_example_checkpoint_reads_clean(tiny_v4: Path) -> None:
    checkpoint = Checkpoint.open(tiny_v4)
    assert checkpoint.notes == []
    assert checkpoint.tensors["layers.0.ffn.gate.tid2eid"].shape == (4096, 4)
    assert checkpoint.stats.headers_read == 2
    for name in checkpoint.tensors:
        checkpoint.read(name)


def test_unknown_tensor(made: Path) -> None:
    with pytest.raises(BadInput, match="no tensor nope"):
        Checkpoint.open(made).read("nope")


@pytest.mark.parametrize(
    ("name", "position", "code"),
    [("layers.0.attn.wq_a.weight", 300, 0xFF), ("layers.0.attn.wq_a.scale", 1, 0xFF)],
)
def test_a_nan_in_the_data_is_found_on_read(folder: Path, name: str, position: int, code: int) -> None:
    info = Checkpoint.open(folder).tensors[name]
    with info.file.open("r+b") as f:
        f.seek(info.begin + position)
        f.write(bytes([code]))
    checkpoint = Checkpoint.open(folder)
    index = list(divmod(position, info.shape[1]))
    with pytest.raises(BadInput) as caught:
        checkpoint.read(name)
    assert caught.value.what == f"holds NaN (code 0xFF) at index {index}"
    assert caught.value.where == f"{name} ({info.file})"


def test_everything_wrong_with_the_shards_is_listed_together(folder: Path) -> None:
    def change_index(index: dict[str, Any]) -> None:
        weights = index["weight_map"]
        weights["norm.weight"] = SHARDS[1]  # it is in the first
        weights["nowhere"] = SHARDS[0]
        weights["elsewhere"] = "model-extra.safetensors"
        del weights["embed.weight"]
        index["metadata"]["total_size"] += 1

    def change_shard(tensors: dict[str, torch.Tensor]) -> None:
        tensors["head.weight"] = torch.zeros(4)  # also in the first

    size = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    edit_index(folder, change_index)
    edit_shard(folder / SHARDS[1], change_shard)
    assert problems(folder) == [
        "shard model-extra.safetensors is missing",
        f"tensor head.weight is in two shards: {SHARDS[0]} and {SHARDS[1]}",
        f"the index sends tensor norm.weight to {SHARDS[1]}, which lacks it (it is in {SHARDS[0]})",
        f"the index sends tensor nowhere to {SHARDS[0]}, which lacks it (no shard has it)",
        f"tensor embed.weight of {SHARDS[0]} is not in the index",
        f"the index says total_size {size + 1}, the tensors found have {size} bytes",
    ]


def test_broken_shards_are_listed_together(folder: Path) -> None:
    first, second, third = (folder / s for s in SHARDS)
    first.write_bytes(first.read_bytes()[:-16])
    second.write_bytes(b"<html>not found</html>")
    third.unlink()
    listed = problems(folder)
    assert listed[0].startswith(f"shard {SHARDS[0]}: truncated, 16 bytes missing")
    assert listed[1].startswith(f"shard {SHARDS[1]}: not a safetensors file")
    assert listed[2] == f"shard {SHARDS[2]} is missing"
    assert listed[3].startswith("the index says total_size")
    assert len(listed) == 4  # the tensors of broken shards are not accused one by one


def test_a_long_list_is_cut(folder: Path) -> None:
    count = len(Checkpoint.open(folder).tensors)
    edit_index(folder, lambda index: index.update(weight_map={"embed.weight": SHARDS[0]}))
    listed = problems(folder)
    assert len(listed) == 51
    assert listed[-1] == f"... and {count - 1 - 50} more of this kind"


def test_a_shard_that_the_index_does_not_name(folder: Path) -> None:
    save_file({"stray": torch.zeros(2)}, folder / "model-stray.safetensors")
    assert "tensor stray of model-stray.safetensors is not in the index" in problems(folder)


def test_other_safetensors_files_are_not_shards(folder: Path) -> None:
    save_file({"embed.weight": torch.zeros(2)}, folder / "golden.safetensors")
    assert Checkpoint.open(folder).stats.headers_read == 3


def test_index_without_total_size(folder: Path) -> None:
    edit_index(folder, lambda index: index.pop("metadata"))
    assert (
        Checkpoint.open(folder).tensors.keys()
        == json.loads((folder / INDEX).read_text())["weight_map"].keys()
    )


def test_missing_index_is_rebuilt_from_the_headers(folder: Path) -> None:
    with_index = Checkpoint.open(folder)
    (folder / INDEX).unlink()
    rebuilt = Checkpoint.open(folder)
    assert rebuilt.tensors == with_index.tensors
    assert rebuilt.fingerprint() == with_index.fingerprint()
    assert rebuilt.stats.headers_read == 3


def test_missing_index_with_one_shard(tmp_path: Path, made: Path) -> None:
    merged = {name: t for shard in SHARDS for name, t in load_file(made / shard).items()}
    save_file(merged, tmp_path / "model.safetensors")
    shutil.copy(made / "config.json", tmp_path)
    assert list(Checkpoint.open(tmp_path).tensors) == sorted(merged)


def test_missing_index_and_a_missing_shard(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / SHARDS[1]).unlink()
    assert problems(folder) == [f"shard {SHARDS[1]} is missing"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not an object"),
        ("{}", "without a usable weight_map"),
        ('{"weight_map": {"a": 1}}', "without a usable weight_map"),
        ('{"weight_map": {"a": ["x"]}}', "without a usable weight_map"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "without a usable weight_map"),
        ('{"weight_map": {"a": ".."}}', "without a usable weight_map"),
        ('{"weight_map": {}, "metadata": {"total_size": "7"}}', "without usable metadata"),
        ('{"weight_map": {}, "metadata": 7}', "without usable metadata"),
    ],
)
def test_wrong_index(folder: Path, text: str, message: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(BadInput, match=message) as caught:
        Checkpoint.open(folder)
    assert caught.value.where == str(folder / INDEX)


def test_no_shard_at_all(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(BadInput, match="no safetensors shard"):
        Checkpoint.open(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        Checkpoint.open(tmp_path / "nope")


def test_transformers_names_are_refused(folder: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(2)}, folder / "model-hf.safetensors")
    (folder / INDEX).unlink()
    with pytest.raises(BadInput, match=r"tensor model\.embed_tokens\.weight has a transformers name"):
        Checkpoint.open(folder)


def test_mtp_tensors_are_split_off_and_mentioned(folder: Path) -> None:
    (folder / INDEX).unlink()
    before = Checkpoint.open(folder).tensors
    mtp = {"mtp.0.enorm.weight": torch.ones(4), "mtp.0.e_proj.weight": torch.ones(2, 2)}
    save_file(mtp, folder / "model-mtp.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors == before
    assert checkpoint.mtp_tensors.keys() == mtp.keys()
    assert checkpoint.notes == [f"{folder}: 2 tensors of MTP blocks (mtp.*, 32 bytes) are left out"]
    assert checkpoint.read("mtp.0.enorm.weight").tolist() == [1, 1, 1, 1]


def test_notes_of_the_configuration_are_kept(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "novelty": 1}))
    (note,) = Checkpoint.open(folder).notes
    assert note.endswith("unknown keys were ignored: novelty")


def test_fingerprint(folder: Path) -> None:
    first = Checkpoint.open(folder).fingerprint()
    assert len(first) == 64
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert Checkpoint.open(folder).fingerprint() == first  # the order of keys says nothing
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 20000}))
    assert Checkpoint.open(folder).fingerprint() != first
    (folder / "config.json").write_text(json.dumps(config))
    (folder / INDEX).unlink()
    edit_shard(folder / SHARDS[2], lambda tensors: tensors.update(extra=torch.zeros(1)))
    assert Checkpoint.open(folder).fingerprint() != first


# 72,000 tensors in 46 shards, 18 GB that take no room: the files are holes after their headers.
BIG_TENSORS, BIG_SHARDS, BIG_SHAPE = 72_000, 46, (256, 1024)


@pytest.fixture(scope="module")
def big(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big")
    shutil.copy(made / "config.json", folder)
    names = [f"layers.{i % 43}.ffn.experts.{i}.w1.weight" for i in range(BIG_TENSORS)]
    size = BIG_SHAPE[0] * BIG_SHAPE[1]
    weight_map = {}
    for shard in range(BIG_SHARDS):
        file = f"model-{shard + 1:05d}-of-{BIG_SHARDS:05d}.safetensors"
        part = names[shard::BIG_SHARDS]
        entries = {
            name: {"dtype": "F8_E4M3", "shape": BIG_SHAPE, "data_offsets": [i * size, (i + 1) * size]}
            for i, name in enumerate(part)
        }
        header = json.dumps(entries).encode()
        with (folder / file).open("wb") as f:
            f.write(len(header).to_bytes(8, "little") + header)
            f.truncate(8 + len(header) + len(part) * size)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": size * BIG_TENSORS}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def process_counter(file: str, field: str) -> int:
    """A number that the kernel keeps about this process."""
    (line,) = [x for x in Path("/proc/self", file).read_text().splitlines() if x.startswith(f"{field}:")]
    return int(line.split()[1])


def test_a_release_sized_checkpoint_is_opened_from_its_headers(big: Path) -> None:
    checkpoint = Checkpoint.open(big)
    assert len(checkpoint.tensors) == BIG_TENSORS
    stats = checkpoint.stats
    assert (stats.headers_read, stats.data_reads, stats.data_bytes) == (BIG_SHARDS, 0, 0)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs the counters of Linux")
def test_the_kernel_agrees_that_only_headers_are_read(big: Path) -> None:
    allowed = sum((big / name).stat().st_size for name in ("config.json", INDEX))
    for path in big.glob("*.safetensors"):
        with path.open("rb") as f:
            allowed += 8 + int.from_bytes(f.read(8), "little")
    read, resident = process_counter("io", "rchar"), process_counter("status", "VmRSS")
    checkpoint = Checkpoint.open(big)
    assert process_counter("io", "rchar") - read < allowed + 64 * 1024
    assert process_counter("status", "VmRSS") - resident < 200 * 1024  # KiB
    assert len(checkpoint.tensors) == BIG_TENSORS
