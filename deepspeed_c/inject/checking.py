"""Second step of a cut: the list of cuts is checked, and each rank's parts are found. Nothing is changed."""

from __future__ import annotations

from deepspeed_c.inject.listing import CutList, list_cuts
from deepspeed_c.inject.parts import RankParts, fit_parts
from deepspeed_c.inject.plan import RankPlace
from deepspeed_c.inject.refusals import refuse_misfits
from deepspeed_c.inject.report import refuse_large_parts, report_of
from deepspeed_c.inject.trial import try_cut

__all__ = ["check_cuts"]


def check_cuts(listed: CutList) -> RankParts:
    """This rank's parts of the parameters in the list. Raises ModelError, ConfigError or FeatureError for a cut that
    does not fit, or whose results on a small copy of the model differ from the whole copy's (trial.py, [Note: trial]).
    """
    parts = fit_parts(listed)
    refuse_misfits(parts)
    try_cut(parts)
    is_first = listed.place.rank == 0
    first = (
        parts if is_first else fit_parts(list_cuts(listed.model, RankPlace(0, listed.place.n_ranks), listed.request))
    )
    refuse_large_parts(report_of(first), listed.request.section, warns=is_first)
    return parts
