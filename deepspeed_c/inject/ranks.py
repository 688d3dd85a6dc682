"""The tensor-parallel ranks of a model, and the messages between its layers on these ranks, in forward and backward.

Between the input of a column layer and the output of a row layer each rank computes a part: the *cut region*. A tensor
that enters the region is the same on all ranks, and its gradient is the sum of the ranks' gradients. A tensor that
leaves the region becomes the sum over ranks, and its gradient is the same on all ranks (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c.comm.axes import TP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.groups import new_group_of
from deepspeed_c.errors import StateError
from deepspeed_c.inject import exchange
from deepspeed_c.inject.overlap import ColumnEntry, Columns
from deepspeed_c.ops.first_derivative import first_derivative_only

__all__ = ["TensorRanks"]

# Most tensors in the cut region that are known to be there. Between two uses of one tensor lie the factors of a few
# adapters.
MOST_ENTERED = 16


class TensorRanks:
    """State that the layers of one model share: the group, and the tensors that last entered the cut region."""

    def __init__(self, comm: Collectives | None, *, overlaps: bool = False) -> None:
        """comm: the ranks' collectives; None for one rank alone. overlaps: the sum of an input's gradient runs while
        weights' gradients are computed (``overlap.py``).
        """
        self._comm, self.overlaps = comm, overlaps and comm is not None
        self.rank, self.n_ranks = (0, 1) if comm is None else (comm.rank, comm.world_size)
        # There may be several, because an adapter's factors enter between the layers that share an input. The output of
        # a layer may never leave through this object, because its row layer is in the next stage of a pipeline or was
        # made by hand. Then the backward forgets the input, and MOST_ENTERED limits forwards without a backward.
        self._entered: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._n_entered = 0
        self._columns: tuple[torch.Tensor, int, ColumnEntry] | None = None
        self._copies: dict[tuple[int, ...], Collectives] = {}

    @property
    def comm(self) -> Collectives:
        """The ranks' collectives. Raises StateError for one rank alone, because it sends nothing."""
        if self._comm is None:
            raise StateError("one rank alone has no group", where="TensorRanks.comm", fix="give layers a process group")
        return self._comm

    def enter(self, x: torch.Tensor, label: str) -> torch.Tensor:
        """``x`` inside the region: the same values, and a gradient that is summed over ranks.

        Consecutive layers on the same tensor (query, key and value) get the same result, so that their gradients are
        added up before they are sent.
        """
        if self.n_ranks == 1 or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        for known, version, inside in self._entered.values():
            if known is x and version == x._version:
                return inside
        self._n_entered += 1
        inside = _Enter.apply(x, self, self._n_entered, label)
        self._entered[self._n_entered] = x, x._version, inside
        if len(self._entered) > MOST_ENTERED:
            del self._entered[next(iter(self._entered))]
        return inside

    def forget(self, number: int) -> None:
        """Called when the backward of a tensor has left the region: later layers on the same tensor enter anew."""
        self._entered.pop(number, None)

    def enter_columns(self, x: torch.Tensor, layers: Iterable[Columns], label: str) -> ColumnEntry | None:
        """``enter`` for column layers. Their weights' gradients are computed while the input's gradient is summed.
        layers: all layers that are expected to take ``x``. None where nothing will be sent.
        """
        if self.n_ranks == 1 or not (x.requires_grad and torch.is_grad_enabled()):
            return None
        known = self._columns
        if known is not None and known[0] is x and known[1] == x._version:
            return known[2]
        entry = ColumnEntry.enter(x, layers, self.comm, label)
        self._columns = (x, x._version, entry)
        return entry

    def leave(self, x: torch.Tensor, label: str) -> torch.Tensor:
        """The sum of ``x`` over all ranks, in the memory of ``x``. Every rank has the whole gradient of the sum."""
        self._entered, self._columns = {}, None
        if self.n_ranks == 1:
            return x
        return _Leave.apply(x.contiguous(), self, label)

    def gather(self, x: torch.Tensor, sizes: list[int], label: str) -> torch.Tensor:
        """The ``x`` [..., sizes[rank]] of all ranks one after the other: [..., sum of sizes], the same on all ranks."""
        self._entered, self._columns = {}, None
        return x if self.n_ranks == 1 else _GatherColumns.apply(x, sizes, self, label)

    def split(self, x: torch.Tensor, begin: int, end: int, label: str) -> torch.Tensor:
        """This rank's ``x[..., begin:end]``. ``x`` is whole on all ranks, and so is its gradient."""
        return self.enter(x, label)[..., begin:end]

    def copies(self, ranks: tuple[int, ...]) -> Collectives:
        """The collectives of some of the ranks, such as the holders of one key head."""
        if ranks == tuple(range(self.n_ranks)):
            return self.comm
        if ranks not in self._copies:
            members = [self.comm.global_ranks[rank] for rank in ranks]
            group = new_group_of(members, backend=dist.get_backend_config(self.comm.group))
            self._copies[ranks] = self.comm.part(group, TP)
        return self._copies[ranks]

    def sum_gradient(self, param: torch.nn.Parameter, ranks: tuple[int, ...], label: str) -> None:
        """From now on, sum the gradient of ``param`` over ``ranks`` before any other use of the gradient.

        ranks: the ranks that have the same elements and use them on different heads. An engine removes the hook
        (``tp_sum_hook``) and sums whole buckets instead: over ``tp_cut.copies``, or over all ranks for a whole
        parameter if ``tp_sum_gradients`` says that ranks use it on parts.
        """
        if len(ranks) == 1 or param.is_meta:
            return
        comm = self.copies(ranks)

        def add_up(grad: torch.Tensor) -> torch.Tensor:
            return summed(grad, comm, f"gradient of {label}")

        trains = param.requires_grad
        param.requires_grad_(True)  # registering a hook requires it, and a frozen parameter may be trained later
        param.tp_sum_hook = param.register_hook(add_up)
        param.tp_sum_gradients = getattr(param, "tp_cut", None) is None
        param.requires_grad_(trains)


def summed(x: torch.Tensor, comm: Collectives, label: str) -> torch.Tensor:
    """A new tensor with the sum of ``x`` over all ranks, in rank order, so with the same bits on each rank."""
    return exchange.wait(exchange.sum_start(x.detach(), comm, label))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks, number: int, label: str) -> torch.Tensor:
        ctx.held = ranks, number, label
        return x.view_as(x)

    @staticmethod
    @first_derivative_only("a sum over tensor-parallel ranks")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ranks, number, label = ctx.held
        ranks.forget(number)
        return summed(grad, ranks.comm, f"input gradient of {label}"), None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks, label: str) -> torch.Tensor:
        exchange.sum_(x, ranks.comm, f"output of {label}")
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @first_derivative_only("a sum over tensor-parallel ranks")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], ranks: TensorRanks, label: str) -> torch.Tensor:
        ctx.begin, ctx.size = sum(sizes[: ranks.rank]), sizes[ranks.rank]
        last = x.dim() - 1
        of_ranks = exchange.gather_start(x, sizes, last, ranks.comm, f"output of {label}")
        return exchange.gathered(exchange.wait(of_ranks), sizes, last)

    @staticmethod
    @first_derivative_only("a gather over tensor-parallel ranks")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # Every rank continues with the same whole tensor, so each rank has its whole gradient.
        return grad.narrow(-1, ctx.begin, ctx.size).contiguous(), None, None, None
