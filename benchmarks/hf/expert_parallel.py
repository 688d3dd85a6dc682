"""How long is a step of a Mixtral with its experts spread over 2 ranks, against all experts on each rank and against real DeepSpeed?

A Mixtral of 4 layers with 8 experts each, fp32, AdamW, stage 2, one thread a rank. Contenders differ in the section
``expert_parallel`` alone, and their losses have to be the same. DSC_PEER_PYTHON names the interpreter of an environment
with DeepSpeed, and with torch and transformers in the same versions. Without this variable DeepSpeed is left out.
DeepSpeed 0.19.6 asks a registry of transformers for a default; transformers 5.23 takes none, so the peer's process mends
the registry. The runs take turns, and ratios compare two runs of the same round.
A small learning rate keeps the routers near their beginning, because nothing here evens their loads: "busiest" is the
rows of the busier rank over an even share, which its step waits for.
The bytes in the ledger have to be those of the routed rows: there and back, in forward and backward. Memory is counted
in separate runs: the peak of live tensors against the plan, and the bytes of the experts' weights. "load" is the peak of
resident memory in ``from_pretrained`` under ``zero.Init`` at stage 3, over a rank's part and the largest tensor. "spread"
is the same up to the end of ``initialize``.
Run: python -m benchmarks.hf.expert_parallel [--rounds 6] [--steps 8] [--width 512] [--inner 1024] [--tokens 128]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORLD, WARMUP, VOCAB, LAYERS, EXPERTS, K = 2, 2, 512, 4, 8, 2
TIMEOUT_SECONDS = 600
LOSS_TOLERANCE = 2e-3
OURS, WHOLE, THEIRS = "experts over ranks", "all experts on each rank", "deepspeed"


def make_model_config(options: argparse.Namespace) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=K,
        vocab_size=VOCAB,
        max_position_embeddings=options.tokens,
    )


def make_config(contender: str, stage: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    if contender != WHOLE:
        config["expert_parallel"] = {"enabled": True, "autoep_size": WORLD, "preset_model": "mixtral"}
    if contender == THEIRS:
        config["optimizer"]["params"]["torch_adam"] = True
    return config


def mend_registry() -> None:
    """Let DeepSpeed ask for a default."""
    from transformers.utils import output_capturing

    def get(registry: Any, model: Any, default: Any = None) -> Any:
        return dict.get(registry, str(model.__class__), default) or {}

    output_capturing._CanRecordRegistry.get = get


def train(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank of one run. The peer's environment runs this function too."""
    import torch
    from transformers import MixtralForCausalLM

    if contender == THEIRS:
        import deepspeed

        mend_registry()
    else:
        import deepspeed_c as deepspeed
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)  # the same weights on all sides
    model = MixtralForCausalLM(make_model_config(options))
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=make_config(contender, stage=2)
    )[0]
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(1 + rank)
    seconds, losses = [], []
    for _ in range(options.steps + WARMUP):
        ids = torch.randint(VOCAB, (1, options.tokens), generator=generator)
        torch.distributed.barrier()
        begin = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    result: dict[str, Any] = {"engine": type(engine).__module__, "seconds": statistics.median(seconds[WARMUP:])}
    if contender == OURS:
        half = EXPERTS // WORLD
        loads = [sum(layer.tokens[:half]) / sum(layer.tokens) for layer in engine.expert_load().values()]
        result["busiest"] = round(statistics.fmean(max(share, 1 - share) * WORLD for share in loads), 3)
        result["mib_sent"] = round(sent_bytes(engine, ids) / 2**20, 3)
    result["loss"] = statistics.fmean(losses)
    result["versions"] = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return result


def sent_bytes(engine: Any, ids: Any) -> int:
    """Bytes of a rank's messages to and from experts in one step, checked against its routed rows."""
    import torch

    from benchmarks.measure import require
    from deepspeed_c.moe.auto import RoutedExperts
    from deepspeed_c.utils import groups

    comm = groups.expert_ranks(f"ep_size_{WORLD}")
    comm.ledger.reset_totals()
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    n_bytes = comm.ledger.totals["all-to-all"].wire_bytes
    engine.step()
    paid = 0
    share = EXPERTS // WORLD
    for layer in (each for each in engine.module.modules() if isinstance(each, RoutedExperts)):
        chosen = torch.cat(comm.all_gather_list(layer.last_indices.view(-1).long()))
        received = int((chosen // share == comm.rank).sum())
        # Rows go there and results come back, then gradients go the same ways. Counts are int64.
        paid += 2 * (ids.numel() * K + received) * engine.module.config.hidden_size * 4 + EXPERTS * 8
    expected = paid * (WORLD - 1) // WORLD
    require(n_bytes == expected, f"the ledger has the bytes of the routed rows: {n_bytes} and {expected}")
    everyone = sum(comm.gather_numbers(n_bytes))
    rows = 2 * LAYERS * 2 * ids.numel() * K * engine.module.config.hidden_size * 4 + LAYERS * EXPERTS * 8
    formula = WORLD * rows * (WORLD - 1) // WORLD
    require(everyone == formula, f"on average they are 2 rows hidden (1 - 1/ep) a pass: {everyone} and {formula}")
    return n_bytes


def hold(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run some steps. The peak of live bytes is compared with the plan."""
    import torch
    from transformers import MixtralForCausalLM

    import deepspeed_c
    from deepspeed_c.plan.activations import ForwardShape
    from deepspeed_c.plan.live_bytes import LiveBytes
    from deepspeed_c.plan.memory import HEAP
    from deepspeed_c.plan.table import plan_table

    # Plans do not know which ranks share a host.
    config = {**make_config(contender, stage=2), "comm": {"local": "off"}}
    planned = 0
    if contender == OURS:
        with torch.device("meta"):
            outline = MixtralForCausalLM(make_model_config(options))
        table = plan_table(config, WORLD, model=outline, batch=ForwardShape(1, options.tokens), every_stage=False)
        # Freed blocks that the C library keeps are no live tensors.
        phases = table.rows[table.chosen].plan.phases.values()
        planned = max(phase.nbytes - phase.kinds.get(HEAP, 0) for phase in phases)
    deepspeed_c.init_distributed()
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (1, options.tokens))
    with LiveBytes() as live:
        with live.phase("initialize"):
            model = MixtralForCausalLM(make_model_config(options))
            engine = deepspeed_c.initialize(model=model, config=config)[0]
        for _ in range(2):
            with live.phase("forward"):
                loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            with live.phase("backward"):
                engine.backward(loss)
            del loss
            with live.phase("step"):
                engine.step()
    peak = max(live.peaks.values())
    experts = sum(param.nbytes for name, param in engine.module.named_parameters() if ".experts." in name)
    found = {"peak_mib": round(peak / 2**20, 2), "expert_bytes": experts}
    return found | ({"peak_to_plan": round(peak / planned, 4)} if planned else {})


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Load a folder at stage 3, with shards from the start, and spread its experts."""
    import deepspeed_c

    deepspeed_c.install_as_deepspeed()
    from transformers import MixtralForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from benchmarks.resident import Peak, anonymous_bytes
    from deepspeed_c.comm.collectives import Collectives

    config = make_config(OURS, stage=3)
    del config["optimizer"]  # its states would count
    deepspeed_c.init_distributed()
    kept = HfDeepSpeedConfig(config)
    # The first model only imports what a load needs.
    for folder in (f"{options.folder}/small", options.folder):
        with Peak(anonymous_bytes) as reading:
            model = MixtralForCausalLM.from_pretrained(folder)
        with Peak(anonymous_bytes) as spreading:
            engine = deepspeed_c.initialize(model=model, config=config)[0]
        del model
        if folder != options.folder:
            engine.destroy()
    del kept
    tensors = dict(MixtralForCausalLM(make_model_config(options)).named_parameters())
    bound = sum(tensor.nbytes for tensor in tensors.values()) // WORLD + max(each.nbytes for each in tensors.values())
    peaks = {"load_of_part_and_tensor": reading.peak, "spread_of_part_and_tensor": spreading.peak}
    comm = Collectives()
    above = {key: max(comm.gather_numbers(peak - reading.before)) for key, peak in peaks.items()}
    return {key: round(n_bytes / bound, 3) for key, n_bytes in above.items()}


def run_rank(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    part = {"train": lambda: train(options.rank_of, options), "hold": lambda: hold(options.rank_of, options)}
    result = part.get(options.part, lambda: load(options))()
    if torch.distributed.get_rank() == 0:
        print("result " + json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


def run(python: str, contender: str, part: str, options: argparse.Namespace, folder: str = "") -> dict[str, Any]:
    """Run all ranks of one contender."""
    from benchmarks.measure import peer_extensions, result_of

    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), str(Path(__file__).resolve())]
    command += ["--rank-of", contender, "--part", part, "--folder", folder]
    for name in ("steps", "width", "inner", "tokens"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    environment["TORCH_EXTENSIONS_DIR"] = peer_extensions()
    environment.pop("PYTHONPATH", None)
    if contender != THEIRS:
        environment["PYTHONPATH"] = str(ROOT)
    return result_of(command, environment, TIMEOUT_SECONDS)


def compare(options: argparse.Namespace) -> None:
    from transformers import MixtralForCausalLM

    from benchmarks.measure import in_turn, machine, median_spread, ratios, require, require_equal

    contenders = dict.fromkeys((OURS, WHOLE), sys.executable)
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        contenders[THEIRS] = peer
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for round_ in range(options.rounds):
        for name in in_turn(list(contenders), round_):
            results[name].append(run(contenders[name], name, "train", options))
    for name, runs in results.items():
        package = "deepspeed" if name == THEIRS else "deepspeed_c"
        for each in runs:
            require(each["engine"].split(".")[0] == package, f"the engine of {name} is its own: {each['engine']}")
    versions = [each["versions"] for runs in results.values() for each in runs]
    require(all(found == versions[0] for found in versions), f"all environments have the same versions: {versions}")
    require_equal("mean losses", {name: runs[-1]["loss"] for name, runs in results.items()}, LOSS_TOLERANCE)
    held = {name: run(sys.executable, name, "hold", options) for name in (OURS, WHOLE)}
    experts = {name: found.pop("expert_bytes") for name, found in held.items()}
    require(experts[OURS] * WORLD == experts[WHOLE], f"a rank holds its part of the experts: {experts}")
    with tempfile.TemporaryDirectory() as folder:
        small = argparse.Namespace(width=64, inner=64, tokens=options.tokens)
        for place, sizes in ((folder, options), (f"{folder}/small", small)):
            MixtralForCausalLM(make_model_config(sizes)).save_pretrained(place)
        loaded = run(sys.executable, OURS, "load", options, folder)
    for name, runs in results.items():
        seconds, least, most = median_spread([each["seconds"] for each in runs])
        line = {
            "benchmark": "expert_parallel",
            "contender": name,
            "processes": WORLD,
            "width": options.width,
            "inner": options.inner,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "seconds": round(seconds, 4),
            "seconds_min": round(least, 4),
            "seconds_max": round(most, 4),
            "loss": round(runs[-1]["loss"], 5),
            "torch": runs[-1]["versions"]["torch"],
            "machine": machine(),
            **held.get(name, {}),
        }
        if name == OURS:
            line |= {"busiest": runs[-1]["busiest"], "mib_sent": runs[-1]["mib_sent"], **loaded}
            line["peak_to_whole"] = round(held[OURS]["peak_mib"] / held[WHOLE]["peak_mib"], 4)
            for other, key in ((WHOLE, "ratio_to_whole"), (THEIRS, "ratio_to_deepspeed")):
                if other in results:
                    line |= ratios(
                        key, [each["seconds"] for each in runs], [each["seconds"] for each in results[other]]
                    )
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time steps of a mixture whose experts two ranks share.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="that count, of each run")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rank-of", choices=(OURS, WHOLE, THEIRS), help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
