"""Random numbers of samples and batches are those of the batch's place, on any number of ranks and workers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deepspeed_c.data.loader import DeepSpeedDataLoader

N, BATCH = 31, 2


class Noisy(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> list[float]:
        return [float(i), torch.rand(()).item(), random.random(), np.random.rand()]


def mask(samples: list[list[float]]) -> torch.Tensor:
    return torch.cat([torch.tensor(samples, dtype=torch.float64), torch.rand(len(samples), 2, dtype=torch.float64)], 1)


def batches_of(world: int, n_workers: int, n_rounds: int, *, place: int = 0) -> list[torch.Tensor]:
    """The batches of all ranks in the order of their places, from a saved place on."""
    loaders = [
        DeepSpeedDataLoader(
            Noisy(), BATCH, False, 0, None, mask, n_workers, None, world, rank,
            seed=3, is_unbroken=True, whole_batches=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    if place:
        for loader in loaders:
            loader.load_state_dict({"epoch": place // N, "position": place % N, "n_samples": N, "seed": 3})
    rounds, iterators = [], [iter(loader) for loader in loaders]
    for _ in range(n_rounds):
        for rank, loader in enumerate(loaders):
            batch = next(iterators[rank], None)
            if batch is None:  # an epoch has ended
                iterators[rank] = iter(loader)
                batch = next(iterators[rank])
            rounds.append(batch)
    return rounds


@pytest.mark.parametrize("world, n_workers", [(2, 0), (3, 0), (4, 0), (6, 0), (1, 2), (3, 1)])
def test_numbers_of_a_batch_do_not_depend_on_ranks_and_workers(world: int, n_workers: int) -> None:
    torch.manual_seed(world)
    expected = batches_of(1, 0, 48)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = batches_of(world, n_workers, 48 // world)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), (number, one, other)
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    drawn = torch.cat(expected)[:, 1:]
    assert len(set(drawn.flatten().tolist())) == drawn.numel()  # no two places draw the same numbers


@pytest.mark.parametrize("place", [12, 36])
def test_a_saved_place_goes_on_with_the_same_numbers(place: int) -> None:
    expected = batches_of(1, 0, 48)[place // BATCH :]
    found = batches_of(3, 0, len(expected) // 3, place=place)
    assert len(found) >= 6
    for one, other in zip(expected, found):
        assert torch.equal(one, other), (one, other)
