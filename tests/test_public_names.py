"""Holds the public names still, and sees that each can be had: growing the surface is a decision and not an accident."""

from __future__ import annotations

import subprocess
import sys

import pytest

import deepspeed_c
from deepspeed_c import errors

NAMES = {
    "initialize",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "init_distributed",
    "add_config_arguments",
    "get_accelerator",
    "install_as_deepspeed",
}
MODULES = {"accelerator", "comm", "config", "errors", "lr_schedules", "ops", "utils", "zero"}

OPS = {
    "aio": {"AsyncIOBuilder", "PinnedPool", "aio_handle", "as_aio_error", "backends", "unnamed_file"},
    "adam": {"DeepSpeedCPUAdam", "FusedAdam"},
    "adagrad": {"DeepSpeedCPUAdagrad"},
    "lamb": {"FusedLamb"},
    "lion": {"DeepSpeedCPULion", "FusedLion"},
    "muon": {"Muon", "newton_schulz"},
    "sgd": {"FusedSGD"},
    "flat": {"Norm", "cast", "clip_", "norm", "reduce_", "scale_", "zero_"},
    "q8": {"BLOCK_ELEMS", "dequantize", "n_scales", "quantize_", "scale_name"},
    "optim": {"BIAS_CORRECTION", "MAXIMIZE", "NESTEROV", "Call", "FusedOptimizer", "NormedOptimizer"},
}


def test_names_are_these():
    assert set(deepspeed_c.__all__) == {"__version__"} | NAMES | MODULES | set(errors.__all__)


def test_every_error_is_public():
    for name in errors.__all__:
        assert getattr(deepspeed_c, name) is getattr(errors, name)


@pytest.mark.parametrize("name", sorted(NAMES | MODULES))
def test_name_can_be_imported_in_a_fresh_interpreter(name):
    code = (
        f"from deepspeed_c import {name} as x; import deepspeed_c, types; assert deepspeed_c.{name} is x\n"
        "print('module' if isinstance(x, types.ModuleType) else 'callable' if callable(x) else type(x))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("module" if name in MODULES else "callable")


def test_function_wins_over_the_module_of_its_name():
    code = (
        "from deepspeed_c.initialize import initialize\n"
        "import deepspeed_c.initialize\n"
        "assert deepspeed_c.initialize is initialize, deepspeed_c.initialize\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", OPS)
def test_ops_names(module):
    assert set(getattr(deepspeed_c.ops, module).__all__) == OPS[module]


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'inizialize'"):
        _ = deepspeed_c.inizialize


def test_dir_lists_what_is_public():
    assert set(deepspeed_c.__all__) <= set(dir(deepspeed_c))
