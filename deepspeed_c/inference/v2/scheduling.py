"""Whether a batch fits the ragged engine."""

from __future__ import annotations

import enum

from deepspeed_c.errors import DeepSpeedCError

__all__ = ["SchedulingError", "SchedulingResult"]


class SchedulingResult(enum.Enum):
    """The answer of ``InferenceEngineV2.can_schedule``."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    """More sequences than ``max_tracked_sequences`` would be known."""
    BatchSequenceLimitExceeded = 2
    """More sequences than ``max_ragged_sequence_count``."""
    BatchTokenLimitExceeded = 3
    """More tokens than ``max_ragged_batch_size``."""
    KVCacheLimitExceeded = 4
    """More blocks of keys and values than are free."""
    SequenceTokenLimitExceeded = 5
    """A sequence longer than ``max_context`` or than the model's positions."""


class SchedulingError(DeepSpeedCError, RuntimeError):
    """A batch does not fit. ``result`` says which limit it exceeds."""

    def __init__(self, result: SchedulingResult, what: str = "", *, where: str = "put", fix: str = "") -> None:
        self.result = result
        super().__init__(what or f"the batch does not fit: {result.name}", where=where, fix=fix)

    def __reduce__(self):
        return _rebuild, (self.result, self.what, self.where, self.fix)


def _rebuild(result: SchedulingResult, what: str, where: str, fix: str) -> SchedulingError:
    return SchedulingError(result, what, where=where, fix=fix)
