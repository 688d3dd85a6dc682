"""Settings beside a pipeline at ZeRO stage 3: precisions, transports of gathers, groups of shards, ``engine.compile``,
and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.errors import ConfigError, DeepSpeedCError, FeatureError
from deepspeed_c.zero.weights.param import is_released
from tests.deepspeed_c.pipe.models import Plain, loss_fn, micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import SCHEDULES, config_of
from tests.deepspeed_c.pipe.test_stage3 import SMALL_UNITS, TIGHT, TOLERANCE, check, plain, stage3, train
from tests.ranks import run_ranks
from tests.training import engine_of, whole_weights

BATCHES, N = 6, 4
LIMITS = {"all": {}, "one": TIGHT}


def same_bits(rank: int, world: int, schedule: str, configs: list[dict[str, Any]]) -> list[Any]:
    """(losses, norms, whole weights) of each configuration."""
    found = []
    for config in configs:
        # Four ranks would add up the gradients of a tied weight, in an order that depends on the stage.
        net = module_of(2, tied=False, schedule=schedule, **SCHEDULES[schedule])
        with engine_of(net, config) as engine:
            data_rank = net.mpu().get_data_parallel_rank()
            losses, norms = [], []
            for step in range(BATCHES):
                losses.append(float(engine.train_batch(iter(micro_batches(step, data_rank, N)))))
                norms.append(float(engine.get_global_grad_norm()))
            joins = [not group.source.is_collective for group in engine._fetcher.groups] if engine._fetcher else []
            found.append((losses, norms, whole_weights(net), joins))
    return found


def check_same(outcome: list[Any]) -> None:
    for rank, (first, *others) in enumerate(outcome):
        for losses, norms, weights, _ in others:
            assert losses == first[0], f"rank {rank}: losses {losses} and {first[0]}"
            assert norms == pytest.approx(first[1], rel=1e-6), f"rank {rank}: norms {norms} and {first[1]}"
            for name, value in weights.items():
                assert torch.equal(value, first[2][name]), f"rank {rank}, {name}: {value} and {first[2][name]}"


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 64.0}}


@pytest.mark.parametrize(
    ("schedule", "limit", "precision"),
    [("1f1b", "all", BF16), ("zb_v", "one", BF16), ("zb_h1", "one", FP16)],
    ids=str,
)
def test_half_precision_has_the_bits_of_whole_weights(schedule, limit, precision):
    """Two ranks add up the same gradients, in either order, so stage 0 has the same bits."""
    whole = config_of(N, zero_optimization={"stage": 0}, **precision)
    outcome = run_ranks(4, same_bits, schedule, [whole, stage3(N, LIMITS[limit], **precision)])
    check_same(outcome)
    if precision is BF16:
        losses = plain_in_bf16()
        assert outcome[0][1][0] == pytest.approx(losses, rel=2e-3), (outcome[0][1][0], losses)


def plain_in_bf16() -> list[float]:
    """Torch alone: bf16 weights of fp32 masters, gradients summed in fp32 over micro-batches."""
    model = Plain(tied=False).bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    momenta = [torch.zeros_like(p) for p in masters]
    losses = []
    for step in range(BATCHES):
        batches = [batch for r in range(2) for batch in micro_batches(step, r, N)]
        sums = [torch.zeros_like(p) for p in masters]
        total = 0.0
        for x, y in batches:
            model.zero_grad()
            loss = loss_fn(model(x), y) / len(batches)
            loss.backward()
            total += float(loss.detach())
            for added, p in zip(sums, model.parameters(), strict=True):
                added += p.grad.float()
        for p, master, momentum, grad in zip(model.parameters(), masters, momenta, sums, strict=True):
            momentum.mul_(0.9).add_(grad)
            master.sub_(0.1 * momentum)
            p.data.copy_(master)
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    ("schedule", "limit", "more"),
    [("1f1b", "all", {}), ("zb_v", "one", {}), ("dualpipe_v", "all", {}), ("zb_h1", "one", BF16)],
    ids=str,
)
def test_joint_memory_has_the_bits_of_gathers(schedule, limit, more):
    comm = {"local": "shm"}
    configs = [
        stage3(N, LIMITS[limit], comm=comm, **more),
        stage3(N, LIMITS[limit], comm={**comm, "zero_copy_gather": True}, **more),
    ]
    outcome = run_ranks(4, same_bits, schedule, configs)
    check_same(outcome)
    for rank, ((*_, gathered), (*_, joined)) in enumerate(outcome):
        assert gathered and not any(gathered) and all(joined), (rank, gathered, joined)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize(
    "zero",
    [{"overlap_comm": False}, {"overlap_comm": False, **TIGHT}, {"mics_shard_size": 1}, {"mics_shard_size": 2}],
    ids=str,
)
def test_settings_that_change_no_value(schedule, zero):
    check(
        run_ranks(4, train, 2, N, stage3(N, zero), {"schedule": schedule, **SCHEDULES[schedule]})
        if zero != {"mics_shard_size": 1}
        else [(losses, weights, {}) for losses, weights, *_ in run_ranks(4, train_copies, schedule, zero)],
        plain(2, N),
    )


def train_copies(rank: int, world: int, schedule: str, zero: dict[str, Any]) -> Any:
    """Each rank holds a whole copy of the shards, so there may be no fetcher."""
    net = module_of(2, schedule=schedule, **SCHEDULES[schedule])
    with engine_of(net, stage3(N, zero)) as engine:
        at = net.mpu().get_data_parallel_rank()
        losses = [float(engine.train_batch(iter(micro_batches(step, at, N)))) for step in range(10)]
        return losses, {name.replace("tied_modules.embed", "0"): p for name, p in whole_weights(net).items()}


def refused(rank: int, world: int, zero: dict[str, Any]) -> tuple[str, str, bool]:
    net = module_of(2)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with pytest.raises(DeepSpeedCError) as caught:
        engine_of(net, stage3(N, zero))
    same = all(torch.equal(p, before[name]) for name, p in net.named_parameters() if not is_released(p))
    return type(caught.value).__name__, str(caught.value), same and not any(map(is_released, net.parameters()))


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"mics_shard_size": 4}, ("zero_optimization.mics_shard_size", "2 data-parallel ranks", "a divisor of 2")),
        ({"mics_shard_size": 3}, ("zero_optimization.mics_shard_size", "2 data-parallel ranks", "a divisor of 2")),
    ],
    ids=str,
)
def test_settings_that_are_refused_before_a_weight_moves(zero, words):
    for rank, (kind, said, is_untouched) in enumerate(run_ranks(4, refused, zero)):
        assert kind == ConfigError.__name__, (rank, kind, said)
        for word in words:
            assert word in said, (rank, said)
        assert is_untouched, f"rank {rank}: weights have moved"


def compiled(rank: int, world: int, stage: int, schedule: str, config: dict[str, Any]) -> Any:
    """(text of an error, whether it is compiled, number of graphs, losses)."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    zero = {"stage": stage, **(SMALL_UNITS if stage == 3 else {})}
    net = module_of(2, schedule=schedule, **SCHEDULES[schedule])
    with engine_of(net, config_of(N, zero_optimization=zero, **config)) as engine:
        at = net.mpu().get_data_parallel_rank()
        hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in net.named_modules()}
        said = ""
        try:
            engine.compile(backend)
        except FeatureError as error:
            said = str(error)
            assert hooks == {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in net.named_modules()}
        losses = [float(engine.train_batch(iter(micro_batches(step, at, N)))) for step in range(4)]
        return said, engine.is_compiled, len(graphs), losses


@pytest.mark.parametrize(("stage", "schedule"), [(2, "1f1b"), (3, "1f1b"), (3, "zb_h1"), (3, "zb_v")])
def test_layers_are_compiled_and_train_as_one_process(stage, schedule):
    losses, _ = plain(2, N)
    for rank, (said, is_compiled, n_graphs, got) in enumerate(run_ranks(4, compiled, stage, schedule, {})):
        assert not said and is_compiled and n_graphs > 0, (rank, said, n_graphs)
        assert got == pytest.approx(losses[:4], rel=TOLERANCE), rank


@pytest.mark.parametrize("stage", [2, 3])
def test_graphs_with_gathers_are_refused_before_a_hook_is_touched(stage):
    losses, _ = plain(2, N)
    config = {"compile": {"deepcompile": True}}
    for rank, (said, is_compiled, n_graphs, got) in enumerate(run_ranks(4, compiled, stage, "1f1b", config)):
        assert "compile.deepcompile" in said and "false" in said and not is_compiled and n_graphs == 0, (rank, said)
        assert got == pytest.approx(losses[:4], rel=TOLERANCE), rank
