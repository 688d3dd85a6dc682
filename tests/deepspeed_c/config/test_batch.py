"""The rule train = micro x steps x ranks, compared with DeepSpeed's rules, written as a search over small numbers."""

import itertools

import pytest

from deepspeed_c.config import load_config
from deepspeed_c.config.batch import resolve_batch
from deepspeed_c.errors import BatchSizeError

SIZES = (None, 1, 2, 3, 4, 6, 7, 12)


def by_search(train, micro, steps, world):
    """The only (train, micro, steps) that fits the given numbers. None if none fits, or if DeepSpeed refuses to
    choose."""
    if train is None and micro is None:
        return None
    if steps is None and (train is None or micro is None):
        steps = 1
    found = [
        (t, m, s)
        for t in ([train] if train else range(1, 12 * 12 * 3 + 1))
        for m in ([micro] if micro else range(1, 13))
        for s in ([steps] if steps else range(1, 13))
        if t == m * s * world
    ]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_combination(world):
    for train, micro, steps in itertools.product(SIZES, SIZES, SIZES):
        expected = by_search(train, micro, steps, world)
        given = f"train {train}, micro {micro}, steps {steps}, world {world}"
        if expected is None:
            with pytest.raises(BatchSizeError):
                print(given, resolve_batch(train, micro, steps, world))
        else:
            batch, sources = resolve_batch(train, micro, steps, world)
            assert tuple(batch) == (*expected, world), given
            names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            missing = {name for name, value in zip(names, (train, micro, steps)) if value is None}
            assert set(sources) == missing, given


def test_error_has_all_the_numbers():
    with pytest.raises(BatchSizeError) as error:
        resolve_batch(30, 4, 3, 2)
    for number in ("30", "4", "3", "2", "24"):
        assert number in error.value.what, (number, str(error.value))
    assert "24" in error.value.fix


@pytest.mark.parametrize(
    "train, steps, world, near", [(7, None, 2, "6 or 8"), (1, None, 3, "such as 3"), (10, 3, 2, "6 or 12")]
)
def test_division_with_a_rest_names_what_would_work(train, steps, world, near):
    with pytest.raises(BatchSizeError) as error:
        resolve_batch(train, None, steps, world)
    assert near in error.value.fix
    assert f"train_batch_size {train}" in error.value.what


def test_big_numbers_stay_exact():
    batch, _ = resolve_batch(2**62, 1, None, 2**31)
    assert batch.accumulation_steps == 2**31


@pytest.mark.parametrize("train, found", [(16, 8), (8, 8)])
def test_a_batch_that_counts_tensor_parallel_ranks(train, found):
    # 8 = 2 samples x 2 steps x 2 data-parallel ranks. transformers multiplies by ranks that share samples too, and gets
    # 16.
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "train_batch_size": train}
    config = load_config({**sizes, "tensor_parallel": {"autotp_size": 2}}, world_size=2)
    assert config.train_batch_size == found
    if train != found:
        with pytest.raises(BatchSizeError):
            load_config(sizes, world_size=2)
