"""Train a byte-level GPT of 10M parameters on the Python standard library's source. To start it:

    deepspeed_c --num_procs 2 examples/train_gpt.py --deepspeed --deepspeed_config examples/ds_config.json
    python examples/train_gpt.py --deepspeed_config examples/ds_config.json    # the same in one process

``main`` and ``Run.train`` contain everything that a program needs to train with this package. The rest reports results.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from gpt import GPT, cross_entropy, embed, scores
from text import Windows, bits, spread, standard_library, unigram_entropy
from tqdm import tqdm

import deepspeed_c
from deepspeed_c import comm
from deepspeed_c.moe.utils import is_moe_param
from deepspeed_c.pipe import PipelineModule, TiedLayerSpec
from deepspeed_c.utils import groups


def main() -> None:
    args = parse_arguments()
    config = load_config(args)
    torch.manual_seed(args.seed)

    train_text, held_out_text = standard_library()
    model = GPT(
        args.layers,
        args.width,
        args.heads,
        args.context,
        experts=args.experts,
        ep_size=args.ep_size,
        k=args.k,
    )
    # A rank holds 1/ep_size of the experts.
    n_parameters = sum(p.numel() * (args.ep_size if is_moe_param(p) else 1) for p in model.parameters())
    if args.pp > 1:
        model = pipeline(model, args.pp)

    engine, _, loader, _ = deepspeed_c.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=Windows(train_text, args.context),
        config=config,
    )
    with engine:
        say(f"{n_parameters / 1e6:.1f}M parameters, {len(train_text) / 1e6:.1f} MB of Python to train on")
        run = Run(engine, Windows(held_out_text, args.context), entropy=unigram_entropy(held_out_text))
        run.train(loader, args.steps)
        run.report(args)


def pipeline(model: GPT, stages: int) -> PipelineModule:
    """Cut the model by layers over ``stages`` ranks. The first and the last layer share the embedding."""
    first, last = (
        TiedLayerSpec("embedding", lambda: model.embedding, forward_fn=function) for function in (embed, scores)
    )
    return PipelineModule([first, *model.blocks, model.norm, last], num_stages=stages, loss_fn=cross_entropy)


class Run:
    """One training run: the loop, and its measurements."""

    def __init__(self, engine: deepspeed_c.DeepSpeedEngine, held_out: Windows, entropy: float) -> None:
        self.engine = engine
        self.is_pipeline = isinstance(engine.module, PipelineModule)
        if self.is_pipeline:
            engine.set_batch_fn(pair)
        self.held_out = held_out
        self.entropy = entropy  # unigram entropy of the held-out text, in nats per byte
        self.seconds = Counter()  # for each phase, on this rank
        self.losses: list[float] = []  # for each step: mean over ranks, nats per byte
        self.held_out_losses: list[tuple[int, float]] = []  # (step, nats per byte)

    def train(self, loader, steps: int) -> None:
        engine = self.engine
        micro_steps = engine.gradient_accumulation_steps()
        step_bytes = engine.train_batch_size() * self.held_out.context
        batches = iter(deepspeed_c.utils.RepeatingLoader(loader))
        progress = tqdm(range(1, steps + 1), unit="step", disable=comm.get_rank() != 0, mininterval=0.5)
        for step in progress:
            begin, loss_sum = time.perf_counter(), 0.0
            if self.is_pipeline:
                with self.phase("batch"):
                    self.losses.append(engine.train_batch(batches).item())  # trains all micro-batches of a step
            for _ in range(0 if self.is_pipeline else micro_steps):
                with self.phase("data"):
                    batch = next(batches).to(engine.device)
                with self.phase("forward"):
                    loss = engine(batch)
                with self.phase("backward"):
                    engine.backward(loss)
                with self.phase("step"):
                    engine.step()  # updates the weights at the last micro-batch of the step
                loss_sum += loss.item()
            if not self.is_pipeline:
                self.losses.append(self.mean_over_ranks(loss_sum / micro_steps))
            progress.set_postfix(
                loss=f"{self.losses[-1]:.3f}",
                lr=f"{engine.get_lr()[0]:.1e}",
                grad_norm=f"{engine.get_global_grad_norm():.2f}",
                tokens_per_s=f"{step_bytes / (time.perf_counter() - begin):.0f}",
                refresh=False,
            )
            is_last = step == steps
            if is_last or step % max(1, steps // 5) == 0:
                self.report_load(step, with_charts=is_last)  # before an evaluation runs the experts
            if step % max(1, steps // 5) == 0 and not is_last:
                self.held_out_losses.append((step, self.evaluate(n_windows=64)))
        self.held_out_losses.append((steps, self.evaluate(n_windows=256)))

    @contextmanager
    def phase(self, name: str):
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    @torch.no_grad()
    def evaluate(self, n_windows: int) -> float:
        """Return nats per byte over ``n_windows`` windows spread evenly over the held-out text, shared among the ranks."""
        # Windows are shared among data-parallel ranks only: tensor-parallel ranks need the same windows.
        n_shares, share = groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()
        n_windows = min(n_windows, len(self.held_out)) // n_shares * n_shares
        mine = torch.stack([self.held_out[i] for i in spread(self.held_out, n_windows)[share::n_shares]])
        if self.is_pipeline:
            parts = mine.tensor_split(-(-len(mine) // 8))
            return self.engine.eval_batch(iter(parts), num_micro_batches=len(parts)).item()
        self.engine.eval()
        losses = [self.engine(batch.to(self.engine.device)).item() * len(batch) for batch in mine.split(8)]
        self.engine.train()
        return self.mean_over_ranks(sum(losses) / len(mine))

    def report_load(self, step: int, *, with_charts: bool) -> None:
        """Print how many tokens chose each expert in the last forward, and how many of them were dropped."""
        for name, load in self.engine.expert_load().items():
            tokens, dropped = (" ".join(map(str, numbers)) for numbers in (load.tokens, load.dropped))
            say(f"step {step}, {name}: tokens {tokens}, dropped {dropped}")
            if with_charts:
                say(load_chart(load.tokens, load.dropped))

    def mean_over_ranks(self, value: float) -> float:
        total = torch.tensor(value, device=self.engine.device)
        comm.all_reduce(total)
        return total.item() / comm.get_world_size()

    def max_over_ranks(self, value: float) -> float:
        largest = torch.tensor(value, device=self.engine.device)
        comm.all_reduce(largest, op=comm.ReduceOp.MAX)
        return largest.item()

    def report(self, args: argparse.Namespace) -> None:
        """Print losses, time, memory and a sample, and draw the curve."""
        loss, prompt = self.held_out_losses[-1][1], b"def "
        peak_mib = self.max_over_ranks(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0)
        n_bytes = len(self.losses) * self.engine.train_batch_size() * self.held_out.context
        phases = ", ".join(f"{k} {1e3 * s / len(self.losses):.0f} ms" for k, s in self.seconds.items())
        if not self.is_pipeline:  # in a pipeline no rank has all layers
            self.engine.eval()
            # Gathers whole weights on every rank, also if the stage shards them.
            with deepspeed_c.zero.unwrap_model_for_generation(self.engine) as model:
                sample = model.sample(prompt, n_bytes=args.sample_bytes, temperature=0.7, seed=args.seed)
            say(f"\nsample: {sample.decode('utf-8', 'replace')}\n")
        say(f"held-out loss   {loss:.3f} nats/byte ({bits(loss):.3f} bits/byte)")
        say(
            f"unigram entropy {self.entropy:.3f} nats/byte ({bits(self.entropy):.3f} bits/byte): "
            f"the loss is {loss / self.entropy:.2f} of it"
        )
        say(
            f"summary: peak memory {peak_mib:.0f} MiB per rank, per step {phases}, "
            f"{n_bytes / sum(self.seconds.values()):.0f} tokens/s over {len(self.losses)} steps"
        )
        if comm.get_rank() == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            self.draw(args.out / "loss.png")
            (args.out / "loss.json").write_text(json.dumps(self.losses))
            say(f"curve: {args.out / 'loss.png'}")

    def draw(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(range(1, len(self.losses) + 1), self.losses, lw=0.8, label="train")
        axes.plot(*zip(*self.held_out_losses), "o-", label="held out")
        axes.axhline(self.entropy, color="grey", ls="--", label="unigram entropy")
        axes.set(xlabel="step", ylabel="nats per byte", title="Byte-level GPT on the Python standard library")
        axes.legend()
        figure.savefig(path, dpi=150)


def load_chart(tokens: list[int], dropped: list[int], width: int = 50) -> str:
    """Return a bar for each expert. # are tokens that it took, x tokens that it dropped, and | is the end of an even
    share of the tokens.
    """
    scale = width / max(*tokens, 1)
    even = round(scale * sum(tokens) / len(tokens))
    lines = []
    for expert, (n, lost) in enumerate(zip(tokens, dropped)):
        bar = list(("#" * round(scale * (n - lost))).ljust(round(scale * n), "x").ljust(width + 1))
        bar[even] = "|" if bar[even] == " " else bar[even]
        lines.append(f"  expert {expert:<3} {''.join(bar)} {n:6d} tokens, {lost} dropped")
    return "\n".join(lines)


def pair(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (every byte except the last, the byte after each of these)."""
    return tokens[:, :-1], tokens[:, 1:]


def say(text: str) -> None:
    if comm.get_rank() == 0:
        tqdm.write(text)  # a line of its own, if a progress bar is there
        sys.stdout.flush()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the Python standard library's source.")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the schedule's total_num_steps)")
    parser.add_argument("--stage", type=int, help="ZeRO stage (default: the configuration's)")
    parser.add_argument("--tp", type=int, default=1, help="ranks that hold the model together (default: 1)")
    parser.add_argument("--pp", type=int, default=1, help="ranks that hold some of the layers each (default: 1)")
    parser.add_argument(
        "--budget", help='bytes that activations may take, such as 200MiB or "auto" (default: no limit)'
    )
    parser.add_argument("--experts", type=int, default=0, help="experts in each second layer (default: none)")
    parser.add_argument("--ep-size", type=int, default=1, help="ranks that hold the experts together (default: 1)")
    parser.add_argument("--k", type=int, default=1, help="experts of each token (default: 1)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--heads", type=int, default=7)
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--sample-bytes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png")
    parser.add_argument("--local_rank", type=int, help="given by launchers that set no environment")
    deepspeed_c.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config FILE is needed, for example examples/ds_config.json")
    if args.experts and args.tp * args.pp > 1:
        parser.error("--experts does not go with --tp and --pp: here experts lie whole on ranks that have all layers")
    if args.experts < 2 and (args.experts or args.ep_size > 1 or args.k > 1):
        parser.error("--ep-size and --k are about experts: give --experts N, 2 or more")
    if args.experts and args.layers < 2:
        parser.error("--experts puts experts into each second layer: give --layers N, 2 or more")
    return args


def load_config(args: argparse.Namespace) -> dict:
    """Return the configuration file with the stage, ranks, budget and steps of the command line filled in."""
    config = json.loads(Path(args.deepspeed_config).read_text())
    schedule = config["scheduler"]["params"]
    if args.stage is not None:
        config["zero_optimization"]["stage"] = args.stage
    if args.tp > 1:
        config["tensor_parallel"] = tensor_parallel(args)
    if args.budget is not None:
        config["activation_checkpointing"] = {"layers": "auto", "budget": args.budget}
    if args.steps is None:
        args.steps = schedule["total_num_steps"]
    else:
        # A shorter run has the same share of warm-up steps as the full run.
        schedule["warmup_num_steps"] = max(1, schedule["warmup_num_steps"] * args.steps // schedule["total_num_steps"])
        schedule["total_num_steps"] = args.steps
    return config


def tensor_parallel(args: argparse.Namespace) -> dict:
    """Return the configuration that cuts the model over ``args.tp`` ranks: by whole heads, query, key and value alike."""
    width = args.width
    specs = [
        {"patterns": [r".*\.qkv\.weight"], "partition_type": "column", "shape": [[width] * 3, -1]},
        {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
        {"patterns": [r".*\.(out|down)\.weight"], "partition_type": "row"},
    ]
    return {
        "autotp_size": args.tp,
        "tp": {"tp_grain_size": width // args.heads},
        "partition_config": {"use_default_specs": False, "layer_specs": specs},
    }


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the usual code of a program that Ctrl-C ended
