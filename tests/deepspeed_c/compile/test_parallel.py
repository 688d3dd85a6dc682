"""Compiled engines whose layers or sequences are cut over ranks: their bits are those of the same engine without a
compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed_c.errors import FeatureError
from deepspeed_c.utils import safe_get_full_fp32_param
from tests.deepspeed_c.compile.models import same
from tests.deepspeed_c.inject import families
from tests.deepspeed_c.inject.test_engine import batch as words_of
from tests.deepspeed_c.sequence import test_engine as sequences
from tests.deepspeed_c.zero import megatron
from tests.deepspeed_c.zero import test_tensor_parallel as by_hand
from tests.ranks import on_ranks
from tests.training import engine_of, update

STEPS = 2
Cell = Callable[[bool, int], list[Any]]


def run(engine: Any, compiled: bool, loss_of: Callable[[int], torch.Tensor]) -> list[Any]:
    """Losses, norms and weights of a few steps."""
    found: list[Any] = []
    with engine:
        if compiled:
            engine.compile(backend="eager")
        for i in range(2 * STEPS):
            found.append(update(engine, loss_of(i)))
            found.append(engine.get_global_grad_norm())
        assert not compiled or engine._compiled.backend.n_frames > 0
        return found + [safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def config_of(compiled: bool, stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 300},
        "compile": {"deepcompile": compiled},
        **more,
    }


def cut_by_hand(compiled: bool, stage: int) -> list[Any]:
    engine = by_hand.make_engine(2, config_of(compiled, stage))
    return run(engine, compiled, lambda i: engine(*megatron.batch(i, 0, 0)))


def cut_by_configuration(compiled: bool, stage: int, **more: Any) -> list[Any]:
    """Of GPT-2, because its norms are one operator. The gradient of a tensor that goes to three operators is added in
    another order if two of them are in one graph."""
    config = config_of(compiled, stage, tensor_parallel={"autotp_size": 2, **more})
    engine = engine_of(families.make("gpt2").train(), config)
    return run(engine, compiled, lambda i: engine(**words_of(i, 0)).loss)


def sequence(compiled: bool, stage: int) -> list[Any]:
    engine = sequences.make_engine(2, config_of(compiled, stage), "config")

    def loss_of(i: int) -> torch.Tensor:
        x, labels = sequences.part(engine, sequences.batch(i, 0, 0))
        return engine(x, labels=labels)["loss"]

    return run(engine, compiled, loss_of)


@pytest.mark.parametrize("cell", [cut_by_hand, cut_by_configuration, sequence], ids=lambda cell: cell.__name__)
@on_ranks(2, preload="torch._dynamo")
def test_the_bits_are_those_without_a_compiler(rank: int, world: int, cell: Cell) -> None:
    for stage in (2, 3):
        torch._dynamo.reset()
        want = cell(False, stage)
        same(cell(True, stage), want)


@pytest.mark.parametrize("key", ["tp_overlap_comm", "sequence_parallel_norms"])
@on_ranks(2, preload="torch._dynamo")
def test_layers_that_know_tensors_by_identity_are_refused(rank: int, world: int, key: str) -> None:
    config = config_of(True, 2, tensor_parallel={"autotp_size": 2, key: True})
    with engine_of(families.make("llama").train(), config) as engine:
        with pytest.raises(FeatureError, match=f"tensor_parallel.{key} to false"):
            engine.compile(backend="eager")
        assert not engine.is_compiled and "forward" not in vars(engine.module)
        engine.backward(engine(**words_of(0, 0)).loss)
