"""Models cut over tensor-parallel ranks without a change in their code (``docs/concepts/tensor-parallel.md``)."""

from deepspeed_c.inject.cut import Cut, CutBox
from deepspeed_c.inject.cutting import cut_model
from deepspeed_c.inject.model_init import tp_model_init
from deepspeed_c.inject.report import CutReport, ReportRow

__all__ = ["Cut", "CutBox", "CutReport", "ReportRow", "cut_model", "tp_model_init"]
