"""accelerate's save_state and load_state in mid-epoch: which samples the steps after them have."""

from __future__ import annotations

import importlib.util
from itertools import chain, islice

import pytest
import torch

from tests.hf.stack import Text, forget, llama, on_ranks
from tests.hf.test_accelerate import accelerator, plugin

ROWS, BATCH, MICRO, SAVED = 60, 12, 2, 2  # an epoch has 5 steps


class Numbered(torch.utils.data.Dataset):
    """Rows of ``Text`` with their numbers. ``read`` notes which were read in this process."""

    def __init__(self):
        self.rows, self.read = Text(ROWS), []

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        self.read.append(i)
        return {**self.rows[i], "number": i}


def run(rank, world, folder, kind, workers, loads):
    """(this rank's samples by step, those that were read). kind: "engine", "class" or "torchdata". loads: goes on from
    the state in ``folder``, which the other runs save after ``SAVED`` steps."""
    from accelerate import DataLoaderConfiguration

    from deepspeed_c.data.loader import DeepSpeedDataLoader

    forget()
    accumulation = BATCH // MICRO // world
    how = DataLoaderConfiguration(use_stateful_dataloader=kind == "torchdata", use_seedable_sampler=True, data_seed=5)
    section = plugin(2, train_micro_batch_size_per_gpu=MICRO)
    acc = accelerator(section, gradient_accumulation_steps=accumulation, dataloader_config=how)
    model, dataset = llama(), Numbered()
    optimizer = torch.optim.AdamW(model.parameters())
    if kind == "torchdata":
        data = torch.utils.data.DataLoader(dataset, MICRO, shuffle=True, num_workers=workers)
    elif kind == "class":
        data = DeepSpeedDataLoader(dataset, MICRO, False, 0, None, num_local_io_workers=workers, seed=5)
    else:
        model, optimizer = acc.prepare(model, optimizer)
        data = model.deepspeed_io(dataset, num_local_io_workers=workers)
    if kind != "engine":
        model, optimizer, data = acc.prepare(model, optimizer, data)
    if kind != "torchdata":
        acc.register_for_checkpointing(data)
    batches, n_left = iter(data), 5
    steps = []
    if loads:
        acc.load_state(str(folder))
        batches, n_left = iter(data), 5 - SAVED
    for i in range(n_left):
        if i == SAVED and not loads:
            acc.save_state(str(folder))
        steps.append([])
        for batch in islice(batches, accumulation):
            steps[-1] += batch.pop("number").tolist()
            with acc.accumulate(model):
                acc.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    assert next(batches, None) is None
    return steps, dataset.read


def samples(results):
    """The samples of each step on all ranks."""
    return [sorted(chain(*step)) for step in zip(*(steps for steps, _ in results), strict=True)]


def check(folder, kind, workers, worlds):
    expected = samples(on_ranks(2, run, folder, kind, workers, False))
    assert sorted(chain(*expected)) == list(range(ROWS))
    for world in worlds:
        results = on_ranks(world, run, folder, kind, workers, True)
        found = samples(results)
        print(world, found, expected[SAVED:])
        assert found == expected[SAVED:]
        if not workers:
            assert sorted(chain(*(read for _, read in results))) == sorted(chain(*found))  # nothing is read to skip it


@pytest.mark.parametrize("kind, workers", [("engine", 0), ("class", 0), ("class", 2)])
def test_our_loader_resumes_on_any_number_of_ranks(tmp_path, kind, workers):
    check(tmp_path, kind, workers, (1, 2, 3))


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")
def test_torchdatas_loader_resumes_on_as_many_ranks(tmp_path):
    check(tmp_path, "torchdata", 0, (2,))
