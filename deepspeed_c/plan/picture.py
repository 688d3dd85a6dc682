"""An SVG picture of the memory of activations over one step, with a line for each way to keep them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from deepspeed_c.plan.timeline import Option

__all__ = ["draw"]

_COLOURS = ("#4c72b0", "#dd8452", "#8172b3", "#55a868", "#c44e52", "#937860", "#64b5cd")
_LEFT_PX, _TOP_PX, _WIDTH_PX, _HEIGHT_PX, _RIGHT_PX, _BOTTOM_PX = 70, 40, 560, 300, 210, 50
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
# Distance between labels: labels of lines that end at the same height are put below each other.
_LINE_PX = 17


def draw(options: Sequence[Option]) -> str:
    """Draws the bytes in the device's memory, from the first layer's forward to its backward. Of options with equal
    lines only one is drawn."""
    shown = [option for option in options if option.moments and not option.refusal]
    most = max((option.peak() for option in shown), default=0)
    unit, size = next((each for each in _UNITS if most >= each[1]), _UNITS[-1])
    step = _step_of(most / size)
    top = max(math.ceil(most / size / step), 1) * step
    n = max((len(option.moments) for option in shown), default=1)

    def x_of(i: float) -> float:
        return _LEFT_PX + i * _WIDTH_PX / n

    def y_of(nbytes: float) -> float:
        return _TOP_PX + _HEIGHT_PX * (1 - nbytes / size / top)

    width, height = _LEFT_PX + _WIDTH_PX + _RIGHT_PX, _TOP_PX + _HEIGHT_PX + _BOTTOM_PX
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT_PX}" y="22" font-size="14">Activations over one step, {unit}</text>',
    ]
    for tick in range(round(top / step) + 1):
        y = y_of(tick * step * size)
        found.append(f'<path d="M{_LEFT_PX} {y:.1f}H{_LEFT_PX + _WIDTH_PX}" stroke="#dddddd"/>')
        found.append(f'<text x="{_LEFT_PX - 8}" y="{y + 4:.1f}" text-anchor="end">{tick * step:g}</text>')
    middle = x_of(n / 2)
    bottom = _TOP_PX + _HEIGHT_PX
    found.append(f'<path d="M{middle:.1f} {_TOP_PX}V{bottom}" stroke="#999999" stroke-dasharray="4 3"/>')
    for i, word in ((n / 4, "forward"), (3 * n / 4, "backward")):
        found.append(f'<text x="{x_of(i):.1f}" y="{bottom + 22}" text-anchor="middle">{word}</text>')
    label_y = 0.0
    for option, colour in sorted(zip(shown, _COLOURS), key=lambda each: -each[0].peak()):
        points = [
            f"{x_of(i):.1f},{y_of(m.nbytes):.1f} {x_of(i + 1):.1f},{y_of(m.nbytes):.1f}"
            for i, m in enumerate(option.moments)
        ]
        dashes = ' stroke-dasharray="6 5"' if option.name == "nvme" else ""  # may cover the line of "cpu"
        found.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        label_y = max(label_y + _LINE_PX, y_of(option.peak()) + 4)
        x = _LEFT_PX + _WIDTH_PX + 10
        words = f"{escape(option.name)}: {option.peak() / size:.3g} {unit}"
        found.append(f'<text x="{x}" y="{label_y:.1f}" fill="{colour}">{words}</text>')
    return "\n".join([*found, "</svg>\n"])


def _step_of(most: float) -> float:
    """The distance between ticks: 1, 2 or 5 times a power of ten, for about five ticks."""
    rough = max(most, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
