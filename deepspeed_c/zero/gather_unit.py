"""A gather unit: one bucket of a sharded unit, put together in a buffer of the pool, and what its parameters know about where they lie."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from deepspeed_c.comm.collectives import Collectives, Work
from deepspeed_c.zero.sharded import ShardState, ZeroParamStatus, adopt_shape, point_at, point_at_nothing, state_of
from deepspeed_c.zero.unit import Slot, Unit

if TYPE_CHECKING:
    from deepspeed_c.zero.fetch import Fetcher

__all__ = ["BufferPool", "GatherUnit", "PlacedShard", "WholeShard"]


class BufferPool:
    """Buffers for gathered weights, used again when nothing else holds them (a view that autograd or the user kept may)."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._alone = _use_count(torch.empty(1)) if hasattr(torch._C, "_storage_Use_Count") else None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and self._alone is not None:
            fitting = sorted(
                (b for b in self._free if b.dtype == dtype and b.numel() >= numel),
                key=lambda b: (_use_count(b) != self._alone, b.numel()),
            )
            for buffer in fitting:
                # A buffer that somebody keeps is left to him.
                self._free = [b for b in self._free if b is not buffer]
                if self._becomes_alone(buffer):
                    return buffer
            # Too small, or of another dtype: room for their successor.
            self._free.clear()
        return torch.empty(numel, dtype=dtype, device=device)

    def _becomes_alone(self, buffer: torch.Tensor) -> bool:
        """gloo's threads hold on to a buffer for some microseconds after they have said that they are done."""
        until = time.monotonic() + 0.002
        while (is_held := _use_count(buffer) != self._alone) and time.monotonic() < until:
            time.sleep(0)
        return not is_held

    def give(self, buffer: torch.Tensor) -> None:
        # An accelerator's own allocator keeps memory at hand; the C library's hands large pieces back and has to clear them anew.
        if buffer.device.type == "cpu" and self._alone is not None:
            self._free.append(buffer)

    def clear(self) -> None:
        self._free.clear()


def _use_count(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class GatherUnit:
    """One bucket of a sharded unit: the parameters that are gathered by one collective."""

    def __init__(self, index: int, unit: Unit, bucket: int, fetcher: Fetcher) -> None:
        self.index, self.unit, self.bucket, self._fetcher = index, unit, bucket, fetcher
        self.slots: list[Slot] = unit.bucket_slots[bucket]
        self.trained = [slot.param for slot in self.slots if slot.param.requires_grad]
        self.numel = unit.bucket_numel(bucket)
        first = min(self.slots, key=lambda slot: slot.order)
        self.label = first.name if len(self.slots) == 1 else f"{first.name} (+{len(self.slots) - 1} more)"
        self.base: torch.Tensor | None = None  # what the pool gave
        self.buffer: torch.Tensor | None = None  # [numel] of it
        self.storage = 0  # identity of the storage, while live
        self._work: Work | None = None
        self.is_ready = False  # the parameters point into the buffer
        self.pins = 0
        self.is_leaving = False  # released by the plan while pinned
        self._begin = unit.bucket_begin[bucket]

    @property
    def status(self) -> ZeroParamStatus:
        if self.is_ready:
            return ZeroParamStatus.AVAILABLE
        return ZeroParamStatus.NOT_AVAILABLE if self.buffer is None else ZeroParamStatus.INFLIGHT

    def start(self) -> None:
        """Issues the gather. In place where the unit is here already (its weights were updated, or a plan asks for it again)."""
        fetcher = self._fetcher
        self.wait()
        with (
            self.unit.weights(self.bucket),
            fetcher.on_gather_stream(self.unit.device),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            if self.buffer is None:
                self.base = fetcher.pool.take(self.numel, self.unit.dtype, self.unit.device)
                self.buffer = self.base.narrow(0, 0, self.numel)
                self.storage = self.base.untyped_storage()._cdata
                fetcher.by_storage[self.storage] = self
                fetcher.count_live(self.numel)
            self.unit.own_slice(self.buffer, self.bucket).copy_(self.unit.param_slice(self.bucket))
            self._work = fetcher.comm.all_gather(self.buffer, use_broadcast=fetcher.use_broadcast, label=self.label)
        self.is_leaving = False

    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            with torch.inference_mode(False), torch.no_grad():
                work.wait()
                self._fetcher.after_gather(self.buffer)

    def finish(self) -> None:
        """Waits for the gather and makes the parameters available."""
        self.wait()
        if not self.is_ready:
            with torch.inference_mode(False), torch.no_grad():
                for slot in self.slots:
                    point_at(slot.param, slot.view(self.buffer, self._begin))
            self.is_ready = True

    def let_go(self, *, expects_grads: bool) -> None:
        """Releases the parameters and the buffer."""
        self.wait()
        fetcher = self._fetcher
        # Where nothing is trained no backward is announced: a gradient may arrive whenever a graph is left.
        expects_grads = expects_grads or not fetcher.is_trained
        for slot in self.slots:
            if expects_grads and slot.param.requires_grad:
                adopt_shape(slot.param)
            else:
                point_at_nothing(slot.param)
        del fetcher.by_storage[self.storage]
        fetcher.count_live(-self.numel)
        self.buffer = None
        fetcher.pool.give(self.base)
        self.base = None
        self.is_ready = self.is_leaving = False


class PlacedShard(ShardState):
    """The state of a parameter that lies in a gather unit of an engine."""

    def __init__(self, slot: Slot, group: GatherUnit, fetcher: Fetcher) -> None:
        super().__init__(slot.param, slot.name, fetcher.comm, slot.shape, persists=False)
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
        """A copy where the weights live in a file."""
        unit, bucket = self.slot.unit, self.slot.bucket
        fragment = unit.fragment_of.get(self.slot)
        if fragment is None:
            return self.empty
        with unit.weights(bucket):
            piece = unit.weight_piece(fragment)
            return piece.clone() if unit.has_stored_weights(bucket) else piece

    def put_piece(self, values: torch.Tensor) -> None:
        """Overwrites this rank's elements of the weights; ``values`` is flat."""
        unit, fragment = self.slot.unit, self.slot.unit.fragment_of.get(self.slot)
        if fragment is not None:
            with unit.weights(self.slot.bucket, writes=True):
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
                if not unit.master_is_param:
                    with unit.resident(self.slot.bucket):
                        unit.piece(unit.master, fragment).copy_(mine)
                self.put_piece(mine)

    def open_for_edit(self, param: torch.nn.Parameter) -> bool:
        """What a pass reads of a parameter that nobody announced, or that was released since it was looked up, is gathered on the spot."""
        if not self.fetcher.is_active:
            return False
        self.fetcher.use(self.group.index)
        return True

    def hold(self) -> Callable[[], None]:
        self.fetcher.hold(self.group)
        return lambda: self.fetcher.unhold(self.group)

    @property
    def view(self) -> torch.Tensor:
        """The parameter's place in what is gathered."""
        return self.slot.view(self.group.buffer, self.slot.unit.bucket_begin[self.slot.bucket])


class WholeShard(ShardState):
    """The state of a parameter that stays whole on every rank (below the persistence threshold, or on a single rank)."""

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
            if fragment is not None and not unit.master_is_param:
                mine = param.data.reshape(-1).narrow(0, fragment.begin, fragment.numel)
                with unit.resident(self.slot.bucket):
                    unit.piece(unit.master, fragment).copy_(mine)

    @property
    def view(self) -> torch.Tensor:
        """The parameter's place in the unit's weights."""
        return self.slot.view(self.slot.unit.flat_param)
