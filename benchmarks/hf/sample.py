"""How long does the choice of one token take, against transformers' logits processors and ``torch.multinomial``?

One row of a vocabulary of 128,256 words, with top-k 50 and top-p 0.9 by default, one thread. The bound is one read of the
logits: ``torch.amax`` over them. The distributions have to be the same.
Run: python -m benchmarks.hf.sample [--words 128256] [--top-k 50] [--top-p 0.9] [--rounds 15] [--seconds 0.2]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable

import torch
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from benchmarks.measure import (
    bound,
    calls_of_a_round,
    keep_freed_memory,
    machine,
    median_spread,
    ratios,
    require,
    time_alternately,
)

WARMUP = 1


def repeated(choose: Callable[[torch.Tensor], object], n_calls: int) -> Callable[[torch.Tensor], None]:
    def choose_often(logits: torch.Tensor) -> None:
        for _ in range(n_calls):
            choose(logits)

    return choose_often


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=128_256)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a round")
    args = parser.parse_args()
    os.environ["DSC_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    keep_freed_memory()

    from deepspeed_c.ops import sample  # after the choice of threads

    rules = [sample.Rules(top_k=args.top_k, top_p=args.top_p)]
    processors = LogitsProcessorList([TopKLogitsWarper(args.top_k)] if args.top_k else [])
    processors.append(TopPLogitsWarper(args.top_p))
    ids = torch.zeros(1, 0, dtype=torch.int64)
    logits = 3 * torch.randn(1, args.words, generator=torch.Generator().manual_seed(0))
    wanted = processors(ids, logits).softmax(-1)
    difference = (sample.probabilities(logits, rules) - wanted).abs().max().item()
    require(difference < 1e-6, f"the distributions are the same: {difference}")
    steps = {
        "ours": lambda logits: sample.tokens(logits, rules, [1], [0]),
        "transformers": lambda logits: torch.multinomial(processors(ids, logits).softmax(-1), 1),
        "bound": torch.amax,
    }
    n_calls = {name: calls_of_a_round(lambda step=step: step(logits), args.seconds) for name, step in steps.items()}
    rounds = {name: repeated(step, n_calls[name]) for name, step in steps.items()}
    times = time_alternately(rounds, logits, args.rounds, WARMUP)
    times = {name: [seconds / n_calls[name] for seconds in times[name]] for name in steps}
    for name in ("ours", "transformers"):
        line = {"benchmark": "sample", "contender": name, "words": args.words, "top_k": args.top_k, "top_p": args.top_p}
        line |= {"us": round(1e6 * median_spread(times[name])[0], 1)}
        line |= ratios("ratio_to_transformers", times[name], times["transformers"])
        line |= bound("ratio_to_bound", times[name], times["bound"])
        print(json.dumps({**line, "threads": 1, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
