"""Weights in joint memory of the ranks (``comm.zero_copy_gather``): they have the same bits as with gathers, no rank
sends them, and all ranks see every write from outside."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c import _C
from deepspeed_c.comm.transports import joint_memory
from deepspeed_c.errors import CommError, StateError
from deepspeed_c.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param
from deepspeed_c.zero import GatheredParameters
from deepspeed_c.zero.states.update import Updates
from deepspeed_c.zero.weights.param import ZeroParamStatus, is_released
from tests import training
from tests.deepspeed_c.zero.test_oracle import FINE, check_runs, engine_runs, make_config
from tests.deepspeed_c.zero.traits import TRAITS, WIDTH, batch
from tests.ranks import RanksFailed, on_ranks, run_ranks
from tests.toys import Chain, square_error
from tests.waits import exit_status, fork_with_alarm

UNITS = {"zero_optimization": {"reduce_bucket_size": 60}}
ON = {"comm": {"local": "shm", "zero_copy_gather": True}}
OFF = {"comm": {"local": "shm"}}


def net() -> nn.Module:
    """Trained layers with a frozen one between them."""
    frozen = nn.Linear(7, 7).requires_grad_(False)
    return Chain(torch.tanh, square_error, inp=nn.Linear(WIDTH, 7), frozen=frozen, out=nn.Linear(7, 5))


def make(dtype: str = "fp32", extra: dict | None = None, on: dict = ON):
    torch.manual_seed(7)
    model = net()
    config = make_config(3, dtype, 1, {**UNITS, **on, **(extra or {})})
    return model, deepspeed_c.initialize(model=model, config=config)[0]


def train(engine, rank: int, steps: int = 2, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step, 0, rank, 0)
        losses.append(training.step(engine, x.to(next(engine.parameters()).dtype), y))
    return losses


def check_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], label: str) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{label}, {name}: {got[name]} is not {value}"


# -- the same bits as with gathers -------------------------------------------------------------------------------------


def oracle_body(rank, world, trait, dtype, cells, extra):
    return [engine_runs(rank, world, trait, dtype, cells, {**extra, **comm}) for comm in (OFF, ON)]


# Each trait runs once. Precisions, numbers of ranks and arrangements of gather units take turns.
CELLS = [
    (trait, ("fp32", "bf16", "fp16")[i % 3], (2, 3)[i // 2 % 2], list(FINE)[i % len(FINE)], (1, 3)[i % 2])
    for i, trait in enumerate(TRAITS)
]


@pytest.mark.parametrize("trait, dtype, world, fine, gas", CELLS)
def test_the_oracle_holds_and_bits_are_those_of_gathers(trait, dtype, world, fine, gas):
    zero = dict(FINE[fine])
    if trait == "unused":
        zero["leaf_module"] = {"classes": ["tests.deepspeed_c.zero.traits.Unused"]}
    extra = {"zero_optimization": zero}
    runs = run_ranks(world, oracle_body, trait, dtype, [(3, gas)], extra)
    check_runs(trait, dtype, [(3, gas)], {**extra, **ON}, [on for _, on in runs])
    for rank, ([off], [on]) in enumerate(runs):
        assert on.losses == off.losses and on.norms == off.norms, f"rank {rank}: {on.losses} instead of {off.losses}"
        check_same(on.params, off.params, f"rank {rank}")


# -- the mapping -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_no_gather_is_sent_and_two_fences_are(rank, world):
    model, engine = make("bf16")
    units = [group.unit for group in engine._fetcher.groups]
    assert len(units) > 3 and not any(group.source.is_collective for group in engine._fetcher.groups)
    train(engine, rank, 1)
    ledger = engine._comm.ledger
    before = engine._fetcher.stats.as_dict()
    x, y = batch(5, 0, rank, 0)
    assert is_released(model.inp.weight) and model.inp.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with pytest.raises(StateError):
        model.inp.weight.sum()
    at_updates = []

    def noting(updates, *args):
        at_updates.append(engine._fetcher.stats.n_fences)
        return real(updates, *args)

    real = Updates._shards  # the tensors of each update
    loss = engine(x.bfloat16(), y)
    engine.backward(loss)
    with mock.patch.object(Updates, "_shards", noting):
        engine.step()
    # All weights are written between the two fences.
    assert set(at_updates) == {before["n_fences"] + 1}
    after = engine._fetcher.stats.as_dict()
    assert after["n_gathers"] > before["n_gathers"] and after["n_fences"] == before["n_fences"] + 2
    recent = ledger.recent(40)
    labels = [str(entry) for entry in recent]
    names = {name for name, _ in model.named_parameters()}
    gathers = [text for text in labels if text.startswith("all-gather") and any(name in text for name in names)]
    assert not gathers, gathers
    assert sum("weights about to be written" in text for text in labels) >= 1, labels
    with GatheredParameters(model.out.bias, modifier_rank=0):
        pass
    assert engine._fetcher.stats.n_fences == after["n_fences"] + 1
    safe_set_full_fp32_param(model.out.bias, torch.ones(5))
    assert engine._fetcher.stats.n_fences == after["n_fences"] + 3
    # The host has one copy: the views of all ranks show the slices themselves.
    group = engine._fetcher.groups[0]
    with GatheredParameters(model.parameters()):
        lent = engine._fetcher.means.pool.n_bytes
        mine = group.unit.own_slice(group.buffer, group.bucket)
        assert torch.equal(mine, group.unit.param_slice(group.bucket)) and lent == 0
        assert mine.data_ptr() != group.unit.param_slice(group.bucket).data_ptr()
    engine.close()


@on_ranks(2)
def test_a_write_of_ones_own_is_nobody_elses(rank, world):
    """A direct write of a program to a weight stays on its rank, and the next update of weights overwrites it."""
    model, engine = make()
    weight = model.out.weight
    want = training.whole_weights(model)
    with GatheredParameters(model.parameters()):  # the context spans the forwards below
        if rank == 0:
            weight.data.fill_(7.0)
        engine._comm.barrier()
        if rank == 1:
            assert torch.equal(weight, want["out.weight"]), "another rank's write is seen here"
        else:
            assert weight.unique().tolist() == [7.0]
        engine._comm.barrier()
        if rank == 0:
            for memory in {group.unit.joint for group in engine._fetcher.groups}:
                memory.forget()
            assert torch.equal(weight, want["out.weight"]), "the write has reached the memory"
    model2, other = make(on=OFF)
    # Write between backward and step. An ordinary gather drops the write at its release, and masters do not change.
    x, y = batch(0, 0, rank, 0)
    for one, net in ((engine, model), (other, model2)):
        loss = one(x, y)
        one.backward(loss)
        first = one._fetcher.groups[0]
        one._fetcher.pin([first])
        if rank == 0:
            first.buffer.mul_(3.0)
        one._fetcher.unpin([first])
        one.step()
    check_same(training.whole_weights(model), training.whole_weights(model2), f"rank {rank}")
    engine.close()
    other.close()


@pytest.mark.parametrize("dtype, world", [("fp32", 3), ("bf16", 2)])
@on_ranks()
def test_edits_from_outside_are_as_with_gathers(rank, world, dtype):
    """Every way to write weights from outside, each followed by training, gives the same result as with gathers."""

    def run(on):
        model, engine = make(dtype, on=on)
        train(engine, rank, 1)
        with GatheredParameters([model.inp.weight, model.frozen.bias], modifier_rank=1):
            if rank == 1:
                model.inp.weight.data.mul_(0.5)
                model.frozen.bias.fill_(0.25)
        found = {f"gathered.{n}": v for n, v in training.whole_weights(model).items()}
        found["loss.0"] = torch.tensor(train(engine, rank, 1, 1))
        safe_set_full_fp32_param(model.out.weight, torch.full_like(safe_get_full_fp32_param(model.out.weight), 0.125))
        found |= {f"set.{n}": v for n, v in training.whole_weights(model).items()}
        safe_set_local_fp32_param(model.inp.bias, deepspeed_c.utils.safe_get_local_fp32_param(model.inp.bias) + 1)
        found |= {f"local.{n}": v for n, v in training.whole_weights(model).items()}
        found["loss.1"] = torch.tensor(train(engine, rank, 1, 2))
        state = {n: v + 1 for n, v in training.whole_weights(model).items()}
        engine.load_module_state_dict(state)
        found |= {f"loaded.{n}": v for n, v in training.whole_weights(model).items()}
        found["loss.2"] = torch.tensor(train(engine, rank, 1, 3))
        engine.set_trainable(["inp.weight", "inp.bias", "frozen.weight"])
        found |= {f"trainable.{n}": v for n, v in training.whole_weights(model).items()}
        found["loss.3"] = torch.tensor(train(engine, rank, 2, 4))
        engine.offload_states()
        engine.reload_states()
        found |= {f"moved.{n}": v for n, v in training.whole_weights(model).items()}
        found["loss.4"] = torch.tensor(train(engine, rank, 1, 6))
        inputs = [t.to(next(engine.parameters()).dtype) for t in batch(9, 0, rank, 0)]
        with torch.no_grad():
            found["eval"] = engine(*inputs)
        with torch.inference_mode():
            found["inference"] = engine(*inputs).clone()
        found["loss.5"] = torch.tensor(train(engine, rank, 1, 7))
        assert all(group.source.is_collective != (on is ON) for group in engine._fetcher.groups)
        engine.close()
        found |= {f"closed.{n}": v for n, v in training.whole_weights(model).items()}
        return found

    check_same(run(ON), run(OFF), f"rank {rank}")


@on_ranks(2)
def test_checkpoints_and_init(rank, world, folder):
    model, engine = make("bf16")
    train(engine, rank, 2)
    engine.save_checkpoint(folder)
    want, losses = training.whole_weights(model), train(engine, rank, 2, 2)
    engine.load_checkpoint(folder)
    check_same(training.whole_weights(model), want, "loaded where it was saved")
    assert train(engine, rank, 2, 2) == losses
    engine.close()
    for on in (OFF, ON):
        model, engine = make("bf16", on=on)
        engine.load_checkpoint(folder)
        check_same(training.whole_weights(model), want, f"loaded with {on}")
        assert train(engine, rank, 2, 2) == losses
        engine.close()
    # Models built under zero.Init, and whole state dicts, work too.
    torch.manual_seed(7)
    with deepspeed_c.zero.Init():
        model = net()
    engine = deepspeed_c.initialize(model=model, config=make_config(3, "bf16", 1, {**UNITS, **ON}))[0]
    engine.load_checkpoint(folder)
    state = engine._zero3_consolidated_16bit_state_dict()
    if rank == 0:
        check_same({n: state[n] for n in want}, want, "consolidated")
    assert train(engine, rank, 2, 2) == losses
    engine.close()


@on_ranks(4)
def test_groups_of_ranks_each_hold_theirs(rank, world):
    def run(on):
        model, engine = make(extra={"zero_optimization": {**UNITS["zero_optimization"], "mics_shard_size": 2}}, on=on)
        losses = train(engine, rank, 3)
        assert all(group.source.is_collective != (on is ON) for group in engine._fetcher.groups)
        found = training.whole_weights(model)
        engine.close()
        return losses, found

    (losses, found), (want_losses, want) = run(ON), run(OFF)
    assert losses == want_losses
    check_same(found, want, f"rank {rank}")


@on_ranks(2)
def test_a_forked_child_reads_and_keeps_its_writes_to_itself(rank, world):
    """A forked child reads the current weights. Its writes stay private."""
    model, engine = make()
    with GatheredParameters(model.parameters()):
        want = model.out.weight.detach().clone()
        pid = fork_with_alarm()
        if pid == 0:
            is_right = torch.equal(model.out.weight, want)
            model.out.weight.data.fill_(3.0)
            os._exit(0 if is_right else 1)
        assert exit_status(pid) == 0
        assert torch.equal(model.out.weight, want)
    engine._comm.barrier()
    train(engine, rank, 1)
    engine.close()


def mapped() -> int:
    """The number of mappings of joint memory and of segments in this process."""
    return len(re.findall(r"memfd:deepspeed_c", Path("/proc/self/maps").read_text()))


@on_ranks(2)
def test_the_memory_goes_with_who_holds_it(rank, world):
    model, engine = make()
    train(engine, rank, 1)
    group = engine._fetcher.groups[0]
    held = group.unit.joint.whole(group.bucket)
    last = held.clone()
    before = mapped()
    del group
    engine.close()
    del engine, model
    gc.collect()
    assert mapped() < before
    if rank == 0:
        assert torch.equal(held, last), "memory that somebody holds went with the engine"
    del held
    gc.collect()


# -- without joint memory ----------------------------------------------------------------------------------------------


def without_body(rank, world, extra, stage, why):
    config = make_config(stage, "fp32", 1, {**UNITS, "comm": {"zero_copy_gather": True}})
    for key, value in extra.items():
        config[key] = {**config.get(key, {}), **value}
    said = []
    real, deepspeed_c.zero.layout.layout.log_dist = (
        deepspeed_c.zero.layout.layout.log_dist,
        lambda text, **options: said.append(text),
    )
    torch.manual_seed(7)
    try:
        engine = deepspeed_c.initialize(model=net(), config=config)[0]
    finally:
        deepspeed_c.zero.layout.layout.log_dist = real
    train(engine, rank, 1)
    assert len(said) == 1 and "zero_copy_gather" in said[0] and why in said[0], said
    if engine._fetcher is not None:
        assert (
            all(group.source.is_collective for group in engine._fetcher.groups) and engine._fetcher.stats.n_fences == 0
        )
    engine.close()


@pytest.mark.parametrize(
    "extra, stage, why",
    [
        ({"comm": {"local": "off"}}, 3, '"off"'),
        ({}, 2, "stage 2"),
        ({"zero_optimization": {"offload_param": {"device": "nvme", "max_in_cpu": 0}}}, 3, "offloaded"),
    ],
)
def test_where_it_cannot_be_gathers_are_as_ever(extra, stage, why, tmp_path):
    if "zero_optimization" in extra:
        extra["zero_optimization"]["offload_param"]["nvme_path"] = str(tmp_path)
    run_ranks(2, without_body, extra, stage, why)


@on_ranks(2)
def test_no_room_on_one_rank(rank, world):
    """One rank has no room for its slices: all ranks gather, and one line of the log says why."""
    real, said = _C.ShmJoint, []

    class Full:
        def __init__(self, n_bytes, address=None):
            self._real = real(n_bytes, address)
            self.address, self.part, self.view = self._real.address, self._real.part, self._real.view

        def commit(self, offset, n_bytes):
            if rank == 1:
                raise MemoryError("4096 bytes are asked for, 12 are available")

    class Log:
        warning = staticmethod(lambda text, *args: said.append(text % args))

    joint_memory._C.ShmJoint, logger, joint_memory.logger = Full, joint_memory.logger, Log
    try:
        _, engine = make()
    finally:
        joint_memory._C.ShmJoint, joint_memory.logger = real, logger
    assert all(group.source.is_collective for group in engine._fetcher.groups)
    assert len(set(said)) == (rank == 0) and all("rank 1: 4096 bytes" in text for text in said), said
    train(engine, rank, 1)
    engine.close()


def hang_body(rank, world):
    """The error names a rank that does not come to the fence."""
    _, engine = make()
    train(engine, rank, 1)
    if rank == 1:
        os._exit(3)
    with pytest.raises(CommError, match="rank 1") as caught:
        engine._fetcher.begin_writes()
        engine._fetcher.begin_writes()
    assert "weights about to be written" in str(caught.value), caught.value


def test_a_rank_that_dies_before_a_fence_is_named(run_ranks):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, hang_body, fresh=True)
    assert "rank 1" in str(caught.value) and "AssertionError" not in str(caught.value), caught.value
