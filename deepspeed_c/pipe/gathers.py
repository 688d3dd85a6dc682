"""The gathers of weights in a batch of a pipeline, as an engine at ZeRO stage 3 plans them.

A table of gathers (``with_gathers``) and an engine keep one limit of live elements, and count differently. In the table
a computation needs all units of its stage at once. An engine gathers single units within a computation
(``zero/weights/drivers/batch.py``), so it also runs with limits below a stage, and it learns which computations read
which units. ``unit_gathers`` counts for an engine whose computations read all units of their stages.

If all units are equal in size, an engine gathers no more often than the table: it could keep and release whole stages
as the table does, and no choice needs fewer gathers than its own (``dsc_prefetch_plan`` in ``dsc/fetch.h``). If sizes
differ, its plan may bring more elements than the table's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError
from deepspeed_c.pipe.runner import COMPUTATIONS
from deepspeed_c.pipe.schedule import StageUnit
from deepspeed_c.zero.weights.drivers.batch import first_order

__all__ = ["GRADIENTS", "UnitGathers", "unit_gathers"]

GRADIENTS = "gradients of each unit are summed whole over the micro-batches of a batch, and reduced once"
"""How an engine sums: a sum in shards would have to be reduced for each micro-batch."""


class UnitGathers(NamedTuple):
    """The gathers of one rank in a batch."""

    n_gathers: list[int]
    """By unit of the rank, in the order of stages and their forwards."""
    gathered_elements: int
    peak_elements: int
    """The most elements that are live together."""
    live_elements: list[int]
    """For each computation of the rank, the most elements that are live during it."""


def unit_gathers(
    table: _C.PipeTable, rank: int, units: Sequence[StageUnit], limit_elements: int | None, prefetch_elements: int = 0
) -> UnitGathers:
    """The gathers of ``rank`` by the plan of an engine whose computations read all units of their stages.

    units: of all stages, in the order of stages and their forwards. limit_elements: the most elements of live units;
    None: no limit. prefetch_elements: units of so many elements are gathered ahead of their use.

    Raises ConfigError if a unit of the rank has more elements than the limit.
    """
    mine = [unit for unit in units if table.rank_of[unit.stage] == rank]
    numels = [unit.numel for unit in mine]
    limit = sum(numels) if limit_elements is None else limit_elements
    if max(numels, default=0) > limit:
        raise ConfigError(
            f"is {limit}, and a unit of stage {max(mine, key=lambda unit: unit.numel).stage} has {max(numels)} elements",
            where="--max-live",
            fix="raise the limit, or cut the weights into smaller units",
        )
    of_stage: dict[int, list[int]] = {}
    for index, unit in enumerate(mine):
        of_stage.setdefault(unit.stage, []).append(index)
    computations = [(kind, stage) for kind, stage, _ in table.actions(rank) if kind in COMPUTATIONS]
    orders = [first_order(kind, of_stage.get(stage, [])) for kind, stage in computations]
    steps = [unit for order in orders for unit in order]
    steps = [unit for i, unit in enumerate(steps) if i == 0 or unit != steps[i - 1]]
    fetch = _C.Fetch(numels)
    fetch.begin(_C.FetchPlan(steps, numels, limit, prefetch_elements, sum(numels)))
    n_gathers, live, now = [0] * len(numels), [], 0
    for order in orders:
        peak = now
        for unit in order:
            for kind, other in fetch.use(unit):
                if kind == _C.Fetch.GATHER:
                    n_gathers[other] += 1
                    now += numels[other]
                    peak = max(peak, now)
                elif kind == _C.Fetch.RELEASE:
                    now -= numels[other]
        live.append(peak)
    fetch.end()
    elements = sum(n * numel for n, numel in zip(n_gathers, numels, strict=True))
    return UnitGathers(n_gathers, elements, max(live, default=0), live)
