"""How long is a step of a small Llama whose sequence 2 ranks share, against real DeepSpeed and against one process with 2 threads?

A Llama of 4 layers and 8 heads, one sequence of 1,024 tokens, stage 1, fp32, AdamW. Heads are exchanged for tokens
around sdpa. Losses cover whole sequences and have to be the same on all sides. DSC_PEER_PYTHON names the interpreter of
an environment with DeepSpeed, and with torch and transformers in the same versions. Without this variable DeepSpeed is
left out. The bound is a step of data parallelism: each rank runs the model on its half of the tokens alone, so that no
head travels and attention reads half as far. The runs of the contenders take turns, and ratios compare two runs of the same round. Seconds are the median
over the steps of a run on rank 0. The row also has the time that the adapter of the loader takes for a batch.
Run: python -m benchmarks.hf.ulysses_step [--rounds 4] [--steps 12] [--tokens 1024]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORLD, WARMUP, VOCAB = 2, 3, 256
TIMEOUT_SECONDS = 600
LOSS_TOLERANCE = 2e-3
OURS, OVER_GLOO, THEIRS, ALONE = "deepspeed_c", "deepspeed_c over gloo", "deepspeed", "one process"
HALVES = "deepspeed_c, two halves apart"


def train(contender: str, steps: int, tokens: int) -> None:
    """Run one rank of one run.

    The peer's environment runs this function too, so it uses nothing of ours except the alias.
    """
    is_ours, is_alone = contender in (OURS, OVER_GLOO, HALVES), contender == ALONE
    if is_ours:
        import deepspeed_c

        deepspeed_c.install_as_deepspeed()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(WORLD if is_alone else 1)
    torch.manual_seed(0)  # the same weights on all sides
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=VOCAB, max_position_embeddings=tokens)
    )
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps + WARMUP):
        ids = torch.randint(VOCAB, (1, tokens), generator=generator)
        batches.append({"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None]})
    seconds, losses = [], []
    result: dict[str, Any] = {}
    if is_alone:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for batch in batches:
            begin = time.perf_counter()
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
        result["engine"] = "torch"
    else:
        import deepspeed
        import torch.distributed.nn.functional as collectives
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

        deepspeed.init_distributed(dist_backend="gloo")
        is_cut = contender != HALVES
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", WORLD, 1) if is_cut else None
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 0.0,
        }
        if is_ours:
            config["comm"] = {"local": "off" if contender == OVER_GLOO else "auto"}
            config["optimizer"]["params"].pop("torch_adam")
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)[0]
        group = mpu.get_sequence_parallel_group() if mpu else torch.distributed.group.WORLD
        rank = torch.distributed.get_rank(group)
        # DeepSpeed's adapter gathers lengths in a way that gloo refuses, so batches are cut by hand for DeepSpeed.
        has_adapter = is_ours and is_cut
        adapter = UlyssesSPDataLoaderAdapter(batches, rank, group, WORLD, torch.device("cpu")) if has_adapter else None
        waits = []
        for whole in batches:
            begin = time.perf_counter()
            if adapter is None:
                labels = torch.nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=-100)
                batch = {"input_ids": whole["input_ids"], "position_ids": whole["position_ids"], "shift_labels": labels}
                batch = {key: value.chunk(WORLD, 1)[rank].contiguous() for key, value in batch.items()}
            else:
                batch = next(adapter)  # the adapter returns each rank's batch in turn, and all are the same here
                next(adapter)
            waits.append(time.perf_counter() - begin)
            labels = batch["shift_labels"]
            begin = time.perf_counter()
            loss = engine(**batch, labels=labels, use_cache=False).loss
            parts = torch.stack(collectives.all_gather(loss, group=group))
            counts = torch.stack(collectives.all_gather((labels != -100).sum(), group=group))
            loss = (parts * counts).sum() / counts.sum()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
        result["engine"] = type(engine).__module__
        if has_adapter:
            result["adapter_ms"] = statistics.median(waits[WARMUP:]) * 1e3 / 2
    if int(os.environ.get("RANK", "0")) == 0:
        result |= {"seconds": statistics.median(seconds[WARMUP:]), "loss": statistics.fmean(losses)}
        result["versions"] = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        print("result " + json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measure(python: str, contender: str, options: argparse.Namespace, extensions: str) -> dict[str, Any]:
    """Run all ranks of one contender. ``extensions``: a folder for DeepSpeed's compiled extensions."""
    from benchmarks.measure import result_of

    start = [] if contender == ALONE else ["-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    command = [python, *start, str(Path(__file__).resolve()), "--rank-of", contender]
    command += ["--steps", str(options.steps), "--tokens", str(options.tokens)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
    environment |= {"OMP_NUM_THREADS": str(WORLD if contender == ALONE else 1), "TORCH_EXTENSIONS_DIR": extensions}
    environment.pop("PYTHONPATH", None)
    if contender in (OURS, OVER_GLOO, HALVES):
        environment["PYTHONPATH"] = str(ROOT)
    return result_of(command, environment, TIMEOUT_SECONDS)


def compare(options: argparse.Namespace) -> None:
    from benchmarks.measure import in_turn, machine, median_spread, peer_extensions, ratios, require, require_equal

    contenders = dict.fromkeys((OURS, OVER_GLOO, HALVES, ALONE), sys.executable)
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        contenders[THEIRS] = peer
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    extensions = peer_extensions()
    for round_ in range(options.rounds):
        for name in in_turn(list(contenders), round_):
            results[name].append(measure(contenders[name], name, options, extensions))
    engines = dict.fromkeys((OURS, OVER_GLOO, HALVES), "deepspeed_c") | {THEIRS: "deepspeed", ALONE: "torch"}
    for name, runs in results.items():
        for run in runs:
            require(run["engine"].split(".")[0] == engines[name], f"the engine of {name} is its own: {run['engine']}")
    versions = [run["versions"] for runs in results.values() for run in runs]
    require(all(found == versions[0] for found in versions), f"all environments have the same versions: {versions}")
    last = {name: runs[-1]["loss"] for name, runs in results.items()}
    require_equal("mean losses", {name: loss for name, loss in last.items() if name != HALVES}, LOSS_TOLERANCE)
    for name, runs in results.items():
        seconds, least, most = median_spread([run["seconds"] for run in runs])
        line = {
            "benchmark": "ulysses_step",
            "contender": name,
            "processes": 1 if name == ALONE else WORLD,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "seconds": round(seconds, 4),
            "seconds_min": round(least, 4),
            "seconds_max": round(most, 4),
            "loss": round(runs[-1]["loss"], 5),
            "torch": runs[-1]["versions"]["torch"],
            "machine": machine(),
        }
        if "adapter_ms" in runs[0]:
            line["adapter_ms"] = round(median_spread([run["adapter_ms"] for run in runs])[0], 3)
        for other, key in (
            (THEIRS, "ratio_to_deepspeed"),
            (ALONE, "ratio_to_one_process"),
            (HALVES, "ratio_to_halves"),
        ):
            if other in results and other != name and name in (OURS, OVER_GLOO, HALVES):
                theirs = [run["seconds"] for run in results[other]]
                line |= ratios(key, [run["seconds"] for run in runs], theirs)
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time steps of a model whose sequence two ranks share.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12, help="that count, of each run")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rank-of", choices=(OURS, OVER_GLOO, HALVES, THEIRS, ALONE), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(options.rank_of, options.steps, options.tokens)
    else:
        compare(options)


if __name__ == "__main__":
    main()
