"""io/tune.py: the search finds the best settings of a simulated device and keeps to its time. The configuration accepts
the section that it prints."""

from __future__ import annotations

import os
import random

import pytest

from deepspeed_c.config import load_config
from deepspeed_c.errors import AioError
from deepspeed_c.io.bench import Settings
from deepspeed_c.io.tune import N_SAMPLES, candidates, choose, search, tune

ALL = candidates(["uring", "libaio", "threads", "sync"])


def never() -> bool:
    return False


def test_candidates_are_of_the_backends_that_there_are():
    assert len(set(ALL)) == len(ALL) >= 25
    assert {settings.backend for settings in ALL} == {"uring", "libaio", "threads", "sync"}
    assert ALL[0] == Settings("uring", 1 << 20, 32, 1)
    assert {settings.backend for settings in candidates(["threads", "sync"])} == {"threads", "sync"}
    assert candidates(["sync"])[0] == Settings("sync", 1 << 20, 1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_is_found_under_noise_and_sampled_most(seed):
    rng = random.Random(seed)
    best = rng.choice(ALL)
    n = 0

    def sample(settings):
        nonlocal n
        n += 1
        return (1.0 if settings == best else 1.3) * (1 + rng.expovariate(20))

    times = search(ALL, sample, never)
    assert choose(times) == best
    assert set(times) == set(ALL)
    assert len(times[best]) == max(map(len, times.values())) >= N_SAMPLES
    assert n < 4 * len(ALL)  # the search ends by itself


def test_time_that_is_over_ends_it_after_one_sample_at_least():
    assert search(ALL, lambda settings: 1.0, lambda: True) == {ALL[0]: [1.0]}
    left = iter([False] * 4)
    times = search(ALL, lambda settings: 1.0, lambda: next(left, True))
    assert list(times) == ALL[:5]


def test_of_equals_the_one_that_holds_least():
    large, small, threads, slow = (
        Settings("uring", 1 << 20, 128),
        Settings("libaio", 1 << 18, 8),
        Settings("threads", 1 << 18, 1, 4),
        Settings("sync", 1, 1),
    )
    times = {large: [9.0, 1.0], small: [1.02], threads: [1.0], slow: [1.04]}
    assert choose(times) == small
    times[small] = [1.04]
    assert choose(times) == large


def test_tune(tmp_path):
    found = tune(str(tmp_path), 0.05)
    assert os.listdir(tmp_path) == []
    assert found.settings in ALL and 1 <= found.n_measured <= found.n_candidates
    assert found.rates["write"] > 0 and found.rates["read"] > 0
    section = found.as_config()
    config = load_config({"train_micro_batch_size_per_gpu": 1, "aio": section}, world_size=1)
    assert {name: getattr(config.aio, name) for name in section} == section


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(AioError, match="no file can be made there"):
        tune(str(tmp_path / "missing"), 0.05)
