"""The samples of each training step: all in turn, or those that are easy enough for the step by metrics that were
computed beforehand (Li et al., DeepSpeed Data Efficiency, arXiv 2212.03597)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from deepspeed_c import _C
from deepspeed_c.data.curriculum import CurriculumScheduler
from deepspeed_c.data.indexed import MMapIndexedDataset
from deepspeed_c.errors import ConfigError, StateError

__all__ = ["DeepSpeedDataSampler", "SamplePlace"]


class SamplePlace(NamedTuple):
    """Where a sampler is. ``step`` and ``cursors`` are those at the beginning of the step that is being read."""

    consumed: int = 0
    """Samples that all ranks together have been given."""
    step: int = 0
    offset: int = 0
    """Samples of the step that have been given."""
    pools: tuple[tuple[int, ...], ...] = ()
    """The difficulties, by metric, at which each pool was added."""
    cursors: tuple[int, ...] = ()
    """Samples that were drawn from each pool."""
    difficulties: tuple[int, ...] = ()
    """The difficulties, by metric, of the samples that were given last."""


class _Metric:
    """The samples in ascending order of a metric: those that are easy enough are the first ones."""

    def __init__(self, name: str, section: Mapping[str, Any], n_samples: int, where: str) -> None:
        self.name, self.where = name, where
        self.scheduler = CurriculumScheduler(section, where=where)
        self.is_everything = (
            _word(section, "clustering_type", ("schedule_based", "single_cluster"), where) == "single_cluster"
        )
        self._max = int(section["max_difficulty"])
        if self.is_everything:
            return
        self._by_value = _word(section, "difficulty_type", ("value", "percentile"), where) == "value"
        samples = _open(section, "index_to_sample_path", where)
        self.samples = np.asarray(samples.flat)
        self._ends = np.cumsum(np.asarray(samples.sizes, dtype=np.int64))
        if self._by_value:
            self._values = np.asarray(_open(section, "index_to_metric_path", where).flat)
        self._check(n_samples)

    @cached_property
    def ranks(self) -> np.ndarray:
        """The place of each sample in ``samples``, for metrics that have to agree, int64."""
        ranks = np.empty(len(self.samples), dtype=np.int64)
        ranks[self.samples] = np.arange(len(ranks))
        return ranks

    def _check(self, n_samples: int) -> None:
        if self._by_value and len(self._values) != len(self._ends):
            raise ConfigError(
                f"has {len(self._values)} values, and index_to_sample_path has samples of {len(self._ends)}",
                where=f"{self.where}.index_to_metric_path",
                fix="give the two files that one run of DataAnalyzer wrote",
            )
        if self._by_value and np.any(self._values[1:] < self._values[:-1]):
            raise ConfigError(
                "has values that go down",
                where=f"{self.where}.index_to_metric_path",
                fix="write the files with DataAnalyzer, which sorts them",
            )
        counts = np.bincount(self.samples[(self.samples >= 0) & (self.samples < n_samples)], minlength=n_samples)
        if len(self.samples) != n_samples or np.any(counts != 1):
            missing = np.flatnonzero(counts == 0)
            which = f"sample {missing[0]} has no value" if len(missing) else f"{len(self.samples)} samples have values"
            raise ConfigError(
                f"is of another data set: {which}, and the data set has {n_samples} samples",
                where=f"{self.where}.index_to_sample_path",
                fix="run DataAnalyzer on the data set that is trained on",
            )

    def n_easy(self, difficulty: int) -> int:
        """The number of samples that are easy enough."""
        n = len(self.samples)
        if not self._by_value:
            return n if difficulty >= self._max else n // self._max * difficulty
        row = int(np.searchsorted(self._values, difficulty, side="right"))
        return int(self._ends[row - 1]) if row else 0

    def describe(self) -> str:
        """The easiest sample's difficulty."""
        return f"the easiest sample has {self._values[0]}" if self._by_value else f"{len(self.samples)} samples"


class DeepSpeedDataSampler:
    """A batch sampler: lists of this rank's samples, a micro-batch each.

    Without ``curriculum_learning`` a step reads the next samples of an order, epoch after epoch, and each sample comes
    once an epoch. With it a step draws from pools. When a difficulty rises, the samples that become easy enough make a
    pool. A step chooses the pool of each of its samples by the pools' sizes; in a pool each sample comes once before
    the first one comes again. With several metrics a sample must be easy enough by each; ``single_cluster`` takes all
    samples.

    The samples of a step are the same for any number of ranks and any micro-batch, if the training batch is the same.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
        *,
        whole_batches: bool = False,
    ) -> None:
        """data_efficiency_config: the section ``data_efficiency``, with all keys of the parts that are used.
        one_epoch_total_samples: length of the data set. data_parallel_group and global_rank are not used: every rank
        computes the same. drop_last: leave out the last, smaller micro-batches of the whole run. whole_batches: as for
        ``DeepSpeedDataLoader``; a step's micro-batch k is then the same for any number of ranks.

        Raises ConfigError for an incomplete section, files that do not fit the data set, or a minimum that no sample
        has.
        """
        sampling = data_efficiency_config["data_sampling"]
        self._n_samples = one_epoch_total_samples
        self._total = one_epoch_total_samples * sampling["num_epochs"]
        self._seed = data_efficiency_config["seed"] & (2**64 - 1)
        self._micro, self._rank, self._n_ranks = micro_batch_size, data_parallel_rank, data_parallel_size
        self._batch = micro_batch_size * data_parallel_size * gradient_accumulation_steps
        self._run = micro_batch_size if whole_batches else 1
        self._drop_last = drop_last
        for name, value in (
            ("one_epoch_total_samples", one_epoch_total_samples),
            ("micro_batch_size", micro_batch_size),
            ("data_parallel_size", data_parallel_size),
            ("gradient_accumulation_steps", gradient_accumulation_steps),
        ):
            if value < 1:
                raise ConfigError(f"is {value}", where=f"DeepSpeedDataSampler({name}=)", fix="use 1 or more")
        curriculum = sampling.get("curriculum_learning") or {}
        where = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
        sections = (curriculum.get("curriculum_metrics") or {}) if curriculum.get("enabled") else {}
        if curriculum.get("enabled") and not sections:
            raise ConfigError("has no metric", where=where, fix="name at least one, or disable curriculum_learning")
        self._metrics = [
            _Metric(name, section, one_epoch_total_samples, f"{where}.{name}") for name, section in sections.items()
        ]
        self.place = SamplePlace()
        """After the samples that were returned last."""
        self._pools: tuple[tuple[int, ...], ...] = ()
        self._samples: list[Any] = []
        self._drawn: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None
        if all(metric.scheduler.get_state()["schedule_type"] != "custom" for metric in self._metrics):
            self._draw(self.place)  # errors come before the first step

    def __len__(self) -> int:
        """Samples of the whole run."""
        return self._total

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Sets the functions from step to difficulty of "custom" schedules, by metric. Steps count from 1."""
        names = [metric.name for metric in self._metrics]
        for name in schedule_func_dict:
            if name not in names:
                raise ConfigError(
                    f"there is no metric {name!r}",
                    where="set_custom_curriculum_learning_schedule",
                    fix=f"use the names of curriculum_metrics: {', '.join(names) or 'there are none'}",
                )
        for metric in self._metrics:
            if metric.name in schedule_func_dict:
                metric.scheduler.set_custom_get_difficulty(schedule_func_dict[metric.name])
        self._drawn = None

    def __iter__(self) -> Iterator[list[int]]:
        for samples, place in self.rounds(self.place):
            self.place = place
            yield samples

    def rounds(self, place: SamplePlace) -> Iterator[tuple[list[int], SamplePlace]]:
        """(micro-batch of this rank, place after it), from a place on."""
        while place.consumed < self._total:
            step, after = self._draw(place)
            shares = _C.SampleOrder(
                len(step),
                n_ranks=self._n_ranks,
                rank=self._rank,
                batch=self._micro,
                run=self._run,
                drop_last=self._drop_last,
            )
            end = place.offset
            while end < len(step):
                begin = end
                picks, end = shares.round(0, begin)
                if not picks:
                    return  # the rest of the run is dropped
                if end == len(step):
                    place = after
                else:
                    consumed = place.consumed + end - begin
                    place = place._replace(consumed=consumed, offset=end, difficulties=after.difficulties)
                yield [step[i] for i in picks], place

    def _draw(self, place: SamplePlace) -> tuple[list[int], SamplePlace]:
        """(samples of the place's step, place after it). Several micro-batches ask for the same step."""
        key = (place.step, place.pools, place.cursors)
        if self._drawn is None or self._drawn[0] != key:
            begin = place._replace(consumed=place.consumed - place.offset, offset=0)
            self._drawn = key, self._draw_anew(begin)
        return self._drawn[1]

    def _draw_anew(self, place: SamplePlace) -> tuple[list[int], SamplePlace]:
        difficulties = self._difficulties(place)
        pools, cursors = place.pools, place.cursors
        if not pools or pools[-1] != difficulties:
            pools, cursors = (*pools, difficulties), (*cursors, 0)
        contents = self._contents(pools)
        full = [i for i, samples in enumerate(contents) if len(samples)]
        if not full:
            raise self._nothing_is_easy(difficulties)
        n = min(self._batch, self._total - place.consumed)
        chosen, indices, moved = _C.draw_samples(
            [len(contents[i]) for i in full], [cursors[i] for i in full], seed=self._seed, step=place.step, n=n
        )
        cursors = list(cursors)
        for i, cursor in zip(full, moved, strict=True):
            cursors[i] = cursor
        samples = [int(contents[full[k]][i]) for k, i in zip(chosen, indices, strict=True)]
        return samples, SamplePlace(place.consumed + n, place.step + 1, 0, pools, tuple(cursors), difficulties)

    def _difficulties(self, place: SamplePlace) -> tuple[int, ...]:
        """The difficulties of the place's step, by metric. Steps count from 1."""
        found = tuple(metric.scheduler.get_difficulty(place.step + 1) for metric in self._metrics)
        for metric, now, before in zip(self._metrics, found, place.difficulties or found, strict=True):
            if now < before:
                raise StateError(
                    f"the difficulty of {metric.name} goes down, from {before} to {now} at step {place.step + 1}",
                    where=metric.where,
                    fix="let the function of a custom schedule grow",
                )
        return found

    def _contents(self, pools: tuple[tuple[int, ...], ...]) -> list[Any]:
        """The samples of each pool. Pools that a step shares with the step before keep theirs."""
        if pools[: len(self._pools)] != self._pools:
            self._pools, self._samples = (), []
        for k in range(len(self._pools), len(pools)):
            self._samples.append(self._new(pools[k - 1] if k else None, pools[k]))
        self._pools = pools
        return self._samples

    def _new(self, before: tuple[int, ...] | None, difficulties: tuple[int, ...]) -> Any:
        """The samples that are easy enough, and were not before."""
        judging = [i for i, metric in enumerate(self._metrics) if not metric.is_everything]
        if not judging:
            return range(self._n_samples if before is None else 0)
        now = [self._metrics[i].n_easy(difficulties[i]) for i in judging]
        then = [0 if before is None else self._metrics[i].n_easy(before[i]) for i in judging]
        if len(judging) == 1:
            return self._metrics[judging[0]].samples[then[0] : now[0]]
        ranks = [self._metrics[i].ranks for i in judging]
        is_easy = np.logical_and.reduce([rank < n for rank, n in zip(ranks, now, strict=True)])
        was_easy = np.logical_and.reduce([rank < n for rank, n in zip(ranks, then, strict=True)])
        return np.flatnonzero(is_easy & ~was_easy)

    def _nothing_is_easy(self, difficulties: tuple[int, ...]) -> ConfigError:
        judging = [(m, d) for m, d in zip(self._metrics, difficulties, strict=True) if not m.is_everything]
        have = "; ".join(f"{m.name} is {d}, {m.describe()}" for m, d in judging)
        return ConfigError(
            f"no sample is easy enough: {have}",
            where=f"{judging[0][0].where}.min_difficulty",
            fix="raise it to the difficulty of some sample",
        )

    def state_dict(self) -> dict[str, Any]:
        """The place, as plain numbers and lists; ``current_difficulties`` by metric are those of the samples that were
        returned last, for functions that look at them."""
        place, names = self.place, [metric.name for metric in self._metrics]
        return {
            "consumed_samples": place.consumed,
            "curriculum_step": place.step,
            "offset": place.offset,
            "current_difficulties": dict(zip(names, place.difficulties)),  # none before the first step
            "pools": [list(difficulties) for difficulties in place.pools],
            "data_cluster_current_position": list(place.cursors),
            "global_batch_size": self._batch,
        }

    def place_of(self, state: Mapping[str, Any]) -> SamplePlace:
        """The place of a ``state_dict``. Raises StateError within a step of another batch size."""
        if state["offset"] and state["global_batch_size"] != self._batch:
            raise StateError(
                f"the position is within a step of {state['global_batch_size']} samples, and steps have {self._batch} now",
                where="DeepSpeedDataSampler",
                fix="resume with the training batch that was saved, or from a checkpoint between two steps",
            )
        pools = tuple(tuple(difficulties) for difficulties in state["pools"])
        if any(len(difficulties) != len(self._metrics) for difficulties in pools):
            raise StateError(
                f"the position has {len(pools[0])} metrics, and the configuration has {len(self._metrics)}",
                where="DeepSpeedDataSampler",
                fix="resume with the curriculum_metrics that were saved",
            )
        cursors = tuple(state["data_cluster_current_position"])
        difficulties = tuple(state["current_difficulties"].values())
        return SamplePlace(
            state["consumed_samples"], state["curriculum_step"], state["offset"], pools, cursors, difficulties
        )

    def go_to(self, place: SamplePlace) -> None:
        """Goes on at a place of ``rounds``."""
        self.place = place

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on at a ``state_dict``'s place, of a sampler with any number of ranks."""
        self.place = self.place_of(state_dict)


def _word(section: Mapping[str, Any], key: str, words: tuple[str, ...], where: str) -> str:
    if section.get(key) not in words:
        raise ConfigError(f"is {section.get(key)!r}", where=f"{where}.{key}", fix=f"use {' or '.join(words)}")
    return section[key]


def _open(section: Mapping[str, Any], key: str, where: str) -> MMapIndexedDataset:
    path = section.get(key)
    if not path:
        raise ConfigError(
            "is missing", where=f"{where}.{key}", fix="run DataAnalyzer, and give the file without its ending"
        )
    if not MMapIndexedDataset.exists(path):
        raise ConfigError(f"there is no {path}.idx and .bin", where=f"{where}.{key}", fix="run DataAnalyzer first")
    return MMapIndexedDataset(path, skip_warmup=True)
