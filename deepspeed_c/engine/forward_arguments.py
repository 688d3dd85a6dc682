"""Keyword arguments that a configuration adds to the module's forward in training: the sequence length of a curriculum,
and the keep probability of progressive layer drop. Both are functions of the step."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from deepspeed_c.config.data import Curriculum, DataEfficiency
from deepspeed_c.config.model import LayerDrop
from deepspeed_c.data.curriculum import CurriculumScheduler
from deepspeed_c.errors import ConfigError

__all__ = ["ForwardArguments", "ProgressiveLayerDrop", "sampling_section"]


class ProgressiveLayerDrop:
    """The probability with which a model keeps a layer in a step: (1 - theta) exp(-gamma step) + theta
    (Zhang and He 2020, arXiv 2010.13369). The model drops the layers itself."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma = theta, gamma
        self.current_theta = 1.0

    def get_state(self) -> dict[str, Any]:
        """The keyword arguments for the model's forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Sets the probability to that of a step."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta


class ForwardArguments:
    """The arguments of each step. A pipeline has no forward of its own, so it only keeps the difficulty."""

    def __init__(self, section: Curriculum, drop: LayerDrop, *, takes_arguments: bool) -> None:
        self.curriculum: CurriculumScheduler | None = None
        self.layer_drop: ProgressiveLayerDrop | None = None
        self._has_length = section.enabled and section.curriculum_type == "seqlen"
        if section.enabled:
            self.curriculum = CurriculumScheduler(msgspec.to_builtins(section))
        if drop.enabled:
            if not takes_arguments:
                raise ConfigError(
                    "is on, and a pipeline's layers take no keyword arguments",
                    where="progressive_layer_drop.enabled",
                    fix="set it to false, or train without a pipeline",
                )
            self.layer_drop = ProgressiveLayerDrop(drop.theta, drop.gamma)

    def of_step(self, global_steps: int) -> dict[str, Any]:
        """The arguments after ``global_steps`` steps; {} if the configuration adds none."""
        arguments: dict[str, Any] = {}
        if self.layer_drop is not None:
            self._keep_probability(self.layer_drop, global_steps)
            arguments.update(self.layer_drop.get_state())
        if self.curriculum is not None:
            difficulty = self.curriculum.update_difficulty(global_steps + 1)
            if self._has_length:
                arguments["curriculum_seqlen"] = difficulty
        return arguments

    def theta(self, global_steps: int) -> float | None:
        """The keep probability after ``global_steps`` steps; None without progressive layer drop."""
        if self.layer_drop is None:
            return None
        self._keep_probability(self.layer_drop, global_steps)
        return self.layer_drop.get_theta()

    @staticmethod
    def _keep_probability(layer_drop: ProgressiveLayerDrop, global_steps: int) -> None:
        # DeepSpeed updates it at the end of a step, by the number of the step itself: the first two steps keep all.
        layer_drop.update_state(max(global_steps - 1, 0))


def sampling_section(section: DataEfficiency) -> dict[str, Any] | None:
    """The section ``data_efficiency`` if it chooses the samples."""
    return msgspec.to_builtins(section) if section.chooses_samples else None
