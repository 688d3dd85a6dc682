"""Cuts a model over tensor-parallel ranks, in place, in three steps: the rules give a list of cuts (``listing.py``),
the list is checked (``checking.py``), and the cuts are made (``making.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.inject.alike import raised_on_all
from deepspeed_c.inject.checking import check_cuts
from deepspeed_c.inject.listing import CutRequest, list_cuts
from deepspeed_c.inject.making import make_cuts
from deepspeed_c.inject.plan import RankPlace
from deepspeed_c.inject.report import CutReport, ReportRow, report_of

__all__ = ["cut_model", "preview_cut"]


def cut_model(
    model: torch.nn.Module,
    section: TensorParallel,
    comm: Collectives,
    blocks: Mapping[type, Sequence[str]] | None = None,
    stages: Collectives | None = None,
) -> CutReport:
    """Cut ``model`` over the ranks of ``comm``, in place, according to ``section`` and the model's policy.

    blocks: an ``injection_policy``, {class of blocks: ends of the names of their row layers}, used instead of the
    model's policy.

    stages: the ranks that have other layers of the model, if it is a pipeline. A rule fits if it fits on one of them.

    Collective: weights and buffers are first broadcast from rank 0. Raises ConfigError or ModelError where a rule does
    not fit, on all ranks alike; the model is then unchanged.
    """
    if comm.world_size == 1:
        rows = [
            ReportRow(name, param.shape, param.shape, "one rank: whole") for name, param in model.named_parameters()
        ]
        return CutReport(1, 0, rows)
    stages = comm.alone() if stages is None else stages
    names = stages.gather_objects([name for name, _ in model.named_parameters()], label="names of parameters")
    request = CutRequest(section, blocks, known=[name for found in names for name in found])
    with raised_on_all(stages, "plans of the cut"):
        parts = check_cuts(list_cuts(model, RankPlace(comm.rank, comm.world_size), request))
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            comm.broadcast(tensor.detach().contiguous() if not tensor.is_contiguous() else tensor.detach(), 0)
    report = report_of(parts)
    make_cuts(parts, comm)
    return report


def preview_cut(model: torch.nn.Module, section: TensorParallel, rank: int, n_ranks: int) -> CutReport:
    """Return the report that ``cut_model`` would give on ``rank`` of ``n_ranks``. Nothing is changed, and no other rank
    is needed.

    The model's tensors may be on the meta device. Raises the errors of ``cut_model`` for a rule that does not fit.
    """
    return report_of(check_cuts(list_cuts(model, RankPlace(rank, n_ranks), CutRequest(section))))
