"""The batch triangle: train_batch_size = micro-batch x accumulation steps x data-parallel ranks."""

from typing import NamedTuple

from ..errors import BatchSizeError

__all__ = ["Batch", "BatchSources", "resolve_batch"]

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class Batch(NamedTuple):
    """The resolved batch sizes; ``train_batch_size == micro_batch_size * accumulation_steps * world_size`` always."""

    train_batch_size: int
    """Samples of one optimizer step over all ranks."""
    micro_batch_size: int
    """Samples of one forward and backward on one rank."""
    accumulation_steps: int
    """Micro batches of one optimizer step."""
    world_size: int
    """Data-parallel ranks."""


BatchSources = dict[str, str]
"""Each key that was filled in, mapped to "derived" or "default"."""


def resolve_batch(
    train: int | None, micro: int | None, steps: int | None, world_size: int
) -> tuple[Batch, BatchSources]:
    """Fill in missing sizes as DeepSpeed does: two sizes give the third; one size alone implies one accumulation step.

    Raises:
        BatchSizeError: no size was given, a division leaves a remainder, or the three given sizes contradict each
            other.
    """
    if train is None and micro is None:
        given = "" if steps is None else f" (only {_STEPS} = {steps})"
        raise BatchSizeError(
            f"neither of the two sizes is given{given}",
            where=f"{_TRAIN}, {_MICRO}",
            fix=f'write {_MICRO} (samples per rank and forward), or {_TRAIN}; an "auto" must have been replaced by now',
        )
    sources: BatchSources = {}
    if steps is None and (train is None or micro is None):
        steps = 1
        sources[_STEPS] = "default"
    if train is None:
        train = micro * steps * world_size
        sources[_TRAIN] = "derived"
    elif micro is None:
        micro = _divide(
            train, steps * world_size, f"{_TRAIN} {train} = {_MICRO} x {_STEPS} {steps} x {world_size} ranks"
        )
        sources[_MICRO] = "derived"
    elif steps is None:
        steps = _divide(
            train, micro * world_size, f"{_TRAIN} {train} = {_MICRO} {micro} x {_STEPS} x {world_size} ranks"
        )
        sources[_STEPS] = "derived"
    if train != micro * steps * world_size:
        raise BatchSizeError(
            f"{_TRAIN} {train} is not {_MICRO} {micro} x {_STEPS} {steps} x {world_size} ranks "
            f"= {micro * steps * world_size}",
            where=f"{_TRAIN}, {_MICRO}, {_STEPS}",
            fix=f"remove one of the three: it follows from the others; or set {_TRAIN} to {micro * steps * world_size}",
        )
    return Batch(train, micro, steps, world_size), sources


def _divide(train: int, parts: int, equation: str) -> int:
    if train % parts:
        lower = train // parts * parts
        near = f"{lower} or {lower + parts}" if lower else str(parts)
        raise BatchSizeError(
            f"no whole number solves {equation}",
            where=_TRAIN,
            fix=f"set {_TRAIN} to a multiple of {parts}, such as {near}, or change the number of ranks",
        )
    return train // parts
