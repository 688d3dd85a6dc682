"""Late gradients, which come after their bucket was reduced, are compared with plain torch. The number and order of
reductions are checked, and the buffers for late gradients, which must be freed afterwards."""

from __future__ import annotations

import logging
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c.logging import logger
from deepspeed_c.zero.gradients.bucket import Bucket
from tests.ranks import run_ranks
from tests.training import config, whole_weights

WIDTH, N_LAYERS = 8, 6
BUCKET_ELEMS = WIDTH * WIDTH  # a layer
PADDED_ELEMS = 96  # over 3 ranks
LATE_STEPS = (1, 2, 4)  # of 6 steps: late gradients begin in 1, go on in 2, stop in 3, begin again in 4, stop in 5
N_STEPS = 6
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1}


class Model(nn.Module):
    """Layers of one bucket each, registered in the order of forward. ``middle`` runs twice if ``is_twice``. Each run is
    under a reentrant checkpoint, which makes a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_LAYERS - 3))

    def forward(self, x: torch.Tensor, is_twice: bool, is_checkpointed: bool = True) -> torch.Tensor:
        for layer in self.before:
            x = torch.tanh(layer(x))
        for _ in range(2 if is_twice else 1):
            x = checkpoint(self.middle, x, use_reentrant=True) if is_checkpointed else self.middle(x)
        for layer in self.after:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def is_late(step: int, micro: int, rank: int, world: int) -> bool:
    """Whether this rank has a late gradient: the last rank in micro-batches 0 and 3, rank 0 in micro-batch 2."""
    return step in LATE_STEPS and (rank == world - 1 if micro in (0, 3) else micro == 2 and rank == 0)


class Step(NamedTuple):
    order: list[int]  # buckets in the order of their reductions
    peak: int  # most elements of gradients in extra buffers
    left: list[int]  # elements in extra buffers after each micro-batch
    waiting: set[int]


def make_config(stage: int, gas: int, zero: dict) -> dict:
    return config(
        stage,
        {"type": "AdamW", "params": OPTIMIZER},
        zero={"reduce_bucket_size": BUCKET_ELEMS, "stage3_param_persistence_threshold": 0, **zero},
        rows=3,
        accumulate=gas,
    )


def late_body(
    rank: int, world: int, stage: int, gas: int, zero: dict, n_backwards: int
) -> tuple[list[Step], list[torch.Tensor], list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    reduce, open_bucket = Bucket.reduce, Bucket.open
    order: list[int] = []
    peak = 0
    steps: list[Step] = []
    logger.addHandler(handler)
    with deepspeed_c.initialize(model=Model(), config=make_config(stage, gas, zero))[0] as engine:
        reducer = engine._optimizer.reducer

        def held() -> int:
            staged = (b.staging for b in reducer.buckets if b.staging is not None and b.staging is not b.whole)
            return sum(staging.numel() for staging in staged)

        def count_reduce(bucket: Bucket):
            order.append(reducer.buckets.index(bucket))
            return reduce(bucket)

        def count_open(bucket: Bucket, will_reduce: bool) -> torch.Tensor:
            nonlocal peak
            staging = open_bucket(bucket, will_reduce)
            peak = max(peak, held())
            return staging

        Bucket.reduce, Bucket.open = count_reduce, count_open
        try:
            for step in range(N_STEPS):
                left = []
                for micro in range(gas):
                    loss = engine(batch(step, micro, rank), is_late(step, micro, rank, world))
                    n = n_backwards if step in LATE_STEPS and micro == gas - 1 else 1
                    for i in range(n):
                        engine.backward(loss / n, retain_graph=i < n - 1)
                    left.append(held())
                    engine.step()
                steps.append(Step(list(order), peak, left, set(reducer.late.waiting)))
                order.clear()
                peak = 0
        finally:
            Bucket.reduce, Bucket.open = reduce, open_bucket
            logger.removeHandler(handler)
        return steps, list(whole_weights(engine.module).values()), [m for m in messages if "came again" in m]


def plain(world: int, gas: int) -> list[torch.Tensor]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        for micro in range(gas):
            for rank in range(world):
                loss = model(batch(step, micro, rank), is_late(step, micro, rank, world), is_checkpointed=False)
                (loss / gas / world).backward()
        optimizer.step()
    return list(model.parameters())


def check_params(got: list[torch.Tensor], world: int, gas: int) -> None:
    for i, (a, b) in enumerate(zip(got, plain(world, gas), strict=True)):
        assert torch.allclose(a, b, rtol=2e-5, atol=2e-6), f"parameter {i}: {a}\n!=\n{b}"


def check(outcomes: list, world: int, gas: int, n_passes: int, n_late: int | None) -> None:
    """Each of ``n_passes`` passes reduces every bucket once. In the first step with late gradients ``n_late`` buckets
    (None: all) are reduced once more. While gradients stay late, these buckets wait for them."""
    n_buckets = max(outcomes[0][0][0].order) + 1
    n_late = n_late or n_buckets
    for rank, (steps, params, messages) in enumerate(outcomes):
        check_params(params, world, gas)
        assert len(messages) == (rank == 0), messages
        for step, seen in enumerate(steps):
            where = f"rank {rank}, step {step}: {seen}, usually {steps[0]}"
            assert seen.order == outcomes[0][0][step].order, f"{where}, rank 0 {outcomes[0][0][step].order}"
            is_first = step in LATE_STEPS and step - 1 not in LATE_STEPS
            assert len(seen.order) == n_passes * n_buckets + (n_late if is_first else 0), where
            assert len(seen.waiting) == (n_late if step in LATE_STEPS else 0), where
            if step not in LATE_STEPS and step - 1 not in LATE_STEPS:
                assert seen.peak == steps[0].peak, where
            assert is_first or not any(seen.left), where
            if n_late == 1:
                assert seen.peak <= steps[0].peak + PADDED_ELEMS, where


@pytest.mark.parametrize("gas", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("world", "overlap_comm", "reduce_scatter"),
    [(1, True, True), *((world, *how) for world in (2, 3) for how in product([True, False], repeat=2))],
)
def test_late_gradients_hold_one_bucket_and_are_forgotten(
    world: int, stage: int, gas: int, overlap_comm: bool, reduce_scatter: bool
) -> None:
    zero = {"overlap_comm": overlap_comm, "reduce_scatter": reduce_scatter}
    outcomes = run_ranks(world, late_body, stage, gas, zero, 1)
    n_passes = gas if stage == 2 else 1  # the passes that reduce
    check(outcomes, world, gas, n_passes, n_late=1)
    assert "gradients of middle.weight came" in outcomes[0][2][0], outcomes[0][2]


@pytest.mark.parametrize("gas", [1, 2])
def test_two_backwards_where_gradients_stay_whole_are_reduced_once(gas: int) -> None:
    outcomes = run_ranks(2, late_body, 1, gas, {}, 2)
    check(outcomes, 2, gas, n_passes=1, n_late=None)


@pytest.mark.parametrize("gas", [1, 2])
def test_each_of_two_backwards_is_reduced_where_callers_read_gradients(gas: int) -> None:
    for rank, (steps, params, _) in enumerate(run_ranks(2, late_body, 0, gas, {}, 2)):
        check_params(params, 2, gas)
        n_buckets = max(steps[0].order) + 1
        for step, seen in enumerate(steps):
            n_passes = 2 if step in LATE_STEPS else 1
            n_by_themselves = len(seen.order) - n_passes * n_buckets
            # In the first late step of a rank the layer that runs twice may cause one more reduction.
            is_first = step in LATE_STEPS and step - 1 not in LATE_STEPS
            assert n_by_themselves <= is_first, f"rank {rank}, step {step}: {seen}"
            assert is_first or not any(seen.left), f"rank {rank}, step {step}: {seen}"
