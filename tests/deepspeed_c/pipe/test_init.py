"""``zero.Init`` around a ``PipelineModule``: each layer is sharded over the ranks that hold it, and a run has the same
bits as without it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import ConfigError
from deepspeed_c.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_c.pipe.topology import PipeModelDataParallelTopology
from deepspeed_c.zero import GatheredParameters
from deepspeed_c.zero.weights.param import state_of, whole_of
from tests.deepspeed_c.pipe.models import VOCABULARY, WIDTH, Block, Embed, layers, loss_fn, micro_batches
from tests.deepspeed_c.pipe.test_engine import config_of
from tests.ranks import run_ranks
from tests.training import engine_of

N, STEPS = 4, 3
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


class Edited(nn.Module):
    """Edits, while it is constructed, a weight that is sharded already."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.inner.bias, 0.25)
        self.inner.weight.data.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def edited_layers() -> list[Any]:
    return [LayerSpec(Embed), *(LayerSpec(Edited) for _ in range(5)), LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def given_layers() -> list[Any]:
    """Modules, which each rank has made, one of them in two places of different stages."""
    embed, shared = Embed(), Edited()
    return [embed, Block(WIDTH), shared, *(Block(WIDTH) for _ in range(3)), shared, nn.Linear(WIDTH, VOCABULARY)]


LAYERS = {"tied": layers, "untied": lambda: layers(tied=False), "edited": edited_layers, "given": given_layers}


def build(kind: str, stages: int, config: dict[str, Any], is_sharded: bool, **options: Any) -> PipelineModule:
    with deepspeed_c.zero.Init(config_dict_or_path=config) if is_sharded else nullcontext():
        return PipelineModule(LAYERS[kind](), num_stages=stages, loss_fn=loss_fn, **options)


def train(engine: Any, first: int, last: int) -> list[float]:
    data_rank = engine.module.mpu().get_data_parallel_rank()
    return [float(engine.train_batch(iter(micro_batches(step, data_rank, N)))) for step in range(first, last)]


def compared(
    rank: int, world: int, stages: int, zero: int, kind: str, options: dict[str, Any], folder: str, is_seeded: bool
) -> tuple[Any, Any]:
    """(losses and weights without ``zero.Init``, the same with it). Then each loads the other's checkpoint, and goes
    on."""
    config = config_of(N, **ADAM, zero_optimization={"stage": zero})
    losses: list[list[float]] = [[], []]
    weights: list[dict[str, torch.Tensor]] = [{}, {}]
    for is_sharded in (False, True):
        torch.manual_seed(0 if kind == "given" else rank)
        net = build(kind, stages, config, is_sharded, seed_layers=is_seeded, **options)
        with engine_of(net, config) as engine:
            losses[is_sharded] += train(engine, 0, STEPS)
            engine.save_checkpoint(os.path.join(folder, str(is_sharded)), tag="three")
    for is_sharded in (False, True):
        torch.manual_seed(7)
        net = build(kind, stages, config, is_sharded, seed_layers=is_seeded, **options)
        with engine_of(net, config) as engine:
            engine.load_checkpoint(os.path.join(folder, str(not is_sharded)))
            losses[is_sharded] += train(engine, STEPS, STEPS + 1)
            with GatheredParameters(net.parameters()):
                weights[is_sharded] = {name: p.detach().clone() for name, p in net.named_parameters()}
    return (losses[0], weights[0]), (losses[1], weights[1])


@pytest.mark.parametrize(
    ("world", "stages", "zero", "kind", "is_seeded", "options"),
    [
        (2, 2, 0, "tied", True, {}),
        (2, 2, 2, "tied", False, {"schedule": "zb_v"}),
        (2, 2, 1, "untied", False, {"schedule": "interleaved", "virtual_stages": 2}),
        (2, 2, 2, "edited", False, {}),
        (2, 2, 2, "given", False, {}),
        (2, 1, 2, "given", False, {}),
        (4, 2, 2, "tied", False, {}),
        (4, 2, 1, "edited", True, {}),
        (4, 2, 2, "given", False, {}),
        (4, 4, 2, "tied", True, {}),
        (2, 2, 3, "tied", False, {}),
        (4, 2, 3, "tied", False, {"schedule": "zb_v"}),
        (4, 2, 3, "edited", False, {}),
        (4, 2, 3, "given", False, {}),
    ],
)
def test_a_run_has_the_same_bits_and_loads_the_others_checkpoint(
    tmp_path, world, stages, zero, kind, is_seeded, options
):
    outcome = run_ranks(world, compared, stages, zero, kind, options, str(tmp_path), is_seeded)
    for rank, ((plain, wanted), (losses, weights)) in enumerate(outcome):
        assert losses == plain, f"rank {rank}: {losses} with zero.Init, {plain} without"
        assert weights.keys() == wanted.keys()
        for name, value in weights.items():
            assert torch.equal(value, wanted[name]), f"rank {rank}, {name}: {value} and {wanted[name]}"


def shards(rank: int, world: int, stages: int, kind: str, is_later: bool) -> dict[str, Any]:
    """By name: (ranks that have parts, elements of this rank's part, elements of the whole, whole)."""
    torch.manual_seed(0 if kind == "given" else rank)
    if is_later:
        net = build(kind, stages, {}, False)
        deepspeed_c.zero.Init(module=net)
    else:
        net = build(kind, stages, {}, True)
    found = {}
    for name, param in net.named_parameters():
        state = state_of(param)
        found[name] = (list(state.comm.global_ranks), state.piece.numel(), state.numel, state.whole())
    return found


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("kind", ["tied", "given", "edited"])
@pytest.mark.parametrize(("world", "stages"), [(2, 2), (4, 2), (3, 1)])
def test_a_rank_holds_its_part_of_its_stage(world, stages, kind, is_later):
    outcome = run_ranks(world, shards, stages, kind, is_later)
    copies = world // stages
    for rank, found in enumerate(outcome):
        mates = list(range(rank // copies * copies, (rank // copies + 1) * copies))
        assert found
        for name, (ranks, n_own, n_all, whole) in found.items():
            assert ranks == mates, f"rank {rank}, {name}: {ranks}"
            assert n_all // copies <= n_own <= -(-n_all // copies), f"rank {rank}, {name}: {n_own} of {n_all}"
            for mate in mates:
                assert torch.equal(whole, outcome[mate][name][3]), (
                    f"ranks {rank} and {mate} have other values of {name}"
                )
            # Tied weights are the same on all stages that have them. (Before a run only zero.Init itself takes care.)
            other = outcome[0].get(name)
            assert is_later or other is None or torch.equal(whole, other[3]), f"rank {rank}: other values of {name}"


class Outer(nn.Module):
    """A pipeline within a module that has, and edits, weights of its own."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.before = nn.Linear(3, 5)
        self.before.weight.data.fill_(2.0)
        self.pipe = PipelineModule(edited_layers(), num_stages=stages)
        self.after = nn.Linear(5, 3)
        self.before.bias.data.fill_(3.0)
        self.after.bias.data.fill_(4.0)
        first = next(self.pipe.parameters())
        first.data.fill_(float(self.pipe.stage_id))


@pytest.mark.parametrize("world", [2, 4])
def test_weights_around_a_pipeline_are_sharded_over_all_ranks(world):
    for rank, (values, first, ranks) in enumerate(run_ranks(world, around, 2)):
        assert values == [2.0, 3.0, 4.0], f"rank {rank}: {values}"
        assert first == float(rank // (world // 2)), f"rank {rank}: {first}"
        assert ranks == [list(range(world))] * 2


def around(rank: int, world: int, stages: int) -> Any:
    with deepspeed_c.zero.Init():
        net = Outer(stages)
    values = [float(whole_of(p).flatten()[0]) for p in (net.before.weight, net.before.bias, net.after.bias)]
    ranks = [list(state_of(p).comm.global_ranks) for p in (net.before.weight, net.after.weight)]
    return values, float(whole_of(next(net.pipe.parameters())).flatten()[0]), ranks


def profiled(rank: int, world: int) -> tuple[int, list[int], bool]:
    specs = [LayerSpec(nn.Linear, 8, 8) for _ in range(5)]
    with deepspeed_c.zero.Init():
        net = PipelineModule(specs, num_stages=2, partition_method="profile", example_input=torch.ones(2, 8))
        later = nn.Linear(2, 2)
    return len(net.layer_times_ns), net.parts, state_of(later.weight) is not None


def test_layers_are_dealt_out_by_their_times():
    for n_times, parts, is_sharded in run_ranks(2, profiled):
        assert (n_times, parts[0], parts[-1], is_sharded) == (5, 0, 5, True)


def in_topology(rank: int, world: int) -> tuple[list[list[int]], list[float]]:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    torch.manual_seed(rank)
    with deepspeed_c.zero.Init():
        net = PipelineModule([LayerSpec(nn.Linear, 3, 3) for _ in range(2)], topology=topology)
    torch.manual_seed(rank)
    own = nn.Linear(3, 3)
    params = list(net.parameters())
    same = [float((whole_of(p) - q).abs().max()) for p, q in zip(params, own.parameters())]
    return [list(state_of(p).comm.global_ranks) for p in params], same


def test_ranks_with_other_parts_of_a_layer_keep_their_own():
    """A layer may be cut by hand over the ranks of the axis "model"."""
    for rank, (ranks, errors) in enumerate(run_ranks(4, in_topology)):
        assert ranks == [[rank]] * 2 and errors == [0.0, 0.0], f"rank {rank}: {ranks}, {errors}"


def cut_by_hand(rank: int, world: int) -> list[str]:
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    with deepspeed_c.zero.Init():
        layer = nn.Linear(3, 3)
        layer.weight.tensor_model_parallel = True
        with pytest.raises(ConfigError) as raised:
            PipelineModule([layer], topology=topology)
    return [str(raised.value)]


def test_parts_that_were_sharded_over_ranks_with_other_parts_are_refused():
    for (text,) in run_ranks(2, cut_by_hand):
        assert "rank 0 would share its layers with the ranks [1]" in text and "LayerSpec" in text, text


def refused(rank: int, world: int) -> list[str]:
    everyone = torch.distributed.new_group(list(range(world)))
    found = []

    def attempt(make: Any, **options: Any) -> None:
        with pytest.raises(ConfigError) as raised, deepspeed_c.zero.Init(**options):
            make()
        found.append(str(raised.value))

    def function() -> PipelineModule:
        made = nn.Linear(2, 2)
        return PipelineModule([LayerSpec(lambda: made), LayerSpec(nn.Linear, 2, 2)], num_stages=2)

    def tied() -> PipelineModule:
        made = nn.Linear(2, 2)
        return PipelineModule([TiedLayerSpec("a", lambda: made) for _ in range(2)], num_stages=2)

    def times() -> PipelineModule:
        given = [nn.Linear(2, 2), nn.Linear(2, 2)]
        return PipelineModule(given, num_stages=2, partition_method="profile", example_input=torch.ones(1, 2))

    attempt(lambda: PipelineModule(layers(), num_stages=2), data_parallel_group=everyone)
    attempt(function)
    attempt(tied)
    attempt(times)
    # Nothing is left behind: a pipeline is built and trains.
    config = config_of(N, **ADAM, zero_optimization={"stage": 1})
    with engine_of(build("tied", 2, config, True), config) as engine:
        train(engine, 0, 1)
    return found


def test_what_cannot_be_sharded_is_refused_on_all_ranks():
    for group, function, tied, times in run_ranks(2, refused):
        assert "data_parallel_group" in group and "hold others" in group, group
        assert "layers=...)[0]" in function and "pass the module itself" in function, function
        assert "layers=...)[0]" in tied, tied
        assert "layer 0 (Linear)" in times and "LayerSpec" in times, times


def grouped(rank: int, world: int) -> list[int]:
    mine = None
    for first in (0, 2):
        group = torch.distributed.new_group([first, first + 1])
        mine = group if rank in (first, first + 1) else mine
    config = config_of(N, **ADAM, zero_optimization={"stage": 2})
    with deepspeed_c.zero.Init(data_parallel_group=mine):
        net = PipelineModule(layers(), num_stages=2, loss_fn=loss_fn)
    ranks = list(state_of(next(net.parameters())).comm.global_ranks)
    with engine_of(net, config) as engine:
        train(engine, 0, 1)
    return ranks


def test_a_given_group_within_a_stage_stays_in_use():
    assert run_ranks(4, grouped) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def low(rank: int, world: int, dtype: str) -> tuple[list[float], list[float], set[torch.dtype]]:
    config = config_of(N, **ADAM, zero_optimization={"stage": 2}, **{dtype: {"enabled": True}})
    losses = []
    for is_sharded in (False, True):
        net = build("tied", 2, config, is_sharded, seed_layers=True)
        dtypes = {param.dtype for param in net.parameters()}
        with engine_of(net, config) as engine:
            losses.append(train(engine, 0, STEPS))
    return losses[0], losses[1], dtypes


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_made_in_the_dtype_of_the_configuration(dtype, expected):
    # Masters begin as rounded weights, so losses agree to the rounding only.
    for plain, losses, dtypes in run_ranks(2, low, dtype):
        assert dtypes == {expected} and losses == pytest.approx(plain, rel=2e-2), f"{losses} and {plain}"
