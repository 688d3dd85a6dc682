"""Train a byte-level GPT with and without curricula, and compare the losses over tokens. To start it:

    deepspeed_c --num_procs 2 examples/curriculum_gpt.py --out out

Three runs begin with the same weights, and end after the same number of tokens: windows as they come ("none"), windows cut
to a length that grows ("length"), and windows whose bytes are frequent before the others ("frequency"). The lengths need no
files; the frequencies are computed by ``DataAnalyzer``. The plot shows the loss of held-out windows of the whole length.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from text import Windows, as_tensor, spread, standard_library

import deepspeed_c
from deepspeed_c import comm
from deepspeed_c.data.analyzer import DataAnalyzer

EVAL_WINDOWS = 128


def main() -> None:
    args = parse_arguments()
    deepspeed_c.init_distributed()
    train_text, held_out_text = standard_library()
    data, held_out = Windows(train_text, args.context), Windows(held_out_text, args.context)
    shared = [tempfile.mkdtemp(prefix="metrics_")] if comm.get_rank() == 0 else [None]
    comm.broadcast_object_list(shared, src=0)
    analyze(data, train_text, shared[0], comm.get_rank(), comm.get_world_size())
    curves = {name: train(data, held_out, args, metrics) for name, metrics in curricula(args, shared[0]).items()}
    if comm.get_rank() == 0:
        report(curves, args)


def analyze(data: Windows, text: bytes, folder: str, rank: int = 0, n_ranks: int = 1) -> None:
    """Write the metric "frequency" of all windows: the mean of -log(frequency) of their bytes, in thousandths of a nat."""
    counts = torch.bincount(as_tensor(text), minlength=256).double()
    nats = -(counts / counts.sum()).log()
    DataAnalyzer(
        data,
        num_workers=n_ranks,  # each rank does a part
        worker_id=rank,
        batch_size=256,
        save_path=folder,
        metric_names=["frequency"],
        metric_functions=[lambda windows: (1000 * nats[windows.long()].mean(dim=1)).long()],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
    ).run_map_reduce()


def curricula(args: argparse.Namespace, folder: str) -> dict[str, dict[str, Any]]:
    """Return the section ``curriculum_metrics`` of each run."""
    grows = {
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": args.grow_steps, "difficulty_step": 8},
    }
    length = {
        "difficulty_type": "value",
        "clustering_type": "single_cluster",  # each step may have all samples, and cuts them
        "min_difficulty": args.context // 4,
        "max_difficulty": args.context,
        **grows,
    }
    frequency = {
        "index_to_sample_path": f"{folder}/frequency/frequency_index_to_sample",
        "index_to_metric_path": f"{folder}/frequency/frequency_index_to_metric",
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 25,
        "max_difficulty": 100,
        **grows,
    }
    return {"none": {}, "length": {"length": length}, "frequency": {"frequency": frequency}}


def settings(args: argparse.Namespace, metrics: dict[str, Any]) -> dict[str, Any]:
    sampling = {
        "enabled": True,
        "num_epochs": 100,
        "curriculum_learning": {"enabled": bool(metrics), "curriculum_metrics": metrics},
    }
    return {
        "train_batch_size": args.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        # Runs with shorter windows take more steps for the same tokens: the rate does not depend on the number of steps.
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": args.lr, "warmup_num_steps": 30, "warmup_type": "linear"},
        },
        "steps_per_print": None,
        "data_efficiency": {"enabled": True, "seed": args.seed, "data_sampling": sampling},
    }


def cut(windows: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Return the beginning of each window, as long as the step's difficulty says, and the byte after it."""
    length = state["current_difficulties"].get("length")
    return windows if length is None else windows[:, : length + 1]


def train(
    data: Windows, held_out: Windows, args: argparse.Namespace, metrics: dict[str, Any]
) -> list[tuple[int, float]]:
    """Train until ``args.tokens`` tokens were read. Return (tokens so far, held-out loss) at points of equal distance."""
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context)
    engine, _, loader, _ = deepspeed_c.initialize(model=model, training_data=data, config=settings(args, metrics))
    engine.set_data_post_process_func(cut)
    n_tokens, points = 0, []
    with engine:
        for windows in loader:
            engine.backward(engine(windows.to(engine.device)))
            engine.step()
            n_tokens += args.batch * (windows.shape[1] - 1)
            if n_tokens >= args.tokens * (len(points) + 1) / args.points:
                points.append((n_tokens, evaluate(engine, held_out)))
                say(
                    f"{'+'.join(metrics) or 'none'}: step {engine.global_steps}, {n_tokens} tokens, {points[-1][1]:.3f}"
                )
            if n_tokens >= args.tokens:
                break
    return points


@torch.no_grad()
def evaluate(engine: deepspeed_c.DeepSpeedEngine, held_out: Windows) -> float:
    """Return nats per byte over windows that are spread evenly over the held-out text."""
    windows = torch.stack([held_out[i] for i in spread(held_out, EVAL_WINDOWS)])
    engine.eval()
    losses = [engine(batch.to(engine.device)).item() * len(batch) for batch in windows.split(16)]
    engine.train()
    return sum(losses) / len(windows)


def report(curves: dict[str, list[tuple[int, float]]], args: argparse.Namespace) -> None:
    """Print a table, and write the numbers and a plot."""
    print("\n| tokens | " + " | ".join(curves) + " |\n" + "| --- " * (len(curves) + 1) + "|")
    for points in zip(*curves.values()):
        print(f"| {points[0][0]} | " + " | ".join(f"{loss:.3f}" for _, loss in points) + " |")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "curriculum.json").write_text(json.dumps(curves) + "\n")
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*points), "o-", label=name)
    axes.set(xlabel="tokens", ylabel="held-out loss, nats per byte", title="a small GPT with and without a curriculum")
    axes.legend()
    figure.savefig(args.out / "curriculum.svg")
    plt.close(figure)
    print(f"written: {args.out / 'curriculum.svg'}")


def say(text: str) -> None:
    if comm.get_rank() == 0:
        print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=800_000, help="tokens of each run (default: 800000)")
    parser.add_argument("--points", type=int, default=10, help="evaluations of each run (default: 10)")
    parser.add_argument("--grow-steps", type=int, default=150, help="steps in which a difficulty grows (default: 150)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=256, help="bytes of a whole window")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step, of all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for curriculum.svg and curriculum.json")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
