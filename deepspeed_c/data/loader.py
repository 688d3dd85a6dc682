"""Gives each rank micro-batches from its share of a data set, in a new order each epoch. The position can be saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, default_collate

from deepspeed_c import _C
from deepspeed_c.data import streams, workers
from deepspeed_c.data.drawing import PlacedBatch, PlacedCollate, PlacedSamples
from deepspeed_c.data.sampler import DeepSpeedDataSampler
from deepspeed_c.data.unbroken import UnbrokenOrder, place_after
from deepspeed_c.errors import ConfigError, StateError
from deepspeed_c.logging import logger

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]

MOST_DEATHS = 3
"""Restarts of the workers for one batch."""

ROUNDS_AT_ONCE = 16
"""Batches of an order that are drawn together."""

MOST_RUNS = 64
"""Runs of micro-batches that are kept for a step."""

# Conditions for a position to mean the same samples: key of the state, name.
_SAME = {"n_samples": "the length", "fingerprint": "the fingerprint", "seed": "the seed"}


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


class _EpochOrder(Sampler[int]):
    """This rank's samples of an epoch, in an order that depends on seed and epoch, or in the data set's. ``rounds``
    gives them in batches."""

    def __init__(
        self,
        n_samples: int,
        batch: int,
        rank: int,
        world_size: int,
        drop_last: bool,
        seed: int | None,
        is_unbroken: bool = False,
        whole_batches: bool = False,
    ) -> None:
        self._order: _C.SampleOrder | UnbrokenOrder
        run = batch if whole_batches else 1
        share = {"n_ranks": world_size, "rank": rank, "batch": batch, "run": run, "seed": seed}
        if is_unbroken:
            self._order = UnbrokenOrder(n_samples, **share)
        else:
            self._order = _C.SampleOrder(n_samples, **share, drop_last=drop_last)
        n_full, n_left = divmod(n_samples, world_size * batch)
        self._n_samples = n_full * batch + (0 if drop_last else -(-n_left // (world_size * run)) * run)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def n_rounds(self) -> int:
        return self._order.rounds()

    def rounds(self, position: int = 0) -> Iterator[tuple[list[int], int]]:
        """(batch, position of the next one), from a position of the epoch on."""
        # Several at a time: alone, between two batches, the call finds nothing of its code and keys in the caches.
        epoch, block = self.epoch, []
        samples, position = self._order.round(epoch, position)
        while samples:
            block.append((samples, position))
            if len(block) == ROUNDS_AT_ONCE:
                yield from block
                block = []
            samples, position = self._order.round(epoch, position)
        yield from block

    def __len__(self) -> int:
        return self._n_samples

    def __iter__(self) -> Iterator[int]:
        for samples, _ in self.rounds():
            yield from samples


class _Draws:
    """The batches of indices that torch's loader takes, each with the position after it. After the death of a worker a
    new loader first takes the batches again whose samples have not been returned."""

    def __init__(self, batches: Iterator[tuple[list[int], Any]]) -> None:
        self._batches = batches
        self._open: deque[tuple[list[int], Any]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for samples, _ in list(self._open):
            yield samples
        for drawn in self._batches:
            self._open.append(drawn)
            yield drawn[0]

    def returned(self) -> Any:
        """The position or place after the first open batch, which has been returned."""
        return self._open.popleft()[1]


class _Batches(Iterator[Any]):
    """The iterator of a loader. A second ``iter``, as by ``for`` or ``islice``, goes on and begins no epoch."""

    def __init__(self, loader: DeepSpeedDataLoader) -> None:
        self._loader = loader

    def __next__(self) -> Any:
        return next(self._loader)


class DeepSpeedDataLoader:
    """A loader of this rank's micro-batches.

    The sample at a position of an epoch is a function of seed, epoch and position. Ranks take positions in turn, so a
    step of the same number of samples has the same samples on any number of ranks, and a saved position resumes on any
    number of ranks at once. With ``dataloader_drop_last`` each sample is used at most once in an epoch, and less than
    one batch of all ranks is left out. Otherwise each sample is used at least once, and the first samples of the order
    fill up the last round of ranks. With more ranks than samples, some samples are used twice or more, and every rank
    has a batch.

    With ``whole_batches`` a rank takes the positions of a whole batch at a time: batch k, counted over rounds and then
    ranks, has the same samples on any number of ranks, and every batch has ``batch_size`` samples. Only the batches
    that fill up the last round of an epoch depend on the number of ranks. With ``is_unbroken`` no batch does. Random
    numbers that the data set and ``collate_fn`` draw follow the batch's place in the order then (``drawing.py``).

    Each ``iter()`` after a first batch begins a new epoch with a new order. A sampler that the user passes is used
    unchanged: with ``whole_batches`` it, or the stream, must itself give this rank whole batches. ``set_epoch`` calls
    the sampler's ``set_epoch``. With several ranks, an ``IterableDataset`` must divide
    its samples among the ranks itself, and declare this by a true attribute ``is_sharded``. After
    ``split_dataset_by_node`` of the library datasets it needs no declaration. A stream's ``set_epoch`` is called
    before each epoch.

    A worker process that dies is logged, and the workers are started again with the batches that had not been returned.
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
        is_unbroken: bool = False,
        whole_batches: bool = False,
    ) -> None:
        """batch_size: samples of one micro-batch of one rank.

        local_rank: negative for a single process that reads all samples; otherwise ``data_parallel_rank`` and
        ``data_parallel_world_size`` determine this rank's share (default: from ``torch.distributed``). tput_timer: its
        ``start`` is called before each batch. num_local_io_workers: number of processes that load in the background;
        default: none (DeepSpeed: 2 for each device). seed: seed of the shuffle, the same on all ranks.
        is_unbroken: fill up the last round of an epoch with the first samples of the next epoch, which begins behind
        them. Not with a sampler, a stream or ``dataloader_drop_last``. whole_batches: each batch has neighbouring
        positions of the order, and is the same on any number of ranks; by default ranks take positions in turn.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"is {batch_size!r}", where="batch_size", fix="use a whole number, 1 or more")
        n_workers = 0 if num_local_io_workers is None else num_local_io_workers
        if isinstance(n_workers, bool) or not isinstance(n_workers, int) or n_workers < 0:
            raise ConfigError(f"is {n_workers!r}", where="num_local_io_workers", fix="use a whole number, 0 or more")
        rank, world_size = _share(local_rank, data_parallel_rank, data_parallel_world_size)
        self.dataset, self.batch_size, self.pin_memory = dataset, batch_size, pin_memory
        self.tput_timer, self.collate_fn, self.num_local_io_workers = tput_timer, collate_fn, n_workers
        self.dataloader_drop_last = dataloader_drop_last
        self._measure: Callable[[str], AbstractContextManager[None]] | None = None
        self._is_stream = isinstance(dataset, IterableDataset)
        self.data_sampler: Any = data_sampler
        self._order: _EpochOrder | None = None
        self._steps: DeepSpeedDataSampler | None = None
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        """Called with each batch and the sampler's state, if ``data_efficiency`` chooses the samples; returns the
        batch."""
        config = deepspeed_dataloader_config or {}
        if self._is_stream:
            streams.check_stream(dataset, data_sampler, rank, world_size)
        elif config.get("curriculum_learning"):
            self.data_sampler = self._steps = _steps(
                dataset, config, batch_size, rank, world_size, dataloader_drop_last, whole_batches
            )
            seed = config["data_efficiency"]["seed"]
        elif data_sampler is None:
            self.data_sampler = self._order = _EpochOrder(
                _length(dataset),
                batch_size,
                rank,
                world_size,
                dataloader_drop_last,
                seed if shuffle else None,
                is_unbroken and not dataloader_drop_last,
                whole_batches,
            )
        # The samples at a position depend on these. A user's sampler and a stream have their own order.
        self._identity = {
            "n_samples": len(dataset) if self._order is not None or self._steps is not None else None,
            "fingerprint": _fingerprint(dataset),
            "seed": seed if (self._order is not None and shuffle) or self._steps is not None else None,
        }
        self._round = batch_size * world_size
        self._worker_seed = seed * world_size + rank
        self._seed, self._rank = seed, rank
        self._epoch = 0
        self._position = 0  # samples of the epoch that all ranks together have been given
        # Micro-batches given since take_runs: [epoch, position, number]. More only come together if nobody takes them.
        self._runs: deque[list[int]] = deque(maxlen=MOST_RUNS)
        self._run: list[int] | None = None  # the one that the next micro-batch belongs to, if it follows the last
        self.reading: dict[str, Any] = {
            "kind": "order" if self._order is not None else "own" if self._steps is None else "steps",
            "micro_batch": batch_size,
            "n_ranks": world_size,
            "drop_last": dataloader_drop_last,
            **self._identity,
        }
        """Everything that decides the samples at a position, for ``SampleHistory``."""
        self._is_unbroken = is_unbroken and self._order is not None and not dataloader_drop_last
        if self._is_unbroken:
            self.reading["is_unbroken"] = True
        self._has_places = whole_batches and (self._order is not None or self._steps is not None)
        if self._has_places:
            self.reading["whole_batches"] = True
        if self._steps is not None:
            self.reading["efficiency"] = config["data_efficiency"]
            self.reading["accumulation_steps"] = config["gradient_accumulation_steps"]
        self._draws: _Draws | None = None
        self._batches: Iterator[Any] | None = None
        # A stream with a state of its own goes on from it. Worker processes would keep theirs to themselves.
        self._has_stream_state = self._is_stream and n_workers == 0 and streams.is_stateful(dataset)
        self._stream_state: Any = None
        self._n_ranks, self._is_first = world_size, rank == 0
        self._workers: tuple[BaseProcess, ...] = ()

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
        measure: Callable[[str], AbstractContextManager[None]] | None = None,
        efficiency: Mapping[str, Any] | None = None,
        accumulation_steps: int = 1,
        is_unbroken: bool = False,
        whole_batches: bool = False,
    ) -> DeepSpeedDataLoader:
        """A loader for the ranks of ``comm`` (a ``Collectives``). ``route``: "train" shuffles, "eval" and "predict" do
        not. efficiency: the section ``data_efficiency`` if it chooses the samples of training. measure: called with
        "data" for each batch; returns a context in which the batch is made. is_unbroken: as in the constructor, for
        training. whole_batches: as in the constructor, for training: an evaluation would see more samples twice.
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
            is_unbroken=is_unbroken and route == "train",
            whole_batches=whole_batches and route == "train",
            deepspeed_dataloader_config=None
            if efficiency is None or route != "train" or data_sampler is not None
            else {
                "curriculum_learning": True,
                "data_efficiency": efficiency,
                "gradient_accumulation_steps": accumulation_steps,
            },
        )
        loader._measure = measure
        return loader

    def set_post_process_func(self, function: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Sets ``post_process_func``."""
        self.post_process_func = function

    def __len__(self) -> int:
        """Batches of an epoch on this rank, the same on all ranks."""
        if self._order is not None:
            return self._order.n_rounds()
        if self._steps is not None:
            return len(self._steps) // self._round if self.dataloader_drop_last else -(-len(self._steps) // self._round)
        n = len(self.dataset if self._is_stream else self.data_sampler)  # a TypeError if a stream has no length
        return n // self.batch_size if self.dataloader_drop_last else -(-n // self.batch_size)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Lets the next ``iter()`` begin ``epoch``, in the order of this epoch. The next one of unbroken epochs begins
        behind the samples that the last round has taken."""
        following, position = self._next_epoch()
        self._place(epoch, position if epoch == following else 0)

    def _next_epoch(self) -> tuple[int, int]:
        """The epoch that the next ``iter()`` begins, and the position in it."""
        if self._is_unbroken and self._position > len(self.dataset):
            return place_after(self._epoch, self._position, len(self.dataset))
        return self._epoch + 1, 0

    def _place(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._stream_state = epoch, position, None
        self._draws = self._batches = None
        self._run = None
        if hasattr(self.data_sampler, "set_epoch"):
            self.data_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._batches is not None:
            if self._position and self._steps is None:  # the order of a whole run goes on
                (self._epoch, self._position), self._stream_state = self._next_epoch(), None
                self._run = None
            self._draws = self._batches = None
        return _Batches(self)

    def __next__(self) -> Any:
        if self.tput_timer is not None:
            self.tput_timer.start()
        if self._measure is None:
            batch = self._next()
        else:
            with self._measure("data"):
                batch = self._next()
        if self._run is None:
            self._run = [self._epoch, self._position, 0]
            self._runs.append(self._run)
        self._run[2] += 1
        if self._draws is None:
            self._position += self._round
        elif self._steps is None:
            self._position = self._draws.returned()
        else:
            self._steps.go_to(self._draws.returned())
            self._position = self._steps.place.consumed
            if self.post_process_func is not None:
                batch = self.post_process_func(batch, self._steps.state_dict())
        return batch

    def _next(self) -> Any:
        """The next batch. Workers that die are started again, a few times for one batch."""
        n_deaths = 0
        while True:
            if self._batches is None:
                self._batches = self._start()
            try:
                return next(self._batches)
            except (RuntimeError, OSError, EOFError) as error:  # a broken connection may be noticed before the death
                if not (dead := workers.dead(self._workers, is_sure=not isinstance(error, RuntimeError))):
                    raise
                self._batches = None
                n_deaths += 1
                if n_deaths > MOST_DEATHS:
                    raise StateError(
                        f"{dead}, the {n_deaths}th death for the same batch (epoch {self._epoch},"
                        f" after {self._position} samples)",
                        where="DeepSpeedDataLoader",
                        fix="see the kernel's log for a kill for memory, or set num_local_io_workers=0 to see the error",
                    ) from error
                logger.warning(
                    "%s; the workers are started again with the batches that were not returned (epoch %d, after %d samples)",
                    dead, self._epoch, self._position,
                )  # fmt: skip

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
            streams.set_epoch(self.dataset, self._epoch)
            loader = DataLoader(self.dataset, self.batch_size, drop_last=self.dataloader_drop_last, **common)
            if self._stream_state is not None:
                self.dataset.load_state_dict(self._stream_state)
                return self._begin(loader)
            return streams.skip(self._begin(loader), self._position // self._round, self._is_first)
        if self._draws is None:
            self._draws = _Draws(self._placed_rounds() if self._has_places else self._rounds())
        dataset = self.dataset
        if self._has_places:
            dataset = PlacedSamples(dataset, self._seed)
            common["collate_fn"] = PlacedCollate(self.collate_fn or default_collate, self._seed)
        return self._begin(DataLoader(dataset, batch_sampler=self._draws, **common))

    def _placed_rounds(self) -> Iterator[tuple[list[int], Any]]:
        """``_rounds`` with batches that know their places."""
        place = self._epoch * len(self.dataset) + self._position if self._steps is None else self._position
        for samples, after in self._rounds():
            yield PlacedBatch(samples, place + self._rank * self.batch_size), after
            place += self._round

    def _begin(self, loader: DataLoader) -> Iterator[Any]:
        batches, self._workers = workers.begin(loader)
        return batches

    def _rounds(self) -> Iterator[tuple[list[int], Any]]:
        """(batch of indices, position or place after it), from the current one on."""
        if self._steps is not None:
            return self._steps.rounds(self._steps.place)
        if self._order is not None:
            self._order.set_epoch(self._epoch)
            return self._order.rounds(self._position)
        batches = BatchSampler(self.data_sampler, self.batch_size, self.dataloader_drop_last)
        first = self._position // self._round
        return ((batch, (first + i) * self._round) for i, batch in enumerate(islice(batches, first, None), 1))

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader: {"epoch": ..., "position": samples of the epoch that all ranks together were
        given, "n_samples": of the data set, or None, "fingerprint": the data set's, or None, "seed": of the order, or
        None}. It is the same on all ranks. A stream with a state of its own adds
        "stream", which each rank has for itself, and "n_ranks"."""
        state = {"epoch": self._epoch, "position": self._position, **self._identity}
        if self._has_stream_state:
            state |= {"stream": self.dataset.state_dict(), "n_ranks": self._n_ranks}
        return state if self._steps is None else {**state, "sampler": self._steps.state_dict()}

    def take_runs(self) -> list[list[int]]:
        """The micro-batches that were given since the last call: [epoch, position of the first sample, number]."""
        runs, self._run = list(self._runs), None
        self._runs.clear()
        return runs

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the position of a ``state_dict``, of a loader with any number of ranks and any batch size: the
        next batch begins with the first sample that had not been given then.

        With a sampler that the user passes, this requires that the sampler gives the same order again, and the position
        is rounded down to whole batches. Raises StateError if the data set or the order is another one.
        """
        self.check_state_dict(state)
        self._place(state["epoch"], state["position"])
        if self._order is not None and self._position > len(self.dataset):  # saved by a loader with unbroken epochs
            self._place(*place_after(self._epoch, self._position, len(self.dataset)))
        self._runs.clear()
        if self._steps is not None:
            self._steps.load_state_dict(state["sampler"])
        self._stream_state = state.get("stream") if self._has_stream_state else None

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises StateError if the position is one in another data set or in another order."""
        if ("sampler" in state) != (self._steps is not None):
            raise StateError(
                f"the position was saved with{'' if 'sampler' in state else 'out'} data_efficiency.data_sampling",
                where="DeepSpeedDataLoader",
                fix="resume with the configuration that was saved, or call set_epoch() to begin an epoch",
            )
        if self._steps is not None:
            self._steps.place_of(state["sampler"])
        if self._has_stream_state and "stream" in state and state["n_ranks"] != self._n_ranks:
            raise StateError(
                f"the data set's own state is that of a rank of {state['n_ranks']}, and there are {self._n_ranks} ranks",
                where="DeepSpeedDataLoader",
                fix="resume on as many ranks, or let the data set have no state_dict: it is skipped forward then",
            )
        for key, name in _SAME.items():
            saved, mine = state.get(key), self._identity[key]
            if saved is not None and mine is not None and saved != mine:
                raise StateError(
                    f"the position is one in a data set with {name} {saved!r}, and this loader has {mine!r}",
                    where="DeepSpeedDataLoader",
                    fix="resume with the data set and the seed that were saved, or call set_epoch() to begin an epoch",
                )


def _fingerprint(dataset: Any) -> str | None:
    """A data set's word about its contents: its attribute ``fingerprint``, or that of the library datasets."""
    for name in ("fingerprint", "_fingerprint"):
        if isinstance(found := getattr(dataset, name, None), str):
            return found
    return None


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


def _steps(
    dataset: Any,
    config: Mapping[str, Any],
    batch_size: int,
    rank: int,
    world_size: int,
    drop_last: bool,
    whole_batches: bool,
) -> DeepSpeedDataSampler:
    return DeepSpeedDataSampler(
        config["data_efficiency"],
        _length(dataset),
        batch_size,
        rank,
        world_size,
        config.get("data_parallel_group"),
        config["gradient_accumulation_steps"],
        config.get("global_rank", 0),
        drop_last=drop_last,
        whole_batches=whole_batches,
    )


def _length(dataset: Any) -> int:
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"a data set without a length ({type(dataset).__name__}) cannot be shared out",
            where="training_data",
            fix="define __len__, derive from torch.utils.data.IterableDataset, or pass a data_sampler",
        )
    return len(dataset)
