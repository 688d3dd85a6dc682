"""Second shards (hpZ): the bits are those of stage 3 without them, and between two changes of the weights each unit
crosses the link between hosts once.

Failures of DeepSpeed's hpZ that tests here would find: training that does not converge (DeepSpeed#4851) or has loss 0
(#5059), and hangs (#5030), by bits of losses and weights over 20 steps with evaluations between; offload (#6391); three
groups of ranks (#4386).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_c.config import load_config
from deepspeed_c.errors import ConfigError, StateError
from deepspeed_c.plan.memory import SECOND, plan_memory
from deepspeed_c.plan.sizes import group_sizes, sizes_of
from deepspeed_c.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from deepspeed_c.zero import GatheredParameters
from deepspeed_c.zero.weights.drivers.lease import Lease
from tests import training
from tests.deepspeed_c.moe import dense as experts
from tests.deepspeed_c.moe import test_zero as test_experts
from tests.deepspeed_c.sequence import test_engine as test_sequences
from tests.deepspeed_c.zero import test_tensor_parallel
from tests.deepspeed_c.zero.test_oracle import FINE, check_runs, engine_runs, make_config
from tests.deepspeed_c.zero.traits import TRAITS, WIDTH, batch, make_model
from tests.hosts import why_no_hosts
from tests.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

HOSTS = (0, 0, 1, 1)
TWO = {"zero_optimization": {"zero_hpz_partition_size": 2}}
NO_SHM = {"comm": {"local": "off"}}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """The sections of all parts; sections of one name are joined."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def hpz(n: int, **sections: Any) -> dict[str, Any]:
    return merged({"zero_optimization": {"zero_hpz_partition_size": n}}, sections)


def oracle_body(rank, world, trait, dtype, cells, extra):
    return [engine_runs(rank, world, trait, dtype, cells, merged(extra, more)) for more in ({}, TWO)]


# Each trait runs once. Precisions, accumulation, arrangements of gather units and kinds of second slices take turns.
CELLS = [
    (trait, ("fp32", "bf16", "fp16")[i % 3], list(FINE)[i % len(FINE)], (1, 3)[i // 2 % 2], (i // 3) % 2 == 1)
    for i, trait in enumerate(TRAITS)
]


@pytest.mark.always(5)
@pytest.mark.parametrize("trait, dtype, fine, gas, is_sent", CELLS)
def test_the_oracle_holds_and_bits_are_those_without_second_shards(trait, dtype, fine, gas, is_sent):
    zero = dict(FINE[fine])
    if trait == "unused":
        zero["leaf_module"] = {"classes": ["tests.deepspeed_c.zero.traits.Unused"]}
    extra = {"zero_optimization": zero, **(NO_SHM if is_sent else {})}
    runs = run_ranks(4, oracle_body, trait, dtype, [(3, gas)], extra, hosts=HOSTS)
    check_runs(trait, dtype, [(3, gas)], merged(extra, TWO), [on for _, on in runs])
    for rank, ([off], [on]) in enumerate(runs):
        assert on.losses == off.losses and on.norms == off.norms, f"rank {rank}: {on.losses} instead of {off.losses}"
        for name, value in off.params.items():
            assert torch.equal(on.params[name], value), f"rank {rank}, {name}: {on.params[name]} is not {value}"


# -- with everything ---------------------------------------------------------------------------------------------------


def second_bytes(engine: Any) -> int:
    """Bytes of the second shards that are up to date."""
    seconds = [group.source.second for group in engine._fetcher.groups]
    return sum(second.nbytes for second in seconds if second is not None)


def is_kept(engine: Any) -> bool:
    return any(group.source.near is not None for group in engine._fetcher.groups)


def run_trait(rank: int, world: int, zero: dict[str, Any], trait: str, extra: dict[str, Any], steps: int = 20) -> Any:
    model = make_model(TRAITS[trait])
    settings = make_config(3, "fp32", 2, merged({"zero_optimization": {"reduce_bucket_size": 60, **zero}}, extra))
    engine = training.engine_of(model, settings)
    if engine.is_deepcompile_enabled():
        torch._dynamo.reset()
        engine.compile(backend="eager")
    losses = []
    with engine:
        for step in range(steps):
            for micro in range(2):
                x, y = batch(step, micro, rank, 0)
                losses.append(training.step(engine, x.to(next(model.parameters()).dtype), y))
            if step % 5 == 4:
                with torch.no_grad():
                    x, y = batch(step, 7, rank, 0)
                    losses.append(engine(x.to(next(model.parameters()).dtype), y).item())
        skipped = engine.skipped_steps
        return is_kept(engine), (losses, skipped, training.whole_weights(model))


def run_tensor_parallel(rank: int, world: int, zero: dict[str, Any]) -> Any:
    settings = test_tensor_parallel.make_config(3, gas=2)
    with test_tensor_parallel.make_engine(2, merged(settings, {"zero_optimization": zero})) as engine:
        run = test_tensor_parallel.train(engine, 2, 20)
        return is_kept(engine), (*run, test_tensor_parallel.logical(engine))


def run_sequences(rank: int, world: int, zero: dict[str, Any]) -> Any:
    with test_sequences.make_engine(2, merged(test_sequences.config_of(3, 2), {"zero_optimization": zero})) as engine:
        norms = test_sequences.train(engine, 2, range(20))
        return is_kept(engine), (norms, test_sequences.weights_of(engine))


def run_experts(rank: int, world: int, zero: dict[str, Any], ep_size: int) -> Any:
    with training.engine_of(
        experts.Model(4, (ep_size, 1)), test_experts.config_of(3, 2, "AdamW", {"zero": {**zero, **FINE["units"]}})
    ) as engine:
        test_experts.fill_engine(engine)
        for step in range(20):
            for micro in range(2):
                training.update(engine, engine(*experts.batch(step, micro, rank)))
        return is_kept(engine), test_experts.whole_params(engine.module)


def run_lora(rank: int, world: int, zero: dict[str, Any]) -> Any:
    """Low-rank adapters of a frozen layer, and a second forward before backward."""
    torch.manual_seed(3)
    base, down, up = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 12, bias=False)
    model = nn.ModuleDict({"base": base.requires_grad_(False), "down": down, "up": up, "out": nn.Linear(12, 5)})
    model.forward = lambda x, y: (
        (  # type: ignore[method-assign]
            model["out"](model["base"](x) + model["up"](model["down"](x))) - y
        )
        .square()
        .mean()
    )
    settings = make_config(3, "bf16", 1, {"zero_optimization": {"reduce_bucket_size": 60, **zero}})
    losses = []
    with training.engine_of(model, settings) as engine:
        for step in range(20):
            first, second = (engine(*(t.bfloat16() for t in batch(step, part, rank, 0))) for part in range(2))
            losses.append(training.update(engine, first + second))
        return is_kept(engine), (losses, training.whole_weights(model))


def offload(device: str, **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {
            "offload_param": {"device": device, **more},
            "offload_optimizer": {"device": device, **more},
        }
    }


OVERFLOWS = {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 4}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
# name -> (the host of each rank, body, its arguments)
WITH: dict[str, tuple[tuple[int, ...], Any, tuple[Any, ...]]] = {
    "three hosts": ((0, 0, 1, 1, 2, 2), run_trait, ("plain", {})),
    "offload to the host": (HOSTS, run_trait, ("tied", offload("cpu"))),
    "offload to NVMe": (HOSTS, run_trait, ("used_twice", "nvme")),
    "skipped steps": (HOSTS, run_trait, ("frozen", OVERFLOWS)),
    "autocast": (HOSTS, run_trait, ("plain", AUTOCAST)),
    "compiled graphs": (HOSTS, run_trait, ("used_twice", {"compile": {"deepcompile": True}}, 6)),
    "leaf modules": (HOSTS, run_trait, ("unused", {"zero_optimization": {"leaf_module": {"classes": ["tests.deepspeed_c.zero.traits.Unused"]}}})),
    "adapters": (HOSTS, run_lora, ()),
    "tensor ranks": ((0, 0, 0, 0, 1, 1, 1, 1), run_tensor_parallel, ()),
    "sequence ranks": (HOSTS, run_sequences, ()),
    "experts on 1 rank": (HOSTS, run_experts, (1,)),
    "experts on 2 ranks": (HOSTS, run_experts, (2,)),
    "experts on 4 ranks": (HOSTS, run_experts, (4,)),
}  # fmt: skip


def with_body(rank: int, world: int, name: str, folder: str) -> Any:
    _, body, args = WITH[name]
    args = tuple(offload("nvme", nvme_path=folder) if arg == "nvme" else arg for arg in args)
    (was_kept, without), (are_kept, kept) = (body(rank, world, zero, *args) for zero in ({}, TWO["zero_optimization"]))
    assert are_kept and not was_kept
    assert_same_bits(kept, without, name)
    return None


def assert_same_bits(got: Any, want: Any, where: str) -> None:
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and torch.equal(got, want), f"{where}: {got} is not {want}"
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert_same_bits(got[key], value, f"{where}, {key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for i, value in enumerate(want):
            assert_same_bits(got[i], value, f"{where}, {i}")
    else:
        assert got == want or (math.isnan(got) and math.isnan(want)), f"{where}: {got} is not {want}"


@pytest.mark.always(3)
@pytest.mark.limit(300)
@pytest.mark.parametrize("name", WITH)
def test_with_other_features_no_bit_differs(name: str, tmp_path: Path) -> None:
    hosts = WITH[name][0]
    preload = "torch._dynamo" if name == "compiled graphs" else ""
    run_ranks(len(hosts), with_body, name, str(tmp_path), hosts=hosts, preload=preload)


# -- bytes -------------------------------------------------------------------------------------------------------------


def gathers_of(engine: Any, comm: Any) -> list[tuple[str, int]]:
    """(label, bytes) of the gathers of weights that ``comm`` has entered."""
    names = {group.label for group in engine._fetcher.groups}
    recent = comm.ledger.recent(comm.ledger.last)
    return [(entry.label, entry.n_bytes) for entry in recent if entry.op == "all-gather" and entry.label in names]


FRUGAL = FINE["frugal"]  # a unit is released after each use


@on_ranks(4, hosts=HOSTS)
def test_a_unit_crosses_the_link_once_between_two_changes(rank, world):
    for local in ("auto", "off"):
        model = make_model(TRAITS["plain"])
        extra = merged({"zero_optimization": FRUGAL, "comm": {"local": local}}, TWO)
        with training.engine_of(model, make_config(3, "bf16", 3, extra)) as engine:
            units = engine._fetcher.groups
            each = sorted((group.label, group.unit.bucket_bytes(group.bucket)) for group in units)
            near = units[0].source.near
            assert near.global_ranks == [rank - rank % 2, rank - rank % 2 + 1] and near.ledger.axes == "hpz"
            for step in range(3):
                n_all, n_near = (len(gathers_of(engine, comm)) for comm in (engine._comm, near))
                n_gathers = engine._fetcher.stats.n_gathers
                for micro in range(3):
                    x, y = batch(step, micro, rank, 0)
                    training.step(engine, x.bfloat16(), y)
                assert second_bytes(engine) == 0  # out of date after the step
                over_all = gathers_of(engine, engine._comm)[n_all:]
                over_near = gathers_of(engine, near)[n_near:]
                n_gathers = engine._fetcher.stats.n_gathers - n_gathers
                assert n_gathers > 4 * len(units), (n_gathers, len(units))
                assert sorted(over_all) == each, (over_all, each)
                assert len(over_near) == (0 if local == "auto" else n_gathers - len(units)), over_near
                assert set(over_near) <= set(each), over_near
            engine.eval()
            with torch.no_grad():
                engine(*(t.bfloat16() for t in batch(9, 0, rank, 0)))
            assert second_bytes(engine) == sum(n_bytes for _, n_bytes in each) // 2


# -- writes ------------------------------------------------------------------------------------------------------------


def written_ways(folder: str) -> dict[str, Any]:
    """Each way in which weights are written, as a function of an engine."""

    def load(engine: Any) -> None:
        engine.save_checkpoint(folder)
        training.step(engine, *batch(3, 3, dist.get_rank(), 0))
        engine.load_checkpoint(folder)

    def gathered(engine: Any) -> None:
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=2):
            if dist.get_rank() == 2:
                for param in engine.module.parameters():
                    param.data.mul_(1.5)

    def set_full(engine: Any) -> None:
        for param in engine.module.parameters():
            safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) + 0.25)

    def set_local(engine: Any) -> None:
        for param in engine.module.parameters():
            safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) - 0.125)

    def while_held(engine: Any) -> None:
        fetcher, params = engine._fetcher, list(engine.module.parameters())
        fetcher.pin(fetcher.groups)
        for param in params:
            whole = param.detach().clone()
            safe_set_full_fp32_param(param, whole * 2)
            assert torch.equal(param.detach(), whole * 2), param
        fetcher.unpin(fetcher.groups)

    def module_state(engine: Any) -> None:
        state = {name: value * 0.75 for name, value in training.whole_weights(engine.module).items()}
        engine.load_module_state_dict(state)

    def set_trainable(engine: Any) -> None:
        engine.set_trainable(["inp.weight", "out.*"])
        training.step(engine, *batch(4, 4, dist.get_rank(), 0))

    def failed_edit(engine: Any) -> None:
        with pytest.raises(StateError), GatheredParameters(list(engine.module.parameters()), modifier_rank=1):
            engine.module.gain.data.fill_(9.0)
            raise StateError("x", where="y", fix="z")

    ways = (gathered, set_full, set_local, while_held, module_state, load, failed_edit, set_trainable)
    return {way.__name__: way for way in ways}


def written_body(rank: int, world: int, folder: str, comm: str) -> None:
    seen = []
    for part, zero in enumerate(({}, TWO["zero_optimization"])):
        model = make_model(TRAITS["plain"])
        settings = make_config(3, "fp32", 1, {"zero_optimization": {**FRUGAL, **zero}, "comm": {"local": comm}})
        values: dict[str, Any] = {}
        with training.engine_of(model, settings) as engine:
            training.step(engine, *batch(0, 0, rank, 0))
            for name, way in written_ways(f"{folder}/{part}").items():
                inputs = batch(8, 0, rank, 0)
                with torch.no_grad():
                    engine(*inputs), engine(*inputs)  # second shards are up to date
                assert bool(second_bytes(engine)) == bool(part)
                way(engine)
                with torch.no_grad():
                    values[name] = [engine(*inputs).item(), engine(*inputs).item()]
                assert values[name][0] == values[name][1], name
                values[f"weights after {name}"] = training.whole_weights(model)
        seen.append(values)
    assert_same_bits(seen[1], seen[0], "writes")
    changed = [name for name in seen[0] if not name.startswith("weights")]
    # A load and a failed edit leave the weights of before.
    losses = {seen[0][name][0] for name in changed}
    assert len(losses) == len(changed) - 2, losses


@pytest.mark.parametrize("comm", ["auto", "off"])
def test_each_kind_of_write_makes_second_shards_out_of_date(comm: str, tmp_path: Path) -> None:
    run_ranks(4, written_body, str(tmp_path), comm, hosts=HOSTS)


@on_ranks(4, hosts=HOSTS)
def test_a_lease_reads_second_shards_and_forgets_writes(rank, world):
    """Weights that somebody writes to in generation are as before afterwards, also in memory that ranks share."""
    model = make_model(TRAITS["plain"])
    settings = make_config(3, "fp32", 1, {"zero_optimization": {**FINE["units"], **TWO["zero_optimization"]}})
    with training.engine_of(model, settings) as engine:
        training.step(engine, *batch(0, 0, rank, 0))
        want = training.whole_weights(model)
        with torch.no_grad():
            engine(*batch(0, 0, rank, 0))
        lease = engine._fetcher.drivers.of(Lease)
        assert second_bytes(engine)
        assert lease.begin()
        if rank == 1:
            with torch.no_grad():
                model.inp.weight.data.add_(1.0)
            with pytest.raises(StateError, match="written to during generation"):
                lease.end()
        else:
            lease.end()
        assert_same_bits(training.whole_weights(model), want, f"rank {rank}")


# -- what is shown -----------------------------------------------------------------------------------------------------


@on_ranks(4, hosts=HOSTS)
def test_attributes_show_the_second_shards(rank, world):
    model = make_model(TRAITS["plain"])
    settings = make_config(3, "fp32", 1, {"zero_optimization": {**FRUGAL, **TWO["zero_optimization"]}})
    with training.engine_of(model, settings) as engine:
        assert all(param.ds_secondary_tensor is None for param in model.parameters())
        with torch.no_grad():
            engine(*batch(0, 0, rank, 0))
        want = training.whole_weights(model)
        for name, param in model.named_parameters():
            group = param.ds_zero_param_process_group
            assert dist.get_process_group_ranks(group) == [rank - rank % 2, rank - rank % 2 + 1]
            pieces = engine._comm.gather_objects(param.ds_secondary_tensor)
            for pair in (pieces[:2], pieces[2:]):
                assert torch.equal(torch.cat(pair), want[name].flatten()), (name, pair, want[name])
        assert engine.zero_hpz_partition_size() == 2


def kept_body(rank: int, world: int, settings: dict[str, Any]) -> int:
    with training.engine_of(make_model(TRAITS["frozen"]), settings) as engine:
        with torch.no_grad():
            engine(*batch(0, 0, rank, 0))
        return second_bytes(engine)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_plan_counts_second_shards(n: int) -> None:
    extra = merged({"zero_optimization": {**FINE["units"], "stage3_param_persistence_threshold": 0}}, hpz(n))
    settings = make_config(3, "fp32", 1, extra)
    model = make_model(TRAITS["frozen"])
    base = torch.optim.AdamW(model.parameters())
    sizes = sizes_of(model, [group["params"] for group in base.param_groups])
    plan = plan_memory(sizes, load_config(settings, world_size=4), 4, group_sizes(base, is_sharded=True))
    planned = {name: phase.kinds.get(SECOND, 0) for name, phase in plan.phases.items()}
    kept = run_ranks(4, kept_body, settings, hosts=HOSTS)
    assert set(planned.values()) == set(kept), (planned, kept)
    assert (kept[0] > 0) == (n == 2)


# -- where it wins nothing, and bad input ------------------------------------------------------------------------------


def refused_body(rank: int, world: int, extra: dict[str, Any]) -> tuple[str, bool]:
    model = make_model(TRAITS["plain"])
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    records: list[str] = []
    with mock.patch("deepspeed_c.zero.layout.second.log_dist", lambda text, **_: records.append(text)):
        try:
            engine = training.engine_of(model, make_config(3, "fp32", 1, extra))
        except ConfigError as error:
            assert_same_bits({name: param.detach() for name, param in model.named_parameters()}, before, "kept")
            return str(error), False
    with engine:
        training.step(engine, *batch(0, 0, rank, 0))
        return " ".join(records), is_kept(engine)


@pytest.mark.parametrize(
    "hosts, extra, said",
    [
        ((0, 0, 0, 0), hpz(2), ("no effect", "on one host", "4 ranks")),
        ((0, 0, 1, 1), hpz(4), ("no effect", "one group of 4")),
        ((0, 1, 2), hpz(3), ("no effect", "one group of 3")),
        ((0, 0, 1, 1), hpz(3), ("is 3", "the 4 ranks", "divisor of 4")),
        ((0, 0, 0, 1), hpz(2), ("is 2", "1 to 3", "equally many")),
        ((0, 0, 0, 1, 1, 1), hpz(2), ("is 2", "each host has 3", "use 3")),
        ((0, 0, 0, 0), hpz(2, comm={"zero_copy_gather": True}), ("is 2", "all 4 ranks", "zero_copy_gather")),
        ((0, 0, 1, 1), hpz(2, zero_optimization={"mics_shard_size": 2}), ("is 2", "mics_shard_size 2")),
        ((0, 0, 1, 1), hpz(2, zero_optimization={"stage": 2}), ("is 2", "ZeRO stage 2")),
    ],
    ids=str,
)
def test_sizes_that_win_nothing_or_fit_nothing(hosts, extra, said):
    for rank, (text, kept) in enumerate(run_ranks(len(hosts), refused_body, extra, hosts=hosts)):
        assert not kept
        assert rank or all(part in text for part in said), text
        assert "no effect" in text or "zero_hpz_partition_size" in text, text


@on_ranks(4, hosts=(0, 1, 2, 3))
def test_a_group_over_several_hosts_is_noted(rank, world):
    text, kept = refused_body(rank, world, hpz(2))
    assert kept and (rank or "spans 2 hosts of 1 ranks" in text), text


@on_ranks(4, hosts=(0, 1, 0, 1))
def test_groups_follow_hosts_and_not_numbers_of_ranks(rank, world):
    model = make_model(TRAITS["plain"])
    with training.engine_of(model, make_config(3, "fp32", 1, TWO)) as engine:
        assert engine._fetcher.groups[0].source.near.global_ranks == [rank % 2, rank % 2 + 2]
        training.step(engine, *batch(0, 0, rank, 0))
