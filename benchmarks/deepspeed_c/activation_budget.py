"""How much of full recomputation's cost does an activation budget half way between keeping and recomputing everything
take?

A GPT of 12 layers in one process, fp32, forward and backward. Three contenders take turns: all layers kept, all layers
recomputed, and the budget. The share is the time that the budget adds, divided by the time that recomputing everything
adds. The rounds form five blocks. A block gives a share: the median of the time that the budget adds over its rounds,
divided by the median of the time that recomputing everything adds. The result is the median share of the blocks.
Attention is the larger part of a layer, and freed memory is reused, so page faults do not hide the time of
recomputation. Times are processor time of one thread: other programs add little to it. The peak of the budget is given
as live tensor bytes, less the peak of a step that recomputes everything, plus the smallest budget. ``kept_layer_us`` is
the time that the budget adds to a call, with a graph, of a layer that the plan keeps.
Run: python -m benchmarks.deepspeed_c.activation_budget [--rounds 7] [--width 128] [--tokens 1024]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn

import deepspeed_c
from benchmarks.measure import in_turn, keep_freed_memory, machine, median_spread, require
from deepspeed_c import _C
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.recompute.budget import KEEP, Budget
from deepspeed_c.recompute.recomputer import Recomputer

LAYERS, HEADS, ROWS = 12, 4, 1
BLOCKS = 5  # of rounds
KEPT_CALLS = 1000


class Layer(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """Layers whose output is reduced to one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def make(width: int, section: dict) -> deepspeed_c.DeepSpeedEngine:
    model = Model(width)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "activation_checkpointing": section,
    }
    return deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def pass_of(engine: deepspeed_c.DeepSpeedEngine, x: torch.Tensor) -> tuple[float, float]:
    """Return (processor seconds of forward and backward, the loss)."""
    begin = time.process_time()
    loss = engine(x)
    engine.backward(loss)
    seconds = time.process_time() - begin
    engine.step()
    return seconds, loss.item()


def peak_of(width: int, section: dict, x: torch.Tensor) -> int:
    """Return the bytes of live tensors that a pass adds, once a budget has its plan."""
    with LiveBytes() as live:
        engine = make(width, section)
        pass_of(engine, x)
        before = live.nbytes()
        with live.phase("pass"):
            pass_of(engine, x)
        engine.close()
    return live.peaks["pass"] - before


def kept_layer_us() -> float:
    """Return the microseconds that the budget adds to a kept layer's call."""
    section = ActivationCheckpointing(budget="1TiB")
    budget = Budget(section)
    recomputer = Recomputer(section, budget=budget)
    layer, x = nn.Tanh(), torch.zeros(8, requires_grad=True)

    def planned() -> float:
        with recomputer.active((x,)):
            begin = time.perf_counter()
            for _ in range(KEPT_CALLS):
                recomputer.run(layer, (x,), {})
            return time.perf_counter() - begin

    def alone() -> float:
        begin = time.perf_counter()
        for _ in range(KEPT_CALLS):
            layer(x)
        return time.perf_counter() - begin

    planned()
    choices = {treatment.choice for treatment in budget.plan.treatments}
    require(choices == {KEEP} and len(budget.plan.treatments) == KEPT_CALLS, f"all layers are kept: {choices}")
    found = statistics.median(planned() - alone() for _ in range(21)) / KEPT_CALLS * 1e6
    recomputer.close()
    return found


def plan_of_many(rounds: int) -> dict[str, float]:
    """Time the planning of 1,000 different layers with 20 operators of 4 choices each, and bound the gap of the plan.
    The gap is the time that the plan adds above the least possible, as a share of the time of all operators.
    """
    generator = torch.Generator().manual_seed(0)
    sizes, times = (torch.randint(1, 1 << 20, (1000, 20), generator=generator).tolist() for _ in range(2))
    layers = [
        (
            0,
            [],
            [
                [(size, 0, 0), (0, size, ns), (size // 4, size, ns // 3), (size // 2, size, ns // 7)]
                for size, ns in zip(*each)
            ],
        )
        for each in zip(sizes, times)
    ]
    most = sum(sum(each) for each in sizes)
    seconds = []
    for _ in range(max(rounds, 3)):
        begin = time.perf_counter()
        plan = _C.recompute_plan(layers, most // 2)
        seconds.append(time.perf_counter() - begin)
    treated, peak, added, bound = plan[:4]
    require(peak <= most // 2 and added >= bound, f"the plan fits: {peak} of {most // 2} bytes, {added} and {bound} ns")
    require(len(treated) == len(layers), "each layer has its choices")
    middle, least, longest = median_spread(seconds)
    gap = (added - bound) / sum(sum(each) for each in times)
    return {
        "plan_ms": round(middle * 1e3, 1),
        "plan_ms_min": round(least * 1e3, 1),
        "plan_ms_max": round(longest * 1e3, 1),
        "plan_gap": round(gap, 9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of each block")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    x = torch.randn(ROWS, args.tokens, args.width)
    everything = make(args.width, {"layers": "auto", "budget": "1TiB"})
    pass_of(everything, x)
    all_kept = everything._blocks.recomputer.budget.plan
    everything.close()
    half = (all_kept.smallest_bytes + all_kept.peak_bytes) // 2
    sections = {"kept": {}, "recomputed": {"layers": "auto"}, "budget": {"layers": "auto", "budget": half}}
    peaks = {name: peak_of(args.width, section, x) for name, section in sections.items() if name != "kept"}
    engines = {name: make(args.width, section) for name, section in sections.items()}
    for engine in engines.values():
        pass_of(engine, x)
    plan = engines["budget"]._blocks.recomputer.budget.plan
    require(any(t.choice != "keep" for t in plan.treatments), "the budget has something recomputed")
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(BLOCKS * args.rounds):
        losses = set()
        for name in in_turn(list(engines), round_):
            took, loss = pass_of(engines[name], x)
            seconds[name].append(took)
            losses.add(loss)
        require(len(losses) == 1, f"losses are the same: {losses}")
    added = {name: [a - b for a, b in zip(times, seconds["kept"], strict=True)] for name, times in seconds.items()}
    blocks = [slice(i * args.rounds, (i + 1) * args.rounds) for i in range(BLOCKS)]
    medians = {name: [statistics.median(times[block]) for block in blocks] for name, times in added.items()}
    shares = [budget / recomputed for budget, recomputed in zip(medians["budget"], medians["recomputed"], strict=True)]
    held = peaks["budget"] - peaks["recomputed"] + plan.smallest_bytes
    share, least, most = median_spread(shares)
    all_added = statistics.median(added["recomputed"]) / statistics.median(seconds["kept"])
    line = {"benchmark": "activation_budget", "layers": LAYERS, "width": args.width, "tokens": args.tokens}
    line |= {"rounds": BLOCKS * args.rounds, "added_by_recomputing_all": round(all_added, 4)}
    line |= {name + "_ms": round(1e3 * median_spread(times)[0], 2) for name, times in seconds.items()}
    line |= {
        "share_of_added": round(share, 4),
        "share_of_added_min": round(least, 4),
        "share_of_added_max": round(most, 4),
    }
    line |= {"planned_share": round(plan.added_ns / plan.all_ns, 4), "peak_over_budget": round(held / half, 4)}
    line["kept_layer_us"] = round(kept_layer_us(), 3)
    print(json.dumps({**line, **plan_of_many(args.rounds), "budget_bytes": half, "machine": machine()}))


if __name__ == "__main__":
    main()
