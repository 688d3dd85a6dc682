"""Turns the JSON lines of benchmarks/results into docs/performance.md, and the few main ones into the README's table."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README_BEGIN, README_END = "<!-- figures: written by benchmarks/report.py -->", "<!-- /figures -->"

Line = dict[str, Any]

# The README's rows: what is asked, the goal, the results file, which of its lines, and the key of the ratio.
FIGURES: list[tuple[str, str, str, Line, str]] = [
    *(
        (
            f"`import deepspeed_c`{more}: over `import torch`",
            "<= 1.05",
            "import_time",
            {"contender": f"deepspeed_c{attribute}"},
            "ratio_to_torch",
        )
        for attribute, more in (("", ""), (".initialize", " with all that training needs"))
    ),
    *(
        (
            f"`engine.step()`, 67M parameters, bf16, stage {stage}: over the memory bound",
            "<= 1.25",
            "engine_step",
            {"stage": stage},
            "ratio_to_bound",
        )
        for stage in (1, 2)
    ),
    *(
        (
            f"training step, 29M GPT, {dtype}, 2 ranks, stage {stage}: over DDP with torch's fused AdamW",
            "<= 1",
            f"train_step_{dtype}",
            {"contender": f"stage{stage}"},
            "ratio_to_ddp",
        )
        for dtype in ("fp32", "bf16")
        for stage in (0, 1, 2)
    ),
    *(
        (
            f"training step at stage 3, {what}, fp32, 2 ranks: over {peer_name}",
            goal,
            f"stage3_step_{model}",
            {"contender": "stage3"},
            f"ratio_to_{peer}",
        )
        for model, what, peer, peer_name, goal in (
            ("gpt", "29M GPT", "fsdp2", "FSDP2 (`fully_shard`)", "<= 0.95"),
            ("mlp", "67M MLP", "fsdp2", "FSDP2 (`fully_shard`)", "<= 0.95"),
            ("small", "200 layers of 64 x 64", "ddp", "DDP", "<= 1.3"),
        )
    ),
    (
        "host memory of `zero.Init`, 1B parameters, 4 ranks: over shard plus largest tensor",
        "<= 1.1",
        "init_memory",
        {},
        "ratio_to_bound",
    ),
    *(
        (
            f"the collective ledger: part of an fp32 training step of {model}, 2 ranks, stage {stage}",
            "<= 0.01",
            "ledger_cost",
            {"contender": model, "stage": stage},
            "share_of_step",
        )
        for model in ("29M GPT", "200 layers of 64 x 64")
        for stage in (2, 3)
    ),
    *(
        (
            f"`aio_handle` {direction}s 1 GiB from {what}: speed over {peer_name}",
            goal,
            "aio",
            {"contender": f"deepspeed_c, {kind}", "direction": direction},
            f"ratio_to_{peer}",
        )
        for kind, what, peer, peer_name, goal in (
            ("ordinary", "an ordinary unaligned tensor", "fio", "the best fio", ">= 0.9"),
            ("ordinary", "an ordinary unaligned tensor", "deepspeed", "DeepSpeed's", ">= 4"),
            ("locked", "a locked tensor", "deepspeed", "DeepSpeed's", ">= 1"),
        )
        for direction in ("write", "read")
    ),
    (
        "training 200M parameters with states on NVMe: states over the memory limit of the cgroup, with the losses of a run without a limit",
        ">= 2",
        "memory_limit",
        {"losses_are_equal": True},
        "ratio_states_to_limit",
    ),
    (
        "`engine.step()` with masters and moments on NVMe, 500M parameters: over the disk's time for 24 bytes a parameter",
        "<= 1.15",
        "offload_step",
        {"offload": "nvme"},
        "ratio_to_bound",
    ),
    *(
        (
            f"`engine.step()` offloaded to the host, 67M parameters, stage {stage}: over the memory bound",
            "<= 1.25",
            "offload_step",
            {"offload": "cpu", "stage": stage},
            "ratio_to_bound",
        )
        for stage in (2, 3)
    ),
    *(
        (
            f"checkpoint of 2 GB of fp32 Adam states, stage 3, 2 ranks: {what}",
            goal,
            "checkpoint_io",
            {"contender": contender, "stage": 3},
            f"ratio_to_{peer}",
        )
        for contender, what, peer, goal in (
            ("save", "speed of a save over the best fio", "fio", ">= 0.8"),
            ("save", "speed of a save over `torch.distributed.checkpoint`", "dcp", ">= 2"),
            ("load", "speed of a load over the best fio", "fio", ">= 0.8"),
            ("load_other_world", "time of a load on another number of ranks over a plain load", "load", "<= 1.2"),
            ("stall", "stall of an asynchronous save over copying the bytes in memory", "memcpy", "<= 1.3"),
        )
    ),
    *(
        (
            f"`transformers.Trainer` on a 13M Llama, 2 processes, stage {stage}: {what} over DeepSpeed's",
            goal,
            "trainer_step",
            {"contender": "deepspeed_c", "stage": stage},
            column,
        )
        for stage in (2, 3)
        for what, goal, column in (
            ("time of a step", "<= 0.7", "ratio_to_deepspeed"),
            ("peak memory of a process", "<= 1", "memory_to_deepspeed"),
        )
    ),
    (
        "launching a no-op on 2 processes: over `torch.distributed.run`",
        "<= 1.1",
        "launch",
        {"contender": "deepspeed_c"},
        "ratio_to_torchrun",
    ),
    *(
        (what, goal, "alias_start", {"what": row}, "added_ms")
        for row, what, goal in (
            ("deepspeed_c run", "`deepspeed_c run` in front of a command: milliseconds added to its start", "<= 50"),
            (
                "asking for deepspeed instead of torch",
                "`is_deepspeed_available()` with the alias: milliseconds above the same question about torch",
                "0",
            ),
        )
    ),
]


def write(benchmarks: Iterable[Any]) -> None:
    """Writes both documents from whatever results are there; ``benchmarks`` is the table of ``benchmarks/run.py``."""
    (ROOT / "docs" / "performance.md").write_text(performance(list(benchmarks)))
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text()))


def performance(benchmarks: Sequence[Any]) -> str:
    parts = [
        "# Performance",
        "<!-- Written by `make bench` from the JSON lines of the scripts named below. Do not edit. -->",
        "Each ratio is the median over rounds of one run in which ours and the peer, or the bound, alternate.",
        "Absolute times hold for one machine in one hour; the ratios are what to compare.",
    ]
    for benchmark in benchmarks:
        lines = load(benchmark.name)
        if not lines:
            continue
        machines = sorted({line["machine"] for line in lines if "machine" in line})
        command = " ".join(Path(word).name if word.startswith("/") else word for word in benchmark.command)
        parts += [
            f"## {benchmark.name}",
            question(ROOT / benchmark.source),
            f"`{command}`, source `{benchmark.source}`",
        ]
        parts += [f"Machine: {machine}." for machine in machines]
        parts.append(kernel_table(lines) if "kernel" in lines[0] else plain_table(lines))
    return "\n\n".join(parts) + "\n"


def load(name: str) -> list[Line]:
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def question(source: Path) -> str:
    """What a benchmark asks: the first paragraph of its docstring, or of its leading C comment."""
    text = source.read_text()
    if source.suffix == ".py":
        comment = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.sub(r"^ ?\* ?", "", text[text.index("/*") + 2 : text.index("*/")], flags=re.MULTILINE)
    return " ".join(comment.strip().split("\n\n")[0].split())


def plain_table(lines: list[Line]) -> str:
    """One row a line, the machine left to the text above."""
    keys = list(dict.fromkeys(key for line in lines for key in line if key not in ("machine", "benchmark")))
    return table(keys, [[cell(line.get(key)) for key in keys] for line in lines])


def kernel_table(lines: list[Line]) -> str:
    """The cores' lines, with the instruction sets side by side: ns per element, and how near the best is to the bound."""
    isas = list(dict.fromkeys(line["isa"] for line in lines))
    rows: dict[tuple[str, ...], dict[str, Line]] = {}
    for line in lines:
        rows.setdefault((line["kernel"], line["dtypes"], line["case"]), {})[line["isa"]] = line
    body = []
    for key, by_isa in rows.items():
        best = min(by_isa.values(), key=lambda line: line["ns_per_elem"])
        times = [cell(by_isa[isa]["ns_per_elem"]) if isa in by_isa else "" for isa in isas]
        body.append([*key, *times, cell(best["gbps"]), cell(best.get("bound_ratio"))])
    return table(["kernel", "dtypes", "case", *(f"{isa}, ns/elem" for isa in isas), "best, GB/s", "of the bound"], body)


def with_figures(readme: str) -> str:
    """The README with the rows of FIGURES that have results between its two marks."""
    rows = []
    for what, goal, name, chosen, key in FIGURES:
        for line in load(name):
            if all(line.get(k) == v for k, v in chosen.items()) and key in line:
                # A line with several ratios names each one's spread.
                low, high = (line.get(f"{key}_{end}", line.get(f"ratio_{end}")) for end in ("min", "max"))
                spread = "" if low is None else f" ({cell(low)} to {cell(high)})"
                rows.append([what, goal, cell(line[key]) + spread])
    body = table(["figure", "goal", "measured: median (min to max)"], rows) + "\n" if rows else ""
    head, rest = readme.split(README_BEGIN)
    return f"{head}{README_BEGIN}\n{body}{README_END}{rest.split(README_END)[1]}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
