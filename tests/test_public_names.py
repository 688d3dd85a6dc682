"""Pins the public names and checks that each can be imported, so that the public interface does not grow by accident."""

from __future__ import annotations

import pytest

import deepspeed_c
from deepspeed_c import errors
from tests import fresh

NAMES = {
    "initialize", "DeepSpeedEngine", "DeepSpeedOptimizer", "init_distributed", "add_config_arguments",
    "get_accelerator", "install_as_deepspeed", "tp_model_init", "default_inference_config", "init_inference",
    "InferenceEngine", "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer",
}  # fmt: skip
MODULES = {"accelerator", "checkpointing", "comm", "config", "errors", "lr_schedules", "ops", "utils", "zero"}

# DeepSpeed's builder class -> its NAME, and our module with the operator or None if we do not have the operator.
BUILDERS: dict[str, tuple[str, str | None]] = {
    "AsyncIOBuilder": ("async_io", "aio"), "CCLCommBuilder": ("deepspeed_ccl_comm", None),
    "CPUAdagradBuilder": ("cpu_adagrad", "adagrad"), "CPUAdamBuilder": ("cpu_adam", "adam"),
    "CPULionBuilder": ("cpu_lion", "lion"), "DeepCompileBuilder": ("dc", None),
    "EvoformerAttnBuilder": ("evoformer_attn", None), "FPQuantizerBuilder": ("fp_quantizer", None),
    "FusedAdamBuilder": ("fused_adam", "adam"), "FusedLambBuilder": ("fused_lamb", "lamb"),
    "FusedLionBuilder": ("fused_lion", "lion"), "GDSBuilder": ("gds", None),
    "InferenceBuilder": ("transformer_inference", None), "InferenceCoreBuilder": ("inference_core_ops", None),
    "InferenceCutlassBuilder": ("cutlass_ops", None), "NotImplementedBuilder": ("deepspeed_not_implemented", None),
    "PinMemoryBuilder": ("pin_memory", None), "QuantizerBuilder": ("quantizer", None),
    "RaggedOpsBuilder": ("ragged_device_ops", None), "RaggedUtilsBuilder": ("ragged_ops", None),
    "RandomLTDBuilder": ("random_ltd", None), "ShareMemCommBuilder": ("deepspeed_shm_comm", None),
    "SparseAttnBuilder": ("sparse_attn", None), "SpatialInferenceBuilder": ("spatial_inference", None),
    "StochasticTransformerBuilder": ("stochastic_transformer", None), "TransformerBuilder": ("transformer", None),
    "UtilsBuilder": ("utils", "utils"),
}  # fmt: skip

OPS = {
    "aio": {"AsyncIOBuilder", "PinnedPool", "aio_handle", "as_aio_error", "backends", "reserve_space", "unnamed_file"},
    "adam": {"DeepSpeedCPUAdam", "FusedAdam"}, "adagrad": {"DeepSpeedCPUAdagrad"}, "lamb": {"FusedLamb"},
    "lion": {"DeepSpeedCPULion", "FusedLion"}, "muon": {"Muon", "newton_schulz"}, "sgd": {"FusedSGD"},
    "flat": {"Norm", "cast", "norm", "reduce_", "scale_", "zero_"},
    "q8": {"BLOCK_ELEMS", "dequantize", "n_scales", "quantize_", "scale_name"},
    "op_builder": {"ALL_OPS", "OpBuilder", "CUDAOpBuilder", "TorchCPUOpBuilder", "probe_is_compatible", *BUILDERS},
    "optim": {"BIAS_CORRECTION", "BY_TYPE", "MAXIMIZE", "NESTEROV", "Call", "FusedOptimizer", "NormedOptimizer"},
}  # fmt: skip


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
    done = fresh.run(["-c", code], has_package=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("module" if name in MODULES else "callable")


def test_function_wins_over_the_module_of_its_name():
    code = (
        "from deepspeed_c.initialize import initialize\n"
        "import deepspeed_c.initialize\n"
        "assert deepspeed_c.initialize is initialize, deepspeed_c.initialize\n"
    )
    done = fresh.run(["-c", code], has_package=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", OPS)
def test_ops_names(module):
    # The names in the file are ours only. The attribute also has DeepSpeed's names, for `import *`.
    assert set(vars(getattr(deepspeed_c.ops, module))["__all__"]) == OPS[module]


@pytest.mark.parametrize("name", BUILDERS)
def test_builder_says_what_is_here(name):
    ops = deepspeed_c.ops
    operator, module = BUILDERS[name]
    builder = getattr(ops.op_builder, name)()
    assert (builder.NAME, builder.name) == (operator, operator)
    assert builder.is_compatible() is ops.__compatible_ops__[operator] is (module is not None)
    if module is None:
        with pytest.raises(errors.BuildError, match=operator):
            builder.load()
    elif name == "UtilsBuilder":
        import torch

        parts = [torch.arange(6.0).view(2, 3), torch.arange(4.0)]
        flat = builder.load().flatten(parts)
        assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
        again = builder.load().unflatten(flat, parts)
        assert [each.tolist() for each in again] == [each.tolist() for each in parts]
    else:
        loaded = builder.load(verbose=False)
        assert (loaded if name != "AsyncIOBuilder" else ops.aio) is getattr(ops, module)


def test_every_builder_has_an_entry():
    names = {operator for operator, _ in BUILDERS.values()}
    assert names == deepspeed_c.ops.__compatible_ops__.keys() == deepspeed_c.ops.op_builder.ALL_OPS.keys()


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'inizialize'"):
        _ = deepspeed_c.inizialize


def test_dir_lists_what_is_public():
    assert set(deepspeed_c.__all__) <= set(dir(deepspeed_c))
