"""How long does a rank take from the start of its process to the end of its first step, against a script with bare DistributedDataParallel?

Two ranks are started at once, without a launcher. The time of the later rank counts, on a clock that all processes
share. Contenders take turns in an order that changes with the round. CPU seconds (user and system) are the mean over
the ranks. Each contender makes one step of AdamW on the same model and data. The losses of the next step have to equal
DDP's.
Run: python -m benchmarks.deepspeed_c.start_time [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.measure import in_turn, machine, median_spread, ratios, require, require_equal

TIMEOUT_SECONDS = 300
N_RANKS = 2
PROGRAM = """
import json, resource, sys, time
import torch
import torch.distributed as dist

contender, folder, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
if contender == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model(x).square().mean().backward()
    optimizer.step()
else:
    import deepspeed_c

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": int(contender.removeprefix("stage"))},
    }
    model = deepspeed_c.initialize(model=model, config=config)[0]
    model.backward(model(x).square().mean())
    model.step()
    assert model.global_steps == 1, model.global_steps
end = time.perf_counter()
used = resource.getrusage(resource.RUSAGE_SELF)
loss = model(x).square().mean().item()
compiler = "torch._dynamo" in sys.modules
print(json.dumps({"end": end, "cpu": used.ru_utime + used.ru_stime, "loss": loss, "compiler": compiler}))
"""


def start(contender: str) -> tuple[float, float, list[float]]:
    """Start the ranks. Return the seconds to the end of the last rank's step, CPU seconds a rank, and the losses of the
    next step.
    """
    # Allow byte code, which installed packages have.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, contender, folder, str(rank), str(N_RANKS)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(N_RANKS)
        ]
        done = []
        try:
            for process in ranks:
                out, err = process.communicate(timeout=TIMEOUT_SECONDS)
                require(process.returncode == 0, f"{contender} makes a step: {err[-2000:]}")
                done.append(json.loads(out.splitlines()[-1]))
        finally:
            for process in ranks:
                process.kill()
    if contender != "ddp":
        require(not any(rank["compiler"] for rank in done), f"{contender} has not imported torch's compiler")
    seconds = max(rank["end"] for rank in done) - begin
    return seconds, sum(rank["cpu"] for rank in done) / N_RANKS, [rank["loss"] for rank in done]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the start of ranks.")
    parser.add_argument("--rounds", type=int, default=7)
    n_rounds = parser.parse_args().rounds
    contenders = ["ddp", "stage0", "stage2", "stage3"]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(n_rounds + 1):
        losses: dict[str, list[float]] = {}
        for name in in_turn(contenders, round_):
            seconds, cpu_seconds, losses[name] = start(name)
            if round_ > 0:  # the first fills the page cache, and writes byte code
                times[name].append(seconds)
                cpu[name].append(cpu_seconds)
        for rank in range(N_RANKS):
            require_equal(f"losses of rank {rank}", {name: losses[name][rank] for name in contenders}, 1e-4)
    for name in contenders:
        line = {
            "benchmark": "start_time",
            "contender": name,
            "ranks": N_RANKS,
            "seconds": round(median_spread(times[name])[0], 4),
            **ratios("ratio_to_ddp", times[name], times["ddp"]),
            "cpu_seconds": round(median_spread(cpu[name])[0], 4),
            **ratios("cpu_ratio_to_ddp", cpu[name], cpu["ddp"]),
            "rounds": n_rounds,
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
