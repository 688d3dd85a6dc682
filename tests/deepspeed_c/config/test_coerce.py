"""Values that each type of key accepts and refuses."""

import math
import pathlib
from fractions import Fraction

import numpy as np
import pytest

from deepspeed_c.config import load_config, problems_of
from deepspeed_c.config.coerce import BadValue, coerce, describe, show
from deepspeed_c.config.keys import KeyInfo

NAN, INF = float("nan"), float("inf")


def read(path, value):
    """The value of a key in a configuration with only this key. If the value is refused, the error."""
    tree = value
    for part in reversed(path.split(".")):
        tree = {part: tree}
    problems = problems_of(tree, batch="skip")
    if problems:
        assert [problem.where for problem in problems] == [path], [str(problem) for problem in problems]
        assert problems[0].fix, str(problems[0])
        return problems[0]
    result = load_config(tree, world_size=1, batch="skip").resolved_dict()
    for part in path.split("."):
        result = result[part]
    return result


INTEGER = "train_batch_size"
ELEMENTS = "zero_optimization.reduce_bucket_size"
NUMBER = "gradient_clipping"
BOOLEAN = "wall_clock_breakdown"


@pytest.mark.parametrize(
    "path, value, expected",
    [
        (INTEGER, 8, 8), (INTEGER, 8.0, 8), (INTEGER, "8", 8), (INTEGER, " 8 ", 8), (INTEGER, "8e0", 8),
        (INTEGER, np.int64(8), 8), (INTEGER, np.float32(8), 8), (INTEGER, 2**63 - 1, 2**63 - 1), (INTEGER, None, None),
        (ELEMENTS, 5e8, 500_000_000), (ELEMENTS, "5e8", 500_000_000), (ELEMENTS, 921.6, 921), (ELEMENTS, 1.999999, 1),
        (NUMBER, 0, 0.0), (NUMBER, -0.0, 0.0), (NUMBER, 1, 1.0), (NUMBER, "1e-3", 1e-3), (NUMBER, Fraction(1, 4), 0.25),
        (NUMBER, np.float64(0.5), 0.5), (NUMBER, 5e-324, 5e-324), (BOOLEAN, True, True), (BOOLEAN, 1, True),
        (BOOLEAN, 0, False), (BOOLEAN, "true", True), (BOOLEAN, "False", False), ("steps_per_print", INF, INF),
        ("steps_per_print", 10, 10), ("steps_per_print", "10", 10), ("steps_per_print", "inf", INF),
        ("steps_per_print", None, None), ("gradient_allreduce_op", "SUM", "sum"),
        ("communication_data_type", "FP32", "fp32"), ("communication_data_type", "torch.bfloat16", "bf16"),
        ("data_types.grad_accum_dtype", "half", "fp16"), ("zero_optimization.stage", "2", 2),
        ("zero_optimization.stage", 2.0, 2),
        ("zero_optimization.offload_optimizer.nvme_path", pathlib.Path("a") / "b", "a/b"),
        ("zero_optimization.leaf_module.names", "one", ["one"]),
        ("zero_optimization.leaf_module.names", ("one", "two"), ["one", "two"]),
        ("checkpoint.tag_validation", "Warn", "WARN"), ("fp16.loss_scale", 128, 128.0),
        ("tensor_parallel.dtype", "int8", "int8"), ("tensor_parallel.dtype", "bfloat16", "bf16"),
    ],
)  # fmt: skip
def test_accepted(path, value, expected):
    result = read(path, value)
    assert result == expected and type(result) is type(expected), (result, expected)


@pytest.mark.parametrize(
    "path, value",
    [
        *(
            (INTEGER, value)
            for value in (
                0,
                -1,
                8.5,
                "8.5",
                "eight",
                "",
                True,
                False,
                NAN,
                INF,
                -INF,
                "inf",
                "nan",
                [8],
                {},
                2**63,
                1e30,
            )
        ),
        *((ELEMENTS, value) for value in (0, 0.5, -5e8, NAN, INF, True, None, 2**63)),
        *((NUMBER, value) for value in (-1e-9, NAN, INF, "inf", "x", True, None, [1.0])),
        *((BOOLEAN, value) for value in (2, -1, "yes", "", None, [], 0.5, 1.0)),
        *(("steps_per_print", value) for value in (0, -1, 0.5, 2.5, 1e308, NAN, -INF, "often")),
        *(("gradient_allreduce_op", value) for value in ("max", "", None, 1)),
        *(("communication_data_type", value) for value in ("int8", "fp8", 16, "")),
        *(("zero_optimization.stage", value) for value in (4, -1, 1.5, True, None, "two")),
        *(("zero_optimization.leaf_module.names", value) for value in (1, [1], None, [["a"]])),
        *(("zero_optimization.offload_param.device", value) for value in ("gpu", True, None)),
        *(("fp16.loss_scale", value) for value in (-1, NAN, INF, True, "dynamic")),
        *(("fp16.initial_scale_power", value) for value in (-1, 127, 16.5, INF)),
        *(("fp16.hysteresis", value) for value in (0, -1)),
        *(("fp16", value) for value in (True, [], "on", 1)),
        *(("gradient_predivide_factor", value) for value in (0, -1, INF)),
        ("log_level", "loud"),
        ("torch_autocast.lower_precision_safe_modules", [1]),
    ],
)
def test_refused(path, value):
    problem = read(path, value)
    assert "is not" in problem.what, str(problem)


def test_integers_of_thousands_of_digits_are_refused():
    """Python can neither print such integers nor convert them to floats."""
    for path in (INTEGER, ELEMENTS, NUMBER):
        assert "an integer of 16610 bits" in read(path, 10**5000).what
    assert "an integer of 1329 bits" in read(NUMBER, 10**400).what


def test_torch_dtypes_are_formats():
    import torch

    assert read("torch_autocast.dtype", torch.float16) == "fp16"
    assert read("communication_data_type", torch.bfloat16) == "bf16"
    assert "is not" in read("communication_data_type", torch.float64).what


def test_error_says_what_was_written_what_is_wanted_and_the_default():
    problem = read(ELEMENTS, -3)
    assert "-3" in problem.what and "an integer > 0" in problem.what
    assert "500000000" in problem.fix


@pytest.mark.parametrize(
    "value, text",
    [
        (True, "true"), (None, "null"), ("a", '"a"'), (1.0, "1.0"), (INF, "Infinity"), (-INF, "-Infinity"),
        (1e-8, "1e-08"), (5e8, "5e+08"), ([1, "b", None], '[1, "b", null]'),
        ({"a": {"b": False}}, '{"a": {"b": false}}'), (NAN, "nan"), ("x" * 100, '"' + "x" * 56 + "..."),
    ],
)  # fmt: skip
def test_show(value, text):
    assert show(value) == text


def test_nan_is_not_compared_away():
    """Every comparison with NaN is false, so a check of the form ``not value < 0`` would accept NaN."""
    for path in ("gradient_clipping", "optimizer.params.lr"):
        tree = {"optimizer": {"type": "Adam", "params": {"lr": NAN}}} if "lr" in path else {path: NAN}
        (problem,) = problems_of(tree, batch="skip")
        assert problem.where == path and "not finite" in problem.what
    assert math.isnan(NAN)


def test_a_lax_key_takes_more_words_and_booleans_as_integers():
    lax = KeyInfo(doc="", is_lax=True)
    words = {
        "yes": True, "ON": True, "t": True, "no": False, "Off": False, "0": False, 1.0: True, 0: False, "true": True,
    }  # fmt: skip
    for word, meant in words.items():
        assert coerce(word, bool, lax) is meant, word
    for value in ("maybe", "", 2, 0.5, None, []):
        with pytest.raises(BadValue):
            coerce(value, bool, lax)
    assert coerce(True, int, lax) == 1 and type(coerce(True, int, lax)) is int
    for kind, value in ((bool, "yes"), (bool, 1.0), (int, True)):
        with pytest.raises(BadValue):
            coerce(value, kind, KeyInfo(doc=""))


def test_values_that_may_be_changed_are_copies():
    given, section = [1, "2"], {"a": (1,)}
    numbers, mapping = coerce(given, list[int], KeyInfo(doc="")), coerce(section, dict, KeyInfo(doc=""))
    assert (numbers, mapping) == ([1, 2], {"a": (1,)}) and mapping is not section
    assert type(coerce((1,), list[int], KeyInfo(doc=""))) is list
    with pytest.raises(BadValue):
        coerce(["x"], list[int], KeyInfo(doc=""))
    assert describe(list[int], KeyInfo(doc="")) == "a list, each an integer"
