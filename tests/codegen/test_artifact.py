"""Writing compiled models: equal bytes for equal inputs, and never anything half done."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rewright.codegen import artifact, shards
from rewright.codegen.artifact import new_artifact
from rewright.compiler import CompileOptions, compile_model
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, CompilerBug, MachineError, UsageError
from rewright.ir.manifest import MANIFEST_NAME, parse_manifest
from rewright.ir.types import DType, ValueType, type_of
from rewright.runtime.load import Artifact

OPTIONS = CompileOptions(max_context=128, target="host")


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, one with compression; no text files."""
    overrides = {"num_hidden_layers": 2, "compress_ratios": [0, 4], "num_hash_layers": 1}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "ckpt", overrides, shards=2)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


class TestContents:
    def test_two_compilations_give_the_same_bytes(
        self, checkpoint: Path, tmp_path: Path, run_cli: Callable
    ) -> None:
        """In another folder, another process, and with other hashes of strings."""
        copy = shutil.copytree(checkpoint, tmp_path / "copy of the checkpoint")
        compile_model(checkpoint, tmp_path / "a", OPTIONS)
        compile_model(copy, tmp_path / "deeper" / "b", OPTIONS)
        arguments = ("compile-model", checkpoint, "-o", tmp_path / "c", "--max-context", "128")
        done = run_cli(*arguments, env={"PYTHONHASHSEED": "12345"})
        assert done.code == 0, done.stderr
        first = tree(tmp_path / "a")
        assert first == tree(tmp_path / "deeper" / "b") == tree(tmp_path / "c")

    def test_options_and_weights_change_the_bytes(self, checkpoint: Path, tmp_path: Path) -> None:
        compile_model(checkpoint, tmp_path / "a", OPTIONS)
        compile_model(checkpoint, tmp_path / "b", CompileOptions(Numerics.FP32, max_context=128))
        a, b = tree(tmp_path / "a"), tree(tmp_path / "b")
        assert a.keys() == b.keys()
        same = {name for name in a if a[name] == b[name]}
        assert same == set()

    def test_every_file_is_listed_with_size_and_hash(self, compiled_tiny: Path) -> None:
        found = tree(compiled_tiny)
        manifest = parse_manifest(found.pop(MANIFEST_NAME).decode(), MANIFEST_NAME)
        assert manifest.files.keys() == found.keys()
        for name, data in found.items():
            assert manifest.files[name].bytes == len(data)
            assert manifest.files[name].sha256 == hashlib.sha256(data).hexdigest()

    def test_no_path_and_no_time(self, compiled_tiny: Path, tiny_v4: Path) -> None:
        text = (compiled_tiny / MANIFEST_NAME).read_text()
        assert str(tiny_v4) not in text
        assert str(compiled_tiny) not in text
        assert {*json.loads(text)} == {
            "format",
            "model",
            "checkpoint",
            "target",
            "abi",
            "memory",
            "options",
            "stages",
            "variants",
            "tensors",
            "layouts",
            "files",
        }

    def test_the_fingerprint_follows_the_checkpoint(self, checkpoint: Path, tmp_path: Path) -> None:
        def fingerprint(folder: Path) -> str:
            compile_model(folder, tmp_path / "out", OPTIONS, force=True)
            return Artifact.open(tmp_path / "out").manifest.fingerprint

        copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
        first = fingerprint(copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
        assert fingerprint(copy) != first

    def test_notes_tell_what_is_missing(self, checkpoint: Path, out: Path) -> None:
        notes = compile_model(checkpoint, out, OPTIONS).notes
        assert any("has no tokenizer.json" in note for note in notes)
        assert "tokenizer.json" not in tree(out)

    def test_progress_goes_up_to_the_total(self, checkpoint: Path, out: Path) -> None:
        told: dict[str, list[tuple[int, int]]] = {}
        compile_model(
            checkpoint,
            out,
            OPTIONS,
            progress=lambda what, done, total: told.setdefault(what, []).append((done, total)),
        )
        assert list(told) == ["rewriting graphs", "packing weights"]
        for steps in told.values():
            assert steps == sorted(steps)
            assert steps[-1][0] == steps[-1][1]


class TestShards:
    def test_types_are_those_of_the_graph(self, compiled_tiny: Path, tiny_v4: Path) -> None:
        source = ModelSource.open(tiny_v4, Numerics.FAITHFUL, max_context=1024, max_batch=4)
        found = {name: type_of(t) for name, t in Artifact.open(compiled_tiny).weights().items()}
        assert found == {name: _as_loaded(t) for name, t in source.weight_types().items()}

    def test_experts_are_stacked_in_order(self, compiled_tiny: Path, tiny_v4: Path) -> None:
        stored: dict[str, Tensor] = {}
        for shard in tiny_v4.glob("*-of-*.safetensors"):
            stored |= load_file(shard)
        weights = Artifact.open(compiled_tiny).weights_by_row()
        for layer in (0, 5):
            for part in ("w1.weight", "w1.scale", "w2.weight", "w2.scale", "w3.weight", "w3.scale"):
                base = f"layers.{layer}.ffn.experts"
                parts = [stored[f"{base}.{e}.{part}"].view(torch.uint8) for e in range(16)]
                assert torch.equal(weights[f"{base}.{part}"].view(torch.uint8), torch.stack(parts))

    def test_every_other_weight_is_the_stored_one(self, checkpoint: Path, out: Path) -> None:
        compile_model(checkpoint, out, OPTIONS)
        stored: dict[str, Tensor] = {}
        for shard in checkpoint.glob("*-of-*.safetensors"):
            stored |= load_file(shard)
        weights = Artifact.open(out).weights_by_row()
        shared = weights.keys() & stored.keys()
        assert len(shared) > 30
        for name in shared:
            assert torch.equal(weights[name].view(torch.uint8), stored[name].view(torch.uint8)), name

    def test_weights_are_aligned_in_the_file(self, compiled_tiny: Path) -> None:
        (shard,) = compiled_tiny.glob("*.safetensors")
        _require_aligned(shard)

    def test_odd_sizes_come_last(self, tmp_path: Path) -> None:
        tensors = {"a": torch.zeros(3), "b": torch.ones(64), "c": torch.zeros(5, dtype=torch.int64)}
        tensors |= {"d": torch.arange(32, dtype=torch.int32), "e": torch.tensor(2.0)}
        types = {name: type_of(t) for name, t in tensors.items()}
        where, files = shards.write_shards(tmp_path, types, _Whole(tensors), lambda count: None)
        (shard,) = files
        assert where == dict.fromkeys(tensors, shard)
        _require_aligned(tmp_path / shard)
        assert _order(tmp_path / shard) == ["b", "d", "c", "a", "e"], (
            "wide elements first: each is aligned to its own"
        )
        for name, tensor in load_file(tmp_path / shard).items():
            assert torch.equal(tensor, tensors[name])

    def test_a_shard_is_closed_before_it_grows_too_large(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compile_model(checkpoint, tmp_path / "one", OPTIONS)
        limit = 300_000
        monkeypatch.setattr(shards, "SHARD_BYTES", limit)
        compile_model(checkpoint, tmp_path / "many", OPTIONS)
        files = sorted((tmp_path / "many").glob("*.safetensors"))
        assert len(files) > 3
        assert [f.name for f in files] == [
            f"weights-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
        ]
        for file in files:
            _require_aligned(file)
            with safe_open(file, "pt") as opened:
                sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
            assert sum(sizes) <= limit or len(sizes) == 1
        one, many = (Artifact.open(tmp_path / name).weights() for name in ("one", "many"))
        assert one.keys() == many.keys()
        assert all(torch.equal(one[n].view(torch.uint8), many[n].view(torch.uint8)) for n in one)

    def test_one_part_is_in_memory_at_a_time(self, tmp_path: Path) -> None:
        alive: set[int] = set()
        most = 0

        class Reader:
            def parts(self, name: str) -> Iterator[Tensor]:
                nonlocal most
                for number in range(4):
                    memory = np.full(256, number, np.float32)  # outlives the tensor that shares it
                    alive.add(number)
                    weakref.finalize(memory, alive.discard, number)
                    part = torch.from_numpy(memory)
                    most = max(most, len(alive))
                    del memory
                    yield part
                    del part

        types = {name: ValueType(DType.F32, (4, 256)) for name in ("a", "b", "c")}
        _, files = shards.write_shards(tmp_path, types, Reader(), lambda count: None)
        assert most == 1
        (shard,) = files
        assert load_file(tmp_path / shard)["b"][:, 0].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("count", [3, 5])
    def test_parts_that_do_not_make_up_the_weight_are_our_bug(self, tmp_path: Path, count: int) -> None:
        types = {"a": ValueType(DType.F32, (4,))}
        with pytest.raises(CompilerBug, match=r"weight a is .* with 16 bytes"):
            shards.write_shards(tmp_path, types, _Whole({"a": torch.zeros(count)}), lambda _: None)


class TestNothingHalfDone:
    def test_a_nan_in_a_weight(self, checkpoint: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(checkpoint, tmp_path / "bad"))
        shard = next(s for s in sorted(copy.glob("*.safetensors")) if "norm.weight" in load_file(s))
        tensors = load_file(shard)
        tensors["norm.weight"][3] = float("nan")
        save_file(tensors, shard, metadata={"format": "pt"})
        with pytest.raises(BadInput, match=r"norm\.weight"):
            compile_model(copy, tmp_path / "out", OPTIONS)
        assert names(tmp_path) == ["bad"]

    @pytest.mark.parametrize("stage", ["rewriting graphs", "packing weights"])
    def test_ctrl_c(self, checkpoint: Path, out: Path, stage: str) -> None:
        def interrupt(what: str, done: int, total: int) -> None:
            if what == stage and done > total // 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compile_model(checkpoint, out, OPTIONS, progress=interrupt)
        assert names(out.parent) == []

    def test_kill(self, checkpoint: Path, out: Path) -> None:
        """What a killed run leaves is no compiled model, and in nobody's way."""
        script = (
            "import os, signal, sys\n"
            "from rewright.compiler import CompileOptions, compile_model\n"
            "def die(what, done, total):\n"
            "    if what == 'packing weights' and done > total // 2:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "compile_model(sys.argv[1], sys.argv[2], CompileOptions(max_context=128), progress=die)\n"
        )
        done = subprocess.run([sys.executable, "-c", script, checkpoint, out], check=False)
        assert done.returncode == -signal.SIGKILL
        assert names(out.parent) == ["out.partial"]
        with pytest.raises(BadInput, match="not a compiled model"):
            Artifact.open(out.with_name("out.partial"))
        compile_model(checkpoint, out, OPTIONS)
        assert names(out.parent) == ["out"]
        Artifact.open(out)

    def test_too_little_space(self, checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(artifact.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
        with pytest.raises(MachineError, match=r"needs [\d,]+ bytes, the disk has 1,000,000 free") as caught:
            compile_model(checkpoint, out, OPTIONS)
        assert caught.value.exit_code == 4
        assert names(out.parent) == []

    def test_a_disk_that_is_full_after_all(
        self, checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def write(path: Path, *rest: object) -> None:
            path.write_bytes(b"some of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        monkeypatch.setattr(shards, "_write_shard", write)
        with pytest.raises(MachineError, match="No space left"):
            compile_model(checkpoint, out, OPTIONS)
        assert names(out.parent) == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(MachineError, match="cannot be written"):
            replace(tmp_path / "locked" / "out")

    def test_a_parent_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(MachineError, match="cannot be written"):
            replace(tmp_path / "file" / "out")
        assert (tmp_path / "file").read_text() == "x"

    def test_a_tokenizer_of_another_model(self, checkpoint: Path, tmp_path: Path, tiny_v4: Path) -> None:
        copy = Path(shutil.copytree(checkpoint, tmp_path / "bad"))
        shutil.copy(tiny_v4 / "tokenizer.json", copy)
        with pytest.raises(BadInput, match="holds token id 4095, the model has 512"):
            compile_model(copy, tmp_path / "out", OPTIONS)
        assert names(tmp_path) == ["bad"]


def fake_model(folder: Path, content: str = "old") -> Path:
    """What counts as a compiled model when it comes to overwriting."""
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_text(content)
    (folder / "weights").write_text(content)
    return folder


def replace(out: Path, *, force: bool = True, error: BaseException | None = None) -> None:
    """Put a new model in place of an old one, or fail before it is complete."""
    with new_artifact(out, force=force, needed_bytes=0) as folder:
        (folder / MANIFEST_NAME).write_text("new")
        if error is not None:
            raise error


class TestReplacing:
    def test_an_existing_model_needs_force(self, out: Path, checkpoint: Path) -> None:
        before = tree(fake_model(out))
        with pytest.raises(UsageError, match="exists") as caught:
            compile_model(checkpoint, out, OPTIONS)
        assert "--force" in str(caught.value)
        assert tree(out) == before
        replace(out)
        assert tree(out) == {MANIFEST_NAME: b"new"}
        assert names(out.parent) == ["out"]

    def test_what_is_no_compiled_model_is_never_replaced(self, tmp_path: Path, tiny_v4: Path) -> None:
        (tmp_path / "file").write_text("precious")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "thesis.txt").write_text("precious")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        before = tree(tmp_path)
        for name in ("file", "folder", "link"):
            with pytest.raises(UsageError, match="exists and is not a compiled model"):
                compile_model(tiny_v4, tmp_path / name, OPTIONS, force=True)
        assert tree(tmp_path) == before
        assert names(tmp_path) == ["file", "folder", "link"]

    def test_an_empty_folder_may_be_filled(self, out: Path) -> None:
        out.mkdir()
        replace(out, force=False)
        assert names(out.parent) == ["out"]

    def test_a_link_to_a_model_stays_a_link(self, tmp_path: Path) -> None:
        fake_model(tmp_path / "model-1")
        (tmp_path / "current").symlink_to("model-1")
        replace(tmp_path / "current")
        assert (tmp_path / "current").is_symlink()
        assert tree(tmp_path / "model-1") == {MANIFEST_NAME: b"new"}
        assert names(tmp_path) == ["current", "model-1"]

    @pytest.mark.parametrize(
        ("error", "seen"),
        [
            (ValueError("bug"), ValueError),
            (KeyboardInterrupt(), KeyboardInterrupt),
            (OSError(errno.EIO, os.strerror(errno.EIO)), MachineError),
        ],
    )
    def test_a_failure_leaves_the_old_model(
        self, out: Path, error: BaseException, seen: type[BaseException]
    ) -> None:
        before = tree(fake_model(out))
        with pytest.raises(seen):
            replace(out, error=error)
        assert tree(out) == before
        assert names(out.parent) == ["out"]

    def test_a_failure_of_the_last_step_leaves_the_old_model(
        self, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = tree(fake_model(out))
        rename = os.rename

        def fail_on_partial(source: Path, target: Path) -> None:
            if Path(source).name == "out.partial":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
            rename(source, target)

        monkeypatch.setattr(artifact.os, "rename", fail_on_partial)
        with pytest.raises(MachineError, match="writing failed"):
            replace(out)
        assert tree(out) == before
        assert names(out.parent) == ["out"]

    @pytest.mark.parametrize("content", [(), (".lock", "weights"), (MANIFEST_NAME, "weights")])
    def test_leftovers_of_a_killed_run_go(self, out: Path, content: tuple[str, ...]) -> None:
        partial = out.with_name("out.partial")
        partial.mkdir(parents=True)
        for name in content:
            (partial / name).write_text("half")
        replace(out, force=False)
        assert names(out.parent) == ["out"]
        assert tree(out) == {MANIFEST_NAME: b"new"}

    def test_a_model_set_aside_by_a_killed_run_comes_back(self, out: Path) -> None:
        before = tree(fake_model(out.with_name(".out.replaced")))
        with pytest.raises(UsageError, match="exists"):
            replace(out, force=False)
        assert tree(out) == before
        assert names(out.parent) == ["out"]

    def test_a_partial_folder_of_somebody_else_stays(self, out: Path) -> None:
        partial = out.with_name("out.partial")
        partial.mkdir(parents=True)
        (partial / "thesis.txt").write_text("precious")
        with pytest.raises(UsageError, match="not made by a compilation"):
            replace(out)
        assert tree(partial) == {"thesis.txt": b"precious"}

    def test_two_compilations_of_one_model_do_not_mix(self, out: Path) -> None:
        with (
            new_artifact(out, force=True, needed_bytes=0) as folder,
            pytest.raises(UsageError, match="another compilation is writing"),
        ):
            replace(out)
        assert not folder.exists()


class _Whole:
    """A reader of weights of one part each."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors

    def parts(self, name: str) -> Iterator[Tensor]:
        yield self._tensors[name]


def _as_loaded(type: ValueType) -> ValueType:
    return type_of(torch.empty(type.storage_shape, dtype=type.dtype.torch_dtype))


def _header(shard: Path) -> tuple[int, dict[str, dict]]:
    """Where the data begins, and the entries."""
    data = shard.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return 8 + size, json.loads(data[8 : 8 + size])


def _order(shard: Path) -> list[str]:
    entries = _header(shard)[1]
    return sorted(entries, key=lambda name: entries[name]["data_offsets"])


def _require_aligned(shard: Path) -> None:
    begin, entries = _header(shard)
    spans = sorted(entry["data_offsets"] for entry in entries.values())
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert begin + spans[-1][1] == shard.stat().st_size
    regular = [start for start, end in spans if (end - start) % 128 == 0]
    assert regular
    assert all((begin + start) % 128 == 0 for start in regular)
