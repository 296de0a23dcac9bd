"""Opening a compiled model: what is damaged or foreign is refused in words, before anything runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import rewright
from rewright.ir.errors import BadInput, MachineError, ProblemList
from rewright.ir.manifest import parse_manifest
from rewright.runtime.load import Artifact

SHARD = "weights-00001-of-00001.safetensors"
GRAPH = "graphs/layout/decode-b1-c1024.txt"
PLAN = "plan-decode-b1-c1024.json"


@pytest.fixture
def copy(compiled_tiny: Path, tmp_path: Path) -> Path:
    """A compiled model to spoil."""
    return Path(shutil.copytree(compiled_tiny, tmp_path / "copy"))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads((folder / "manifest.json").read_text())
    change(value)
    (folder / "manifest.json").write_text(json.dumps(value))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Exchange a file and say so in the manifest, as another checkpoint would have it."""
    (folder / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(folder, lambda m: m["files"].update({name: entry}))


def test_opens(compiled_tiny: Path) -> None:
    artifact = Artifact.open(compiled_tiny)
    assert artifact.eos == {1}
    assert artifact.bos == 0
    assert artifact.generation_defaults()["do_sample"] is True
    assert set(artifact.weights()) == set(artifact.manifest.tensors)
    assert rewright.load(compiled_tiny).limits.max_batch == 4


def test_not_a_compiled_model(tmp_path: Path, tiny_v4: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (tmp_path, file, tiny_v4):
        with pytest.raises(BadInput, match="not a compiled model") as caught:
            Artifact.open(path)
        assert "compile-model" in str(caught.value)


@pytest.mark.parametrize(
    "name", [SHARD, GRAPH, PLAN, "tokenizer.json", "generation_config.json", "chat.json"]
)
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(ProblemList) as caught:
        Artifact.open(copy)
    assert caught.value.problems == [f"{name} is missing"]


@pytest.mark.parametrize("name", [SHARD, GRAPH, PLAN, "tokenizer.json"])
def test_a_cut_file_is_named(copy: Path, name: str) -> None:
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-16])
    with pytest.raises(ProblemList) as caught:
        Artifact.open(copy)
    assert caught.value.problems == [f"{name} has {len(data) - 16} bytes instead of {len(data)}"]


@pytest.mark.parametrize("name", [GRAPH, PLAN, "tokenizer.json", "chat.json"])
def test_an_edited_file_is_named(copy: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(ProblemList) as caught:
        Artifact.open(copy)
    assert caught.value.problems == [f"{name} was changed after it was compiled"]


def test_all_damage_is_listed_together(copy: Path) -> None:
    (copy / "chat.json").unlink()
    (copy / "tokenizer.json").write_text("{}")
    (copy / GRAPH).unlink()
    (copy / GRAPH).mkdir()
    with pytest.raises(ProblemList) as caught:
        Artifact.open(copy)
    assert len(caught.value.problems) == 3
    assert "compile the model again" in str(caught.value)


def test_a_shard_with_a_broken_header(copy: Path) -> None:
    with (copy / SHARD).open("r+b") as file:
        file.write(b"\xff" * 16)
    with pytest.raises(BadInput, match="cannot be read") as caught:
        rewright.load(copy)
    assert caught.value.where == str(copy / SHARD)


def test_a_shard_without_one_of_its_weights(copy: Path) -> None:
    tensors = load_file(copy / SHARD)
    del tensors["norm.weight"]
    save_file(tensors, copy / SHARD)
    size = (copy / SHARD).stat().st_size
    edit_manifest(copy, lambda m: m["files"][SHARD].update(bytes=size))
    with pytest.raises(ProblemList) as caught:
        rewright.load(copy)
    assert caught.value.problems == ["norm.weight"]


def test_a_graph_that_does_not_parse(copy: Path) -> None:
    replace_file(copy, GRAPH, b"graph x\nstage traced\nir 1\n%y : f32[1] = no_such_op(%x)\n")
    artifact = Artifact.open(copy)
    variant = next(v for v, path in artifact.manifest.variants.items() if path == GRAPH)
    with pytest.raises(BadInput, match="decode-b1-c1024"):
        artifact.graph(variant)


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5, "4", None, 1.5, []])
def test_another_format_is_refused(copy: Path, version: object) -> None:
    edit_manifest(copy, lambda m: m.update(format=version))
    with pytest.raises(BadInput, match=r"artifact format .*; this Rewright reads 4"):
        Artifact.open(copy)


def test_a_path_without_anything_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none: no such file or folder"):
        Artifact.open(tmp_path / "none")


def test_another_target_is_refused(copy: Path) -> None:
    edit_manifest(copy, lambda m: m.update(target="tpu"))
    with pytest.raises(BadInput, match="target 'tpu'; this Rewright runs host and sm80"):
        Artifact.open(copy)


def test_kernels_of_another_version_are_refused(copy: Path) -> None:
    edit_manifest(copy, lambda m: m.update(abi="0" * 64))
    with pytest.raises(BadInput, match="kernels of another version"):
        Artifact.open(copy)


@pytest.mark.parametrize("member", ["arena_bytes", "state_bytes"])
def test_less_memory_than_the_plans_need_is_refused(copy: Path, member: str) -> None:
    edit_manifest(copy, lambda m: m["memory"].update({member: 128}))
    with pytest.raises(BadInput, match="arena or state is too small"):
        rewright.load(copy).prefill(0, [1])


def test_more_memory_than_the_machine_has_is_refused(copy: Path) -> None:
    edit_manifest(copy, lambda m: m["memory"].update(arena_bytes=1 << 60))
    with pytest.raises(MachineError, match=r"need 1,152,\d\d\d,[\d,]+ bytes, this machine has"):
        rewright.load(copy)


def test_a_plan_that_calls_an_unknown_kernel_is_refused_in_words(copy: Path) -> None:
    """Edited together with its hash, so that only the native loader can tell."""
    replace_file(copy, PLAN, (copy / PLAN).read_bytes().replace(b"host.embed", b"host.embad"))
    engine = rewright.load(copy)
    engine.prefill(0, list(range(130)))  # beyond the smaller variant's context
    with pytest.raises(BadInput, match=r"host\.embad.*no such kernel"):
        engine.decode({0: 1})


def test_a_weight_of_another_size_than_the_plan_says_is_refused(copy: Path) -> None:
    tensors = load_file(copy / SHARD)
    tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()
    save_file(tensors, copy / SHARD)
    size = (copy / SHARD).stat().st_size
    edit_manifest(copy, lambda m: m["files"][SHARD].update(bytes=size))
    with pytest.raises(BadInput, match=r"weight norm\.weight has \d+ bytes, the plan says \d+"):
        rewright.load(copy).prefill(0, [1])


def at(path: str) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """Finds a place in the manifest: its parent, and its key."""

    def find(value: Any) -> tuple[Any, Any]:
        *parents, last = [int(p) if p.isdigit() else p for p in path.split("/")]
        for key in parents:
            value = value[key]
        return value, last

    return find


FIELDS = {
    "model": ("object", [None, [], "x"]),
    "model/vocab_size": ("integer", ["1", None, 1.0, True]),
    "model/bos_token_id": ("integer", [None]),
    "model/eos_token_id": ("integer", ["1"]),
    "checkpoint": ("object", ["x"]),
    "checkpoint/fingerprint": ("string", [1, None]),
    "target": ("string", [1]),
    "abi": ("string", [None, 1]),
    "memory": ("object", [[], 5]),
    "memory/arena_bytes": ("integer", ["5", 1.0]),
    "memory/state_bytes": ("integer", [None, True]),
    "options": ("object", [[]]),
    "options/numerics": ("string", [None]),
    "options/max_context": ("integer", ["1024", True]),
    "options/max_batch": ("integer", [4.0]),
    "options/chunk": ("integer", [None]),
    "variants": ("list", [{}, None, "x"]),
    "variants/0": ("object", [[], None]),
    "variants/0/tokens": ("integer", ["1"]),
    "variants/0/batch": ("integer", [None]),
    "variants/0/capacity": ("integer", [[]]),
    "variants/0/all_positions": ("true or false", [0, "no", None]),
    "variants/0/graph": ("string", [1]),
    "tensors": ("object", [[], None]),
    "tensors/norm.weight": ("string", [1, {}]),
    "layouts": ("object", [[], "tile16"]),
    "layouts/head.weight": ("string", [16, None]),
    "files": ("object", [[], None]),
    "files/tokenizer.json": ("object", [[], 5]),
    "files/tokenizer.json/bytes": ("integer", ["5"]),
    "files/tokenizer.json/sha256": ("string", [5]),
}


@pytest.fixture
def manifest(compiled_tiny: Path) -> dict[str, Any]:
    return json.loads((compiled_tiny / "manifest.json").read_text())


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_of_the_wrong_kind_is_named(manifest: dict[str, Any], path: str) -> None:
    kind, wrong = FIELDS[path]
    parent, key = at(path)(manifest)
    for value in wrong:
        parent[key] = value
        with pytest.raises(BadInput, match=f"{key}.* is not an? {kind}|{key}.* is not {kind}") as caught:
            parse_manifest(json.dumps(manifest), "m.json")
        assert caught.value.where == "m.json"


@pytest.mark.parametrize(
    "path", sorted(FIELDS.keys() - {"variants/0", "tensors/norm.weight", "layouts/head.weight"})
)
def test_a_missing_field_is_named(manifest: dict[str, Any], path: str) -> None:
    parent, key = at(path)(manifest)
    del parent[key]
    if path == "files/tokenizer.json":
        parse_manifest(json.dumps(manifest), "m.json")  # a model may have no tokenizer
        return
    with pytest.raises(BadInput, match=f"has no {key}"):
        parse_manifest(json.dumps(manifest), "m.json")


def test_other_nonsense_in_a_manifest(manifest: dict[str, Any]) -> None:
    def refuse(message: str, **changes: Any) -> None:
        with pytest.raises(BadInput, match=message):
            parse_manifest(json.dumps(manifest | changes), "m.json")

    refuse("no variant", variants=[])
    refuse("no stage", stages=[])
    refuse("graphs/painted/decode-b1-c128.txt is not among its files", stages=["painted"])
    refuse("max_batch is negative", options={**manifest["options"], "max_batch": -1})
    refuse("arena_bytes is negative", memory={"arena_bytes": -1, "state_bytes": 0})
    refuse("other.safetensors is not among its files", tensors={"a": "other.safetensors"}, layouts={})
    refuse("head.weight has a layout 'tile99' that is not known", layouts={"head.weight": "tile99"})
    refuse("nobody has a layout and is not among its tensors", layouts={"nobody": "tile16"})
    files = {name: entry for name, entry in manifest["files"].items() if name != GRAPH}
    refuse(f"{GRAPH} is not among its files", files=files)
    files = {name: entry for name, entry in manifest["files"].items() if name != PLAN}
    refuse(f"{PLAN} is not among its files", files=files)


def test_a_manifest_that_is_no_object() -> None:
    for text in ("", "{", "[" * 100_000):
        with pytest.raises(BadInput, match="not valid JSON"):
            parse_manifest(text, "m.json")
    for text in ("[]", "null", '"x"', "1", "NaN", "{}"):
        with pytest.raises(BadInput, match="artifact format None"):
            parse_manifest(text, "m.json")


def test_a_manifest_that_is_no_text(copy: Path) -> None:
    (copy / "manifest.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(BadInput, match="cannot be read"):
        Artifact.open(copy)


def test_a_manifest_survives_being_written(compiled_tiny: Path) -> None:
    text = (compiled_tiny / "manifest.json").read_text()
    assert parse_manifest(text, "m.json").to_text() == text


class TestWithoutTextFiles:
    """A checkpoint may come without tokenizer, generation defaults and chat constants."""

    @pytest.fixture
    def bare(self, copy: Path) -> Artifact:
        for name in ("tokenizer.json", "generation_config.json", "chat.json"):
            (copy / name).unlink()
            edit_manifest(copy, lambda m, name=name: m["files"].pop(name))
        return Artifact.open(copy)

    def test_what_is_left(self, bare: Artifact) -> None:
        assert bare.generation_defaults() == {}
        assert bare.eos == {1}
        assert bare.chat_encoder().encode([{"role": "user", "content": "hi"}]).endswith("</think>")
        with pytest.raises(BadInput, match=r"without a tokenizer.*\n.*tokenizer.json"):
            bare.tokenizer()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"temperature": "hot"}', "temperature cannot be 'hot'"),
        ('{"top_p": [1]}', r"top_p cannot be \[1\]"),
        ('{"temperature": true}', "temperature cannot be True"),
        ('{"do_sample": 1}', "do_sample cannot be 1"),
        ('{"eos_token_id": "1"}', "eos_token_id cannot be '1'"),
        ('{"eos_token_id": [1, null]}', "eos_token_id cannot be"),
    ],
)
def test_unusable_generation_defaults(copy: Path, text: str, message: str) -> None:
    replace_file(copy, "generation_config.json", text.encode())
    with pytest.raises(BadInput, match=message) as caught:
        Artifact.open(copy).generation_defaults()
    assert caught.value.where == str(copy / "generation_config.json")


def test_generation_defaults_that_say_nothing(copy: Path) -> None:
    replace_file(copy, "generation_config.json", b'{"temperature": null, "eos_token_id": null}')
    artifact = Artifact.open(copy)
    assert artifact.generation_defaults() == {}
    assert artifact.eos == {1}


def test_several_end_tokens(copy: Path) -> None:
    replace_file(copy, "generation_config.json", b'{"eos_token_id": [1, 2]}')
    assert Artifact.open(copy).eos == {1, 2}
