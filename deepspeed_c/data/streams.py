"""Streams, which are data sets without an index: how a loader checks them, tells them the epoch, and goes on in them.

Three libraries differ here: ``datasets`` has torchdata's ``state_dict()`` and ``set_epoch``,
mosaicml-streaming counts epochs in ``next_epoch``, and it and litdata want arguments for their states.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from deepspeed_c.data.progress import progress_bar
from deepspeed_c.errors import ConfigError

__all__ = ["check_stream", "is_stateful", "set_epoch", "skip"]


def check_stream(dataset: Any, data_sampler: Any, rank: int, world_size: int) -> None:
    """Raises ConfigError for a sampler, and for a stream that would give several ranks the same samples."""
    if data_sampler is not None:
        raise ConfigError(
            "an IterableDataset gives its samples in its own order and takes no sampler",
            where="data_sampler",
            fix="leave data_sampler out, or use a data set that can be indexed",
        )
    if world_size > 1 and not _is_divided(dataset, rank, world_size):
        raise ConfigError(
            f"all {world_size} ranks would train on the same samples of this IterableDataset",
            where="training_data",
            fix="give each rank its part (by torch.distributed.get_rank()) and set is_sharded = True on the data set",
        )


def _is_divided(dataset: Any, rank: int, world_size: int) -> bool:
    """Whether a stream gives each rank its own samples."""
    if getattr(dataset, "is_sharded", False):
        return True
    split = getattr(dataset, "_distributed", None)  # by split_dataset_by_node of the library datasets
    if split is not None and (split.rank, split.world_size) != (rank, world_size):
        raise ConfigError(
            f"the data set is split for rank {split.rank} of {split.world_size}, and this is rank {rank} of {world_size}",
            where="training_data",
            fix=f"use datasets.distributed.split_dataset_by_node(data, {rank}, {world_size})",
        )
    return split is not None


def is_stateful(dataset: Any) -> bool:
    """Whether the data set's state is that of torchdata. mosaicml-streaming and litdata want
    arguments for theirs."""
    if not all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    parameters = inspect.signature(dataset.state_dict).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tells a stream which epoch comes next, if it wants to know."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    elif hasattr(dataset, "next_epoch"):
        dataset.next_epoch = epoch


def skip(batches: Iterator[Any], n: int, is_shown: bool) -> Iterator[Any]:
    """The batches after the first n, which a stream can only pass by reading them."""
    with progress_bar(n, "data loader skips forward", " batches", is_shown=is_shown) as bar:
        for _ in range(n):
            if next(batches, None) is None:
                break
            bar.update(1)
    return batches
