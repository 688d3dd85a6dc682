"""peft's adapters of a stack of experts: modules of its class ``ParamWrapper`` around the experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from deepspeed_c.inject.swap import swap_class

__all__ = ["is_adapter", "keep_stacked", "outermost"]


def is_adapter(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a ``ParamWrapper``, or one that ``keep_stacked`` has changed."""
    return any(base.__name__ == "ParamWrapper" for base in type(module).__mro__)


def outermost(name: str, named: Mapping[str, torch.nn.Module]) -> str:
    """The name under which a layer calls the experts ``name`` of the modules ``named``, with adapters around them."""
    while (parent := name.rpartition(".")[0]) and is_adapter(named[parent]):
        name = parent
    return name


def keep_stacked(adapter: torch.nn.Module) -> None:
    """Makes ``adapter`` give the change of a stack of one expert in the stack's own layout.

    peft takes a stack of one expert for a plain layer, whose weight is [out, in]. Some families have stacks
    [experts, in, out]: the sizes would not fit, or the wrong elements would be added if both are equal.
    """
    swap_class(adapter, _stacked(type(adapter)))


@cache
def _stacked(base: type) -> type:
    def get_delta_weight(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        delta = base.get_delta_weight(self, adapter_name, *args, **kwargs)
        return (delta if self._did_swap_in_out_features else delta.t()).unsqueeze(0)

    return type(f"Stacked{base.__name__}", (base,), {"__module__": __name__, "get_delta_weight": get_delta_weight})
