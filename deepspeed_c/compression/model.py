"""A model with compressed layers in an engine."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from deepspeed_c.compression.basic_layer import compressed_layers
from deepspeed_c.errors import ConfigError

__all__ = ["CompressedModel"]


class CompressedModel:
    """Connects the schedules of a model's compressed layers to an engine's count of applied steps."""

    def __init__(self, model: nn.Module, *, is_asked: bool) -> None:
        """is_asked: whether the configuration asks for compression. Raises ConfigError if no layer is compressed then.
        """
        layers = compressed_layers(model).values()
        self._schedules = list({id(steps): steps for steps in (layer.quantization.steps for layer in layers)}.values())
        if is_asked and not self._schedules:
            raise ConfigError(
                "asks for compression, and no layer of the model is compressed",
                where="compression_training",
                fix="call deepspeed_c.compression.compress.init_compression(model, config) before initialize",
            )

    def refuse(self, key: str, why: str, fix: str) -> None:
        """Raises ConfigError if the model has compressed layers."""
        if self._schedules:
            raise ConfigError(f"{why}, and the model has compressed layers", where=key, fix=fix)

    def follow(self, count: Callable[[], int]) -> None:
        """count: a bound method that returns the engine's number of applied steps. Its object is not kept alive."""
        for steps in self._schedules:
            steps.follow(count)

    def close(self) -> None:
        """Keeps the present count."""
        for steps in self._schedules:
            steps.close()
