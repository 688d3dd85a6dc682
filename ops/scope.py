"""An optimizer's declaration of the data that its updates need, so that engines need no list of optimizer names; and
the parts of a bucket that an update gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Matrices", "Scope", "Shards", "Undeclared", "declaration"]

Scope = Literal["element", "norms", "matrix"]
"""The data that the update of an element depends on: only the element, also norms of the whole parameter, or the
parameter's whole matrix.
"""

# torch's own optimizers of scope "element".
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
    """The parameters of a bucket as whole matrices, whose pieces are spread over several ranks. ``mine`` are this
    rank's pieces: float32, in the shapes of ``Shards.params``, initially zero.
    """

    mine: Sequence[Tensor]

    def gather(self) -> Iterator[Tensor]:
        """Iterates over the whole matrices of which this rank has a piece, gathered from ``mine`` of all ranks.
        Collective over the ranks that share the bucket: every rank, also without a piece, must exhaust the iterator
        once.
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
    sums: Tensor | None = None  # for scope "norms": the result of `norms`, float64 [n, 2], added up over the ranks
    matrices: Matrices | None = None  # for scope "matrix"


class Undeclared:
    """The declaration for an optimizer without one. The optimizer's ``step`` updates all parameters at once, from
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
