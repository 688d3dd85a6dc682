"""Random numbers of a training forward with ``same_bits``: by step and place of the grain, on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed_c import checkpointing
from deepspeed_c.moe.layer import MoE
from deepspeed_c.recompute.rng import stream_of_grain
from tests.training import config, engine_of, update

N_GRAINS, ROWS, WIDTH = 12, 2, 8
WORLDS = (1, 2, 3, 4, 6)


class Noisy(nn.Module):
    """Keeps the masks that each forward draws. Its gradients are tiny, so that weights stay as they are."""

    def __init__(self, *, recomputes: bool, has_experts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.moe = None
        if has_experts:
            self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, k=1, noisy_gate_policy="RSample")
        self.recomputes, self.seen = recomputes, []

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        seen = [mask.flatten().tolist(), random.random(), np.random.rand()]
        self.seen.append(seen)
        y = self.lin(x.to(self.lin.weight)).tanh() * mask.to(self.lin.weight)
        if self.moe is not None:
            y, auxiliary, _ = self.moe(y)
            seen.append(self.moe.deepspeed_moe.gate.last_indices.flatten().tolist())
            y = y + auxiliary
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpointing.checkpoint(self.layer, x) if self.recomputes else self.layer(x)
        return y.square().mean() * 1e-30


def settings(world: int, **sections: Any) -> dict[str, Any]:
    found = config(2, rows=ROWS, **sections)
    del found["train_micro_batch_size_per_gpu"]
    return {**found, "train_batch_size": N_GRAINS * ROWS, "same_bits": {"enabled": True, "grain": ROWS}}


def body(rank: int, world: int, recomputes: bool, has_experts: bool) -> list:
    torch.manual_seed(rank + 10 * world)
    random.seed(rank)
    model = Noisy(recomputes=recomputes, has_experts=has_experts)
    with engine_of(model, settings(world)) as engine:
        for _ in range(3 * N_GRAINS // world):
            before = torch.get_rng_state()
            loss = engine(torch.ones(ROWS, WIDTH))
            assert torch.equal(torch.get_rng_state(), before)
            torch.rand(rank)  # the program's own numbers
            engine.backward(loss)
            engine.step()
        assert engine.global_steps == 3
    return model.seen


@pytest.mark.parametrize("recomputes, has_experts", [(False, False), (True, False), (False, True)])
def test_masks_by_position_are_those_of_one_rank(run_ranks: Callable, recomputes: bool, has_experts: bool) -> None:
    found = {}
    for world in WORLDS if not recomputes else (1, 3):
        by_rank = run_ranks(world, body, recomputes, has_experts)
        if recomputes:  # Python and numpy are not restored for a second run, which ends early
            by_rank = [[[masks[0]] for masks in seen] for seen in by_rank]
            for seen in by_rank:
                assert len(seen) == 6 * N_GRAINS // world and seen[0::2] == seen[1::2], seen
            by_rank = [seen[::2] for seen in by_rank]
        found[world] = [masks for round_ in zip(*by_rank, strict=True) for masks in round_]
    for world, seen in found.items():
        assert seen == found[1], (world, seen, found[1])
    assert len({repr(masks) for masks in found[1]}) == 3 * N_GRAINS, "each grain has its own"


def rules_body(rank: int, world: int) -> None:
    model = Noisy(recomputes=False, has_experts=False)
    x = torch.ones(ROWS, WIDTH)

    def of_grain(step: int, position: int, call: int = 0) -> list[float]:
        with stream_of_grain(77, step, position, call):
            return nn.functional.dropout(torch.ones_like(x), 0.5).flatten().tolist()

    with engine_of(model, settings(world, seed=77)) as engine:
        # Two forwards of a micro-batch draw other numbers, and an evaluation draws the program's.
        engine(x)
        update(engine, engine(x))
        assert [seen[0] for seen in model.seen] == [of_grain(0, rank), of_grain(0, rank, 1)]
        engine.eval()
        torch.manual_seed(4)
        engine(x)
        torch.manual_seed(4)
        assert model.seen[-1][0] == nn.functional.dropout(torch.ones_like(x), 0.5).flatten().tolist()
        engine.train()
        engine(x)
        assert model.seen[-1][0] == of_grain(0, world + rank)
        # A window that begins again draws its numbers again.
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.backward(Fails.apply(engine(x)))
        update(engine, engine(x))
        assert model.seen[-1][0] == of_grain(0, rank)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")


def test_rules_of_forwards(run_ranks: Callable) -> None:
    run_ranks(2, rules_body)


def skipped_body(rank: int, world: int) -> list:
    model = Noisy(recomputes=False, has_experts=False)
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    with engine_of(model, settings(world, fp16=fp16)) as engine:
        for i in range(2 * N_GRAINS // world):
            loss = engine(torch.ones(ROWS, WIDTH))
            if i == 0:
                loss.register_hook(lambda grad: grad * float("inf"))
            engine.backward(loss)
            engine.step()
        assert engine.skipped_steps == 1 and engine.global_steps == 2, (engine.skipped_steps, engine.global_steps)
    return model.seen


def test_a_skipped_step_has_a_number_of_its_own(run_ranks: Callable) -> None:
    seen = {}
    for world in (1, 3):
        seen[world] = [m for round_ in zip(*run_ranks(world, skipped_body), strict=True) for m in round_]
    assert seen[1] == seen[3] and len({repr(m) for m in seen[1]}) == 2 * N_GRAINS, seen
