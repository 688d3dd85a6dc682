"""Saves this rank's shard of masters and states as dicts and tensors in memory, and loads it on the same arrangement of
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_c import _C
from deepspeed_c.errors import StateError
from deepspeed_c.zero.layout.unit import Unit

__all__ = ["check_fits", "fp32_masters", "put_shard", "require_in_memory", "shard_dict"]


def require_in_memory(units: Sequence[Unit], base: torch.optim.Optimizer, what: str) -> None:
    """Raises StateError if masters or states live in files, or have been offloaded."""
    if any(unit.states.has_slices for unit in units):
        raise StateError(
            "masters and optimizer states live on NVMe, where they have room; a dict of them would be in memory",
            where=f"ZeroOptimizer.{what}",
            fix="use engine.save_checkpoint() and engine.load_checkpoint()",
        )
    held = [unit.master_flat for unit in units if unit.master_flat is not None]
    held += [value for state in base.state.values() for value in state.values() if torch.is_tensor(value)]
    if any(tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0 for tensor in held):
        raise StateError(
            "masters or optimizer states have been offloaded",
            where=f"ZeroOptimizer.{what}",
            fix="call engine.reload_states() first",
        )


def fp32_masters(units: Sequence[Unit]) -> torch.Tensor:
    """All masters of ``units`` as one flat fp32 tensor: a copy if they are not contiguous in memory."""
    if len(units) == 1 and units[0].master_flat is not None:
        return units[0].master_flat
    parts: list[torch.Tensor] = []
    for unit in units:
        for bucket in range(unit.n_buckets):
            with unit.states.open(bucket, writes=False):
                parts.append(unit.master[bucket].to(torch.float32, copy=True))
    return torch.cat(parts) if parts else torch.empty(0)


def shard_dict(
    units: Sequence[Unit], base: torch.optim.Optimizer, scaler: _C.LossScaler | None, world_size: int
) -> dict[str, Any]:
    """Base optimizer, masters and loss scale of this rank."""
    return {
        "base_optimizer_state": base.state_dict(),
        "masters": [unit.copy_of_masters() for unit in units],
        "shard_elems": [unit.shard_elems for unit in units],
        "world_size": world_size,
        "loss_scaler": None if scaler is None else scaler.state_dict(),
    }


def check_fits(state: dict[str, Any], units: Sequence[Unit], world_size: int) -> None:
    """Raises StateError if ``state`` was saved on another arrangement of ranks."""
    mine = [unit.shard_elems for unit in units]
    if state["world_size"] != world_size or list(state["shard_elems"]) != mine:
        raise StateError(
            f"the state was saved on {state['world_size']} ranks with shards of {state['shard_elems']} elements;"
            f" here are {world_size} ranks with {mine}",
            where="ZeroOptimizer.load_state_dict",
            fix="load it with the same number of ranks and the same shards as when it was saved",
        )


def put_shard(
    state: dict[str, Any], units: Sequence[Unit], base: torch.optim.Optimizer, scaler: _C.LossScaler | None
) -> None:
    """Loads a result of ``shard_dict`` that has passed ``check_fits``."""
    base.load_state_dict(state["base_optimizer_state"])
    with torch.no_grad():
        for unit, master in zip(units, state["masters"]):
            unit.put_masters(master)
    for unit in units:
        unit.note_weights()
    if scaler is not None and state["loss_scaler"] is not None:
        scaler.load_state_dict(state["loss_scaler"])
