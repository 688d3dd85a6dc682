"""Models with the layer ``MoE`` at every ZeRO stage, against one process of plain torch that has all experts and runs
the ranks' batches one after the other."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.moe.layer import MoE
from deepspeed_c.utils import safe_get_full_fp32_param
from deepspeed_c.zero.layout.experts import ExpertNames
from tests.ranks import run_ranks
from tests.training import config, engine_of, update

HIDDEN, N_EXPERTS, STEPS, ROWS, LR = 8, 4, 3, 13, 0.4
CLOSE = {"rtol": 5e-5, "atol": 5e-6}


class Net(nn.Module):
    """A dense layer, two mixtures of experts and an output."""

    def __init__(self, ep: int, k: int, **options: Any) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(HIDDEN, 6), nn.GELU(), nn.Linear(6, HIDDEN))
        common = {"num_experts": N_EXPERTS, "ep_size": ep, "k": k, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.first = MoE(HIDDEN, expert, **{**common, **options})
        self.second = MoE(HIDDEN, expert, **{**common, **options})
        self.after = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
        x = self.before(x)
        total = 0.0
        for layer in (self.first, self.second):
            out, l_aux, _ = layer(x, used)
            x, total = x + out, total + l_aux
        return (self.after(x).squeeze(-1).float() - y).square().mean() + 0.05 * total


def fill(model: nn.Module) -> dict[str, torch.Tensor]:
    """Values by logical name, for a model with all experts."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)) * 31 + len(name))
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return model.state_dict()


def batch(step: int, micro: int, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(rows, HIDDEN, generator=generator), torch.randn(rows, generator=generator)


def config_of(stage: int, gas: int, extra: dict[str, Any]) -> dict[str, Any]:
    return config(
        stage,
        lr=LR,
        accumulate=gas,
        zero={"stage3_param_persistence_threshold": 0},
        **{"gradient_clipping": 0.5, **extra},
    )


def run_body(rank: int, world: int, cells: list[tuple]) -> list[Any]:
    found = []
    whole = fill(Net(1, 1, use_residual=True))
    for ep, k, stage, gas, options, extra in cells:
        model = Net(ep, k, **options)
        with engine_of(model, config_of(stage, gas, extra)) as engine:
            engine.load_module_state_dict({n: whole[n] for n in Net(1, 1, **options).state_dict()})
            norms, to = [], next(model.parameters()).dtype
            for step in range(STEPS):
                for micro in range(gas):
                    x, y = batch(step, micro, rank, ROWS)
                    update(engine, engine(x.to(to), y))
                norms.append(float(engine.get_global_grad_norm()))
            load = engine.expert_load()
            numbered = ExpertNames(model)
            params = {numbered.logical(n): safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters()}
            found.append((norms, params, load))
    return found


def plain(world: int, k: int, gas: int, options: dict[str, Any], dtype: torch.dtype):
    model = Net(1, k, **options)
    whole = fill(Net(1, 1, use_residual=True))
    model.load_state_dict({name: whole[name] for name in model.state_dict()})
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for step in range(STEPS):
        for micro, rank in itertools.product(range(gas), range(world)):
            x, y = batch(step, micro, rank, ROWS)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(x, y)
            (loss / (gas * world)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


DROP = {"capacity_factor": 0.6, "min_capacity": 1}
ALL = {"drop_tokens": False}
RESIDUAL = {"use_residual": True, "drop_tokens": False}
CELLS = {
    1: [(1, k, stage, 1, options, {}) for k, stage, options in ((1, 0, DROP), (2, 2, ALL), (3, 3, RESIDUAL))],
    2: [
        *((2, k, stage, 1, options, {}) for stage in range(4) for k, options in ((1, DROP), (2, ALL))),
        *((2, k, stage, 2, options, {}) for stage, k, options in ((1, 3, DROP), (3, 2, RESIDUAL), (2, 2, DROP))),
        (1, 2, 3, 2, DROP, {}),
    ],
    4: [
        *(
            (4, k, stage, 1, options, {})
            for stage, k, options in ((0, 2, DROP), (1, 1, ALL), (2, 3, ALL), (3, 2, RESIDUAL))
        ),
        *((2, k, stage, 2, options, {}) for stage, k, options in ((2, 1, DROP), (3, 3, ALL))),
    ],
}


@pytest.mark.parametrize("world", sorted(CELLS))
def test_training_equals_one_process_with_all_experts(world: int) -> None:
    results = run_ranks(world, run_body, CELLS[world])
    for i, (ep, k, stage, gas, options, extra) in enumerate(CELLS[world]):
        label = f"world {world} ep {ep} k {k} stage {stage} gas {gas} {options} {extra}"
        want_norms, want = plain(world, k, gas, options, torch.float32)
        seen: set[str] = set()
        for rank, of_rank in enumerate(results):
            norms, params, load = of_rank[i]
            assert torch.allclose(torch.tensor(norms), torch.tensor(want_norms), **CLOSE), (label, norms, want_norms)
            seen |= params.keys()
            for name, got in params.items():
                worst = (got - want[name]).abs().max()
                assert torch.allclose(got, want[name], **CLOSE), f"{label} rank {rank}: {name} is off by {worst:g}"
            assert set(load) == {"first.deepspeed_moe", "second.deepspeed_moe"}, (label, load)
            for name, of_layer in load.items():
                assert sum(of_layer.tokens) == world * ROWS * k, (label, name, of_layer)
                assert (sum(of_layer.dropped) > 0) == (options is DROP), (label, name, of_layer)
            assert load == results[0][i][2], (label, rank, load)
        assert seen == want.keys(), (label, seen ^ want.keys())


def bf16_body(rank: int, world: int, ep: int, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    (norms, params, _), *_ = run_body(rank, world, [(ep, 2, stage, 1, ALL, {"bf16": {"enabled": True}})])
    return norms, params


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_has_the_same_bits_for_any_number_of_expert_ranks(stage: int) -> None:
    """The rows of an expert come from all ranks together, in another order, and bf16 gradients of its weights are
    rounded sums of them; so experts may differ in the last bits, and all other weights may not by more."""
    whole: dict[str, torch.Tensor] = {}
    for _, params in run_ranks(2, bf16_body, 1, stage):
        whole.update(params)
    for _, params in run_ranks(2, bf16_body, 2, stage):
        for name, got in params.items():
            off = ((got - whole[name]).norm() / whole[name].norm()).item()
            assert off < 0.01, (stage, name, off)


def diverging_body(rank: int, world: int, stage: int) -> float:
    """Rank 1 has no token for half of the layers' experts, and then no token at all."""
    model = Net(2, 1, drop_tokens=False)
    with engine_of(model, config_of(stage, 1, {})) as engine:
        for step in range(3):
            x, y = batch(step, 0, rank, ROWS)
            used = torch.ones(ROWS) if rank == 0 or step == 0 else torch.zeros(ROWS)
            loss = engine(x, y, used)
            update(engine, loss)
        return loss.item()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_without_tokens_takes_part(stage: int) -> None:
    losses = run_ranks(2, diverging_body, stage)
    assert all(math.isfinite(loss) and abs(loss) < 1e3 for loss in losses), losses
