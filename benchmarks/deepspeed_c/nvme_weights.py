"""How much more memory does a rank take at its peak with weights on NVMe beside states, than with states there alone?

Stage 3, fp32, one rank, a stack of 12 linear layers of 4 MB. Each of the two runs is a separate process. The growth of
the peak resident set is counted from after a warm-up engine. The bound is the size of the configured buffers:
``offload_param.buffer_count`` buffers, and ``offload_optimizer.buffer_count`` more for masters, which are separate from
the weights if the weights are on NVMe. States in a file need no further memory. Losses have to be the same to the bit,
and the weights' file has to be written and read.
Run: python -m benchmarks.deepspeed_c.nvme_weights [DIR] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

from benchmarks.deepspeed_c.memory import status_bytes
from benchmarks.measure import machine, require

LAYERS, WIDTH, STEPS = 12, 1000, 4
BUFFERS, STATE_BUFFERS = 5, 4
BUFFER_BYTES = -(-WIDTH * WIDTH * 4 // 4096) * 4096


def io_bytes(field: str) -> int:
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


def train(folder: str, has_weights: bool) -> None:
    import torch

    import deepspeed_c

    device = {"device": "nvme", "nvme_path": folder}
    zero = {
        "stage": 3,
        "reduce_bucket_size": WIDTH * WIDTH,
        "offload_optimizer": {**device, "buffer_count": STATE_BUFFERS},
    }
    if has_weights:
        zero["offload_param"] = {**device, "buffer_count": BUFFERS, "max_in_cpu": 0}
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    torch.set_num_threads(1)
    deepspeed_c.init_distributed()
    warm = deepspeed_c.initialize(model=torch.nn.Linear(8, 8), config=config)[0]
    warm.backward(warm(torch.ones(1, 8)).sum())
    warm.step()
    warm.close()
    torch.manual_seed(0)
    before, moved = status_bytes("VmRSS"), io_bytes("read_bytes") + io_bytes("write_bytes")
    with deepspeed_c.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    losses = []
    for step in range(STEPS):
        x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (engine(x) - 1).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    found = {"peak": status_bytes("VmHWM") - before, "losses": losses}
    found["moved"] = io_bytes("read_bytes") + io_bytes("write_bytes") - moved
    engine.close()
    print(json.dumps(found))


def run(folder: str, *more: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.deepspeed_c.nvme_weights", folder, "--train", *more]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", action="store_true", help="one run, in this process")
    parser.add_argument("--weights", action="store_true", help="weights are on NVMe too")
    args = parser.parse_args()
    if args.train:
        train(args.folder, args.weights)
        return
    more, peaks = [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for _ in range(args.rounds):
            states, both = run(folder), run(folder, "--weights")
            require(states["losses"] == both["losses"], f"losses are the same: {states['losses']}, {both['losses']}")
            # Each step reads the weights at least once and writes them once.
            least = STEPS * 2 * LAYERS * WIDTH * WIDTH * 4
            require(both["moved"] - states["moved"] >= least, f"weights go to the file: {both['moved']} bytes moved")
            more.append(both["peak"] - states["peak"])
            peaks.append((states["peak"], both["peak"]))
    asked = (BUFFERS + STATE_BUFFERS) * BUFFER_BYTES
    line = {"benchmark": "nvme_weights", "weights_mb": LAYERS * WIDTH * WIDTH * 4 / 1e6, "buffers_mb": asked / 1e6}
    line |= {
        "peak_states_mb": round(statistics.median(peak for peak, _ in peaks) / 1e6, 1),
        "peak_both_mb": round(statistics.median(peak for _, peak in peaks) / 1e6, 1),
        "ratio_to_buffers": round(max(more) / asked, 3),  # the worst round, because a rank needs room for its peak
    }
    print(json.dumps(line | {"machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
