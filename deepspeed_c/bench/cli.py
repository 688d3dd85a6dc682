"""The command ``deepspeed_c bench``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from deepspeed_c.bench import inference_cli
from deepspeed_c.bench.comm import CONTENDERS, OPS, BenchedCall, CommBench, run
from deepspeed_c.bench.plot import Chart, as_svg, as_text
from deepspeed_c.command_line import Actions, command_parser, run_action
from deepspeed_c.errors import ConfigError
from deepspeed_c.quantity import as_binary, parse_bytes

__all__ = ["main"]

_MAX_RANKS = 16
_DESCRIPTION = """\
How fast the layers below training are on this machine, and how fast a server answers.

  deepspeed_c bench comm                 collectives among ranks of this host, over shared memory and over gloo
  deepspeed_c bench inference MODEL_DIR  answers of `deepspeed_c serve MODEL_DIR` under a load that does not wait for it
  deepspeed_c bench inference --url URL  of any server with OpenAI's API
"""


def main(argv: Sequence[str]) -> int:
    """Runs ``deepspeed_c bench`` with the words after it; 0, and 1 where a request to a server failed.

    Raises ConfigError for numbers out of range or a server that answers nothing, CommError where a rank fails,
    LaunchError where a server cannot be started.
    """
    return run_action(_parser(), argv)


def _comm(options: argparse.Namespace) -> int:
    low, high = parse_bytes(options.min, "--min"), parse_bytes(options.max, "--max")
    if not 1 <= low <= high or options.step < 2 or options.rounds < 1 or not 2 <= options.ranks <= _MAX_RANKS:
        raise ConfigError(
            f"--min {options.min} --max {options.max} --step {options.step} --rounds {options.rounds}"
            f" --ranks {options.ranks}: nothing to measure",
            where="deepspeed_c bench comm",
            fix=f"--min is not above --max, sizes grow by 2 or more, one round or more, 2 to {_MAX_RANKS} ranks",
        )
    sizes = [low]
    while sizes[-1] * options.step <= high:
        sizes.append(sizes[-1] * options.step)
    contenders = [name for name in CONTENDERS if name.split(",")[0] in options.backends]
    bench = CommBench(options.ranks, options.ops, sizes, options.dtype, contenders, options.rounds)
    rows, absent = run(bench)
    result = {
        **msgspec.to_builtins(bench),
        "notes": [f"{name}: {reason}" for name, reason in absent.items()],
        "results": msgspec.to_builtins(rows),
    }
    print(json.dumps(result, indent=2) if options.json else _table(bench, rows, result["notes"]))
    if options.plot and rows:
        charts = _charts(rows)
        text = as_svg(charts) if options.plot.endswith(".svg") else as_text(charts)
        Path(options.plot).write_text(text, encoding="utf-8")
    return 0


def _table(bench: CommBench, rows: Sequence[BenchedCall], notes: Sequence[str]) -> str:
    cells = [["", "bytes", "by", "time, us (min to max)", "algorithm, GB/s", "bus, GB/s", "of gloo's time"]]
    gloo = {(row.op, row.n_bytes): row.seconds for row in rows if row.contender == "gloo"}
    for row in rows:
        base = gloo.get((row.op, row.n_bytes))
        cells.append(
            [
                row.op,
                as_binary(row.n_bytes),
                row.contender,
                f"{row.seconds * 1e6:.1f} ({row.seconds_min * 1e6:.1f} to {row.seconds_max * 1e6:.1f})",
                f"{row.algorithm_gb_per_s:.3f}",
                f"{row.bus_gb_per_s:.3f}",
                "" if base is None or row.contender == "gloo" else f"{row.seconds / base:.3f}",
            ]
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    head = f"{bench.n_ranks} ranks, {bench.dtype}, median of {bench.rounds} rounds; bytes are those of the whole buffer"
    table = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    legend = [f"  {name}: {CONTENDERS[name]}" for name in bench.contenders]
    return "\n".join([head, *legend, "", *table, *[""] * bool(notes), *(f"note: {note}" for note in notes)])


def _charts(rows: Sequence[BenchedCall]) -> list[Chart]:
    charts = []
    for op in dict.fromkeys(row.op for row in rows):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.op == op:
                lines.setdefault(row.contender, []).append((row.n_bytes, row.bus_gb_per_s))
        charts.append(Chart(op, "bus bandwidth in GB/s over bytes", lines, lambda n_bytes: as_binary(round(n_bytes))))
    return charts


def _names(known: Sequence[str]) -> type:
    def parse(text: str) -> list[str]:
        names = [name.strip().replace("-", "_") for name in text.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse  # type: ignore[return-value]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bench", _DESCRIPTION)
    text = "collectives among ranks of this host: time, algorithm and bus bandwidth over sizes for each backend"
    actions = Actions(parser, "comm | inference")
    inference_cli.add(actions)
    comm = actions.add("comm", _comm, text)
    comm.add_argument("--ranks", type=int, default=2, metavar="N", help="processes; default %(default)s")
    comm.add_argument(
        "--ops", type=_names(OPS), default=list(OPS), metavar="NAMES", help=f"of {', '.join(OPS)}; default all"
    )
    comm.add_argument(
        "--backends", type=_names(("shm", "gloo")), default=["shm", "gloo"], metavar="NAMES", help="of shm, gloo"
    )
    comm.add_argument("--min", default="4KiB", metavar="BYTES", help="the smallest buffer; default %(default)s")
    comm.add_argument("--max", default="64MiB", metavar="BYTES", help="the largest; default %(default)s")
    comm.add_argument("--step", type=int, default=8, metavar="FACTOR", help="from size to size; default %(default)s")
    comm.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default %(default)s")
    comm.add_argument("--rounds", type=int, default=5, metavar="N", help="default %(default)s")
    comm.add_argument("--json", action="store_true", help="print JSON")
    comm.add_argument("--plot", metavar="FILE", help="a chart of bus bandwidth: SVG for *.svg, else text")
    return parser
