"""The backend that an engine gives to ``torch.compile``: passes edit the forward and the backward graph of each frame,
and the compiler that the user has named gets the edited graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import GraphModule, Node

from deepspeed_c.compile import torch_internals
from deepspeed_c.compile.graph import copy_of, derived_from
from deepspeed_c.compile.passes.zero3 import add_gathers, add_reductions
from deepspeed_c.compile.profile import GraphParameters, GraphProfile
from deepspeed_c.compile.report import CompileReport, GraphEdits, operators_of
from deepspeed_c.compile.schedule import CompilePass, Schedule, register_compile_pass
from deepspeed_c.compile.verify import broken_rule, writers_of
from deepspeed_c.errors import StateError
from deepspeed_c.logging import logger

__all__ = ["GraphBackend", "GraphWeights", "Roles", "register_compile_pass"]


class Roles(NamedTuple):
    """What the inputs of a graph are to the engine. Frames of a layer's code run for all layers, so a frame may be run
    with inputs of other roles than those it was traced with.
    """

    places: tuple[tuple[int, int] | None, ...]
    """By input: (gather unit, place in it) of a sharded parameter; None for another input."""
    slots: tuple[int | None, ...]
    """By input: the number of a parameter whose gradient the graph reduces; None for another input."""


class GraphWeights(Protocol):
    """What the backend asks about the inputs of a graph, and where its graphs run."""

    number: int
    """By which operators find the engine."""

    def step(self) -> int:
        """The number of steps of the optimizer so far, by which the schedule chooses passes."""

    def roles_of(self, tensors: Sequence[Any], runs: bool) -> Roles:
        """The roles of a frame's inputs. ``runs``: the frame runs next; otherwise it is compiled."""

    def running_graph(self) -> AbstractContextManager[None]:
        """Surrounds each run of a forward graph."""


class GraphBackend:
    """A backend of ``torch.compile``. ``name``: the compiler of the edited graphs, one of ``torch_internals.BACKENDS``.
    ``log``: the folder for the text of each graph after each pass; None writes nothing.
    """

    def __init__(
        self,
        name: str,
        weights: GraphWeights,
        schedule: Schedule,
        options: dict[str, Any] | None = None,
        log: Path | None = None,
    ) -> None:
        self._compile = torch_internals.BACKENDS[name]
        self._weights, self._schedule, self._options = weights, schedule, options or {}
        self.report = CompileReport()
        self.log = log
        self.profiles: dict[int, GraphProfile] = {}
        self.parameters: dict[int, GraphParameters] = {}

    @property
    def n_frames(self) -> int:
        return len(self.report.frames)

    @property
    def times(self) -> list[tuple[str, int, int, float]]:
        """("fwd" or "bwd", number among all edited graphs, number of the frame, seconds of its passes)"""
        names = {"forward": "fwd", "backward": "bwd"}
        graphs = enumerate(self.report.graphs)
        return [(names[graph.phase], i, graph.frame, graph.seconds) for i, graph in graphs]

    def __call__(self, traced: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        values = torch_internals.traced_inputs(traced)
        passes = self._schedule.at(self._weights.step())
        roles = self._weights.roles_of(inputs, runs=False)
        first = self.report.add_frame()
        numbers = {roles: first}
        found = {roles: self._compile_frame(first, traced, inputs, inputs, roles, passes)}

        def run_graph(*args: Any) -> Any:
            nonlocal passes
            due, roles = self._schedule.at(self._weights.step()), self._weights.roles_of(args, runs=True)
            if due is not passes:
                passes = due
                found.clear()
            run = found.get(roles)
            if run is None:
                # Another layer runs the frame, a parameter's gradient has to leave the graph from now on or no longer
                # has to, or the schedule has come to other passes.
                if roles not in numbers:
                    numbers[roles] = self.report.add_frame(like=first)
                with torch_internals.tracing_again(values):
                    run = self._compile_frame(numbers[roles], traced, values, args, roles, passes)
                found[roles] = run
            with self._weights.running_graph():
                return run(*args)

        return run_graph

    def _compile_frame(
        self,
        number: int,
        traced: GraphModule,
        values: Sequence[Any],
        inputs: Sequence[Any],
        roles: Roles,
        passes: Sequence[CompilePass],
    ) -> Callable[..., Any]:
        """values: what the frame is traced with in place of ``inputs``."""
        frame = _Frame(self, number, self._weights, inputs, roles, passes)
        return self._compile(traced, values, frame.edit, **self._options)


class _Frame:
    """One traced frame: its inputs, the passes that edit its graphs, and what its backward computes again."""

    def __init__(
        self,
        backend: GraphBackend,
        number: int,
        weights: GraphWeights,
        inputs: Sequence[Any],
        roles: Roles,
        passes: Sequence[CompilePass],
    ) -> None:
        self._backend, self._number, self._weights, self._passes = backend, number, weights, passes
        self._places, self._slots = roles
        self._params = {i: tensor for i, tensor in enumerate(inputs) if isinstance(tensor, torch.nn.Parameter)}
        self._recipes: dict[str, torch.fx.Graph] = {}  # by the name of the value that backward would be given

    def edit(self, graph: GraphModule, is_backward: bool) -> GraphModule:
        """Runs the passes over a forward or a backward graph."""
        begin = time.perf_counter()
        before = operators_of(graph.graph)
        edits = GraphEdits(self._number, "backward" if is_backward else "forward", len(before))
        if is_backward:
            self._compute_again(graph.graph)
        else:
            self._save_no_copies(graph.graph)
        slots = [None if i is None else self._slots[i] for i in torch_internals.gradient_of(graph.graph)]
        may_write = writers_of(self._placeholders(graph.graph))
        wanted: list[int] | None = None  # what the graph has to reduce; None while nothing was put into it
        for i, pass_ in enumerate(self._passes):
            problem = None
            if pass_.edit is None:
                outputs = graph.graph.output_node().args[0]
                wanted = [slot for slot, value in zip(slots, outputs) if slot is not None and value is not None]
                self._add_operators(graph.graph, slots)
                self._require_right(graph, wanted, may_write, pass_)
            else:
                graph, problem = self._run_pass(graph, pass_, is_backward, wanted, may_write)
            graph.graph.lint()
            graph.recompile()
            self._write(graph, is_backward, f"{i}_{pass_.name}")
            after, now = operators_of(graph.graph), time.perf_counter()
            edits.note(pass_.name, before, after, now - begin, problem)
            before, begin = after, now
        self._backend.report.graphs.append(edits)
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

    def _add_operators(self, graph: torch.fx.Graph, slots: Sequence[int | None]) -> None:
        units = self._placeholders(graph)
        if units or any(slot is not None for slot in slots):
            token = torch_internals.add_small_tensor(graph)
            add_reductions(graph, slots, token, self._weights.number)
            add_gathers(graph, units, token, self._weights.number)

    def _run_pass(
        self,
        graph: GraphModule,
        pass_: CompilePass,
        is_backward: bool,
        wanted: Sequence[int] | None,
        may_write: Collection[str],
    ) -> tuple[GraphModule, str | None]:
        """A pass of the user. If it raises, or if its graph breaks a rule, the graph before it is returned, with what
        is wrong."""
        before = copy_of(graph.graph)
        backend = self._backend
        backend.profiles.setdefault(self._number, GraphProfile()).look(graph.graph, is_backward)
        places = graph.graph.find_nodes(op="placeholder")
        index_of = {node.name: torch_internals.input_index(node) for node in places}
        backend.parameters[self._number] = GraphParameters(
            {name: self._params[i] for name, i in index_of.items() if i in self._params}
        )
        order = [(number, profile.needs_backward) for number, profile in backend.profiles.items()]
        fakes = tuple(node.meta.get("val") for node in places)
        arguments = (lambda: fakes, 0.0, backend.parameters, is_backward)
        try:
            edited = pass_.edit(graph, self._number, order, backend.profiles, *arguments)
            edited = graph if edited is None else edited
            problem = self._problem_of(edited.graph, before, wanted, may_write)
        except Exception as error:  # noqa: BLE001  (whatever a pass of the user raises)
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            return edited, None
        logger.warning(
            "the pass %r does not edit the %s graph of frame %d, which runs as it was before: %s",
            pass_.name,
            "backward" if is_backward else "forward",
            self._number,
            problem,
        )
        return GraphModule(graph, before), problem

    def _problem_of(
        self, graph: torch.fx.Graph, before: torch.fx.Graph, wanted: Sequence[int] | None, may_write: Collection[str]
    ) -> str | None:
        """What a pass has done to a graph that it may not do."""
        graph.lint()
        inputs, inputs_before = (g.find_nodes(op="placeholder") for g in (graph, before))
        if [node.name for node in inputs] != [node.name for node in inputs_before]:
            return "its inputs are no longer those of the frame"
        if len(graph.output_node().args[0]) != len(before.output_node().args[0]):
            return "it has another number of outputs"
        if wanted is None:
            return None
        now = dict(zip(inputs_before, inputs))
        units = {
            unit: {now[node]: place for node, place in weights.items()}
            for unit, weights in self._placeholders(before).items()
        }
        return broken_rule(graph, units, wanted, may_write)

    def _require_right(
        self, graph: GraphModule, wanted: Sequence[int], may_write: Collection[str], pass_: CompilePass
    ) -> None:
        problem = broken_rule(graph.graph, self._placeholders(graph.graph), wanted, may_write)
        if problem is not None:
            raise StateError(
                f"the pass {pass_.name!r} has made a graph that would not run right: {problem}",
                where="engine.compile",
                fix='report it with the model, and set "compile": {"deepcompile": false}',
            )

    def _write(self, graph: GraphModule, is_backward: bool, name: str) -> None:
        if self._backend.log is not None:
            self._backend.log.mkdir(parents=True, exist_ok=True)
            phase = "backward" if is_backward else "forward"
            text = graph.print_readable(print_output=False)
            (self._backend.log / f"frame{self._number}_{phase}_{name}.txt").write_text(text)

    def _save_no_copies(self, graph: torch.fx.Graph) -> None:
        """Lets the forward save the weight itself wherever it would save a view or a cast of it. A cast would be a
        whole weight that stays in memory until the backward."""
        weights = {node for nodes in self._placeholders(graph).values() for node in nodes}
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
