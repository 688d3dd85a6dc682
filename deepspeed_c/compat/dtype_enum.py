"""``DtypeEnum`` of ``deepspeed.inference.config``: the formats of inference, each with its names."""

from __future__ import annotations

import enum

import torch

from deepspeed_c.config.inference import dtype_of

__all__ = ["DtypeEnum"]


class DtypeEnum(enum.Enum):
    """The value of a member is a tuple: torch's dtype, and the names of DeepSpeed."""

    fp16 = (torch.float16, "torch.float16", "fp16", "float16", "half")
    fp32 = (torch.float32, "torch.float32", "fp32", "float32", "float")
    bf16 = (torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16", "bfloat")
    int8 = (torch.int8, "torch.int8", "int8")

    @classmethod
    def from_str(cls, value: str) -> DtypeEnum:
        """The member with a name. Raises ConfigError for other names."""
        dtype = dtype_of(value)
        return next(member for member in cls if member.value[0] is dtype)
