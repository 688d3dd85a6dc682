"""Pipelines at ZeRO stage 3 with adapters beside frozen layers, with parameters that are frozen and trained by turns, and
with second shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.pipe import LayerSpec, PipelineModule
from tests.deepspeed_c.pipe.models import N_BLOCKS, WIDTH, Block, loss_fn, micro_batches, module_of
from tests.deepspeed_c.pipe.models import layers as layers_of
from tests.deepspeed_c.pipe.test_stage3 import TIGHT, TOLERANCE, stage3
from tests.hosts import why_no_hosts
from tests.ranks import run_ranks
from tests.training import descend_together, engine_of, whole_weights

STEPS, N = 5, 4


def build(kind: str) -> nn.Module:
    """A block with low-rank adapters beside its frozen matrices: peft's, or a module of one's own."""
    block = Block(WIDTH)
    if kind == "own":
        return OwnLora(block)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], init_lora_weights=False)
    return peft.inject_adapter_in_model(config, block)


class OwnLora(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.block(x) + self.b(self.a(x))


def specs(kind: str) -> list[Any]:
    embed, *_, norm, head = layers_of(tied=False)
    return [embed, *(LayerSpec(build, kind) for _ in range(N_BLOCKS)), norm, head]


def freeze(model: nn.Module) -> list[nn.Parameter]:
    """Freezes all but the adapters, so that the first and last layers have nothing to train."""
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name or ".a." in name or ".b." in name)
    return [p for p in model.parameters() if p.requires_grad]


def adapted(rank: int, world: int, kind: str, schedule: str, limit: dict[str, Any]) -> Any:
    net = PipelineModule(specs(kind), num_stages=2, loss_fn=loss_fn, seed_layers=True, schedule=schedule)
    with engine_of(net, stage3(N, limit), model_parameters=freeze(net)) as engine:
        at = net.mpu().get_data_parallel_rank()
        losses = [float(engine.train_batch(iter(micro_batches(step, at, N)))) for step in range(STEPS)]
        return losses, whole_weights(net)


def adapted_in_one_process(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = nn.Sequential()
    for i, spec in enumerate(specs(kind)):
        torch.manual_seed(1234 + i)
        model.append(spec.build())
    optimizer = torch.optim.SGD(freeze(model), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batches = [batch for r in range(2) for batch in micro_batches(step, r, N)]
        total = sum(loss_fn(model(x), y) for x, y in batches) / len(batches)
        descend_together(optimizer, [total], 0.0)
        losses.append(float(total.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "schedule", "limit"),
    [("peft", "zb_h1", TIGHT), ("own", "1f1b", {})],
    ids=str,
)
def test_adapters_in_a_hand_written_pipeline(kind, schedule, limit):
    losses, weights = adapted_in_one_process(kind)
    seen = set()
    for rank, (got, mine) in enumerate(run_ranks(4, adapted, kind, schedule, limit)):
        assert got == pytest.approx(losses, rel=TOLERANCE), f"rank {rank}: {got} and {losses}"
        for name, value in mine.items():
            error = float((value - weights[name]).abs().max())
            assert error <= TOLERANCE, f"rank {rank}, {name}: {error}"
        seen |= set(mine)
    assert seen == set(weights)


def by_turns(rank: int, world: int, stages: int) -> list[float]:
    """Parameters of one stage, then of the other, then all are trained."""
    net = module_of(stages, tied=False)
    n = N * stages // world
    at = net.mpu().get_data_parallel_rank() * n
    losses = []
    with engine_of(net, stage3(n)) as engine:
        for step, names in enumerate((["*"], ["1.*", "2.*"], ["7.*", "8.weight"], ["[0-4].*", "5.up.*"], ["*"])):
            assert engine.set_trainable(names)
            batches = micro_batches(step, 0, N)[at : at + n]
            losses.append(float(engine.train_batch(iter(batches))))
        with pytest.raises(ModelError, match="no parameter is named '11.weight'"):
            engine.set_trainable(["11.weight"])
        losses.append(float(engine.train_batch(iter(micro_batches(9, 0, N)[at : at + n]))))
    return losses


def test_parameters_of_any_stage_are_trained_by_turns():
    want = run_ranks(1, by_turns, 1)[0]
    for rank, got in enumerate(run_ranks(4, by_turns, 2)):
        assert got == pytest.approx(want, rel=TOLERANCE), f"rank {rank}: {got} and {want}"


def refused_later(rank: int, world: int, asks: bool) -> tuple[str, list[float], list[str]]:
    """A stage has a block: "up" is trained, and the rest is frozen, in another unit. Trained together they are one."""
    net = PipelineModule([LayerSpec(Block, WIDTH)] * 2, num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True)
    for name, param in net.named_parameters():
        param.requires_grad_("up" in name)
    given = [p for p in net.parameters() if p.requires_grad]
    zero = {"reduce_bucket_size": 2000, "stage3_max_live_parameters": 1000}
    generator = torch.Generator().manual_seed(net.mpu().get_data_parallel_rank())
    said, losses = "", []
    with engine_of(net, stage3(1, zero), model_parameters=given) as engine:
        for step in range(4):
            pair = torch.randn(2, 2, WIDTH, generator=generator)
            losses.append(float(engine.train_batch(iter([(pair[0], pair[1])]))))
            if asks and step == 1:
                with pytest.raises(ConfigError) as caught:
                    engine.set_trainable(["*"])
                said = str(caught.value)
        return said, losses, [name for name, p in net.named_parameters() if p.requires_grad]


def test_a_limit_below_one_unit_is_refused_also_when_units_change():
    outcomes = (run_ranks(4, refused_later, asks) for asks in (False, True))
    for rank, ((_, want, names), (said, losses, trained)) in enumerate(zip(*outcomes, strict=True)):
        for word in ("stage3_max_live_parameters", "is 1000", "one unit of 1664 elements"):
            assert word in said, f"rank {rank}: {said}"
        assert trained == names, (trained, names)
        assert losses == want, f"rank {rank}: {losses} and {want}"


def with_second_shards(rank: int, world: int, schedule: str, limit: dict[str, Any]) -> list[Any]:
    found = []
    for n in (1, 2):
        net = module_of(2, schedule=schedule)
        zero = {**limit, "zero_hpz_partition_size": n}
        with engine_of(net, stage3(N, zero)) as engine:
            at = net.mpu().get_data_parallel_rank()
            losses = [float(engine.train_batch(iter(micro_batches(step, at, N)))) for step in range(2)]
            n_near = sum(group.source.near is not None for group in engine._fetcher.groups)
            found.append((losses, whole_weights(net), n_near))
    return found


@pytest.mark.parametrize(
    ("schedule", "limit", "hosts"),
    [("1f1b", {}, (0, 0, 1, 1, 2, 2, 3, 3)), ("zb_h1", TIGHT, (0, 0, 0, 0, 1, 1, 2, 2))],
    ids=["two hosts a stage", "one host and two"],
)
def test_second_shards_within_a_stage_have_the_bits_of_gathers(schedule, limit, hosts):
    """Each stage has four ranks, and groups of two. Ranks of a stage on one host keep no second shards."""
    if why_no_hosts():
        pytest.skip(why_no_hosts())
    outcome = run_ranks(8, with_second_shards, schedule, limit, hosts=hosts)
    for rank, ((losses, weights, none), (again, same, n_near)) in enumerate(outcome):
        assert losses == again, f"rank {rank}: {losses} and {again}"
        for name, value in weights.items():
            assert torch.equal(value, same[name]), f"rank {rank}, {name}: {value} and {same[name]}"
        of_stage = hosts[rank // 4 * 4 :][:4]
        assert none == 0 and (n_near > 0) == (len(set(of_stage)) > 1), (rank, none, n_near)
