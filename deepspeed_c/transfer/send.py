"""Sends the weights of an engine, and remembers what each receiver has."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import CommError, ConfigError, DeepSpeedCError
from deepspeed_c.transfer.call import CallTarget
from deepspeed_c.transfer.folder import FolderTarget
from deepspeed_c.transfer.group import GroupTarget
from deepspeed_c.transfer.target import SentWeights, WeightsTarget, WholeWeights, check_version
from deepspeed_c.weights.published import PublishedPiece
from deepspeed_c.zero.weights.fingerprint import fingerprint_of
from deepspeed_c.zero.weights.param import state_of

__all__ = ["WeightSender"]

# Receivers that are remembered. One that was used longer ago gets all weights again.
MOST_RECEIVERS = 16

Marks = dict[str, tuple[int, ...]]


class _Last(NamedTuple):
    """The state of a receiver after the last send."""

    version: int
    adapters: str
    marks: Marks
    """The fingerprint of this rank's part of each tensor."""


class _Plan(NamedTuple):
    target: int
    """The number of the receiver."""
    version: int
    is_delta: bool
    forgotten: int | None
    """The number of a receiver that is not remembered any more."""


class WeightSender:
    """Sends weights to receivers. One object serves all receivers of an engine."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._targets: dict[int, Any] = {}  # on rank 0; the one that was used last is at the end
        self._n_targets = 0
        self._newest: dict[int, int] = {}  # on rank 0: the newest version that was sent, also without success
        self._last: dict[int, _Last] = {}

    def send(
        self,
        target: Any,
        make: Callable[[Callable[[PublishedPiece], bool]], WholeWeights],
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int | None,
        adapters: str,
        changed_only: bool,
    ) -> SentWeights:
        """Sends the weights that ``make(is_wanted)`` yields on rank 0. tensors: the module's, by name. Collective.

        Raises the errors of ``send_weights``, on all ranks.
        """
        plan, place = self._plan(target, version, adapters, changed_only)
        marks: Marks = {name: _mark(tensor) for name, tensor in tensors.items()}
        last = self._last.pop(plan.target, None)
        self._last.pop(plan.forgotten, None)
        changed = self._changed(marks, last.marks) if plan.is_delta else set(marks)
        weights = make(lambda piece: not changed.isdisjoint(piece.inputs))
        failure: Exception | None = None
        try:
            if place is not None:
                place.put(plan.version, weights.entries, weights)
            weights.close()
        except Exception as error:  # noqa: BLE001  a receiver may raise anything, and all ranks have to learn of it
            failure = error
            weights.close()
        if any(self._comm.gather_numbers(int(failure is not None), label="weights sent")):
            # The receiver may have a part of them, so the next call sends all weights.
            raise failure or CommError("rank 0 did not send them", where="send_weights", fix="look at its exception")
        self._last[plan.target] = _Last(plan.version, adapters, marks)
        n_bytes = sum(entry.n_bytes for entry in weights.entries if entry.tied_to is None)
        return SentWeights(plan.version, len(weights.entries), n_bytes, plan.is_delta)

    def _plan(
        self, target: Any, version: int | None, adapters: str, changed_only: bool
    ) -> tuple[_Plan, WeightsTarget | None]:
        """Returns (the decisions of rank 0, its target; None on other ranks). Raises rank 0's error on all ranks."""
        said: _Plan | Exception | None = None
        place: WeightsTarget | None = None
        failure: Exception | None = None
        if self._comm.rank == 0:
            try:
                place, said = self._decide(target, version, adapters, changed_only)
            except Exception as error:  # noqa: BLE001  of the file system, or of a group
                failure = error
                is_ours = isinstance(error, DeepSpeedCError)
                said = error if is_ours else CommError(f"{type(error).__name__}: {error}", where="send_weights")
        (first, *_) = self._comm.gather_objects(said, label="version of weights")
        if isinstance(first, Exception):
            raise failure or first
        return first, place

    def _decide(
        self, target: Any, version: int | None, adapters: str, changed_only: bool
    ) -> tuple[WeightsTarget, _Plan]:
        number, forgotten = self._number_of(target)
        last = self._last.get(number)
        place = _place_of(target, self._newest.get(number))
        versions = place.versions()
        newest = max((has for has in (*versions, self._newest.get(number)) if has is not None), default=None)
        chosen = check_version(version, newest, "send_weights")
        is_known = last is not None and set(versions) == {last.version} and last.adapters == adapters
        self._newest[number] = chosen
        return place, _Plan(number, chosen, changed_only and is_known, forgotten)

    def _number_of(self, target: Any) -> tuple[int, int | None]:
        """(the number of a receiver, the number of one that is forgotten for it), on rank 0. Two references to one
        method are equal, and the same receiver. A program that passes a new function each time has no end of them."""
        kept = os.path.realpath(target) if isinstance(target, str | os.PathLike) else target
        number = next((number for number, known in self._targets.items() if known == kept), self._n_targets)
        if self._targets.pop(number, None) is None:
            self._n_targets += 1
        self._targets[number] = kept
        if len(self._targets) <= MOST_RECEIVERS:
            return number, None
        forgotten = next(iter(self._targets))
        del self._targets[forgotten]
        self._newest.pop(forgotten, None)
        return number, forgotten

    def _changed(self, marks: Marks, before: Marks) -> set[str]:
        """The names of the tensors of which any rank's part has changed."""
        own = [float(before.get(name) != mark) for name, mark in marks.items()]
        everyone = self._comm.sum_numbers(own, label="changed weights")
        return {name for name, n in zip(marks, everyone, strict=True) if n}


def _mark(tensor: torch.Tensor) -> tuple[int, ...]:
    state = state_of(tensor)
    return fingerprint_of(tensor.detach() if state is None else state.piece)


def _place_of(target: Any, last: int | None) -> WeightsTarget:
    if isinstance(target, str | os.PathLike):
        return FolderTarget(os.fspath(target))
    if isinstance(target, dist.ProcessGroup):
        return GroupTarget(target)
    if callable(target):
        return CallTarget(target, last)
    raise ConfigError(
        f"is {target!r}",
        where="send_weights(target=...)",
        fix="pass on rank 0 a folder, a function of (name, tensor), or a process group",
    )
