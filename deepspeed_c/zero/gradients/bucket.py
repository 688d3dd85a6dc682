"""A gradient bucket: collects the gradients of its parameters and holds their sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch

from deepspeed_c import _C, ops  # noqa: F401  (ops loads torch.ops.deepspeed_c)
from deepspeed_c.accelerator import has_streams
from deepspeed_c.buffers import Allocate, BufferPool, ordinary_memory
from deepspeed_c.comm.work import Work
from deepspeed_c.zero.gradients.sparse import sparse_sum
from deepspeed_c.zero.gradients.summing import Summing
from deepspeed_c.zero.gradients.tree import TreeSum
from deepspeed_c.zero.layout.unit import Slot, Unit

__all__ = ["Bucket", "GradientPools"]


class GradientPools(NamedTuple):
    """The pools of memory for gradients on their way."""

    staging: BufferPool
    copies: BufferPool
    """Temporary buffers of one reduction beside its staging buffer: gradients cast to the communication dtype, and sums
    before they are added to the result. The pool keeps no buffer: each is freed after its reduction."""

    @classmethod
    def make(
        cls,
        allocate: Allocate = ordinary_memory,
        count: Callable[[str], Callable[[int], None] | None] = lambda name: None,
    ) -> GradientPools:
        """Make both pools. ``allocate`` provides the staging buffers. ``count(name)`` returns a callback for the pool
        of that name; the pool calls it with each change of its bytes."""
        return cls(
            staging=BufferPool(allocate=allocate, count=count("staging")),
            copies=BufferPool(keeps=lambda device: False, count=count("copies")),
        )


class Bucket:
    """One bucket of one unit.

    ``result`` is this rank's share of the sum over ``unit.comm`` and ``unit.replicas``: the whole bucket at stage 0,
    the owned slice otherwise. At stages 0 and 1, or on a single rank, ``whole`` is a permanent buffer of the whole
    bucket, which collects gradients until the one reduction of the window. At stage 2 there is no such buffer:
    gradients are collected in a staging buffer, which is released after each reduction.

    A gradient may arrive after its bucket was launched (a parameter used in two graphs, a second backward). It is
    collected in a separate staging buffer and reduced by itself. Sums are linear, so nothing is lost or counted twice.

    C hooks write most gradients without calling Python (through ``path``, which knows the bucket by ``number`` and its
    parameters by ``tracker_index``). The other gradients are passed to ``add``.

    Sums are in the dtype of ``result``. With ``same_bits`` they are taken in a tree (``tree.py``), and ``result`` is
    their mean, as soon as ``settle`` has been called.
    """

    def __init__(
        self,
        unit: Unit,
        index: int,
        number: int,
        *,
        path: _C.GradientPath,
        whole: torch.Tensor | None,
        result: torch.Tensor,
        pools: GradientPools,
        summing: Summing,
    ) -> None:
        self.unit, self.index = unit, index
        self.slots: list[Slot] = unit.bucket_slots[index]
        self.whole, self.result = whole, result
        self._pools, self._summing = pools, summing
        self._path, self._number = path, number
        self._begin = unit.bucket_begin[index]
        self._is_on_host = unit.device.type == "cpu"
        self._streams: set = set()
        self._tree = TreeSum(unit, result, pools.staging) if summing.is_in_tree else None
        self.staging: torch.Tensor | None = None
        self.reset()

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        """(begin, end) of each range of the bucket that belongs to no parameter."""
        gaps, end = [], 0
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            begin = slot.offset - self._begin
            gaps.append((end, begin))
            end = begin + slot.numel
        gaps.append((end, self.unit.bucket_numel(self.index)))
        return [gap for gap in gaps if gap[0] < gap[1]]

    def reset(self) -> None:
        """Begins a window: drops collected gradients and marks the bucket as not reduced."""
        if self.staging is not None and self.staging is not self.whole:
            self._pools.staging.give(self.staging)
        self._close()
        self.is_launched = False
        self.has_result = False
        if self._tree is not None:
            self._tree.reset()

    def end_pass(self) -> None:
        """The next backward pass launches the bucket again."""
        self.is_launched = False

    def _close(self) -> None:
        """Detaches the staging buffer: later gradients are collected in a new one."""
        self.staging = None
        self._path.close(self._number)
        self._streams.clear()

    @property
    def is_pending(self) -> bool:
        """Whether the bucket holds gradients that have not been reduced yet."""
        return self.staging is not None

    def add(self, slot: Slot, grad: torch.Tensor, ratio: float, *, will_reduce: bool) -> None:
        """Adds ``ratio * grad`` to the collected gradients. ``will_reduce`` is False while reductions are postponed."""
        view = slot.view(self.open(will_reduce), self._begin)
        is_first = self._path.note(slot.tracker_index)
        if grad.is_sparse:
            if is_first:
                view.zero_()
            grad = grad.coalesce()
            view.index_add_(0, grad.indices()[0], grad.values().to(view.dtype), alpha=ratio)
        elif not is_first:
            view.add_(grad, alpha=ratio)
        elif ratio == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, ratio, out=view)
        if has_streams(view.device):
            # Autograd runs a node on the stream of its forward, so several streams may write to one bucket. The
            # reduction waits for all of them.
            self._streams.add(torch.accelerator.current_stream(view.device))

    def drop(self, slot: Slot) -> None:
        """Sets the collected gradient of one parameter to zero, and also this rank's share of the parameter's reduced
        sum."""
        if self.staging is not None:
            slot.view(self.staging, self._begin).zero_()
        fragment = self.unit.fragment_of.get(slot)
        if self.has_result and fragment is not None:
            begin = fragment.shard_begin - self.unit.shard_offset[self.index]
            self.result.narrow(0, begin, fragment.numel).zero_()
            if self._tree is not None:
                self._tree.drop(begin, fragment.numel)

    def open(self, will_reduce: bool) -> torch.Tensor:
        """Returns the buffer that collects gradients; makes it if there is none."""
        if self.staging is None:
            if self.whole is not None and not self.is_launched:
                self.staging = self.whole
            else:
                # Gradients of a pass that will be reduced are collected in the communication dtype. Gradients that wait
                # for a later reduction are collected in the accumulation dtype.
                dtype = self.unit.comm_dtype if will_reduce else self.result.dtype
                self.staging = self._pools.staging.take(self.unit.bucket_numel(self.index), dtype, self.unit.device)
            host = self.staging.data_ptr() if self._is_on_host else 0
            self._path.open(self._number, host, self.staging.numel(), self.staging.dtype)
        return self.staging

    def _gathered(self) -> torch.Tensor:
        """The collected gradients, with zeros in the gaps between parameters and for missing gradients. The collective
        sums the whole buffer, and the norm counts every element of it."""
        staging = self.open(True)
        if self._is_on_host:
            self._path.clear_rest(self._number)
            return staging
        rest = [staging[begin:end] for begin, end in self._gaps]
        rest += [self._slot_of[i].view(staging, self._begin) for i in self._path.missing(self._number)]
        if rest:
            torch._foreach_zero_(rest)
        for stream in self._streams:
            torch.accelerator.current_stream(self.unit.device).wait_stream(stream)
        return staging

    @cached_property
    def _slot_of(self) -> dict[int, Slot]:
        return {slot.tracker_index: slot for slot in self.slots}

    def reduce(self) -> Work:
        """Starts the sum of the gathered gradients over ranks. Every rank must call it for the same bucket at the same
        time."""
        staging = self._gathered()
        if staging is self.whole and self._summing.is_in_place(self.unit):
            # There is nothing to sum: the collected gradients are the result, and later gradients are added to them in
            # place.
            self._path.fill(self._number)
            self.has_result = True
            return Work.done()
        work = self._start(staging)
        is_whole = staging is self.whole
        self._close()
        self.is_launched = True
        self.has_result = True
        if is_whole:
            return work
        return work.then(lambda: self._pools.staging.give(staging))

    def settle(self, scale: float) -> None:
        """Brings ``result`` up to date: ``scale`` times the sum, if sums are taken in a tree. Every rank must call it
        for the same bucket at the same time."""
        if self._tree is not None:
            self._tree.settle(scale)

    def _start(self, staging: torch.Tensor) -> Work:
        unit = self.unit
        if self._tree is not None:
            return self._tree.add(staging)
        if self._summing.pre_factor != 1.0:
            torch.ops.deepspeed_c.flat_scale_([staging], self._summing.pre_factor)
        # The permanent buffer holds the gradients of the whole window, and none of them has been summed before.
        accumulate = self.has_result and staging is not self.whole
        if unit.is_sparse:
            for group in (unit.comm, unit.replicas):
                sparse_sum([slot.view(staging, self._begin) for slot in self.slots], group)
            if self._summing.post_factor != 1.0:
                torch.ops.deepspeed_c.flat_scale_([staging], self._summing.post_factor)
            self._store(unit.own_slice(staging, self.index), accumulate)
            return Work.done()
        if staging.dtype == unit.comm_dtype:
            return self._send(staging, accumulate)
        sent = self._pools.copies.take(staging.numel(), unit.comm_dtype, staging.device).copy_(staging)
        return self._send(sent, accumulate).then(lambda: self._pools.copies.give(sent))

    def _send(self, sent: torch.Tensor, accumulate: bool) -> Work:
        unit, comm, replicas = self.unit, self.unit.comm, self.unit.replicas
        if not unit.is_cut:
            summed = replicas.all_reduce(sent, scale=self._summing.post_factor)
            return summed.then(lambda: self._store(sent, accumulate))

        def finish(own: torch.Tensor) -> None:
            replicas.all_reduce(own).wait()
            self._store(own, accumulate)

        if not self._summing.settings.reduce_scatter:
            return comm.all_reduce(sent).then(lambda: finish(unit.own_slice(sent, self.index)))
        if replicas.world_size == 1 and not unit.states.is_apart:
            return comm.reduce_scatter(sent, self.result, scale=1.0, accumulate=accumulate)
        # The sum over ``comm`` is summed once more over ``replicas``. In between it is rounded to 16 bits only if both
        # sums and results have 16 bits. A weight with replicas, such as a tied one of a pipeline, then differs from
        # stage 0's in its last bits: there one sum over all ranks is rounded once. 32 bits in between would agree, but
        # would double what MiCS sends between hosts.
        dtype = sent.dtype if replicas.world_size == 1 else torch.promote_types(sent.dtype, self.result.dtype)
        own = self._pools.copies.take(self.result.numel(), dtype, sent.device)
        work = comm.reduce_scatter(sent, own, scale=1.0, accumulate=False).then(lambda: finish(own))
        return work.then(lambda: self._pools.copies.give(own))

    def _store(self, part: torch.Tensor, accumulate: bool) -> None:
        """Adds this rank's share of a sum to the result, or copies it there if it is the first. The result may lie on
        another device."""
        if part.data_ptr() == self.result.data_ptr() and part.dtype == self.result.dtype:
            return
        if accumulate:
            self.result.add_(part.to(self.result.device))
        else:
            self.result.copy_(part)
