"""What became of a compiled model: its frames, what each pass has changed in their graphs, what stays eager and why,
and what was compiled again. It is collected while the compiled forward runs, on each rank by itself.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from torch.fx import Graph
from typing_extensions import Self

from deepspeed_c.compile import torch_internals
from deepspeed_c.compile.torch_internals import Compilation, GraphBreak
from deepspeed_c.logging import logger

__all__ = [
    "CompileReport",
    "CompiledFrame",
    "EagerPart",
    "GraphEdits",
    "PassChanges",
    "Recompile",
    "SourceLine",
    "operators_of",
]

_RESUMED = "torch_dynamo_resume_in_"
_LIMIT = 240  # characters of a reason


@dataclass(frozen=True)
class SourceLine:
    """A line of a function. ``file`` is a path, and empty if the place is not known."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        if not self.file:
            return self.function
        near = os.path.relpath(self.file)
        return f"{self.function} ({self.file if near.startswith('..') else near}:{self.line})"


@dataclass
class PassChanges:
    """What one pass has changed in one graph. added, removed: the number of operators by their name. moved: the least
    number of other operators that have to move to turn the old order into the new. problem: why the pass was not used.
    """

    name: str
    added: dict[str, int]
    removed: dict[str, int]
    moved: int
    seconds: float
    problem: str | None = None


@dataclass
class GraphEdits:
    """A forward or a backward graph of a frame, as it was traced and after each pass. A graph that is edited anew,
    because the schedule of passes has come to other ones, is there again."""

    frame: int
    phase: str
    n_operators: int
    passes: list[PassChanges] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(changes.seconds for changes in self.passes)

    def note(
        self, name: str, before: Mapping[str, str], after: Mapping[str, str], seconds: float, problem: str | None = None
    ) -> None:
        """before, after: ``operators_of`` the graph."""
        added, removed = (
            dict(Counter(a[node] for node in a if node not in b)) for a, b in ((after, before), (before, after))
        )
        self.passes.append(PassChanges(name, added, removed, _n_moved(before, after), seconds, problem))


@dataclass
class CompiledFrame:
    """A piece of Python code that has become one graph, with its backward. A frame that is compiled again, for other
    inputs, is another ``CompiledFrame`` of the same place. ``id`` is torch's number of it."""

    number: int
    id: str
    place: SourceLine


@dataclass
class EagerPart:
    """What runs without a graph, under the ordinary hooks. kind: "graph break" for a line between two graphs, "skipped
    frame" for a whole function. count: how often the compiler has met it."""

    kind: str
    place: SourceLine
    reason: str
    count: int = 1


@dataclass
class Recompile:
    """A frame that was compiled again, and the guard that its earlier graph did not pass."""

    place: SourceLine
    guard: str


@dataclass(eq=False)
class CompileReport:
    """All that is known of one engine's compiled model. As a context manager, it surrounds each run of the forward."""

    frames: list[CompiledFrame] = field(default_factory=list)
    graphs: list[GraphEdits] = field(default_factory=list)
    eager: list[EagerPart] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places: dict[str, SourceLine] = {}  # by torch's number of the code
        self._ids: set[str] = set()

    def __enter__(self) -> Self:
        # What was compiled since the last look belongs to the engine whose forward calls this one, or to none.
        noted = torch_internals.new_notes()
        if _running:
            _running[-1]._take(*noted)
        _running.append(self)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        _running.remove(self)
        breaks, compilations = torch_internals.new_notes()
        if isinstance(error, torch_internals.CompilerError) and compilations and compilations[-1].failure:
            compilations.pop()  # the user gets this error, so nothing runs eagerly
        self._take(breaks, compilations)

    def add_frame(self, like: int | None = None) -> int:
        """Returns the number of the frame that is being compiled. like: the number of a frame with the same code, which
        was traced for another layer."""
        if like is None:
            id_, place = torch_internals.compiled_frame(), SourceLine("a frame", "", 0)
        else:
            id_, place = self.frames[like].id, self.frames[like].place
        self.frames.append(CompiledFrame(len(self.frames), id_, place))
        return len(self.frames) - 1

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, for JSON."""
        return asdict(self)

    def _take(self, breaks: Sequence[GraphBreak], compilations: Sequence[Compilation]) -> None:
        for each in breaks:
            self._add_eager("graph break", SourceLine(_function(each.function), each.file, each.line), each.reason)
        for each in compilations:
            code = each.id.partition("/")[0]
            if each.file is None:
                place = self._places.get(code, SourceLine("a frame", "", 0))
            else:
                place = SourceLine(_function(each.function), each.file, each.line)
            if each.failure is not None:
                known = place if each.failed_at is None else SourceLine(place.function, *each.failed_at)
                self._add_eager("skipped frame", known, each.failure)
                continue
            if not each.has_graph:
                self._add_eager("skipped frame", place, "the compiler has found nothing in it to compile")
                continue
            for frame in self.frames:
                if frame.id == each.id:
                    frame.place = place
            if each.guard is not None and code in self._places:
                failed_id, _, guard = each.guard.partition(": ")
                # Engines of one model share its code, and a graph of the other engine may be named.
                is_own = failed_id.strip("[]") in self._ids
                self._add_recompile(place, _one_line(guard) if is_own else "the guard is not known")
            self._places[code] = place
            self._ids.add(each.id)

    def _add_eager(self, kind: str, place: SourceLine, reason: str) -> None:
        reason = _one_line(reason)
        for part in self.eager:
            if (part.kind, part.place, part.reason) == (kind, place, reason):
                part.count += 1
                return
        self.eager.append(EagerPart(kind, place, reason))
        logger.warning("engine.compile: %s in %s, which runs eagerly: %s", kind, place, reason)

    def _add_recompile(self, place: SourceLine, guard: str) -> None:
        self.recompiles.append(Recompile(place, guard))
        logger.info("engine.compile: %s was compiled again: %s", place, guard)

    def __str__(self) -> str:
        lines: list[str] = []
        for frame in self.frames:
            lines.append(f"frame {frame.number}: {frame.place}")
            for graph in self.graphs:
                if graph.frame == frame.number:
                    lines.append(f"  {graph.phase}: {_count(graph.n_operators, 'operator')}")
                    lines += [f"    {_describe(changes)}" for changes in graph.passes]
        if not self.frames:
            lines.append("no graph was compiled")
        lines += ["", "stays eager:" if self.eager else "stays eager: nothing"]
        for part in self.eager:
            often = "" if part.count == 1 else f" ({part.count} times)"
            lines += [f"  {part.kind} in {part.place}{often}", f"    {part.reason}"]
        lines += ["", "compiled again:" if self.recompiles else "compiled again: nothing"]
        for again in self.recompiles:
            lines += [f"  {again.place}", f"    {again.guard}"]
        spent = sum(graph.seconds for graph in self.graphs)
        return "\n".join([*lines, "", f"passes: {1e3 * spent:.1f} ms over {_count(len(self.graphs), 'graph')}"])


# The reports whose forward runs now, the innermost last.
_running: list[CompileReport] = []


def operators_of(graph: Graph) -> dict[str, str]:
    """The name of the operator of each node that computes something, by the name of the node, in their order."""
    nodes = (node for node in graph.nodes if node.op.startswith("call_"))
    return {node.name: _name_of(node.target) for node in nodes}


def _name_of(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") or isinstance(target, str) else target.__name__


def _n_moved(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """The nodes of both that are not in the longest sequence whose order has stayed."""
    index = {name: i for i, name in enumerate(after)}
    kept = [index[name] for name in before if name in index]
    ends: list[int] = []  # by length: the least last place of an increasing sequence of it
    for i in kept:
        at = bisect_left(ends, i)
        ends[at : at + 1] = [i]
    return len(kept) - len(ends)


def _function(name: str) -> str:
    """The user's function, of the name of the code that goes on in it after a graph break."""
    return name.removeprefix(_RESUMED).rpartition("_at_")[0] if name.startswith(_RESUMED) else name


def _one_line(reason: str) -> str:
    """The first line of a reason of torch, and its explanation."""
    first, *rest = reason.strip().splitlines() or ["torch gives no reason"]
    if first.startswith("generic_jump"):
        first = f"a branch by the data of a tensor ({first})"
    told = next((line.strip().removeprefix("Explanation: ") for line in rest if "Explanation: " in line), "")
    text = re.sub(r" at 0x[0-9a-f]+", "", f"{first}: {told}" if told else first)
    return text if len(text) <= _LIMIT else f"{text[: _LIMIT - 3]}..."


def _describe(changes: PassChanges) -> str:
    head = f"{changes.name} ({1e3 * changes.seconds:.1f} ms)"
    if changes.problem is not None:
        return f"{head}: was not used: {_one_line(changes.problem)}"
    parts = [f"{n} {name} added" for name, n in changes.added.items()]
    parts += [f"{n} {name} removed" for name, n in changes.removed.items()]
    parts += [f"{changes.moved} moved"] if changes.moved else []
    return f"{head}: {', '.join(parts) or 'changed nothing'}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
