"""The command ``deepspeed_c pipe show``: prints a schedule as text or as a picture, its idle time, and the number of
micro-batches held.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepspeed_c import _C
from deepspeed_c.command_line import command_parser
from deepspeed_c.errors import ConfigError
from deepspeed_c.pipe.schedule import SCHEDULES, Cost, Outcome, make_table, simulate, traits_of

__all__ = ["as_svg", "as_text", "main"]

_DESCRIPTION = """\
What each rank of a pipeline does when, by a schedule: idle time, what ranks hold, and the timeline.

  deepspeed_c pipe show --schedule zb_h1 --stages 4 --micro-batches 8
  deepspeed_c pipe show --schedule interleaved --stages 4 --virtual 2 --micro-batches 8 --svg interleaved.svg
  deepspeed_c pipe show --schedule 1f1b --stages 2 --micro-batches 4 --actions      every action, with messages
"""

_COLUMNS = 160  # characters of a timeline as text
_LANE_PX, _LABEL_PX, _WIDTH_PX = 26, 64, 1080
# Colours of a stage's forward, its backward, and the two halves of a backward. A rank's second stage is darker.
_COLOURS = {
    _C.PIPE_FORWARD: ("#9ecae1", "#4292c6"),
    _C.PIPE_BACKWARD: ("#fdd0a2", "#f16913"),
    _C.PIPE_INPUT: ("#fdd0a2", "#f16913"),
    _C.PIPE_WEIGHT: ("#c7e9c0", "#41ab5d"),
}
_NAMES = {
    _C.PIPE_FORWARD: "forward",
    _C.PIPE_BACKWARD: "backward",
    _C.PIPE_INPUT: "backward, inputs",
    _C.PIPE_WEIGHT: "backward, weights",
}
_LETTERS = {_C.PIPE_FORWARD: "F", _C.PIPE_BACKWARD: "B", _C.PIPE_INPUT: "I", _C.PIPE_WEIGHT: "W"}


def main(argv: Sequence[str]) -> int:
    """Run ``deepspeed_c pipe`` with the arguments ``argv``. Returns 0 when something was printed.

    Raises ConfigError for an unknown name or an impossible shape.
    """
    options = _parser().parse_args(argv)
    traits = traits_of(options.schedule, "--schedule")
    n_virtual = traits.min_virtual if options.virtual is None else options.virtual
    table = make_table(options.schedule, options.stages, n_virtual, options.micro_batches, "deepspeed_c pipe show")
    for name in ("forward", "input", "weight", "transfer"):
        if getattr(options, name) < 0:
            raise ConfigError(f"{getattr(options, name)} is negative", where=f"--{name}", fix="write milliseconds >= 0")
    costs = [Cost(*(round(ms * 1e6) for ms in (options.forward, options.input, options.weight)))] * len(table.rank_of)
    outcome = simulate(table, costs, round(options.transfer * 1e6))
    if options.json:
        print(json.dumps(_as_json(options.schedule, table, outcome)))
    else:
        print(as_text(options.schedule, table, outcome))
    if options.actions:
        for rank in range(table.n_ranks):
            print(f"rank {rank}: {' '.join(_C.pipe_format(action) for action in table.actions(rank))}")
    if options.svg:
        try:
            Path(options.svg).write_text(as_svg(options.schedule, table, outcome))
        except OSError as error:
            raise ConfigError(
                f"cannot be written: {error}", where=f"--svg {options.svg}", fix="name another file"
            ) from error
    return 0


def _computed(table: _C.PipeTable, outcome: Outcome, rank: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (kind, stage, micro-batch, begin ns, end ns) of a rank's computations."""
    for (kind, stage, micro_batch), (begin, end) in zip(table.actions(rank), outcome.spans[rank], strict=True):
        if kind in _NAMES:
            yield kind, stage, micro_batch, begin, end


def _summary(name: str, table: _C.PipeTable, outcome: Outcome) -> str:
    n_stages = len(table.rank_of)
    return (
        f"{name}: {n_stages} stages on {table.n_ranks} ranks, {table.n_micro_batches} micro-batches,"
        f" {outcome.makespan_ns / 1e6:.3f} ms, idle {outcome.bubble:.1%},"
        f" at most {max(outcome.peak_live)} micro-batches of a stage held on a rank"
    )


def as_text(name: str, table: _C.PipeTable, outcome: Outcome) -> str:
    """The summary, and a line for each rank. Letters stand for computations (f: the forward of the rank's second
    stage), dots for waiting. If there is room, letters are followed by the numbers of their micro-batches."""
    lines = [_summary(name, table, outcome)]
    shortest = min(
        (e - b for r in range(table.n_ranks) for *_, b, e in _computed(table, outcome, r) if e > b), default=1
    )
    cell = max(len(str(table.n_micro_batches - 1)) + 1, 2)
    n_cells = -(-outcome.makespan_ns // shortest)
    has_numbers = n_cells * cell <= _COLUMNS
    width = cell if has_numbers else 1
    unit = shortest if has_numbers else max(outcome.makespan_ns / _COLUMNS, 1)
    for rank in range(table.n_ranks):
        row = ["." * width] * max(round(outcome.makespan_ns / unit), 1)
        for kind, stage, micro_batch, begin, end in _computed(table, outcome, rank):
            letter = _LETTERS[kind] if stage < table.n_ranks else _LETTERS[kind].lower()
            text = f"{letter}{micro_batch}" if has_numbers else letter
            first, last = round(begin / unit), round(end / unit)
            for i in range(first, min(last, len(row))):
                row[i] = (text if i == first else letter).ljust(width, "-" if has_numbers else letter)
        peak = f"{outcome.peak_live[rank]:>3} held, busy {outcome.busy_ns[rank] / max(outcome.makespan_ns, 1):5.1%}"
        lines.append(f"rank {rank:>3} {''.join(row)}  {peak}")
    return "\n".join(lines)


def as_svg(name: str, table: _C.PipeTable, outcome: Outcome) -> str:
    """The timeline as a picture, with a lane for each rank and a box for each action."""
    scale = _WIDTH_PX / max(outcome.makespan_ns, 1)
    height = (table.n_ranks + 2) * _LANE_PX + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABEL_PX + _WIDTH_PX + 20}" height="{height}">',
        "<style>text { font-family: sans-serif; font-size: 11px }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="6" y="16">{_summary(name, table, outcome)}</text>',
    ]
    for rank in range(table.n_ranks):
        y = (rank + 1) * _LANE_PX
        parts.append(f'<text x="6" y="{y + 16}">rank {rank}</text>')
        parts.append(f'<rect x="{_LABEL_PX}" y="{y + 2}" width="{_WIDTH_PX}" height="{_LANE_PX - 4}" fill="#f4f4f4"/>')
        for kind, stage, micro_batch, begin, end in _computed(table, outcome, rank):
            x, width = _LABEL_PX + begin * scale, max((end - begin) * scale, 0.5)
            fill = _COLOURS[kind][stage >= table.n_ranks]
            parts.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{_LANE_PX - 4}" fill="{fill}"'
                f' stroke="white" stroke-width="0.7"><title>{_C.pipe_format((kind, stage, micro_batch))}</title></rect>'
            )
            if width > 7 * len(str(micro_batch)):
                parts.append(f'<text x="{x + width / 2:.2f}" y="{y + 17}" text-anchor="middle">{micro_batch}</text>')
    x, y = _LABEL_PX, (table.n_ranks + 1) * _LANE_PX + 8
    used = {action[0] for rank in range(table.n_ranks) for action in table.actions(rank)}
    for kind in (kind for kind in _NAMES if kind in used):
        for shade in range(1 + (len(table.rank_of) > table.n_ranks)):
            title = _NAMES[kind] + (", later stages" if shade else "")
            parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOURS[kind][shade]}"/>')
            parts.append(f'<text x="{x + 16}" y="{y + 10}">{title}</text>')
            x += 34 + 6 * len(title)
    return "\n".join([*parts, "</svg>", ""])


def _as_json(name: str, table: _C.PipeTable, outcome: Outcome) -> dict:
    return {
        "schedule": name,
        "n_stages": len(table.rank_of),
        "n_ranks": table.n_ranks,
        "n_micro_batches": table.n_micro_batches,
        "makespan_ns": outcome.makespan_ns,
        "bubble": outcome.bubble,
        "ranks": [
            {
                "busy_ns": outcome.busy_ns[rank],
                "peak_live": outcome.peak_live[rank],
                "actions": [_C.pipe_format(action) for action in table.actions(rank)],
                "spans_ns": outcome.spans[rank],
            }
            for rank in range(table.n_ranks)
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("pipe", _DESCRIPTION)
    parser.add_argument("what", choices=["show"], help="show: draw a schedule")
    parser.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", type=int, required=True, help="ranks that hold the model together")
    parser.add_argument("--virtual", type=int, help="stages a rank; by default the fewest that the schedule takes")
    parser.add_argument("--micro-batches", type=int, required=True, help="of one step")
    for name, what in (
        ("forward", "a stage's forward"),
        ("input", "its backward's gradients of inputs"),
        ("weight", "its backward's gradients of weights"),
    ):
        parser.add_argument(f"--{name}", type=float, default=1.0, help=f"ms of {what}")
    parser.add_argument("--transfer", type=float, default=0.0, help="ms that a message takes")
    parser.add_argument("--actions", action="store_true", help="list every rank's actions too, with messages")
    parser.add_argument("--svg", help="write the timeline to this file as well")
    parser.add_argument("--json", action="store_true", help="print numbers and actions as JSON")
    return parser
