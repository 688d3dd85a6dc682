"""Checks the gather units of a pipeline at ZeRO stage 3, before a weight moves."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError
from deepspeed_c.zero.layout.experts import expert_ranks_of
from deepspeed_c.zero.layout.unit import UnitPlan, label_of

__all__ = ["check_unit", "check_units"]


def check_unit(label: str, numel: int, limit: int) -> None:
    """Raises ConfigError if the largest gather unit, of ``numel`` elements, is above the limit of live elements."""
    if numel > limit:
        raise ConfigError(
            f"is {limit}, and {label} is gathered as one unit of {numel} elements",
            where="zero_optimization.stage3_max_live_parameters",
            fix=f"set it to {numel} at least, or make units smaller by zero_optimization.reduce_bucket_size; a unit has"
            " one parameter at least",
        )


def check_units(plans: Sequence[UnitPlan], limit: int, comm: Collectives) -> None:
    """Raises ConfigError on all ranks of ``comm`` if sharded weights of any rank cannot be gathered for a batch: a unit
    has more elements than ``limit``, or weights belong to experts that are spread over ranks. Collective.
    """
    sharded = [plan for plan in plans if plan.kind.is_sharded]
    buckets = [
        (numel, names)
        for plan in sharded
        for numel, names in zip(plan.bucket_numels(), plan.bucket_names(), strict=True)
        if names
    ]
    numel, names = max(buckets, default=(0, [""]))
    experts = [name for plan in sharded for name, _, param in plan.params if expert_ranks_of(param) > 1]
    found = comm.gather_objects(((numel, label_of(names)), experts[:1]), label="gather units")
    numel, label = max(unit for unit, _ in found)
    check_unit(label, numel, limit)
    name = next((names[0] for _, names in found if names), "")
    if name:
        raise ConfigError(
            f"is 3, and {name} of a pipeline belongs to experts that are spread over ranks",
            where="zero_optimization.stage",
            fix="use stage 1 or 2 with such experts",
        )
