"""The trial of a cut before a weight is changed. A small copy of the model runs whole and on all ranks, in one process.

[Note: trial] A rule names layers, but the computation between the layers is the model's own code. That code may hold
parameters of single heads, counts that were not changed, or a weight that each rank uses with a different part of the
tokens' columns. So the trial runs the model's code: once whole, and once on each rank, where a rank is a thread and
sums are taken between the threads. To take little memory for a model of any size, linear layers keep their sizes and
names but have products of two thin matrices as weights, lists keep one layer of each kind, and embedding tables are
short. Values and the gradients of all parameters are compared. Every rank of a job tries all ranks, and so comes to the
same result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepspeed_c.errors import DeepSpeedCError
from deepspeed_c.inject.comparison import compare_runs, refuse_unknown
from deepspeed_c.inject.listing import CutList, CutRequest, list_cuts
from deepspeed_c.inject.parts import RankParts, fit_parts
from deepspeed_c.inject.plan import RankPlace
from deepspeed_c.inject.refusals import refuse_misfits
from deepspeed_c.inject.stand_ins import RAISED, Skeleton, SmallModel, TrialTooLong
from deepspeed_c.inject.trial_runs import run_copies
from deepspeed_c.logging import logger

__all__ = ["try_cut"]

# Number of calls of torch that a trial may take: about 20 s on one core. A forward with its backward takes as long as 3
# forwards.
_MOST_CALLS, _WITH_BACKWARD = 300_000, 3


@dataclass
class _Findings:
    """The outcome of a trial without errors."""

    sums: set[str] = field(default_factory=set)
    """Parameters that no rule names and whose gradients are right only if they are summed over ranks."""
    ran: set[str] = field(default_factory=set)
    """Modules with a rule that took part in the trial."""
    obstacle: str = ""
    """The reason why there was no trial; "" if there was one."""
    is_unfinished: bool = False
    """Whether there was no trial because it would take too long."""


def try_cut(parts: RankParts) -> None:
    """Compare the model of ``parts``, cut, with the whole model.

    Adds to ``parts`` the sums of gradients that the trial finds to be needed. Raises ModelError for the first module or
    parameter that disagrees, and for a parameter that neither a rule nor the trial says anything of. Nothing of the
    model is changed.
    """
    listed = parts.listed
    findings = _findings(listed)
    for name in findings.sums:
        param = listed.model.get_parameter(name)
        if param not in parts.cuts and param not in parts.used_on_parts:
            parts.sum_on_all(param, "whole, used on each rank's part: its gradient is summed")
    refuse_unknown(parts, findings.ran, findings.obstacle)
    if findings.is_unfinished and listed.place.rank == 0:
        logger.warning(
            f"{findings.obstacle}: the cut is by its rules alone. Fix: compare a loss with one process' before a long run"
        )


def _findings(listed: CutList) -> _Findings:
    model, n_ranks = listed.model, listed.place.n_ranks
    if not callable(getattr(model, "get_input_embeddings", None)) or getattr(model, "config", None) is None:
        return _Findings(obstacle=f"{type(model).__name__} is no model of transformers, whose inputs are known")
    request = CutRequest(listed.request.section, listed.request.blocks)
    names = [step.name for step in listed.planned]
    obstacle = ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        for shortens in (True, False):
            try:
                skeleton = Skeleton(model, names, shortens=shortens)
                smalls = {name: skeleton.small_name(name) for name in (*names, *listed.names.values())}
                copies = []
                for rank in range(n_ranks):
                    copies.append(fit_parts(list_cuts(skeleton.model, RankPlace(rank, n_ranks), request)))
                    refuse_misfits(copies[-1])
                whole = SmallModel(skeleton.model, copies[0])
                inputs = whole.find_inputs(_MOST_CALLS / (1 + _WITH_BACKWARD * (1 + n_ranks)))
            except TrialTooLong:
                obstacle = (
                    f"a trial of {type(model).__name__} over {n_ranks} ranks takes more than {_MOST_CALLS:,} calls"
                )
                return _Findings(obstacle=f"{obstacle} of torch, and was not finished", is_unfinished=True)
            except (DeepSpeedCError, *RAISED) as error:
                text = " ".join(str(error).split())[:300]
                obstacle = f"{type(model).__name__} does not run on stand-ins: {type(error).__name__}: {text}"
                continue
            expected, runs, errors = run_copies(whole, inputs, copies)
            sums = compare_runs(expected, runs, errors, copies[0].listed.planned, skeleton)
            return _Findings(
                sums={name for name in listed.names.values() if smalls[name] in sums},
                ran={name for name in names if smalls[name] in expected.rows},
            )
    return _Findings(obstacle=obstacle)
