"""Models cut over tensor-parallel ranks without a change in their code."""

from deepspeed_c.inject.cut import Cut, CutBox

__all__ = ["Cut", "CutBox"]
