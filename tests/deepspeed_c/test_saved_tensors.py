"""saved_tensors.py: each saved tensor goes to the right packer and comes back. Packers of activations work beside
sharded weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.saved_tensors import SavedTensors
from deepspeed_c.zero import GatheredParameters

WIDTH, LAYERS, STEPS, LR = 13, 3, 4, 0.05
ROWS, WIDE = 3, 29  # the rows of an activation, and its width inside a block


class ToNumpy:
    """A packer that moves tensors of at most ``most`` elements out of torch's memory."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.n = Counter()

    def pack(self, tensor: torch.Tensor) -> np.ndarray | None:
        if tensor.numel() > self.most:
            return None
        self.n["packed"] += 1
        return tensor.detach().numpy().copy()

    def unpack(self, packed: np.ndarray) -> torch.Tensor:
        self.n["unpacked"] += 1
        return torch.from_numpy(packed)


class ToBf16:
    """A packer that rounds fp32 tensors to 16 bits."""

    def __init__(self) -> None:
        self.n = Counter()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.dtype != torch.float32:
            return None
        self.n["packed"] += 1
        return tensor.detach().bfloat16()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        self.n["unpacked"] += 1
        return packed.float()


class Block(nn.Module):
    """Saves activations of two sizes, an output (of tanh), and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return x + y.gather(1, y.argsort(dim=1))


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()


def packers_of(kind: str) -> list[Any]:
    return {
        "none": [],
        "numpy": [ToNumpy(10**6)],
        "bf16": [ToBf16()],
        # Wide activations are rounded, narrow activations are moved.
        "both": [ToNumpy(ROWS * WIDTH), ToBf16()],
    }[kind]


def sharded_body(rank: int, world: int, kind: str) -> tuple[list[float], list[torch.Tensor], list[dict]]:
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": WIDTH * WIDE,
            "stage3_max_reuse_distance": 0,
        },
    }
    losses, packers = [], packers_of(kind)
    with deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0] as engine:
        for packer in packers:
            engine._fetcher.saved.add(packer)
        for step in range(STEPS):
            # Two graphs are in flight: packed tensors of one graph outlive the backward of the other.
            first, second = (engine(batch(i, rank)).square().mean() for i in (step, 50 + step))
            losses += [first.item(), second.item()]
            engine.backward(second)
            engine.backward(first)
            engine.step()
        assert engine._fetcher.stats.live_elems == 0
        with GatheredParameters(list(model.parameters())):
            weights = [p.detach().clone() for p in model.parameters()]
    return losses, weights, [dict(packer.n) for packer in packers]


def expected(world: int, kind: str) -> tuple[list[list[float]], list[torch.Tensor], list[dict]]:
    """Plain torch. A hook of the test keeps weights and gives other tensors to packers of the same kinds."""
    model, losses = make_model(), [[] for _ in range(world)]
    weights = {p.data_ptr() for p in model.parameters()}
    packers = packers_of(kind)

    def pack(tensor: torch.Tensor) -> tuple:
        if tensor.data_ptr() not in weights:
            for packer in packers:
                if (packed := packer.pack(tensor)) is not None:
                    return packer, packed
        return None, tensor

    def unpack(kept: tuple) -> torch.Tensor:
        return kept[1] if kept[0] is None else kept[0].unpack(kept[1])

    for step in range(STEPS):
        model.zero_grad()
        for rank in range(world):
            for i in (step, 50 + step):
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    out = model(batch(i, rank))
                loss = out.square().mean()
                losses[rank].append(loss.item())
                (loss / world).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
    return losses, [p.detach() for p in model.parameters()], [dict(packer.n) for packer in packers]


@pytest.mark.parametrize("kind", ["none", "numpy", "bf16", "both"])
def test_packers_beside_sharded_weights(run_ranks, kind: str) -> None:
    world = 2
    want_losses, want, want_n = expected(world, kind)
    plain = expected(world, "none")[1]
    assert ("bf16" in kind or kind == "both") == (not all(map(torch.equal, want, plain))), "rounding must be seen"
    for rank, (losses, weights, n) in enumerate(run_ranks(world, sharded_body, kind)):
        assert losses == pytest.approx(want_losses[rank], rel=2e-5), (losses, want_losses[rank])
        for a, b in zip(weights, want, strict=True):
            assert torch.allclose(a, b, rtol=2e-5, atol=2e-6), f"rank {rank}: {(a - b).abs().max():g} apart"
        # The packers got every activation and no weight: as many tensors as in plain torch, where a hook sorts weights
        # out.
        assert [{k: world * v for k, v in counts.items()} for counts in n] == want_n, (n, want_n)


class Takes:
    """A packer that takes tensors of one width. Notes each question whether it takes a tensor."""

    def __init__(self, width: int, asked: list[tuple[int, int]]) -> None:
        self.width, self.asked = width, asked

    def pack(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        self.asked.append((self.width, tensor.shape[-1]))
        return [tensor.detach().clone()] if tensor.shape[-1] == self.width else None

    def unpack(self, packed: list[torch.Tensor]) -> torch.Tensor:
        return packed[0]


def run_chain(saved: SavedTensors, function: Callable[[], torch.Tensor]) -> list[object]:
    entered: list[object] = []
    owner = object()
    with saved.hooks_of(owner, entered.append):
        loss = function()
    loss.backward()
    assert all(o is owner for o in entered), entered
    return entered


def test_each_packer_is_asked_for_what_those_before_it_left() -> None:
    asked: list[tuple[int, int]] = []
    saved = SavedTensors()
    for width in (2, 3, 2):
        saved.add(Takes(width, asked))
    tensors = [torch.randn(4, width, requires_grad=True) for width in (2, 3, 5)]
    entered = run_chain(saved, lambda: sum((t * t.detach()).sum() for t in tensors))
    assert all(torch.equal(t.grad, t.detach()) for t in tensors)
    # A product saves a factor if the other requires a gradient. Here only one requires it, so the other is saved.
    assert asked == [(2, 2), (2, 3), (3, 3), (2, 5), (3, 5), (2, 5)], asked
    assert len(entered) == 3, entered


def test_what_nobody_takes_must_not_be_overwritten() -> None:
    saved, x = SavedTensors(), torch.randn(3, requires_grad=True)

    def overwrite() -> torch.Tensor:
        y = x.exp()  # exp saves its output
        y.mul_(2)
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_chain(saved, overwrite)
    asked: list[tuple[int, int]] = []
    saved.add(Takes(3, asked))
    x.grad = None
    run_chain(saved, overwrite)  # the packer took a copy before
    assert asked == [(3, 3)], asked
    assert torch.allclose(x.grad, 2 * x.detach().exp()), (x.grad, x)


def test_what_nobody_takes_goes_to_the_hooks_around() -> None:
    asked: list[tuple[int, int]] = []
    saved = SavedTensors()
    saved.add(Takes(2, asked))
    tensors = [torch.randn(4, width, requires_grad=True) for width in (2, 3, 5)]
    outside: list[Any] = []

    def pack(tensor: torch.Tensor) -> None:
        outside.append(tensor.detach())  # append returns None, so the graph keeps None

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: outside.pop()):
        entered = run_chain(saved, lambda: sum((t * t.detach()).sum() for t in tensors[:2]))
    assert asked == [(2, 2), (2, 3)] and not outside, (asked, outside)
    assert len(entered) == 2 and all(torch.equal(t.grad, t.detach()) for t in tensors[:2])


class CountsForwards(nn.Linear):
    n_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_forwards += 1
        return super().forward(x).tanh()


def around_body(rank: int, world: int, kind: str, is_sharded: bool) -> tuple[list[float], int, int]:
    """Train with saved-tensor hooks around each forward. Return the losses, the number of packed tensors, and the
    number of forwards of the last layer."""
    torch.manual_seed(3)
    model = nn.Sequential(*(CountsForwards(WIDTH, WIDTH) for _ in range(LAYERS)))
    losses, packed = [], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.shape != (
            WIDTH,
            WIDTH,
        ):  # a transposed weight is no parameter
            packed.append(tensor.shape)
        return tensor.detach().clone()

    def run(forward: Callable, x: torch.Tensor) -> torch.Tensor:
        if kind == "checkpoint":
            return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False).square().mean()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            out = forward(x)
        return out.square().mean()

    if is_sharded:
        sharding = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * (WIDTH + 1)}
        # Gather one layer at a time: a backward that took a weight from an earlier forward would find the weight of
        # another layer.
        sharding |= {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": WIDTH * (WIDTH + 1)}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_optimization": sharding,
        }
        with deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0] as engine:
            for step in range(STEPS):
                loss = run(engine, batch(step, rank))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            assert engine._fetcher.stats.live_elems == 0
        return losses, len(packed), model[-1].n_forwards
    for step in range(STEPS):
        shares = [run(model, batch(step, r)) for r in range(world)]
        losses.append(shares[rank].item())
        (sum(shares) / world).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
                p.grad = None
    return losses, len(packed) // world, model[-1].n_forwards // world


@pytest.mark.parametrize("kind", ["copy", "checkpoint"])
def test_hooks_around_an_engine_of_sharded_weights(run_ranks, kind: str) -> None:
    world = 2
    for rank, got in enumerate(run_ranks(world, around_body, kind, True)):
        want = around_body(rank, world, kind, False)
        assert got[0] == pytest.approx(want[0], rel=2e-5), (rank, got, want)
        # The hooks get activations and no weight. With a checkpoint each forward runs again in the backward.
        assert got[1:] == want[1:] and got[2] == (2 if kind == "checkpoint" else 1) * STEPS, (rank, got, want)
