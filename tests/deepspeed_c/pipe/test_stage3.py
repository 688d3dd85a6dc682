"""Pipelines at ZeRO stage 3: the weights of each stage are sharded over the parallel pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.errors import ConfigError, StageError
from deepspeed_c.moe.layer import MoE
from deepspeed_c.pipe import LayerSpec, PipelineModule
from tests.deepspeed_c.pipe.models import Plain, loss_fn, micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import SCHEDULES, config_of
from tests.ranks import run_ranks
from tests.training import descend_together, engine_of, whole_weights

BATCHES = 10
TOLERANCE = 1e-5
# Each matrix is a unit of its own.
SMALL_UNITS = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 768}
# The largest unit is gathered alone, so that weights are gathered anew for each use.
TIGHT = {"stage3_max_live_parameters": 768, "stage3_prefetch_bucket_size": 0}
THREE = {"stage3_max_live_parameters": 2304, "stage3_prefetch_bucket_size": 0}


def stage3(n: int, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return config_of(n, zero_optimization={"stage": 3, **SMALL_UNITS, **(zero or {})}, **more)


def plain(n_pipelines: int, n: int, *, clip: float = 0.0, tied: bool = True) -> tuple[list[float], dict[str, Any]]:
    """The losses of one process, and its weights by the names of their layers."""
    model = Plain(tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(BATCHES):
        batches = [batch for r in range(n_pipelines) for batch in micro_batches(step, r, n)]
        total = sum(loss_fn(model(x), y) for x, y in batches) / len(batches)
        descend_together(optimizer, [total], clip)
        losses.append(float(total.detach()))
    return losses, {name.removeprefix("built."): p.detach() for name, p in model.named_parameters()}


def train(
    rank: int, world: int, stages: int, n: int, config: dict[str, Any], options: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int]]:
    """Returns (losses, this rank's whole weights by the names of their layers, statistics of gathers)."""
    net = module_of(stages, **options)
    with engine_of(net, config) as engine:
        data_rank = net.mpu().get_data_parallel_rank()
        losses = [float(engine.train_batch(iter(micro_batches(step, data_rank, n)))) for step in range(BATCHES)]
        stats = engine._fetcher.stats.as_dict() | {"n_units": len(engine._fetcher.groups)}
        weights = {name.replace("tied_modules.embed", "0"): p for name, p in whole_weights(net).items()}
    return losses, weights, stats


def check(outcome: list[Any], expected: tuple[list[float], dict[str, Any]]) -> None:
    losses, weights = expected
    seen = set()
    for rank, (got, mine, _) in enumerate(outcome):
        assert got == pytest.approx(losses, rel=TOLERANCE), f"rank {rank}"
        for name, value in mine.items():
            error = float((value - weights[name]).abs().max())
            assert error <= TOLERANCE, f"rank {rank}, {name}: {error}"
            seen.add(name)
    assert seen == set(weights)


@pytest.mark.parametrize("limit", [{}, TIGHT, THREE], ids=["all", "one", "three"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_pipelines_train_as_one_process(schedule, limit):
    options = {"schedule": schedule, **SCHEDULES[schedule]}
    outcome = run_ranks(4, train, 2, 4, stage3(4, limit, gradient_clipping=0.5), options)
    check(outcome, plain(2, 4, clip=0.5))
    for rank, (_, _, stats) in enumerate(outcome):
        assert stats["n_units"] > 3, (rank, stats)
        if not limit:
            # The order of the first batch is a guess.
            assert stats["n_gathers"] - stats["n_unexpected"] == stats["n_units"] * BATCHES, (rank, stats)
            assert stats["n_unexpected"] <= 1, (rank, stats)
        else:
            # A use that the first plan lacks is gathered beside the running unit.
            # A running module holds its vector of 64 past the release.
            most = max(2 * 768, limit["stage3_max_live_parameters"] + 64)
            assert stats["max_live_elems"] <= most, (rank, stats)
            assert stats["n_gathers"] > (5 if limit is TIGHT else 1) * stats["n_units"] * BATCHES, (rank, stats)


class Fault:
    """A hook that raises in one computation."""

    def __init__(self, when: int) -> None:
        self.when, self.n = when, 0

    def __call__(self, *_: Any) -> None:
        self.n += 1
        if self.n == self.when:
            raise ValueError("planted")


def train_after_a_fault(
    rank: int, world: int, at: int, when: int, where: str, batch: int, config: dict[str, Any], options: dict[str, Any]
) -> tuple[list[float], list[str]]:
    """Rank ``at`` raises in its ``when``th forward or backward of batch ``batch``, which is then trained again. Returns
    (losses, texts of the errors)."""
    net = module_of(2, **options)
    losses, texts = [], []
    with engine_of(net, config) as engine:
        data_rank = net.mpu().get_data_parallel_rank()
        for step in range(4):
            handle = None
            if step == batch and rank == at:
                block = next(m for m in net.modules() if type(m).__name__ == "Block")
                fault = Fault(when)
                if where == "forward":
                    handle = block.register_forward_pre_hook(fault)
                else:
                    handle = block.register_full_backward_hook(fault)
            if step == batch:
                with pytest.raises(StageError) as caught:
                    engine.train_batch(iter(micro_batches(step, data_rank, 4)))
                texts.append(str(caught.value))
            if handle is not None:
                handle.remove()
            losses.append(float(engine.train_batch(iter(micro_batches(step, data_rank, 4)))))
    return losses, texts


@pytest.mark.parametrize("batch", [0, 2], ids=["guessed", "recorded"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("limit", [{}, TIGHT], ids=["all", "one"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_stage_that_fails_serves_the_gathers_of_other_pipelines(schedule, limit, where, batch):
    options = {"schedule": schedule, **SCHEDULES[schedule]}
    outcome = run_ranks(4, train_after_a_fault, 1, 2, where, batch, stage3(4, limit), options)
    losses, _ = plain(2, 4)
    for rank, (got, texts) in enumerate(outcome):
        assert len(texts) == 1 and "rank 1: " in texts[0] and "planted" in texts[0], (rank, texts)
        assert "run the next batch" in texts[0], (rank, texts)
        assert got == pytest.approx(losses[:4], rel=TOLERANCE), rank


def refuse_body(rank: int, world: int, limit: int) -> str:
    """Only the first stage has a matrix of 23 x 100 elements."""
    net = PipelineModule([nn.Embedding(23, 100), nn.Linear(100, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=loss_fn)
    said = refused(net, stage3(2, {"stage3_max_live_parameters": limit}))
    with engine_of(net, stage3(2)) as engine:  # as if nothing had happened
        data = [(torch.arange(2), torch.arange(2))] * 2
        assert float(engine.train_batch(iter(data))) > 0
    return said


def refused(net: PipelineModule, config: dict[str, Any]) -> str:
    """The error of an engine that is refused. The model has to be as before."""
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in net.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        engine_of(net, config)
    assert before.keys() == dict(net.named_parameters()).keys()
    for name, p in net.named_parameters():
        same, place, values = before[name]
        assert p is same and type(p) is nn.Parameter and p.data_ptr() == place and torch.equal(p, values), name
    return str(caught.value)


def test_a_limit_below_one_unit_is_refused_on_all_ranks_before_a_weight_moves():
    for said in run_ranks(4, refuse_body, 2299):
        for word in ("stage3_max_live_parameters", "is 2299", "0.weight", "one unit of 2304 elements"):  # padded
            assert word in said, said


def refuse_experts_body(rank: int, world: int) -> str:
    """Only the last stage has experts."""
    moe = LayerSpec(MoE, 8, nn.Linear(8, 8), 2, ep_size=2, drop_tokens=False)
    layers = [nn.Linear(4, 8), nn.Linear(8, 8), moe, lambda found: found[0]]
    net = PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method=[0, 2, 4])
    return refused(net, stage3(2))


def test_experts_that_are_spread_are_refused_on_all_ranks_before_a_weight_moves():
    for said in run_ranks(4, refuse_experts_body):
        for word in ("zero_optimization.stage", "is 3", "deepspeed_experts", "use stage 1 or 2"):
            assert word in said, said
