"""data/sampler.py: the samples of each step against the metrics themselves; any ranks, micro-batches and resumes."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import numpy as np
import pytest

from deepspeed_c.data import RepeatingLoader
from deepspeed_c.data.indexed import MMapIndexedDatasetBuilder
from deepspeed_c.data.loader import DeepSpeedDataLoader
from deepspeed_c.data.sampler import DeepSpeedDataSampler
from deepspeed_c.errors import ConfigError, StateError

BATCH = 12
LINEAR = {"total_curriculum_step": 10, "difficulty_step": 1}


def write_items(path, items):
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", np.int64)
    builder.add_items([np.array(item) for item in items])
    builder.finalize(f"{path}.idx")
    return str(path)


def metric(folder, values, low, high, by="value", **changes):
    """A section of ``curriculum_metrics``, with the files of DataAnalyzer for the samples' values."""
    kinds = sorted(set(values))
    return {
        "index_to_sample_path": write_items(
            f"{folder}_samples", [[i for i, v in enumerate(values) if v == k] for k in kinds]
        ),
        "index_to_metric_path": write_items(f"{folder}_values", [[k] for k in kinds]),
        "difficulty_type": by,
        "clustering_type": "schedule_based",
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": "fixed_linear",
        "schedule_config": LINEAR,
        **changes,
    }


def section(metrics=None, epochs=3, seed=5):
    curriculum = {"enabled": metrics is not None, "curriculum_metrics": metrics or {}}
    return {"seed": seed, "data_sampling": {"enabled": True, "num_epochs": epochs, "curriculum_learning": curriculum}}


def make(config, n, micro=BATCH, rank=0, ranks=1, accumulation=1, drop_last=False):
    return DeepSpeedDataSampler(config, n, micro, rank, ranks, None, accumulation, rank, drop_last=drop_last)


def steps_of(config, n, n_steps, micro=BATCH, ranks=1, accumulation=1, states=None):
    """The samples of each step, of all ranks, and the states afterwards."""
    samplers = [make(config, n, micro, rank, ranks, accumulation) for rank in range(ranks)]
    for sampler in samplers if states else ():
        sampler.load_state_dict(json.loads(json.dumps(states)))
    iterators = [iter(sampler) for sampler in samplers]
    found = []
    for _ in range(n_steps):
        found.append(sorted(s for one in iterators for _ in range(accumulation) for s in next(one)))
    assert all(sampler.state_dict() == samplers[0].state_dict() for sampler in samplers)
    return found, samplers[0].state_dict()


LAYOUTS = [
    (micro, ranks, BATCH // micro // ranks)
    for ranks in (1, 2, 3, 4)
    for micro in (1, 2, 3, 6, 12)
    if BATCH % (micro * ranks) == 0
]


@pytest.mark.parametrize("n", [1, 5, 12, 13, 29, 101])
def test_without_a_curriculum_each_sample_comes_once_an_epoch(n):
    """Also if the batch does not divide the data set: steps go over the end of an epoch."""
    seen = [s for samples in make(section(epochs=7), n) for s in samples]
    assert len(seen) == 7 * n == len(make(section(epochs=7), n))
    for first in range(0, 7 * n, n):
        assert sorted(seen[first : first + n]) == list(range(n))
    assert n < 5 or seen[:n] != seen[n : 2 * n]
    assert n < 5 or seen != [s for samples in make(section(epochs=7, seed=6), n) for s in samples]


@pytest.mark.parametrize("has_curriculum", [False, True])
@pytest.mark.parametrize("case", range(8))
def test_steps_are_the_same_in_any_layout_and_after_any_resume(tmp_path, case, has_curriculum):
    random = Random(case)
    n, n_steps = random.randint(5, 60), 16
    values = [random.randint(1, 20) for _ in range(n)]
    config = section(
        {"length": metric(tmp_path / "m", values, max(values) // 2 + 1, 20)} if has_curriculum else None, epochs=99
    )
    if has_curriculum and min(values) > max(values) // 2 + 1:
        pytest.fail("the case has no easy sample: choose another")
    wanted, _ = steps_of(config, n, n_steps)
    kills, got, states = sorted(random.sample(range(1, n_steps), 3)), [], None
    for first, last in zip([0, *kills], [*kills, n_steps]):
        micro, ranks, accumulation = random.choice(LAYOUTS)
        part, states = steps_of(config, n, last - first, micro, ranks, accumulation, states)
        got += part
    assert got == wanted


@pytest.mark.parametrize("by", ["value", "percentile"])
def test_samples_are_easy_enough_and_come_equally_often(tmp_path, by):
    random = Random(1)
    values = [random.randint(1, 50) for _ in range(200)]
    low, high = (10, 50) if by == "value" else (20, 100)
    sampler = make(section({"length": metric(tmp_path / "m", values, low, high, by)}, epochs=50), 200)
    ascending = sorted(range(200), key=lambda i: (values[i], i))
    steps = iter(sampler)
    for step in range(1, 40):
        samples = next(steps)
        difficulty = high if step >= 10 else low + (high - low) * step // 10
        easy = [i for i in range(200) if values[i] <= difficulty] if by == "value" else ascending[: 2 * difficulty]
        assert set(samples) <= set(easy), (step, difficulty)
        assert sampler.state_dict()["current_difficulties"] == {"length": difficulty}
    counts = Counter(s for _ in range(200) for s in next(steps))
    print(min(counts.values()), max(counts.values()))
    assert set(counts) == set(range(200)) and max(counts.values()) - min(counts.values()) < 12


def test_more_pools_than_pythons_stack_is_deep(tmp_path):
    """A difficulty that rises in each step; a new sampler makes all pools at once when it resumes."""
    n = 1300
    steps = {"total_curriculum_step": n, "difficulty_step": 1}
    config = section({"rank": metric(tmp_path / "m", list(range(n)), 1, n, schedule_config=steps)}, epochs=99)
    sampler = make(config, n, micro=1)
    found = [s for s, _ in zip(iter(sampler), range(1210))]
    assert all(samples[0] <= step for step, samples in enumerate(found, 1))
    state = sampler.state_dict()
    assert len(state["pools"]) > 1200
    resumed = make(config, n, micro=1)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert next(iter(resumed)) == next(iter(sampler))


def test_a_sample_must_be_easy_by_each_metric(tmp_path):
    random = Random(2)
    one, two = ([random.randint(1, 30) for _ in range(150)] for _ in range(2))
    metrics = {
        "one": metric(tmp_path / "one", one, 15, 30),
        "two": metric(tmp_path / "two", two, 20, 30),
        "all": {
            **metric(tmp_path / "all", one, 1, 2),
            "clustering_type": "single_cluster",
            "index_to_sample_path": None,
        },
    }
    steps = iter(make(section(metrics, epochs=90), 150))
    for step in range(1, 15):
        limits = [30 if step >= 10 else low + (30 - low) * step // 10 for low in (15, 20)]
        assert all(one[s] <= limits[0] and two[s] <= limits[1] for s in next(steps)), (step, limits)
    assert len({s for _ in range(80) for s in next(steps)}) == 150


def test_a_single_cluster_has_all_samples(tmp_path):
    only = {**metric(tmp_path / "m", [1, 2], 8, 64), "clustering_type": "single_cluster"}
    seen = [s for samples in make(section({"seqlen": only}, epochs=2), 30) for s in samples]
    assert sorted(seen[:30]) == sorted(seen[30:]) == list(range(30))


def test_custom_schedules(tmp_path):
    custom = metric(tmp_path / "m", list(range(1, 25)), 12, 24, schedule_type="custom")
    sampler = make(section({"length": custom}, epochs=9), 24)
    with pytest.raises(ConfigError, match="there is no function"):
        next(iter(sampler))
    with pytest.raises(ConfigError, match="there is no metric 'width'"):
        sampler.set_custom_curriculum_learning_schedule({"width": lambda step: 1})
    sampler.set_custom_curriculum_learning_schedule({"length": lambda step: 12 + step if step < 3 else 6})
    steps = iter(sampler)
    assert max(next(steps)) < 13 and max(next(steps)) < 14
    with pytest.raises(StateError, match="length goes down, from 14 to 6 at step 3"):
        next(steps)


def test_the_end_of_the_run():
    shares = [list(make(section(epochs=1), 29, 3, rank, 2, 2)) for rank in range(2)]
    assert [len(batch) for batch in shares[0]] == [3, 3, 3, 3, 3] == [len(batch) for batch in shares[1]]
    seen = Counter(s for share in shares for batch in share for s in batch)
    assert set(seen) == set(range(29)) and sum(seen.values()) == 30, "one sample fills up the last round"
    dropped = [list(make(section(epochs=1), 29, 3, rank, 2, 2, drop_last=True)) for rank in range(2)]
    assert [len(batch) for batch in dropped[0]] == [3, 3, 3, 3] == [len(batch) for batch in dropped[1]]
    tiny = [list(make(section(epochs=1), 2, 1, rank, 4)) for rank in range(4)]
    assert sorted(tiny) == [[[0]], [[0]], [[1]], [[1]]], "with more ranks than samples each rank has one"


def test_places_within_a_step(tmp_path):
    config = section(epochs=9)
    sampler = make(config, 40, 3, 0, 2, 2)
    steps = iter(sampler)
    next(steps), next(steps), next(steps)
    state = sampler.state_dict()
    assert state["consumed_samples"] == 18 and state["offset"] == 6
    other = make(config, 40, 6, 0, 1, 2)
    other.load_state_dict(state)
    rest = [s for rank in range(2) for s in list(make(config, 40, 3, rank, 2, 2))[3]]
    assert sorted(next(iter(other))) == sorted(rest)
    with pytest.raises(StateError, match="within a step of 12 samples, and steps have 8 now"):
        make(config, 40, 4, 0, 2).load_state_dict(state)
    with pytest.raises(StateError, match="0 metrics, and the configuration has 1"):
        make(section({"m": metric(tmp_path / "m", [1] * 40, 1, 1)}), 40).load_state_dict({**state, "offset": 0})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"min_difficulty": 0}, "no sample is easy enough: length is 0, the easiest sample has 3"),
        ({"index_to_sample_path": None}, "index_to_sample_path: is missing"),
        ({"index_to_metric_path": "/nowhere/x"}, "there is no /nowhere/x.idx"),
        ({"difficulty_type": "size"}, "difficulty_type: is 'size'"),
        ({"clustering_type": None}, "clustering_type: is None"),
        ({"max_difficulty": 0}, "max_difficulty: is 0, below min_difficulty"),
        ({"schedule_config": {"total_curriculum_step": 0, "difficulty_step": 1}}, "total_curriculum_step is 0"),
    ],
)
def test_mistakes_are_found_before_the_first_step(tmp_path, changes, message):
    values = [3, 9, 9, 4]
    with pytest.raises(ConfigError, match=message) as caught:
        make(
            section(
                {
                    "length": metric(
                        tmp_path / "m",
                        values,
                        3,
                        9,
                        **{"schedule_config": {**LINEAR, "total_curriculum_step": 10**6}, **changes},
                    )
                }
            ),
            4,
        )
    assert caught.value.fix and "curriculum_metrics.length" in caught.value.where


def test_files_of_another_data_set_are_refused(tmp_path):
    good = metric(tmp_path / "m", [3, 9, 9, 4], 3, 9)
    with pytest.raises(ConfigError, match="sample 4 has no value, and the data set has 5"):
        make(section({"length": good}), 5)
    with pytest.raises(ConfigError, match="4 samples have values, and the data set has 3"):
        make(section({"length": good}), 3)
    other = metric(tmp_path / "o", [1, 2, 3, 4], 1, 4)
    with pytest.raises(ConfigError, match="has 4 values, and index_to_sample_path has samples of 3"):
        make(section({"length": {**good, "index_to_metric_path": other["index_to_metric_path"]}}), 4)
    down = write_items(tmp_path / "down", [[9], [4], [3]])
    with pytest.raises(ConfigError, match="values that go down"):
        make(section({"length": {**good, "index_to_metric_path": down}}), 4)
    with pytest.raises(ConfigError, match="has no metric"):
        make(section({}), 4)


def loader_of(config, rank=0, ranks=1, micro=3, accumulation=2, workers=0):
    return DeepSpeedDataLoader(
        range(40), micro, False, 0, None, data_parallel_world_size=ranks, data_parallel_rank=rank, num_local_io_workers=workers,
        deepspeed_dataloader_config={
            "curriculum_learning": True, "data_efficiency": config, "gradient_accumulation_steps": accumulation
        },
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_resume_and_hand_the_state_to_the_users_function(tmp_path, workers):
    config = section({"length": metric(tmp_path / "m", [1 + i // 2 for i in range(40)], 8, 20)}, epochs=40)
    loader, states = loader_of(config, workers=workers), []
    loader.post_process_func = lambda batch, state: (states.append(state["current_difficulties"]["length"]), batch)[1]
    repeating = RepeatingLoader(loader)
    straight = [next(repeating).tolist() for _ in range(20)]
    assert states == [min(8 + 12 * (k // 2 + 1) // 10, 20) for k in range(20)], "workers read ahead, states do not"
    first = loader_of(config, workers=workers)
    for _ in range(7):
        next(first)
    saved = json.loads(json.dumps(first.state_dict()))
    assert saved["position"] == 21
    resumed = loader_of(config, workers=workers)
    resumed.load_state_dict(saved)
    assert [next(resumed).tolist() for _ in range(13)] == straight[7:]
    assert len(loader) == -(-40 * 40 // 3)
    with pytest.raises(StateError, match="saved without data_efficiency"):
        resumed.load_state_dict(DeepSpeedDataLoader(range(40), 3, False, -1, None).state_dict())
    with pytest.raises(StateError, match="saved with data_efficiency"):
        DeepSpeedDataLoader(range(40), 3, False, -1, None).load_state_dict(saved)
