"""An SVG picture of a search: what each experiment measured, in their order, and the best until then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from deepspeed_c.autotuning.search import is_better

__all__ = ["draw"]

_COLOURS = ("#4c72b0", "#dd8452", "#8172b3", "#55a868", "#c44e52", "#937860", "#64b5cd", "#8c8c8c")
_LEFT_PX, _TOP_PX, _WIDTH_PX, _HEIGHT_PX, _RIGHT_PX, _BOTTOM_PX = 80, 40, 560, 300, 260, 60
_LINE_PX = 17
_BEST, _FAILED = "#222222", "#c00000"


def draw(record: Mapping[str, Any], unit: str) -> str:
    """Draws the content of a ``records.json``.

    A dot is an experiment that ran, in the colour of its stage and other choices but the batch; its number is the
    micro-batch. A cross at the bottom is one that failed. The stairs are the best value so far.
    """
    metric = record["metric"]
    tried = [row for row in record["experiments"] if row["status"] in ("ran", "failed")]
    n_left_out = len(record["experiments"]) - len(tried)
    values = [row["value"] for row in tried if row["status"] == "ran"]
    ticks = _ticks(max(values, default=1.0))
    bottom, n = _TOP_PX + _HEIGHT_PX, max(len(tried), 1)

    def x_of(i: int) -> float:
        return _LEFT_PX + (i + 0.5) * _WIDTH_PX / n

    def y_of(value: float) -> float:
        return bottom - _HEIGHT_PX * value / ticks[-1]

    width, height = _LEFT_PX + _WIDTH_PX + _RIGHT_PX, bottom + _BOTTOM_PX
    title = f"{metric} ({unit}) of {len(tried)} experiments; {n_left_out} candidates were left out"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT_PX}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{_LEFT_PX} {y:.1f}H{_LEFT_PX + _WIDTH_PX}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT_PX - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    colours = _colours_of(tried)
    best, stairs = None, []
    for i, row in enumerate(tried):
        x, label = x_of(i), f"<title>{escape(row['name'])}</title>"
        if row["status"] == "failed":
            cross = f"M{x - 4:.1f} {bottom - 12}l8 8m0 -8l-8 8"
            parts.append(f'<path d="{cross}" stroke="{_FAILED}" stroke-width="2">{label}</path>')
        else:
            y = y_of(row["value"])
            best = row["value"] if is_better(metric, row["value"], best) else best
            colour = colours[_choices(row)]
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}">{label}</circle>')
            size = row["choices"].get("train_micro_batch_size_per_gpu", "")
            parts.append(f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle" font-size="10">{size}</text>')
        if best is not None:
            left, right = x - _WIDTH_PX / n / 2, x + _WIDTH_PX / n / 2
            stairs.append(f"{left:.1f},{y_of(best):.1f} {right:.1f},{y_of(best):.1f}")
    parts.append(f'<polyline points="{" ".join(stairs)}" fill="none" stroke="{_BEST}" stroke-dasharray="5 3"/>')
    parts.append(
        f'<text x="{_LEFT_PX + _WIDTH_PX / 2}" y="{bottom + 22}" text-anchor="middle">experiments, in their order</text>'
    )
    legend = [(_BEST, "dashed: the best so far"), *((colour, words) for words, colour in colours.items())]
    for line, (colour, words) in enumerate(legend):
        x, y = _LEFT_PX + _WIDTH_PX + 12, _TOP_PX + _LINE_PX * line
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _choices(row: Mapping[str, Any]) -> str:
    """What a candidate chose besides its batch, in words; keys without their sections."""
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    others = [f"{key.rpartition('.')[2]} {value}" for key, value in row["choices"].items() if key not in batch]
    return ", ".join(others) or "the configuration as it is"


def _colours_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A colour for each group of choices, those with the last colour together."""
    words = dict.fromkeys(_choices(row) for row in rows if row["status"] == "ran")
    return {each: _COLOURS[min(i, len(_COLOURS) - 1)] for i, each in enumerate(words)}


def _ticks(most: float) -> list[float]:
    """From 0 to at least ``most``: about five steps of 1, 2 or 5 times a power of ten."""
    rough = max(most, 1e-12) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [i * step for i in range(max(math.ceil(most / step), 1) + 1)]
