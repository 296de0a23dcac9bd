"""`rewright doctor`: what it finds, and that nothing which is missing stops it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rewright.runtime
from rewright import __version__
from rewright.runtime import card, machine, machine_cards, machine_disk, machine_kernels, memory, processor

CODE = {"registers": 40, "shared": 1024, "spill_loads": 9, "spill_stores": 8, "stack": 16}


@pytest.fixture(autouse=True)
def no_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(card.EMULATE, raising=False)


def properties(name: str, major: int, minor: int, shared: int = 166912) -> SimpleNamespace:
    """What torch says of a card."""
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=108,
        total_memory=80 * 10**9,
        shared_memory_per_block_optin=shared,
    )


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts cards in the place of those that torch sees; all reach each other."""

    def put(*found: SimpleNamespace) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: found[i])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (75 * 10**9, 80 * 10**9))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    return put


class TestCommand:
    def test_lines(self, cli: Callable) -> None:
        code, stdout, stderr = cli("doctor")
        assert (code, stderr) == (0, "")
        words = [line.split() for line in stdout.splitlines()]
        assert words[0] == ["rewright", __version__]
        assert ["target", "host", "ok"] in [w[:3] for w in words]
        assert ["target", "sm80"] in [w[:2] for w in words]

    def test_json(self, cli: Callable) -> None:
        checks = json.loads(cli("doctor", "--json").stdout)
        assert all(set(check) == {"name", "ok", "text", "fix", "data"} for check in checks)
        found = {check["name"]: check["ok"] for check in checks}
        assert found.items() >= {"rewright": None, "reference": True, "target host": True}.items()
        assert {
            "python",
            "torch",
            "processor",
            "memory",
            "disk",
            "disk speed",
            "driver",
            "nvcc",
        } < found.keys()
        assert "kernels sm80" in found
        assert all(check["fix"] for check in checks if check["ok"] is False)

    def test_only_a_target_that_was_asked_for_is_4(self, cli: Callable, cards: Callable) -> None:
        cards()
        assert cli("doctor").code == 0
        assert cli("doctor", "--json").code == 0
        assert cli("doctor", "--target", "host").code == 0
        done = cli("doctor", "--target", "sm80")
        assert done.code == 4
        assert "target sm80: " in done.stderr
        assert "\n  -> " in done.stderr
        assert "target sm80" in done.stdout  # all that was found is there even so
        assert cli("doctor", "--target", "gpu").code == 2

    def test_an_emulated_card_runs(self, cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(card.EMULATE, "1")
        done = cli("doctor", "--target", "sm80")
        assert done.code == 0, done.stderr
        assert "emulated on this CPU" in done.stdout

    def test_a_machine_with_nothing(
        self, cli: Callable, cards: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No /proc, no driver, no compiler, no kernels, no folder."""
        absent = tmp_path / "absent"
        cards()
        for module, name in (
            (memory, "_MEMINFO"),
            (memory, "_STATUS"),
            (processor, "_CPUINFO"),
            (machine_cards, "_DRIVER"),
        ):
            monkeypatch.setattr(module, name, absent)
        monkeypatch.setattr(machine, "kernel_files", lambda: [])
        monkeypatch.setattr(machine_kernels, "_compilers", lambda: iter(()))
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        done = cli("doctor", "--json")
        assert done.code == 0, done.stderr
        found = {check["name"]: check for check in json.loads(done.stdout)}
        assert found["driver"]["text"].startswith("none")
        assert found["gpu"]["text"].startswith("none")
        assert found["kernels sm80"]["text"] == "none in this build"
        assert found["nvcc"]["text"].startswith("none")
        assert found["memory"]["data"]["available_bytes"] is None
        assert found["disk"]["text"].startswith("cannot be looked at") or not found["disk speed"]["ok"]

    def test_an_install_without_its_native_part(self, cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "rewright.runtime.machine", None)
        monkeypatch.delattr(rewright.runtime, "machine")
        done = cli("doctor")
        assert done.code == 0, done.stderr
        assert "cannot be loaded" in done.stdout
        assert "-> install Rewright again" in done.stdout
        assert cli("doctor", "--target", "sm80").code == 4


class TestDisk:
    def test_the_rate_is_bytes_over_seconds(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Written and synced before the clock stops, and read whole."""
        seen: list[tuple[str, int]] = []
        write, read, sync = os.write, os.read, os.fsync

        def counted(name: str, count: int) -> int:
            seen.append((name, count))
            return count

        times = iter([0.0, 2.0, 10.0, 10.5])

        def clock() -> float:
            seen.append(("clock", 0))
            return next(times)

        monkeypatch.setattr(os, "write", lambda f, block: counted("write", write(f, block)))
        monkeypatch.setattr(os, "fsync", lambda f: seen.append(("sync", 0)) or sync(f))
        monkeypatch.setattr(os, "read", lambda f, n: (d := read(f, n), counted("read", len(d)))[0])
        size = (9 << 20) + 5
        rates = machine_disk.disk_speed(tmp_path, size, clock)
        monkeypatch.undo()
        assert rates == (size / 2, size / 0.5)
        assert sum(n for name, n in seen if name == "write") == size
        assert sum(n for name, n in seen if name == "read") == size
        order = [name for i, (name, _) in enumerate(seen) if name == "clock" or seen[i - 1][0] != name]
        assert order == ["clock", "write", "sync", "clock", "clock", "read", "clock"]
        assert list(tmp_path.iterdir()) == []

    def test_what_cannot_be_written_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object, **options: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(machine_disk.tempfile, "TemporaryFile", refuse)
        free, speed = machine_disk.disk_checks(tmp_path)
        assert free.data["free_bytes"] > 0
        assert (speed.ok, speed.text) == (False, "no file can be written here (Read-only file system)")
        assert speed.fix

    def test_a_full_disk_is_left_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        monkeypatch.setattr(machine_disk, "disk_speed", lambda folder, size: pytest.fail("written"))
        assert machine_disk.disk_checks(tmp_path)[1].text.startswith("not measured")


class TestKernels:
    def record(self, folder: Path, text: str | None) -> list[Path]:
        (folder / "moe_moe.fatbin").touch()
        (folder / "nvcc.txt").write_text("13.0.88\n")
        if text is not None:
            (folder / "moe_moe.json").write_text(text)
        return [folder / "moe_moe.fatbin"]

    def test_figures_are_the_largest_of_a_file(self, tmp_path: Path) -> None:
        kernels = {
            "a": {"threads": 128, "blocks": 1, "code": {"sm_80": CODE, "sm_90": {**CODE, "spill_stores": 0}}},
            "b": {"code": {"sm_80": {**CODE, "registers": 255, "shared": 16}}},
        }
        text = json.dumps({"ptx": ["sm_80"], "kernels": kernels})
        everything, one = machine_kernels.kernel_checks(self.record(tmp_path, text))
        assert everything.text == "2 in 1 files by nvcc 13.0.88"
        assert one.name == "kernels moe_moe"
        assert one.text == (
            "2 kernels, PTX of sm_80; sm_80: up to 255 registers, 1,024 B shared, 8 B spilled; "
            "sm_90: up to 40 registers, 1,024 B shared"
        )
        assert one.data["kernels"] == kernels

    @pytest.mark.parametrize(
        "text",
        [None, "", "[]", "{}", '{"kernels": {}}', '{"kernels": 1, "ptx": []}', '{"kernels": {"a": {}}}'],
    )
    def test_a_record_that_is_none(self, tmp_path: Path, text: str | None) -> None:
        _, one = machine_kernels.kernel_checks(self.record(tmp_path, text))
        assert "no record of its code" in one.text

    def test_those_of_this_build(self) -> None:
        files = card.kernel_files()
        if not files:
            pytest.skip("built without nvcc")
        everything, *each = machine_kernels.kernel_checks(files)
        assert [check.name for check in each] == [f"kernels {path.stem}" for path in files]
        count = sum(len(json.loads(p.with_suffix(".json").read_text())["kernels"]) for p in files)
        assert everything.text.startswith(f"{count} in {len(files)} files")
        assert all(set(check.data["most"]) == {"sm_80", "sm_90"} for check in each)


class TestCompiler:
    def script(self, folder: Path, text: str) -> str:
        path = folder / "nvcc"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def test_the_version_is_the_compilers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.script(tmp_path, 'echo "Cuda compilation tools, release 12.3, V12.3.45"')
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDACXX", raising=False)
        assert machine_kernels.nvcc_check().text == f"12.3.45, {path}"

    @pytest.mark.parametrize("text", ["exit 3", "kill -9 $$"])
    def test_one_that_fails_is_said(self, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDACXX", self.script(tmp_path, text))
        assert "does not run" in machine_kernels.nvcc_check().text

    def test_one_that_is_not_there_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDACXX", str(tmp_path / "absent"))
        assert "does not run (FileNotFoundError)" in machine_kernels.nvcc_check().text


class TestCards:
    def test_the_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "version"
        path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.1\nGCC version: 12\n")
        monkeypatch.setattr(machine_cards, "_DRIVER", path)
        monkeypatch.setattr(machine_cards, "_driver_cuda", lambda: "12.9")
        assert machine_cards.driver_check().text == "NVIDIA UNIX x86_64 Kernel Module  575.1, for CUDA 12.9"

    def test_each_card_says_whether_kernels_run_on_it(self, cards: Callable) -> None:
        cards(properties("A100", 8, 0))
        (one,) = machine_cards.card_checks()
        assert one.ok is True
        assert one.text.startswith("A100, SM80, 108 multiprocessors, 80.0 GB, 75.0 free; runs sm_80 code")
        assert (one.data["capability"], one.data["free_bytes"]) == ([8, 0], 75 * 10**9)
        cards(properties("B200", 10, 0))
        assert "compiles the PTX" in machine_cards.card_checks()[0].text

    @pytest.mark.parametrize("found", [properties("T4", 7, 5), properties("A10", 8, 6, 101376)])
    def test_a_card_that_is_too_small_is_refused(self, cards: Callable, found: SimpleNamespace) -> None:
        cards(found)
        (one,) = machine_cards.card_checks()
        assert one.ok is False
        assert one.fix
        assert "need" in one.text or "made for" in one.text

    def test_a_lost_card_is_said(self, cards: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        def lost(ordinal: int) -> Any:
            raise RuntimeError("CUDA error: GPU is lost\nmore")

        cards(properties("A100", 8, 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
        (one,) = machine_cards.card_checks()
        assert (one.ok, one.text) == (False, "cannot be used (CUDA error: GPU is lost)")

    def test_cards_that_reach_each_other(self, cards: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        cards(*[properties("A100", 8, 0)] * 3)
        probed = []
        monkeypatch.setattr(machine_cards, "wrong_bytes", lambda a, b: probed.append((a.index, b.index)) or 0)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: {i, j} != {0, 2})
        *_, access, copies = machine_cards.card_checks()
        assert access.text == "0: - y n; 1: y - y; 2: n y -"
        assert access.data["matrix"] == [[True, True, False], [True, True, True], [False, True, True]]
        assert copies.ok is True
        assert sorted(probed) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]

    def test_copies_that_do_not_arrive(self, cards: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        def probe(source: torch.device, target: torch.device) -> int:
            if source.index == 1:
                raise RuntimeError("CUDA error: peer access is not supported")
            return 17

        cards(*[properties("A100", 8, 0)] * 2)
        monkeypatch.setattr(machine_cards, "wrong_bytes", probe)
        *_, copies = machine_cards.card_checks()
        assert copies.ok is False
        assert "0 to 1: 17 of 16,777,216 bytes are wrong" in copies.text
        assert "1 to 0: CUDA error: peer access is not supported" in copies.text
        assert copies.fix

    def test_the_probe_compares_what_it_wrote(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu = torch.device("cpu")
        assert machine_cards.wrong_bytes(cpu, cpu, 1000) == 0
        copy = torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: copy(self[:900], other[:900]))
        assert machine_cards.wrong_bytes(cpu, cpu, 1000) == 100
        monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)
        assert machine_cards.wrong_bytes(cpu, cpu, 1000) == 1000

    @pytest.mark.gpu
    def test_real_cards(self) -> None:
        assert all(check.ok is not False for check in machine_cards.card_checks())
