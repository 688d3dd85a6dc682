"""ZeRO: model states sharded over the data-parallel ranks. The names are DeepSpeed's, each imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "GatheredParameters": "gathered",
    "register_external_parameter": "gathered",
    "unregister_external_parameter": "gathered",
    "unwrap_model_for_generation": "gathered",
    "DeepSpeedTensorOverride": "partition_parameters",
    "Init": "partition_parameters",
    "ZeroParamStatus": "sharded",
    "ZeroParamType": "sharded",
    "estimate_zero2_model_states_mem_needs": "estimate",
    "estimate_zero2_model_states_mem_needs_all_cold": "estimate",
    "estimate_zero2_model_states_mem_needs_all_live": "estimate",
    "estimate_zero3_model_states_mem_needs": "estimate",
    "estimate_zero3_model_states_mem_needs_all_cold": "estimate",
    "estimate_zero3_model_states_mem_needs_all_live": "estimate",
}

_MODULES = ("partition_parameters",)

__all__ = [*_NAMES, *_MODULES]  # noqa: PLE0604  (they are strings)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
