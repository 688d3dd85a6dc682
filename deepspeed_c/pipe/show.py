"""The command ``deepspeed_c pipe show``: prints a schedule as text or as a picture, its idle time, the number of
micro-batches held, and the weights that are live.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from deepspeed_c import _C
from deepspeed_c.command_line import command_parser
from deepspeed_c.errors import ConfigError
from deepspeed_c.pipe.gathers import GRADIENTS, UnitGathers, unit_gathers
from deepspeed_c.pipe.schedule import SCHEDULES, Cost, Outcome, StageUnit, make_table, simulate, traits_of, with_gathers

__all__ = ["as_svg", "as_text", "main"]

_DESCRIPTION = """\
What each rank of a pipeline does when, by a schedule: idle time, what ranks hold, and the timeline.

  deepspeed_c pipe show --schedule zb_h1 --stages 4 --micro-batches 8
  deepspeed_c pipe show --schedule interleaved --stages 4 --virtual 2 --micro-batches 8 --svg interleaved.svg
  deepspeed_c pipe show --schedule 1f1b --stages 2 --micro-batches 4 --actions      every action, with messages
  deepspeed_c pipe show --schedule interleaved --stages 2 --virtual 2 --micro-batches 4 --unit-elements 5,3 --max-live 8
  deepspeed_c pipe show --schedule 1f1b --stages 2 --micro-batches 4 --unit-elements 5,3/4,4,2 --max-live 5     by stage
"""

_COLUMNS = 160  # characters of a timeline as text
_LANE_PX, _LABEL_PX, _WIDTH_PX = 26, 64, 1080
_GATHER_PX, _LIVE_PX = 10, 20  # below a lane: a strip of gathers, and the curve of live weights
_GATHER_COLOUR, _LIVE_COLOUR = "#9e9ac8", "#dadaeb"
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
    for name in ("forward", "input", "weight", "transfer", "gather", "ahead", "prefetch"):
        if getattr(options, name) < 0:
            raise ConfigError(f"{getattr(options, name)} is negative", where=f"--{name}", fix="write a number >= 0")
    costs = [Cost(*(round(ms * 1e6) for ms in (options.forward, options.input, options.weight)))] * len(table.rank_of)
    transfer_ns = round(options.transfer * 1e6)
    outcome = simulate(table, costs, transfer_ns)
    bare_ns = outcome.makespan_ns
    plans: list[UnitGathers] = []
    if options.unit_elements is not None:
        units = _units(options, table)
        plans = [unit_gathers(table, r, units, options.max_live, options.prefetch) for r in range(table.n_ranks)]
        if options.max_live is None or options.max_live >= _largest_stage(units):
            table = with_gathers(table, units, options.max_live, ahead=options.ahead, where="--max-live")
            outcome = simulate(table, costs, transfer_ns)
    elif options.max_live is not None:
        raise ConfigError("there are no units", where="--max-live", fix="write --unit-elements as well")
    if options.json:
        print(json.dumps(_as_json(options.schedule, table, outcome, plans)))
    else:
        print(as_text(options.schedule, table, outcome))
        if table.units:
            print(f"without gathers: {bare_ns / 1e6:.3f} ms")
        if plans:
            print("\n".join(_plan_lines(plans, _largest_stage(units), has_table=bool(table.units))))
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


def _units(options: argparse.Namespace, table: _C.PipeTable) -> list[StageUnit]:
    """The units of ``--unit-elements``. Each takes its part of ``--gather``, the time of its stage's units."""
    n_stages = len(table.rank_of)
    lists = options.unit_elements.split("/")
    try:
        sizes = [[int(word) for word in text.split(",") if text] for text in lists]
    except ValueError:
        sizes = []
    if not any(sizes) or min(size for of_stage in sizes for size in of_stage) < 1:
        raise ConfigError(
            f"{options.unit_elements!r} is no list of sizes",
            where="--unit-elements",
            fix="write positive integers with commas, as 5,3, and a slash between stages that differ, as 5,3/4",
        )
    if len(sizes) not in (1, n_stages):
        raise ConfigError(
            f"{options.unit_elements!r} has the units of {len(sizes)} stages, and there are {n_stages}",
            where="--unit-elements",
            fix="write one list for all stages, or one for each",
        )
    return [
        StageUnit(stage, size, round(options.gather * 1e6 * size / sum(of_stage)))
        for stage, of_stage in enumerate(sizes if len(sizes) > 1 else sizes * n_stages)
        for size in of_stage
    ]


def _largest_stage(units: Sequence[StageUnit]) -> int:
    """The most elements of all units of a stage."""
    return max(sum(unit.numel for unit in units if unit.stage == stage) for stage in {unit.stage for unit in units})


def _plan_lines(plans: Sequence[UnitGathers], largest_stage: int, *, has_table: bool) -> list[str]:
    lines = [
        "an engine gathers single units within a computation, at most:",
        *(
            f"rank {rank:>3}  {sum(plan.n_gathers)} gathers of {plan.gathered_elements} elements, for each unit"
            f" {' '.join(map(str, plan.n_gathers))}; at most {plan.peak_elements} live"
            for rank, plan in enumerate(plans)
        ),
        GRADIENTS,
    ]
    if not has_table:
        lines.insert(0, f"gathers of whole stages do not fit: one needs {largest_stage} live elements")
    return lines


def _numels(table: _C.PipeTable) -> dict[tuple[int, int], int]:
    """{(stage, number of the unit within it): its elements}."""
    sizes: dict[int, list[int]] = {}
    for stage, numel, _ in table.units:
        sizes.setdefault(stage, []).append(numel)
    return {(stage, i): numel for stage, numels in sizes.items() for i, numel in enumerate(numels)}


def _gathers(table: _C.PipeTable, outcome: Outcome, rank: int) -> list[tuple[int, int, int, int]]:
    """(stage, unit, begin ns, end ns) of a rank's gathers."""
    spans = zip(table.actions(rank), outcome.spans[rank], strict=True)
    return [(stage, unit, *span) for (kind, stage, unit), span in spans if kind == _C.PIPE_GATHER]


def _live(table: _C.PipeTable, outcome: Outcome, rank: int) -> list[tuple[int, int]]:
    """(ns, elements of live units from then on) of a rank, in the order of time. A unit counts from the begin of its
    gather to its release.
    """
    numels, sign = _numels(table), {_C.PIPE_GATHER: 1, _C.PIPE_RELEASE: -1}
    changes: dict[int, int] = {0: 0}
    for (kind, stage, unit), (begin, _) in zip(table.actions(rank), outcome.spans[rank], strict=True):
        if kind in sign:
            changes[begin] = changes.get(begin, 0) + sign[kind] * numels[stage, unit]
    times = sorted(changes)
    return list(zip(times, accumulate(changes[ns] for ns in times), strict=True))


def _owned(table: _C.PipeTable, rank: int) -> int:
    """Elements of all units of the rank's stages."""
    return sum(numel for stage, numel, _ in table.units if table.rank_of[stage] == rank)


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


def _weights_summary(table: _C.PipeTable, outcome: Outcome) -> str:
    owned = sum(_owned(table, rank) for rank in range(table.n_ranks))
    limit = "no limit" if table.limit_elements < 0 else f"a limit of {table.limit_elements}"
    return (
        f"weights: {sum(outcome.n_gathers)} gathers of {sum(outcome.gathered_elements)} elements,"
        f" {sum(outcome.gathered_elements) / max(owned, 1):.2f} for each element; at most"
        f" {max(outcome.peak_live_elements)} live on a rank with {limit}"
    )


def _weights_rows(table: _C.PipeTable, outcome: Outcome, rank: int, n_cells: int, width: int) -> list[str]:
    """A row with G where the rank gathers, and a row of live weights in tenths of the rank's units (#: all). A cell
    shows the most that is live within it.
    """
    unit = outcome.makespan_ns / n_cells if outcome.makespan_ns else 1
    gathers = ["."] * n_cells
    for _, _, begin, end in _gathers(table, outcome, rank):
        first = min(int(begin / unit), n_cells - 1)
        for i in range(first, max(first + 1, min(round(end / unit), n_cells))):
            gathers[i] = "G"
    live, steps = [0] * n_cells, _live(table, outcome, rank)
    for (begin, elements), (end, _) in zip(steps, [*steps[1:], (outcome.makespan_ns, 0)], strict=True):
        for i in range(min(int(begin / unit), n_cells - 1), min(-int(-end // unit), n_cells)):
            live[i] = max(live[i], elements)
    owned = max(_owned(table, rank), 1)
    levels = ["." if n == 0 else "#" if n >= owned else str(min(n * 10 // owned, 9)) for n in live]
    rows = ("".join(cell.ljust(width, cell) for cell in cells) for cells in (gathers, levels))
    gathered = f"{outcome.n_gathers[rank]:>3} gathers of {outcome.gathered_elements[rank]} elements"
    peak = f"at most {outcome.peak_live_elements[rank]} of {_owned(table, rank)} elements"
    return [
        f"{name} {row}  {said}"
        for name, row, said in zip(("  gather", "  live  "), rows, (gathered, peak), strict=True)
    ]


def as_text(name: str, table: _C.PipeTable, outcome: Outcome) -> str:
    """The summary, and a line for each rank. Letters stand for computations (f: the forward of the rank's second
    stage), dots for waiting. If there is room, letters are followed by the numbers of their micro-batches. A table with
    units has two more lines for each rank: its gathers, and its live weights."""
    lines = [_summary(name, table, outcome)]
    if table.units:
        lines.append(_weights_summary(table, outcome))
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
        if table.units:
            lines += _weights_rows(table, outcome, rank, len(row), width)
    return "\n".join(lines)


def as_svg(name: str, table: _C.PipeTable, outcome: Outcome) -> str:
    """The timeline as a picture, with a lane for each rank and a box for each action. If the table has units, gathers
    and a curve of live weights follow each lane.
    """
    scale = _WIDTH_PX / max(outcome.makespan_ns, 1)
    step = _LANE_PX + (_GATHER_PX + _LIVE_PX if table.units else 0)
    height = table.n_ranks * step + 2 * _LANE_PX + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABEL_PX + _WIDTH_PX + 20}" height="{height}">',
        "<style>text { font-family: sans-serif; font-size: 11px }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="6" y="16">{_summary(name, table, outcome)}</text>',
    ]
    for rank in range(table.n_ranks):
        y = _LANE_PX + rank * step
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
        if table.units:
            parts += _weights_parts(table, outcome, rank, y + _LANE_PX, scale)
    x, y = _LABEL_PX, table.n_ranks * step + _LANE_PX + 8
    used = {action[0] for rank in range(table.n_ranks) for action in table.actions(rank)}
    for kind in (kind for kind in _NAMES if kind in used):
        for shade in range(1 + (len(table.rank_of) > table.n_ranks)):
            title = _NAMES[kind] + (", later stages" if shade else "")
            parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOURS[kind][shade]}"/>')
            parts.append(f'<text x="{x + 16}" y="{y + 10}">{title}</text>')
            x += 34 + 6 * len(title)
    for colour, title in ((_GATHER_COLOUR, "gather"), (_LIVE_COLOUR, "live weights")) if table.units else ():
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{title}</text>')
        x += 34 + 6 * len(title)
    return "\n".join([*parts, "</svg>", ""])


def _weights_parts(table: _C.PipeTable, outcome: Outcome, rank: int, y: int, scale: float) -> list[str]:
    """Boxes of a rank's gathers, and below them the area of its live weights. Its full height is all units."""
    parts = []
    for stage, unit, begin, end in _gathers(table, outcome, rank):
        parts.append(
            f'<rect x="{_LABEL_PX + begin * scale:.2f}" y="{y}" width="{max((end - begin) * scale, 1.5):.2f}"'
            f' height="{_GATHER_PX - 1}" fill="{_GATHER_COLOUR}" stroke="white" stroke-width="0.5">'
            f"<title>{_C.pipe_format((_C.PIPE_GATHER, stage, unit))}</title></rect>"
        )
    bottom, owned = y + _GATHER_PX + _LIVE_PX - 2, max(_owned(table, rank), 1)
    points, level = [f"{_LABEL_PX},{bottom}"], float(bottom)
    for ns, elements in _live(table, outcome, rank):
        x = _LABEL_PX + ns * scale
        points.append(f"{x:.2f},{level:.2f}")
        level = bottom - (_LIVE_PX - 4) * elements / owned
        points.append(f"{x:.2f},{level:.2f}")
    points += [f"{_LABEL_PX + _WIDTH_PX},{level:.2f}", f"{_LABEL_PX + _WIDTH_PX},{bottom}"]
    parts.append(f'<polygon points="{" ".join(points)}" fill="{_LIVE_COLOUR}" stroke="{_GATHER_COLOUR}"/>')
    return parts


def _as_json(name: str, table: _C.PipeTable, outcome: Outcome, plans: Sequence[UnitGathers]) -> dict:
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
                **(_weights_json(outcome, rank) if table.units else {}),
                **({"engine": plans[rank]._asdict()} if plans else {}),
                "actions": [_C.pipe_format(action) for action in table.actions(rank)],
                "spans_ns": outcome.spans[rank],
            }
            for rank in range(table.n_ranks)
        ],
    }


def _weights_json(outcome: Outcome, rank: int) -> dict[str, int]:
    names = ("peak_live_elements", "n_gathers", "gathered_elements", "link_ns")
    return {name: getattr(outcome, name)[rank] for name in names}


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
    parser.add_argument(
        "--unit-elements",
        help="sizes of the units of weights, as 5,3 for each stage, or 5,3/4 for two stages: shows their gathers",
    )
    parser.add_argument("--max-live", type=int, help="the most elements of live units on a rank; by default no limit")
    parser.add_argument("--gather", type=float, default=0.0, help="ms that a gather of all units of a stage takes")
    parser.add_argument("--ahead", type=int, default=1, help="computations that a gather precedes its use by, at most")
    parser.add_argument(
        "--prefetch", type=int, default=0, help="elements that an engine gathers ahead (stage3_prefetch_bucket_size)"
    )
    parser.add_argument("--actions", action="store_true", help="list every rank's actions too, with messages")
    parser.add_argument("--svg", help="write the timeline to this file as well")
    parser.add_argument("--json", action="store_true", help="print numbers and actions as JSON")
    return parser
