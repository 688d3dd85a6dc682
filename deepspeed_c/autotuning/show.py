"""The command ``deepspeed_c tune show``: a search as a table, as a picture, or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_c.autotuning.picture import draw
from deepspeed_c.autotuning.search import is_better
from deepspeed_c.command_line import command_parser
from deepspeed_c.errors import ConfigError
from deepspeed_c.quantity import as_binary

__all__ = ["RECORDS", "UNITS", "as_text", "main"]

RECORDS = "records.json"
UNITS = {"throughput": "samples/s", "flops": "FLOP/s a rank", "latency": "s", "forward": "s", "step": "s"}

_DESCRIPTION = """\
What a search by --autotuning found: the experiments, the best first, and the candidates that were left out.

  deepspeed_c tune show autotuning_results
  deepspeed_c tune show autotuning_results --svg search.svg      the experiments in their order, with the best so far
"""


def main(argv: Sequence[str]) -> int:
    """Runs ``deepspeed_c tune`` with these arguments. Returns 0 if a search was shown. Raises ConfigError."""
    options = _parser().parse_args(argv)
    record = _read(Path(options.results))
    if options.svg is not None:
        try:
            Path(options.svg).write_text(draw(record, UNITS[record["metric"]]), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot be written: {error.strerror}", where=f"--svg {options.svg}", fix="name another"
            ) from error
    print(json.dumps(record) if options.json else as_text(record))
    return 0


def as_text(record: Mapping[str, Any]) -> str:
    """All candidates of a ``records.json`` as a table: the best first, and those that were left out last, with the
    reason."""
    metric, rows = record["metric"], record["experiments"]
    ran = sorted((row for row in rows if row["status"] == "ran"), key=lambda row: row["value"])
    if is_better(metric, 1.0, 0.0):
        ran.reverse()
    lines = [("experiment", f"{metric} ({UNITS[metric]})", "seconds", "planned", "peak", "")]
    lines += [_line(row) for row in (*ran, *(row for row in rows if row["status"] != "ran"))]
    n_seconds = sum(row.get("seconds", 0.0) for row in rows)
    end = f"best: {record['best'] or 'none'}; {len(ran)} of {len(rows)} ran, in {n_seconds:.0f} s"
    return f"{_aligned(lines)}\n\n{end}" + ("" if record["is_finished"] else "; the search has not ended")


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    value, metrics = row.get("value"), row.get("metrics") or {}
    on_device = metrics.get("peak_device_bytes") is not None
    peak = metrics.get("peak_device_bytes" if on_device else "peak_host_bytes")
    planned = (row["plan"] or {}).get("device" if on_device else "host")
    return (
        row["name"],
        "" if value is None else f"{value:.4g}",
        f"{row['seconds']:.1f}" if "seconds" in row else "",
        "" if planned is None else as_binary(planned),
        "" if peak is None else as_binary(peak),
        "" if row["status"] == "ran" else f"{row['status']}: {row['problem'].splitlines()[0]}",
    )


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _read(folder: Path) -> dict[str, Any]:
    path = folder / RECORDS
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["metric"] not in UNITS or not all(row["status"] for row in record["experiments"]):
            raise ValueError("its content is not that of a search")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}",
            where="deepspeed_c tune show",
            fix="name the results_dir of a search, which is autotuning_results by default",
        ) from error
    return record


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("tune", _DESCRIPTION)
    parser.add_argument("what", choices=["show"], help="show: what a search found")
    parser.add_argument("results", metavar="DIR", help="the results_dir of the search")
    parser.add_argument("--svg", metavar="FILE", help="draw the search into this file as well")
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    return parser
