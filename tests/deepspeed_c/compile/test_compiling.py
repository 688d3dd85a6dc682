"""engine.compile: compiled autograd, the backend by itself, and arguments that are refused before anything is changed."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

from deepspeed_c.compile import torch_internals
from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.zero.weights.grad_face import GradFace
from tests.cells import full
from tests.deepspeed_c.compile.models import batch_of, make_engine, same, train
from tests.ranks import on_ranks


@pytest.mark.parametrize(
    "stage, precision", [pytest.param(0, "fp32", marks=full), (1, "fp16"), pytest.param(2, "bf16", marks=full)]
)
@on_ranks(2, preload="torch._dynamo")
def test_compiled_autograd_gives_the_bits_of_plain_autograd(rank: int, world: int, stage: int, precision: str) -> None:
    torch._dynamo.reset()
    with make_engine(stage, precision, compiled=False) as engine:
        want = train(engine, rank)
        faces = [isinstance(p, GradFace) for p in engine.module.parameters()]
    counted = torch._dynamo.utils.counters["compiled_autograd"]
    before = counted["captures"]
    with make_engine(stage, precision, compiled=False) as engine:
        engine.compile(backend="eager", compiled_autograd_enabled=True, compile_kwargs={"fullgraph": True})
        same(train(engine, rank), want)
        assert counted["captures"] > before, "the passes of engine.backward are traced"
        assert [isinstance(p, GradFace) for p in engine.module.parameters()] == faces
        captures = counted["captures"]
        # A caller's own backward runs as it is, and its gradients count.
        loss = engine(*batch_of(rank, 0))
        engine.scale(loss).backward()
        engine.step()
        assert counted["captures"] == captures and engine.get_global_grad_norm() >= 0


@on_ranks(2, preload="torch._dynamo")
def test_a_traced_pass_that_raises_is_followed_by_the_same_steps(rank: int, world: int) -> None:
    torch._dynamo.reset()
    with make_engine(2, compiled=False) as engine:
        want = train(engine, rank)
    with make_engine(2, compiled=False) as engine:
        engine.compile(backend="eager", compiled_autograd_enabled=True)

        def fails(grad: torch.Tensor) -> None:
            raise ValueError("a hook that fails")

        handle = engine.module.blocks[0].up.weight.register_hook(fails)
        with pytest.raises(Exception, match="a hook that fails|Observed exception"):
            engine.backward(engine(*batch_of(rank, 0)))
        handle.remove()
        same(train(engine, rank), want)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2, preload="torch._dynamo")
def test_a_module_that_is_compiled_with_the_backend_by_itself(rank: int, world: int, stage: int) -> None:
    torch._dynamo.reset()
    with make_engine(stage, compiled=False) as engine:
        want = train(engine, rank)
    with make_engine(stage) as engine:
        backend, schedule = engine.get_deepspeed_compile_backend("eager", {}, None)
        assert schedule is None and engine.get_deepcompile_backend("eager", {}, None) is backend
        engine.module.compile(backend=backend)
        same(train(engine, rank), want)
        assert backend.n_frames == 2 and engine.is_deepcompile_active()


@on_ranks(2, preload="torch._dynamo")
def test_keys_that_wait_change_no_bit(rank: int, world: int) -> None:
    torch._dynamo.reset()
    with make_engine(3, compiled=False) as engine:
        want = train(engine, rank)
    keys = ("sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather")
    with make_engine(3, graphs=dict.fromkeys(keys, True)) as engine:
        engine.compile(backend="eager")
        reducer, graphs = engine._compiled._reducer, engine._compiled._graphs
        with (
            mock.patch.object(reducer.flight, "wait", wraps=reducer.flight.wait) as waited,
            mock.patch.object(graphs, "finish", wraps=graphs.finish) as finished,
            mock.patch.object(graphs, "start", wraps=graphs.start) as started,
        ):
            same(train(engine, rank), want)
        assert waited.call_count > len(list(engine.module.parameters()))
        assert finished.call_count == 2 * started.call_count, "once as it begins, and once before the first read"


@on_ranks(2, preload="torch._dynamo")
def test_what_is_refused_leaves_the_engine_as_it_was(rank: int, world: int) -> None:
    for compiled in (True, False):
        with make_engine(3, compiled=compiled) as engine:
            for arguments, says in (
                ({"backend": "indutcor"}, "(?s)'indutcor'.*'inductor'"),
                ({"compile_kwargs": {"ful_graph": True}}, "(?s)no argument 'ful_graph'.*'fullgraph'"),
            ):
                with pytest.raises(ConfigError, match=says):
                    engine.compile(**arguments)
            missing = mock.patch.object(torch_internals, "has_compiler", lambda backend: False)
            with missing, pytest.raises(ConfigError, match=r"(?s)no C\+\+ compiler.*CXX"):
                engine.compile()
            if not compiled:
                with pytest.raises(FeatureError, match="compiled autograd does not work at stage 3"):
                    engine.compile(backend="eager", compiled_autograd_enabled=True)
            assert not engine.is_compiled and not engine.is_deepcompile_active()
            assert "forward" not in vars(engine.module)
            train(engine, rank)
    with make_engine(0) as engine:
        assert engine.get_deepcompile_backend("eager", {}, None) is None


def test_a_compiler_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor_config

    monkeypatch.setattr(inductor_config.cpp, "cxx", ("no_such_compiler",))
    assert not torch_internals.has_compiler("inductor")
    assert torch_internals.has_compiler("eager")


SIDE = 61  # of the matrices that a forward saves for its backward
N_LAYERS = 5


def test_a_backward_frees_each_saved_value_after_its_last_use() -> None:
    alive: list[int] = []

    def count() -> None:
        alive.append(sum(type(t) is torch.Tensor and t.shape == (SIDE, SIDE) for t in gc.get_objects()))

    def edit(graph: torch.fx.GraphModule, is_backward: bool) -> torch.fx.GraphModule:
        if is_backward:
            first = next(node for node in graph.graph.nodes if node.op != "placeholder")
            for place in (first, graph.graph.output_node()):
                with graph.graph.inserting_before(place):
                    graph.graph.call_function(count)
            graph.recompile()
        return graph

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(N_LAYERS):
            x = (x * x).sin()
        return x.sum()

    torch._dynamo.reset()
    compiled = torch.compile(
        forward, backend=lambda graph, given: torch_internals.BACKENDS["eager"](graph, given, edit)
    )
    compiled(torch.ones(SIDE, SIDE, requires_grad=True)).backward()
    begin, end = alive
    assert begin >= 2 * N_LAYERS and end <= 3, f"{begin} matrices at the beginning of the backward, {end} at its end"
