"""Collectives of the cut region that run while other work is computed, and tokens that are divided over ranks outside
the region.

[Note: gradients under way] Several column layers may take one tensor. Their backward computes the gradient of the
tensor, which is summed over ranks, and the gradients of the layers' weights. Autograd runs ready nodes in the reverse
order of their recording. So they are recorded in this order: ``_Wait`` on the tensor, one ``_Weights`` for each layer,
``_Start``, the layers' products. The backward then computes the tensor's gradient (through all layers), starts its sum
(``_Start``), computes the weights' gradients meanwhile (``_Weights``), and waits (``_Wait``). Between ``_Start`` and
``_Wait`` the gradient is in a ``_Box``, and must not be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import StateError
from deepspeed_c.inject import exchange
from deepspeed_c.inject.swap import swap_forward
from deepspeed_c.ops.first_derivative import first_derivative_only

__all__ = ["LOOKS", "Border", "ColumnEntry", "TokenStream", "UnderWay"]


class Columns(Protocol):
    """The members of a column layer that its product needs."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    is_transposed: bool
    label: str

    @property
    def can_defer(self) -> bool:
        """Whether the weight's gradient may be computed separately: the product must be the usual one, with the whole
        weight.
        """
        ...


class _Box:
    """Holds a gradient between ``_Start`` and ``_Wait``."""

    def __init__(self, comm: Collectives, label: str) -> None:
        self.comm, self.label = comm, label
        self.under_way: list[torch.Tensor] = []

    def start_sum(self, grad: torch.Tensor) -> None:
        self.under_way.append(exchange.sum_start(grad, self.comm, f"input gradient of {self.label}"))

    def start_scatter(self, grad: torch.Tensor, sizes: Sequence[int], dim: int) -> None:
        label = f"input gradient of {self.label}"
        total = exchange.scatter_start(grad, sizes, dim, self.comm, label)
        self.under_way.append(total)

    def take(self, grad: torch.Tensor) -> torch.Tensor:
        """Replace ``grad`` by the result of the collective started last, if there is one."""
        if not self.under_way:
            return grad
        total = exchange.wait(self.under_way.pop())
        # The tokens of a rank are padded to the largest number of tokens on any rank.
        return total if total.shape == grad.shape else total.narrow(1, 0, grad.shape[1])


class _Wait(torch.autograd.Function):
    """Splits a tensor into parts along ``dim``. The backward waits for the parts' gradients, which may be under way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], dim: int, boxes: list[_Box]) -> tuple[torch.Tensor, ...]:
        ctx.held = dim, boxes
        return tuple(part.view_as(part) for part in x.split(sizes, dim))

    @staticmethod
    @first_derivative_only("what tensor-parallel ranks send (tp_overlap_comm)")
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        dim, boxes = ctx.held
        # Collectives for the gradient of the last part were started first.
        parts = [box.take(grad) for box, grad in zip(reversed(boxes), reversed(grads), strict=True)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts[::-1], dim=dim)), None, None, None


def _placeholder(grad: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return grad.new_zeros(()).expand(shape)


class _Start(torch.autograd.Function):
    """Passes a tensor into the region with the same values. The backward starts the sum of its gradients over ranks,
    and leaves the sum in the box.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, box: _Box) -> torch.Tensor:
        ctx.held = box
        return x.view_as(x)

    @staticmethod
    @first_derivative_only("what tensor-parallel ranks send (tp_overlap_comm)")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.held.start_sum(grad)
        return _placeholder(grad, grad.shape), None


class _GatherStream(torch.autograd.Function):
    """Passes all ranks' tokens into the region (``of_ranks`` is under way). The backward starts the sum of their
    gradients over ranks, and leaves this rank's part of the sum in the box.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, of_ranks: torch.Tensor, sizes: list[int], dim: int, box: _Box
    ) -> torch.Tensor:
        ctx.held = sizes, dim, box, x.shape
        return exchange.gathered(exchange.wait(of_ranks), sizes, dim)

    @staticmethod
    @first_derivative_only("what tensor-parallel ranks send (tp_overlap_comm)")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes, dim, box, shape = ctx.held
        box.start_scatter(grad, sizes, dim)
        return _placeholder(grad, shape), None, None, None, None


class _LeaveLater(torch.autograd.Function):
    """Replaces ``x`` by the sum of ``x`` over all ranks. The sum is there after ``exchange.wait``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, label: str) -> torch.Tensor:
        exchange.sum_(x, comm, f"output of {label}", waits=False)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @first_derivative_only("what tensor-parallel ranks send (tp_overlap_comm)")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _ScatterTokens(torch.autograd.Function):
    """This rank's tokens of the sum of ``x`` over all ranks, padded to the largest number of tokens on any rank. They
    are there after ``exchange.wait``.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], dim: int, comm: Collectives, label: str) -> torch.Tensor:
        ctx.held = sizes, dim, comm, f"output gradient of {label}"
        return exchange.scatter_start(x, sizes, dim, comm, f"output of {label}")

    @staticmethod
    @first_derivative_only("what tensor-parallel ranks send (tp_overlap_comm)")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes, dim, comm, label = ctx.held
        mine = grad.narrow(dim, 0, sizes[comm.rank])
        of_ranks = exchange.gather_start(mine, sizes, dim, comm, label)
        return exchange.gathered(exchange.wait(of_ranks), sizes, dim), None, None, None, None


def _is_here(param: torch.nn.Parameter) -> bool:
    """Whether the values of ``param`` are here. If weights are sharded, they are here while the weight is gathered."""
    status = getattr(param, "ds_status", None)
    return status is None or status.name == "AVAILABLE"


class _Factors:
    """The factors of the gradient of one layer's weight. The layer's backward stores them for ``_Weights``."""

    def __init__(self) -> None:
        self.products: list[tuple[torch.Tensor, torch.Tensor]] = []


class _Weights(torch.autograd.Function):
    """Stands for weight and bias in the graph. Its value is an empty tensor, and its backward computes their gradients."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, note: _Factors) -> torch.Tensor:
        ctx.held = note, weight.dtype
        return weight.new_empty(0)

    @staticmethod
    @first_derivative_only("what tensor-parallel ranks send (tp_overlap_comm)")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_weight: torch.Tensor | None = None
        of_bias: torch.Tensor | None = None
        note, dtype = ctx.held
        for dy, x in note.products:
            rows = dy.reshape(-1, dy.shape[-1])
            if ctx.needs_input_grad[0]:
                product = rows.t() @ x.reshape(-1, x.shape[-1]).to(dy.dtype)
                of_weight = product if of_weight is None else of_weight + product
            if ctx.needs_input_grad[1]:
                of_bias = rows.sum(0) if of_bias is None else of_bias + rows.sum(0)
        note.products.clear()
        cast = [None if found is None else found.to(dtype) for found in (of_weight, of_bias)]
        return cast[0], cast[1], None


class _Product(torch.autograd.Function):
    """x W + b. If there is a ``note``, the backward stores the factors of the weight's gradient in it, for
    ``_Weights``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weights: torch.Tensor | None,
        note: _Factors | None,
    ) -> torch.Tensor:
        ctx.held = note
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @first_derivative_only("what tensor-parallel ranks send (tp_overlap_comm)")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.held is not None:
            ctx.held.products.append((dy, x))
        dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None if ctx.held is None else dy.new_empty(0), None


class _Deferred(NamedTuple):
    weights: torch.Tensor
    note: _Factors


class ColumnEntry:
    """The entry of one tensor into the region, for all column layers that take it. See [Note: gradients under way]."""

    def __init__(self, layers: Iterable[Columns]) -> None:
        """layers: the expected layers. For other layers the weight's gradient is computed at once."""
        self._inside: torch.Tensor | None = None
        self._deferred: dict[Columns, _Deferred] = {}
        for layer in layers:
            if layer.can_defer and _is_here(layer.weight):
                self._defer(layer)

    def _defer(self, layer: Columns) -> _Deferred | None:
        params = [param for param in (layer.weight, layer.bias) if param is not None]
        if not any(param.requires_grad for param in params):
            return None
        note = _Factors()
        weight = layer.weight.t() if layer.is_transposed else layer.weight
        self._deferred[layer] = _Deferred(_Weights.apply(weight, layer.bias, note), note)
        return self._deferred[layer]

    def product(self, layer: Columns, x: torch.Tensor | None = None) -> torch.Tensor:
        """The product of ``layer``, [..., columns of this rank]. x: [..., in], inside the region; by default the tensor
        that entered.
        """
        x = self._inside if x is None else x
        weight = layer.weight.t() if layer.is_transposed else layer.weight
        deferred = self._deferred.get(layer) or self._defer(layer)
        return _Product.apply(x, weight, layer.bias, *(deferred or (None, None)))

    @classmethod
    def enter(cls, x: torch.Tensor, layers: Iterable[Columns], comm: Collectives, label: str) -> ColumnEntry:
        """Passes ``x``, which must require a gradient, into the region."""
        box = _Box(comm, label)
        (waited,) = _Wait.apply(x, [x.shape[0]], 0, [box])
        entry = cls(layers)
        entry._inside = _Start.apply(waited, box)
        return entry


LOOKS = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "grad_fn", "is_leaf")),
        torch.Tensor.is_floating_point,
        torch.Tensor.register_hook,
    ]
)
"""Attributes and methods that are valid before the collective on a tensor is over."""


class UnderWay(torch.Tensor):
    """A tensor whose collective is under way. Any use waits for the collective first, except a look at shape, dtype or
    device.
    """

    # ``of`` sets this attribute on each instance, because a tensor's constructor takes no such argument.
    dsc_finish: Callable[[torch.Tensor], torch.Tensor]
    dsc_finished: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, finish: Callable[[torch.Tensor], torch.Tensor]) -> UnderWay:
        """finish: called when ``tensor`` may be read. It returns the tensor to continue with."""
        made = tensor.as_subclass(cls)
        with torch._C.DisableTorchFunctionSubclass():
            made.dsc_finish, made.dsc_finished = finish, None
        return made

    def finished(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if self.dsc_finished is None:
                plain = self.as_subclass(torch.Tensor)
                self.dsc_finished = self.dsc_finish(exchange.wait(plain))
            return self.dsc_finished

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in LOOKS:
            args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.finished, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class TokenStream:
    """The tokens between a model's layers. Outside the cut regions, each rank has its run of [batch, tokens, width].

    The stream begins before the first layer and ends after the last norm. It exists in training only.
    """

    def __init__(self, comm: Collectives, region: Any) -> None:
        """region: separate random numbers for this rank (``DropoutRegion``); None where the layers have no dropout."""
        self.comm, self._region = comm, region
        self._sizes: list[int] = []

    def begin(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """A hook before the first layer, with keyword arguments: takes this rank's tokens."""
        if not module.training:
            return None
        x = args[0] if args else kwargs["hidden_states"]
        self._sizes = exchange.token_sizes(x.shape[1], self.comm.world_size)
        mine = _TakeTokens.apply(x, self._sizes, self.comm)
        if self._region is not None:
            self._region.enter(x.device, ends=torch._C._current_graph_task_id() == -1)
        return ((mine, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": mine})

    def end(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        """A hook after the last norm: gathers the tokens of all ranks."""
        if not module.training:
            return None
        if self._region is not None:
            self._region.leave(output.device)
        return _AllTokens.apply(output, self.sizes_of(output, "the last norm"), self.comm)

    def sizes_of(self, x: torch.Tensor, label: str) -> list[int]:
        """Number of tokens of each rank. ``x`` has this rank's tokens. Raises StateError if their number has changed
        since ``begin``.
        """
        mine = x.shape[1]
        if not self._sizes or self._sizes[self.comm.rank] != mine:
            raise StateError(
                f"{mine} tokens are here, and the last forward began with {self._sizes}",
                where=label,
                fix="run forward and backward of a batch before that of one with another number of tokens where layers"
                " are computed again, or set tensor_parallel.sequence_parallel_norms to false",
            )
        return self._sizes


class _TakeTokens(torch.autograd.Function):
    """This rank's run of tokens, taken from tokens that all ranks have. The backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], comm: Collectives) -> torch.Tensor:
        ctx.held = sizes, comm
        return x.split(sizes, 1)[comm.rank].contiguous()

    @staticmethod
    @first_derivative_only("what tensor-parallel ranks send (tp_overlap_comm)")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sizes, comm = ctx.held
        of_ranks = exchange.gather_start(grad, sizes, 1, comm, "gradient of the first layer's tokens")
        return exchange.gathered(exchange.wait(of_ranks), sizes, 1), None, None


class _AllTokens(torch.autograd.Function):
    """Gathers all ranks' tokens. They and their gradient are the same on all ranks, so each rank takes its part of the
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], comm: Collectives) -> torch.Tensor:
        ctx.held = sizes, comm.rank
        of_ranks = exchange.gather_start(x, sizes, 1, comm, "tokens behind the last norm")
        return exchange.gathered(exchange.wait(of_ranks), sizes, 1)

    @staticmethod
    @first_derivative_only("what tensor-parallel ranks send (tp_overlap_comm)")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sizes, rank = ctx.held
        return grad.split(sizes, 1)[rank].contiguous(), None, None


class _HalfCache:
    """Keys and values of half a batch, which an attention puts into an empty cache (``real``)."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.given: tuple[torch.Tensor, torch.Tensor, tuple[Any, ...], dict[str, Any]] | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given = keys, values, args, kwargs
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _Part(NamedTuple):
    """One half of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caches: list[_HalfCache]


class Border:
    """The cut region of one module. It begins at the module's input ``hidden_states`` [batch, tokens, width] and ends
    at the output of the row layer. That output is the module's output, or the first item of it.

    With overlap the region runs in two halves, so that the output of the first half is summed while the second half is
    computed. They are halves of the batch. If there is one sample, and the module treats tokens one by one, they are
    halves of the tokens.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        columns: Sequence[Columns],
        comm: Collectives,
        label: str,
        *,
        overlaps: bool,
        stream: TokenStream | None,
        is_attention: bool,
    ) -> None:
        self._module, self._columns, self._comm, self._label = module, columns, comm, label
        self._overlaps, self._stream, self._is_attention = overlaps, stream, is_attention
        self._run = module.forward
        self._entry: ColumnEntry | None = None
        self._sizes: list[int] | None = None
        self._is_open, self._is_half = False, False
        swap_forward(module, self)

    @property
    def is_open(self) -> bool:
        """Whether the region is being computed, so that inputs of its layers are inside it."""
        return self._is_open

    def product(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """The product of the column layer ``layer``; None if the layer has to compute it itself."""
        if self._entry is None or not layer.can_defer:
            return None
        return self._entry.product(layer, x)

    def leave(self, y: torch.Tensor, bias: torch.Tensor | None, label: str) -> torch.Tensor:
        """The output of the row layer. y: the product of this rank's rows, [batch, tokens, width]."""
        comm, sizes = self._comm, self._sizes
        if sizes is None:
            started = _LeaveLater.apply(y.contiguous(), comm, label)
        else:
            started = _ScatterTokens.apply(y, sizes, 1, comm, label)

        def finish(total: torch.Tensor) -> torch.Tensor:
            if sizes is not None and total.shape[1] != sizes[comm.rank]:
                total = total.narrow(1, 0, sizes[comm.rank])
            return total if bias is None else total + bias

        return UnderWay.of(started, finish) if self._is_half else finish(exchange.wait(started))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        sizes = None
        if self._stream is not None and self._module.training:
            sizes = self._stream.sizes_of(x, self._label)
        dim, n_first = self._halves(x, args, kwargs, sizes)
        if not n_first:
            return self._run_parts([_Part(args, kwargs, [])], x, 0, [x.shape[0]], [sizes])
        parts = []
        for begin, end in ((0, n_first), (n_first, x.shape[dim])):
            caches: list[_HalfCache] = []
            given = _part_of((args, kwargs), begin, end, x.shape[0], caches) if dim == 0 else (args, kwargs)
            parts.append(_Part(*given, caches))
        of_halves = [sizes, sizes]
        if sizes is not None and dim == 1:
            of_halves = [[math.ceil(size / 2) for size in sizes], [size // 2 for size in sizes]]
        return self._run_parts(parts, x, dim, [n_first, x.shape[dim] - n_first], of_halves)

    def _run_parts(
        self, parts: list[_Part], x: torch.Tensor, dim: int, lengths: list[int], sizes: list[list[int] | None]
    ) -> Any:
        comm, outputs = self._comm, []
        boxes = [_Box(comm, self._label) for _ in parts]
        mine = _Wait.apply(x, lengths, dim, boxes)
        under_way = [
            None
            if of_part is None
            else exchange.gather_start(own.detach(), of_part, 1, comm, f"input of {self._label}")
            for own, of_part in zip(mine, sizes, strict=True)
        ]
        for part, own, of_ranks, of_part, box in zip(parts, mine, under_way, sizes, boxes, strict=True):
            entry = ColumnEntry(self._columns) if self._overlaps and torch.is_grad_enabled() else None
            if of_ranks is None:
                inside = _Start.apply(own, box)
            else:
                inside = _GatherStream.apply(own, of_ranks, of_part, 1, box)
            with self._opened(entry, of_part, is_half=len(parts) > 1):
                if part.args:
                    outputs.append(self._run(inside, *part.args[1:], **part.kwargs))
                else:
                    outputs.append(self._run(**{**part.kwargs, "hidden_states": inside}))
        if len(parts) == 1:
            return outputs[0]
        _fill_caches(parts)
        return _join(outputs, dim)

    @contextmanager
    def _opened(self, entry: ColumnEntry | None, sizes: list[int] | None, *, is_half: bool) -> Iterator[None]:
        self._is_open, self._entry, self._sizes, self._is_half = True, entry, sizes, is_half
        try:
            yield
        finally:
            self._is_open, self._entry, self._sizes, self._is_half = False, None, None, False

    def _halves(
        self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: list[int] | None
    ) -> tuple[int, int]:
        """(dimension, length of the first half), the same on all ranks. Length 0: the call is not divided."""
        if not self._overlaps or x.dim() != 3:
            return 0, 0
        others = [*args[1:], *kwargs.values()] if args else [v for k, v in kwargs.items() if k != "hidden_states"]
        if x.shape[0] > 1:
            if all(self._can_split(value, x.shape[0]) for value in others):
                return 0, math.ceil(x.shape[0] / 2)
        elif not self._is_attention and not any(isinstance(value, torch.Tensor) for value in others):
            n_tokens = x.shape[1] if sizes is None else min(sizes)
            if n_tokens > 1:
                return 1, math.ceil(x.shape[1] / 2)
        return 0, 0

    def _can_split(self, value: Any, n_samples: int) -> bool:
        """Whether it is known which part of an argument belongs to half of the batch."""
        if isinstance(value, torch.Tensor):
            if value.dim() < 2 or value.shape[0] == 1:
                return True
            # A tensor of two dimensions is [batch, tokens], or a table of positions with the same number of rows by
            # chance.
            is_table = value.dim() == 2 and (value.is_floating_point() or value.shape[0] == value.shape[1])
            return value.shape[0] == n_samples and not is_table
        if isinstance(value, (tuple, list)):
            return all(self._can_split(item, n_samples) for item in value)
        if _is_cache(value):
            return value.get_seq_length(getattr(self._module, "layer_idx", 0)) == 0
        return value is None or isinstance(value, (bool, int, float, str))


def _is_cache(value: Any) -> bool:
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def _part_of(value: Any, begin: int, end: int, n_samples: int, caches: list[_HalfCache]) -> Any:
    """The part of an argument that belongs to the samples [begin, end). A stand-in for each cache is appended to
    ``caches``, and has to be filled afterwards.
    """
    if isinstance(value, torch.Tensor):
        return value[begin:end] if value.dim() > 1 and value.shape[0] == n_samples else value
    if isinstance(value, (tuple, list)):
        return type(value)(_part_of(item, begin, end, n_samples, caches) for item in value)
    if isinstance(value, dict):
        return {name: _part_of(item, begin, end, n_samples, caches) for name, item in value.items()}
    if _is_cache(value):
        caches.append(_HalfCache(value))
        return caches[-1]
    return value


def _fill_caches(halves: Sequence[_Part]) -> None:
    for first, second in zip(halves[0].caches, halves[1].caches, strict=True):
        if first.given is not None and second.given is not None:
            keys, values = (torch.cat([first.given[i], second.given[i]], dim=0) for i in (0, 1))
            first.real.update(keys, values, *first.given[2], **first.given[3])


def _join(outputs: Sequence[Any], dim: int) -> Any:
    """Joins the outputs of the halves. The result has the structure of the first output."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs), dim=dim)
    if isinstance(first, (tuple, list)):
        return type(first)(_join(items, dim) for items in zip(*outputs, strict=True))
    return first
