"""The plan of a pipeline: the memory of one rank of each stage, and the gathers of its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from deepspeed_c.comm.axes import PP
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.pipe.gathers import GRADIENTS
from deepspeed_c.plan.batch import BatchGathers
from deepspeed_c.plan.script import Found
from deepspeed_c.plan.table import Table, plan_table
from deepspeed_c.plan.table import as_json as table_as_json
from deepspeed_c.plan.table import as_text as table_as_text

__all__ = ["PipelinePlan", "PlannedRank", "as_json", "as_text", "plan_pipeline"]


class PlannedRank(NamedTuple):
    """One rank of the pipeline. Ranks with the same stages in parallel pipelines need as much."""

    rank: int  # its number in the run
    layers: list[tuple[int, int, int]]  # (stage, its first layer, the layer after its last one)
    table: Table

    @property
    def batch(self) -> BatchGathers | None:
        """The gathers of a batch under the configuration. None: no sharded weights, or a refused row."""
        plan = self.table.rows[self.table.chosen].plan
        return None if plan is None else plan.batch


class PipelinePlan(NamedTuple):
    """The ranks of one pipeline, in the order of their first stages."""

    ranks: list[PlannedRank]
    n_pipelines: int
    n_micro_batches: int
    schedule: str  # that the module was built for


def plan_pipeline(
    find: Callable[[int], Found], first: Found, source: Any, n_ranks: int, **options: Any
) -> PipelinePlan:
    """Plans a rank of each stage. ``find(rank)`` returns the PipelineModule of a rank of ``n_ranks``.

    first: the result of ``find(0)``. source: the configuration. options: further arguments of ``plan_table``.
    Raises the errors of ``plan_table``.
    """
    module: PipelineModule = first.model
    ranks: list[PlannedRank] = []
    for rank in module.mesh.ranks(PP):
        found = first if rank == 0 else find(rank)
        own: PipelineModule = found.model
        table = plan_table(
            source,
            n_ranks,
            model=own,
            optimizer=found.optimizer,
            model_parameters=found.model_parameters,
            is_sharded=found.is_sharded,
            **options,
        )
        layers = [(stage, own.parts[stage], own.parts[stage + 1]) for stage in own.stages]
        ranks.append(PlannedRank(rank, layers, table))
    pipeline = ranks[0].table.sizes.pipeline
    return PipelinePlan(ranks, ranks[0].table.n_ranks, pipeline.n_micro_batches, module.schedule)


def as_text(plan: PipelinePlan) -> str:
    """The table of each rank, and the gathers of its batch under the configuration."""
    n_pipelines = f"{plan.n_pipelines} parallel pipelines" if plan.n_pipelines > 1 else "one pipeline"
    lines = [
        f"{n_pipelines} of {len(plan.ranks)} ranks, built for {plan.schedule}, {plan.n_micro_batches} micro-batches a batch",
        GRADIENTS,
    ]
    for rank in plan.ranks:
        stages = "; ".join(f"stage {stage}: layers {begin} to {end - 1}" for stage, begin, end in rank.layers)
        lines += ["", f"rank {rank.rank} ({stages})", table_as_text(rank.table)]
        lines += [] if rank.batch is None else _batch_lines(rank.batch)
    return "\n".join(lines)


def _batch_lines(batch: BatchGathers) -> list[str]:
    limit = f"stage3_max_live_parameters = {batch.max_elems}"
    gathers = f"{batch.n_gathers} gathers of {batch.n_units} units with {batch.elems} elements"
    brought = f"{batch.received_bytes} bytes from other ranks"
    lines = [f"a batch has {gathers}, {brought}; at most {batch.peak_elems} elements are live, {limit}"]
    if batch.more_gathers:
        lines.append(
            f"the limit costs {batch.more_gathers} gathers and {batch.more_bytes} bytes a batch beyond one gather of each"
            f" unit; with {batch.elems}, it costs none"
        )
    return [*lines, f"live while it computes: {' '.join(f'{name}:{elems}' for name, elems in batch.live)}"]


def as_json(plan: PipelinePlan) -> dict[str, Any]:
    """The plan as JSON values, with sizes in bytes, and in elements where a name says so."""
    return {
        "pipelines": plan.n_pipelines,
        "micro_batches": plan.n_micro_batches,
        "schedule": plan.schedule,
        "gradients": {"summed": "whole", "reductions": 1},
        "ranks": [
            {
                "rank": rank.rank,
                "stages": [
                    {"stage": stage, "first_layer": begin, "end_layer": end} for stage, begin, end in rank.layers
                ],
                "batch": None if rank.batch is None else _batch_json(rank.batch),
                **table_as_json(rank.table),
            }
            for rank in plan.ranks
        ],
    }


def _batch_json(batch: BatchGathers) -> dict[str, Any]:
    return {
        **batch._asdict(),
        "live": [{"computation": name, "elems": elems} for name, elems in batch.live],
        "peak_elems": batch.peak_elems,
        "more_gathers": batch.more_gathers,
        "more_bytes": batch.more_bytes,
    }
