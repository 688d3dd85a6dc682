"""A layer as one operator of the graph. The operator's backward runs the layer again and then an inner backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from deepspeed_c.errors import BackwardError, RecomputeError
from deepspeed_c.recompute.compare import Outputs, Trace
from deepspeed_c.recompute.conditions import Conditions
from deepspeed_c.recompute.nests import Arguments
from deepspeed_c.recompute.once import OnceResults

__all__ = ["ReentrantCall"]


class ReentrantCall:
    """One call of a layer, and those of its results that are not tensors."""

    def __init__(
        self,
        function: Callable,
        arguments: Arguments,
        conditions: Conditions,
        label: str,
        trace: Trace | None = None,
        looked_at: Outputs | None = None,
    ) -> None:
        self._looked_at = looked_at
        self._function, self._arguments, self._conditions, self._label = function, arguments, conditions, label
        self._trace = trace
        self._once = OnceResults(label)
        self._leaves: list[Any] = []
        self._places: list[tuple[int, int]] = []
        self._tree: Any = None
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []

    def run(self, tensors: list[torch.Tensor], *, is_trained: bool) -> Any:
        """The layer's outputs, in a graph of one node.

        is_trained: the layer may have parameters that require a gradient, even if none of its inputs does.
        """
        outputs = _Reentrant.apply(self, torch.empty(0, requires_grad=is_trained), *tensors)
        for i, place in self._places:
            self._leaves[i] = outputs[place]
        leaves, self._leaves = self._leaves, []
        return tree_unflatten(leaves, self._tree)

    def forward(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._arguments.with_tensors(tensors)
        with nullcontext() if self._trace is None else self._trace.recording(), self._once.recording():
            self._leaves, self._tree = tree_flatten(self._function(*args, **kwargs))
        outputs, self._places = _tensors_of(self._leaves)
        if self._looked_at is not None:
            self._looked_at.note(outputs)
        self._shapes = [(output.shape, output.dtype) for output in outputs]
        self._leaves = [None if torch.is_tensor(leaf) else leaf for leaf in self._leaves]
        return tuple(outputs)

    def overwritten(self, error: RuntimeError) -> RecomputeError:
        return RecomputeError(
            f"an input is not what it was: {error}",
            where=f"recomputation of {self._label}",
            fix="leave a checkpointed layer's inputs as they are (x + 1, not x.add_(1)), or pass it a clone",
        )

    def backward(self, saved: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor | None, ...]) -> list[Any]:
        """Gradients of the inputs. Gradients of parameters are added to the parameters during the inner pass."""
        if not torch.autograd._is_checkpoint_valid():
            raise BackwardError(
                "a reentrant checkpoint runs backward() within the backward, which autograd.grad, and"
                " backward(inputs=...), cannot leave",
                where=f"recomputation of {self._label}",
                fix='use the default flavour: "use_reentrant": false, or non_reentrant_checkpoint',
            )
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in saved]
        args, kwargs = self._arguments.with_tensors(inputs)
        trace = nullcontext() if self._trace is None else self._trace.repeating()
        once = self._once.repeating()
        with self._conditions.replayed(), torch.enable_grad(), saved_tensors_hooks(_hold, _give_back), trace, once:
            outputs = _tensors_of(tree_flatten(self._function(*args, **kwargs))[0])[0]
        shapes = [(output.shape, output.dtype) for output in outputs]
        if shapes != self._shapes:
            raise RecomputeError(
                f"gave {_words(self._shapes)} in forward and {_words(shapes)} when it was run again",
                where=f"recomputation of {self._label}",
                fix="let it do the same for the same inputs, whatever has run in between (a counter, a cache, a mode?)",
            )
        looked_at, self._looked_at = self._looked_at, None
        if looked_at is not None:
            looked_at.compare(outputs)
        wanted = [(o, g) for o, g in zip(outputs, grads) if g is not None and o.requires_grad]
        if wanted:
            torch.autograd.backward([o for o, _ in wanted], [g for _, g in wanted])
        return [tensor.grad for tensor in inputs]


def _hold(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Keeps an alias of the values. A weight itself may be released before its gradient is computed."""
    return tensor.detach(), tensor._version


def _give_back(held: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = held
    if tensor._version != version:
        raise RecomputeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs was overwritten: version"
            f" {tensor._version}, expected {version}",
            where="recomputation",
            fix="do not change tensors in place that operators before have used (x + 1, not x.add_(1))",
        )
    return tensor


def _tensors_of(leaves: list[Any]) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """(the tensors among ``leaves``, each once; pairs of a leaf's index and its tensor's index)"""
    tensors: list[torch.Tensor] = []
    places: list[tuple[int, int]] = []
    known: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if torch.is_tensor(leaf):
            place = known.setdefault(id(leaf), len(tensors))
            if place == len(tensors):
                tensors.append(leaf)
            places.append((i, place))
    return tensors, places


def _words(shapes: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in shapes) or "nothing"


class _Reentrant(torch.autograd.Function):
    call: ReentrantCall
    """The ``ReentrantCall`` of each context."""

    @staticmethod
    def forward(ctx: Any, call: ReentrantCall, _: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.forward(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace" in str(error):
                raise ctx.call.overwritten(error) from error
            raise
        return (None, None, *ctx.call.backward(saved, grads))
