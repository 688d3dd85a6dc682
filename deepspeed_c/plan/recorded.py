"""The program of a rank in a step: its computations, collectives and files in order, with their starts and waits, as
the engine's own objects run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from deepspeed_c.comm.ledger import Ledger, LedgerEntry

__all__ = ["READ", "RUN", "START", "WAIT", "WRITE", "Action", "RecordedLedger", "Recorder", "Transfer"]

RUN, START, WAIT = "run", "start", "wait"

READ, WRITE = "read", "write"
"""Transfers of a rank alone, beside the operations of a ledger."""


class Transfer(NamedTuple):
    """A transfer that a rank starts in a step."""

    op: str
    """As in the ledger (``all-gather``), ``read`` or ``write``."""
    ranks: tuple[int, ...]
    """The global ranks of its group. Empty for files."""
    n_bytes: int
    """As in ``comm.ledger.Total``: the whole buffer."""
    label: str
    phase: str
    axis: str
    """The axes of the mesh that its ranks lie along; "all" for all ranks, "" for files."""


class Action(NamedTuple):
    """One entry of a program: RUN computes for ``value`` ns; START and WAIT are about the transfer number ``value``."""

    kind: str
    value: int
    label: str = ""


class Recorder:
    """Records actions between ``begin`` and ``end``. A wait for a transfer that began before is left out."""

    def __init__(self) -> None:
        self.is_on = False
        self._phase = ""
        self.actions: list[Action] = []
        self.transfers: list[Transfer] = []

    def begin(self) -> None:
        """From now on, actions are recorded."""
        self.is_on = True

    def end(self) -> None:
        """Ends what ``begin`` began."""
        self.is_on = False

    def enter_phase(self, phase: str) -> None:
        """The phase of the transfers that follow: "forward", "backward" or "step"."""
        self._phase = phase

    def run(self, ns: int, label: str) -> None:
        """Records a computation."""
        if self.is_on and ns > 0:
            self.actions.append(Action(RUN, ns, label))

    def start(self, op: str, ranks: Sequence[int], n_bytes: int, label: str, axis: str = "") -> int | None:
        """Records that a transfer starts. Returns its number, or None while nothing is recorded."""
        if not self.is_on:
            return None
        self.transfers.append(Transfer(op, tuple(ranks), n_bytes, label, self._phase, axis))
        self.actions.append(Action(START, len(self.transfers) - 1, label))
        return len(self.transfers) - 1

    def wait(self, number: int | None) -> None:
        """Records a wait for a transfer that ``start`` returned."""
        if self.is_on and number is not None:
            self.actions.append(Action(WAIT, number, self.transfers[number].label))


class _RecordedEntry(LedgerEntry):
    """An entry that records its start, and its wait."""

    __slots__ = ("_number", "_recorder")

    def __init__(
        self,
        ledger: RecordedLedger,
        seq: int,
        op: str,
        n_bytes: int,
        label: str,
        device: torch.device | None = None,
        path: str = "",
    ) -> None:
        super().__init__(ledger, seq, op, n_bytes, label, device, path)
        self._recorder = ledger.recorder
        self._number = self._recorder.start(op, ledger.ranks, n_bytes, label, ledger.axes or "all")

    def begin_wait(self) -> None:
        super().begin_wait()
        self._recorder.wait(self._number)


class RecordedLedger(Ledger):
    """A ledger of pretended ranks whose collectives are recorded."""

    entry_type: ClassVar[type[LedgerEntry]] = _RecordedEntry

    def __init__(self, ranks: Sequence[int], recorder: Recorder) -> None:
        super().__init__("pretended", ranks)
        self.recorder = recorder
