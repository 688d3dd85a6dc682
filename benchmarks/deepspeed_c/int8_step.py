"""How much longer is a training step with the weights of all linear layers at 8 bits?

The 29M-parameter GPT of ``train_step`` in fp32 on one rank, once as it is, and once after ``init_compression`` with
``quantize_weight_in_forward``. Both engines live in one process and take turns; their losses have to stay close.
Run: python -m benchmarks.deepspeed_c.int8_step [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

import deepspeed_c
from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, WIDTH, Gpt, seeded
from benchmarks.measure import machine, median_spread, ratios, require, require_equal, time_alternately
from deepspeed_c.compression.basic_layer import compressed_layers
from deepspeed_c.compression.compress import init_compression

SECTION = {
    "weight_quantization": {
        "shared_parameters": {
            "enabled": True,
            "quantize_weight_in_forward": True,
            "quantize_groups": WIDTH,
            "schedule_offset": 0,
        },
        "different_groups": {"linear": {"params": {"target_bits": 8}, "modules": ["blocks", "head"]}},
    }
}


class Step:
    """A training step, and its losses so far."""

    def __init__(self, section: dict[str, Any]) -> None:
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "gradient_clipping": 1.0,
            "compression_training": section,
        }
        model = seeded(Gpt)
        if section:
            init_compression(model, config)
        self.engine = deepspeed_c.initialize(model=model, config=config)[0]
        self.losses: list[float] = []

    def __call__(self, tokens: torch.Tensor) -> None:
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    steps = {"int8": Step(SECTION), "plain": Step({})}
    modules = steps["plain"].engine.module.named_modules()
    linear = {name for name, module in modules if isinstance(module, torch.nn.Linear)}
    plain = linear - compressed_layers(steps["int8"].engine.module).keys()
    require(linear and not plain, f"all {len(linear)} linear layers are compressed: {plain} are not")
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    times = time_alternately(steps, tokens, args.rounds, warmup=2)
    losses = {name: step.losses for name, step in steps.items()}
    require(losses["int8"][0] != losses["plain"][0], f"the first forward is quantized: {losses['int8'][0]}")
    for i in range(len(losses["plain"])):
        require_equal(f"losses of step {i}", {name: found[i] for name, found in losses.items()}, 1e-3)
    for name in steps:
        line = {"benchmark": "int8_step", "contender": name, "ms": round(1e3 * median_spread(times[name])[0], 1)}
        line |= {"threads": torch.get_num_threads(), **ratios("ratio_to_plain", times[name], times["plain"])}
        print(json.dumps({**line, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
