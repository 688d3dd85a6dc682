"""DeepSpeed's scheduler of compression: says which techniques are active at the present step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed_c.compression.basic_layer import compressed_layers
from deepspeed_c.compression.compress import get_module_name
from deepspeed_c.compression.steps import AppliedSteps

__all__ = ["compression_scheduler"]


class compression_scheduler:
    """The schedule of a model's compressed layers.

    An engine counts its applied steps itself, so ``step`` counts only for a model without an engine. Each technique
    starts at its ``schedule_offset``.
    """

    def __init__(
        self, model: nn.Module, compression_config: Mapping[str, Any], *, steps: AppliedSteps | None = None
    ) -> None:
        """compression_config: the section compression_training with the defaults. steps: the count; default: that of
        the model's compressed layers."""
        self.model, self.compression_config = model, compression_config
        layers = compressed_layers(model).values()
        self._steps = steps or next((layer.quantization.steps for layer in layers), AppliedSteps())
        self.different_compression_methods = {
            method: self._method(content)
            for method, content in compression_config.items()
            if method != "layer_reduction"
        }

    def _method(self, content: Mapping[str, Any]) -> dict[str, Any]:
        shared, taken = content["shared_parameters"], set()
        groups = []
        for group_name, group in content["different_groups"].items() if shared["enabled"] else ():
            names: list[str] = []
            for pattern in group["modules"]:
                names += get_module_name(group_name, self.model, pattern, taken, verbose=False)[0]
            groups.append([group_name, names, dict(group["params"])])
        return {"enabled": shared["enabled"], "shared_parameters": shared, "different_groups": groups}

    @property
    def training_steps(self) -> int:
        """Number of applied steps."""
        return self._steps.count

    @property
    def verbose(self) -> dict[str, bool]:
        """Whether each technique has started."""
        return {
            method: content["enabled"] and self.training_steps >= content["shared_parameters"]["schedule_offset"]
            for method, content in self.different_compression_methods.items()
        }

    @property
    def weight_quantization_enabled(self) -> bool:
        """Whether the quantization of weights has started."""
        return self.verbose["weight_quantization"]

    def step(self, step_zero_check: bool = False) -> None:
        """Count an applied step, unless an engine counts. step_zero_check: do nothing, as there is nothing to check."""
        if not step_zero_check:
            self._steps.advance()

    def check_all_modules(self) -> None:
        """Do nothing: layers read the count themselves, at each forward."""
