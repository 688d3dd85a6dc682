"""Norm, clip, scale, reduce, cast and zero over lists of tensors, each in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Norm", "cast", "norm", "reduce_", "scale_", "zero_"]


class Norm(NamedTuple):
    """L2 norm of the finite elements, and the number of elements that are inf or NaN. Reading either waits for the
    device."""

    sumsq: Tensor  # float64 [2]: sum of squares, number of non-finite elements

    @property
    def value(self) -> float:
        """The norm; inf when an element is not finite."""
        sumsq, n_nonfinite = self.sumsq.tolist()
        return float("inf") if n_nonfinite else sumsq**0.5

    @property
    def n_nonfinite(self) -> int:
        return int(self.sumsq[1])


def norm(tensors: Sequence[Tensor]) -> Norm:
    """The global L2 norm of float32, bfloat16 or float16 tensors on one device, accumulated in float64.

    ValueError for sparse or strided tensors with gaps.
    """
    if len(tensors) == 0:
        return Norm(torch.zeros(2, dtype=torch.float64))
    return Norm(torch.ops.deepspeed_c.flat_sumsq(tensors))


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """tensor *= factor for each, computed in float32 and rounded once."""
    if len(tensors) > 0:
        torch.ops.deepspeed_c.flat_scale_(tensors, factor)
        torch.autograd.graph.increment_version(tensors)


def reduce_(sources: Sequence[Tensor], into: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> Norm:
    """into = (into if accumulate else 0) + scale * (sources[0] + sources[1] + ...), summed in float32 in this order and
    rounded once.

    Sources share a dtype and have ``into``'s length. Returns the norm of ``into`` as written, computed in the same
    pass.
    """
    stats = torch.ops.deepspeed_c.flat_reduce_(sources, scale, accumulate, into)
    torch.autograd.graph.increment_version(into)
    return Norm(stats)


def cast(source: Tensor, target: Tensor) -> None:
    """target = source, rounded to nearest even; inf and NaN stay inf and NaN.

    Equal lengths, any two of float32, bfloat16 and float16.
    """
    torch.ops.deepspeed_c.flat_cast_(source, target)
    torch.autograd.graph.increment_version(target)


def zero_(tensors: Sequence[Tensor]) -> None:
    """Sets every element to 0. Host memory is written by the threads that will later update it (first touch).

    A fresh page lies in the NUMA node of the thread that writes to it first. Elements are divided among the pool's
    threads in the same way as in every pass over a list of tensors of these sizes. So make states with ``torch.empty``,
    and pass them here in one list, as an optimizer's step gets them. Fresh pages are huge if the system gives huge
    pages on request: a step over small pages takes a sixth longer. Tensors may have any dtype and device; torch zeroes
    tensors of other devices than the host. ValueError for a host tensor with gaps or overlaps between its elements.
    """
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    elsewhere = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if on_host:
        torch.ops.deepspeed_c.flat_zero_(on_host)
        torch.autograd.graph.increment_version(on_host)
    if elsewhere:
        with torch.no_grad():
            torch._foreach_zero_(elsewhere)
