"""Epochs that go on into one another: every number of ranks divides the same endless sequence of samples."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepspeed_c import _C
from deepspeed_c.data.loader import DeepSpeedDataLoader
from deepspeed_c.data.unbroken import UnbrokenOrder, place_after


def sequence(n: int, n_epochs: int, seed: int | None) -> list[int]:
    """The samples of some epochs, one after the other."""
    order = _C.SampleOrder(n, seed=seed)
    return [order.round(epoch, p)[0][0] for epoch in range(n_epochs) for p in range(n)]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    "n, n_ranks, batch", [(1, 1, 1), (1, 3, 2), (7, 1, 3), (7, 2, 1), (7, 3, 4), (40, 3, 2), (41, 4, 1)]
)
def test_rounds_divide_one_sequence(n: int, n_ranks: int, batch: int, seed: int | None) -> None:
    expected = sequence(n, 4 * n_ranks * batch, seed)
    orders = [UnbrokenOrder(n, n_ranks=n_ranks, rank=rank, batch=batch, seed=seed) for rank in range(n_ranks)]
    epoch, position, n_rounds, got, begin = 0, 0, 0, [], 0
    while epoch < 3:
        rounds = [order.round(epoch, position) for order in orders]
        if not rounds[0][0]:
            assert n_rounds == orders[0].rounds(begin), (epoch, begin, n_rounds)
            epoch, position = place_after(epoch, position, n)
            n_rounds, begin = 0, position
            continue
        assert {len(samples) for samples, _ in rounds} == {batch}, rounds
        got.append(sorted(itertools.chain(*(samples for samples, _ in rounds))))
        position, n_rounds = rounds[0][1], n_rounds + 1
    size = n_ranks * batch
    want = [sorted(expected[i * size : (i + 1) * size]) for i in range(len(got))]
    assert got == want, (got, want)


@pytest.mark.parametrize("sets_epochs", [False, True])
def test_a_loader_gives_each_sample_once_in_an_epoch_and_has_a_place_between_two(sets_epochs: bool) -> None:
    def loader_of(n_ranks: int, rank: int) -> DeepSpeedDataLoader:
        return DeepSpeedDataLoader(
            torch.arange(7), 2, False, rank, None, data_parallel_world_size=n_ranks, data_parallel_rank=rank, seed=3,
            is_unbroken=True,
        )  # fmt: skip

    loaders = [loader_of(2, rank) for rank in range(2)]
    got = []
    for epoch in range(3):
        if sets_epochs:
            for loader in loaders:
                loader.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            got += torch.cat(batches).tolist()
    expected = sequence(7, 9, 3)
    assert [sorted(got[i : i + 4]) for i in range(0, len(got), 4)] == [
        sorted(expected[i : i + 4]) for i in range(0, len(got), 4)
    ], (got, expected)
    # Another number of ranks goes on behind the last sample, with the next epoch.
    alone = loader_of(1, 0)
    alone.load_state_dict(loaders[0].state_dict())
    more = [next(iter(alone)).tolist() for _ in range(1)]
    assert more[0] == expected[len(got) : len(got) + 2], (more, expected[len(got) :])
    # A new order from its beginning, as without the switch.
    alone.set_epoch(5)
    assert next(iter(alone)).tolist() == sequence(7, 6, 3)[35:37]
