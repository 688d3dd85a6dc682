"""Handle of a collective that was started, for waiting on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from deepspeed_c.comm.ledger import LedgerEntry
from deepspeed_c.errors import CommError

__all__ = ["FailedStart", "Handle", "Work", "wait_all"]

# Collectives under way that the message of a failure names.
_MAX_NAMED = 3


class Handle(Protocol):
    """One transfer under way, as a backend knows it."""

    def wait(self) -> Any:
        """Returns when it is done. Raises RuntimeError where it has failed."""
        ...


class FailedStart:
    """The handle of a transfer that could not start, because the connection is closed already: its ``wait`` raises the
    error. So a rank that is gone is the same error in the same place, whether it went before the start or after it, and
    handles of other transfers that did start are waited for.
    """

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> Any:
        raise self._error


class Work:
    """A started operation. ``wait`` finishes it.

    ``wait`` may send data too (``all_reduce`` of 16-bit tensors over gloo). So all ranks have to wait for their works
    in the same order, and at the same places among other collectives.
    """

    __slots__ = ("_entry", "_error", "_handles", "_kept", "_steps", "_what")

    def __init__(
        self,
        handles: Sequence[Handle] = (),
        *,
        finish: Callable[[], None] | None = None,
        kept: Sequence[torch.Tensor] = (),
        what: str = "",
    ) -> None:
        """handles: transfers of ``torch.distributed``; when they are done, ``finish`` runs. kept: tensors in use until
        then.
        """
        self._handles = tuple(handles)
        self._steps: tuple[Callable[[], None], ...] = () if finish is None else (finish,)
        self._kept = tuple(kept)
        self._what = what
        self._entry: LedgerEntry | None = None
        self._error: BaseException | None = None

    @classmethod
    def done(cls) -> Work:
        """Work that is finished already."""
        return cls()

    def note_in(self, entry: LedgerEntry) -> Work:
        """Notes that the work is under way. From now on ``entry`` is told when the rank waits for the work, and when it
        is over.
        """
        entry.started()
        self._entry = entry
        return self

    def then(self, step: Callable[[], None]) -> Work:
        """Runs ``step`` once, after earlier steps, when this work has been waited for. If it has been already, runs it
        at once.
        """
        if self._error is not None:
            raise self._error
        if self._handles or self._steps:
            self._steps += (step,)
        else:
            step()
        return self

    def wait(self) -> None:
        """Waits and runs the steps. A second call does nothing, or raises the error of the first call again.

        Raises ``CommError`` when a rank is gone or the group's timeout is over.
        """
        if self._error is not None:
            raise self._error
        handles, self._handles = self._handles, ()
        steps, self._steps = self._steps, ()
        kept, self._kept = self._kept, ()  # noqa: F841  alive until this call returns
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.begin_wait()
        try:
            wait_all(handles, self._what, entry)
            for step in steps:
                step()
        except BaseException as error:
            self._error = error
            if entry is not None:
                entry.end()
            raise
        if entry is not None:
            entry.finish()


def wait_all(handles: Sequence[Handle], what: str, entry: LedgerEntry | None = None) -> None:
    """Waits for every handle even when one fails: a buffer must not be freed while a transfer still runs in it."""
    first: RuntimeError | None = None
    for handle in handles:
        try:
            handle.wait()
        except RuntimeError as error:
            first = first or error
    if first is not None:
        at = [f"rank {dist.get_rank()}"] if dist.is_initialized() else []
        if entry is not None:
            before = [str(other) for other in entry.under_way()]
            at.append(f"{entry}, with {', '.join(before[:_MAX_NAMED])} under way" if before else str(entry))
        why = "" if entry is None else entry.explain()
        raise CommError(
            f"{what} failed: {first}",
            where=", ".join(at),
            fix=f"{why + '; ' if why else ''}look at the output of the other ranks: one of them has stopped, or runs"
            " something else",
        ) from first
