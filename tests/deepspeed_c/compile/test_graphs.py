"""How many graphs torch.compile makes of a block of a GPT under an engine, against the block alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import on_ranks
from tests.training import config, engine_of, update

WIDTH, HEADS = 16, 2
LENGTHS = (5, 5, 7, 11, 5, 13)


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def run(module: Any, finish: Callable[[torch.Tensor], None]) -> None:
    """Training at several lengths, with an evaluation after each step."""
    for length in LENGTHS:
        x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))
        finish(module(x).square().mean())
        module.eval()
        with torch.no_grad():
            module(x)
        module.train()


def n_graphs_alone() -> int:
    """The graphs of the block without an engine. The compiler runs each as it is."""
    n_graphs = 0

    def count(traced: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal n_graphs
        n_graphs += 1
        return traced.forward

    torch.manual_seed(0)
    block = GptBlock()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    block.compile(backend=count, fullgraph=True)

    def finish(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    run(block, finish)
    return n_graphs


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, preload="torch._dynamo")
def test_an_engine_adds_at_most_one_graph(rank: int, world: int, stage: int) -> None:
    torch._dynamo.reset()
    alone = n_graphs_alone()
    assert alone >= 2, "graphs with gradients and without differ"
    torch._dynamo.reset()
    torch.manual_seed(0)
    settings = config(
        stage, rows=2, lr=0.01, zero={"stage3_param_persistence_threshold": 0}, compile={"deepcompile": True}
    )
    block = GptBlock()
    with engine_of(block, settings) as engine:
        # With fullgraph a break of the graph raises.
        engine.compile(backend="eager", compile_kwargs={"fullgraph": True})

        def finish(loss: torch.Tensor) -> None:
            update(engine, loss)

        run(engine, finish)
        n_frames = engine._compiled.backend.n_frames
        assert 2 <= n_frames <= alone + 1, f"{n_frames} graphs, and {alone} of the block alone"
