"""The functions of ``deepspeed.runtime.data_pipeline.config``: the sections ``data_efficiency`` and
``curriculum_learning`` of a dictionary, with all defaults. Nothing in the dictionary is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_c.compat.config_getters import others, value
from deepspeed_c.errors import ConfigError

__all__ = [
    "get_curriculum_enabled_legacy",
    "get_curriculum_learning",
    "get_curriculum_learning_enabled",
    "get_curriculum_learning_params",
    "get_curriculum_params_legacy",
    "get_data_efficiency_config",
    "get_data_efficiency_enabled",
    "get_data_efficiency_seed",
    "get_data_routing",
    "get_data_routing_enabled",
    "get_data_sampling",
    "get_data_sampling_enabled",
    "get_data_sampling_num_epochs",
    "get_data_sampling_num_workers",
    "get_data_sampling_pin_memory",
    "get_dynamic_batching",
    "get_random_ltd",
    "get_random_ltd_enabled",
    "get_random_ltd_params",
]

_EFFICIENCY, _SAMPLING, _ROUTING = "data_efficiency", "data_sampling", "data_routing"
_CURRICULUM, _BATCHING, _LTD = "curriculum_learning", "dynamic_batching", "random_ltd"

# The argument is a whole configuration.
get_data_efficiency_enabled = value("enabled", False, _EFFICIENCY)
get_data_efficiency_seed = value("seed", 1234, _EFFICIENCY)
get_curriculum_enabled_legacy = value("enabled", False, _CURRICULUM)
get_curriculum_params_legacy = others(_CURRICULUM, False)

# The argument is the section ``data_efficiency``.
get_data_sampling_enabled = value("enabled", False, _SAMPLING)
get_data_sampling_num_epochs = value("num_epochs", 1000, _SAMPLING)
get_data_sampling_num_workers = value("num_workers", 0, _SAMPLING)
get_data_sampling_pin_memory = value("pin_memory", False, _SAMPLING)
get_data_routing_enabled = value("enabled", False, _ROUTING)

# The argument is the section ``data_sampling``, and ``data_routing`` for random_ltd.
get_curriculum_learning_enabled = value("enabled", False, _CURRICULUM)
get_curriculum_learning_params = others(_CURRICULUM, {})
get_random_ltd_enabled = value("enabled", False, _LTD)
get_random_ltd_params = others(_LTD, {})


def get_curriculum_learning(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``curriculum_learning``, only ``enabled`` where it is False."""
    is_enabled = get_curriculum_learning_enabled(param_dict)
    if not is_enabled:
        return {"enabled": is_enabled}
    _need(param_dict[_CURRICULUM], "curriculum_metrics", _CURRICULUM)
    return {"enabled": is_enabled, **get_curriculum_learning_params(param_dict)}


def get_dynamic_batching(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``dynamic_batching`` over its defaults."""
    given = dict(param_dict.get(_BATCHING, {}))
    largest = given.get("max_batch_size")
    found = {
        **given,
        "enabled": bool(given.get("enabled", False)),
        "lr_scaling_method": str(given.get("lr_scaling_method", "linear")),
        "min_batch_size": int(given.get("min_batch_size", 1)),
        "max_batch_size": None if largest is None else int(largest),
        "sequence_picking_order": str(given.get("sequence_picking_order", "dataloader")),
        "verbose": bool(given.get("verbose", False)),
    }
    if found["enabled"]:
        _need(given, "max_tokens", _BATCHING)
        found["max_tokens"] = int(given["max_tokens"])
    return found


def get_data_sampling(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``data_sampling`` over its defaults."""
    section = param_dict.get(_SAMPLING, {})
    return {
        **section,
        "enabled": get_data_sampling_enabled(param_dict),
        "num_epochs": get_data_sampling_num_epochs(param_dict),
        "num_workers": get_data_sampling_num_workers(param_dict),
        "pin_memory": get_data_sampling_pin_memory(param_dict),
        _CURRICULUM: get_curriculum_learning(section),
        _BATCHING: get_dynamic_batching(section),
    }


def get_random_ltd(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``random_ltd``, only its defaults where it is not enabled."""
    defaults = {"enabled": False, "layer_token_lr_schedule": {"enabled": False}}
    if not get_random_ltd_enabled(param_dict):
        return defaults
    return {**defaults, "enabled": get_random_ltd_enabled(param_dict), **get_random_ltd_params(param_dict)}


def get_data_routing(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``data_routing``."""
    return {"enabled": get_data_routing_enabled(param_dict), _LTD: get_random_ltd(param_dict.get(_ROUTING, {}))}


def get_data_efficiency_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``data_efficiency`` of a whole configuration."""
    section = param_dict.get(_EFFICIENCY, {})
    return {
        "enabled": get_data_efficiency_enabled(param_dict),
        "seed": get_data_efficiency_seed(param_dict),
        _SAMPLING: get_data_sampling(section),
        _ROUTING: get_data_routing(section),
    }


def _need(section: Mapping[str, Any], key: str, where: str) -> None:
    if key not in section:
        raise ConfigError("is missing, and its section is enabled", where=f"{where}.{key}", fix="write it")
