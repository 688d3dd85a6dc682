"""The interface between a sender of weights and the place that takes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple, Protocol

import torch

from deepspeed_c.errors import StateError

__all__ = ["SentWeights", "WeightEntry", "WeightsTarget", "WholeWeights", "check_version", "unknown_names"]

NAMES_SHOWN = 3


class SentWeights(NamedTuple):
    """The result of one call of ``send_weights``."""

    version: int
    n_tensors: int
    n_bytes: int
    is_delta: bool
    """Whether only tensors were sent that have changed since the version before."""


class WeightEntry(NamedTuple):
    """One tensor of whole weights, known before it is gathered."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    tied_to: str | None
    """The name under which the same tensor has come before."""
    is_frozen: bool
    """Whether the engine does not train it."""
    is_adapter: bool

    @property
    def n_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class WholeWeights(Protocol):
    """(name, whole tensor) of each weight, on all ranks or on some, as ``engine.iter_full_weights`` returns them."""

    entries: Sequence[WeightEntry]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def close(self) -> None: ...


class WeightsTarget(ABC):
    """A place that takes weights, on rank 0 of the sender."""

    @abstractmethod
    def versions(self) -> list[int | None]:
        """The version that each receiver has; None for one without weights."""

    @abstractmethod
    def put(self, version: int, entries: Sequence[WeightEntry], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes weights. ``entries`` has their names, in order. Any exception is an error of the send."""


def check_version(version: int | None, last: int | None, where: str) -> int:
    """The number of the version to send. Raises StateError for one that does not follow ``last``."""
    if version is None:
        return 1 if last is None else last + 1
    if last is not None and version <= last:
        raise StateError(
            f"version {version} is to be sent, and the receiver has version {last}",
            where=where,
            fix="send versions in rising order, or leave the version out",
        )
    return version


def unknown_names(names: Iterable[str], known: Collection[str]) -> str:
    """Words about the names that a receiver does not know, with the nearest names that it does know; empty if it knows
    all of them."""
    unknown = [name for name in names if name not in known]
    if not unknown:
        return ""
    said = []
    for name in unknown[:NAMES_SHOWN]:
        near = get_close_matches(name, known, 1)
        said.append(f"{name!r} is unknown{f' (nearest: {near[0]!r})' if near else ''}")
    more = len(unknown) - NAMES_SHOWN
    return "; ".join(said) + (f"; and {more} more" if more > 0 else "")
