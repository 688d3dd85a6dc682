"""A gather unit: one bucket of a sharded unit, whose source gathers it into a buffer, and its parameters' places in the
buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from deepspeed_c.comm.collectives import Collectives
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
from deepspeed_c.zero.weights.sources import source_of
from deepspeed_c.zero.weights.sources.source import lasting

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["GatherUnit", "PlacedShard", "WholeShard"]


class GatherUnit:
    """One bucket of a sharded unit: the parameters that are gathered by one collective, or by none."""

    def __init__(self, index: int, unit: Unit, bucket: int, fetcher: Fetcher) -> None:
        self.index, self.unit, self.bucket, self._fetcher = index, unit, bucket, fetcher
        self.slots: list[Slot] = unit.bucket_slots[bucket]
        self.numel = unit.bucket_numel(bucket)
        self.label = unit.gather_label(bucket)
        self.source = source_of(unit, bucket, self.label, fetcher.means)
        self.buffer: torch.Tensor | None = None  # [numel], of the source
        self.is_ready = False  # the parameters point into the buffer
        self._expects_grads = False  # released, but trained parameters have their whole shape for gradients
        self.pins = 0
        self.is_leaving = False  # released by the plan while pinned
        self._begin = unit.bucket_begin[bucket]

    def _make_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        with lasting():
            return [slot.view(buffer, self._begin) for slot in self.slots]

    def _views_of_buffer(self) -> list[torch.Tensor]:
        return self.source.views(self.buffer, self._make_views)

    @property
    def status(self) -> ZeroParamStatus:
        if self.is_ready:
            return ZeroParamStatus.AVAILABLE
        return ZeroParamStatus.NOT_AVAILABLE if self.buffer is None else ZeroParamStatus.INFLIGHT

    @property
    def is_in_place(self) -> bool:
        """Whether the parameters of this gathered unit are still its views."""
        return all(
            slot.param.data_ptr() == view.data_ptr()
            and slot.param.shape == view.shape
            and slot.param.dtype == view.dtype
            for slot, view in zip(self.slots, self._views_of_buffer())
        )

    def start(self) -> None:
        """Starts the gather. If the unit is gathered already (its weights were updated, or a plan asks for it again),
        the same buffer is filled again."""
        is_new = self.buffer is None
        self.buffer = self.source.start(self.buffer)
        if is_new:
            self._fetcher.packer.add(self)
            self._fetcher.stats.count_live(self.numel)
        self.is_leaving = False

    def wait(self) -> None:
        """Waits for the gather."""
        self.source.finish(self.buffer)

    def finish(self) -> None:
        """Waits for the gather and makes the parameters available."""
        self.wait()
        if not self.is_ready:
            for slot, view in zip(self.slots, self._views_of_buffer()):
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
        self._release(expects_grads or not fetcher.phase.is_trained)
        fetcher.packer.remove(self)
        fetcher.stats.count_live(-self.numel)
        buffer, self.buffer = self.buffer, None
        self.source.let_go(buffer)
        self.is_ready = self.is_leaving = False

    def expect_grads(self, expects: bool) -> None:
        """Sets whether gradients may arrive while the unit is released or on its way. Its trained parameters have their
        whole shape then; otherwise they are empty."""
        if not self.is_ready and self._expects_grads != expects:
            self._release(expects)

    def show_released(self) -> None:
        """Gives released parameters the form that they have now: called when a pass with graphs begins or ends."""
        if self.buffer is None:
            self._release(self._expects_grads)

    def _release(self, expects_grads: bool) -> None:
        self._expects_grads = expects_grads
        if self._fetcher.phase.hollows:
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
        at_hand = unit.weight_piece_at_hand(fragment)
        if at_hand is not None:
            return at_hand
        with unit.weights.open(bucket, writes=False):
            return unit.weight_piece(fragment).clone()

    @property
    def near(self) -> Collectives | None:  # type: ignore[override]
        return self.group.source.near

    @property
    def second_piece(self) -> torch.Tensor | None:
        source = self.group.source
        second = source.second
        if second is None:
            return None
        n = second.numel()
        begin = self.slot.offset - self.slot.unit.bucket_begin[self.slot.bucket] - source.near.rank * n
        end = min(max(begin + self.slot.numel, 0), n)
        begin = min(max(begin, 0), end)
        return second.narrow(0, begin, end - begin)

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
        if not self.fetcher.phase.is_active:
            return False
        self.fetcher.use(self.group)
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
