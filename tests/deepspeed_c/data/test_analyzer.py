"""data/analyzer.py: files against brute force over the samples, for any processes, ranks and kinds of batches; a map that
was interrupted; users' mistakes."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from random import Random

import numpy as np
import pytest
import torch

from deepspeed_c.data.analyzer import DataAnalyzer, DistributedDataAnalyzer
from deepspeed_c.data.indexed import MMapIndexedDataset
from deepspeed_c.errors import ConfigError, StateError
from tests import fresh
from tests.log_lines import LogLines

SINGLE, SUM = "single_value_per_sample", "accumulate_value_over_samples"


def lengths(batch):
    return (batch != 0).sum(dim=1)


def counts(batch):
    return torch.bincount(batch.flatten(), minlength=11)


def make_samples(n, seed=0):
    random = Random(seed)
    return [
        torch.tensor([random.randint(1, 10) for _ in range(k)] + [0] * (6 - k))
        for k in (random.randint(1, 6) for _ in range(n))
    ]


def analyze(samples, folder, workers=1, threads=1, batch=4, **changes):
    def make(worker):
        return DataAnalyzer(
            samples, workers, worker, threads, batch_size=batch, save_path=str(folder),
            **{
                "metric_names": ["length", "tokens"], "metric_functions": [lengths, counts],
                "metric_types": [SINGLE, SUM], "metric_dtypes": [torch.int64, torch.int64], **changes,
            },
        )  # fmt: skip

    for worker in reversed(range(workers)):
        make(worker).run_map()
    make(0).run_reduce()


def lists(path):
    return [item.tolist() for item in MMapIndexedDataset(str(path))[:]]


def check(samples, folder, numbers=None):
    numbers = numbers or list(range(len(samples)))
    values = [int((s != 0).sum()) for s in samples]
    by_value = defaultdict(list)
    for number, value in zip(numbers, values, strict=True):
        by_value[value].append(number)
    wanted = sorted(by_value)
    assert lists(folder / "length/length_sample_to_metric") == [[v] for v in values]
    assert lists(folder / "length/length_index_to_metric") == [[v] for v in wanted]
    assert lists(folder / "length/length_index_to_sample") == [sorted(by_value[v]) for v in wanted]
    assert lists(folder / "length/length_index_to_sample_percentile_merged") == [sorted(by_value[v]) for v in wanted]
    assert lists(folder / "tokens/tokens_metric_value") == [sum(counts(s) for s in samples).tolist()]


@pytest.mark.parametrize("workers, threads, batch", [(1, 1, 1), (1, 1, 100), (3, 1, 4), (2, 2, 3), (1, 3, 7)])
@pytest.mark.parametrize("n", [1, 2, 23])
def test_files_are_those_of_brute_force(tmp_path, n, workers, threads, batch):
    """Parts without a sample too."""
    samples = make_samples(n)
    analyze(samples, tmp_path, workers, threads, batch)
    check(samples, tmp_path)


def test_many_values_are_merged_in_about_100_parts(tmp_path):
    values = [Random(5).randint(0, 10**6) for _ in range(1)] + [(i * 7919) % 1013 for i in range(1013)]
    analyze(
        [torch.tensor([v]) for v in values], tmp_path, metric_names=["v"], metric_functions=[lambda b: b[:, 0]],
        metric_types=[SINGLE], metric_dtypes=[np.int64], batch=64,
    )  # fmt: skip
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    merged = lists(tmp_path / "v/v_index_to_sample_percentile_merged")
    assert [s for part in merged for s in part] == order and 100 <= len(merged) <= 102


class Fields(torch.utils.data.Dataset):
    """Samples that are mappings, or tuples, of three fields: more or fewer fields than samples of a batch."""

    def __init__(self, samples, kind, index=None):
        self.samples, self.kind, self.index = samples, kind, index

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        fields = {"tokens": self.samples[i], "one": torch.tensor(1), "two": torch.tensor(2)}
        if self.index is not None:
            fields["index"] = torch.tensor([self.index[i]])
        return fields if self.kind is dict else tuple(fields.values())


@pytest.mark.parametrize("kind", [dict, tuple])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_batches_of_several_fields_have_the_right_sample_numbers(tmp_path, kind, batch):
    samples = make_samples(13)
    tokens = (lambda b: b["tokens"]) if kind is dict else (lambda b: b[0])
    analyze(
        Fields(samples, kind), tmp_path, threads=2, batch=batch,
        metric_functions=[lambda b: lengths(tokens(b)), lambda b: counts(tokens(b))],
    )  # fmt: skip
    check(samples, tmp_path)


AFTER_THREADS = """
import sys
import torch
from deepspeed_c.data.analyzer import DataAnalyzer

torch.set_num_threads(2)
rows = torch.ones(64, 1 << 16)
assert rows.log().sum() == 0  # the process has the threads of torch's operators now
DataAnalyzer(
    rows, num_threads=2, batch_size=32, save_path=sys.argv[1], metric_names=["sum"], metric_types=["single_value_per_sample"],
    metric_functions=[lambda batch: batch.log().exp().sum(dim=1).long()], metric_dtypes=[torch.int64],
).run_map_reduce()
"""


def test_a_program_whose_operators_have_run_on_threads(tmp_path):
    fresh.run(["-c", AFTER_THREADS, tmp_path], check=True)
    assert MMapIndexedDataset(str(tmp_path / "sum/sum_index_to_metric"))[0].tolist() == [1 << 16]


def test_numbers_of_the_user(tmp_path):
    samples, numbers = make_samples(9), [3, 1, 8, 0, 2, 7, 6, 5, 4]
    analyze(samples, tmp_path / "a", workers=2, sample_indices=numbers)
    check(samples, tmp_path / "a", numbers)
    functions = [lambda b: lengths(b["tokens"]), lambda b: counts(b["tokens"])]
    analyze(Fields(samples, dict, numbers), tmp_path / "b", metric_functions=functions)
    check(samples, tmp_path / "b", numbers)


class Fragile(torch.utils.data.Dataset):
    """Ends the process at a sample until the file is there; notes the samples that are read."""

    def __init__(self, samples, folder):
        self.samples, self.folder = samples, folder

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        if i == 15 and not (self.folder / "mended").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / f"read_{i}").touch()
        return self.samples[i]


def test_a_map_goes_on_after_a_crash(tmp_path):
    samples, notes = make_samples(20), tmp_path / "notes"
    notes.mkdir()
    with pytest.raises(StateError, match="1 with exit code -9") as caught:
        analyze(Fragile(samples, notes), tmp_path, threads=2)
    assert "keeps the parts" in caught.value.fix
    with pytest.raises(StateError, match="part of worker 0, thread 1 is missing"):
        DataAnalyzer(
            samples,
            1,
            0,
            2,
            metric_names=["length"],
            metric_functions=[lengths],
            metric_types=[SINGLE],
            save_path=str(tmp_path),
        ).run_reduce()
    for note in notes.iterdir():
        note.unlink()
    (notes / "mended").touch()
    analyze(Fragile(samples, notes), tmp_path, threads=2)
    check(samples, tmp_path)
    assert sorted(int(p.name[5:]) for p in notes.glob("read_*")) == list(range(10, 20)), "the first part is there"
    analyze(make_samples(20, seed=1)[:19], tmp_path, threads=2)  # another data set: nothing is taken over
    check(make_samples(20, seed=1)[:19], tmp_path)


def test_custom_steps(tmp_path):
    calls = []
    analyzer = DataAnalyzer(
        [torch.tensor([i]) for i in range(5)], batch_size=2, metric_names=["m"], save_path=str(tmp_path),
        custom_map_init=lambda *args: calls.append(("init", args[0])) or "state",
        custom_map_update=lambda batch, types, dtypes, functions, state, at: calls.append((state, batch.flatten().tolist(), at)),
        custom_map_finalize=lambda types, dtypes, state: calls.append(("finalize", state)),
        custom_reduce=lambda *args: calls.append(("reduce", *args[3:])),
    )  # fmt: skip
    analyzer.run_map_reduce()
    assert calls == [
        ("init", 0), ("state", [0, 1], 0), ("state", [2, 3], 2), ("state", [4], 4), ("finalize", "state"),
        ("reduce", str(tmp_path), 1, 1, 1),
    ]  # fmt: skip


def ranks_body(rank, world, folder):
    samples = make_samples(17)
    DistributedDataAnalyzer(
        samples, worker_id=rank, num_workers=world, batch_size=3, metric_names=["length", "tokens"],
        metric_functions=[lengths, counts], metric_types=[SINGLE, SUM], save_path=folder,
        comm_group=torch.distributed.group.WORLD,
    ).run_map_reduce()  # fmt: skip
    return len(MMapIndexedDataset(f"{folder}/length/length_sample_to_metric"))


def test_ranks_share_the_work(run_ranks, tmp_path):
    assert run_ranks(3, ranks_body, str(tmp_path)) == [17] * 3
    check(make_samples(17), tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"metric_functions": [lengths]}, "metric_functions: has 1 entries for 2 metrics"),
        ({"metric_types": [SINGLE, "mean"]}, "metric_types: is 'mean' for tokens"),
        ({"metric_functions": [lambda b: 3, counts]}, "metric 'length': returned a int"),
        ({"metric_functions": [lambda b: lengths(b)[:1], counts]}, r"values of shape \[1\] for a batch of 4 samples"),
        ({"metric_dtypes": [torch.int32, torch.int64]}, "returned int64, metric_dtypes has torch.int32"),
        ({"threads": 0}, "num_threads=.: is 0"),
    ],
)
def test_mistakes(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        analyze(make_samples(8), tmp_path, **changes)
    assert caught.value.fix
    with pytest.raises(ConfigError, match="has no sample"):
        analyze([], tmp_path / "empty")
    with pytest.raises(ConfigError, match="worker_id=.: is 2 of 2"):
        DataAnalyzer([], 2, 2)


def test_percentiles_are_told(tmp_path):
    with LogLines() as log:
        analyze([torch.tensor([1] * k + [0] * (6 - k)) for k in range(1, 7)], tmp_path)
    assert any(
        "length of 6 samples: 5 % at most 1, 25 % at most 2, 50 % at most 3, 75 % at most 5, 95 % at most 6" in line
        for line in log.lines
    )
