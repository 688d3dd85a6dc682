"""Models that compressed-tensors has loaded as packed integers.

The library puts weights in the place of packed integers in the first forward, by a hook of the model. An engine has
laid out all parameters by then, and would not know the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_c.errors import FeatureError
from deepspeed_c.logging import log_dist
from deepspeed_c.zero.weights.param import state_of

__all__ = ["dequantize_packed"]

_HOOK = "ct_decompress_hook"  # the attribute in which the library keeps its handle


def dequantize_packed(model: torch.nn.Module) -> None:
    """Runs the library's hooks now. The weights that they make are frozen, and shared out as any others.

    Raises FeatureError for packed integers that are sharded already. Nothing is changed then.
    """
    found = list(_models_with_hooks(model))
    for name, packed, _ in found:
        integers = (each for each in packed.named_parameters() if not each[1].is_floating_point())
        sharded = next((each for each, param in integers if state_of(param) is not None), "")
        if sharded:
            raise FeatureError(
                "compressed-tensors puts weights in the place of packed integers, which are sharded already",
                where=f"{name}.{sharded}" if name else sharded,
                fix="load the model with quantization_config=CompressedTensorsConfig(dequantize=True)",
            )
    for _, packed, handle in found:
        n_before = sum(param.nbytes for param in packed.parameters())
        packed._forward_pre_hooks[handle.id](packed, ())
        n_after = sum(param.nbytes for param in packed.parameters())
        log_dist(
            f"{type(packed).__name__}: compressed-tensors has dequantized its layers, as it does in the first forward:"
            f" {n_before} bytes of parameters became {n_after}",
            ranks=[0],
        )


def _models_with_hooks(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, torch.utils.hooks.RemovableHandle]]:
    for name, module in model.named_modules():
        handle = vars(module).get(_HOOK)
        if handle is not None and handle.id in module._forward_pre_hooks:
            yield name, module, handle
