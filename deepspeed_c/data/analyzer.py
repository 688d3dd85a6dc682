"""Metrics of all samples of a data set, computed before training: the values, and the samples of each value. The files
have DeepSpeed's names, and the sampler of ``data_efficiency`` reads them.

For a metric with one value a sample, under ``save_path/NAME/``, each an indexed data set (``indexed.py``):

    NAME_sample_to_metric                     the value of each sample, in the order of the data set
    NAME_index_to_metric                      the values that occur, ascending
    NAME_index_to_sample                      the samples of each of these values, ascending
    NAME_index_to_sample_percentile_merged    the same in about 100 parts

and for a metric that is summed up ``NAME_metric_value``. Each process of the map writes its part below
``NAME/workerW_threadT/``. A part that is finished is not computed again when the map runs once more.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from deepspeed_c.checkpoint.native.commit import replace_durably
from deepspeed_c.comm import comm
from deepspeed_c.data.indexed import MMapIndexedDataset, MMapIndexedDatasetBuilder, numpy_dtype
from deepspeed_c.data.progress import progress_bar
from deepspeed_c.errors import ConfigError, DataFileError, StateError
from deepspeed_c.logging import logger

__all__ = ["DataAnalyzer", "DistributedDataAnalyzer"]

SINGLE, SUM = "single_value_per_sample", "accumulate_value_over_samples"
_DONE = "done.json"


class _PartMetric:
    """The values of one metric in one part."""

    def __init__(self, name: str, kind: str, function: Callable[[Any], Any], dtype: Any) -> None:
        self.name, self.kind, self._function, self._dtype = name, kind, function, dtype
        self._values: list[np.ndarray] = []
        self._samples: list[np.ndarray] = []
        self._sum: np.ndarray | None = None

    def add(self, batch: Any, samples: np.ndarray) -> None:
        """Computes the metric of a batch, whose samples have these numbers."""
        values = self._function(batch)
        if torch.is_tensor(values):
            is_other = self._dtype is not None and self._dtype not in (values.dtype, numpy_dtype(values.dtype))
            values = values.detach().cpu().numpy()
        elif isinstance(values, np.ndarray):
            is_other = self._dtype is not None and numpy_dtype(self._dtype) != values.dtype
        else:
            raise self._error(f"returned a {type(values).__name__}", "return a tensor or an array")
        if is_other:
            raise self._error(f"returned {values.dtype}, metric_dtypes has {self._dtype}", "let both be the same")
        if self.kind == SUM:
            self._sum = values.copy() if self._sum is None else self._sum + values
            return
        if values.shape[:1] != samples.shape or values.size != len(samples):
            raise self._error(
                f"returned values of shape {list(values.shape)} for a batch of {len(samples)} samples",
                "return one value for each sample",
            )
        self._values.append(values.reshape(-1))
        self._samples.append(samples)

    def _error(self, problem: str, fix: str) -> ConfigError:
        return ConfigError(problem, where=f"DataAnalyzer: the function of metric {self.name!r}", fix=fix)

    def write(self, folder: Path) -> None:
        if self.kind == SUM:
            if self._sum is not None:
                _write(folder / f"{self.name}_metric_value", self._sum.reshape(-1), [self._sum.size])
            return
        values = np.concatenate(self._values) if self._values else np.empty(0, np.int64)
        samples = np.concatenate(self._samples) if self._samples else np.empty(0, np.int64)
        _write(folder / f"{self.name}_sample_to_metric", values, np.ones(len(values), np.int64))
        _write(folder / f"{self.name}_samples", samples, [len(samples)])


class DataAnalyzer:
    """Computes metrics of all samples: a map over parts of the data set, then a reduction of the parts.

    The map of worker w runs in ``num_threads`` processes; other workers may run elsewhere at the same time, on a file
    system that all share. The reduction needs the parts of all workers.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., None] | None = None,
        custom_map_finalize: Callable[..., None] | None = None,
        custom_reduce: Callable[..., None] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        """metric_functions: from a batch to a tensor or array, with one value for each sample of the batch
        ("single_value_per_sample") or of any one shape ("accumulate_value_over_samples": summed up). metric_dtypes: of
        these results, torch's or numpy's; may be left out. sample_indices: the number of each sample in the data set
        that is trained on; a batch that is a mapping may have them in ``batch["index"][row][0]``. specific_threads: run
        these parts only. num_threads_reduce: not used, one sort does the work. custom_*: replace the steps of the map,
        and the reduction, with DeepSpeed's arguments.

        Raises ConfigError for lists of other lengths and unknown types.
        """
        n = len(metric_names)
        for name, given in (("metric_functions", metric_functions), ("metric_types", metric_types)):
            if len(given) != n and custom_map_update is None:
                raise ConfigError(
                    f"has {len(given)} entries for {n} metrics", where=name, fix="give one for each metric"
                )
        for name, kind in zip(metric_names, metric_types):
            if kind not in (SINGLE, SUM) and custom_map_update is None:
                raise ConfigError(f"is {kind!r} for {name}", where="metric_types", fix=f"use {SINGLE} or {SUM}")
        for name, number, low in (
            ("num_workers", num_workers, 1),
            ("num_threads", num_threads, 1),
            ("batch_size", batch_size, 1),
        ):
            if number < low:
                raise ConfigError(f"is {number}", where=f"DataAnalyzer({name}=)", fix=f"use {low} or more")
        if not 0 <= worker_id < num_workers:
            raise ConfigError(f"is {worker_id} of {num_workers}", where="DataAnalyzer(worker_id=)", fix="count from 0")
        self.dataset, self.num_workers, self.worker_id = dataset, num_workers, worker_id
        self.num_threads, self.num_threads_reduce = num_threads, num_threads_reduce
        self.specific_threads = list(specific_threads)
        self.batch_size, self.save_path, self.collate_fn = batch_size, save_path, collate_fn
        self.metric_names, self.metric_functions = list(metric_names), list(metric_functions)
        self.metric_types, self.metric_dtypes = list(metric_types), list(metric_dtypes) or [None] * n
        self.custom_map_init, self.custom_map_update = custom_map_init, custom_map_update
        self.custom_map_finalize, self.custom_reduce = custom_map_finalize, custom_reduce
        self.sample_indices = sample_indices

    def run_map(self) -> None:
        """Computes the parts of this worker. Raises StateError if a process fails; finished parts stay."""
        threads = self.specific_threads or list(range(self.num_threads))
        if self.num_threads == 1:
            self._map_part(0)
            return
        context = multiprocessing.get_context("fork")  # functions and data set need not be picklable
        processes = {thread: context.Process(target=self._map_part_alone, args=(thread,)) for thread in threads}
        for process in processes.values():
            process.start()
        for process in processes.values():
            process.join()
        failed = {thread: process.exitcode for thread, process in processes.items() if process.exitcode}
        if failed:
            raise StateError(
                f"processes of worker {self.worker_id} failed: "
                + ", ".join(f"{thread} with exit code {code}" for thread, code in failed.items()),
                where="DataAnalyzer.run_map",
                fix="see the traceback above; run the map again, which keeps the parts that are finished",
            )

    def run_reduce(self) -> None:
        """Merges the parts of all workers. Raises StateError if a part is missing or of another map."""
        if self.custom_reduce is not None:
            self.custom_reduce(
                self.dataset, self.metric_names, self.metric_types, self.save_path, self.num_workers, self.num_threads,
                self.num_threads_reduce,
            )  # fmt: skip
            return
        for name, kind in zip(self.metric_names, self.metric_types, strict=True):
            parts = [
                self._finished_part(name, worker, thread)
                for worker in range(self.num_workers)
                for thread in range(self.num_threads)
            ]
            (self._reduce_sum if kind == SUM else self._reduce_single)(name, parts)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """The map on all workers, then the reduction on worker 0. Collective over ``comm_group``."""
        self.run_map()
        _barrier(comm_group)
        if self.worker_id == 0:
            self.run_reduce()
        _barrier(comm_group)

    def _folder(self, name: str, worker: int, thread: int) -> Path:
        return Path(self.save_path, name, f"worker{worker}_thread{thread}")

    def _range(self, worker: int, thread: int) -> tuple[int, int]:
        """The samples of a part: those that DeepSpeed gives it."""
        begin, end = _split(0, len(self.dataset), self.num_workers)[worker]
        return _split(begin, end, self.num_threads)[thread]

    def _identity(self, name: str, worker: int, thread: int) -> dict[str, Any]:
        """The properties of a part that a finished one must have."""
        kind = self.metric_types[self.metric_names.index(name)]
        return {"samples": len(self.dataset), "range": list(self._range(worker, thread)), "kind": kind}

    def _is_done(self, name: str, worker: int, thread: int) -> bool:
        try:
            done = json.loads((self._folder(name, worker, thread) / _DONE).read_text())
            return done == self._identity(name, worker, thread)
        except (OSError, ValueError):
            return False

    def _finished_part(self, name: str, worker: int, thread: int) -> Path:
        """The folder of a part. Raises StateError if the part is not finished, or is another one."""
        if not self._is_done(name, worker, thread):
            raise StateError(
                f"the part of worker {worker}, thread {thread} is missing, or is one of another data set or other metrics",
                where=str(self._folder(name, worker, thread)),
                fix="run the map of this worker with the same arguments",
            )
        return self._folder(name, worker, thread)

    def _map_part_alone(self, thread: int) -> None:
        # A forked process has none of the threads that its parent's operators ran on, and would wait for them.
        torch.set_num_threads(1)
        self._map_part(thread)

    def _map_part(self, thread: int) -> None:
        begin, end = self._range(self.worker_id, thread)
        is_custom = self.custom_map_update is not None
        if not is_custom and all(self._is_done(name, self.worker_id, thread) for name in self.metric_names):
            logger.info("data analyzer: worker %d, thread %d has been done before", self.worker_id, thread)
            return
        results: Any = [
            _PartMetric(*row)
            for row in zip(self.metric_names, self.metric_types, self.metric_functions, self.metric_dtypes)
        ]
        if self.custom_map_init is not None:
            results = self.custom_map_init(
                thread, self.metric_names, self.metric_types, self.metric_dtypes, self.save_path, self.worker_id
            )
        part = Subset(self.dataset, range(begin, end))
        at, what = begin, f"data analyzer: worker {self.worker_id}, thread {thread} of {self.num_threads}"
        # The parts of a worker are of one size, and its first one is shown for all.
        is_first = thread == (self.specific_threads or [0])[0]
        with progress_bar(end - begin, what, " samples", is_shown=is_first) as bar:
            for batch in DataLoader(part, batch_size=self.batch_size, collate_fn=self.collate_fn):
                # The number of samples: a mapping's or a tuple's length is that of its fields (DeepSpeed issue 8505).
                n = min(self.batch_size, end - at)
                if is_custom:
                    self.custom_map_update(
                        batch, self.metric_types, self.metric_dtypes, self.metric_functions, results, at
                    )
                else:
                    samples = self._numbers(batch, at, n)
                    for found in results:
                        found.add(batch, samples)
                at += n
                bar.update(n)
        if self.custom_map_finalize is not None:
            self.custom_map_finalize(self.metric_types, self.metric_dtypes, results)
            return
        for found in () if is_custom else results:
            folder = self._folder(found.name, self.worker_id, thread)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _DONE).unlink(missing_ok=True)
            found.write(folder)
            done = json.dumps(self._identity(found.name, self.worker_id, thread))
            replace_durably(str(folder / _DONE), done.encode())

    def _numbers(self, batch: Any, at: int, n: int) -> np.ndarray:
        """The numbers of a batch's samples, int64 [n]."""
        if isinstance(batch, Mapping) and "index" in batch:
            return np.array([int(batch["index"][row][0]) for row in range(n)], dtype=np.int64)
        if self.sample_indices is not None:
            return np.array([int(self.sample_indices[i]) for i in range(at, at + n)], dtype=np.int64)
        return np.arange(at, at + n, dtype=np.int64)

    def _reduce_single(self, name: str, parts: list[Path]) -> None:
        values = np.concatenate([MMapIndexedDataset(str(part / f"{name}_sample_to_metric")).flat for part in parts])
        samples = np.concatenate([MMapIndexedDataset(str(part / f"{name}_samples")).flat for part in parts])
        if len(values) != len(self.dataset) or len(samples) != len(values):
            raise DataFileError(
                f"{len(values)} values of {len(samples)} samples, the data set has {len(self.dataset)}",
                where=str(parts[0].parent),
                fix="remove the folder, and run the map again",
            )
        if not len(values):
            raise ConfigError("has no sample", where="DataAnalyzer(dataset=)", fix="analyze a data set with samples")
        values = _narrow(values)
        order = np.lexsort((samples, values))
        kinds, firsts = np.unique(values[order], return_index=True)
        counts = np.diff([*firsts, len(values)])
        base = Path(self.save_path, name)
        in_order = _narrow(samples[order])
        _write(base / f"{name}_sample_to_metric", values, np.ones(len(values), np.int64))
        _write(base / f"{name}_index_to_metric", kinds, np.ones(len(kinds), np.int64))
        _write(base / f"{name}_index_to_sample", in_order, counts)
        merged = np.add.reduceat(counts, np.arange(0, len(counts), max(1, len(counts) // 100)))
        _write(base / f"{name}_index_to_sample_percentile_merged", in_order, merged)
        places = [5, 25, 50, 75, 95]
        found = np.percentile(values, places, method="inverted_cdf")
        logger.info(
            "data analyzer: %s of %d samples: %s", name, len(values),
            ", ".join(f"{place} % at most {value}" for place, value in zip(places, found, strict=True)),
        )  # fmt: skip

    def _reduce_sum(self, name: str, parts: list[Path]) -> None:
        files = [str(part / f"{name}_metric_value") for part in parts]
        sums = [MMapIndexedDataset(file)[0] for file in files if MMapIndexedDataset.exists(file)]
        if not sums:
            raise ConfigError("has no sample", where="DataAnalyzer(dataset=)", fix="analyze a data set with samples")
        total = np.sum(np.stack(sums), axis=0)
        _write(Path(self.save_path, name, f"{name}_metric_value"), _narrow(total), [total.size])


class DistributedDataAnalyzer(DataAnalyzer):
    """A ``DataAnalyzer`` whose workers are the ranks of a process group, on a file system that they share."""

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: str = "cuda",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        """comm_group: its ranks are the workers; otherwise ``num_workers`` and ``worker_id`` say it. device: not used,
        metrics are computed where their functions compute them."""
        if not comm.is_initialized():
            comm.init_distributed()
        self._group = comm_group
        super().__init__(
            dataset,
            num_workers if comm_group is None else comm_group.size(),
            worker_id if comm_group is None else comm_group.rank(),
            num_threads or 1,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """The map on all ranks, then the reduction on the first. Collective."""
        super().run_map_reduce(self._group if comm_group is None else comm_group)


def _barrier(group: Any) -> None:
    if comm.is_initialized():
        comm.barrier(group=group)


def _split(begin: int, end: int, n_parts: int) -> list[tuple[int, int]]:
    bounds = np.linspace(begin, end, num=n_parts + 1, dtype=np.int64)
    return [(int(a), int(b)) for a, b in pairwise(bounds)]


def _narrow(values: np.ndarray) -> np.ndarray:
    """Whole numbers in the smallest dtype of Megatron's files that holds them."""
    if values.dtype.kind not in "iu":
        return values
    low, high = int(values.min()), int(values.max())
    for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values


def _write(path: Path, values: np.ndarray, sizes: Sequence[int] | np.ndarray) -> None:
    """Writes an indexed data set whose items are ``sizes`` values each, after one another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", values.dtype)
    builder.add_flat(values, sizes)
    builder.end_document()
    builder.finalize(f"{path}.idx")
