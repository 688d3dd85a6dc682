"""The backend that an engine gives to ``torch.compile``: it edits the forward and the backward graph of each frame, and
hands them to the compiler that the user has named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import GraphModule, Node

from deepspeed_c.compile import torch_internals
from deepspeed_c.compile.graph import derived_from
from deepspeed_c.compile.passes.zero3 import add_gathers, add_reductions
from deepspeed_c.config.nearest import nearest
from deepspeed_c.errors import ConfigError

__all__ = ["GraphBackend", "GraphWeights"]


class GraphWeights(Protocol):
    """What the backend asks about the inputs of a graph, and where its graphs run."""

    number: int
    """By which operators find the engine."""

    def place_of(self, tensor: Any) -> tuple[int, int] | None:
        """(gather unit, place in it) of a sharded parameter; None for another input."""

    def slot_of(self, tensor: Any) -> int | None:
        """The number of a parameter whose gradients the graph reduces; None for another input."""

    def running_graph(self) -> AbstractContextManager[None]:
        """Surrounds each run of a forward graph."""


class _Compiled(NamedTuple):
    run: Callable[..., Any]
    slots: list[int | None]  # by input, the parameter whose gradient the graph reduces


class GraphBackend:
    """A backend of ``torch.compile``. ``name``: the compiler of the edited graphs. Raises ConfigError if it cannot take
    edited graphs."""

    def __init__(self, name: str, weights: GraphWeights, options: dict[str, Any] | None = None) -> None:
        if name not in torch_internals.BACKENDS:
            raise ConfigError(
                f"the backend {name!r} cannot take graphs with gathers and reductions in them",
                where="engine.compile(backend=...)",
                fix=f"pass {' or '.join(map(repr, nearest(str(name), torch_internals.BACKENDS) or torch_internals.BACKENDS))},"
                ' or set "compile": {"deepcompile": false}',
            )
        self._compile = torch_internals.BACKENDS[name]
        self._weights, self._options = weights, options or {}
        self.n_frames = 0

    def __call__(self, traced: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        self.n_frames += 1
        compiled = self._compile_frame(traced, inputs)

        def run_graph(*args: Any) -> Any:
            nonlocal compiled
            if [self._weights.slot_of(tensor) for tensor in args] != compiled.slots:
                # The user has hooked a parameter, or taken a hook away.
                compiled = self._compile_frame(traced, args)
            with self._weights.running_graph():
                return compiled.run(*args)

        return run_graph

    def _compile_frame(self, traced: GraphModule, inputs: Sequence[Any]) -> _Compiled:
        frame = _Frame(self._weights, inputs)
        return _Compiled(self._compile(traced, inputs, frame.edit, **self._options), frame.slots)


class _Frame:
    """One traced frame: its inputs, and what its backward computes again."""

    def __init__(self, weights: GraphWeights, inputs: Sequence[Any]) -> None:
        self._weights = weights
        self._places = [weights.place_of(tensor) for tensor in inputs]
        self.slots = [weights.slot_of(tensor) for tensor in inputs]
        self._recipes: dict[str, torch.fx.Graph] = {}  # by the name of the value that backward would be given

    def edit(self, graph: GraphModule, is_backward: bool) -> GraphModule:
        """Adds the operators to a forward or a backward graph."""
        if is_backward:
            self._compute_again(graph.graph)
        units = self._placeholders(graph.graph)
        if not is_backward:
            self._save_no_copies(graph.graph, {node for nodes in units.values() for node in nodes})
        slots = [None if i is None else self.slots[i] for i in torch_internals.gradient_of(graph.graph)]
        if units or any(slot is not None for slot in slots):
            token = torch_internals.add_small_tensor(graph.graph)
            add_reductions(graph.graph, slots, token, self._weights.number)
            add_gathers(graph.graph, units, token, self._weights.number)
        graph.graph.lint()
        graph.recompile()
        return graph

    def _placeholders(self, graph: torch.fx.Graph) -> dict[int, dict[Node, int]]:
        """The placeholders of sharded weights and their places in the unit, by gather unit."""
        units: dict[int, dict[Node, int]] = {}
        for node in graph.find_nodes(op="placeholder"):
            i = torch_internals.input_index(node)
            place = None if i is None else self._places[i]
            if place is not None:
                units.setdefault(place[0], {})[node] = place[1]
        return units

    def _save_no_copies(self, graph: torch.fx.Graph, weights: set[Node]) -> None:
        """Lets the forward save the weight itself wherever it would save a view or a cast of it. A cast would be a
        whole weight that stays in memory until the backward."""
        output = graph.output_node()
        values = list(output.args[0])
        for i, is_saved in enumerate(torch_internals.is_saved(graph)):
            value = values[i]
            if not is_saved or not isinstance(value, Node) or value in weights:
                continue
            chain = derived_from(value, weights)
            if chain is not None:
                self._recipes[value.name] = _recipe_of(chain)
                values[i] = chain[0].all_input_nodes[0]
        output.update_arg(0, tuple(values))
        graph.eliminate_dead_code()

    def _compute_again(self, graph: torch.fx.Graph) -> None:
        """The other half of ``_save_no_copies``: the backward gets the weight, and computes its view or cast."""
        order = {node: i for i, node in enumerate(graph.nodes)}
        for node in graph.find_nodes(op="placeholder"):
            recipe = self._recipes.get(node.name)
            if recipe is None or not node.users:
                continue
            readers = list(node.users)
            with graph.inserting_before(min(readers, key=order.__getitem__)):
                value = _copy_steps(recipe, graph, node)
            for reader in readers:
                reader.replace_input_with(node, value)
            weight = next(iter(recipe.nodes))
            node.meta.update(val=weight.meta["val"], desc=weight.meta["desc"], is_swapped=True)


def _recipe_of(chain: Sequence[Node]) -> torch.fx.Graph:
    """A graph of one placeholder, the weight that the first node of ``chain`` reads, and copies of all nodes."""
    source = chain[0].all_input_nodes[0]
    recipe = torch.fx.Graph()
    weight = recipe.placeholder("weight")
    weight.meta.update(source.meta)
    copies = {source: weight}
    for step in chain:
        copies[step] = recipe.node_copy(step, copies.__getitem__)
    return recipe


def _copy_steps(recipe: torch.fx.Graph, graph: torch.fx.Graph, weight: Node) -> Node:
    """Copies a recipe into ``graph``, at the place of insertion, and returns its result."""
    steps = list(recipe.nodes)
    copies = {steps[0]: weight}
    for step in steps[1:]:
        copies[step] = graph.node_copy(step, copies.__getitem__)
    return copies[steps[-1]]
