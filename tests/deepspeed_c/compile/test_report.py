"""The report of a compiled engine: what stays eager is said once, with its line, and counted; a pass's changes are counted
as a plain comparison of the graphs counts them; a refusal by the compiler leaves an engine that trains."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.compile.report import GraphEdits, operators_of
from tests.deepspeed_c.compile.test_engine import batch_of, make_engine, same, train
from tests.log_lines import LogLines
from tests.ranks import on_ranks
from tests.training import config, engine_of, step

WIDTH = 5


def twice(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()  # in a loop
    return x


class Net(nn.Module):
    """A model of several graphs. Its comments name what the report has to say of a line."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)

    @torch.compiler.disable
    def left_alone(self, h: torch.Tensor) -> torch.Tensor:
        return h * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        torch._dynamo.graph_break()  # asked
        h = self.left_alone(h)  # disabled
        if h.sum() > 0:  # data
            h = h + 1
        h = twice(h)  # loop
        h = self.down(h)  # with a hook
        return h.square().mean()


class Messages(LogLines):
    """What the logger says about compilation, at each level."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("engine.compile: "):
            self.said.append((record.levelno, record.getMessage().removeprefix("engine.compile: ")))


def net_engine(compiled: bool = True) -> Any:
    torch.manual_seed(0)
    module = Net()
    settings = config(
        3, rows=2, lr=0.01, zero={"stage3_param_persistence_threshold": 0}, compile={"deepcompile": compiled}
    )
    return engine_of(module, settings)


def losses(engine: Any, sizes: tuple[int, ...]) -> list[float]:
    found = [step(engine, torch.linspace(-1, 1, n * WIDTH).view(n, WIDTH)) for n in sizes]
    return found


def line_with(comment: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))


SIZES = (2, 2, 3, 3)
WORDS = ("asked", "disabled", "data", "in a loop")


@on_ranks(2, preload="torch._dynamo")
def test_what_stays_eager_is_said_once(rank: int, world: int) -> None:
    torch._dynamo.reset()
    with net_engine(compiled=False) as engine:
        want = losses(engine, SIZES)
        assert engine.get_compile_report() is None
    with net_engine() as engine, Messages() as messages:
        engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        assert losses(engine, SIZES[:2]) == want[:2]
        report = engine.get_compile_report()
        n_said, n_frames = len(messages.said), len(report.frames)
        assert not report.recompiles and all(part.count == 1 for part in report.eager)
        got = losses(engine, SIZES[2:])
        assert got == want[2:], (got, want)

    breaks = {part.place.line: part for part in report.eager if part.kind == "graph break"}
    assert set(breaks) == {line_with(word) for word in WORDS}, report.eager
    assert all(part.place.file == __file__ for part in breaks.values())
    assert breaks[line_with("asked")].place.function == "forward"
    for word, reason in (("asked", "graph_break"), ("disabled", "disable"), ("data", "data of a tensor")):
        assert reason in breaks[line_with(word)].reason, breaks
        assert "\n" not in breaks[line_with(word)].reason
        assert breaks[line_with(word)].count == 2, "once for each shape"
    skipped = [part for part in report.eager if part.kind == "skipped frame"]
    # Torch 2.10 names the line, and later versions skip the function as a whole.
    assert "twice" in {part.place.function for part in report.eager}, report.eager
    assert all(part.count == 1 for part in skipped), "Dynamo remembers what it skips"

    warnings = [text for level, text in messages.said if level == logging.WARNING]
    assert len(warnings) == len(report.eager) == n_said, "one line for each part, in its first step"
    assert all(any(str(part.place) in text and part.reason in text for text in warnings) for part in report.eager)

    # As many frames again for the other shape; each says which guard failed, on rank 0.
    assert len(report.frames) == 2 * n_frames and len(report.recompiles) >= n_frames
    assert "expected 2, actual 3" in report.recompiles[0].guard, report.recompiles
    assert report.recompiles[0].place.line == report.frames[0].place.line
    infos = [text for level, text in messages.said if level == logging.INFO]
    assert len(infos) == (len(report.recompiles) if rank == 0 else 0), infos

    gathers = [
        changes.added.get("deepspeed_c.zero_gather.default", 0)
        for graph in report.graphs
        for changes in graph.passes
        if graph.phase == "forward"
    ]
    assert sum(gathers) == 4, "two layers, for two shapes"
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()
    for part in (*report.eager, *report.frames):
        assert str(part.place) in str(report)
    # torch's own counters are left as they were: nothing was cleared and no limit was changed.
    assert torch._dynamo.utils.get_compilation_metrics()


@pytest.mark.parametrize("only_rank", [None, 1])
@on_ranks(2, preload="torch._dynamo")
def test_fullgraph_makes_a_break_an_error_after_which_the_engine_trains(
    rank: int, world: int, only_rank: int | None
) -> None:
    """only_rank: the only rank whose model has a break; None for all."""
    torch._dynamo.reset()
    with make_engine(3, compiled=False) as engine:
        want = train(engine, rank)
    with make_engine(3, breaks=only_rank in (None, rank)) as engine, Messages() as messages:
        engine.compile(backend="eager", compile_kwargs={"fullgraph": True})
        if only_rank in (None, rank):
            with pytest.raises(RuntimeError, match="graph_break"):
                engine(*batch_of(rank, 0))
            report = engine.get_compile_report()
            assert not report.eager and not messages.said, "an error is no fallback"
        engine.module.breaks = False
        same(train(engine, rank), want)


@on_ranks(1, preload="torch._dynamo")
def test_engines_do_not_mix_their_reports(rank: int, world: int) -> None:
    """Two engines of one model, whose forwards take turns and lie within one another."""
    torch._dynamo.reset()
    with net_engine() as outer, net_engine() as inner, net_engine() as last:
        for engine in (outer, inner):
            engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        hook = outer.module.down.register_forward_pre_hook(
            torch.compiler.disable(lambda *_: inner(torch.ones(2, WIDTH)) and None)
        )
        with torch.no_grad():
            outer(torch.ones(2, WIDTH))
        hook.remove()
        reports = [engine.get_compile_report() for engine in (outer, inner)]
        lines = [{part.place.line for part in report.eager if part.kind == "graph break"} for report in reports]
        own = {line_with(word) for word in WORDS}
        assert lines[1] == own and lines[0] == own | {line_with("with a hook")}, lines
        assert not reports[0].recompiles and not reports[1].recompiles, "the code was compiled once for each engine"
        assert all(frame.place.file == __file__ for frame in reports[1].frames)
        assert all(frame.place.file for frame in reports[0].frames), reports[0].frames
        last.compile(backend="eager")
        assert last.get_compile_report().frames == [] and last.get_compile_report().eager == []


@on_ranks(2, preload="torch._dynamo")
def test_a_frame_over_the_limit_of_recompiles(rank: int, world: int) -> None:
    torch._dynamo.reset()
    with make_engine(2) as engine:
        engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        with torch._dynamo.config.patch(recompile_limit=2):
            train(engine, rank, lambda i: 3 + i)
        report = engine.get_compile_report()
        over = [part for part in report.eager if "recompile" in part.reason]
        assert len(over) == 1 and over[0].place == report.frames[0].place and over[0].count == 1, report.eager
        assert len(report.frames) == 2


@pytest.mark.parametrize("n", [0, 1, 5])
def test_moved_operators_are_the_fewest_that_give_the_new_order(n: int) -> None:
    names = [f"n{i}" for i in range(n)]
    before = dict.fromkeys(names, "op")
    for order in itertools.permutations(names):
        edits = GraphEdits(0, "forward", n)
        edits.note("mine", before, dict.fromkeys(order, "op"), 0.0)
        kept = max(
            len(subset)
            for size in range(n + 1)
            for subset in itertools.combinations(names, size)
            if list(subset) == [name for name in order if name in subset]
        )
        assert edits.passes[0].moved == n - kept, order


def test_added_and_removed_operators_are_counted_by_name() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + 1) + 1

    graph = torch.fx.symbolic_trace(Plain()).graph
    before = operators_of(graph)
    relu = next(node for node in graph.nodes if node.name == "relu")
    with graph.inserting_after(relu):
        new = graph.call_function(torch.ops.aten.neg.default, (relu,))
        graph.call_function(torch.ops.aten.neg.default, (new,))
    relu.replace_all_uses_with(relu.args[0])
    graph.erase_node(relu)
    edits = GraphEdits(0, "forward", len(before))
    edits.note("mine", before, operators_of(graph), 0.0, "a reason")
    assert before == {"add": "add", "relu": "relu", "add_1": "add"}
    assert edits.passes[0].added == {"aten.neg.default": 2} and edits.passes[0].removed == {"relu": 1}
    assert edits.passes[0].moved == 0 and edits.passes[0].problem == "a reason"
