"""DeepSpeed's switches for activation checkpointing, for callers that set them up front (Lightning): what is on by a
switch comes with a later version.

Activations are checkpointed by ``torch.utils.checkpoint``, and by ``gradient_checkpointing_enable()`` of a model of
transformers, at every stage.
"""

from __future__ import annotations

from typing import Any

from deepspeed_c.config.source import read_source
from deepspeed_c.errors import FeatureError

__all__ = ["configure", "is_configured"]

_is_configured = False

# Argument of configure -> key of the section "activation_checkpointing".
_SWITCHES = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accepts a set-up in which every switch is off; ``num_checkpoints`` tunes one of them.

    Raises FeatureError for a switch that is on.

    ``deepspeed_config``: a configuration (a dict, or a path) whose section ``activation_checkpointing`` holds the
    switches that are not given.
    """
    global _is_configured
    section = {}
    if deepspeed_config is not None:
        section = read_source(deepspeed_config)[0].get("activation_checkpointing") or {}
    given = locals()
    for argument, key in _SWITCHES.items():
        value = given[argument] if given[argument] is not None else section.get(key, False)
        if value:
            raise FeatureError(
                f"{value!r} asks for what is not part of this version",
                where=f"checkpointing.configure({argument}=...)",
                fix="leave it out; torch.utils.checkpoint.checkpoint works at every stage",
            )
    _is_configured = True


def is_configured() -> bool:
    """Whether ``configure`` has been called."""
    return _is_configured
