"""How much memory do the model states of a rank take by stage and number of ranks, against 16/N bytes per parameter, and did the planner know?

bf16 with fp32 AdamW, a stack of linear layers of 60M parameters on a batch of one row, so that activations are some
kilobytes. Live tensor bytes are measured after every operator, and given in bytes per parameter: the peak of three
training steps, the states between steps, and the peak of ``initialize``, which also holds the given fp32 weights. The
part of the peak above the states is the live window: gathered weights, gradients before their reduction, and receive
buffers of collectives. Writes docs/images/memory_by_stage.svg.
Run: python -m benchmarks.deepspeed_c.memory_by_stage [--ranks 1 2 4 8] [--params 60e6]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, require

LAYERS = 64
N_STEPS = 3
STAGES = (0, 1, 2, 3)
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "memory_by_stage.svg"


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
    }


def make_model(n_params: int):
    import torch

    width = int((n_params / LAYERS) ** 0.5)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)])


def rank_main(n_params: int) -> None:
    """Measure all stages with one engine after the other."""
    import torch
    import torch.distributed as dist

    import deepspeed_c
    from benchmarks.engines import sharded_elems
    from deepspeed_c.plan.live_bytes import LiveBytes

    torch.set_num_threads(1)
    deepspeed_c.init_distributed(verbose=False)
    for stage in STAGES:
        torch.manual_seed(0)
        with LiveBytes() as live:
            with live.phase("initialize"):
                engine = deepspeed_c.initialize(model=make_model(n_params), config=config(stage))[0]
            width = next(engine.module.children()).in_features
            for _ in range(N_STEPS):
                with live.phase("train"):
                    engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().square().mean())
                    engine.step()
                    require(engine.was_step_applied(), "the step was applied")
            n_sharded, n_whole = sharded_elems(engine)
            expected = n_whole if stage == 3 and dist.get_world_size() > 1 else 0
            require(n_sharded == expected, f"{expected} elements of weights are sharded at stage {stage}: {n_sharded}")
            with live.phase("states"):
                # Count the states between steps without the buffers that are kept for the next step.
                engine._optimizer.drop_spare_buffers()
                if engine._optimizer.fetcher is not None:
                    engine._optimizer.fetcher.pool.clear()
                states = live.nbytes()
        engine.close()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {**live.peaks, "states": states})
        if dist.get_rank() == 0:
            peaks = {name: max(peaks[name] for peaks in everyone) for name in everyone[0]}
            print(json.dumps({"stage": stage, "ranks": dist.get_world_size(), **peaks}), flush=True)
    dist.destroy_process_group()


def planned(stage: int, n_ranks: int, n_params: int) -> int:
    """Return the planner's peak bytes of a rank in training."""
    import torch

    from deepspeed_c.plan.table import plan_table

    with torch.device("meta"):
        model = make_model(n_params)
    table = plan_table(config(stage), n_ranks, model=model)
    phases = table.rows[table.chosen].plan.phases
    return max(phase.nbytes for name, phase in phases.items() if name != "initialize")


def run(n_ranks: int, n_params: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_ranks), "--standalone"]
    command += ["-m", "benchmarks.deepspeed_c.memory_by_stage", "--params", str(n_params)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    width = int((n_params / LAYERS) ** 0.5)
    n = LAYERS * width * width
    lines = []
    for found in map(json.loads, (line for line in done.stdout.splitlines() if line.startswith("{"))):
        stage = found["stage"]
        plan = planned(stage, n_ranks, n_params)
        share = {0: 16.0, 1: 4 + 12 / n_ranks, 2: 2 + 14 / n_ranks, 3: 16 / n_ranks}[stage]
        lines.append(
            {
                "benchmark": "memory_by_stage",
                "stage": stage,
                "ranks": n_ranks,
                "params": n,
                "bytes_per_param": round(found["train"] / n, 3),
                "planned": round(plan / n, 3),
                "ratio_to_plan": round(found["train"] / plan, 3),
                "states": round(found["states"] / n, 3),
                "formula": round(share, 3),
                "ratio_to_formula": round(found["states"] / n / share, 4),
                "initialize": round(found["initialize"] / n, 3),
                "machine": machine(),
            }
        )
    return lines


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the measured bytes as bars, by stage and number of ranks, with the formula and 16/N as lines over them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "memory_by_stage"  # the same picture gives the same file
    ranks = sorted({line["ranks"] for line in lines})
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colors = ["#9aa5b1", "#6a8caf", "#3f6f9f", "#173f5f"]
    width = 0.8 / len(STAGES)
    for stage in STAGES:
        mine = {line["ranks"]: line for line in lines if line["stage"] == stage}
        places = [i + (stage - 1.5) * width for i in range(len(ranks))]
        states = [mine[n]["states"] for n in ranks]
        window = [mine[n]["bytes_per_param"] - mine[n]["states"] for n in ranks]
        axes.bar(places, states, width * 0.92, color=colors[stage], label=f"stage {stage}")
        axes.bar(places, window, width * 0.92, bottom=states, color=colors[stage], alpha=0.35)
        formula = [mine[n]["formula"] for n in ranks]
        axes.hlines(formula, [p - width / 2 for p in places], [p + width / 2 for p in places], colors="black", lw=1.2)
    ends = [i + 1.5 * width for i in range(len(ranks))]
    axes.plot(ends, [16 / n for n in ranks], "o--", color="crimson", lw=1, ms=4, label="16/N")
    axes.plot([], [], color="black", lw=1.2, label="the paper's formula")
    axes.bar([0], [0], color="grey", alpha=0.35, label="live window on top of states")
    axes.set_xticks(range(len(ranks)), [f"{n} rank{'s' if n > 1 else ''}" for n in ranks])
    axes.set(
        ylabel="peak bytes per parameter and rank",
        title="Memory of a rank by ZeRO stage (bf16, fp32 AdamW, 60M parameters)",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--params", type=float, default=60e6)
    parser.add_argument("--no-picture", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(int(args.params))
        return
    lines = []
    for n_ranks in args.ranks:
        for line in run(n_ranks, int(args.params)):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if not args.no_picture:
        draw(lines, PICTURE)


if __name__ == "__main__":
    main()
