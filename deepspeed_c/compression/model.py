"""A model with compressed layers in an engine: which settings it cannot have, and which steps its schedules count."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from deepspeed_c.compression.basic_layer import compressed_layers
from deepspeed_c.config.compression import Compression
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ConfigError
from deepspeed_c.zero.layout.cuts import cut_of

__all__ = ["CompressionSteps", "check_compression"]


def check_compression(model: nn.Module, section: Compression, tensors: TensorParallel) -> None:
    """Raises ConfigError if ``section`` asks for compression and no layer of ``model`` is compressed, and for settings
    that a model with compressed layers cannot have.
    """
    if not compressed_layers(model):
        if section.is_enabled:
            raise ConfigError(
                "asks for compression, and no layer of the model is compressed",
                where="compression_training",
                fix="call deepspeed_c.compression.compress.init_compression(model, config) before initialize",
            )
        return
    if tensors.replace_with_kernel_inject:
        raise ConfigError(
            "kernels read the weights themselves, and the model has compressed layers",
            where="tensor_parallel.replace_with_kernel_inject",
            fix="set it to false",
        )
    is_cut = any(cut_of(param) is not None for param in model.parameters())
    if max(tensors.autotp_size, tensors.tp.tp_size) > 1 and not is_cut:
        raise ConfigError(
            "layers would be cut that are compressed already, and the model has compressed layers",
            where="tensor_parallel",
            fix="call deepspeed_c.tp_model_init(model, ...) before init_compression",
        )


class CompressionSteps:
    """Connects the schedules of a model's compressed layers to an engine's count of applied steps, until ``close``."""

    def __init__(self, model: nn.Module, count: Callable[[], int]) -> None:
        """count: a bound method that returns the engine's number of applied steps. Its object is not kept alive."""
        layers = compressed_layers(model).values()
        self._counts = list({id(steps): steps for steps in (layer.quantization.steps for layer in layers)}.values())
        for steps in self._counts:
            steps.follow(count)

    def close(self) -> None:
        """Keeps the present count."""
        for steps in self._counts:
            steps.close()
