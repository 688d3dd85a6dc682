"""Compress a trained byte-level GPT: weights of 8 and 4 bits, and half of its MLP rows and heads. To start it:

    python examples/compress_gpt.py --out out

A small ``GPT`` learns the Python standard library's source. Then each contender goes on from these weights for the same
number of steps, fp32 too: the others with quantized weights, or with pruning and the finished fp32 GPT as teacher. The
table shows the loss on held-out text, the bytes of the saved state and the time of a forward, each over those of fp32.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, Block, cross_entropy, rotate
from text import Windows, spread, standard_library
from torch import nn
from torch.utils.data import DataLoader

import deepspeed_c
from deepspeed_c.compression.compress import init_compression, redundancy_clean
from deepspeed_c.compression.distillation import Distillation

EVAL_WINDOWS, TIMED_ROUNDS = 256, 15


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    train_text, held_out_text = standard_library()
    data, held_out = Windows(train_text, args.context), Windows(held_out_text, args.context)
    trained = train(CompressibleGPT(args.layers, args.width, args.heads, args.context), data, args, args.steps, args.lr)
    models, losses = {}, {}
    for name, section in sections(args).items():
        model, config = copy.deepcopy(trained), settings(args, args.tune_steps, args.tune_lr, section)
        if section:
            init_compression(model, config)
        teacher = models["fp32"] if name == "half" else None
        train(model, data, args, args.tune_steps, args.tune_lr, section, teacher)
        if section:
            redundancy_clean(model, config, pack=name != "half")
        models[name], losses[name] = model.eval(), evaluate(model.eval(), held_out)
        print(f"{name}: {losses[name]:.4f} nats per byte", flush=True)
    report(models, losses, args)


class SeparateBlock(Block):
    """A block whose query, key and value have a weight each, so that heads can be cut off all three."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.qkv
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        # Layers with a forward of their own, as those of gpt.py, cannot be compressed.
        self.mlp.up, self.mlp.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(2, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CompressibleGPT(GPT):
    """``logits = model(tokens)``: ``GPT`` of plain linear layers."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__(layers, width, heads, context)
        self.blocks = nn.ModuleList(SeparateBlock(width, heads) for _ in range(layers))
        for name, parameter in self.blocks.named_parameters():
            if parameter.dim() == 2:  # as in GPT
                is_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if is_residual else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(tokens)


def sections(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the section compression_training of each contender."""

    def quantized(bits: int, n_groups: int) -> dict[str, Any]:
        shared = {"enabled": True, "quantize_weight_in_forward": True, "quantize_groups": n_groups}
        groups = {"linear": {"params": {"target_bits": bits}, "modules": ["blocks"]}}
        return {"weight_quantization": {"shared_parameters": shared, "different_groups": groups}}

    def pruned(modules: str, related: list[str], **shared: Any) -> dict[str, Any]:
        group = {"params": {"dense_ratio": 0.5}, "modules": [modules], "related_modules": [related]}
        return {
            "shared_parameters": {"enabled": True, "schedule_offset": 0, **shared},
            "different_groups": {"half": group},
        }

    half = {
        "row_pruning": pruned(r"mlp\.up", [r"mlp\.down"], method="l1"),
        "head_pruning": pruned(r"\.out", [r"\.q", r"\.k", r"\.v"], method="l1", num_heads=args.heads),
    }
    # A row of the square weights has a scale at 8 bits, and a quarter of a row at 4 bits.
    return {"fp32": {}, "int8": quantized(8, args.width), "int4": quantized(4, 4 * args.width), "half": half}


def settings(args: argparse.Namespace, steps: int, lr: float, section: dict[str, Any]) -> dict[str, Any]:
    schedule = {"total_num_steps": steps, "warmup_num_steps": max(1, steps // 10), "warmup_type": "linear"}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "steps_per_print": None,
        "compression_training": section,
    }


def train(
    model: CompressibleGPT,
    data: Windows,
    args: argparse.Namespace,
    steps: int,
    lr: float,
    section: dict[str, Any] | None = None,
    teacher: CompressibleGPT | None = None,
) -> CompressibleGPT:
    """Train for some steps. With a teacher half of the loss is the divergence from its predictions."""
    distil = Distillation(logits=1.0)
    engine, *_ = deepspeed_c.initialize(model=model, config=settings(args, steps, lr, section or {}))
    random = torch.Generator().manual_seed(steps)
    loader = DataLoader(data, args.batch, shuffle=True, drop_last=True, generator=random)
    batches = iter(deepspeed_c.utils.RepeatingLoader(loader))
    with engine:
        for _ in range(steps):
            tokens = next(batches).to(engine.device)
            logits = engine(tokens[:, :-1])
            loss = cross_entropy(logits, tokens[:, 1:])
            if teacher is not None:
                with torch.no_grad():
                    wanted = teacher(tokens[:, :-1])
                loss = (loss + distil(SimpleNamespace(logits=logits), SimpleNamespace(logits=wanted))) / 2
            engine.backward(loss)
            engine.step()
    return model


@torch.no_grad()
def evaluate(model: CompressibleGPT, held_out: Windows) -> float:
    """Return nats per byte over windows that are spread evenly over the held-out text."""
    windows = torch.stack([held_out[i] for i in spread(held_out, EVAL_WINDOWS)])
    losses = [cross_entropy(model(batch[:, :-1]), batch[:, 1:]).item() * len(batch) for batch in windows.split(16)]
    return sum(losses) / len(windows)


@torch.no_grad()
def forward_ms(models: dict[str, CompressibleGPT], tokens: torch.Tensor) -> dict[str, float]:
    """Return the median time of a forward of each model; the models take turns."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range(TIMED_ROUNDS + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            model(tokens)
            times[name] += [1e3 * (time.perf_counter() - begin)] * (i > 0)  # the first round warms up
    return {name: statistics.median(values) for name, values in times.items()}


def report(models: dict[str, CompressibleGPT], losses: dict[str, float], args: argparse.Namespace) -> None:
    """Print a table, and write the same numbers as JSON."""
    tokens = torch.zeros(1, args.context, dtype=torch.long)
    token_ms, window_ms = forward_ms(models, tokens[:, :1]), forward_ms(models, tokens)
    n_bytes = {name: sum(tensor.nbytes for tensor in model.state_dict().values()) for name, model in models.items()}
    columns = {"loss": losses, "bytes": n_bytes, "ms_token": token_ms, "ms_window": window_ms}
    rows = []
    print("\n| | loss | over fp32 | bytes | over fp32 | ms, 1 token | over fp32 | ms, 1 window | over fp32 |")
    print("| --- " * 9 + "|")
    for name in models:
        row: dict[str, Any] = {"contender": name}
        for key, values in columns.items():
            row |= {key: round(values[name], 5), f"{key}_to_fp32": round(values[name] / values["fp32"], 5)}
        rows.append(row)
        print(
            "| "
            + " | ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
            + " |"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "compress.json").write_text(json.dumps(rows, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of the first training (default: 400)")
    parser.add_argument("--tune-steps", type=int, default=220, help="steps of each contender (default: 220)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--tune-lr", type=float, default=1.3e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for compress.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
