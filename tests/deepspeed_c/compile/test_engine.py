"""engine.compile with deepcompile: the compiled engine against the same engine without a compiler, to the bit where each
operator runs as it is."""

from __future__ import annotations

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import ConfigError
from tests.cells import cells
from tests.deepspeed_c.compile.models import WIDTH, WORDS, batch_of, close, make_engine, peak_of, same, train
from tests.ranks import on_ranks


@pytest.mark.parametrize(("stage", "precision"), cells((1, 2, 3), ("fp32", "bf16", "fp16", "autocast"), at_once=1))
@on_ranks(2, preload="torch._dynamo")
def test_the_bits_are_those_without_a_compiler(rank: int, world: int, stage: int, precision: str) -> None:
    torch._dynamo.reset()
    with make_engine(stage, precision, compiled=False) as engine:
        want, peak = train(engine, rank), peak_of(engine)
    with make_engine(stage, precision) as engine:
        engine.compile(backend="eager", compile_kwargs={"fullgraph": True})
        assert engine.is_compiled and engine.is_deepcompile_enabled() and engine.is_deepcompile_active()
        same(train(engine, rank), want)
        assert peak_of(engine) == peak, "as many weights are gathered at once as without a compiler"
        assert engine._compiled.backend.n_frames == 2, "a frame with gradients, and one without"


@on_ranks(2, preload="torch._dynamo", fresh=True)
def test_inductor(rank: int, world: int) -> None:
    torch._dynamo.reset()
    with make_engine(3, compiled=False) as engine:
        want, peak = train(engine, rank), peak_of(engine)
    with make_engine(3) as engine:
        engine.compile(compile_kwargs={"fullgraph": True})
        close(train(engine, rank), want, 1e-5)
        assert peak_of(engine) == peak, "Inductor keeps the order of gathers and releases"


@on_ranks(2, preload="torch._dynamo")
def test_a_model_of_several_graphs(rank: int, world: int) -> None:
    torch._dynamo.reset()
    with make_engine(3, compiled=False) as engine:
        want = train(engine, rank)
    with make_engine(3, breaks=True) as engine:
        engine.compile(backend="eager")
        same(train(engine, rank), want)
        assert engine._compiled.backend.n_frames > 2


@on_ranks(2, preload="torch._dynamo")
def test_ranks_with_other_graphs_do_not_wait_for_one_another(rank: int, world: int) -> None:
    """Ranks compile in different steps, for other shapes, and rank 1 compiles nothing after its first frames."""

    def length(i: int) -> int:
        return 3 + (i * (rank + 2)) % 5

    torch._dynamo.reset()
    with make_engine(3, compiled=False) as engine:
        want = train(engine, rank, length)
    with make_engine(3) as engine:
        engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        with torch._dynamo.config.patch(recompile_limit=8 if rank == 0 else 1):
            same(train(engine, rank, length), want)


@on_ranks(2, preload="torch._dynamo")
def test_an_exception_is_followed_by_the_same_steps(rank: int, world: int) -> None:
    torch._dynamo.reset()
    with make_engine(3, compiled=False) as engine:
        want = train(engine, rank)
    with make_engine(3) as engine:
        engine.compile(backend="eager")
        engine.module.fails = True
        with pytest.raises(ValueError, match="a model that fails"):
            engine(*batch_of(rank, 0))
        engine.module.fails = False
        same(train(engine, rank), want)


@on_ranks(2, preload="torch._dynamo")
def test_hooks_of_the_user_see_gradients(rank: int, world: int) -> None:
    """A user's hook on a parameter sees its gradient, before and after the model is compiled."""
    torch._dynamo.reset()
    with make_engine(2) as engine:
        seen: list[int] = []
        engine.module.words.weight.register_hook(lambda grad: seen.append(grad.numel()))
        engine.compile(backend="eager")
        engine.backward(engine(*batch_of(rank, 0)))
        assert seen == [WORDS * WIDTH], seen
        engine.module.blocks[0].up.bias.register_hook(lambda grad: seen.append(grad.numel()))
        engine.backward(engine(*batch_of(rank, 1)))
        assert sorted(seen[1:]) == [4 * WIDTH, WORDS * WIDTH], seen
        engine.step()


@on_ranks(2, preload="torch._dynamo")
def test_a_closed_engine_leaves_the_module_as_it_was(rank: int, world: int) -> None:
    engine = make_engine(3)
    engine.compile(backend="eager")
    train(engine, rank)
    module = engine.module
    assert "forward" in vars(module)
    engine.close()
    assert "forward" not in vars(module) and not engine.is_deepcompile_active()
    x, y = batch_of(rank, 0)
    with deepspeed_c.zero.GatheredParameters(list(module.parameters())):
        assert torch.isfinite(module(x, y))


@on_ranks(2, preload="torch._dynamo")
def test_a_refused_backend_leaves_the_engine_as_it_was(rank: int, world: int) -> None:
    with make_engine(3) as engine:
        with pytest.raises(ConfigError, match="'indutcor' cannot take graphs.*\n?.*'inductor'"):
            engine.compile(backend="indutcor")
        assert not engine.is_compiled
        train(engine, rank)


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@on_ranks(2, preload="torch._dynamo")
def test_gathered_weights_are_not_saved_for_the_backward(rank: int, world: int, precision: str) -> None:
    """What autograd has saved after a forward: weights as references that hold no memory, except for those of a unit
    that stays gathered, and no copy of a weight in another dtype."""
    torch._dynamo.reset()
    with make_engine(3, precision) as engine:
        engine.compile(backend="eager", compile_kwargs={"fullgraph": True})
        shapes = {tuple(p.ds_shape) for p in engine.module.parameters() if p.ndim == 2}
        loss = engine(*batch_of(rank, 0))
        nodes, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                todo += [following for following, _ in node.next_functions]
        (compiled,) = (node for node in nodes if "CompiledFunction" in type(node).__name__)
        saved = [t for t in compiled.saved_tensors if {tuple(t.shape), tuple(t.shape[::-1])} & shapes]
        whole = sum(t.untyped_storage().nbytes() >= t.nbytes for t in saved)
        ready = sum(len(group.slots) for group in engine._fetcher.groups if group.is_ready)
        assert len(saved) == 7, f"{len(saved)} of 7 matrices are saved"
        assert whole <= ready < len(saved), f"{whole} saved weights have memory; {ready} parameters are gathered"
        assert {t.dtype for t in saved} == {torch.float32}, "a cast is computed again in the backward"
        engine.backward(loss)
