"""Turn the JSON lines of benchmarks/results into docs/performance.md, one page for each area in docs/performance, and
the README's table of the eight most important figures."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.areas import AREAS, Area
from benchmarks.figures import FIGURES, Figure
from benchmarks.measure import NOISE
from benchmarks.results import Line, Result

ROOT = Path(__file__).resolve().parents[1]
SUMMARY, FOLDER = "docs/performance.md", "docs/performance"
README_BEGIN, README_END = "<!-- figures: written by benchmarks/report.py -->", "<!-- /figures -->"
# If the rounds differ by more than this factor, the measurement does not count.
MAX_SPREAD = 2.0
WRITTEN = "<!-- Written by `make bench` from the JSON lines in benchmarks/results. Do not edit. -->"
NO_REASON = "no reason found yet"
# Results before 2026-11-30 do not name the instruction set. benchmarks/results/cores.jsonl has the sets of this one.
FULL_NAMES = {"AMD EPYC, 2 cores, 24 GiB": "AMD EPYC, AVX-512 (avx512_bf16), 2 cores, 24 GiB"}

ABOUT = """
The figures are ratios to another program, or to a bound: the least that memory, disk, link or computation allow. In each
round of a run ours and the other take turns. A ratio is the median over the rounds, beside the smallest and the largest.
Absolute times hold for one machine in one hour: compare the ratios.

- A benchmark has no result unless it has proved its claims: shards are shards, states are in files, losses are equal.
- A goal is open if it is not measured, its rounds lie further apart than a factor of 2, or a time is below its bound.
- A missed goal has the reason that measurements have shown, or "no reason found yet".
- A result that is *older than its code* has a mark with the number of commits to the measured code since. The marks were
  right when this page was written; "unknown" is a commit outside of this history.

`make bench` measures everything again, `python -m benchmarks.run NAME` one benchmark.
""".strip()

# Numbers of commits grow with each commit, so no test compares them.
_MARK = re.compile(r" ?\*(?:\d|unknown)[^*\n]*\*")

Marks = Mapping[str, int | None]


class Measured(NamedTuple):
    """The measurement of a figure."""

    median: str
    spread: str
    is_met: bool | None  # None: not measured, a wrong bound, or rounds that disagree
    origin: str
    date: str
    reason: str = ""  # why it is missed


Pair = tuple[Figure, Measured]


def write(benchmarks: Sequence[Any], *, has_new_marks: bool = False) -> None:
    """Write the documents from the available results; ``benchmarks`` is the table of ``benchmarks/run.py``.

    has_new_marks: pages with the same results are written too. Without it they keep their marks, so that a run changes
    the pages of its results alone.
    """
    written = pages(benchmarks, marks_of(benchmarks))
    (ROOT / FOLDER).mkdir(exist_ok=True)
    for path, text in written.items():
        page = ROOT / path
        if has_new_marks or not page.exists() or without_marks(page.read_text()) != without_marks(text):
            page.write_text(text)
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text()))


def marks_of(benchmarks: Iterable[Any]) -> Marks:
    """Return the commits to the measured code since each result, by benchmark; None where git does not know them."""
    found = [(each, results.load(each.name)) for each in benchmarks]
    return {
        each.name: results.commits_since(result.origin, each.paths)
        for each, result in found
        if result is not None and not result.origin.skipped
    }


def mark(n_commits: int | None, what: str = "") -> str:
    """Return the mark of a result; "" if its code has not changed."""
    if n_commits == 0:
        return ""
    number = "unknown" if n_commits is None else f"{n_commits} commit{'s' * (n_commits > 1)}"
    return f"*{number}{what}*"


def without_marks(text: str) -> str:
    return _MARK.sub("", text)


def measured(figure: Figure) -> Measured:
    result = results.load(figure.benchmark)
    origin, date = ("", "") if result is None else (str(result.origin), result.origin.date[:10])
    if result is None or result.origin.skipped:
        return Measured("not measured", "", None, origin, date)
    line = next((line for line in result.lines if line.items() >= figure.chosen.items() and figure.key in line), None)
    if line is None:  # a peer was not installed
        return Measured("not measured", "", None, origin, date)
    low, high = (line.get(f"{figure.key}_{end}") for end in ("min", "max"))
    relation, limit = figure.goal.split()
    is_met = line[figure.key] <= float(limit) if relation == "<=" else line[figure.key] >= float(limit)
    spread = "" if low is None else f"{cell(low)} to {cell(high)}"
    note = line.get("note") or ("rounds are too far apart" if low and high > MAX_SPREAD * low > 0 else "")
    median = cell(line[figure.key])
    if not is_met and median == cell(float(limit)):
        median = f"{line[figure.key]:.5g}"  # the rounded number would meet the goal
    median += f" ({note})" if note else ""
    is_missed = not note and not is_met
    reason = (with_values(figure.why_not, line) or NO_REASON) if is_missed else ""
    return Measured(median, spread, None if note else is_met, origin, date, reason)


def with_values(text: str, line: Line) -> str:
    """Return the text with the values of the keys that it names."""
    return re.sub(r"`(\w+)`", lambda word: cell(line[word[1]]) if word[1] in line else word[0], text)


def goals_table(figures: Sequence[Figure], marks: Marks) -> str:
    rows = []
    for figure in figures:
        found = measured(figure)
        verdict = {None: "", True: "yes", False: f"no: {found.reason}"}[found.is_met]
        row = [figure.what, figure.goal, found.median, found.spread, verdict]
        rows.append([*row, found.origin, found.date, mark(marks.get(figure.benchmark, 0))])
    return table(["figure", "goal", "median", "from to", "met", "commit", "date", "older than its code"], rows)


def pages(benchmarks: Sequence[Any], marks: Marks) -> dict[str, str]:
    """Return the text of each page by its path."""
    by_area = {area: [each for each in benchmarks if each.area == area.name] for area in AREAS}
    texts = {f"docs/{page_of(area)}": area_page(area, found, marks) for area, found in by_area.items()}
    return {SUMMARY: summary(by_area, marks), **texts}


def page_of(area: Area) -> str:
    return f"performance/{area.name}.md"


def figures_of(benchmarks: Sequence[Any]) -> list[Figure]:
    names = {benchmark.name for benchmark in benchmarks}
    return [figure for figure in FIGURES if figure.benchmark in names]


def summary(by_area: Mapping[Area, Sequence[Any]], marks: Marks) -> str:
    rows, sections = [], []
    for area, benchmarks in by_area.items():
        found = [(figure, measured(figure)) for figure in figures_of(benchmarks)]
        met, missed, is_open = ([pair for pair in found if pair[1].is_met is state] for state in (True, False, None))
        ages = [marks[benchmark.name] for benchmark in benchmarks if benchmark.name in marks]
        n_old = sum(age != 0 for age in ages)
        old = f"*{n_old} of {len(ages)}*" if n_old else ""
        link = f"[{area.title}]({page_of(area)})"
        rows.append([link, *(str(len(pairs)) for pairs in (met, missed, is_open)), old])
        sections.append(section(area, met, missed, is_open))
    totals = [str(sum(int(row[i]) for row in rows)) for i in (1, 2, 3)]
    head = ["area", "goals met", "missed", "open", "results older than their code"]
    return joined(
        "# Performance",
        WRITTEN,
        "How fast deepspeed_c is, and which of its goals it misses. The page of each area has all goals and all results.",
        table(head, [*rows, ["all", *totals, ""]]),
        "## How it is measured",
        ABOUT,
        "## Machines",
        machines_table([benchmark for benchmarks in by_area.values() for benchmark in benchmarks]),
        *sections,
    )


def section(area: Area, met: Sequence[Pair], missed: Sequence[Pair], is_open: Sequence[Pair]) -> str:
    """Return the section of an area in the summary: its most important goals that are met, and all missed ones."""
    rows = [
        [figure.what, figure.goal, with_spread(found)] for figure, found in met if figure.is_important or figure.is_main
    ]
    by_reason: dict[str, list[str]] = {}
    for figure, found in sorted(missed, key=lambda pair: pair[1].reason != NO_REASON):
        goal = f"{figure.what}: {with_spread(found)}, goal {figure.goal}"
        by_reason.setdefault(found.reason, []).append(goal)
    reasons = [
        f"- {goals[0]}. {sentence(reason)}" if len(goals) == 1 else "\n  - ".join([f"- {reason}:", *goals])
        for reason, goals in by_reason.items()
    ]
    numbers = f"{len(met)} goals are met, {len(missed)} missed, {len(is_open)} open"
    return joined(
        f"## {area.title}",
        f"{area.against} {numbers}: [all goals and results]({page_of(area)}).",
        table(["met, among others", "goal", "median (from to)"], rows) if rows else "",
        "Missed, with the reason:" if reasons else "",
        "\n".join(reasons),
    )


def sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}." if reason == NO_REASON else f"Reason: {reason}."


def machines_table(benchmarks: Sequence[Any]) -> str:
    dates: dict[str, list[str]] = {}
    for benchmark in benchmarks:
        result = results.load(benchmark.name)
        if result is not None and not result.origin.skipped:
            dates.setdefault(full_name(result.origin.machine), []).append(result.origin.date[:10])
    rows = [[machine, str(len(days)), min(days), max(days)] for machine, days in dates.items()]
    return table(["machine", "benchmarks", "first result", "last result"], rows)


def area_page(area: Area, benchmarks: Sequence[Any], marks: Marks) -> str:
    parts = [
        f"# Performance: {area.title[0].lower()}{area.title[1:]}",
        WRITTEN,
        f"{area.against} [Performance](../performance.md) says how it is measured, and has a summary of all areas.",
        "Benchmarks: " + ", ".join(f"[{benchmark.name}](#{benchmark.name})" for benchmark in benchmarks) + ".",
        "## Goals",
        goals_table(figures_of(benchmarks), marks),
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
        age = mark(marks.get(benchmark.name, 0), " older than its code")
        parts.append(f"{provenance(result)} {age}".rstrip())
        parts.append(kernel_table(result.lines) if "kernel" in result.lines[0] else plain_table(result.lines))
    return joined(*parts)


def joined(*parts: str) -> str:
    """Return the parts as paragraphs."""
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def full_name(machine: str) -> str:
    return FULL_NAMES.get(machine, machine)


def with_spread(found: Measured) -> str:
    return f"{found.median} ({found.spread})" if found.spread else found.median


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
    rows, machines = [], []
    for figure in FIGURES:
        if figure.is_main:
            found = measured(figure)
            origin = f"{found.origin}, {found.date}" if found.date else ""
            rows.append([figure.what, figure.goal, with_spread(found), origin])
            result = results.load(figure.benchmark)
            machines += [] if result is None else [full_name(result.origin.machine)]
    body = table(["figure", "goal", "measured: median (from to)", "commit"], rows)
    measured_on = f"\n\nMeasured on {' and '.join(dict.fromkeys(machines))}." if machines else ""
    head, rest = readme.split(README_BEGIN)
    return f"{head}{README_BEGIN}\n{body}{measured_on}\n{README_END}{rest.split(README_END)[1]}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        "|" + "".join(f" {each} |" if each else " |" for each in row) for row in [header, ["---"] * len(header), *rows]
    )


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
