"""Questions about a traced graph: which values are a weight's memory, and which nodes read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

__all__ = ["copy_of", "derived_from", "is_view", "readers_of", "results_of"]


def copy_of(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph of the same nodes with the same names and notes (``meta``)."""
    found = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        copies[node] = found.node_copy(node, copies.__getitem__)
    return found


def is_view(node: Node) -> bool:
    """Whether the result of ``node`` may share memory with an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def readers_of(weights: Iterable[Node]) -> set[Node]:
    """The nodes that read the memory of ``weights``, directly or through views, and these views."""
    found: set[Node] = set()
    todo = list(weights)
    while todo:
        for user in todo.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                if is_view(user):
                    todo.append(user)
    return found


def results_of(readers: set[Node]) -> Iterator[Node]:
    """The results of ``readers`` that are tensors of their own. A result that only other readers use is left out: it is
    computed with them."""
    for node in sorted(readers):
        if is_view(node):
            continue
        parts = list(node.users) if isinstance(node.meta.get("val"), (tuple, list)) else [node]
        for part in parts:
            if isinstance(part.meta.get("val"), torch.Tensor) and not (part.users and readers.issuperset(part.users)):
                yield part


_CHANGES_OF_FORM = {
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten.clone.default,
}


def derived_from(node: Node, weights: set[Node]) -> list[Node] | None:
    """The nodes, in their order, that compute ``node`` from one of ``weights`` alone, by views, casts and copies. None
    if it is computed in another way."""
    chain: list[Node] = []
    while node not in weights:
        inputs = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
        if node.op != "call_function" or len(inputs) != 1 or not (is_view(node) or node.target in _CHANGES_OF_FORM):
            return None
        chain.append(node)
        node = inputs[0]
    return chain[::-1]
