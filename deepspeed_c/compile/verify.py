"""The check of an edited graph: it is described by integers, and the C core finds the first rule that it breaks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from deepspeed_c import _C
from deepspeed_c.compile.graph import is_view, readers_of
from deepspeed_c.compile.operators import ZERO_GATHER, ZERO_REDUCE, ZERO_RELEASE, ZERO_WAIT

__all__ = ["broken_rule", "writers_of"]

_OF_UNITS = (_C.COMPILE_GATHER, _C.COMPILE_WAIT, _C.COMPILE_RELEASE)
_KINDS = {
    ZERO_GATHER: _C.COMPILE_GATHER,
    ZERO_WAIT: _C.COMPILE_WAIT,
    ZERO_RELEASE: _C.COMPILE_RELEASE,
    ZERO_REDUCE: _C.COMPILE_REDUCE,
}


def writers_of(units: Mapping[int, Mapping[Node, int]]) -> set[str]:
    """The names of the nodes that write to a weight, as a model does that changes one in its forward."""
    return {node.name for weights in units.values() for node in _writers(weights)}


def broken_rule(
    graph: Graph, units: Mapping[int, Mapping[Node, int]], slots: Sequence[int], may_write: Collection[str]
) -> str | None:
    """The first rule that ``graph`` breaks, with the node that breaks it; None if the graph is right.

    units: by gather unit, the placeholders of its weights. slots: the parameters whose gradients the graph has to
    reduce. may_write: ``writers_of`` the graph as it was traced. Each read of a weight has to lie between the wait for
    its unit and the unit's release, each gather needs a release, each gradient is reduced once, and no other node may
    write to a weight.
    """
    nodes = list(graph.nodes)
    unit_numbers, slot_numbers = sorted(units), sorted(set(slots))
    unit_index = {unit: i for i, unit in enumerate(unit_numbers)}
    slot_index = {slot: i for i, slot in enumerate(slot_numbers)}
    reads: dict[Node, set[int]] = {}
    writes: dict[Node, set[int]] = {}
    for unit, weights in units.items():
        for node in readers_of(weights):
            if node.target not in _KINDS:
                reads.setdefault(node, set()).add(unit_index[unit])
        for node in _writers(weights):
            if node.name not in may_write:
                writes.setdefault(node, set()).add(unit_index[unit])
    kinds, unit_of, slot_of = [], [], []
    for node in nodes:
        kind = _KINDS.get(node.target, _C.COMPILE_OUTPUT if node.op == "output" else _C.COMPILE_PLAIN)
        unit = node.args[-2] if kind in _OF_UNITS else None
        slot = node.args[-1] if kind == _C.COMPILE_REDUCE else None
        if unit not in (None, *unit_index) or slot not in (None, *slot_index):
            return f"node {node.name!r} names a unit or a parameter that the graph does not have"
        kinds.append(kind)
        unit_of.append(-1 if unit is None else unit_index[unit])
        slot_of.append(-1 if slot is None else slot_index[slot])
    rows = (*_rows(nodes, reads), *_rows(nodes, writes))
    rule, at, i = _C.compile_verify(kinds, unit_of, slot_of, *rows, len(unit_index), [True] * len(slot_index))
    if not rule:
        return None
    number = slot_numbers[i] if "reduce" in rule else unit_numbers[i]
    return f"{_C.compile_format((rule, at, number))} ({nodes[at].name})"


def _writers(weights: Iterable[Node]) -> list[Node]:
    """The nodes, other than our operators, that write to the memory of ``weights``."""
    readers = readers_of(weights)
    memory = {*weights, *filter(is_view, readers)}
    return [node for node in readers if node.target not in _KINDS and memory.intersection(_written_by(node))]


def _written_by(node: Node) -> list[Node]:
    """The arguments that an operator is declared to write to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    found: list[Node] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]
    return found


def _rows(nodes: Sequence[Node], of: Mapping[Node, set[int]]) -> tuple[list[int], list[int]]:
    """(start of each node's row, and the end of the last; all rows)"""
    starts, rows = [0], []
    for node in nodes:
        rows += sorted(of.get(node, ()))
        starts.append(len(rows))
    return starts, rows
