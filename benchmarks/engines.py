"""Inspect engines: whether the optimizer is fused, how many elements are sharded, the number of gathers, and the
tensors of a step.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.measure import require
from benchmarks.stream import Part
from deepspeed_c.ops.optim import FusedOptimizer

__all__ = [
    "n_gathers",
    "require_fused",
    "require_states_sharded",
    "require_weights_sharded",
    "sharded_elems",
    "step_parts",
]


def require_fused(engine: Any) -> None:
    base = engine._optimizer.optimizer
    require(isinstance(base, FusedOptimizer), f"the optimizer is one of ours, and not {type(base).__name__}")


def sharded_elems(engine: Any) -> tuple[int, int]:
    """Return the numbers of elements of (weights that are sharded over ranks, all weights)."""
    units = engine._optimizer.units
    return sum(unit.flat_elems for unit in units if unit.is_sharded), sum(unit.flat_elems for unit in units)


def n_gathers(engine: Any) -> int:
    """Return the number of gathers of weights since the engine was made."""
    fetcher = engine._optimizer.fetcher
    return 0 if fetcher is None else fetcher.stats.n_gathers


def require_states_sharded(engine: Any, stage: int, world: int) -> None:
    """Require that from stage 1 on each rank holds only one part of the masters and of the states."""
    units, base = engine._optimizer.units, engine._optimizer.optimizer
    whole = sum(unit.flat_elems for unit in units)
    mine = sum(slice_.numel() for unit in units for slice_ in unit.master)
    expected = whole if stage == 0 else whole // world
    require(mine == expected, f"a rank has {expected} of {whole} masters at stage {stage}: {mine}")
    for name in ("exp_avg", "exp_avg_sq"):
        found = sum(state[name].numel() for state in base.state.values())
        require(found == expected, f"a rank has {expected} of {whole} elements of {name} at stage {stage}: {found}")


def require_weights_sharded(engine: Any, share: float, gathers_per_step: float) -> None:
    """Require that at least ``share`` of the weights are sharded, and that each step gathers weights."""
    sharded, whole = sharded_elems(engine)
    require(sharded >= share * whole, f"at least {share:.0%} of the weights are sharded: {sharded} of {whole} elements")
    require(gathers_per_step > 0, f"weights are gathered in each step: {gathers_per_step} times")


def require_gathers_copy(engine: Any, copies: bool) -> None:
    """Require that every gather copies the weights, or that none does."""
    fetcher = engine._optimizer.fetcher
    n_joint = sum(not group.source.is_collective for group in fetcher.groups)
    require(
        n_joint == (0 if copies else len(fetcher.groups)),
        f"gathers {'copy' if copies else 'copy nothing'}: {n_joint} of {len(fetcher.groups)} units are joint memory",
    )


def step_parts(engine: Any) -> list[Part]:
    """Return the tensors of an AdamW step, with the gradients of the backward pass that has just ended."""
    optimizer = engine._optimizer
    base, parts = optimizer.optimizer, []
    for unit in optimizer.units:
        for entry in (entry for entry in optimizer.pieces.entries if entry.unit is unit):
            gradient = entry.part_of(optimizer.reducer.sums.results[unit]).view(-1)
            copy = None
            if not unit.master_is_param:
                copy = entry.part_of([unit.param_slice(bucket) for bucket in range(unit.n_buckets)]).view(-1)
            state = base.state[entry.param]
            tensors = (entry.param.detach().view(-1), gradient, state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
            parts.append(Part(*tensors, copy))
    n = sum(part.param.numel() for part in parts)
    require(n == sum(unit.shard_elems for unit in optimizer.units), f"the parts are this rank's shard: {n} elements")
    require(all(torch.is_tensor(part.grad) for part in parts), "there are gradients")
    return parts
