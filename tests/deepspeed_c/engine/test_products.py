"""``cpu_products``: which engines widen the products of their process, and for how long."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import ConfigError, OptimizerError
from deepspeed_c.ops import product_times
from deepspeed_c.ops.product_times import ProductTimes, keep_times
from tests.ranks import run_ranks
from tests.training import update

SLOW, FAST = ProductTimes(1.0, 1e-3), ProductTimes(1e-3, 1e-3)


def are_widened() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect")


class found_times:
    """In the body this rank finds these times on its machine."""

    def __init__(self, bf16: ProductTimes, fp16: ProductTimes) -> None:
        self._times = {torch.bfloat16: bf16, torch.float16: fp16}

    def __enter__(self) -> None:
        self._before = os.environ["XDG_CACHE_HOME"]
        self._folder = tempfile.TemporaryDirectory()
        os.environ["XDG_CACHE_HOME"] = self._folder.name
        for dtype, times in self._times.items():
            keep_times(dtype, times)

    def __exit__(self, *error: object) -> None:
        os.environ["XDG_CACHE_HOME"] = self._before
        self._folder.cleanup()


def engine_of(model: torch.nn.Module | None = None, **keys: Any) -> deepspeed_c.DeepSpeedEngine:
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **keys}
    return deepspeed_c.initialize(model=model or torch.nn.Linear(5, 3), config=config)[0]


class Keeper(torch.nn.Linear):
    """A layer with a buffer of 16 bits."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_buffer("kept", torch.zeros(2, dtype=torch.float16))


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
# (slow dtypes, model, keys, whether products are widened)
CASES = [
    ("both", None, BF16, True), ("both", None, FP16, True), ("both", None, {}, False),
    ("both", None, {**BF16, "cpu_products": "torch"}, False), ("both", None, {**BF16, "cpu_products": "auto"}, True),
    ("both", None, {"torch_autocast": {"enabled": True, "dtype": "fp16"}}, True),
    ("bf16", None, {"torch_autocast": {"enabled": True, "dtype": "fp16"}}, False), ("bf16", None, FP16, False),
    ("fp16", None, FP16, True), ("neither", None, BF16, False), ("both", Keeper, {}, True),
    ("both", lambda: torch.nn.Linear(5, 3, dtype=torch.bfloat16), {}, True),
]  # fmt: skip


def which_body(rank: int, world: int) -> list[bool]:
    found = []
    for slow, model, keys, _ in CASES:
        times = [SLOW if slow in ("both", name) else FAST for name in ("bf16", "fp16")]
        with found_times(*times):
            engine = engine_of(model() if model else None, **keys)
            found.append(are_widened())
            engine.destroy()
        assert not are_widened(), (slow, keys)
    return found


def test_products_are_widened_for_16_bits_where_torch_is_slow() -> None:
    (found,) = run_ranks(1, which_body)
    assert found == [wanted for *_, wanted in CASES]


def life_body(rank: int, world: int) -> list[bool]:
    seen = []
    with found_times(SLOW, SLOW):
        first, second = engine_of(**BF16), engine_of(**FP16)
        third = engine_of(**BF16, cpu_products="torch")
        for engine in (first, third, second):
            seen.append(are_widened())
            engine.destroy()
            engine.destroy()
        seen.append(are_widened())
        stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        with pytest.raises(OptimizerError, match="does not belong"):  # after the edits have been made
            deepspeed_c.initialize(
                model=torch.nn.Linear(5, 3), optimizer=stranger, config={"train_micro_batch_size_per_gpu": 3, **BF16}
            )
        seen.append(are_widened())
    return seen


def test_products_are_torchs_again_after_the_last_engine() -> None:
    assert run_ranks(1, life_body) == [[True, True, True, False, False]]


def differ_body(rank: int, world: int, stage: int) -> tuple[bool, list[float], list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.GELU(), torch.nn.Linear(30, 1))
    with found_times(SLOW if rank == 1 else FAST, FAST):
        engine = engine_of(model, **BF16, zero_optimization={"stage": stage})
    losses = []
    for step in range(3):
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(step)).bfloat16()  # the same on both ranks
        losses.append(update(engine, engine(x).float().square().mean()))
    norm = engine.get_global_grad_norm()
    widened = are_widened()
    engine.destroy()
    return widened, losses, [float(norm)]


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_whose_products_are_slow_decides_for_all(stage: int) -> None:
    first, second = run_ranks(2, differ_body, stage)
    print(first, second)
    assert first[0] and first == second


def inference_body(rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    for keys in ({"dtype": "bf16"}, {"dtype": "bf16", "cpu_products": "torch"}, {"dtype": "fp32"}, {}):
        with found_times(SLOW, SLOW):
            engine = deepspeed_c.init_inference(torch.nn.Linear(5, 3), keys)
            found.append(are_widened())
            engine.destroy()
        found.append(are_widened())
    return found


def test_inference_has_the_key_too() -> None:
    assert run_ranks(1, inference_body) == [[True, False, False, False, False, False, True, False]]


@pytest.mark.parametrize("value", ["ours", 1, None, ["auto"]])
def test_another_value_is_refused(value: Any) -> None:
    for read in (
        lambda: deepspeed_c.DeepSpeedConfig({"train_batch_size": 1, "cpu_products": value}),
        lambda: deepspeed_c.init_inference(torch.nn.Linear(2, 2), {"cpu_products": value}),
    ):
        with pytest.raises(ConfigError, match="cpu_products") as caught:
            read()
        assert "auto" in str(caught.value) and "torch" in str(caught.value), str(caught.value)


def no_measure_body(rank: int, world: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        before, os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"], folder
        own, product_times._measure = product_times._measure, lambda dtype: pytest.fail("measured")
        try:
            engine_of().destroy()
            engine_of(**BF16, cpu_products="torch").destroy()
        finally:
            os.environ["XDG_CACHE_HOME"], product_times._measure = before, own
        return not os.listdir(folder)


def test_a_run_without_16_bits_measures_nothing() -> None:
    assert run_ranks(1, no_measure_body) == [True]
