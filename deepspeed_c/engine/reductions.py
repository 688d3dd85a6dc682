"""DeepSpeed's methods for reducing gradients or other tensors by hand, and its names of process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_c import comm
from deepspeed_c.comm.axes import DATA, SP, TOKENS

__all__ = ["Reductions"]


class Reductions:
    """Methods of the engine for reductions by hand."""

    enable_backward_allreduce = True
    """Setting it to False changes nothing: ``backward`` reduces by itself, and ``allreduce_gradients`` leaves reduced
    gradients alone."""

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the ranks that hold copies or shards of the model."""
        return self._mesh.process_group(*DATA)

    @property
    def seq_data_parallel_group(self) -> Any:
        """The process group of the ranks that sum gradients. They have different samples, or different parts of the
        same samples."""
        return self._mesh.process_group(*TOKENS)

    @property
    def seq_dp_world_size(self) -> int:
        return self._mesh.size(*TOKENS)

    @property
    def sequence_parallel_size(self) -> int:
        return self._mesh.size(SP)

    @property
    def seq_parallel_group(self) -> Any:
        """The process group of the ranks that hold parts of the same sequences; None if each rank has whole sequences."""
        return None if self.sequence_parallel_size == 1 else self._mesh.process_group(SP)

    def get_sequence_parallel_group(self) -> Any:
        return self.seq_parallel_group

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """At a boundary, completes the sums of gradients that backward has not reduced, as after ``no_sync``. ``step``
        does not repeat them. Collective.

        Between boundaries it does nothing, because gradients that are due have been reduced within ``backward``.
        ``bucket_size`` is accepted for compatibility and ignored: buckets are laid out at the start
        (``reduce_bucket_size``).
        """
        optimizer = self._require_optimizer("allreduce_gradients")
        if self.is_gradient_accumulation_boundary() and optimizer.reducer.has_window:
            optimizer.complete_gradients()

    def _backward_prologue(self) -> None:
        """Does nothing, because the engine notices a pass when it reaches the outputs."""

    def _backward_epilogue(self) -> None:
        """Called after the pass has ended. Reduces as ``allreduce_gradients`` does, except within ``no_sync``."""
        if self.enable_backward_allreduce and not self._passes.is_inside_no_sync:
            self.allreduce_gradients()

    def buffered_allreduce_fallback(
        self, grads: Sequence[torch.Tensor] | None = None, elements_per_buffer: int = 500_000_000
    ) -> None:
        """Averages ``grads`` over the data-parallel ranks in place; None: reduces the engine's own gradients.
        Collective."""
        if grads is None:
            self.allreduce_gradients(elements_per_buffer)
            return
        for dtype in sorted({grad.dtype for grad in grads}, key=str):  # in the same order on all ranks
            same = [grad for grad in grads if grad.dtype == dtype]
            self.allreduce_no_retain(same, self.data_parallel_group, elements_per_buffer, self.dp_world_size)

    def allreduce_bucket(
        self, bucket: Sequence[torch.Tensor], dp_group: Any, dp_world_size: float | None = None
    ) -> torch.Tensor:
        """Averages the tensors of ``bucket`` (of one dtype) over ``dp_group``. Returns the averages of all elements in
        one new flat tensor.

        The tensors are sent in ``communication_data_type``. If ``gradient_allreduce_op`` asks for the sum, it is not
        divided. ``dp_world_size``: the divisor, default: the group's size. ``prescale_gradients`` and
        ``gradient_predivide_factor`` say whether to divide before or after the sum. Collective.
        """
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        sent = flat.to(self.communication_data_type)
        world_size = comm.get_world_size(dp_group) if dp_world_size is None else dp_world_size
        before, after = self._factors(world_size)
        if before != 1.0:
            sent.mul_(before)
        comm.all_reduce(sent, group=dp_group)
        if after != 1.0:
            sent.mul_(after)
        return sent.to(flat.dtype)

    def _factors(self, world_size: float) -> tuple[float, float]:
        """The factors of a sum's terms, and of the sum."""
        if self._config.gradient_allreduce_op != "mean":
            return 1.0, 1.0
        if not self.postscale_gradients():
            return 1.0 / world_size, 1.0
        predivided = self.gradient_predivide_factor()
        return 1.0 / predivided, predivided / world_size

    def allreduce_and_copy(
        self, small_bucket: Sequence[torch.Tensor], dp_group: Any, dp_world_size: float | None = None
    ) -> None:
        """As ``allreduce_bucket``, but writes the result to the tensors themselves."""
        reduced = self.allreduce_bucket(small_bucket, dp_group, dp_world_size)
        with torch.no_grad():
            for tensor, part in zip(small_bucket, reduced.split([tensor.numel() for tensor in small_bucket])):
                tensor.copy_(part.view(tensor.shape))

    def allreduce_no_retain(
        self,
        bucket: Sequence[torch.Tensor],
        dp_group: Any,
        numel_per_bucket: int = 500_000_000,
        dp_world_size: float | None = None,
    ) -> None:
        """As ``allreduce_and_copy``, in several parts. A part ends with the tensor that makes it larger than
        ``numel_per_bucket`` elements."""
        part: list[torch.Tensor] = []
        for tensor in bucket:
            part.append(tensor)
            if sum(each.numel() for each in part) > numel_per_bucket:
                self.allreduce_and_copy(part, dp_group, dp_world_size)
                part = []
        if part:
            self.allreduce_and_copy(part, dp_group, dp_world_size)

    def all_gather_scalar(self, value: torch.Tensor, dp_group: Any) -> list[torch.Tensor]:
        """The list of all ranks' ``value``, which must have the same shape on all of them."""
        values = [torch.empty_like(value) for _ in range(comm.get_world_size(dp_group))]
        comm.all_gather(values, value, group=dp_group)
        return values
