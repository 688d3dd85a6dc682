"""Requests over one ragged engine: a schedule of steps, the choice of tokens, their text."""

from deepspeed_c.serving.loop import AnswerEvent, CheckedPrompt, RequestLoop, ServedRequest
from deepspeed_c.serving.sampling import FinishReason, SamplingParams

__all__ = ["AnswerEvent", "CheckedPrompt", "FinishReason", "RequestLoop", "SamplingParams", "ServedRequest"]
