"""How long is a training step of a 21M Llama that is cut over 2 ranks, against DeepSpeed's AutoTP and torch's ``parallelize_module``, and against half a Llama that sends nothing?

fp32, 256 tokens (2 samples), AdamW, one thread a rank. "silent" has half the heads, columns and vocabulary, and trains
independently on each rank. Its time is that of a step without communication. DSC_PEER_PYTHON names the interpreter of
an environment with DeepSpeed, and with torch and transformers in the same versions. Without this variable DeepSpeed is
left out. Runs take turns, and ratios compare two runs of the same round. The losses of all cut models have to be the
same at every step. The bytes in our ledger have to follow the formula. A rank has to hold half of the cut elements and
all other elements. Seconds are the median over a run's steps on rank 0, memory is the largest resident set of a rank
over its whole life.
Run: python -m benchmarks.deepspeed_c.tensor_parallel [--rounds 4] [--steps 12]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORLD, SAMPLES, TOKENS, WARMUP = 2, 2, 128, 3
LAYERS, WIDTH, HEADS, INNER, WORDS = 8, 384, 8, 1024, 8704
TIMEOUT_SECONDS = 600
LOSS_TOLERANCE = 1e-4
LR = 1e-4


def make_llama(share: int, layers: int) -> Any:
    """Return the model, or a rank's 1/share of it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS // share,
            hidden_size=WIDTH,
            intermediate_size=INNER // share,
            num_hidden_layers=layers,
            num_attention_heads=HEADS // share,
            num_key_value_heads=HEADS // share,
            head_dim=WIDTH // HEADS,
            max_position_embeddings=TOKENS,
            use_cache=False,
        )
    ).train()


def by_torch(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    words = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, words)


def make_step(contender: str, layers: int) -> tuple[Any, Any, Any]:
    """Return (a step that takes a batch and returns its loss, the engine or None, the number of elements that the
    rank's optimizer updates).
    """
    import torch
    import torch.distributed as dist

    model = make_llama(WORLD if contender == "silent" else 1, layers)
    if contender in ("torch", "silent"):
        dist.init_process_group("gloo")
        if contender == "torch":
            by_torch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, foreach=False)

        def plain(batch: dict[str, Any]) -> float:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return plain, None, model
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": WORLD, "tp_overlap_comm": contender == "ours_overlap"},
    }
    if contender == "deepspeed":
        import deepspeed as package

        config["tensor_parallel"].pop("tp_overlap_comm")
        more = {"optimizer": torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, foreach=False)}
    else:
        import deepspeed_c as package

        package.init_distributed("gloo", verbose=False)
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}
        more = {}
    engine = package.initialize(model=model, model_parameters=model.parameters(), config=config, **more)[0]

    def cut(batch: dict[str, Any]) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return cut, engine, model


def sent_bytes(engine: Any) -> dict[str, int]:
    return {op: total.n_bytes for op, total in engine._mesh.along("tp").ledger.totals.items()}


def require_formula(engine: Any, batch: dict[str, Any], layers: int) -> dict[str, int]:
    """Require that forward and backward of one batch send as many bytes as the formula says."""
    from benchmarks.measure import require

    before = sent_bytes(engine)
    loss = engine(**batch).loss
    engine.backward(loss)
    sent = {op: n - before.get(op, 0) for op, n in sent_bytes(engine).items() if n != before.get(op, 0)}
    engine.step()
    tensor, tokens = 4 * SAMPLES * TOKENS * WIDTH, SAMPLES * TOKENS
    expected = {"all-reduce": (4 * layers + 2) * tensor, "all-gather": WORLD * 4 * 4 * tokens}
    require(sent == expected, f"bytes sent are those of the formula, {expected}: {sent}")
    return sent


def run_rank(contender: str, steps: int, layers: int) -> None:
    """Run one rank of one run.

    The peer's environment runs this function too, so it imports nothing of ours for the peer.
    """
    import torch

    torch.set_num_threads(1)
    step, engine, model = make_step(contender, layers)
    # Elements are counted after the engine is made, because DeepSpeed replaces modules.
    elems = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    words = WORDS // WORLD if contender == "silent" else WORDS
    seconds, losses = [], []
    for i in range(steps + WARMUP):
        ids = torch.randint(words, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(i))
        torch.distributed.barrier()
        begin = time.perf_counter()
        losses.append(step({"input_ids": ids, "labels": ids}))
        seconds.append(time.perf_counter() - begin)
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    sent = require_formula(engine, {"input_ids": ids, "labels": ids}, layers) if contender.startswith("ours") else {}
    if torch.distributed.get_rank() == 0:
        packages = ("torch", "transformers")
        result = {
            "seconds": statistics.median(seconds[WARMUP:]),
            "peak_mib": peak.item(),
            "losses": losses,
            "elems": elems,
            "sent": sent,
            "engine": "" if engine is None else type(engine).__module__.split(".")[0],
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }
        print("result " + json.dumps(result), flush=True)
    torch.distributed.barrier()
    os._exit(0)


def measure(python: str, contender: str, options: argparse.Namespace, extensions: str) -> dict[str, Any]:
    from benchmarks.measure import result_of

    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), str(Path(__file__).resolve())]
    command += ["--rank-of", contender, "--steps", str(options.steps), "--layers", str(options.layers)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["TORCH_EXTENSIONS_DIR"] = extensions
    environment.pop("PYTHONPATH", None)
    if contender != "deepspeed":
        environment["PYTHONPATH"] = str(ROOT)
    return result_of(command, environment, TIMEOUT_SECONDS)


def check(runs: dict[str, list[dict[str, Any]]], layers: int) -> int:
    """Require that all contenders have trained the same model, cut in two, and that a rank holds half of it plus the
    norms. Return the number of elements of the model.
    """
    from benchmarks.measure import require, require_equal

    norms = (2 * layers + 1) * WIDTH
    whole = 2 * WORDS * WIDTH + layers * (4 * WIDTH**2 + 3 * WIDTH * INNER) + norms
    for name, found in runs.items():
        expected = {"deepspeed": "deepspeed", "torch": "", "silent": ""}.get(name, "deepspeed_c")
        require(all(run["engine"] == expected for run in found), f"{name} runs on its own engine")
        require(found[0]["versions"] == runs["ours"][0]["versions"], f"{name} has the same versions")
        if name != "deepspeed":  # DeepSpeed does not cut the vocabulary, nor count its own parts
            require(found[0]["elems"] == (whole - norms) // WORLD + norms, f"{name} holds half: {found[0]['elems']}")
    cut = {name: found[0]["losses"] for name, found in runs.items() if name != "silent"}
    for i in range(len(runs["ours"][0]["losses"])):
        require_equal(f"losses of step {i}", {name: losses[i] for name, losses in cut.items()}, LOSS_TOLERANCE)
    return whole


def compare(options: argparse.Namespace) -> None:
    from benchmarks.measure import in_turn, machine, median_spread, peer_extensions, ratios

    pythons = dict.fromkeys(("ours", "ours_overlap", "torch", "silent"), sys.executable)
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        pythons["deepspeed"] = peer
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    extensions = peer_extensions()
    for round_ in range(options.rounds):
        for name in in_turn(list(pythons), round_):
            runs[name].append(measure(pythons[name], name, options, extensions))
    n_params = check(runs, options.layers)
    seconds = {name: [run["seconds"] for run in found] for name, found in runs.items()}
    peers = [name for name in ("torch", "deepspeed") if name in runs]
    for name, found in runs.items():
        line = {"benchmark": "tensor_parallel", "contender": name, "params": n_params, "ranks": WORLD}
        line |= {"tokens": SAMPLES * TOKENS, "rounds": options.rounds}
        line |= {"ms": round(1e3 * median_spread(seconds[name])[0], 1)}
        line |= {"peak_mib": round(median_spread([run["peak_mib"] for run in found])[0], 1)}
        line |= {"elems": found[0]["elems"], "sent": found[0]["sent"]}
        best = [min(of_round) for of_round in zip(*(seconds[peer] for peer in peers), strict=True)]
        line |= ratios("ratio_to_better_peer", seconds[name], best)
        for peer in (*peers, "silent"):
            line |= ratios(f"ratio_to_{peer}", seconds[name], seconds[peer])
        line |= ratios(
            "memory_to_torch", [run["peak_mib"] for run in found], [run["peak_mib"] for run in runs["torch"]]
        )
        print(json.dumps({**line, "torch": found[0]["versions"]["torch"], "machine": machine()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time steps of a Llama that is cut over ranks.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12, help="that count, of each run")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of, options.steps, options.layers)
    else:
        compare(options)


if __name__ == "__main__":
    main()
