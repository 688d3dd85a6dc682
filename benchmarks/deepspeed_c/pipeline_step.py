"""How long is a batch of a two-stage pipeline, against DeepSpeed's PipelineEngine and torch's 1F1B?

A GPT of 4 layers in fp32, 2 ranks of one thread each, 2, 4 and 8 micro-batches, AdamW; 1F1B on all sides. The processes
live through the whole run and take turns, and their losses have to be the same. DSC_PEER_PYTHON names the interpreter
of an environment with DeepSpeed and the same torch; without it DeepSpeed is left out. The bound is the time of the
slower stage alone, forward and backward of one micro-batch without a pipeline, (m + 1) times for m micro-batches on 2
ranks, and the update of the weights.
Run: python -m benchmarks.deepspeed_c.pipeline_step [--rounds 7] [--width 384]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.served import ServedRanks, say

ROOT = Path(__file__).resolve().parents[2]
RANKS, LAYERS, ROWS, TOKENS, WORDS = 2, 4, 4, 128, 256
MICRO_BATCHES = (2, 4, 8)
WARMUP, BATCHES = 2, 3
LOSS_TOLERANCE = 1e-3
OURS, THEIRS, TORCH = "deepspeed_c", "deepspeed", "torch"


def layers_of(width: int) -> list[Callable[[], Any]]:
    """Functions that make the layers, each from its own seed."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, tokens, _ = x.shape
            q, k, v = self.qkv(self.norms[0](x)).view(rows, tokens, 3, -1, 64).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    def seeded(number: int, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            torch.manual_seed(number)
            return make()

        return build

    makers: list[Callable[[], nn.Module]] = [lambda: nn.Embedding(WORDS, width), *[Block] * LAYERS]
    makers.append(lambda: nn.Linear(width, WORDS))
    return [seeded(number, make) for number, make in enumerate(makers)]


def loss_of(logits: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def micro_batches(n: int, number: int) -> list[tuple[Any, Any]]:
    import torch

    generator = torch.Generator().manual_seed(number)
    return [tuple(torch.randint(WORDS, (ROWS, TOKENS), generator=generator) for _ in range(2)) for _ in range(n)]


def engine_batch(width: int, n: int) -> Callable[[Iterator[Any]], float]:
    """A batch of DeepSpeed's API: of our engine, or of DeepSpeed's in its environment."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    net = PipelineModule(
        [make() for make in layers_of(width)], num_stages=RANKS, loss_fn=loss_of, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": n,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
    return lambda batches: float(engine.train_batch(batches))


def torch_batch(width: int, n: int) -> Callable[[Iterator[Any]], float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, makers = dist.get_rank(), layers_of(width)
    half = len(makers) // RANKS
    part = torch.nn.Sequential(*(make() for make in makers[rank * half : (rank + 1) * half]))
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4, weight_decay=0.01)
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=n, loss_fn=loss_of)

    def batch(batches: Iterator[Any]) -> float:
        inputs, labels = (torch.cat(each) for each in zip(*batches))
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(mean, 1)  # as the engines do
        return float(mean)

    return batch


def alone_seconds(width: int) -> float:
    """Seconds of the forward and the backward of this rank's layers on one micro-batch."""
    import torch

    rank, makers = int(os.environ["RANK"]), layers_of(width)
    half = len(makers) // RANKS
    part = torch.nn.Sequential(*(make() for make in makers[rank * half : (rank + 1) * half]))
    inputs, labels = micro_batches(1, 0)[0]
    x = torch.randn(ROWS, TOKENS, width, requires_grad=True)
    found = []
    for _ in range(WARMUP + BATCHES):
        begin = time.perf_counter()
        if rank == 0:
            out = part(inputs)
            out.backward(torch.ones_like(out))
        else:
            loss_of(part(x), labels).backward()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[WARMUP:])


def serve(contender: str, width: int) -> None:
    """One rank of a contender. A question is a number of micro-batches; the answer is seconds a batch and the loss."""
    import torch

    torch.set_num_threads(1)
    if contender == OURS:
        import deepspeed_c

        deepspeed_c.install_as_deepspeed()
    if contender == TORCH:
        torch.distributed.init_process_group("gloo")
    else:
        import deepspeed

        deepspeed.init_distributed("gloo")
    make = torch_batch if contender == TORCH else engine_batch
    batches = {n: make(width, n) for n in MICRO_BATCHES}
    first = {str(n): batch(iter(micro_batches(n, 0))) for n, batch in batches.items()}
    say({"first": first, "torch": torch.__version__})
    for number, line in enumerate(sys.stdin):
        n = int(line)
        if n == 0:
            say({"seconds": alone_seconds(width)})
            continue
        for i in range(WARMUP):
            batches[n](iter(micro_batches(n, 100 * number + i)))
        data = [micro_batches(n, 100 * number + WARMUP + i) for i in range(BATCHES)]
        torch.distributed.barrier()
        begin = time.perf_counter()
        for each in data:
            loss = batches[n](iter(each))
        say({"seconds": (time.perf_counter() - begin) / BATCHES, "loss": loss})
    sys.stdout.flush()
    os._exit(0)


def side(contender: str, python: str, width: int, extensions: str) -> ServedRanks:
    from tests.ranks import free_port

    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions}
    environment |= {"OMP_NUM_THREADS": "1", "DSC_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if contender == THEIRS:
        environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
    command = [python, str(Path(__file__).resolve()), "--serve", contender, "--width", str(width)]
    return ServedRanks(command, environment, RANKS, free_port())


def compare(width: int, rounds: int) -> list[dict[str, Any]]:
    from benchmarks.measure import in_turn, machine, peer_extensions, ratios, require, require_equal

    pythons = {OURS: sys.executable, TORCH: sys.executable}
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        pythons[THEIRS] = peer
    running: dict[str, ServedRanks] = {}
    found: dict[tuple[str, int], list[float]] = {(name, n): [] for name in pythons for n in MICRO_BATCHES}
    alone: list[float] = []
    try:
        for name, python in pythons.items():
            running[name] = side(name, python, width, peer_extensions())
        about = {name: ranks.answers()[0] for name, ranks in running.items()}
        versions = {name: each["torch"] for name, each in about.items()}
        require(len(set(versions.values())) == 1, f"all sides have the same torch: {versions}")
        for n in MICRO_BATCHES:
            losses = {name: each["first"][str(n)] for name, each in about.items()}
            require_equal(f"first losses of {n} micro-batches", losses, LOSS_TOLERANCE)
        for round_ in range(rounds):
            alone.append(max(answer["seconds"] for answer in running[OURS].ask("0")))
            for n in MICRO_BATCHES:
                for name in in_turn(list(pythons), round_):
                    answers = running[name].ask(str(n))
                    found[name, n].append(max(answer["seconds"] for answer in answers))
    finally:
        for ranks in running.values():
            ranks.close()
    lines = []
    for n in MICRO_BATCHES:
        line: dict[str, Any] = {"benchmark": "pipeline_step", "micro_batches": n, "width": width, "ranks": RANKS}
        for name in pythons:
            line[f"{name}_ms"] = round(1e3 * statistics.median(found[name, n]), 1)
        for name in pythons:
            if name != OURS:
                line |= ratios(f"ratio_to_{name}", found[OURS, n], found[name, n])
        line |= ratios("ratio_to_stages", found[OURS, n], [(n + RANKS - 1) * seconds for seconds in alone])
        lines.append({**line, "torch": versions[OURS], "machine": machine()})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Time batches of pipelines of several engines in turns.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--serve", choices=(OURS, THEIRS, TORCH), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.width)
        return
    for line in compare(options.width, options.rounds):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
