"""A name of DeepSpeed that is not built can be imported, compared and used in annotations. Any other use raises."""

from __future__ import annotations

import copy
import importlib
import pickle
import typing
from typing import Dict, Optional  # noqa: UP035  (programs write it so)

import pytest

from deepspeed_c.compat.alias.modules import ABSENT
from deepspeed_c.compat.alias.unbuilt import Unbuilt, unbuilt
from deepspeed_c.compat.alias.upstream import upstream
from deepspeed_c.errors import FeatureError, MissingNameError

MOE = unbuilt("deepspeed.moe.layer", "MoE")
CONVOLUTION = unbuilt("deepspeed.compression.basic_layer", "Conv2dLayer_Compress")
AGENT = unbuilt("deepspeed.elasticity.config", "ElasticityError")


def subclass():
    class Mine(MOE):
        pass


def subclass_beside_another():
    class Mine(dict, MOE):
        pass


def decorate():
    @CONVOLUTION
    def f():
        pass


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda: MOE(hidden_size=4), "deepspeed.moe.layer.MoE: was called"),
        (lambda: CONVOLUTION({}, "x"), "deepspeed.compression.basic_layer.Conv2dLayer_Compress: was called"),
        (subclass, "deepspeed.moe.layer.MoE: was subclassed"),
        (subclass_beside_another, "deepspeed.moe.layer.MoE: was subclassed"),
        (decorate, "deepspeed.compression.basic_layer.Conv2dLayer_Compress: was called"),
        (lambda: list(MOE), r"MoE: was asked for \[0\]"),
        (lambda: 1 in MOE, r"MoE: was asked for \[0\]"),
        (lambda: MOE.forward, "deepspeed.moe.layer.MoE.forward: is not part"),
    ],
)
def test_a_use_raises_and_says_what_to_do(use, what) -> None:
    with pytest.raises(FeatureError, match=what) as raised:
        use()
    assert "not part of this version of deepspeed_c" in raised.value.what
    assert raised.value.fix == ABSENT["deepspeed.moe" if "MoE" in what else "deepspeed.compression"]


def test_nothing_is_an_instance_of_it() -> None:
    for x in (1, MOE, subclass):
        assert not isinstance(x, MOE) and not isinstance(x, (MOE, CONVOLUTION))
    assert isinstance(1, (MOE, int)) and isinstance(1, MOE | int)
    assert not issubclass(int, MOE) and issubclass(bool, (MOE, int))


def test_annotations() -> None:
    def f(a: MOE, b: MOE | None, c: Optional[MOE], d: Dict[str, MOE], e: None | MOE, g: int | MOE) -> MOE: ...  # noqa: UP006, UP045

    hints = typing.get_type_hints(f, {**globals()})
    assert hints["a"] is hints["return"] is MOE and hints["d"].__args__ == (str, MOE)
    assert all(set(hints[name].__args__) == {MOE, type(None)} for name in "bce")
    assert hints["g"].__args__ == (int, MOE) and list[MOE].__args__ == (MOE,)


def test_attributes() -> None:
    builder = unbuilt("deepspeed.ops.op_builder.inference_cutlass_builder", "InferenceCutlassBuilder")
    assert isinstance(builder, Unbuilt)
    assert (builder.NAME, builder.BUILD_VAR) == ("cutlass_ops", "DS_BUILD_CUTLASS_OPS")
    assert not hasattr(builder, "load") and not hasattr(MOE, "__wrapped__")
    with pytest.raises(MissingNameError):
        _ = builder.load
    assert (MOE.__name__, MOE.__qualname__, MOE.__module__) == ("MoE", "MoE", "deepspeed.moe.layer")
    assert bool(MOE) and callable(MOE) and len({MOE, CONVOLUTION, MOE}) == 2
    assert repr(MOE) == "<class deepspeed.moe.layer.MoE of DeepSpeed, not part of this version of deepspeed_c>"


def test_copies_and_pickles_are_the_object_itself() -> None:
    assert copy.deepcopy({"a": MOE})["a"] is MOE and copy.copy(MOE) is MOE
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps((MOE, CONVOLUTION), protocol)) == (MOE, CONVOLUTION)


def test_exceptions_are_classes_that_can_be_caught() -> None:
    worse = unbuilt("deepspeed.elasticity.config", "ElasticityIncompatibleWorldSize")
    assert issubclass(worse, AGENT) and issubclass(AGENT, Exception)
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018
        except worse:
            pytest.fail("nobody raises it")


def test_constants_are_their_values() -> None:
    assert unbuilt("deepspeed.elasticity.constants", "MAX_ACCEPTABLE_BATCH_SIZE") == "max_train_batch_size"
    assert unbuilt("deepspeed.inference.v2.modules.configs.attention_configs", "MaskingType").causal == "causal"
    with pytest.raises(MissingNameError, match=r"deepspeed\.moe\.layer\.nothing"):
        unbuilt("deepspeed.moe.layer", "nothing")


def test_table_is_whole() -> None:
    table = upstream()
    n_names = sum(len(table.public_names(module)) for module in table.modules)
    assert len(table.modules) > 700 and n_names > 9000, (len(table.modules), n_names)
    assert all(
        name.kind in {"module", "class", "exception", "function", "constant"}
        for names in table.modules.values()
        for name in names.values()
    )


def test_one_module_under_two_paths_says_that_it_lacks_a_name():
    """DeepSpeed's package and its module are one module of ours. A missing name once made the two ask each other
    without end."""
    package = importlib.import_module("deepspeed_c.profiling.flops_profiler")
    module = importlib.import_module("deepspeed_c.profiling.flops_profiler.profiler")
    assert package is module and package.FlopsProfiler.__module__ == "deepspeed_c.profile.flops"
    with pytest.raises(MissingNameError, match="MODULE_HOOK_MAPPING"):
        _ = package.MODULE_HOOK_MAPPING.items
    with pytest.raises(MissingNameError, match="no_such_name"):
        _ = package.no_such_name
