"""Charts of a few lines over a logarithmic axis, as text or SVG, with nothing but this file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Chart", "as_svg", "as_text"]

_COLOURS = ("#1b6ca8", "#c8553d", "#4a7c59", "#8e5ea2", "#b8860b")
_MARKS = "o+x*#"
# Size of one chart: pixels, and characters.
_WIDTH, _HEIGHT, _MARGIN = 520, 300, 56
_COLUMNS, _ROWS = 64, 14


class Chart(NamedTuple):
    """Lines by name, each of points (x, y), both positive; both axes are logarithmic."""

    title: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    x_text: Callable[[float], str]
    """How a place on the x axis is written."""


class _LogScale(NamedTuple):
    low: float
    high: float

    def place(self, value: float) -> float:
        """0 to 1."""
        width = math.log(self.high / self.low)
        return math.log(value / self.low) / width if width else 0.5


def _scales(chart: Chart) -> tuple[_LogScale, _LogScale]:
    points = [point for line in chart.lines.values() for point in line]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    return _LogScale(min(xs), max(xs)), _LogScale(low, high if high > low else low * 10)


def _decades(scale: _LogScale) -> list[float]:
    n = round(math.log10(scale.high / scale.low))
    return [scale.low * 10**i for i in range(n + 1)]


def as_svg(charts: Sequence[Chart]) -> str:
    """All charts below one another, as one picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 200}" height="{_HEIGHT * len(charts)}">',
        "<style>text { font-family: sans-serif; font-size: 12px }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        parts += [f'<g transform="translate(0,{i * _HEIGHT})">', *_svg_of(chart), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _svg_of(chart: Chart) -> list[str]:
    x_scale, y_scale = _scales(chart)
    width, height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN

    def at(x: float, y: float) -> tuple[float, float]:
        return _MARGIN + width * x_scale.place(x), _MARGIN + height * (1 - y_scale.place(y))

    parts = [f'<text x="{_MARGIN}" y="24">{escape(chart.title)}: {escape(chart.y_label)}</text>']
    for y in _decades(y_scale):
        _, row = at(x_scale.low, y)
        parts.append(f'<path d="M{_MARGIN},{row:.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{row + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in (x_scale.low, math.sqrt(x_scale.low * x_scale.high), x_scale.high):
        column, row = at(x, y_scale.low)
        text = escape(chart.x_text(x))
        parts.append(f'<text x="{column:.1f}" y="{row + 18:.1f}" text-anchor="middle">{text}</text>')
    for i, (name, line) in enumerate(chart.lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(f"{column:.1f},{row:.1f}" for column, row in (at(x, y) for x, y in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_WIDTH - _MARGIN + 12}" y="{_MARGIN + 16 * i}" fill="{colour}">{escape(name)}</text>')
    return parts


def as_text(charts: Sequence[Chart]) -> str:
    """All charts below one another, in characters."""
    return "\n".join(_text_of(chart) for chart in charts)


def _text_of(chart: Chart) -> str:
    x_scale, y_scale = _scales(chart)
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for i, line in enumerate(chart.lines.values()):
        for x, y in line:
            column, row = round((_COLUMNS - 1) * x_scale.place(x)), round((_ROWS - 1) * (1 - y_scale.place(y)))
            grid[row][column] = _MARKS[i % len(_MARKS)]
    labels = {0: f"{y_scale.high:g}", _ROWS - 1: f"{y_scale.low:g}"}
    first, last = chart.x_text(x_scale.low), chart.x_text(x_scale.high)
    return "\n".join(
        [
            f"{chart.title}: {chart.y_label}",
            *(f"{labels.get(i, ''):>8} |{''.join(row).rstrip()}" for i, row in enumerate(grid)),
            f"{'':8} +{'-' * _COLUMNS}",
            f"{'':10}{first}{last:>{_COLUMNS - len(first)}}",
            "  ".join(f"{_MARKS[i % len(_MARKS)]} {name}" for i, name in enumerate(chart.lines)),
            "",
        ]
    )
