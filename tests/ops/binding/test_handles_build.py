"""Facts that _C reports about its build."""

from __future__ import annotations

import os

import pytest

import deepspeed_c
from deepspeed_c import _C
from tests import fresh


def test_build_info():
    info = _C.build_info()
    assert info["version"] == deepspeed_c.__version__
    assert info["torch_target_version"] == "0x020a000000000000"
    assert info["isas"] == [name for name, _ in _C.cpu_isas()]
    assert isinstance(info["cuda"], bool)
    assert info["compiler"] and info["torch_built_with"] and info["pybind11"]
    library = os.path.join(os.path.dirname(_C.__file__), "libdsc_cuda.so")
    assert os.path.exists(library) == info["cuda"]


def test_isa_can_be_forced_and_released():
    automatic = _C.cpu_isa()
    runnable = [name for name, is_runnable in _C.cpu_isas() if is_runnable]
    assert automatic in runnable and "scalar" in runnable
    try:
        for name in runnable:
            _C.cpu_isa_force(name)
            assert _C.cpu_isa() == name
        with pytest.raises((ValueError, NotImplementedError), match="mmx"):
            _C.cpu_isa_force("mmx")
        assert _C.cpu_isa() == runnable[-1]
    finally:
        _C.cpu_isa_force(None)
    assert _C.cpu_isa() == automatic


@pytest.mark.parametrize("name", ["mmx", "neon" if "avx2" in dict(_C.cpu_isas()) else "avx2"])
def test_an_isa_in_the_environment_that_cannot_run_is_an_error_of_each_operator(name):
    code = (
        "import torch, deepspeed_c.ops.flat as f\n"
        "for _ in range(2):\n"
        "    try: f.norm([torch.ones(3)])\n"
        "    except ValueError as e: print('refused', e)\n"
    )
    done = fresh.run(["-c", code], env={**os.environ, "DSC_CPU_ISA": name})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"refused DSC_CPU_ISA: is '{name}'") == 2, done.stdout


def test_an_isa_in_the_environment_is_the_one_that_runs():
    code = "import torch, deepspeed_c.ops.flat as f\nfrom deepspeed_c import _C\nf.norm([torch.ones(3)])\nprint(_C.cpu_isa())\n"
    done = fresh.run(["-c", code], env={**os.environ, "DSC_CPU_ISA": "scalar"}, check=True)
    assert done.stdout == "scalar\n", done.stdout
