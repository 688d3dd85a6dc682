"""An optimizer's declaration of its needs, so that an engine asks it and no list of names, and the parts of a bucket
that its update gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Matrices", "Scope", "Shards", "Undeclared", "declaration"]

Scope = Literal["element", "norms", "matrix"]
"""The data that the update of an element depends on: itself alone, norms of the whole parameter besides, or all of the
parameter's matrix."""

# torch's own of scope "element".
TORCH_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


class Matrices(Protocol):
    """The parameters of a bucket as whole matrices, whose pieces lie on several ranks. ``mine`` are this rank's
    pieces: float32, in the shapes of ``Shards.params``, zero at first."""

    mine: Sequence[Tensor]

    def gather(self) -> Iterator[Tensor]:
        """Whole matrices, gathered from all ranks' ``mine``, one by one: the matrices that this rank has a piece of.
        Collective over the ranks that share the bucket: to be run through once, by ranks that have no piece too.
        """

    def cut(self, index: int, whole: Tensor) -> Tensor:
        """This rank's piece of ``whole``, a tensor in the shape of matrix number ``index``, in the shape of
        ``Shards.params[index]``."""


class Shards(NamedTuple):
    """This rank's pieces of the parameters of one bucket, members of the optimizer's group number ``group``: the
    tensors that an update reads and writes."""

    group: int
    params: Sequence[Tensor]
    grads: Sequence[Tensor]  # to be multiplied by grad_scale
    copies: Sequence[Tensor]  # 16-bit tensors that receive the updated weights; empty where there are none
    grad_scale: float
    sums: Tensor | None = None  # of scope "norms": the result of `norms`, float64 [n, 2], added up over the ranks
    matrices: Matrices | None = None  # of scope "matrix"


class Undeclared:
    """The declaration of an optimizer that has none: its own ``step`` updates all parameters at once, from
    ``param.grad``."""

    updates_buckets = False
    is_quantized = False
    is_fused_in_deepspeed = False

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.scope: Scope | None = "element" if type(base) in TORCH_ELEMENTWISE else None

    def scope_of_group(self, group: int) -> Scope | None:
        return self.scope


def declaration(base: torch.optim.Optimizer) -> Any:
    """The object with ``scope``, ``scope_of_group``, ``updates_buckets``, ``is_quantized`` and
    ``is_fused_in_deepspeed`` for ``base``: itself (a :class:`~deepspeed_c.ops.optim.FusedOptimizer`), or
    :class:`Undeclared`."""
    return base if getattr(base, "updates_buckets", False) else Undeclared(base)
