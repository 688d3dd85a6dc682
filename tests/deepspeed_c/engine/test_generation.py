"""Generation at stage 3 with a model that exceeds ``stage3_max_live_parameters``, before and after the order of gathers
is learnt: ranks may stop after different numbers of forwards. ``test_generate.py`` has models that are gathered once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed_c
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.ranks import on_ranks, run_ranks
from tests.training import engine_of, update

VOCAB, WIDTH = 17, 9
FORWARDS = (0, 5, 1)


class Writer(nn.Module):
    """The head comes first in order of registration and last in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens).mean(0)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens, n):
        for _ in range(n):
            tokens = torch.cat([tokens, self(tokens).argmax().view(1)])
        return tokens


def make() -> Writer:
    torch.manual_seed(11)
    return Writer()


def body(rank: int, world: int, is_learnt: bool, synced: bool) -> list[list[int]]:
    zero = {"reduce_bucket_size": 60, "stage3_prefetch_bucket_size": 100, "stage3_max_live_parameters": 300}
    engine = deepspeed_c.initialize(model=make(), config=make_config(3, "fp32", 1, {"zero_optimization": zero}))[0]
    start = torch.tensor([rank + 1, 3])
    results = []
    with engine:
        engine.eval()
        if is_learnt:
            with torch.no_grad():
                engine(start)
        for turn in range(3):
            results.append(engine.generate(start, FORWARDS[(rank + turn) % 3], synced=synced).tolist())
        assert engine._fetcher.stats.live_elems == 0
        # Training goes on as if nothing had been generated.
        engine.train()
        update(engine, engine(start).square().mean())
        assert engine.was_step_applied()
    return results


@pytest.mark.parametrize(
    "world, is_learnt, synced", [(2, True, True), (2, False, False), (3, True, False), (3, False, False)]
)
def test_ranks_stop_after_different_numbers_of_forwards(world: int, is_learnt: bool, synced: bool) -> None:
    plain = make()
    for rank, got in enumerate(run_ranks(world, body, is_learnt, synced)):
        want = [plain.generate(torch.tensor([rank + 1, 3]), FORWARDS[(rank + t) % 3]).tolist() for t in range(3)]
        assert got == want, f"rank {rank}: {got} is not {want}"


@on_ranks(2, preload="torch._dynamo")
def test_graphs_that_gather_by_themselves(rank: int, world: int) -> None:
    torch._dynamo.reset()
    plain, start = make(), torch.tensor([rank + 1, 3])
    zero = {"reduce_bucket_size": 60, "stage3_prefetch_bucket_size": 100, "stage3_max_live_parameters": 300}
    config = make_config(3, "fp32", 1, {"zero_optimization": zero, "compile": {"deepcompile": True}})
    with deepspeed_c.initialize(model=make(), config=config)[0] as engine:
        engine.compile(backend="eager")
        engine.eval()
        for turn in range(4):
            n = FORWARDS[(rank + turn) % 3]
            assert engine.generate(start, n).tolist() == plain.generate(start, n).tolist(), turn
            assert engine._fetcher.stats.live_elems == 0
        assert engine.is_compiled and engine._fetcher.stats.max_live_elems <= 300


class Judge(nn.Module):
    """Generates within its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = make()
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.value(self.writer.embed(self.generate(tokens, 2)).mean(0))

    def generate(self, tokens: torch.Tensor, n: int) -> torch.Tensor:
        return self.writer.generate(tokens, n)


@on_ranks(3)
def test_a_forward_that_generates(rank: int, world: int) -> None:
    zero = {"reduce_bucket_size": 60, "stage3_max_live_parameters": 300}
    torch.manual_seed(1)
    plain = Judge()
    torch.manual_seed(1)
    start = torch.tensor([rank + 1, 3])
    with engine_of(Judge(), make_config(3, "fp32", 1, {"zero_optimization": zero})) as engine:
        assert torch.equal(engine(start), plain(start))  # in training: one pass, in which all ranks do the same
        engine.eval()
        with engine.synced_generation(), torch.no_grad():
            for _ in range(FORWARDS[rank]):
                assert torch.equal(engine(start), plain(start))
        # Parts of the model are called without a forward of the whole.
        assert engine.generate(start, FORWARDS[rank]).tolist() == plain.generate(start, FORWARDS[rank]).tolist()
