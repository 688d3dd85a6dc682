"""Bits, bytes and errors of each layer that a configuration compresses, found without training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import torch
from torch import nn

from deepspeed_c.compression.basic_layer import WeightRule, check_finite, quantize_weight
from deepspeed_c.compression.on_text import OnText
from deepspeed_c.compression.packed import group_of, packed_bytes
from deepspeed_c.compression.pruning import PruneRule
from deepspeed_c.compression.shrink import Shrinking, shrinkings
from deepspeed_c.compression.targets import activation_rules, prune_rules, weight_rules
from deepspeed_c.config.compression import Compression
from deepspeed_c.errors import ConfigError
from deepspeed_c.quantity import as_binary

__all__ = ["CompressionReport", "LayerReport", "as_svg", "as_text", "report_of"]

# Pixels of the picture: a row, the names, and the longest bar.
_ROW, _NAMES, _BAR = 18, 320, 320


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One weight that the configuration names, or that gets smaller along with such a weight."""

    name: str
    techniques: tuple[str, ...]
    shape: tuple[int, ...]
    bits: int | None
    """Bits of a quantized weight; None: not quantized."""
    group: int | None
    """Number of elements with the same scale."""
    kept: float
    """Part of the elements that pruning leaves."""
    bytes_before: int
    bytes_after: int
    """Bytes that ``redundancy_clean(pack=True)`` leaves. Weights that are not packed stay floats."""
    max_error: float | None
    """Largest difference of the quantized weight, over the largest magnitude of the weight."""
    rms_error: float | None
    """Norm of the difference over the norm of the weight."""


@dataclass(frozen=True, kw_only=True)
class CompressionReport:
    """All layers of a model that a configuration compresses."""

    layers: tuple[LayerReport, ...]
    bytes_before: int
    """Bytes of all weights of the model, also of those that stay as they are."""
    on_text: tuple[OnText, OnText] | None = None
    """The model on a text, before and after."""

    @property
    def bytes_after(self) -> int:
        return self.bytes_before - sum(layer.bytes_before - layer.bytes_after for layer in self.layers)

    def as_json(self) -> dict[str, Any]:
        layers = [asdict(layer) for layer in self.layers]
        bytes_ = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        on_text: dict[str, float] = {}
        if self.on_text is not None:
            for when, figures in zip(("before", "after"), self.on_text, strict=True):
                on_text |= {f"loss_{when}": figures.loss, f"milliseconds_{when}": figures.milliseconds}
        return {**bytes_, **on_text, "layers": layers}


def report_of(model: nn.Module, section: Compression) -> CompressionReport:
    """The report of a model that is not compressed yet, whose weights are those after training.

    Layers that share a weight are one row. Masks that training learns are not known here, so errors are those of
    quantization alone. Raises ConfigError or ModelError as ``init_compression`` does, and ConfigError if the section
    enables no technique.
    """
    if not section.is_enabled:
        raise ConfigError(
            "enables neither quantization nor pruning",
            where="compression_training",
            fix='write "enabled": true in the shared_parameters of a technique',
        )
    weights, pruned = weight_rules(model, section), prune_rules(model, section)
    activations, plans = activation_rules(model, section), shrinkings(model, section)
    sizes = _sizes(model, pruned, plans)
    holders = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    layers, seen = [], set[int]()
    for name, module in model.named_modules():
        if name not in {**weights, **pruned, **activations, **sizes} or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        is_packed = name not in activations and type(module) is nn.Linear and holders[id(module.weight)] == 1
        techniques = [f"{rule.kind}_pruning" for rule in pruned.get(name, ())]
        techniques += ["related"] * (name in sizes and name not in pruned)
        techniques += ["weight_quantization"] * (name in weights)
        techniques += ["activation_quantization"] * (name in activations)
        kept = math.prod(rule.dense_ratio for rule in pruned.get(name, ()))
        rows, columns = sizes.get(name, module.weight.shape)
        layers.append(
            _layer(
                name,
                module.weight.detach(),
                weights.get(name),
                techniques=tuple(techniques),
                kept=kept if name in pruned else rows * columns / max(module.weight.numel(), 1),
                n_left=rows * columns,
                is_packed=is_packed and not plans,
            )
        )
    return CompressionReport(layers=tuple(layers), bytes_before=sum(param.nbytes for param in model.parameters()))


def _sizes(
    model: nn.Module, pruned: dict[str, list[PruneRule]], plans: Sequence[Shrinking]
) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each layer that gets smaller."""
    sizes: dict[str, tuple[int, int]] = {}
    for plan in plans:
        (ratio,) = (rule.dense_ratio for rule in pruned[plan.name] if rule.kind == plan.kind)
        n_parts = plan.num_heads or model.get_submodule(plan.name).weight.shape[0]
        for name, dim in plan.cuts:
            size = list(sizes.get(name, model.get_submodule(name).weight.shape))
            size[dim] = size[dim] // n_parts * math.ceil(ratio * n_parts)
            sizes[name] = (size[0], size[1])
    return sizes


def _layer(
    name: str,
    weight: torch.Tensor,
    rule: WeightRule | None,
    *,
    techniques: tuple[str, ...],
    kept: float,
    n_left: int,
    is_packed: bool,
) -> LayerReport:
    after = n_left * weight.itemsize
    bits = group = max_error = rms_error = None
    if rule is not None:
        check_finite(weight, name, "load weights without NaN or inf")
        bits, group = rule.bits, weight.numel() // rule.n_groups
        difference = quantize_weight(weight, rule).double() - weight.double()
        max_error = _ratio(difference.abs().amax(), weight.double().abs().amax()) if weight.numel() else 0.0
        rms_error = _ratio(difference.norm(), weight.double().norm())
        if is_packed and group_of(weight, rule) >= 0:
            after = packed_bytes(weight, rule)
    return LayerReport(
        name=name,
        techniques=techniques,
        shape=tuple(weight.shape),
        bits=bits,
        group=group,
        kept=kept,
        bytes_before=weight.nbytes,
        bytes_after=after,
        max_error=max_error,
        rms_error=rms_error,
    )


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> float:
    return (part / whole).item() if whole else 0.0


def as_text(report: CompressionReport) -> str:
    """A line for each layer, and the sum."""
    lines = [("layer", "shape", "techniques", "bits", "group", "kept", "before", "after", "max error", "rms error")]
    for layer in report.layers:
        lines.append(
            (
                layer.name,
                "x".join(map(str, layer.shape)),
                ", ".join(layer.techniques),
                "" if layer.bits is None else str(layer.bits),
                "" if layer.group is None else str(layer.group),
                f"{layer.kept:.3g}",
                as_binary(layer.bytes_before),
                as_binary(layer.bytes_after),
                *("" if error is None else f"{error:.2e}" for error in (layer.max_error, layer.rms_error)),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(word.ljust(n) for word, n in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*rows, "", *_totals(report)])


def _totals(report: CompressionReport) -> list[str]:
    """Lines about the whole model."""
    before, after = report.bytes_before, report.bytes_after
    lines = [f"all weights: {as_binary(before)} before, {as_binary(after)} after ({after / max(before, 1):.3f})"]
    if report.on_text is not None:
        old, new = report.on_text
        loss_ratio, ratio = new.loss / max(old.loss, 1e-30), new.milliseconds / old.milliseconds
        lines += [
            f"loss: {old.loss:.4f} nats per token before, {new.loss:.4f} after ({loss_ratio:.4f})",
            f"forward: {old.milliseconds:.3g} ms before, {new.milliseconds:.3g} ms after ({ratio:.2f})",
        ]
    return lines


def as_svg(report: CompressionReport) -> str:
    """A picture: for each layer a bar of its bytes before, the bytes after within it, and the rms error."""
    longest = max((layer.bytes_before for layer in report.layers), default=1) or 1
    totals, n_layers = _totals(report), len(report.layers)
    height = _ROW * (n_layers + len(totals) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_NAMES + _BAR + 160}" height="{height}">',
        "<style>text { font-family: sans-serif; font-size: 12px }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="{_ROW}">bytes before (grey) and after (blue); rms error of the quantized weight</text>',
    ]
    for i, layer in enumerate(report.layers, 1):
        y = _ROW * i + 8
        parts.append(f'<text x="{_NAMES - 8}" y="{y + 12}" text-anchor="end">{escape(layer.name)}</text>')
        for n_bytes, colour in ((layer.bytes_before, "#ccc"), (layer.bytes_after, "#1b6ca8")):
            width = _BAR * n_bytes / longest
            parts.append(f'<rect x="{_NAMES}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" fill="{colour}"/>')
        error = "" if layer.rms_error is None else f"{layer.rms_error:.1e}"
        parts.append(f'<text x="{_NAMES + _BAR + 8}" y="{y + 12}">{error}</text>')
    for i, line in enumerate(totals, n_layers + 1):
        parts.append(f'<text x="8" y="{_ROW * i + 20}">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>", ""])
