"""Turn the JSON lines of benchmarks/results into docs/performance.md, and the eight most important figures into the
README's table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.figures import FIGURES, Figure
from benchmarks.measure import NOISE
from benchmarks.results import Line, Result

ROOT = Path(__file__).resolve().parents[1]
README_BEGIN, README_END = "<!-- figures: written by benchmarks/report.py -->", "<!-- /figures -->"
# If the rounds differ by more than this factor, the measurement does not count.
MAX_SPREAD = 2.0

ABOUT = """
Each ratio is the median over the rounds of one run; in a round ours and the peer, or the bound, take turns. Beside it stand the smallest and the largest. Absolute
times hold for one machine in one hour: compare the ratios. A benchmark has no result unless it has proved its row's claims (shards are shards, states are in
files, losses equal the peer's); a row whose time is below its bound says so, and a goal whose rounds lie further apart than a factor of 2 counts as neither met nor
missed.
""".strip()


class Measured(NamedTuple):
    """The cells of a figure's row."""

    median: str
    spread: str
    is_met: str  # "yes", "no" with a reason, or "" (not measured, a wrong bound, or rounds that disagree)
    origin: str
    date: str


def write(benchmarks: Iterable[Any]) -> None:
    """Write both documents from the available results; ``benchmarks`` is the table of ``benchmarks/run.py``."""
    (ROOT / "docs" / "performance.md").write_text(performance(list(benchmarks)))
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text()))


def measured(figure: Figure) -> Measured:
    result = results.load(figure.benchmark)
    origin, date = ("", "") if result is None else (str(result.origin), result.origin.date[:10])
    if result is None or result.origin.skipped:
        return Measured("not measured", "", "", origin, date)
    line = next((line for line in result.lines if line.items() >= figure.chosen.items() and figure.key in line), None)
    if line is None:  # a peer was not installed
        return Measured("not measured", "", "", origin, date)
    low, high = (line.get(f"{figure.key}_{end}") for end in ("min", "max"))
    relation, limit = figure.goal.split()
    is_met = line[figure.key] <= float(limit) if relation == "<=" else line[figure.key] >= float(limit)
    spread = "" if low is None else f"{cell(low)} to {cell(high)}"
    note = line.get("note") or ("rounds are too far apart" if low and high > MAX_SPREAD * low > 0 else "")
    median = cell(line[figure.key]) + (f" ({note})" if note else "")
    missed = f"no: {figure.why_not}" if figure.why_not else "no"
    verdict = "" if note else "yes" if is_met else missed
    return Measured(median, spread, verdict, origin, date)


def goals_table(figures: Sequence[Figure]) -> str:
    rows = []
    for figure in figures:
        found = measured(figure)
        rows.append([figure.what, figure.goal, found.median, found.spread, found.is_met, found.origin, found.date])
    return table(["figure", "goal", "median", "from to", "met", "commit", "date"], rows)


def performance(benchmarks: Sequence[Any]) -> str:
    parts = [
        "# Performance",
        "<!-- Written by `make bench` from the JSON lines in benchmarks/results. Do not edit. -->",
        ABOUT,
        "`make bench` says at its end which results are older than the code that they measure.",
        "## Goals",
        goals_table(FIGURES),
    ]
    for benchmark in benchmarks:
        command = " ".join("python" if word.startswith("/") else word for word in benchmark.command)
        parts += [
            f"## {benchmark.name}",
            question(ROOT / benchmark.source),
            f"`{command}`, source `{benchmark.source}`",
        ]
        result = results.load(benchmark.name)
        if result is None or result.origin.skipped:
            why = "" if result is None else f": {result.origin.skipped}"
            parts.append(f"Not measured{why}.")
            continue
        parts.append(provenance(result))
        parts.append(kernel_table(result.lines) if "kernel" in result.lines[0] else plain_table(result.lines))
    return "\n\n".join(parts) + "\n"


def provenance(result: Result) -> str:
    origin = result.origin
    machines = dict.fromkeys(line.get("machine", origin.machine) for line in result.lines)
    return (
        f"Commit {origin}, {origin.date[:16].replace('T', ' ')} UTC, {origin.seconds} s, on {' and '.join(machines)}."
    )


def question(source: Path) -> str:
    """Return a benchmark's question: the first paragraph of its docstring, or of its leading C comment."""
    text = source.read_text()
    if source.suffix == ".py":
        comment = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.sub(r"^ ?\* ?", "", text[text.index("/*") + 2 : text.index("*/")], flags=re.MULTILINE)
    return " ".join(comment.strip().split("\n\n")[0].split())


def plain_table(lines: list[Line]) -> str:
    """Return a table with one row a line, without the machine."""
    keys = list(dict.fromkeys(key for line in lines for key in line if key not in ("machine", "benchmark")))
    return table(keys, [[cell(line.get(key)) for key in keys] for line in lines])


def kernel_table(lines: list[Line]) -> str:
    """Return a table of the cores' lines with one column for each instruction set: ns per element, and the share of the
    bound that the best set reaches.
    """
    isas = list(dict.fromkeys(line["isa"] for line in lines))
    rows: dict[tuple[str, ...], dict[str, Line]] = {}
    for line in lines:
        rows.setdefault((line["kernel"], line["dtypes"], line["case"]), {})[line["isa"]] = line
    body = []
    for key, by_isa in rows.items():
        best = min(by_isa.values(), key=lambda line: line["ns_per_elem"])
        times = [cell(by_isa[isa]["ns_per_elem"]) if isa in by_isa else "" for isa in isas]
        share = best.get("bound_ratio")
        # No pass is faster than the bound. If a share exceeds 1 by more than noise, the bound is wrong.
        flag = " (above its bound)" if share is not None and share > 1 + NOISE else ""
        body.append([*key, *times, cell(best["gbps"]), cell(share) + flag])
    return table(["kernel", "dtypes", "case", *(f"{isa}, ns/elem" for isa in isas), "best, GB/s", "of the bound"], body)


def with_figures(readme: str) -> str:
    """Return the README with the main figures between its two marks, including figures that are not measured."""
    rows = []
    for figure in FIGURES:
        if figure.is_main:
            found = measured(figure)
            spread = f" ({found.spread})" if found.spread else ""
            origin = f"{found.origin}, {found.date}" if found.date else ""
            rows.append([figure.what, figure.goal, found.median + spread, origin])
    body = table(["figure", "goal", "measured: median (from to)", "commit"], rows)
    head, rest = readme.split(README_BEGIN)
    return f"{head}{README_BEGIN}\n{body}\n{README_END}{rest.split(README_END)[1]}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
