"""The interface between a sender of weights and the place that takes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepspeed_c.errors import StateError

if TYPE_CHECKING:
    from deepspeed_c.engine.full_weights import WeightEntry

__all__ = ["SentWeights", "Target", "check_version", "unknown_names"]

NAMES_SHOWN = 3


class SentWeights(NamedTuple):
    """The result of one call of ``send_weights``."""

    version: int
    n_tensors: int
    n_bytes: int
    is_delta: bool
    """Whether only tensors were sent that have changed since the version before."""


class Target(ABC):
    """A place that takes weights, on rank 0 of the sender."""

    @abstractmethod
    def version(self) -> int | None:
        """The version that all receivers have; None if they have none or different ones."""

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
