"""How long does the first step of a compiled engine take, against that of the bare model under ``torch.compile``?

The model is the GPT of ``train_step`` with 2 layers, and Inductor compiles it. Each measurement is a job of its own
with 2 gloo ranks, in which each rank has an empty cache of compiled code. The contenders take turns. The time, the
longest of the ranks, begins with the call of ``compile`` and ends with the first step of the optimizer; the compiler is
imported before. "again" is the time of a later step, in which nothing is compiled.
Run: python -m benchmarks.deepspeed_c.compile_time [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from typing import Any

from benchmarks.measure import in_turn, machine, ratios, require, require_equal

CONTENDERS = ("bare", "stage2", "stage3")
AGAIN = 3


def measure(contender: str, layers: int) -> None:
    """One rank of a job: the first rank prints its line."""
    import torch
    import torch._inductor.compile_fx
    import torch.distributed as dist

    from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, Gpt, ours, plain, seeded

    dist.init_process_group("gloo")
    model = seeded(lambda: Gpt(layers))
    batch = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    if contender == "bare":
        step = plain(model, model)
        compile_ = model.compile
    else:
        step = ours(model, int(contender[-1]), compile={"deepcompile": True})
        compile_ = step.engine.compile
    times = []
    for i in range(1 + AGAIN):
        dist.barrier()
        begin = time.perf_counter()
        if i == 0:
            compile_()
        step(batch)
        seconds = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(seconds.item())
    require(times[0] > 3 * statistics.median(times[1:]), f"the first step compiles: {times}")
    if step.engine is not None:
        require(step.engine._compiled.backend.n_frames == 1, "the whole model is one graph")
    if dist.get_rank() == 0:
        passes = sum(t[3] for t in step.engine.get_compile_time()) if step.engine is not None else 0.0
        found = {
            "first": times[0],
            "again": statistics.median(times[1:]),
            "loss": step.losses[0].item(),
            "passes": passes,
        }
        print("found " + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


def first_step(contender: str, layers: int) -> dict[str, Any]:
    from benchmarks.run import ranks

    with tempfile.TemporaryDirectory() as folder:
        command = [*ranks(2), "benchmarks.deepspeed_c.compile_time", "--contender", contender, "--layers", str(layers)]
        environment = {**os.environ, "COMPILE_TIME_CACHE": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("found "):
            return json.loads(line.removeprefix("found "))
    raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}, no answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.environ["COMPILE_TIME_CACHE"], os.environ["RANK"])
        measure(args.contender, args.layers)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for round_ in range(args.rounds):
        for name in in_turn(CONTENDERS, round_):
            found[name].append(first_step(name, args.layers))
        require_equal("first losses", {name: rows[-1]["loss"] for name, rows in found.items()}, 1e-5)
    for name, rows in found.items():
        line: dict[str, Any] = {"benchmark": "compile_time", "contender": name, "layers": args.layers}
        line["first_s"] = round(statistics.median(row["first"] for row in rows), 2)
        line["again_s"] = round(statistics.median(row["again"] for row in rows), 3)
        if name != "bare":
            line["passes_s"] = round(statistics.median(row["passes"] for row in rows), 3)
            line |= ratios("ratio_to_bare", *([row["first"] for row in found[each]] for each in (name, "bare")))
        print(json.dumps({**line, "ranks": 2, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
