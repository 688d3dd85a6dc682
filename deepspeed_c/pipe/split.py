"""A backward in two halves: first the gradients of a stage's inputs, later the gradients of its weights. No operation
is computed twice.

Zero-bubble schedules (arXiv 2401.10241) send the result of the first half at once and use the second half to fill idle
time. Both halves are runs of autograd over the same graph. The first half goes only to nodes that lead to inputs. If
such a node also leads to a weight (the product of a linear layer, for example), the gradient at the node is kept. The
second half starts at these nodes and goes only to the weights. So each operation runs once, with the numbers of a whole
backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["SplitBackward", "bytes_between_halves"]

# Nodes that run a backward of their own. Parameters below them are not in the graph. The first name is that of the
# classes of torch, DeepSpeed and Megatron, the second that of ours.
_REENTRANT = ("CheckpointFunctionBackward", "_ReentrantBackward")


class SplitBackward:
    """The backward of one stage for one micro-batch. It goes from ``roots`` (edges of outputs), with their gradients
    ``grads``, to ``inputs`` (leaves) and the parameters.

    ``input_half`` returns the gradients of inputs (None where there is none). ``weight_half`` puts the gradients of
    parameters where autograd puts them. The backward cannot be split if a parameter is used at several depths, or if a
    layer recomputes itself in a backward of its own (``use_reentrant=True``): ``input_half`` then does everything,
    ``is_whole`` is True, and ``weight_half`` does nothing.
    """

    def __init__(
        self, roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self._roots, self._grads, self._inputs = list(roots), list(grads), list(inputs)
        self.is_whole = False
        # Where the second half starts: (a node, the gradients that arrived there, parameters that only it leads to).
        self._starts: list[tuple[Node, list[torch.Tensor | None], list[torch.Tensor]]] = []
        self._apart: list[tuple[GradientEdge, torch.Tensor]] = []

    def input_half(self) -> list[torch.Tensor | None]:
        """Compute the gradients of the inputs."""
        order = _children_first(root.node for root in self._roots)
        frontier, on_path = _frontier(order, [root.node for root in self._roots], self._inputs)
        self.is_whole = _is_whole(order, frontier)
        if self.is_whole:
            torch.autograd.backward(self._roots, self._grads)
            given = [tensor.grad for tensor in self._inputs]
            self._forget()
            return given
        hooks = []
        for node, found in frontier:
            if node in on_path:
                start: tuple[Node, list[torch.Tensor | None], list[torch.Tensor]] = node, [], found
                self._starts.append(start)
                hooks.append(node.register_prehook(partial(_note, start[1])))
        pairs = list(zip(self._roots, self._grads, strict=True))
        # Roots that lead to no input belong wholly to the second half.
        self._apart = [(root, grad) for root, grad in pairs if root.node not in on_path]
        through = [(root, grad) for root, grad in pairs if root.node in on_path]
        given = [None] * len(self._inputs)
        if through:
            roots, grads = zip(*through, strict=True)
            given = list(torch.autograd.grad(roots, self._inputs, grads, retain_graph=True, allow_unused=True))
        for hook in hooks:
            hook.remove()
        return given

    def weight_half(self) -> None:
        """Compute the gradients of the parameters. The graph is freed."""
        if self._apart:
            roots, grads = zip(*self._apart, strict=True)
            torch.autograd.backward(roots, grads)
        for node, found, params in self._starts:
            edges = [(GradientEdge(node, i), grad) for i, grad in enumerate(found) if grad is not None]
            if edges:
                torch.autograd.backward([edge for edge, _ in edges], [grad for _, grad in edges], inputs=params)
        self._forget()

    def _forget(self) -> None:
        self._roots, self._grads, self._inputs, self._starts, self._apart = [], [], [], [], []


def bytes_between_halves(roots: Sequence[Node], inputs: Sequence[torch.Tensor]) -> int | None:
    """Bytes of the gradients that the first half keeps for the second one; None if it does the whole backward."""
    order = _children_first(roots)
    frontier, on_path = _frontier(order, roots, inputs)
    if _is_whole(order, frontier):
        return None
    kept = [metadata for node, _ in frontier if node in on_path for metadata in node._input_metadata]
    return sum(torch.Size(metadata.shape).numel() * metadata.dtype.itemsize for metadata in kept)


def _is_whole(order: list[Node], frontier: list[tuple[Node, list[torch.Tensor]]]) -> bool:
    """Whether a backward over the nodes of ``order`` cannot be split."""
    if any(type(node).__name__ in _REENTRANT for node in order):
        return True
    params = [param for _, found in frontier for param in found]
    return len({id(param) for param in params}) < len(params)


def _note(kept: list[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> None:
    kept[:] = grads


def _frontier(
    order: list[Node], roots: Iterable[Node], inputs: Sequence[torch.Tensor]
) -> tuple[list[tuple[Node, list[torch.Tensor]]], set[Node]]:
    """Returns ([(node, parameters below the node)], the nodes that lead to inputs). A listed node leads to inputs, or
    is a root that does not. Its parameters are reached without passing another node that leads to inputs."""
    goals = {get_gradient_edge(tensor).node for tensor in inputs}
    on_path: set[Node] = set()
    below: dict[Node, dict[Any, torch.Tensor]] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        if node in goals or any(child in on_path for child in children):
            on_path.add(node)
        found: dict[Any, torch.Tensor] = {}
        for child in children:
            if child not in on_path:
                found.update(below[child])
        variable = getattr(node, "variable", None)
        if variable is not None and node not in goals:
            found[node] = variable
        below[node] = found
    starts = set(roots)
    return [
        (node, list(below[node].values())) for node in order if below[node] and (node in on_path or node in starts)
    ], on_path


def _children_first(roots: Iterable[Node]) -> list[Node]:
    """All nodes below ``roots``. Each node comes after the nodes to which it sends gradients."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order
