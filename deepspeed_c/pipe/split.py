"""A backward in two halves: first the gradients of a stage's inputs, later the gradients of its weights. No operation
is computed twice.

Zero-bubble schedules (arXiv 2401.10241) send the result of the first half at once and use the second half to fill idle
time. Both halves are runs of autograd over the same graph. The first half goes only to nodes that lead to inputs. If
such a node also leads to a weight (the product of a linear layer, for example), the gradient at the node is kept. The
second half starts at these nodes and goes only to the weights. So each operation runs once, with the numbers of a whole
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

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
        # Where the second half starts: (edges of a node with their gradients, edges of parameters behind this node
        # alone).
        self._starts: list[tuple[list[tuple[GradientEdge, torch.Tensor]], list[GradientEdge]]] = []
        self._apart: list[tuple[GradientEdge, torch.Tensor]] = []

    def input_half(self) -> list[torch.Tensor | None]:
        """Compute the gradients of the inputs."""
        found = _find_frontier(self._roots, self._inputs)
        self.is_whole = found.is_whole
        if self.is_whole:
            torch.autograd.backward(self._roots, self._grads)
            given = [tensor.grad for tensor in self._inputs]
            self._forget()
            return given
        pairs = list(zip(self._roots, self._grads, strict=True))
        # Roots that lead to no input belong wholly to the second half.
        self._apart = [(root, grad) for root, grad in pairs if root.node not in found.on_path]
        through = [(root, grad) for root, grad in pairs if root.node in found.on_path]
        if not through:
            return [None] * len(self._inputs)
        roots, grads = zip(*through, strict=True)
        starts = [(node, params) for node, params in found.nodes if node in found.on_path]
        edges = [GradientEdge(node, i) for node, _ in starts for i in range(found.n_slots.get(node, 1))]
        given = torch.autograd.grad(roots, [*self._inputs, *edges], grads, retain_graph=True, allow_unused=True)
        n = len(self._inputs)
        arrived: dict[Node, list[tuple[GradientEdge, torch.Tensor]]] = {}
        for edge, grad in zip(edges, given[n:], strict=True):
            if grad is not None:
                arrived.setdefault(edge.node, []).append((edge, grad))
        self._starts = [(arrived[node], params) for node, params in starts if node in arrived]
        return list(given[:n])

    def weight_half(self) -> None:
        """Compute the gradients of the parameters. The graph is freed."""
        if self._apart:
            roots, grads = zip(*self._apart, strict=True)
            torch.autograd.backward(roots, grads)
        for pairs, params in self._starts:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs], inputs=params)
        self._forget()

    def _forget(self) -> None:
        self._roots, self._grads, self._inputs, self._starts, self._apart = [], [], [], [], []


def bytes_between_halves(roots: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]) -> int | None:
    """Bytes of the gradients that the first half keeps for the second one; None if it does the whole backward."""
    found = _find_frontier(roots, inputs)
    if found.is_whole:
        return None
    kept = [metadata for node, _ in found.nodes if node in found.on_path for metadata in node._input_metadata]
    return sum(torch.Size(metadata.shape).numel() * metadata.dtype.itemsize for metadata in kept)


class _Frontier(NamedTuple):
    """Where the halves of a graph meet."""

    nodes: list[tuple[Node, list[GradientEdge]]]
    """(node, edges of the parameters below the node). A node leads to inputs, or is a root that does not. Its
    parameters are reached without passing another node that leads to inputs. A parameter itself may be released.
    """
    on_path: set[Node]
    """Nodes that lead to inputs."""
    n_slots: dict[Node, int]
    """Number of a node's outputs in the forward whose gradients may arrive, where it is not 1."""
    is_whole: bool
    """Whether a backward over the graph cannot be split."""


def _find_frontier(roots: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]) -> _Frontier:
    """Visit all nodes below ``roots``, each one after the nodes to which it sends gradients. inputs: leaves."""
    # An attribute of a node takes as long as the rest of a visit, so each is read once.
    goals = {id(tensor) for tensor in inputs}
    stack = [root.node for root in roots]
    starts = set(stack)
    frontier: list[tuple[Node, list[GradientEdge]]] = []
    on_path: set[Node] = set()
    # Edges of parameters by the parameters' ids.
    below: dict[Node, dict[int, GradientEdge]] = {}
    n_params, params = 0, set[int]()
    is_reentrant = False
    n_slots = {root.node: root.output_nr + 1 for root in sorted(roots, key=lambda root: root.output_nr)}
    children: dict[Node, list[Node]] = {}
    while stack:
        node = stack[-1]
        known = children.get(node)
        if known is None:
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            children[node] = known = [child for child, _ in edges]
            for child, slot in edges:
                if slot and slot >= n_slots.get(child, 1):
                    n_slots[child] = slot + 1
                if child not in children:
                    stack.append(child)
            if known:
                continue
        stack.pop()
        if node in below:  # several nodes lead to it
            continue
        found: dict[int, GradientEdge] = {}
        for child in known:
            if child in on_path:
                on_path.add(node)
            else:
                found.update(below[child])
        variable = None if known else getattr(node, "variable", None)
        if variable is not None:
            if id(variable) in goals:
                on_path.add(node)
            else:
                found[id(variable)] = GradientEdge(node, 0)
        below[node] = found
        is_reentrant = is_reentrant or type(node).__name__ in _REENTRANT
        if found and (node in on_path or node in starts):
            frontier.append((node, list(found.values())))
            n_params += len(found)
            params.update(found)
    return _Frontier(frontier, on_path, n_slots, is_reentrant or len(params) < n_params)
