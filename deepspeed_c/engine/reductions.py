"""DeepSpeed's methods for reducing gradients, or other tensors, by hand, and the names of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_c import comm
from deepspeed_c.comm.axes import DATA, SP, TOKENS

__all__ = ["Reductions"]


class Reductions:
    """A part of the engine."""

    enable_backward_allreduce = True
    """Setting it to False changes nothing: ``backward`` reduces by itself, and ``allreduce_gradients`` leaves reduced
    gradients alone."""

    @property
    def data_parallel_group(self) -> Any:
        """The ranks that hold copies, or shards, of the model."""
        return self._mesh.process_group(*DATA)

    @property
    def seq_data_parallel_group(self) -> Any:
        """The ranks that sum gradients: they see other samples, or other parts of the same samples."""
        return self._mesh.process_group(*TOKENS)

    @property
    def seq_dp_world_size(self) -> int:
        return self._mesh.size(*TOKENS)

    @property
    def sequence_parallel_size(self) -> int:
        return self._mesh.size(SP)

    @property
    def seq_parallel_group(self) -> Any:
        """The ranks that hold parts of the same sequences; None where each has whole ones."""
        return None if self.sequence_parallel_size == 1 else self._mesh.process_group(SP)

    def get_sequence_parallel_group(self) -> Any:
        return self.seq_parallel_group

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """At a boundary, completes the sums of gradients over ranks that backward has left, as after ``no_sync``: once,
        and ``step`` finds them done. Collective.

        Elsewhere it does nothing: gradients that are due have been reduced within ``backward``. ``bucket_size`` is
        taken for DeepSpeed's sake; buckets are laid out at the start (``reduce_bucket_size``).
        """
        optimizer = self._require_optimizer("allreduce_gradients")
        if self.is_gradient_accumulation_boundary() and optimizer.reducer.has_window:
            optimizer.complete_gradients()

    def _backward_prologue(self) -> None:
        """Nothing: a pass is recognised where it enters the outputs."""

    def _backward_epilogue(self) -> None:
        """The pass itself has ended by now; reduces as ``allreduce_gradients`` does, but not within ``no_sync``."""
        if self.enable_backward_allreduce and not self._passes.is_inside_no_sync:
            self.allreduce_gradients()

    def buffered_allreduce_fallback(
        self, grads: Sequence[torch.Tensor] | None = None, elements_per_buffer: int = 500_000_000
    ) -> None:
        """Averages ``grads`` over the data-parallel ranks, in place; None: the engine's own gradients. Collective."""
        if grads is None:
            self.allreduce_gradients(elements_per_buffer)
            return
        for dtype in sorted({grad.dtype for grad in grads}, key=str):  # in the same order on all ranks
            same = [grad for grad in grads if grad.dtype == dtype]
            self.allreduce_no_retain(same, self.data_parallel_group, elements_per_buffer, self.dp_world_size)

    def allreduce_bucket(
        self, bucket: Sequence[torch.Tensor], dp_group: Any, dp_world_size: float | None = None
    ) -> torch.Tensor:
        """The average over ``dp_group`` of all elements of ``bucket`` (tensors of one dtype), one after another in one
        new flat tensor.

        Travels in ``communication_data_type``. The sum where ``gradient_allreduce_op`` says so; ``dp_world_size``:
        what to divide by, default the group's size; before or after the sum as ``prescale_gradients`` and
        ``gradient_predivide_factor`` say. Collective.
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
        """As ``allreduce_bucket``, into the tensors themselves."""
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
        """As ``allreduce_and_copy``, in parts that end with the tensor that brings them over ``numel_per_bucket``
        elements."""
        part: list[torch.Tensor] = []
        for tensor in bucket:
            part.append(tensor)
            if sum(each.numel() for each in part) > numel_per_bucket:
                self.allreduce_and_copy(part, dp_group, dp_world_size)
                part = []
        if part:
            self.allreduce_and_copy(part, dp_group, dp_world_size)

    def all_gather_scalar(self, value: torch.Tensor, dp_group: Any) -> list[torch.Tensor]:
        """Every rank's ``value`` (of one shape), by rank."""
        values = [torch.empty_like(value) for _ in range(comm.get_world_size(dp_group))]
        comm.all_gather(values, value, group=dp_group)
        return values
