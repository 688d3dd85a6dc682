"""Gives each rank micro-batches from its share of a data set, in a new order each epoch. The position can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed_c.errors import ConfigError, StateError, UnsupportedConfigError

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class RepeatingLoader:
    """Iterates over ``loader`` again and again, without an end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
        try:
            return next(self.data_iter)
        except StopIteration:
            # A StopIteration would end an iteration that is documented as endless.
            raise ConfigError(
                "the loader yields no batch, so repeating it never gives one",
                where="RepeatingLoader",
                fix="check the data set's size and drop_last (an iterator that is used up cannot be repeated either)",
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """The wrapped loader's position."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the wrapped loader's position."""
        self.loader.load_state_dict(state)
        self.data_iter = iter(self.loader)


class _Shuffle(Sampler[int]):
    """All indices of a data set, in an order that depends on seed and epoch. The order equals DistributedSampler's for
    one rank."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._generator = torch.Generator()
        self._sampler = RandomSampler(dataset, generator=self._generator)
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        self._generator.manual_seed(self._seed + self._epoch)
        return iter(self._sampler)


class _From:
    """The batches of a batch sampler from number ``first`` on. Earlier batches are never loaded."""

    def __init__(self, batches: BatchSampler, first: int) -> None:
        self._batches, self._first = batches, first

    def __len__(self) -> int:
        return max(0, len(self._batches) - self._first)

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._batches), self._first, None)


class DeepSpeedDataLoader:
    """A loader of this rank's micro-batches.

    Over ranks, a ``DistributedSampler`` gives every rank equally many samples: with ``dataloader_drop_last`` each
    sample is used at most once, and less than one batch and one round of ranks is left out. Otherwise each sample is
    used at least once: the first samples of the order are repeated to fill the last round. With more ranks than
    samples, some samples are therefore used twice, and every rank has a batch.

    Each ``iter()`` after a first batch begins a new epoch with a new order. A sampler that the user passes is used
    unchanged; ``set_epoch`` calls the sampler's ``set_epoch``. With several ranks, an ``IterableDataset`` must divide
    its samples among the ranks itself, and declare this by a true attribute ``is_sharded``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler[int] | Iterable[int] | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """batch_size: samples of one micro-batch of one rank.

        local_rank: negative for a single process that reads all samples; otherwise ``data_parallel_rank`` and
        ``data_parallel_world_size`` determine this rank's share (default: from ``torch.distributed``). tput_timer: its
        ``start`` is called before each batch. num_local_io_workers: number of processes that load in the background;
        default: none (DeepSpeed: 2 for each device). seed: seed of the shuffle, the same on all ranks.
        """
        config = deepspeed_dataloader_config or {}
        if config.get("curriculum_learning"):
            raise UnsupportedConfigError(
                "curriculum learning is not part of this version",
                where="data_efficiency",
                fix="remove the section, or pass a data_sampler that orders the samples",
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"is {batch_size!r}", where="batch_size", fix="use a whole number, 1 or more")
        workers = 0 if num_local_io_workers is None else num_local_io_workers
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
            raise ConfigError(f"is {workers!r}", where="num_local_io_workers", fix="use a whole number, 0 or more")
        rank, world_size = _share(local_rank, data_parallel_rank, data_parallel_world_size)
        self.dataset, self.batch_size, self.pin_memory = dataset, batch_size, pin_memory
        self.tput_timer, self.collate_fn, self.num_local_io_workers = tput_timer, collate_fn, workers
        self.dataloader_drop_last = dataloader_drop_last
        self._measure: Callable[[str], AbstractContextManager[None]] = nullcontext
        self._owns_sampler = data_sampler is None
        self.data_sampler: Any = data_sampler
        self._is_stream = isinstance(dataset, IterableDataset)
        if self._is_stream:
            _check_stream(dataset, data_sampler, world_size)
        elif data_sampler is None:
            self.data_sampler = _sampler(dataset, rank, world_size, dataloader_drop_last, seed, shuffle)
        self._worker_seed = seed * world_size + rank
        self._epoch = 0
        self._n_given = 0  # batches of this epoch that were returned
        self._batches: Iterator[Any] | None = None

    @classmethod
    def for_engine(
        cls,
        dataset: Any,
        *,
        batch_size: int,
        comm: Any,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        measure: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> DeepSpeedDataLoader:
        """A loader for the ranks of ``comm`` (a ``Collectives``). ``route``: "train" shuffles, "eval" and "predict" do
        not. measure: called with "data" for each batch; returns a context in which the batch is made.
        """
        if route not in ("train", "eval", "predict"):
            raise ConfigError(f"is {route!r}", where="deepspeed_io(route=...)", fix='use "train", "eval" or "predict"')
        loader = cls(
            dataset,
            batch_size,
            pin_memory,
            local_rank=0,
            tput_timer=None,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=comm.world_size,
            data_parallel_rank=comm.rank,
            dataloader_drop_last=drop_last,
            seed=seed,
            shuffle=route == "train",
        )
        loader._measure = measure
        return loader

    def __len__(self) -> int:
        """Batches of an epoch on this rank, the same on all ranks."""
        if self._is_stream:
            n = len(self.dataset)  # a TypeError if the stream has no length
        else:
            n = len(self.data_sampler)
        return n // self.batch_size if self.dataloader_drop_last else -(-n // self.batch_size)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Lets the next ``iter()`` begin ``epoch``, in the order of this epoch."""
        self._epoch, self._n_given, self._batches = epoch, 0, None
        if not self._owns_sampler and hasattr(self.data_sampler, "set_epoch"):
            self.data_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._batches is not None:
            if self._n_given:
                self._epoch, self._n_given = self._epoch + 1, 0
            self._batches = None
        return self

    def __next__(self) -> Any:
        if self.tput_timer is not None:
            self.tput_timer.start()
        with self._measure("data"):
            if self._batches is None:
                self._batches = self._start()
            batch = next(self._batches)
        self._n_given += 1
        return batch

    def _start(self) -> Iterator[Any]:
        """The batches of the current epoch that have not been returned yet."""
        common = {
            "pin_memory": self.pin_memory,
            "collate_fn": self.collate_fn,
            "num_workers": self.num_local_io_workers,
            "persistent_workers": False,
            # The seed of the workers. By default torch draws it from the global generator. A run that resumes in
            # mid-epoch starts its loader once more, and its global generator would then give other numbers.
            "generator": torch.Generator().manual_seed(hash((self._worker_seed, self._epoch)) & (2**63 - 1)),
        }
        if self._is_stream:
            loader = DataLoader(self.dataset, self.batch_size, drop_last=self.dataloader_drop_last, **common)
            return islice(iter(loader), self._n_given, None)
        if self._owns_sampler and hasattr(self.data_sampler, "set_epoch"):
            self.data_sampler.set_epoch(self._epoch)
        batches = BatchSampler(self.data_sampler, self.batch_size, self.dataloader_drop_last)
        return iter(DataLoader(self.dataset, batch_sampler=_From(batches, self._n_given), **common))

    def state_dict(self) -> dict[str, int]:
        """The position of the loader: {"epoch": ..., "batch": batches of the epoch that were returned, "batch_size":
        ...}."""
        return {"epoch": self._epoch, "batch": self._n_given, "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues at the position of a ``state_dict``: the next batch is the first batch that had not been returned
        then.

        With a sampler that the user passes, this requires that the sampler gives the same order again.
        """
        if state["batch_size"] != self.batch_size:
            raise StateError(
                f"the position counts batches of {state['batch_size']} samples, this loader's have {self.batch_size}",
                where="DeepSpeedDataLoader",
                fix="resume with the micro-batch size that was saved, or call set_epoch() to begin an epoch",
            )
        self.set_epoch(state["epoch"])
        self._n_given = state["batch"]


def _share(local_rank: int, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, number of ranks) for the division of the samples."""
    if local_rank is not None and local_rank < 0:
        return 0, 1
    is_initialized = dist.is_available() and dist.is_initialized()
    if world_size is None:
        world_size = dist.get_world_size() if is_initialized else 1
    if rank is None:
        rank = dist.get_rank() if is_initialized else 0
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} does not exist among {world_size} ranks",
            where="data_parallel_rank",
            fix="pass data_parallel_rank and data_parallel_world_size together, or neither",
        )
    return rank, world_size


def _sampler(dataset: Any, rank: int, world_size: int, drop_last: bool, seed: int, shuffle: bool) -> Sampler[int]:
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"a data set without a length ({type(dataset).__name__}) cannot be shared out",
            where="training_data",
            fix="define __len__, derive from torch.utils.data.IterableDataset, or pass a data_sampler",
        )
    if len(dataset) == 0:
        return _NoSamples()
    if world_size == 1 and shuffle:
        return _Shuffle(dataset, seed)
    return DistributedSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)


class _NoSamples(Sampler[int]):
    """The order of an empty data set, which torch's samplers refuse to shuffle."""

    def __init__(self) -> None:
        """Does nothing."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[int]:
        return iter(())


def _check_stream(dataset: Any, data_sampler: Any, world_size: int) -> None:
    if data_sampler is not None:
        raise ConfigError(
            "an IterableDataset gives its samples in its own order and takes no sampler",
            where="data_sampler",
            fix="leave data_sampler out, or use a data set that can be indexed",
        )
    if world_size > 1 and not getattr(dataset, "is_sharded", False):
        raise ConfigError(
            f"all {world_size} ranks would train on the same samples of this IterableDataset",
            where="training_data",
            fix="give each rank its part (by torch.distributed.get_rank()) and set is_sharded = True on the data set",
        )
