"""A gradient bucket: where the gradients of its parameters gather, and where their sum over the ranks ends up."""

from __future__ import annotations

import torch

from deepspeed_c import ops  # noqa: F401  (loads torch.ops.deepspeed_c)
from deepspeed_c.comm.collectives import Collectives, Work
from deepspeed_c.zero.sparse import sparse_sum
from deepspeed_c.zero.unit import Slot, Unit

__all__ = ["Bucket", "StagingPool"]


class StagingPool:
    """Buffers that hold a bucket's gradients until they are reduced, reused from bucket to bucket.

    A buffer's padding must be zero, because it is reduced along with the rest; a buffer that last served another bucket is cleared.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, torch.Tensor]] = []

    def take(self, key: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        best = None
        for i, (last_key, buffer) in enumerate(self._free):
            if buffer.dtype == dtype and buffer.device == device and buffer.numel() >= numel:
                if last_key == key:
                    return self._free.pop(i)[1].narrow(0, 0, numel)
                best = i
        if best is not None:
            return self._free.pop(best)[1].narrow(0, 0, numel).zero_()
        # Too small for this bucket: too small for good, since bucket sizes repeat every step.
        self._free = [(k, b) for k, b in self._free if b.numel() >= numel or b.dtype != dtype]
        return torch.zeros(numel, dtype=dtype, device=device)

    def give(self, key: int, buffer: torch.Tensor) -> None:
        whole = buffer if buffer._base is None else buffer._base
        self._free.append((key, whole))

    def clear(self) -> None:
        self._free.clear()


class Bucket:
    """One bucket of one unit.

    ``result`` is this rank's share of the summed gradient: the whole bucket where gradients are reduced in place on every rank (stage 0), the owned slice
    otherwise. ``home`` is a buffer of the whole bucket that exists all the time (stages 0 and 1, or a single rank), into which gradients
    gather until the window's one reduction; without one (stage 2) they gather in a staging buffer that is given back after each reduction.

    A gradient that arrives after its bucket was launched (a parameter used in two graphs, a second backward) gathers in a staging buffer
    of its own and is reduced by itself: sums are linear, so nothing is ever lost or counted twice.
    """

    def __init__(
        self,
        unit: Unit,
        index: int,
        key: int,
        *,
        home: torch.Tensor | None,
        result: torch.Tensor,
        accum_dtype: torch.dtype,
        pool: StagingPool,
        comm: Collectives,
        is_replicated: bool,
        use_reduce_scatter: bool,
        pre_factor: float,
    ) -> None:
        self.unit, self.index, self.key = unit, index, key
        self.slots: list[Slot] = unit.bucket_slots[index]
        self.home, self.result = home, result
        self._accum_dtype, self._pool, self._comm = accum_dtype, pool, comm
        self._is_replicated, self._use_reduce_scatter = is_replicated, use_reduce_scatter
        self._pre_factor = pre_factor
        self._position = {slot: i for i, slot in enumerate(self.slots)}
        self._begin = unit.bucket_begin[index]
        self._streams: set = set()
        self.reset()

    def reset(self) -> None:
        """Begins a window: nothing gathered, nothing reduced."""
        self.drop_staging()
        self.is_launched = False
        self.has_result = False

    def drop_staging(self) -> None:
        staging = getattr(self, "staging", None)
        if staging is not None and staging is not self.home:
            self._pool.give(self.key, staging)
        self.staging: torch.Tensor | None = None
        self._is_written = [False] * len(self.slots)
        self._streams.clear()

    @property
    def is_pending(self) -> bool:
        """Gradients have gathered that no reduction has taken yet."""
        return self.staging is not None

    # -- gathering --------------------------------------------------------------------------------------------------

    def add(self, slot: Slot, grad: torch.Tensor, ratio: float, *, will_reduce: bool) -> None:
        """Adds ``ratio * grad`` to what has gathered. ``will_reduce`` is False while reductions are put off."""
        view = slot.view(self._open(will_reduce), self._begin)
        i = self._position[slot]
        if grad.is_sparse:
            if not self._is_written[i]:
                view.zero_()
            grad = grad.coalesce()
            view.index_add_(0, grad.indices()[0], grad.values().to(view.dtype), alpha=ratio)
        elif self._is_written[i]:
            view.add_(grad, alpha=ratio)
        elif ratio == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, ratio, out=view)
        self._is_written[i] = True
        if view.device.type != "cpu":
            # Autograd runs a node on the stream of its forward; the reduction waits for each stream that wrote here.
            self._streams.add(torch.accelerator.current_stream(view.device))

    def _open(self, will_reduce: bool) -> torch.Tensor:
        if self.staging is None:
            if self.home is not None and not self.is_launched:
                self.staging = self.home
            else:
                # What is reduced at once is gathered in the dtype that travels; what waits is gathered in the dtype that accumulates.
                dtype = self.unit.comm_dtype if will_reduce else self._accum_dtype
                self.staging = self._pool.take(self.key, self.unit.bucket_numel(self.index), dtype, self.unit.device)
        return self.staging

    def _close(self) -> torch.Tensor:
        """The gathered gradients, with zeros for members that gave none."""
        staging = self._open(True)
        for slot, is_written in zip(self.slots, self._is_written):
            if not is_written:
                slot.view(staging, self._begin).zero_()
        for stream in self._streams:
            torch.accelerator.current_stream(self.unit.device).wait_stream(stream)
        return staging

    # -- reducing ---------------------------------------------------------------------------------------------------

    def reduce(self) -> Work:
        """Starts the sum over all ranks of what has gathered. Every rank must call it for the same bucket at the same time."""
        staging = self._close()
        if staging is self.home and self._comm.world_size == 1 and not self.unit.placement.states:
            # Nothing to sum: what has gathered is the result, and goes on gathering in place.
            self._is_written = [True] * len(self.slots)
            self.has_result = True
            return Work.done()
        work = self._start(staging)
        is_home = staging is self.home
        self.staging = None
        self._is_written = [False] * len(self.slots)
        self._streams.clear()
        self.is_launched = True
        self.has_result = True
        if is_home:
            return work
        return work.then(lambda: self._pool.give(self.key, staging))

    def _start(self, staging: torch.Tensor) -> Work:
        comm, is_home = self._comm, staging is self.home
        if self._pre_factor != 1.0:
            torch.ops.deepspeed_c.flat_scale_([staging], self._pre_factor)
        if self.unit.is_sparse:
            sparse_sum([slot.view(staging, self._begin) for slot in self.slots], comm)
            self._store(staging, self.has_result)
            return Work.done()
        sent = staging if staging.dtype == self.unit.comm_dtype else staging.to(self.unit.comm_dtype)
        if not self._is_replicated and self._use_reduce_scatter:
            if not self.unit.placement.states:
                return comm.reduce_scatter(sent, self.result, scale=1.0, accumulate=self.has_result)
            accumulate, own = self.has_result, sent.new_empty(self.result.numel())
            return comm.reduce_scatter(sent, own, scale=1.0, accumulate=False).then(lambda: self._put(own, accumulate))
        work = comm.all_reduce(sent)
        if sent is self.home and self._is_replicated:
            return work
        accumulate = self.has_result
        return work.then(lambda: self._store(sent, accumulate and not is_home))

    def _store(self, whole: torch.Tensor, accumulate: bool) -> None:
        part = whole if self._is_replicated else self.unit.own_slice(whole, self.index)
        if part.data_ptr() == self.result.data_ptr() and part.dtype == self.result.dtype:
            return
        self._put(part, accumulate)

    def _put(self, part: torch.Tensor, accumulate: bool) -> None:
        """Adds to the result, or begins it, wherever it lies."""
        if accumulate:
            self.result.add_(part.to(self.result.device))
        else:
            self.result.copy_(part)
