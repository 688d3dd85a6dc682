"""The report of a cut: one row per parameter, and how much of the model a rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ModelError
from deepspeed_c.inject.parts import RankParts
from deepspeed_c.logging import logger

__all__ = ["CutReport", "ReportRow", "refuse_large_parts", "report_of"]

_HARDLY = 0.75  # if a rank holds a larger share of the model's elements, the cut saves little


@dataclass(frozen=True)
class ReportRow:
    """How one parameter is cut."""

    name: str
    logical_shape: torch.Size
    local_shape: torch.Size
    rule: str
    """The place and text of the rule, or the reason why the parameter is whole."""
    n_copies: int = 1

    @property
    def is_cut(self) -> bool:
        return self.logical_shape != self.local_shape


@dataclass
class CutReport:
    """How a model is cut: one row per parameter."""

    n_ranks: int
    rank: int
    rows: list[ReportRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Settings of the configuration that this model can follow only in part."""

    @property
    def logical_elems(self) -> int:
        """Elements of the whole model."""
        return sum(math.prod(row.logical_shape) for row in self.rows)

    @property
    def local_elems(self) -> int:
        """Elements that this rank holds."""
        return sum(math.prod(row.local_shape) for row in self.rows)

    @property
    def whole(self) -> list[str]:
        """The parameters that every rank holds whole."""
        return [row.name for row in self.rows if not row.is_cut]

    @property
    def summary(self) -> str:
        """One line that says how much of the model the rank holds."""
        share = self.local_elems / max(self.logical_elems, 1)
        held = f"{self.local_elems} of {self.logical_elems} elements"
        return f"rank {self.rank} of {self.n_ranks} holds {held} ({share:.1%})"

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [
            f"{row.name:<{width}}  {list(row.logical_shape)} -> {list(row.local_shape)}"
            f"{f' x {row.n_copies} copies' if row.n_copies > 1 else ''}  {row.rule}"
            for row in self.rows
        ]
        return "\n".join([*lines, *self.notes, self.summary])


def report_of(parts: RankParts) -> CutReport:
    """The report of a cut that is not made yet."""
    rows = []
    for param, name in parts.listed.names.items():
        cut = parts.cuts[param][0] if param in parts.cuts else None
        local = param.shape if cut is None else cut.local_shape
        rule = parts.reasons.get(param, "no rule: whole")
        rows.append(ReportRow(name, param.shape, local, rule, 1 if cut is None else cut.n_copies))
    return CutReport(parts.place.n_ranks, parts.place.rank, rows, parts.listed.flow.notes)


def refuse_large_parts(first: CutReport, section: TensorParallel, *, warns: bool) -> None:
    """Warn that a cut saves little; raise ModelError in strict mode. first: the report of rank 0, which holds the most.
    All ranks use it, so all ranks say the same. warns: whether this rank writes the warning.
    """
    if first.local_elems <= _HARDLY * first.logical_elems:
        return
    rows = sorted((row for row in first.rows if not row.is_cut), key=lambda row: -math.prod(row.logical_shape))
    listed = "; ".join(f"{row.name} {list(row.logical_shape)}: {row.rule}" for row in rows[:8])
    what = f"{first.summary}; whole on every rank are {len(rows)} parameters, the largest: {listed}"
    fix = "name layers in tensor_parallel.partition_config, or add a policy (docs/adding/inject-policy.md)"
    partition = section.partition_config
    if partition is not None and partition.strict_mode:
        raise ModelError(what, where="tensor_parallel.partition_config.strict_mode", fix=fix)
    if warns:
        logger.warning(f"tensor parallelism saves little: {what}. Fix: {fix}")
