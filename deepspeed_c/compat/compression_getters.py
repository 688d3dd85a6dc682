"""The functions of ``deepspeed.compression.config``: the section ``compression_training`` of a dictionary, with all
defaults. Nothing in the dictionary is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_c.compat.config_getters import Getter, one_of, others, value
from deepspeed_c.errors import ConfigError

__all__ = [
    "get_activation_quantization",
    "get_activation_quantization_different_groups",
    "get_activation_quantization_shared_parameters",
    "get_channel_pruning",
    "get_channel_pruning_different_groups",
    "get_channel_pruning_shared_parameters",
    "get_compression_config",
    "get_head_pruning",
    "get_head_pruning_different_groups",
    "get_head_pruning_shared_parameters",
    "get_layer_reduction",
    "get_layer_reduction_enabled",
    "get_layer_reduction_params",
    "get_quantize_enabled",
    "get_row_pruning",
    "get_row_pruning_different_groups",
    "get_row_pruning_shared_parameters",
    "get_sparse_pruning",
    "get_sparse_pruning_different_groups",
    "get_sparse_pruning_shared_parameters",
    "get_weight_quantization",
    "get_weight_quantization_different_groups",
    "get_weight_quantization_shared_parameters",
]

_SHARED, _GROUPS = "shared_parameters", "different_groups"
_SNIP = "snip_momentum"
_KINDS = ("symmetric", "asymmetric")
_PRUNING_METHODS = ("l1", "topk")

# Technique -> its shared parameters and their defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "weight_quantization": {
        "enabled": False,
        "quantizer_kernel": False,
        "schedule_offset": 0,
        "quantize_groups": 1,
        "quantize_verbose": False,
        "quantization_type": "symmetric",
        "rounding": "nearest",
    },
    "activation_quantization": {
        "enabled": False,
        "quantization_type": "symmetric",
        "range_calibration": "dynamic",
        "schedule_offset": 1000,
    },
    "sparse_pruning": {"enabled": False, "method": "l1", "schedule_offset": 1000},
    "row_pruning": {"enabled": False, "method": "l1", "schedule_offset": 1000},
    "head_pruning": {"enabled": False, "method": "topk", "schedule_offset": 1000},
    "channel_pruning": {"enabled": False, "method": "l1", "schedule_offset": 1000},
}
_CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "weight_quantization": {"quantization_type": _KINDS, "rounding": ("nearest", "stochastic")},
    "activation_quantization": {"quantization_type": _KINDS, "range_calibration": ("dynamic", "static")},
    "sparse_pruning": {"method": (*_PRUNING_METHODS, _SNIP)},
    **{f"{what}_pruning": {"method": _PRUNING_METHODS} for what in ("row", "head", "channel")},
}
# Technique -> the keys that the parameters of each group need.
_NEEDED = {
    "weight_quantization": ("start_bits", "target_bits"),
    "activation_quantization": ("bits",),
    **{f"{what}_pruning": ("dense_ratio",) for what in ("sparse", "row", "head", "channel")},
}


def _need(section: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in section:
        raise ConfigError("is missing", where=f"{where}.{key}", fix="write it")
    return section[key]


def _weight_keys(section: Mapping[str, Any] | None) -> dict[str, Any]:
    mixed = (section or {}).get("fp16_mixed_quantize", {})
    found = {
        "fp16_mixed_quantize": mixed.get("enabled", False),
        "quantize_change_ratio": mixed.get("quantize_change_ratio", 0.001),
    }
    if section is not None:
        found["quantize_weight_in_forward"] = section.get("quantize_weight_in_forward", False)
    return found


def _snip_keys(section: Mapping[str, Any], offset: int) -> dict[str, Any]:
    where = f"sparse_pruning.{_SHARED}"
    found = {
        "block_pattern": section.get("block_pattern", "4x1"),
        "dense_ratio": section.get("dense_ratio", 0.1),
        "schedule_offset_stride": section.get("schedule_offset_stride", 1),
        "excluded_modules": section.get("excluded_modules", []),
        "schedule_offset_end": section.get("schedule_offset_end", offset),
    }
    if not 0 < found["dense_ratio"] < 1:
        raise ConfigError(f"is {found['dense_ratio']}", where=f"{where}.dense_ratio", fix="write a number in (0, 1)")
    if offset > found["schedule_offset_end"]:
        raise ConfigError(f"is below schedule_offset {offset}", where=f"{where}.schedule_offset_end", fix="raise it")
    return found


def _shared(technique: str) -> Getter:
    """A function that returns the shared parameters of a technique. Its argument is the technique's section."""
    where = f"{technique}.{_SHARED}"

    def getter(param_dict: Mapping[str, Any]) -> dict[str, Any]:
        section = param_dict.get(_SHARED)
        found = {key: (section or {}).get(key, default) for key, default in _DEFAULTS[technique].items()}
        for key, choices in _CHOICES[technique].items():
            one_of(f"{where}.{key}", found[key], choices)
        if technique == "weight_quantization":
            found |= _weight_keys(section)
        if found.get("method") == _SNIP:
            found |= _snip_keys(section or {}, found["schedule_offset"])
        if technique == "head_pruning" and found["enabled"]:
            found["num_heads"] = _need(section or {}, "num_heads", where)
        return found

    return getter


def _groups(technique: str) -> Getter:
    """A function that returns the groups of a technique by name. Its argument is the technique's section."""

    def getter(param_dict: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, group in param_dict.get(_GROUPS, {}).items():
            where = f"{technique}.{_GROUPS}.{name}"
            params = dict(_need(group, "params", where))
            for key in _NEEDED[technique]:
                _need(params, key, f"{where}.params")
            if technique == "weight_quantization":
                params.setdefault("quantization_period", 1)
            modules, related = group.get("modules", "*"), group.get("related_modules")
            found[name] = {"params": params, "modules": modules, "related_modules": related}
        return found

    return getter


def _technique(technique: str, shared: Getter, groups: Getter) -> Getter:
    """A function that returns both parts of a technique. Its argument is the section ``compression_training``."""

    def getter(param_dict: Mapping[str, Any]) -> dict[str, Any]:
        section = param_dict.get(technique, {_SHARED: {}, _GROUPS: {}})
        found = shared(section)
        if found["enabled"] and found.get("method") != _SNIP:
            _need(section, _GROUPS, technique)
        return {_SHARED: found, _GROUPS: groups(section)}

    return getter


def _getters(technique: str) -> tuple[Getter, Getter, Getter]:
    shared, groups = _shared(technique), _groups(technique)
    return _technique(technique, shared, groups), shared, groups


(
    get_weight_quantization,
    get_weight_quantization_shared_parameters,
    get_weight_quantization_different_groups,
) = _getters("weight_quantization")
(
    get_activation_quantization,
    get_activation_quantization_shared_parameters,
    get_activation_quantization_different_groups,
) = _getters("activation_quantization")
get_sparse_pruning, get_sparse_pruning_shared_parameters, get_sparse_pruning_different_groups = _getters(
    "sparse_pruning"
)
get_row_pruning, get_row_pruning_shared_parameters, get_row_pruning_different_groups = _getters("row_pruning")
get_head_pruning, get_head_pruning_shared_parameters, get_head_pruning_different_groups = _getters("head_pruning")
(
    get_channel_pruning,
    get_channel_pruning_shared_parameters,
    get_channel_pruning_different_groups,
) = _getters("channel_pruning")

get_layer_reduction_enabled = value("enabled", False, "layer_reduction")
get_layer_reduction_params = others("layer_reduction", False)


def get_layer_reduction(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``layer_reduction``, only ``enabled`` where it is False. The argument is ``compression_training``."""
    is_enabled = get_layer_reduction_enabled(param_dict)
    return {"enabled": is_enabled or False, **(get_layer_reduction_params(param_dict) if is_enabled else {})}


def get_quantize_enabled(param_dict: Mapping[str, Any]) -> bool:
    """``compression_training.shared_parameters.enabled`` of a whole configuration: the place where DeepSpeed looks."""
    section = param_dict.get("compression_training")
    return False if section is None else get_weight_quantization_shared_parameters(section)["enabled"]


def get_compression_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """All techniques of a whole configuration."""
    section = param_dict.get("compression_training", {})
    return {
        "weight_quantization": get_weight_quantization(section),
        "activation_quantization": get_activation_quantization(section),
        "sparse_pruning": get_sparse_pruning(section),
        "row_pruning": get_row_pruning(section),
        "head_pruning": get_head_pruning(section),
        "channel_pruning": get_channel_pruning(section),
        "layer_reduction": get_layer_reduction(section),
    }
