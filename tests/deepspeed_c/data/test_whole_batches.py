"""``whole_batches``: batch k of an order is the same on any number of ranks, against lists written out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest

from deepspeed_c import _C
from deepspeed_c.data.history import SampleHistory
from deepspeed_c.data.loader import DeepSpeedDataLoader
from deepspeed_c.data.sampler import DeepSpeedDataSampler
from tests.deepspeed_c.data.test_sampler import metric, section
from tests.deepspeed_c.data.test_unbroken import sequence

WORLDS = (1, 2, 3, 4, 6)


def loaders_of(n: int, batch: int, world: int, **keys) -> list[DeepSpeedDataLoader]:
    return [
        DeepSpeedDataLoader(
            range(n), batch, False, 0, None, data_parallel_world_size=world, data_parallel_rank=rank,
            whole_batches=True, **keys,
        )
        for rank in range(world)
    ]  # fmt: skip


def batches_of(loaders: list[DeepSpeedDataLoader]) -> Iterator[list[int]]:
    """Batches by position: of round i and rank r at i * world + r. The end of an epoch begins the next one."""
    while True:
        batches = [next(loader, None) for loader in loaders]
        assert len({batch is None for batch in batches}) == 1, batches
        if batches[0] is None:
            batches = [next(iter(loader)) for loader in loaders]
        yield from (batch.tolist() for batch in batches)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 7, 24, 60, 61])
def test_an_epoch_has_the_same_batches_up_to_its_end(n: int, batch: int, shuffle: bool) -> None:
    for epoch in range(3):
        order = _C.SampleOrder(n, seed=5 if shuffle else None)
        samples = [order.round(epoch, p)[0][0] for p in range(n)]
        for world in WORLDS:
            for drop_last in (False, True):
                loaders = loaders_of(n, batch, world, seed=5, shuffle=shuffle, dataloader_drop_last=drop_last)
                for loader in loaders:
                    loader.set_epoch(epoch)
                got = [b.tolist() for round_ in zip(*loaders, strict=True) for b in round_]
                assert all(loader.state_dict()["position"] <= n for loader in loaders)
                n_rounds = n // (world * batch) if drop_last else -(-n // (world * batch))
                wanted = [
                    [samples[(k * batch + j) % n] for j in range(batch)] for k in range(n_rounds * world)
                ]  # the beginning of the epoch fills up the last round
                assert got == wanted, (world, drop_last, got, wanted)
                assert len(loaders[0]) == n_rounds
                assert len(loaders[0].data_sampler) == sum(map(len, got)) // world == len(list(loaders[0].data_sampler))


@pytest.mark.parametrize("n, batch", [(1, 2), (7, 2), (24, 2), (25, 3), (61, 1)])
def test_unbroken_epochs_have_the_same_batches_for_ever(n: int, batch: int) -> None:
    for shuffle in (False, True):
        wanted = sequence(n, -(-72 * batch // n), 5 if shuffle else None)
        for world in WORLDS:
            loaders = loaders_of(n, batch, world, seed=5, shuffle=shuffle, is_unbroken=True)
            got = [s for b in islice(batches_of(loaders), 72) for s in b]
            assert got == wanted[: 72 * batch], (world, shuffle, got, wanted)


@pytest.mark.parametrize("case", range(6))
def test_a_place_goes_on_with_the_next_batch_on_other_ranks(case: int) -> None:
    random = Random(case)
    n, batch, n_step = random.choice([5, 24, 31, 60]), random.choice([1, 2, 3]), 12
    wanted = sequence(n, -(-n_step * 9 * batch // n), 5)
    got, history, state, seen = [], SampleHistory(), None, []
    for step in range(1, 9):
        world = random.choice(WORLDS)
        loaders = loaders_of(n, batch, world, seed=5, is_unbroken=True)
        for loader in loaders if state else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        batches = list(islice(batches_of(loaders), n_step))
        state, history = loaders[0].state_dict(), _copy(history)
        got += [s for b in batches for s in b]
        history.note(step, loaders[0].take_runs(), loaders[0].reading, None)
        seen.append(tuple(tuple(tuple(b) for b in batches[rank::world]) for rank in range(world)))
    assert got == wanted[: len(got)], (got, wanted)
    for step, batches in enumerate(seen, 1):
        assert history.samples(step).samples == batches, (step, history.samples(step), batches)


def _copy(history: SampleHistory) -> SampleHistory:
    state, copy = json.loads(json.dumps(history.state_dict())), SampleHistory()
    history.check(state, "here")
    copy.load_state_dict(state)
    return copy


@pytest.mark.parametrize("has_curriculum", [False, True])
def test_a_step_of_data_efficiency_has_the_same_batches(tmp_path, has_curriculum: bool) -> None:
    random, n, batch = Random(3), 29, 2
    values = [random.randint(1, 20) for _ in range(n)]
    config = section({"length": metric(tmp_path / "m", values, 12, 20)} if has_curriculum else None, epochs=99)
    found, states = {}, {}
    for world in WORLDS:
        n_rounds = 12 // world
        samplers = [
            DeepSpeedDataSampler(config, n, batch, rank, world, None, n_rounds, rank, whole_batches=True)
            for rank in range(world)
        ]
        found[world] = [b for rounds in islice(zip(*samplers, strict=True), 7 * n_rounds) for b in rounds]
        states[world] = [sampler.state_dict() for sampler in samplers]
        # From the place after 3 steps that one rank has saved.
        for sampler in samplers:
            sampler.load_state_dict(_after_three(config, n, batch))
        again = [b for rounds in islice(zip(*samplers, strict=True), 4 * n_rounds) for b in rounds]
        assert again == found[1][36:], (world, again, found[1][36:])
    assert all(b == found[1] for b in found.values()), found
    assert all(state == states[1][0] for each in states.values() for state in each), states


def _after_three(config, n: int, batch: int):
    alone = DeepSpeedDataSampler(config, n, batch, 0, 1, None, 12, 0, whole_batches=True)
    assert len(list(islice(alone, 36))) == 36
    return json.loads(json.dumps(alone.state_dict()))


def test_the_end_of_a_whole_run_is_filled_up_with_whole_batches() -> None:
    """13 samples in steps of 12 of batches of 2: the last step has one."""
    for world in (1, 2, 3, 6):
        loaders = loaders_of(
            13, 2, world, deepspeed_dataloader_config={
                "curriculum_learning": True, "data_efficiency": section(epochs=1),
                "gradient_accumulation_steps": 6 // world,
            },
        )  # fmt: skip
        got = [b.tolist() for round_ in zip(*loaders, strict=True) for b in round_]
        assert {len(b) for b in got} == {2} and {s for b in got for s in b} == set(range(13)), (world, got)
        assert loaders[0].reading["whole_batches"] is True


def test_orders_of_the_program_stay_as_they_are() -> None:
    loaders = loaders_of(9, 2, 2, data_sampler=[4, 8, 1])
    assert [b.tolist() for b in loaders[1]] == [[4, 8], [1]]
    assert "whole_batches" not in loaders[0].reading
