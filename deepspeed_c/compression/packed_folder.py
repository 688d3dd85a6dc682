"""Models whose folder says that layers are packed: the layers are made without values, and a load fills them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed_c.compression.packed import PackedLinear
from deepspeed_c.errors import UnsupportedConfigError

__all__ = ["make_packed"]

_FIX = "load the folder by transformers with compressed-tensors, and save the dequantized model"


def make_packed(model: nn.Module, section: Mapping[str, Any], where: str) -> None:
    """Make the layers of ``model``, which is on the meta device, that ``section`` names ``PackedLinear``, in place.

    section: quantization_config of the model's config.json. where: that file.

    Raises UnsupportedConfigError, before anything changes, for a format other than compressed-tensors' pack-quantized,
    for quantized activations, and for layers that are no ``torch.nn.Linear``.
    """
    if section.get("quant_method") != "compressed-tensors":
        raise _unsupported(f"weights quantized by {section.get('quant_method')!r} are not read", where)
    layers: dict[str, tuple[nn.Linear, Mapping[str, Any]]] = {}
    for label, group in section.get("config_groups", {}).items():
        place = f"{where}: {label}"
        scheme = _scheme_of(group, section.get("format"), place)
        for name, module in model.named_modules():
            if name in layers or not _matches(group["targets"], name, module):
                continue
            if _matches(section.get("ignore") or (), name, module):
                continue
            layers[name] = (_checked(name, module, scheme, place), scheme)
    for module, scheme in layers.values():
        group_size = scheme.get("group_size") if scheme["strategy"] == "group" else None
        PackedLinear.without_values(module, scheme["num_bits"], group_size, is_symmetric=scheme["symmetric"])


def _unsupported(what: str, where: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(what, where=where, fix=_FIX)


def _matches(targets: Any, name: str, module: nn.Module) -> bool:
    """Whether a target is the name of the module, that of its class, or "re:" and an expression for names."""
    return any(
        re.match(target[3:], name) is not None if target.startswith("re:") else target in (name, type(module).__name__)
        for target in targets
    )


def _scheme_of(group: Mapping[str, Any], format_name: str | None, where: str) -> Mapping[str, Any]:
    """The section "weights" with defaults. Raises UnsupportedConfigError."""
    format_name = group.get("format") or format_name
    if format_name != "pack-quantized":
        raise _unsupported(f"the format {format_name!r} is not read", where)
    if group.get("input_activations") or group.get("output_activations"):
        raise _unsupported("quantized activations are not read", where)
    scheme = {"type": "int", "symmetric": True, **(group.get("weights") or {})}
    has_kind = scheme["type"] == "int" and scheme.get("num_bits") in (8, 4) and not scheme.get("actorder")
    if not has_kind or scheme.get("strategy") not in ("channel", "group"):
        raise _unsupported(f"weights of this kind are not read: {scheme}", where)
    return scheme


def _checked(name: str, module: nn.Module, scheme: Mapping[str, Any], where: str) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise _unsupported(f"{name} is a {type(module).__name__}, and only torch.nn.Linear is packed", where)
    if scheme["strategy"] == "group" and module.in_features % scheme["group_size"]:
        raise _unsupported(
            f"groups of {scheme['group_size']} do not divide the {module.in_features} columns of {name}", where
        )
    return module
