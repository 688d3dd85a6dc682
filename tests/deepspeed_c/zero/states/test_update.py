"""zero/states/update.py: optimizers that are defined in this file, one or more for each scope. They run over shards and
are compared with plain torch over whole parameters.

A class is all that an optimizer needs: the rest of the package does not change for it. The runs are fp32. The tolerance
is the parity oracle's, because sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import deepspeed_c
from deepspeed_c.ops.optim import Call, FusedOptimizer, NormedOptimizer
from deepspeed_c.ops.scope import Shards
from deepspeed_c.utils import safe_get_full_fp32_param
from tests.deepspeed_c.zero.test_oracle import STAGES, by_rank, check, make_config
from tests.deepspeed_c.zero.traits import STEPS, TRAITS, Run, batch, make_groups, make_model, plain_run
from tests.ranks import RanksFailed, run_ranks

GAS = 2
LR = 0.05
CELLS = [
    *((trait, stage) for trait in ("tied", "tiny_buckets", "zero_size") for stage in STAGES),
    *(("unused", stage) for stage in (0, 1, 2)),  # ranks take different branches
    *(("groups", stage) for stage in (1, 3)),
]


def keep_copies(call: Call) -> None:
    for param, copy in zip(call.params, call.copies):
        copy.copy_(param)


class Bounded(FusedOptimizer):
    """Updates each element by itself: the update is the momentum, bounded by tanh."""

    state_names = ("velocity",)

    def __init__(self, params, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    def _update(self, index: int, call: Call, steps: list[int], grad_scale: float) -> None:
        for param, grad, velocity in zip(call.params, call.grads, call.state[0]):
            velocity.mul_(0.9).add_(grad.float() * grad_scale)
            param.sub_(self.param_groups[index]["lr"] * torch.tanh(velocity))
        keep_copies(call)


class Relative(NormedOptimizer):
    """Scales by norms of the whole parameter: the update is the momentum times |param| / (1 + |momentum|)."""

    state_names = ("velocity",)

    def __init__(self, params, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    def _norms(self, index: int, call: Call, steps: list[int], grad_scale: float) -> Tensor:
        for grad, velocity in zip(call.grads, call.state[0]):
            velocity.mul_(0.9).add_(grad.float() * grad_scale)
        pairs = zip(call.params, call.state[0])
        return torch.stack([torch.stack([t.double().square().sum() for t in pair]) for pair in pairs])

    def trust_ratios(self, group: int, sumsq: Tensor) -> Tensor:
        return sumsq[:, 0].sqrt() / (1 + sumsq[:, 1].sqrt())

    def _apply(self, index: int, call: Call, steps: list[int], ratios: Tensor) -> None:
        for param, velocity, ratio in zip(call.params, call.state[0], ratios):
            param.sub_(self.param_groups[index]["lr"] * float(ratio) * velocity)
        keep_copies(call)


def even_columns(update: Tensor) -> Tensor:
    """Scale the columns of ``update`` to norms below 1. This needs the whole matrix, not a flat piece."""
    matrix = update.reshape(len(update) if update.dim() > 1 else 1, -1)
    return (matrix / (0.1 + matrix.norm(dim=0))).view(update.shape)


class Even(FusedOptimizer):
    """Works on whole matrices: the update is the momentum with even columns."""

    scope = "matrix"
    state_names = ("velocity",)

    def __init__(self, params, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    def update_bucket(self, shards: Shards) -> None:
        self._opened(shards.params)
        velocities = self._states(shards.group, shards.params)[0] if shards.params else []
        for grad, velocity, mine in zip(shards.grads, velocities, shards.matrices.mine):
            mine.copy_(velocity.mul_(0.9).add_(grad.float() * shards.grad_scale))
        wholes = list(shards.matrices.gather())
        assert len(wholes) == len(shards.params)
        for i, (param, whole) in enumerate(zip(shards.params, wholes)):
            param.sub_(self.param_groups[shards.group]["lr"] * shards.matrices.cut(i, even_columns(whole)))
        keep_copies(Call(shards.params, [], [], shards.copies))
        self._close(shards.params)


class EvenSlices(Even):
    """Declares a wrong scope: its update needs matrices, and it declares "element"."""

    scope = "element"


class RelativeSlices(Relative):
    """Declares a wrong scope: its norms are of slices and not of parameters."""

    scope = "element"
    update_bucket = FusedOptimizer.update_bucket


class Plain(torch.optim.Optimizer):
    """The optimizers above in plain torch over whole parameters; ``change`` is a function of (param, momentum)."""

    def __init__(self, params, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(params, {"lr": LR})
        self.change = change

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["v"] = 0.9 * state["v"] + p.grad if state else p.grad.clone()
                p -= group["lr"] * self.change(p, state["v"])


OF_SCOPE = {
    "element": (Bounded, lambda p, v: v.tanh()),
    "norms": (Relative, lambda p, v: p.norm() / (1 + v.norm()) * v),
    "matrix": (Even, lambda p, v: even_columns(v) if v.numel() else v),
}


def body(rank: int, world: int, make: type, cells: list[tuple[str, int]], dtype: str, folder: str = "") -> list[Run]:
    runs = []
    for trait_name, stage in cells:
        trait = TRAITS[trait_name]
        model = make_model(trait)
        config = make_config(stage, dtype, GAS, {**trait.config})
        del config["optimizer"]
        if folder:
            config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
        base = make([{k: v for k, v in g.items() if k != "weight_decay"} for g in make_groups(model, trait.groups)])
        losses, norms = [], []
        with deepspeed_c.initialize(model=model, optimizer=base, config=config)[0] as engine:
            for step in range(STEPS):
                for micro in range(GAS):
                    x, y = batch(step, micro, rank, 0)
                    loss = engine(x.to(next(model.parameters()).dtype), y)
                    losses.append(loss.item())
                    engine.backward(loss)
                    engine.step()
                norms.append(engine.get_global_grad_norm())
            masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
            with deepspeed_c.zero.GatheredParameters(model.parameters()):
                for name, p in model.named_parameters():
                    assert torch.equal(p, masters[name].to(p.dtype)), (
                        f"{make.__name__} {trait_name} stage {stage}: {name}"
                    )
        runs.append(Run(losses, norms, {name: p.detach().clone() for name, p in masters.items()}))
    return runs


def check_cells(make: type, change: Callable, cells: list[tuple[str, int]], world: int, folder: str = "") -> None:
    results = run_ranks(world, body, make, cells, "fp32", folder)
    wants: dict[str, Run] = {}
    for i, (trait_name, stage) in enumerate(cells):
        if trait_name not in wants:

            def plain(groups: list[dict]) -> Plain:
                return Plain([{k: v for k, v in g.items() if k != "weight_decay"} for g in groups], change)

            wants[trait_name] = plain_run(TRAITS[trait_name], world, GAS, plain)
        for rank, runs in enumerate(results):
            want = wants[trait_name]
            label = f"{make.__name__} {trait_name} stage {stage} rank {rank}"
            check(label, runs[i], want, by_rank(want.losses, world, GAS, 1, rank))


@pytest.mark.parametrize("scope", OF_SCOPE)
def test_an_optimizer_of_each_scope(scope: str) -> None:
    make, change = OF_SCOPE[scope]
    assert make.scope == scope
    check_cells(make, change, CELLS, 2)


@pytest.mark.parametrize("scope", OF_SCOPE)
def test_weights_of_16_bits_are_copies_of_the_masters(scope: str) -> None:
    """``body`` compares weights with masters; this test compares masters of ranks and stages."""
    runs = run_ranks(2, body, OF_SCOPE[scope][0], [("tied", stage) for stage in STAGES], "bf16")
    for name, first in runs[0][0].params.items():
        for got in (run for of_rank in runs for run in of_rank):
            worst = (got.params[name] - first).abs().max().item()
            assert worst < 0.01, f"{name} is off by {worst:g}"  # gradients of bf16 are summed in another order


@pytest.mark.parametrize("scope", OF_SCOPE)
def test_states_in_a_file_are_streamed_or_brought_as_a_whole(scope: str, tmp_path) -> None:
    """The optimizer's scope decides between the two."""
    check_cells(*OF_SCOPE[scope], [("tied", 2), ("tied", 3)], 2, str(tmp_path))


def test_a_wrong_declaration_is_seen() -> None:
    with pytest.raises(AssertionError, match="RelativeSlices tied stage 2 rank 0"):
        check_cells(RelativeSlices, OF_SCOPE["norms"][1], [("tied", 2)], 2)
    with pytest.raises(RanksFailed, match="'NoneType' object has no attribute 'mine'"):
        check_cells(EvenSlices, OF_SCOPE["matrix"][1], [("tied", 2)], 2)
