"""Words of configurations and responses, under MII's names."""

from __future__ import annotations

import enum

__all__ = ["DeploymentType", "GenerationFinishReason", "ModelProvider", "TaskType"]


class DeploymentType(str, enum.Enum):
    """The place of a deployment."""

    LOCAL = "local"
    """Processes on this host."""
    AML = "aml"
    """Azure Machine Learning; refused here."""
    NON_PERSISTENT = "non-persistent"
    """A name of MII's legacy API; refused, because ``mii.pipeline`` has taken its place."""


class TaskType(str, enum.Enum):
    """The work of a model."""

    TEXT_GENERATION = "text-generation"


class ModelProvider(str, enum.Enum):
    """The origin of a model's code."""

    HUGGING_FACE = "hugging-face"


class GenerationFinishReason(str, enum.Enum):
    """The reason why a text ends."""

    STOP = "stop"
    """The model's end-of-text token, or a string of ``stop``."""
    LENGTH = "length"
    """``max_length`` or ``max_new_tokens``."""
    NONE = "none"
    """The text has not ended: a piece of a stream."""
