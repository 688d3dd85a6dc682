"""Micro-batches without a label that counts. The mean over no tokens is NaN in torch, and a pipeline does with it what
the engine of a whole model does.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deepspeed_c.errors import NonFiniteLossError
from tests.deepspeed_c.pipe.models import Plain, loss_fn, micro_batches, module_of
from tests.ranks import run_ranks
from tests.training import config, descend, engine_of

N = 3
# (data-parallel rank, micro-batch) without labels.
EMPTY = {
    "none": set(),
    "one": {(0, 1)},
    "all of one rank": {(1, k) for k in range(N)},
    "all": {(r, k) for r in range(2) for k in range(N)},
}


def config_of(dtype: str) -> dict[str, Any]:
    section = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    if dtype == "fp16":
        section["fp16"]["initial_scale_power"] = 8
    return config(1, rows=2, accumulate=N, **{"gradient_clipping": 0.0, **section})


def batches_of(step: int, data_rank: int, empty: set[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (x, torch.full_like(y, -100) if (data_rank, k) in empty else y)
        for k, (x, y) in enumerate(micro_batches(step, data_rank, N))
    ]


def train(rank: int, world: int, dtype: str, is_pipeline: bool) -> dict[str, Any]:
    """By case: what the step with empty micro-batches said and did, and the losses of the next two steps."""
    found = {}
    for what, empty in EMPTY.items():
        net = module_of(2) if is_pipeline else Plain()
        config = config_of(dtype)
        engine = engine_of(net, config)
        mine = rank % 2 if not is_pipeline else engine.grid.get_data_parallel_rank()

        def step(number: int, empty: set[tuple[int, int]]) -> float:
            batches = batches_of(number, mine, empty)  # noqa: B023
            if is_pipeline:
                return float(engine.train_batch(iter(batches)))  # noqa: B023
            for x, y in batches:
                engine.backward(loss_fn(engine(x), y))  # noqa: B023
                engine.step()  # noqa: B023
            return float(engine.optimizer.last_facts.loss)  # noqa: B023

        with engine:
            before = [p.detach().clone() for p in net.parameters()]
            try:
                outcome = "trained", step(0, empty)
            except NonFiniteLossError as error:
                outcome = "NonFiniteLossError", str(error)
            same = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
            counts = engine.global_steps, engine.skipped_steps
            scale = engine.optimizer.cur_scale
            found[what] = outcome, same, counts, scale, [step(number, set()) for number in (1, 2)]
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_pipeline_does_what_a_whole_model_does(dtype: str) -> None:
    whole, *_ = run_ranks(2, train, dtype, False)
    tolerance = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-4}[dtype]
    for found in run_ranks(4, train, dtype, True):
        for what, ((kind, said), same, *counts, losses) in found.items():
            (kind_of_whole, said_of_whole), same_of_whole, *counts_of_whole, losses_of_whole = whole[what]
            assert (kind, same, counts) == (kind_of_whole, same_of_whole, counts_of_whole), what
            assert losses == pytest.approx(losses_of_whole, rel=tolerance), what
            if what == "none":
                assert said == pytest.approx(said_of_whole, rel=tolerance)
            else:
                assert kind == "NonFiniteLossError" and same and counts[0] == (1, 1), what
                # Ranks 2 and 3 have the last stage.
                names = {"one": "rank 2:", "all of one rank": "rank 3:", "all": "rank 2, 3:"}[what]
                assert said.startswith(names), said


def train_parts(rank: int, world: int, empty: int) -> list[tuple[float, float]]:
    """(eval_batch, train_batch) of sequences of 6 tokens over two ranks. Their first ``empty`` labels do not count."""
    net = module_of(2)
    config = config_of("fp32") | {"sequence_parallel_size": 2}
    engine = engine_of(net, config)
    place = rank % 2
    found = []
    with engine:
        for step in range(3):
            batches = parts_of(step, empty, place)
            found.append((float(engine.eval_batch(iter(batches))), float(engine.train_batch(iter(batches)))))
    return found


def sequences_of(step: int, empty: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = [(x, y.clone()) for x, y in micro_batches(step, 0, N, length=6)]
    for _, y in batches:
        y[:, :empty] = -100
    return batches


def parts_of(step: int, empty: int, place: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x.chunk(2, 1)[place], y.chunk(2, 1)[place]) for x, y in sequences_of(step, empty)]


@pytest.mark.parametrize("empty", [3, 5])
def test_a_rank_whose_part_of_a_sequence_has_no_label_adds_nothing(empty: int) -> None:
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = [
        descend(optimizer, sum(loss_fn(model(x), y) for x, y in sequences_of(step, empty)) / N) for step in range(3)
    ]
    for found in run_ranks(4, train_parts, empty):
        for (evaluated, trained), wanted in zip(found, expected, strict=True):
            assert evaluated == pytest.approx(wanted, rel=1e-5) and trained == pytest.approx(wanted, rel=1e-5)


def train_empty_parts(rank: int, world: int) -> tuple[str, bool]:
    net = module_of(2)
    config = config_of("fp32") | {"sequence_parallel_size": 2}
    engine = engine_of(net, config)
    with engine:
        before = [p.detach().clone() for p in net.parameters()]
        try:
            said = f"a loss of {float(engine.train_batch(iter(parts_of(0, 6, rank % 2)))):g}"
        except NonFiniteLossError as error:
            said = type(error).__name__
        return said, all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_sequences_without_any_label_are_an_error_as_without_a_cut() -> None:
    assert run_ranks(4, train_empty_parts) == [("NonFiniteLossError", True)] * 4


def evaluate(rank: int, world: int) -> tuple[float, list[float] | None]:
    net = module_of(2)
    engine = engine_of(net, config_of("fp32"))
    with engine:
        batches = batches_of(0, engine.grid.get_data_parallel_rank(), EMPTY["one"])
        mean = float(engine.eval_batch(iter(batches)))
        each = engine.eval_batch(iter(batches), reduce_output=None, bcast_loss=False)
        return mean, each and [float(loss) for loss in each]


def test_eval_batch_returns_what_torch_does() -> None:
    for rank, (mean, each) in enumerate(run_ranks(4, evaluate)):
        assert math.isnan(mean)
        assert (each is None) == (rank < 2)
        if each is not None:
            assert [math.isnan(loss) for loss in each] == [rank == 2 and k == 1 for k in range(N)]
