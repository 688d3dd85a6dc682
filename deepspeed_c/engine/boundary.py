"""The place where a user's own ``loss.backward()`` enters an engine's graph. Here the engine notices that a pass has
begun, and applies the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["is_boundary_node", "scale_outputs", "watch_outputs"]


def _in_graph(value: Any) -> bool:
    return torch.is_tensor(value) and value.requires_grad and value.grad_fn is not None


def watch_outputs(outputs: Any, on_enter: Callable[[], Any]) -> None:
    """Calls ``on_enter`` whenever a backward pass reaches any of ``outputs`` (nested lists, dicts and registered
    classes)."""

    def hook(grad: torch.Tensor) -> None:
        on_enter()

    for value in tree_flatten(outputs)[0]:
        if _in_graph(value):
            value.register_hook(hook)


class _Scale(torch.autograd.Function):
    """Identity over all outputs as one graph node. With one node, an output that another output is computed from is not
    scaled twice."""

    @staticmethod
    def forward(ctx, on_enter: Callable[[], float], *tensors: torch.Tensor):
        ctx.on_enter = on_enter
        ctx.set_materialize_grads(False)
        # Torch forbids changing such views in place, but callers change a loss so (``loss *= n``). A copy of one number
        # costs nothing.
        return tuple(t.clone() if t.numel() == 1 else t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None):
        factor = ctx.on_enter()
        return None, *(g if g is None or factor == 1.0 else g * factor for g in grads)


def is_boundary_node(node: Any) -> bool:
    """Whether ``scale_outputs`` has put this node into a graph."""
    return isinstance(node, _Scale._backward_cls)


def scale_outputs(outputs: Any, on_enter: Callable[[], float]) -> Any:
    """Returns ``outputs``, changed so that a backward pass through them multiplies gradients by the result of
    ``on_enter``."""
    leaves, spec = tree_flatten(outputs)
    at = [i for i, value in enumerate(leaves) if _in_graph(value)]
    if not at:
        return outputs
    for i, value in zip(at, _Scale.apply(on_enter, *(leaves[i] for i in at))):
        leaves[i] = value
    return tree_unflatten(leaves, spec)
