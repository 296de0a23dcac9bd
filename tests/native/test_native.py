"""The compiled extension, without a GPU."""

import ast
import platform
from pathlib import Path

import pytest

import rewright.runtime
from rewright.runtime import _native

CPUINFO = Path("/proc/cpuinfo")
# Name in our list -> the kernel's flags that it needs, per architecture.
NEEDS = {
    "x86_64": {"avx2+fma": {"avx2", "fma"}, "avx512f": {"avx512f"}},
    "aarch64": {"neon": {"asimd"}},
}


def kernel_flags() -> set[str]:
    for line in CPUINFO.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    pytest.skip("/proc/cpuinfo lists no features")


@pytest.mark.skipif(not CPUINFO.exists(), reason="no /proc/cpuinfo on this system")
@pytest.mark.skipif(platform.machine() not in NEEDS, reason="no list of features for this processor")
def test_cpu_features_are_those_the_kernel_reports():
    flags = kernel_flags()
    expected = [name for name, needs in NEEDS[platform.machine()].items() if needs <= flags]
    assert _native.cpu_features() == expected


def test_stub_and_extension_have_the_same_names():
    stub = Path(rewright.runtime.__file__).with_name("_native.pyi").read_text(encoding="utf-8")
    body = ast.parse(stub).body
    declared = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    constants = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    declared |= {target.id for target in constants if isinstance(target, ast.Name)}
    assert declared == {name for name in dir(_native) if not name.startswith("_")}
