"""Schedules of passes over compiled graphs: what is refused, when passes run, and what happens to a pass that fails."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c.compile.passes.contract import CAP_Z3_GATHER_RELEASE, PassContract, PassContractError
from deepspeed_c.compile.schedule import Schedule, register_compile_pass
from deepspeed_c.errors import ConfigError, FeatureError
from tests.deepspeed_c.compile.models import make_engine, same, train
from tests.ranks import on_ranks
from tests.training import config, engine_of, update


def nothing(graph: Any, *_: Any) -> None:
    pass


NEEDS_GATHERS = PassContract(requires=frozenset({CAP_Z3_GATHER_RELEASE}))


@pytest.mark.parametrize(
    "schedule, stage, says",
    [
        ({0: ["zero3_compile"]}, 3, "a schedule is a list"),
        ([(0, "zero3_compile")], 3, "is not a step and a list of passes"),
        ([(True, ["zero3_compile"])], 3, "is not a step and a list of passes"),
        ([(-1, ["zero3_compile"])], 3, "step -1 is negative"),
        ([(3, ["zero3_compile"]), (3, ["zero3_compile"])], 3, "step 3 comes after step 3"),
        ([(0, ["zero_3compile"])], 3, "(?s)no pass 'zero_3compile'.*'zero3_compile'"),
        ([(0, [7])], 3, "7 is not a pass"),
        ([(0, ["zero3_compile"])], 2, "(?s)another stage of ZeRO.*'zero2_compile'"),
        ([(0, ["zero1_compile", "zero1_compile"])], 1, "there twice"),
    ],
)
def test_a_malformed_schedule_is_refused(schedule: Any, stage: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Schedule(schedule, stage)


def test_contracts_are_checked_within_each_step() -> None:
    register_compile_pass("test_needs_gathers", nothing, NEEDS_GATHERS)
    register_compile_pass("test_alone", lambda *_: None, PassContract(conflicts_with=frozenset({"test_needs_gathers"})))
    for passes, says in (
        (["test_needs_gathers", "zero3_compile"], "requires z3_gather_release"),
        (["zero3_compile", "test_needs_gathers", "test_alone"], "'test_needs_gathers' and 'test_alone' conflict"),
        (["zero3_compile", "test_alone", "test_needs_gathers"], "'test_alone' and 'test_needs_gathers' conflict"),
        ([], "without 'zero3_compile'"),
        ([nothing], "requires z3_gather_release"),  # a registered function has its contract without its name too
    ):
        with pytest.raises(PassContractError, match=says):
            Schedule([(0, ["zero3_compile"]), (2, passes)], 3)
    register_compile_pass("test_needs_gathers_too", nothing)
    with pytest.raises(PassContractError, match="several names: test_needs_gathers, test_needs_gathers_too"):
        Schedule([(0, ["zero3_compile", nothing])], 3)
    with pytest.raises(PassContractError, match="requires z3_gather_release"):
        Schedule([(0, ["zero2_compile", "test_needs_gathers"])], 2)


def test_a_pass_is_replaced_with_its_contract() -> None:
    register_compile_pass("test_replaced", nothing, NEEDS_GATHERS)
    register_compile_pass("test_replaced", nothing)
    Schedule([(0, ["test_replaced", "zero1_compile"])], 1)
    for name, function in (("zero1_compile", nothing), ("x", 3), (3, nothing)):
        with pytest.raises(ConfigError):
            register_compile_pass(name, function)


def test_steps_choose_passes() -> None:
    def names(schedule: Any, step: int) -> list[str]:
        return [pass_.name for pass_ in Schedule(schedule, 2).at(step)]

    def late(*_: Any) -> None:
        pass

    assert names(None, 9) == ["zero2_compile"]
    schedule = [(2, [late]), (5, ["zero2_compile"])]
    assert [names(schedule, step) for step in (0, 1)] == [["zero2_compile"]] * 2
    assert [names(schedule, step)[-1] for step in (2, 4, 5, 100)] == ["late", "late", "zero2_compile", "zero2_compile"]


class Passes:
    """Passes that take down how they were called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.messages: list[str] = []

    def look(
        self, graph: Any, number: int, order: Any, profiles: Any, inputs: Any, budget: float, params: Any, bwd: bool
    ):
        n_operators = sum("deepspeed_c.zero" in str(node.target) for node in graph.graph.nodes)
        sizes = profiles[number].bwd_tensor_sizes if bwd else profiles[number].fwd_tensor_sizes
        self.calls.append((number, bwd, n_operators, len(inputs()), len(sizes), len(params[number].param_names)))

    def misplace(self, graph: Any, *_: Any) -> Any:
        """Releases a unit before it is read, or reduces a gradient never."""
        operators = [node for node in graph.graph.nodes if "zero_release" in str(node.target)]
        operators += [node for node in graph.graph.nodes if "zero_reduce" in str(node.target)]
        graph.graph.erase_node(operators[0])
        return graph

    def raising(self, *_: Any) -> None:
        raise KeyError("a pass that raises")

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, preload="torch._dynamo")
def test_a_schedule_edits_graphs_anew_at_its_steps(rank: int, world: int, stage: int) -> None:
    torch._dynamo.reset()
    with make_engine(stage, compiled=False) as engine:
        want = train(engine, rank)
    passes, own = Passes(), f"zero{stage}_compile"
    with make_engine(stage) as engine:
        engine.register_compile_pass("test_look", passes.look)
        engine.compile(backend="eager", schedule=[(0, [own]), (1, [own, "test_look"])])
        same(train(engine, rank), want)
        times = engine.get_compile_time()
    assert engine.get_compile_time() == [] and not engine.is_compiled
    # A forward with its backward in training, and a forward in evaluation, which is a frame of its own.
    assert {call[:2] for call in passes.calls} == {(0, False), (0, True), (1, False)}, passes.calls
    for call in passes.calls:
        is_reducing = stage == 3 or call[1]
        assert (call[2] > 0) == is_reducing and min(call[3:]) > 0, call
    assert len(times) == 5 and all(phase in ("fwd", "bwd") and spent > 0 for phase, _, _, spent in times), times


def log_body(rank: int, world: int, folder: str) -> None:
    torch._dynamo.reset()
    before = os.getcwd()
    os.chdir(folder)
    with make_engine(3, debug_log=True) as engine:
        engine.compile(backend="eager")
        train(engine, rank)
    os.chdir(before)


def test_graphs_are_written_down_if_asked(run_ranks, tmp_path: Path) -> None:
    run_ranks(2, log_body, str(tmp_path), preload="torch._dynamo")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.txt")}
    names = ("frame0_forward_0", "frame0_backward_0", "frame1_forward_0")
    wanted = {f"compiled_graphs/rank{rank}/{name}_zero3_compile.txt" for rank in range(2) for name in names}
    assert files == wanted
    assert all("zero_gather" in (tmp_path / name).read_text() for name in files)


@pytest.mark.parametrize("stage, which", [(3, "misplace"), (3, "raising"), (2, "misplace")])
@on_ranks(2, preload="torch._dynamo")
def test_a_failing_pass_is_named_and_the_graph_before_it_runs(rank: int, world: int, stage: int, which: str) -> None:
    torch._dynamo.reset()
    with make_engine(stage, compiled=False) as engine:
        want = train(engine, rank)
    passes = Passes()
    handler = logging.Handler()
    handler.emit = passes.emit
    logging.getLogger("deepspeed_c").addHandler(handler)
    with make_engine(stage) as engine:
        # One rank alone has the pass: the ranks need no agreement.
        edits = [getattr(passes, which)] if rank == 0 else []
        engine.compile(backend="eager", schedule=[(0, [f"zero{stage}_compile", *edits])])
        same(train(engine, rank), want)
    logging.getLogger("deepspeed_c").removeHandler(handler)
    if rank == 0:
        found = [m for m in passes.messages if f"the pass '{which}' does not edit" in m]
        assert found and all("runs as it was before" in m for m in found), passes.messages
        if which == "misplace" and stage == 3:
            assert any("node" in m for m in found), found


@on_ranks(2, preload="torch._dynamo")
def test_a_refused_schedule_leaves_the_engine_as_it_was(rank: int, world: int) -> None:
    with make_engine(3) as engine:
        for schedule in ([(0, ["zero2_compile"])], [(5, ["zero3_compile"]), (2, ["zero3_compile"])], [(0, [])]):
            with pytest.raises(ConfigError):
                engine.compile(backend="eager", schedule=schedule)
        assert not engine.is_compiled and "forward" not in vars(engine.module)
        train(engine, rank)
    with make_engine(3, compiled=False) as engine:
        with pytest.raises(FeatureError, match="compiled autograd does not work at stage 3"):
            engine.compile(backend="eager", compiled_autograd_enabled=True)
        engine.compile(backend="eager", schedule=[(0, ["zero3_compile"])])  # not used, and told so
        assert engine.is_compiled and not engine.is_deepcompile_active()


class Clamped(torch.nn.Module):
    """A model that writes to a weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        with torch.no_grad():
            self.head.weight.clamp_(-0.3, 0.3)
        return torch.nn.functional.cross_entropy(self.head(h), x)


@on_ranks(2, preload="torch._dynamo")
def test_a_model_that_writes_to_a_weight_runs(rank: int, world: int) -> None:
    torch._dynamo.reset()
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        module = Clamped()
        settings = config(
            3, rows=7, zero={"stage3_param_persistence_threshold": 0}, compile={"deepcompile": is_compiled}
        )
        engine = engine_of(module, settings)
        if is_compiled:
            engine.compile(backend="inductor", schedule=[(0, ["zero3_compile", lambda *_: None])])
        losses = [update(engine, engine(torch.arange(7))) for _ in range(3)]
        with torch.no_grad():  # with Inductor, a graph without a backward writes itself
            losses.append(engine.eval()(torch.arange(7)).item())
        engine.close()
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5), found
