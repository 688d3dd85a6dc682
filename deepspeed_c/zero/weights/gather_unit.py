"""A gather unit: one bucket of a sharded unit, which is gathered into a buffer of the pool, and its parameters' places
in the buffer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.work import Work
from deepspeed_c.zero.layout.unit import Slot, Unit
from deepspeed_c.zero.weights.param import (
    ShardState,
    ZeroParamStatus,
    adopt_shape,
    hollow_out,
    point_at,
    point_at_nothing,
    state_of,
)

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["GatherUnit", "PlacedShard", "Places", "WholeShard"]


_AS_IT_IS = nullcontext()


def _lasting() -> AbstractContextManager:
    """Context for tensors that must outlive inference mode. Outside of that mode, where passes of training are, nothing
    is entered: weights require no gradient in their buffers, and a context of torch takes as long as a view.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


class Places:
    """The gathered units, sorted by address, so that the unit at an address can be found."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._units: list[GatherUnit] = []

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: GatherUnit) -> None:
        begin = unit.buffer.data_ptr()
        i = bisect_right(self._begins, begin)
        self._begins.insert(i, begin)
        self._ends.insert(i, begin + unit.buffer.nbytes)
        self._units.insert(i, unit)

    def remove(self, unit: GatherUnit) -> None:
        i = self._units.index(unit, bisect_left(self._begins, unit.buffer.data_ptr()))
        del self._begins[i], self._ends[i], self._units[i]

    def find(self, address: int) -> GatherUnit | None:
        i = bisect_right(self._begins, address) - 1
        return self._units[i] if i >= 0 and address < self._ends[i] else None


class GatherUnit:
    """One bucket of a sharded unit: the parameters that are gathered by one collective, or by none."""

    def __init__(self, index: int, unit: Unit, bucket: int, fetcher: Fetcher) -> None:
        self.index, self.unit, self.bucket, self._fetcher = index, unit, bucket, fetcher
        self.slots: list[Slot] = unit.bucket_slots[bucket]
        self.numel = unit.bucket_numel(bucket)
        first = min(self.slots, key=lambda slot: slot.order)
        self.label = first.name if len(self.slots) == 1 else f"{first.name} (+{len(self.slots) - 1} more)"
        self.buffer: torch.Tensor | None = None  # [numel], from the pool or in joint memory
        self._work: Work | None = None
        self.is_ready = False  # the parameters point into the buffer
        self._expects_grads = False  # released, but trained parameters have their whole shape for gradients
        self.pins = 0
        self.is_leaving = False  # released by the plan while pinned
        self._begin = unit.bucket_begin[bucket]
        with torch.inference_mode(False):
            self._whole = None if unit.joint is None else unit.joint.whole(bucket).view(unit.dtype)
        # Joint memory stays in one place, so the views are made once.
        self._views = [] if self._whole is None else self._views_of(self._whole)

    def _views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        with _lasting():
            return [slot.view(buffer, self._begin) for slot in self.slots]

    @property
    def is_joint(self) -> bool:
        """Whether the weights lie in joint memory. A gather then sends nothing and waits for no other rank."""
        return self._whole is not None

    @property
    def status(self) -> ZeroParamStatus:
        if self.is_ready:
            return ZeroParamStatus.AVAILABLE
        return ZeroParamStatus.NOT_AVAILABLE if self.buffer is None else ZeroParamStatus.INFLIGHT

    @property
    def is_in_place(self) -> bool:
        """Whether the parameters of this gathered unit are still its views."""
        views = self._views or self._views_of(self.buffer)
        return all(
            slot.param.data_ptr() == view.data_ptr() and slot.param.shape == view.shape and slot.param.dtype == view.dtype
            for slot, view in zip(self.slots, views)
        )

    def start(self) -> None:
        """Starts the gather. If the unit is gathered already (its weights were updated, or a plan asks for it again),
        the same buffer is filled again."""
        fetcher = self._fetcher
        if self._whole is not None:
            if self.buffer is None:
                self.buffer = self._whole
                fetcher.places.add(self)
                fetcher.count_live(self.numel)
            self.is_leaving = False
            return
        self.wait()
        with (
            self.unit.weights.open(self.bucket, writes=False),
            fetcher.on_gather_stream(self.unit.device),
            _lasting(),
        ):
            if self.buffer is None:
                self.buffer = fetcher.pool.take(self.numel, self.unit.dtype, self.unit.device)
                fetcher.places.add(self)
                fetcher.count_live(self.numel)
            self.unit.own_slice(self.buffer, self.bucket).copy_(self.unit.param_slice(self.bucket))
            self._work = self.unit.comm.all_gather(self.buffer, use_broadcast=fetcher.use_broadcast, label=self.label)
        self.is_leaving = False

    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            with _lasting():
                work.wait()
                self._fetcher.after_gather(self.buffer)

    def finish(self) -> None:
        """Waits for the gather and makes the parameters available."""
        self.wait()
        if not self.is_ready:
            for slot, view in zip(self.slots, self._views or self._views_of(self.buffer)):
                point_at(slot.param, view)
            self.is_ready, self._expects_grads = True, False

    def hold(self) -> None:
        """Keeps the unit until ``unhold``, even if the plan releases it."""
        self.pins += 1

    def unhold(self) -> bool:
        """Ends one ``hold``. Returns whether there are no other holds."""
        self.pins -= 1
        return self.pins == 0

    def leave(self, *, expects_grads: bool) -> None:
        """Called when a plan releases the unit. The unit is released now, unless it is held. In this case it is only
        marked, and the last ``unhold`` releases it."""
        if self.pins:
            self.is_leaving = True
        elif self.buffer is not None:
            self.let_go(expects_grads=expects_grads)

    def stay(self) -> None:
        """Called when a plan gathers the unit again. If the unit was only marked for release, the mark is removed."""
        self.is_leaving = False

    def close(self) -> None:
        """Releases the unit even if it is held."""
        self.pins = 0
        if self.buffer is not None:
            self.let_go(expects_grads=False)

    def let_go(self, *, expects_grads: bool) -> None:
        """Releases the parameters and the buffer."""
        self.wait()
        fetcher = self._fetcher
        # Without training no backward is announced, so a gradient may arrive at any time while a graph is alive.
        self._release(expects_grads or not fetcher.is_trained)
        fetcher.places.remove(self)
        fetcher.count_live(-self.numel)
        if self._whole is None:
            fetcher.pool.give(self.buffer)
        self.buffer = None
        self.is_ready = self.is_leaving = False

    def expect_grads(self, expects: bool) -> None:
        """Sets whether gradients may arrive while the unit is released. If so, its trained parameters have their whole
        shape; otherwise they are empty."""
        if self.buffer is None and self._expects_grads != expects:
            self._release(expects)

    def show_released(self) -> None:
        """Gives released parameters the form that they have now: called when a pass with graphs begins or ends."""
        if self.buffer is None:
            self._release(self._expects_grads)

    def _release(self, expects_grads: bool) -> None:
        self._expects_grads = expects_grads
        if self._fetcher.runs_graphs:
            release = hollow_out
        else:
            release = adopt_shape if expects_grads else point_at_nothing
        for slot in self.slots:
            release(slot.param)


class PlacedShard(ShardState):
    """The state of a parameter that lies in a gather unit of an engine."""

    def __init__(self, slot: Slot, group: GatherUnit, fetcher: Fetcher) -> None:
        super().__init__(slot.param, slot.name, slot.unit.comm, slot.shape, persists=False, everyone=fetcher.comm)
        self.slot, self.group, self.fetcher = slot, group, fetcher
        self._ranges: tuple[list[int], list[int]] | None = None

    def _find_ranges(self) -> tuple[list[int], list[int]]:
        if self._ranges is None:
            self._ranges = self.slot.unit.ranges_of(self.slot)
        return self._ranges

    @property
    def begins(self) -> Sequence[int]:
        return self._find_ranges()[0]

    @property
    def numels(self) -> Sequence[int]:
        return self._find_ranges()[1]

    @property
    def piece(self) -> torch.Tensor:
        """This rank's elements of the weights; a copy if the weights live in a file."""
        unit, bucket = self.slot.unit, self.slot.bucket
        fragment = unit.fragment_of.get(self.slot)
        if fragment is None:
            return self.empty
        with unit.weights.open(bucket, writes=False):
            piece = unit.weight_piece(fragment)
            return piece.clone() if unit.weights.needs_open(bucket) else piece

    def put_piece(self, values: torch.Tensor) -> None:
        """Overwrites this rank's elements of the weights; ``values`` is flat."""
        unit, fragment = self.slot.unit, self.slot.unit.fragment_of.get(self.slot)
        if fragment is not None:
            with unit.weights.open(self.slot.bucket):
                unit.weight_piece(fragment).copy_(values)

    @property
    def status(self) -> ZeroParamStatus:
        return self.group.status

    def acquire(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.fetcher.pin([state_of(param).group for param in params])

    def give_back(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.fetcher.unpin([state_of(param).group for param in params])

    def store(self, param: torch.nn.Parameter) -> None:
        unit, fragment = self.slot.unit, self.slot.unit.fragment_of.get(self.slot)
        if fragment is not None:
            with torch.no_grad():
                mine = self.own_part(param.data.reshape(-1))
                unit.put_master(fragment, mine)
                self.put_piece(mine)

    def open_for_edit(self, param: torch.nn.Parameter) -> bool:
        """Gathers the parameter if a pass is running. This serves reads that no hook has announced, and parameters that
        were released after they had been looked up."""
        if not self.fetcher.is_active:
            return False
        self.fetcher.use(self.group.index)
        return True

    def hold(self) -> Callable[[], None]:
        self.fetcher.hold(self.group)
        return lambda: self.fetcher.unhold(self.group)

    @property
    def view(self) -> torch.Tensor:
        """The parameter's view of the gathered buffer."""
        return self.slot.view(self.group.buffer, self.slot.unit.bucket_begin[self.slot.bucket])


class WholeShard(ShardState):
    """The state of a parameter that stays whole on every rank: it is below the persistence threshold, or there is only
    one rank."""

    def __init__(self, slot: Slot, comm: Collectives) -> None:
        super().__init__(slot.param, slot.name, comm, slot.shape, persists=True)
        self.slot = slot
        self.begins, self.numels = [0] * comm.world_size, [self.numel] * comm.world_size

    @property
    def piece(self) -> torch.Tensor:
        return self.view.reshape(-1)

    @property
    def status(self) -> ZeroParamStatus:
        return ZeroParamStatus.AVAILABLE

    def acquire(self, params: Sequence[torch.nn.Parameter]) -> None:
        pass

    def give_back(self, params: Sequence[torch.nn.Parameter]) -> None:
        pass

    def store(self, param: torch.nn.Parameter) -> None:
        unit, fragment = self.slot.unit, self.slot.unit.fragment_of.get(self.slot)
        with torch.no_grad():
            if fragment is not None:
                unit.put_master(fragment, param.data.reshape(-1).narrow(0, fragment.begin, fragment.numel))

    @property
    def view(self) -> torch.Tensor:
        """The parameter's view of the unit's weights."""
        return self.slot.view(self.slot.unit.flat_param)
