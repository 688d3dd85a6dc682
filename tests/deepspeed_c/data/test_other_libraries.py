"""Data sets of other libraries, divided by rank and worker: each sample once an epoch, and resumed in mid-epoch."""

from __future__ import annotations

from itertools import chain

import pytest

from deepspeed_c.data import DeepSpeedDataLoader
from deepspeed_c.errors import ConfigError

N, BATCH, WORLD = 40, 2, 2


def loader(dataset, rank, workers):
    return DeepSpeedDataLoader(
        dataset,
        BATCH,
        False,
        0,
        None,
        num_local_io_workers=workers,
        data_parallel_rank=rank,
        data_parallel_world_size=WORLD,
    )


def numbers(batches):
    return [batch["n"].tolist() for batch in batches]


def huggingface(rank, is_stream, is_shuffled):
    datasets = pytest.importorskip("datasets", reason="the extra [test] is not installed: no datasets")
    from datasets.distributed import split_dataset_by_node

    data = datasets.Dataset.from_dict({"n": list(range(N))})
    if not is_stream:
        return data
    stream = data.to_iterable_dataset(num_shards=4)
    return split_dataset_by_node(stream.shuffle(seed=3, buffer_size=8) if is_shuffled else stream, rank, WORLD)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_stream", [False, True], ids=["map", "stream"])
def test_datasets(is_stream, workers):
    is_shuffled = workers > 0  # the stream's own state, which is used without workers, leaves out a shuffle's buffer
    ranks = [loader(huggingface(rank, is_stream, is_shuffled), rank, workers) for rank in range(WORLD)]
    epochs = [[numbers(rank) for rank in ranks] for _ in range(2)]
    for epoch in epochs:
        assert sorted(chain(*chain(*epoch))) == list(range(N))
    assert (epochs[0] != epochs[1]) == (is_shuffled or not is_stream)  # set_epoch reaches the stream
    for rank in range(WORLD):
        whole = loader(huggingface(rank, is_stream, is_shuffled), rank, workers)
        whole.set_epoch(1)
        batches = iter(whole)
        begun = numbers(next(batches) for _ in range(3))
        state = whole.state_dict()
        resumed = loader(huggingface(rank, is_stream, is_shuffled), rank, workers)
        resumed.load_state_dict(state)
        rest = numbers(resumed)
        print(rank, begun, rest, epochs[1][rank])
        assert begun + rest == epochs[1][rank]


def test_a_stream_of_datasets_that_is_split_for_another_rank_is_refused():
    with pytest.raises(ConfigError, match="split for rank 1 of 2, and this is rank 0 of 2"):
        loader(huggingface(1, True, False), 0, 0)
