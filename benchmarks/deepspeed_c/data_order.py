"""How long does the next batch take, and how long the first batch of a resumed run, whatever the length of the data set?

"round": the samples of a rank's next batch from the keyed order of 10^9 samples, by sample, and over those of grain's
``index_shuffle``, one by one, if grain is installed. "resume": a new loader with a
saved position, up to its first batch, at step 10 and at step 10^6. "batch": an epoch of batches of rows of a tensor, over
torch's loader with its random sampler, in the same process.
Run: python -m benchmarks.deepspeed_c.data_order [--rounds 15] [--rows 20000]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import machine, median_spread, ratios, require, time_alternately
from deepspeed_c import _C
from deepspeed_c.data import DeepSpeedDataLoader

MANY = 10**9
BATCH = 8
CALLS = 2000


def rounds_of(n_samples: int) -> Callable[[Any], int]:
    order = _C.SampleOrder(n_samples, n_ranks=2, rank=1, batch=BATCH, seed=1234)

    def step(_: Any) -> int:
        position = 0
        for _ in range(CALLS):
            _, position = order.round(3, position)
        return position

    return step


def grains_order(n_samples: int) -> Callable[[Any], int]:
    from grain.experimental import index_shuffle

    def step(_: Any) -> int:
        for position in range(CALLS * BATCH):
            last = index_shuffle(position, max_index=n_samples - 1, seed=1234, rounds=4)
        return last

    return step


def resumed_at(step: int) -> Callable[[Any], Any]:
    def first(_: Any) -> Any:
        loader = DeepSpeedDataLoader(range(MANY), BATCH, False, -1, None, seed=1234)
        loader.load_state_dict({**loader.state_dict(), "position": step * BATCH})
        return next(loader)

    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=20000)
    args = parser.parse_args()
    rows = TensorDataset(torch.arange(args.rows * 16).reshape(args.rows, 16))
    ours, torchs = (
        DeepSpeedDataLoader(rows, BATCH, False, -1, None, seed=1234),
        DataLoader(rows, BATCH, shuffle=True),
    )
    for name, loader in (("ours", ours), ("torch", torchs)):
        seen = torch.cat([batch[0][:, 0] for batch in loader]).sort().values
        require(torch.equal(seen, torch.arange(args.rows) * 16), f"an epoch of {name} has each row once")
    steps = {
        "round": rounds_of(MANY),
        "round, 1000 samples": rounds_of(CALLS * 2 * BATCH),
        "resume at step 10": resumed_at(10),
        "resume at step 10^6": resumed_at(10**6),
        "batch": lambda _: sum(1 for _ in ours),
        "torch": lambda _: sum(1 for _ in torchs),
    }
    has_grain = importlib.util.find_spec("grain") is not None
    if has_grain:
        steps["grain"] = grains_order(MANY)
    times = time_alternately(steps, None, args.rounds, warmup=1)
    common = {"benchmark": "data_order", "machine": machine()}
    per_sample = [1e6 * seconds / (CALLS * BATCH) for seconds in times["round"]]
    median, low, high = (round(value, 4) for value in median_spread(per_sample))
    lines = [
        {"contender": "round", "us_per_sample": median, "us_per_sample_min": low, "us_per_sample_max": high},
        {"contender": "resume", "ms": round(1e3 * median_spread(times["resume at step 10^6"])[0], 3)}
        | ratios("ratio_to_step_10", times["resume at step 10^6"], times["resume at step 10"]),
        {"contender": "batch", "us": round(1e6 * median_spread(times["batch"])[0] * BATCH / args.rows, 2)}
        | ratios("ratio_to_torch", times["batch"], times["torch"]),
    ]
    if has_grain:
        lines[0] |= ratios("ratio_to_grain", times["round"], times["grain"])
    for line in lines:
        print(json.dumps({**common, **line}), flush=True)


if __name__ == "__main__":
    main()
