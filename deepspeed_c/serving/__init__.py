"""Requests over one ragged engine: a schedule of steps, the choice of tokens, their text."""

from deepspeed_c.serving.loop import Event, Request, RequestLoop
from deepspeed_c.serving.sampling import FinishReason, SamplingParams

__all__ = ["Event", "FinishReason", "Request", "RequestLoop", "SamplingParams"]
