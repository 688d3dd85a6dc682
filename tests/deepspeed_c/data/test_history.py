"""data/history.py and ``deepspeed_c data show``: what a checkpoint says that steps have read, against what the model saw."""

from __future__ import annotations

import json
from itertools import islice
from random import Random

import pytest
import torch

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.data import cli
from deepspeed_c.data.history import MOST_ENTRIES, SampleHistory
from deepspeed_c.errors import CheckpointError, ConfigError, StateError
from deepspeed_c.launcher.main import main
from tests.deepspeed_c.data.test_loader import make as loader_of
from tests.deepspeed_c.engine.test_data import Model, Numbers, efficiency_of, make, train
from tests.training import engine_of


def body(rank, world, folder, sections, load, n_steps):
    engine, data, _ = make(world=world, **sections)
    if load:
        engine.load_checkpoint(folder)
    found = train(engine, data, n_steps)
    engine.save_checkpoint(folder)
    engine.close()
    return found


def shown(folder, capsys, *arguments):
    assert main(["data", "show", str(folder), *arguments]) == 0
    return capsys.readouterr().out


def step_of(folder, capsys, step):
    """The samples of a step by rank, in order, as the command says."""
    by_rank = json.loads(shown(folder, capsys, "--step", str(step), "--json"))["samples"]
    return [[s for batch in batches for s in batch] for batches in by_rank]


KINDS = ["plain", "in turn", "curriculum"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_model_saw_over_resumes_on_other_ranks(run_ranks, tmp_path, capsys, kind):
    sections = {
        "plain": {},
        "in turn": {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "num_epochs": 9}}},
        "curriculum": {"data_efficiency": efficiency_of(tmp_path)},
    }[kind]
    folder, saw = tmp_path / "ckpt", []
    for world, n_steps in ((2, 9), (3, 5), (3, 4), (1, 3)):  # of 40 samples, in steps of 6: over the ends of epochs
        found = run_ranks(world, body, str(folder), sections, bool(saw), n_steps)
        saw += [list(step) for step in zip(*found, strict=True)]
    for step, wanted in enumerate(saw, 1):
        got = step_of(folder, capsys, step)
        assert got == wanted, (step, got, wanted)
    entries = json.loads(shown(folder, capsys, "--json"))
    assert entries["steps"] == [1, 21]
    # The resume on as many ranks adds none.
    assert [(e["step"], e["reading"]["n_ranks"]) for e in entries["entries"]] == [(1, 2), (10, 3), (19, 1)]
    text = shown(folder, capsys, "--step", "19")
    assert f"rank 0, micro-batch 0: {saw[18][0][0]}\n" in text and "micro-batches of 1 on 1 ranks" in text
    assert len(shown(folder, capsys).splitlines()) == 4
    for step in (0, 22):
        with pytest.raises(StateError, match=f"has steps 1 to 21, and step {step} is asked for"):
            cli.main(["show", str(folder), "--step", str(step)])


@pytest.mark.parametrize("case", range(40))
def test_any_reading(case):
    """Epochs that are left early or set, steps that read any number of micro-batches, saves and loads."""
    random = Random(case)
    n, drop_last, history, wanted = random.choice([1, 2, 5, 13, 40]), random.random() < 0.3, SampleHistory(), {}
    keys = {"dataloader_drop_last": drop_last, "whole_batches": case % 2 == 0, "is_unbroken": case % 4 > 1}
    state, step = None, 0
    for _ in range(4):
        micro, ranks, count = random.randint(1, 3), random.randint(1, 3), random.randint(1, 4)
        loaders = [loader_of(n, micro, rank, ranks, **keys) for rank in range(ranks)]
        if not len(loaders[0]):
            continue
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        for _ in range(random.randint(1, 12)):
            step += 1
            read = [[] for _ in range(ranks)]
            for _ in range(count if random.random() < 0.9 else random.randint(0, 5)):
                jump, target = random.random(), random.randint(0, 9)
                for mine, loader in zip(read, loaders, strict=True):
                    if jump < 0.05:
                        loader.set_epoch(target)
                    elif jump < 0.1:
                        iter(loader)
                    batch = next(loader, None)
                    while batch is None:
                        batch = next(iter(loader), None)
                    mine.append(tuple(batch.tolist()))
            wanted[step] = tuple(tuple(batches) for batches in read)
            history.note(step, loaders[0].take_runs(), loaders[0].reading, None)
        state = loaders[0].state_dict()
        saved = json.loads(json.dumps(history.state_dict()))
        history.check(saved, "here")
        history = SampleHistory()
        history.load_state_dict(saved)
    for step, samples in wanted.items():
        got = history.samples(step).samples
        print(step, got, samples)
        assert got == samples or not any(samples)
    if not wanted:
        assert history.steps() == (1, 0)


def test_even_reading_takes_one_entry_for_any_number_of_epochs():
    loader, history = loader_of(7, 2), SampleHistory()
    for step in range(1, 200):
        for _ in range(3):
            batch = next(loader, None)
            if batch is None:
                next(iter(loader))
        history.note(step, loader.take_runs(), loader.reading, None)
    assert len(history.entries()) == 1
    # A run that reads unevenly keeps the latest.
    for step in range(200, 200 + MOST_ENTRIES + 9):
        history.note(step, [[step * 2, 0, 1]], loader.reading, None)
    assert history.steps() == (209, 208 + MOST_ENTRIES)


def test_runs_that_nobody_takes_are_bounded():
    loader = loader_of(3, 1)
    for _ in range(500):
        assert len(list(islice(loader, 2))) == 2
        iter(loader)
    assert len(loader.take_runs()) <= 64 and loader.take_runs() == []


def own_body(rank, world, folder):
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    engine = engine_of(Model(), config)
    sampler = torch.utils.data.SequentialSampler(Numbers(9))
    engine.training_dataloader = engine.deepspeed_io(Numbers(9), data_sampler=sampler)
    train(engine, iter(engine.training_dataloader), 2)
    engine.save_checkpoint(folder + "/own")
    engine.close()
    engine = engine_of(Model(), config)
    engine.save_checkpoint(folder + "/none")
    engine.close()


def test_orders_of_the_program_and_checkpoints_without_samples(run_ranks, tmp_path, capsys):
    run_ranks(1, own_body, str(tmp_path))
    text = shown(tmp_path / "own", capsys, "--step", "2")
    assert "1 from epoch 0, position 2" in text and "up to the program's sampler" in text
    with pytest.raises(CheckpointError, match="says nothing about samples") as caught:
        cli.main(["show", str(tmp_path / "none")])
    assert "training_data" in caught.value.fix
    with pytest.raises(CheckpointError):
        cli.main(["show", str(tmp_path)])


def test_metrics_that_are_gone(run_ranks, tmp_path):
    run_ranks(1, body, str(tmp_path / "ckpt"), {"data_efficiency": efficiency_of(tmp_path)}, False, 2)
    (tmp_path / "samples.idx").unlink()
    with pytest.raises(ConfigError, match="there is no .*samples"):
        cli.main(["show", str(tmp_path / "ckpt"), "--step", "1"])


@pytest.mark.parametrize("kind", ["plain", "in turn"])
def test_damaged_histories_are_refused(run_ranks, tmp_path, kind):
    sections = {"plain": {}, "in turn": {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}}}[
        kind
    ]
    run_ranks(1, body, str(tmp_path), sections, False, 2)
    with open_checkpoint(str(tmp_path), None) as source:
        good = source.state["samples"]
    SampleHistory.check(good, "here")
    (entry,) = good["entries"]
    reading = entry["reading"]
    for bad in (
        None,
        [],
        {},
        {**good, "last_step": "2"},
        {**good, "entries": [None]},
        *({**good, "entries": [{**entry, **change}]} for change in (
            {"step": 1.5}, {"place": 3}, {"runs": [[0, 0]]}, {"runs": [[0, -1, 2]]}, {"runs": [[0, 0, 1.0]]}, {"reading": None},
            {"reading": {**reading, "kind": "other"}}, {"reading": {**reading, "micro_batch": 0}},
            {"reading": {**reading, "n_ranks": True}}, {"reading": {**reading, "n_samples": None}},
            {"reading": {**reading, "seed": "7"}}, {"reading": {**reading, "whole_batches": 1}},
        )),
        *([{**good, "entries": [{**entry, "reading": {**reading, "n_samples": 0}}]}] if kind == "plain" else []),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="its history of samples is none"):
            SampleHistory.check(bad, "here")
