"""A lease: all weights are whole while a model generates, so that no forward gathers anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_c.errors import StateError
from deepspeed_c.logging import log_dist
from deepspeed_c.zero.weights.drivers.driver import Driver
from deepspeed_c.zero.weights.drivers.forwards import Forward
from deepspeed_c.zero.weights.fingerprint import fingerprint_of
from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["Lease", "read_in_turns"]


class _Content:
    """The content of gathered units at the beginning of a lease."""

    def __init__(self, groups: Sequence[GatherUnit]) -> None:
        self.groups = groups
        # Joint memory tells what this rank has written to it. A checksum is for other memory, and for joint memory with
        # a write from before the lease.
        joints = {group.source.shared for group in groups if group.source.shared is not None}
        self._joints = {joint for joint in joints if joint.find_write() is None}
        self._before = {
            group: fingerprint_of(group.buffer) for group in groups if group.source.shared not in self._joints
        }

    def find_written(self) -> GatherUnit | None:
        """The first unit that somebody has written to, or one of whose parameters got other data."""
        written = {joint: joint.find_write() for joint in self._joints}
        for group in self.groups:
            before = self._before.get(group)
            if before is None:
                is_written = written[group.source.shared] == group.bucket
            else:
                is_written = fingerprint_of(group.buffer) != before
            if is_written or not group.is_in_place:
                return group
        return None


class Lease(Driver):
    """From ``begin`` to ``end`` all units are held. Forwards without gradients are no passes then, and each rank runs
    any number of them. A pass that trains, and a write of weights, end the lease."""

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__(fetcher)
        self._content: _Content | None = None
        self._has_told = False

    @property
    def is_held(self) -> bool:
        return self._content is not None

    @property
    def can_begin(self) -> bool:
        """Whether ``begin`` makes all weights available, or has done so; the same on all ranks.

        There is no lease where the whole model has more elements than ``FetchLimits.max_live``, within a pass, and
        where another driver decides: in join mode, or for graphs that gather by themselves.
        """
        fetcher = self.fetcher
        is_free = fetcher.drivers.has_only_bottom() and not fetcher.phase.is_active
        return self.is_held or (is_free and not fetcher.is_too_large)

    def begin(self) -> bool:
        """Makes all weights available until the lease ends, if ``can_begin``. Returns whether there is a lease.

        Collective, unless there is a lease already or no gather needs other ranks. Raises StateError if another rank
        has called ``refuse``.
        """
        fetcher = self.fetcher
        with fetcher.lock:
            if self.is_held or not self.can_begin:
                return self.is_held
            self._agree(refuses=False)
            n_bytes = fetcher.whole_bytes
            if n_bytes and not self._has_told:
                self._has_told = True
                log_dist(f"generation gathers all weights once: {n_bytes / 2**20:.1f} MiB on each rank", ranks=[0])
            fetcher.pin(fetcher.groups)
            self._content = _Content(fetcher.groups)
            fetcher.drivers.put(self)
            return True

    def refuse(self) -> None:
        """Takes the place of ``begin`` on a rank that cannot generate, so that no rank waits for its part of a gather."""
        with self.fetcher.lock:
            if not self.is_held and self.can_begin:
                self._agree(refuses=True)

    def _agree(self, *, refuses: bool) -> None:
        fetcher = self.fetcher
        if not fetcher.is_collective:
            return
        n_refusals = int(fetcher.comm.sum_numbers([float(refuses)], label="agree to generate")[0])
        if n_refusals and not refuses:
            raise StateError(
                f"{n_refusals} of {fetcher.comm.world_size} ranks have refused to generate",
                where="generate",
                fix="their own errors say why",
            )

    def end(self) -> None:
        """Releases the weights of the lease, if there is one. Each rank does so by itself.

        Raises StateError on a rank that has written to weights during the lease. The weights are as before then.
        """
        fetcher = self.fetcher
        with fetcher.lock:
            written = None if self._content is None else self._content.find_written()
            self.drop()
            if written is None:
                return
            # The writes are only in this rank's view of the weights.
            fetcher.forget_writes()
        raise StateError(
            "its weights were written to during generation; the edit was not kept",
            where=written.label,
            fix="edit weights within GatheredParameters(..., modifier_rank=0), before or after generation",
        )

    def drop(self) -> None:
        """Ends the lease without a look at the weights."""
        if self._content is not None:
            groups, self._content = self._content.groups, None
            self.fetcher.drivers.take(self)
            self.fetcher.unpin(groups)

    def _ended(self) -> Driver:
        """Ends the lease. Returns the driver that decides instead."""
        under = self.under
        self.end()
        return under

    def begin_forward(self, name: str, root: int = 0, units: Callable[[], list[int]] | None = None) -> Forward | None:
        if name != "train":
            return None
        return self._ended().begin_forward(name, root, units)

    def begin_backward(self, starts: Sequence[Any] | None = None) -> None:
        self._ended().begin_backward(starts)

    def begin_reading(self) -> None:
        self._ended().begin_reading()

    def begin_writes(self) -> None:
        self._ended().begin_writes()

    def end_writes(self) -> None:
        under = self.under
        self.drop()
        under.end_writes()


def read_in_turns(fetcher: Fetcher, n_units: int, read: Callable[[list[torch.nn.Parameter]], None]) -> None:
    """Calls ``read`` with the parameters of some gather units, which are whole meanwhile, until it has got all units.

    There are at most ``n_units`` in a call, and of more than one no more elements than ``FetchLimits.max_live``.

    Collective, if any gather needs other ranks.
    """
    waiting = list(fetcher.groups)
    while waiting:
        n, n_elems = 1, waiting[0].numel
        while n < min(n_units, len(waiting)) and n_elems + waiting[n].numel <= fetcher.limits.max_live:
            n_elems += waiting[n].numel
            n += 1
        turn, waiting = waiting[:n], waiting[n:]
        fetcher.pin(turn)
        try:
            read([slot.param for group in turn for slot in group.slots])
        finally:
            fetcher.unpin(turn)
