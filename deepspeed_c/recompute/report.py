"""The costs of recomputed layers in readable form: a table and, if a folder is given, also JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from deepspeed_c.errors import ConfigError

__all__ = ["describe", "draw", "write"]

_TIMES = {"forward_ns": "forward", "recompute_ns": "recompute", "copy_ns": "copy", "wait_ns": "wait"}
_BYTES = {"bytes_kept": "kept", "bytes_moved": "moved"}
_COLOURS = {"forward_ns": "#4c72b0", "recompute_ns": "#dd8452", "copy_ns": "#55a868", "wait_ns": "#c44e52"}
_NAME_PX, _BARS_PX, _ROW_PX = 180, 520, 22

Figures = Mapping[str, Mapping[str, int]]


def _per_call(figures: Mapping[str, int], name: str) -> float:
    return figures[name] / max(figures["n"], 1)


def describe(figures: Figures) -> str:
    """A line for each layer: milliseconds and MiB of one call, on average."""
    width = max([len(label) for label in figures] + [5])
    head = " ".join(
        [f"{'layer':<{width}} {'calls':>6}", *(f"{name:>12}" for name in (*_TIMES.values(), *_BYTES.values()))]
    )
    lines = [f"recomputed layers: ms and MiB of one call\n{head}"]
    for label, one in figures.items():
        cells = [f"{_per_call(one, name) / 1e6:12.3f}" for name in _TIMES]
        cells += [f"{_per_call(one, name) / 2**20:12.2f}" for name in _BYTES]
        lines.append(f"{label:<{width}} {one['n']:>6} {' '.join(cells)}")
    return "\n".join(lines)


def draw(figures: Figures) -> str:
    """A bar for each layer, as SVG: milliseconds of one call, by their use."""
    totals = {label: sum(_per_call(one, name) for name in _TIMES) for label, one in figures.items()}
    scale = _BARS_PX / max([*totals.values(), 1])
    height = (len(figures) + 2) * _ROW_PX
    width = _NAME_PX + _BARS_PX + 90
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    ]
    for i, (name, title) in enumerate(_TIMES.items()):
        x = _NAME_PX + 120 * i
        found.append(f'<rect x="{x}" y="5" width="12" height="12" fill="{_COLOURS[name]}"/>')
        found.append(f'<text x="{x + 17}" y="15">{title}</text>')
    for row, (label, one) in enumerate(figures.items(), 1):
        y, x = row * _ROW_PX + 5, float(_NAME_PX)
        found.append(f'<text x="{_NAME_PX - 6}" y="{y + 11}" text-anchor="end">{escape(label)}</text>')
        for name in _TIMES:
            length = _per_call(one, name) * scale
            found.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="14" fill="{_COLOURS[name]}"/>')
            x += length
        found.append(f'<text x="{x + 6:.1f}" y="{y + 11}">{totals[label] / 1e6:.3f} ms</text>')
    return "\n".join([*found, "</svg>\n"])


def write(folder: str, figures: Figures, step: int) -> None:
    """``activations.json`` and ``activations.svg`` in ``folder``, in place of the files of an earlier step.

    Raises ConfigError where the files cannot be written.
    """
    try:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / "activations.json").write_text(json.dumps({"step": step, "layers": figures}, indent=1) + "\n")
        (place / "activations.svg").write_text(draw(figures))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to: {error.strerror}",
            where="activation_checkpointing.profile_path",
            fix="name another folder, or remove the key",
        ) from error
