"""zero/weights: several micro-batches run forward before their backwards, in any order. Results, plans and collectives
are checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c.zero import GatheredParameters
from deepspeed_c.zero.weights.hooks import ModuleHooks

WIDTH, LAYERS, CHUNKS = 13, 3, 2  # LAYERS: of each chunk
# Plans are learnt in the first step.
LEARN, STEPS = 1, 3
LR = 0.05

# The operations of a step. f1: forward of micro-batch 1. b1: backward of micro-batch 1. n1: forward under no_grad.
# d1: drop of the graph. b1+2: one backward from the sum of two losses. u1: loss.backward() called by the user. g1:
# autograd.grad of the loss to the input. f1.0: forward of chunk 0 alone, from the detached output of the chunk before.
# Operations after | replace those before it on all ranks but the first.
ORDERS = {
    "one after another": "f1 b1 f2 b2", "first in, first out": "f1 f2 b1 b2", "last in, first out": "f1 f2 b2 b1",
    "any order": "f1 f2 f3 b2 b3 b1", "no_grad between": "f1 n2 f2 n1 b1 n2 b2", "no backward": "f1 f2 f3 b1 d2 b3",
    "no backward, kept": "f1 f2 f3 b1 b3", "together": "f1 f2 f3 b1+3 b2", "steady state": "f1 f2 b1 f3 b2 f4 b3 b4",
    "gradient by the input": "f1 f2 g1 b2 b1", "user's": "f1 f2 u1 u2", "user's, last first": "f1 f2 f3 u3 u1 u2",
    "chunks": "f1.0 f2.0 f1.1 b1.1 f2.1 b1.0 b2.1 b2.0",
    "chunks, interleaved": "f1.0 f2.0 f1.1 f2.1 f3.0 b1.1 b2.1 f3.1 b1.0 b3.1 b2.0 b3.0",
    "chunks and all": "f1.0 f2 f1.1 n3 b1.1 b2 b1.0", "ranks that leave a loss out": "f1 f2 f3 b1+2 b3|f1 f2 f3 b2 b3",
    "ranks that drop a graph": "f1 f2 f3 b1 b3|f1 f2 d2 f3 b1 b3",
    "user's, ranks that leave a loss out": "f1 f2 u1+2|f1 f2 u2",
}  # fmt: skip


class Stack(nn.Module):
    """Chunks of layers without bias. Each layer fills a bucket, and each chunk can be called alone. ``kind``: how a
    chunk runs its layers."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.chunks = nn.ModuleList(Chunk(kind) for _ in range(CHUNKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for chunk in self.chunks:
            x = chunk(x)
        return x


class Chunk(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "plain" or not torch.is_grad_enabled():
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=self.kind == "reentrant")


def make_model(kind: str) -> Stack:
    torch.manual_seed(7)
    return Stack(kind)


def batch(step: int, micro: str, rank: int) -> torch.Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * int(micro) + rank))
    return x.requires_grad_()  # otherwise no backward would need the weight of the first layer


class Run:
    """Runs the operations of an order on the data of one rank. ``call(x)`` and ``chunks`` run the model, and
    ``backward`` runs backward from a loss."""

    def __init__(self, call: Any, chunks: Sequence[nn.Module], backward: Any, users_backward: Any) -> None:
        self.call, self.chunks, self.backward, self.users_backward = call, chunks, backward, users_backward

    def step(self, order: str, step: int, rank: int) -> list[float]:
        order = order.split("|")[-1 if rank else 0]
        losses: dict[str, torch.Tensor] = {}
        ins: dict[str, torch.Tensor] = {}
        outs: dict[str, torch.Tensor] = {}
        said: list[float] = []
        for word in order.split():
            op, name = word[0], word[1:]
            micro, _, part = name.partition(".")
            if op == "n":
                with torch.no_grad():
                    said.append(self.call(batch(step, micro, rank)).square().mean().item())
            elif op == "d":
                del losses[name]
            elif part and op == "f":
                i = int(part)
                x = batch(step, micro, rank) if i == 0 else outs[f"{micro}.{i - 1}"].detach().requires_grad_()
                ins[name], outs[name] = x, self.chunks[i](x)
            elif part:
                i = int(part)
                if i == CHUNKS - 1:
                    loss = outs[name].square().mean()
                    said.append(loss.item())
                else:
                    loss = (outs[name] * ins[f"{micro}.{i + 1}"].grad).sum()
                self.backward(loss)
            elif op == "f":
                ins[name] = batch(step, micro, rank)
                losses[name] = self.call(ins[name]).square().mean()
                said.append(losses[name].item())
            elif op == "g":
                (grad,) = torch.autograd.grad(losses[name], ins[name], retain_graph=True)
                said.append(grad.square().sum().item())
            else:
                loss = sum(losses[m] for m in micro.split("+"))
                (self.backward if op == "b" else self.users_backward)(loss)
        return said


def sharded_body(rank: int, world: int, order: str, stage: int, kind: str, zero: dict) -> tuple:
    model = make_model(kind)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0, **zero,
        },
    }  # fmt: skip
    losses, collectives = [], []
    with deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0] as engine:
        fetcher, ledger, before = engine._fetcher, engine._comm.ledger, None
        if fetcher is not None and fetcher.groups:
            fetcher.hooks.remove()
            ModuleHooks([model, *model.chunks], fetcher, engine._name_of_pass)
        run = Run(engine, model.chunks, engine.backward, lambda loss: loss.backward())
        for step in range(LEARN + STEPS):
            if step == LEARN and fetcher is not None:
                before = fetcher.stats.as_dict()
            seen = ledger.last
            losses.append(run.step(order, step, rank))
            engine.step()
            collectives += [(e.op, e.n_bytes, e.label) for e in ledger.recent(1000) if e.seq > seen]
        got = {} if before is None else {key: n - before[key] for key, n in fetcher.stats.as_dict().items()}
        with GatheredParameters(list(model.parameters())):
            weights = [p.detach().clone() for p in model.parameters()]
    return losses, weights, collectives, got


def expected(world: int, order: str, kind: str) -> tuple[list, list[torch.Tensor]]:
    model = make_model(kind)
    losses: list[list] = [[] for _ in range(world)]

    def backward(loss: torch.Tensor) -> None:
        (loss / world).backward()

    def chunk_backward(loss: torch.Tensor) -> None:
        loss.backward()

    for step in range(LEARN + STEPS):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(world):
            for p in model.parameters():
                p.grad = None
            run = Run(model, model.chunks, chunk_backward, chunk_backward)
            losses[rank].append(run.step(order, step, rank))
            for t, p in zip(total, model.parameters()):
                t += p.grad / world
        with torch.no_grad():
            for t, p in zip(total, model.parameters()):
                p -= LR * t
    return losses, [p.detach() for p in model.parameters()]


def gathers_of(order: str) -> int:
    """The number of gathers in a step: each forward and each backward gathers each of its layers once. In these orders
    the first rank uses every layer that any rank uses."""
    n = 0
    for word in order.split("|")[0].split():
        if word[0] != "d":
            n += LAYERS * (1 if "." in word else CHUNKS) * (1 + word.count("+"))
    return n


def check(run_ranks: Any, world: int, order: str, stage: int, kind: str, **zero: Any) -> None:
    want_losses, want = expected(world, order, kind)
    results = run_ranks(world, sharded_body, order, stage, kind, zero)
    for rank, (losses, weights, collectives, got) in enumerate(results):
        assert torch.allclose(torch.tensor(losses), torch.tensor(want_losses[rank]), rtol=2e-5, atol=1e-6), (
            f"rank {rank}: losses {losses}, want {want_losses[rank]}"
        )
        for i, (a, b) in enumerate(zip(weights, want, strict=True)):
            assert torch.allclose(a, b, rtol=2e-5, atol=2e-6), f"rank {rank} layer {i}: {(a - b).abs().max():g} apart"
        assert collectives == results[0][2], f"rank {rank} and rank 0 entered other collectives"
        if stage == 3 and world > 1:
            assert got["n_unexpected"] == got["n_replans"] == 0, (got, gathers_of(order))
            if kind == "plain":
                assert got["n_gathers"] == STEPS * gathers_of(order), (got, gathers_of(order))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", list(ORDERS))
def test_an_order_of_passes(run_ranks, name: str, stage: int, world: int) -> None:
    check(run_ranks, world, ORDERS[name], stage, "plain")


@pytest.mark.parametrize("kind", ["non_reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["first in, first out", "any order", "no backward, kept", "chunks, interleaved"])
def test_checkpointed_blocks(run_ranks, name: str, kind: str) -> None:
    check(run_ranks, 2, ORDERS[name], 3, kind)


@pytest.mark.parametrize("ahead", [0, WIDTH * WIDTH])
@pytest.mark.parametrize("name", ["any order", "chunks, interleaved"])
def test_little_is_gathered_ahead(run_ranks, name: str, ahead: int) -> None:
    check(run_ranks, 2, ORDERS[name], 3, "plain", stage3_prefetch_bucket_size=ahead)
