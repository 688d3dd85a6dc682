"""An SVG picture of the lanes of a rank in a simulated step."""

from __future__ import annotations

from xml.sax.saxutils import escape

from deepspeed_c.plan.simulation import SimulatedStep

__all__ = ["draw_lanes"]

_LEFT_PX, _TOP_PX, _WIDTH_PX, _LANE_PX, _BAR_PX = 110, 44, 1000, 40, 26
_COLOURS = {"compute": "#4c72b0", "wait": "#dddddd"}
_OF_LINKS = ("#dd8452", "#55a868", "#8172b3", "#c44e52")
_N_TICKS = 8
# Shorter spans are not drawn: nobody sees them.
_LEAST_PX = 0.05


def draw_lanes(step: SimulatedStep) -> str:
    """Draws the computations and waits of the first rank, and the transfers on each link meanwhile."""
    lanes = list(dict.fromkeys(["compute", *(span.lane for span in step.spans if span.lane != "wait")]))
    end_ns = max([round(step.seconds * 1e9), *(span.end_ns for span in step.spans)], default=1) or 1
    bottom = _TOP_PX + _LANE_PX * len(lanes)
    width, height = _LEFT_PX + _WIDTH_PX + 20, bottom + 40
    unit, size = ("s", 1e9) if end_ns >= 1e9 else ("ms", 1e6) if end_ns >= 1e6 else ("us", 1e3)
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT_PX}" y="24" font-size="14">A step of rank 0, {unit}; grey: it waits</text>',
    ]
    for i in range(_N_TICKS + 1):
        x = _LEFT_PX + _WIDTH_PX * i / _N_TICKS
        found.append(f'<path d="M{x:.1f} {_TOP_PX - 6}V{bottom}" stroke="#eeeeee"/>')
        found.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{end_ns * i / _N_TICKS / size:.3g}</text>'
        )
    for i, lane in enumerate(lanes):
        y = _TOP_PX + _LANE_PX * i
        found.append(f'<text x="{_LEFT_PX - 8}" y="{y + 18}" text-anchor="end">{escape(lane)}</text>')
        shown = [span for span in step.spans if span.lane == lane or (lane == "compute" and span.lane == "wait")]
        for span in shown:
            x, px = (_WIDTH_PX * ns / end_ns for ns in (span.begin_ns, span.end_ns - span.begin_ns))
            if px < _LEAST_PX:
                continue
            colour = _COLOURS.get(span.lane) or _OF_LINKS[(i - 1) % len(_OF_LINKS)]
            found.append(
                f'<rect x="{_LEFT_PX + x:.2f}" y="{y}" width="{max(px, 0.3):.2f}" height="{_BAR_PX}" fill="{colour}">'
                f"<title>{escape(span.label)}: {(span.end_ns - span.begin_ns) / size:.4g} {unit}</title></rect>"
            )
    return "\n".join([*found, "</svg>\n"])
