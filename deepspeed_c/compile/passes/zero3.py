"""``zero3_compile``: each gather unit is gathered before reads of its weights in a graph and released after them, and
each gradient is reduced as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from deepspeed_c.compile.graph import is_view, readers_of, results_of
from deepspeed_c.compile.operators import ZERO_GATHER, ZERO_REDUCE, ZERO_RELEASE, ZERO_WAIT

__all__ = ["add_gathers", "add_reductions"]


def add_gathers(graph: Graph, units: Mapping[int, Mapping[Node, int]], token: Node, host: int) -> None:
    """units: by gather unit, the placeholders of its weights in this graph, with the place of each parameter in the
    unit. token: the tensor that keeps the operators in order. host: number of the operators' host."""
    for unit, readers in _uses(graph, units):
        order = {node: i for i, node in enumerate(graph.nodes)}
        nodes, places = list(units[unit]), list(units[unit].values())
        with graph.inserting_before(min(readers, key=order.__getitem__)):
            graph.call_function(ZERO_GATHER, (nodes, token, host, unit, places))
            graph.call_function(ZERO_WAIT, (nodes, token, host, unit, places))
        results = list(results_of(readers))
        with graph.inserting_after(max((*readers, *results), key=order.__getitem__)):
            graph.call_function(ZERO_RELEASE, (nodes, results, token, host, unit, places))


def _uses(graph: Graph, units: Mapping[int, Mapping[Node, int]]) -> list[tuple[int, set[Node]]]:
    """(gather unit, the nodes that read it) of each use, in the order of the first readers. Reads of a unit are
    several uses if other units are read between them. So an embedding that is the head too is gathered twice, as by the
    hooks of modules."""
    units_of: dict[Node, set[int]] = {}
    views: dict[int, list[set[Node]]] = {}
    for unit, weights in units.items():
        views[unit] = []
        for weight in weights:
            for user in weight.users:
                # A view and its readers are one reader: the view lives between them.
                readers = ({user} | readers_of([user]) if is_view(user) else {user}) if user.op != "output" else set()
                if readers:
                    views[unit].append(readers)
                for reader in readers:
                    units_of.setdefault(reader, set()).add(unit)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: list[tuple[int, set[Node]]] = []
    for unit, parts in views.items():
        parts.sort(key=lambda part: min(map(order.__getitem__, part)))
        uses: list[set[Node]] = []
        for part in parts:
            if uses:
                last, first = max(map(order.__getitem__, uses[-1])), min(map(order.__getitem__, part))
                others = (n for n, read in units_of.items() if last < order[n] < first and unit not in read)
                if next(others, None) is None:
                    uses[-1] |= part
                    continue
            uses.append(set(part))
        found += [(unit, use) for use in uses]
    return sorted(found, key=lambda use: min(map(order.__getitem__, use[1])))


def add_reductions(graph: Graph, slots: Sequence[int | None], token: Node, host: int) -> None:
    """slots: for each output of a backward graph, the number of the parameter whose gradient it is; None for other
    outputs."""
    output = graph.output_node()
    values = list(output.args[0])
    for i, slot in enumerate(slots):
        if slot is not None and values[i] is not None:
            with graph.inserting_after(values[i]):
                graph.call_function(ZERO_REDUCE, (values[i], token, host, slot))
            values[i] = None
    output.update_arg(0, tuple(values))
