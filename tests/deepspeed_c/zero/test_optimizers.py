"""Each optimizer over shards against the same optimizer over whole parameters in one process. Ours are given by name,
torch's as client objects.

tests/ops compares the classes with the formulas of their papers. These tests show that sharding over ranks changes
nothing. The runs are fp32. The tolerance is the parity oracle's, because sums are taken in another order.
"""

from __future__ import annotations

import pytest
import torch

import deepspeed_c
from deepspeed_c import errors
from deepspeed_c.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed_c.ops.adam import FusedAdam
from deepspeed_c.ops.lamb import FusedLamb
from deepspeed_c.ops.lion import FusedLion
from deepspeed_c.ops.muon import Muon
from deepspeed_c.ops.sgd import FusedSGD
from tests.deepspeed_c.zero.reference import Reference, flow_of, recorded
from tests.deepspeed_c.zero.test_oracle import STAGES, by_rank, check, check_cells, check_rounded, make_config
from tests.deepspeed_c.zero.traits import (
    CLIP,
    STEPS,
    TRAITS,
    Run,
    batch,
    make_model,
    plain_run,
    rounded_run,
)
from tests.ranks import run_ranks
from tests.training import engine_of, update, whole_weights

OURS = {
    "Adam": (FusedAdam, {"lr": 0.02, "eps": 1e-3, "adam_w_mode": False, "weight_decay": 0.1}),
    "Lamb": (FusedLamb, {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}),
    "Lion": (FusedLion, {"lr": 0.005, "weight_decay": 0.1}),
    "Adagrad": (DeepSpeedCPUAdagrad, {"lr": 0.05, "eps": 1e-3}),
    "SGD": (FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("trait", ["tied", "zero_size"])
@pytest.mark.parametrize("name", list(OURS))
def test_ours(name: str, trait: str, world: int) -> None:
    cls, params = OURS[name]
    extra = {"optimizer": {"type": name, "params": params}}
    cells = [(stage, 2) for stage in STAGES]
    check_cells(trait, "fp32", world, cells, extra, lambda groups: cls(groups, **params))


def muon_body(rank: int, world: int, stage: int) -> Run:
    model = make_model(TRAITS["tied"])
    config = make_config(
        stage, "fp32", 1, {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.01}}}
    )
    losses, norms = [], []
    with deepspeed_c.initialize(model=model, config=config)[0] as engine:
        for step in range(STEPS):
            losses.append(update(engine, engine(*batch(step, 0, rank, 0))))
            norms.append(engine.get_global_grad_norm())
        return Run(losses, norms, whole_weights(model))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_orthogonalises_whole_matrices(stage: int, world: int) -> None:
    def make(groups):
        params = groups[0]["params"]
        return Muon(
            [
                {"params": [p for p in params if p.dim() >= 2], "use_muon": True, "lr": 0.02},
                {"params": [p for p in params if p.dim() < 2], "use_muon": False, "lr": 0.01},
            ]
        )

    want = plain_run(TRAITS["tied"], world, 1, make)
    for rank, got in enumerate(run_ranks(world, muon_body, stage)):
        check(f"muon stage {stage} world {world}", got, want, by_rank(want.losses, world, 1, 1, rank))


CLIENTS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02, eps=1e-3),
}


def client_body(rank: int, world: int, name: str, trait: str, stage: int, precision: str, presteps: int) -> Run:
    model = make_model(TRAITS[trait])
    optimizer = CLIENTS[name](list(model.parameters()))
    for step in range(presteps):
        prestep(model, optimizer, step)
    config = make_config(stage, precision, 1, {})
    del config["optimizer"]
    losses, norms = [], []
    with engine_of(model, config, optimizer=optimizer) as engine, recorded(engine) as order:
        assert engine._optimizer.optimizer is optimizer
        for step in range(STEPS):
            x, y = batch(step, 0, rank, 0)
            losses.append(update(engine, engine(x.to(next(model.parameters()).dtype), y)))
            norms.append(engine.get_global_grad_norm())
        params = {n: deepspeed_c.utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    return Run(losses, norms, params, order=order)


def prestep(model, optimizer, step: int) -> None:
    model(*batch(50 + step, 0, 0, 0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("presteps", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", list(CLIENTS))
def test_client_optimizers_fresh_or_with_state(name: str, world: int, presteps: int) -> None:
    for trait in ("tied", "unused") if presteps == 0 else ("tied",):

        def make(groups):
            model_params = groups[0]["params"]
            return CLIENTS[name](model_params)

        want = plain_with_presteps(trait, world, make, presteps)
        for stage in (0, 1, 2, 3):
            for rank, got in enumerate(run_ranks(world, client_body, name, trait, stage, "fp32", presteps)):
                label = f"torch {name} {trait} stage {stage} world {world} presteps {presteps}"
                check(label, got, want, by_rank(want.losses, world, 1, 1, rank))


def plain_with_presteps(trait: str, world: int, make, presteps: int) -> Run:
    model = make_model(TRAITS[trait])
    optimizer = make([{"params": list(model.parameters())}])
    for step in range(presteps):
        prestep(model, optimizer, step)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            loss = model(*batch(step, 0, rank, 0))
            losses.append(loss.item())
            (loss / world).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return Run(losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()})


class ClientReference(Reference):
    """The reference, with torch's SGD as its optimizer."""

    def _update(self, p, group, grad_scale: float) -> None:
        if p not in self.states:
            master = torch.nn.Parameter(self.masters[p])
            self.states[p] = {"master": master, "optimizer": CLIENTS["SGD"]([master])}
        master = self.states[p]["master"]
        master.grad = self.sums[p].float() * torch.tensor(grad_scale, dtype=torch.float32)
        with torch.enable_grad():
            self.states[p]["optimizer"].step()
        self.set_master(p, master.detach())


def test_a_client_optimizer_trains_in_bf16_over_fp32_masters() -> None:
    for stage in (0, 2, 3):
        gots = run_ranks(2, client_body, "SGD", "plain", stage, "bf16", 0)
        trait = TRAITS["plain"]
        flow = flow_of(make_config(stage, "bf16", 1, {}), 2, make_model(trait))
        want = rounded_run(trait, 2, flow, [got.order for got in gots], ClientReference)
        check_rounded(f"SGD bf16 stage {stage}", gots, 1, 1, want)


class Normalised(torch.optim.Optimizer):
    """Is not elementwise, and does not declare that."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])


def untested_body(rank: int, world: int) -> list[Run]:
    runs = []
    for stage in (0, 1):
        model = make_model(TRAITS["tied"])
        config = make_config(stage, "fp32", 1, {})
        del config["optimizer"]
        if stage == 1:
            with pytest.raises(errors.OptimizerError, match="not known to be elementwise"):
                deepspeed_c.initialize(model=model, optimizer=Normalised(model.parameters()), config=config)
            continue
        losses, norms = [], []
        with deepspeed_c.initialize(model=model, optimizer=Normalised(model.parameters()), config=config)[0] as engine:
            for step in range(STEPS):
                losses.append(update(engine, engine(*batch(step, 0, rank, 0))))
                norms.append(engine.get_global_grad_norm())
        runs.append(Run(losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}))
    return runs


def test_an_optimizer_over_whole_tensors_is_exact_at_stage_0_and_refused_above() -> None:
    want = plain_with_presteps("tied", 2, lambda g: Normalised(g[0]["params"]), 0)
    for rank, runs in enumerate(run_ranks(2, untested_body)):
        check("Normalised", runs[0], want, by_rank(want.losses, 2, 1, 1, rank))
