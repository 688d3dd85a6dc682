"""Training with states on an NVMe device that fails. Every failure raises an error that names the tensor, and a step
that was not complete does not count."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from deepspeed_c.errors import DeepSpeedCError, OffloadError, StateError
from deepspeed_c.offload import place
from tests.aio_faults import faults
from tests.deepspeed_c.offload.test_checkpoints import SWAPPED, make, same, states, train
from tests.ranks import run_ranks


def reordered(rank: int, world: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    with faults(seed=5 + rank, short_chance=400, reorders=True):
        engine = make(folder, 2, "bf16", SWAPPED)
        losses = train(engine, rank, range(5))
        found = states(engine)
        engine.close()
    return losses, found


def plain(rank: int, world: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = make(folder, 2, "bf16", None)
    losses = train(engine, rank, range(5))
    found = states(engine)
    engine.close()
    return losses, found


def test_short_and_reordered_transfers_change_nothing():
    with tempfile.TemporaryDirectory() as folder:
        for got, want in zip(run_ranks(2, reordered, folder), run_ranks(2, plain, folder)):
            assert got[0] == want[0], f"losses {got[0]} and {want[0]}"
            same(got[1], want[1], "states")


def reads_and_waits(rank: int, world: int, folder: str) -> list[str]:
    """The calls of a step to the store, in order: a letter and the name of the first tensor."""
    engine = make(folder, 2, "bf16", SWAPPED)
    train(engine, rank, range(1))
    store, calls = engine._optimizer.units[0].states.store, []

    def noted(letter, call):
        def note(tensors, **more):
            tensors = list(tensors)
            calls.append(f"{letter} {tensors[0].name}")
            return call(tensors, **more)

        return note

    with mock.patch.multiple(store, prefetch=noted("r", store.prefetch), bring=noted("w", store.bring)):
        train(engine, rank, range(1, 2))
    engine.close()
    return calls


def test_the_next_bucket_is_asked_for_before_this_one_is_waited_for():
    with tempfile.TemporaryDirectory() as folder:
        calls = run_ranks(1, reads_and_waits, folder)[0]
    waits = [i for i, call in enumerate(calls) if call.startswith("w ")]
    assert len(waits) > 2, calls
    for this, following in itertools.pairwise(waits):
        assert f"r {calls[following][2:]}" in calls[:this], calls


def failing(rank: int, world: int, folder: str) -> None:
    with faults(seed=1) as broken:
        engine = make(folder, 2, "bf16", SWAPPED)
        train(engine, rank, range(3))
        engine.save_checkpoint(f"{folder}/ckpt", tag="good")
        want, rest = states(engine), train(engine, rank, range(3, 6))

        broken.set(bad_begin=0, bad_end=1 << 40)  # every transfer fails from now on
        try:
            train(engine, rank, range(6, 7))
        except DeepSpeedCError as error:
            assert isinstance(error, OffloadError) or "failed" in str(error), error
        else:
            raise AssertionError("a step over a broken device went on")
        broken.set(bad_begin=0, bad_end=0)
        try:
            train(engine, rank, range(7, 8))
        except StateError as error:
            assert "failed in its middle" in str(error), error
        else:
            raise AssertionError("an engine with half a step went on")
        engine.zero_grad()
        engine.load_checkpoint(f"{folder}/ckpt")
        same(states(engine), want, "after the load")
        assert train(engine, rank, range(3, 6)) == rest
        engine.close()


def test_a_device_that_breaks_and_a_checkpoint_that_mends_it():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(1, failing, folder)


def flipping(rank: int, world: int, folder: str) -> None:
    with faults(seed=3) as broken:
        engine = make(folder, 2, "bf16", SWAPPED, aio={"checksum": True})
        train(engine, rank, range(2))
        broken.set(flip_chance=1000)  # flips any bit of a page; failed reads ahead are retried
        try:
            train(engine, rank, range(2, 60))
        except OffloadError as error:
            assert "are not those that were written" in str(error) and (
                ".weight" in str(error) or ".bias" in str(error)
            ), error
        else:
            raise AssertionError("flipped bytes went into a step")
        broken.set(flip_chance=0)
        engine.close()


def test_flipped_bytes_are_found_and_named():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(1, flipping, folder)


@pytest.mark.parametrize("problem", ["folder", "room"])
def test_what_cannot_begin_says_so_on_all_ranks(problem, tmp_path):
    folder = tmp_path / "swap"
    if problem == "folder":
        folder.write_text("a file")
    for error in run_ranks(2, cannot_begin, str(folder), problem):
        assert "nvme_path" in error and ("cannot be used" in error or "cannot be reserved" in error), error


def cannot_begin(rank: int, world: int, folder: str, problem: str) -> str:
    too_much = {"swapped_bytes": lambda units, base: 1 << 60} if problem == "room" and rank == 1 else {}
    with mock.patch.multiple(place, **too_much) if too_much else nullcontext():
        try:
            make(folder, 2, "bf16", SWAPPED)
        except DeepSpeedCError as error:
            return str(error)
    return "it began"
