"""ZeRO: model states sharded over the data-parallel ranks. The names are DeepSpeed's, each imported when it is first
used."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "GatheredParameters": "weights.gathered",
    "register_external_parameter": "weights.gathered",
    "unregister_external_parameter": "weights.gathered",
    "unwrap_model_for_generation": "weights.gathered",
    "DeepSpeedTensorOverride": "weights.init",
    "Init": "weights.init",
    "ZeroParamStatus": "weights.param",
    "ZeroParamType": "weights.param",
}
_NAMES.update(
    {
        f"estimate_zero{stage}_model_states_mem_needs{kind}": ".compat.zero_estimate"
        for stage in (2, 3)
        for kind in ("", "_all_cold", "_all_live")
    }
)

# Names that are modules in DeepSpeed.
_MODULES = {"partition_parameters": "weights.init"}

__all__ = [*_NAMES, *_MODULES]  # noqa: PLE0604  (they are strings)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{_MODULES[name]}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
