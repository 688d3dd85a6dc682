"""How long is a step of transformers.Trainer on a small Llama, and how much memory does it take, against real DeepSpeed?

2 processes, stages 2 and 3, fp32. Both sides use the Trainer's AdamW with clipping, so that they do the same
arithmetic, and their losses have to be the same. DSC_PEER_PYTHON names the interpreter of an environment with
DeepSpeed, and with torch, transformers and accelerate in the same versions. Without this variable only ours is
measured. The runs of the contenders take turns, and ratios compare two runs of the same round. Seconds are the median
over the steps of a run on rank 0. Memory is the largest resident set of a rank over its whole life.
Run: python -m benchmarks.hf.trainer_step [--rounds 4] [--steps 12] [--width 512]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORLD, CONTEXT, MICRO_BATCH, WARMUP = 2, 128, 2, 3
TIMEOUT_SECONDS = 600
LOSS_TOLERANCE = 1e-3


def train(is_ours: bool, stage: int, steps: int, width: int) -> None:
    """Run one rank of one run.

    The peer's environment runs this function too, so it uses nothing of ours except the alias.
    """
    # Disable optional imports of transformers: a package that only one environment has would add to the memory of that
    # side.
    sys.modules.update(dict.fromkeys(("datasets", "pandas", "peft", "pyarrow", "scipy", "sklearn")))
    if is_ours:
        import deepspeed_c

        deepspeed_c.install_as_deepspeed()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begin)

    class Tokens(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return WORLD * MICRO_BATCH * (steps + WARMUP)

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(256, (CONTEXT,), generator=torch.Generator().manual_seed(i))
            return {"input_ids": tokens, "labels": tokens}

    torch.set_num_threads(1)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10 * width}
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=MICRO_BATCH,
            max_steps=steps + WARMUP,
            optim="adamw_torch",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            deepspeed={**auto, "gradient_clipping": 1.0, "zero_optimization": zero},
        )
        torch.manual_seed(0)  # the same weights on both sides
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=width,
                intermediate_size=width * 11 // 4,
                num_hidden_layers=4,
                num_attention_heads=width // 64,
                num_key_value_heads=width // 64,
                max_position_embeddings=CONTEXT,
            )
        )
        n_params = model.num_parameters()
        clock = Clock()
        trainer = Trainer(model=model, args=args, train_dataset=Tokens(), callbacks=[clock])
        trained = trainer.train()
    engine = trainer.model_wrapped
    packages = ("torch", "transformers", "accelerate")
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    if torch.distributed.get_rank() == 0:
        result = {"params": n_params, "seconds": statistics.median(clock.seconds[WARMUP:]), "peak_mib": peak.item()}
        result |= {
            "loss": trained.training_loss,
            "engine": type(engine).__module__,
            "stage": engine.zero_optimization_stage(),
        }
        if is_ours:
            result["sharded"] = sum(unit.flat_elems for unit in engine._optimizer.units if unit.is_sharded)
        result["versions"] = {name: importlib.metadata.version(name) for name in packages}
        print("result " + json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


def measure(python: str, is_ours: bool, stage: int, options: argparse.Namespace, extensions: str) -> dict[str, Any]:
    """Run all ranks of one contender. ``extensions``: a folder for DeepSpeed's compiled extensions."""
    from benchmarks.measure import result_of

    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), str(Path(__file__).resolve())]
    command += ["--rank-of", "ours" if is_ours else "theirs", "--stage", str(stage)]
    command += ["--steps", str(options.steps), "--width", str(options.width)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["TORCH_EXTENSIONS_DIR"] = extensions
    environment.pop("PYTHONPATH", None)
    if is_ours:
        environment["PYTHONPATH"] = str(ROOT)
    return result_of(command, environment, TIMEOUT_SECONDS)


def check(runs: dict[str, list[dict[str, Any]]], stage: int) -> None:
    """Require that both sides have trained the same model at this stage, with the same versions and losses, each with
    its own engine.
    """
    from benchmarks.measure import require, require_equal

    for name, found in runs.items():
        for run in found:
            require(run["engine"].split(".")[0] == name, f"the engine of {name} is its own: {run['engine']}")
            require(run["stage"] == stage, f"{name} runs stage {stage}: {run['stage']}")
    for run in runs["deepspeed_c"]:
        expected = 0.9 * run["params"] if stage == 3 else 0
        require(run["sharded"] >= expected, f"{expected} elements of weights are sharded: {run['sharded']}")
    every = [run for found in runs.values() for run in found]
    versions = [run["versions"] for run in every]
    require(all(found == versions[0] for found in versions), f"both environments have the same versions: {versions}")
    require_equal("mean losses", {name: found[-1]["loss"] for name, found in runs.items()}, LOSS_TOLERANCE)


def compare(options: argparse.Namespace) -> None:
    from benchmarks.measure import in_turn, machine, median_spread, peer_extensions, ratios

    contenders = {"deepspeed_c": sys.executable}
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        contenders["deepspeed"] = peer
    results: dict[str, list[dict[str, Any]]]
    extensions = peer_extensions()
    for stage in options.stages:
        results = {name: [] for name in contenders}
        for round_ in range(options.rounds):
            for name in in_turn(list(contenders), round_):
                run = measure(contenders[name], name == "deepspeed_c", stage, options, extensions)
                results[name].append(run)
        check(results, stage)
        for name, runs in results.items():
            seconds, least, most = median_spread([run["seconds"] for run in runs])
            line = {
                "benchmark": "trainer_step",
                "contender": name,
                "stage": stage,
                "processes": WORLD,
                "params": runs[0]["params"],
                "rounds": options.rounds,
                "seconds": round(seconds, 4),
                "seconds_min": round(least, 4),
                "seconds_max": round(most, 4),
                "peak_mib": round(median_spread([run["peak_mib"] for run in runs])[0], 1),
                "loss": round(runs[-1]["loss"], 5),
                "torch": runs[-1]["versions"]["torch"],
                "machine": machine(),
            }
            if "deepspeed" in results:
                for ratio, key in (("ratio_to_deepspeed", "seconds"), ("memory_to_deepspeed", "peak_mib")):
                    theirs = [run[key] for run in results["deepspeed"]]
                    line |= ratios(ratio, [run[key] for run in runs], theirs)
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time steps of transformers.Trainer.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12, help="that count, of each run")
    parser.add_argument("--width", type=int, default=512, help="of the model; a multiple of 64")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rank-of", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(options.rank_of == "ours", options.stage, options.steps, options.width)
    else:
        compare(options)


if __name__ == "__main__":
    main()
