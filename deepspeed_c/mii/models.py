"""The families of models that generate."""

from __future__ import annotations

from deepspeed_c.errors import FeatureError
from deepspeed_c.inject import policies  # noqa: F401  registers them
from deepspeed_c.inject.policy import POLICIES
from deepspeed_c.mii.constants import TaskType

__all__ = ["get_supported_models"]


def get_supported_models(task: TaskType | str) -> list[str]:
    """The model types of transformers whose layers have a policy and whose models generate, sorted.

    MII asks the Hugging Face hub for the names of all models; nothing is asked here. Causal models of other types run
    as well, on one rank.

    Raises:
        FeatureError: ``task`` is not text generation.
    """
    if task != TaskType.TEXT_GENERATION:
        raise FeatureError(
            f"is {task!r}",
            where="get_supported_models, task",
            fix='ask for "text-generation"; deepspeed_c.init_inference runs other models',
        )
    return sorted(name for name, policy in POLICIES.items() if policy.loss == "causal")
