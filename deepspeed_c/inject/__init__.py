"""Models cut over tensor-parallel ranks without a change in their code (``docs/concepts/tensor-parallel.md``)."""

from deepspeed_c.inject.cut import Cut, CutBox
from deepspeed_c.inject.cutting import CutReport, ReportRow, cut_model

__all__ = ["Cut", "CutBox", "CutReport", "ReportRow", "cut_model"]
