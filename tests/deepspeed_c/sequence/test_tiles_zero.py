"""Tiled parts under every stage of ZeRO. After steps of SGD the weights equal those of a plain process that runs every
part whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deepspeed_c
from deepspeed_c.checkpointing import checkpoint
from deepspeed_c.sequence.tiles import TiledFusedLogitsLoss, TiledMLP
from deepspeed_c.zero.weights.gather_unit import GatherUnit
from tests.ranks import run_ranks
from tests.training import config, engine_of, update

WIDTH, INNER, WORDS, TOKENS, STEPS = 8, 24, 17, 11, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def mlp(self, x):
        return self.down(F.silu(self.up(x)))


class Model(nn.Module):
    """A model with tiled parts. If n_tiles is None, all parts run whole."""

    def __init__(self, n_tiles: int | None, *, recompute: bool = False, names_weights: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.n_tiles, self.recompute, self.names_weights = n_tiles, recompute, names_weights

    def block(self, block, x):
        h = block.norm(x)
        if self.n_tiles is None:
            return x + block.mlp(h)
        weights = [*block.up.parameters(), *block.down.parameters()] if self.names_weights else []
        return x + TiledMLP.apply(Block.mlp, block, h, self.n_tiles, weights)

    def forward(self, ids, labels):
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(self.block, block, x) if self.recompute else self.block(block, x)

        def loss(self, x, y):
            return F.cross_entropy(self.head(x).float(), y)

        if self.n_tiles is None:
            return loss(self, x.flatten(0, 1), labels.flatten())
        weights = list(self.head.parameters()) if self.names_weights else None
        return TiledFusedLogitsLoss.apply(loss, self, x, labels, None, self.n_tiles, weights, "mean")


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    ids = torch.randint(WORDS, (2, TOKENS), generator=generator)
    labels = torch.randint(WORDS, (2, TOKENS), generator=generator)
    labels[:, TOKENS // 2 :: 2] = -100
    return ids, labels


def train(rank, world, stage, n_tiles, gas=1, freeze=(), traits=None, more=None):
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 200}
    settings = config(stage, rows=2, lr=0.5, accumulate=gas, zero=zero, gradient_clipping=0.5, **more or {})
    model = Model(n_tiles, **(traits or {}))
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in freeze))
    engine = engine_of(model, settings)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(gas):
            losses.append(update(engine, engine(*batch(step, micro, rank))))
        norms.append(float(engine.get_global_grad_norm()))
    with deepspeed_c.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    return losses, norms, weights


def train_plain(world, gas=1, freeze=()):
    model = Model(None)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in freeze))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(gas):
            found = [model(*batch(step, micro, rank)) for rank in range(world)]
            losses.append([loss.item() for loss in found])
            (sum(found) / (world * gas)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def compare(outcomes, plain, tolerance=2e-6):
    losses, norms, weights = plain
    for rank, (found_losses, found_norms, found) in enumerate(outcomes):
        assert found_losses == pytest.approx([each[rank] for each in losses], rel=max(tolerance, 1e-5))
        assert found_norms == pytest.approx(norms, rel=max(10 * tolerance, 1e-5))
        for name, expected in weights.items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("n_tiles", [1, 4, 50])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(stage, n_tiles):
    compare(run_ranks(2, train, stage, n_tiles), train_plain(2))


@pytest.mark.parametrize("stage", [1, 3])
def test_accumulation_and_weights_that_nobody_named(stage):
    compare(run_ranks(2, train, stage, 3, 2, (), {"names_weights": False}), train_plain(2, 2))


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpointed_layers(stage):
    compare(run_ranks(2, train, stage, 3, 1, (), {"recompute": True}), train_plain(2))


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_weights(stage):
    freeze = ("up.weight", "words")
    compare(run_ranks(2, train, stage, 3, 1, freeze), train_plain(2, 1, freeze))


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16(stage):
    config = {"bf16": {"enabled": True}}
    whole, tiled = (run_ranks(2, train, stage, n, 1, (), None, config) for n in (None, 4))
    for (a, _, found), (b, _, expected) in zip(tiled, whole):
        assert a == pytest.approx(b, rel=0.02)
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0.02)


def log_gathers(rank, world, n_tiles):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 192,
            # Release weights as early as possible.
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }
    engine = engine_of(Model(n_tiles), config)
    passes, start = [], GatherUnit.start

    def noted(unit):
        passes[-1].append(" ".join(slot.name for slot in unit.slots))
        return start(unit)

    GatherUnit.start = noted
    try:
        for step in range(4):
            passes.append([])
            loss = engine(*batch(step, 0, rank))
            passes.append([])
            update(engine, loss)
    finally:
        GatherUnit.start = start
    return passes[-2:]


def test_stage_3_gathers_once_a_pass():
    found = run_ranks(2, log_gathers, 6)[0]
    for gathered in found:
        assert len(gathered) == len(set(gathered)), gathered
    assert any("head" in name for name in found[0]) and not any("head" in name for name in found[1])
