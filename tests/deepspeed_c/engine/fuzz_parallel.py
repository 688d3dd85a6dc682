"""Random combinations of parallelisms, adapters and recomputation against one plain torch process.

    python -m tests.deepspeed_c.engine.fuzz_parallel --cases 1000 --seed 1

A case is a dict of settings, drawn from its seed: a model of transformers whose weights and sequences are cut over
ranks, or layers in a pipeline. After some steps of SGD every trained weight must have moved as far, and to the same
place, as in the plain process. SGD shows a wrong scale of gradients; Adam would hide it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import torch

import deepspeed_c
from tests.deepspeed_c.engine.fuzz import Case, cases_of, parser_of
from tests.deepspeed_c.inject.families import VOCAB, make
from tests.deepspeed_c.pipe.models import Plain, loss_fn, micro_batches, module_of
from tests.deepspeed_c.zero.test_tensor_parallel import logical
from tests.hf.test_sequence import WAYS
from tests.ranks import RanksFailed, run_ranks

__all__ = ["CHOICES", "check_case", "draw", "main", "settled"]

# Setting -> its values. The first is the default and the simplest; all are drawn from, and likely values stand twice.
CHOICES: dict[str, list[Any]] = {
    "family": ["llama", "llama", "llama_tied_shared", "qwen3", "gpt2", "gpt_neox", "opt"],
    "tp": [1, 1, 2, 2],
    "sp": [1, 1, 2],
    "pp": [1, 1, 1, 2, 4],
    "data": [1, 1, 2],
    "stage": [0, 1, 2, 3, 3],
    "precision": ["fp32", "fp32", "fp32", "bf16", "fp16"],
    "gas": [1, 2, 3],
    "clip": [0.0, 0.0, 0.3],
    "peft": ["none", "none", "all", "attention"],
    "recompute": ["none", "none", "auto", "budget"],
    "loss": ["model's own", "gathered", "weighted"],
    "schedule": ["1f1b", "gpipe", "zb_h1", "zb_v", "interleaved", "dualpipe_v"],
    "user_backward": [False, False, True],
    "bucket": [100_000, 3000],
}
STEPS, RATE, BATCH, TOKENS = 2, 0.3, 2, 12
WITH_SEQUENCES = ("llama", "llama_tied_shared", "qwen3")
ATTENTION = {
    "gpt2": ["c_attn", "attn.c_proj"],
    "gpt_neox": ["query_key_value", "attention.dense"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj"],
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1024.0}},
}
# Tolerances, relative to the distance that a weight moves. The bugs to find are wrong factors and missing terms.
TOLERANCE = {"fp32": 2e-3, "bf16": 0.2, "fp16": 0.1}


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    return settled({name: rng.choice(values) for name, values in CHOICES.items()})


def settled(case: Case) -> Case:
    """The case, with each setting put back to its default where the other settings leave it no effect."""
    case, default = dict(case), {name: values[0] for name, values in CHOICES.items()}
    if case["pp"] > 1:
        for name in ("family", "tp", "sp", "peft", "user_backward"):
            case[name] = default[name]
        case["stage"] %= 3  # stage 3 is refused
        if case["recompute"] == "budget":
            case["recompute"] = "auto"
        if case["schedule"] == "dualpipe_v" and case["gas"] < 2 * case["pp"]:
            case["schedule"] = "zb_v"  # refused
    else:
        case["schedule"] = default["schedule"]
    if case["sp"] > 1 and case["family"] not in WITH_SEQUENCES:
        case["family"] = default["family"]
    if case["sp"] == 1:
        case["loss"] = default["loss"]
    elif case["user_backward"]:
        case["user_backward"] = False  # refused: the losses of ranks have to be weighted
    if case["pp"] * case["tp"] * case["sp"] * case["data"] > 4:
        case["data"] = 1
    return case


def world_of(case: Case) -> int:
    return case["pp"] * case["tp"] * case["sp"] * case["data"]


def config_of(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case["gas"],
        "gradient_clipping": case["clip"],
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {
            "stage": case["stage"],
            "stage3_param_persistence_threshold": 20,
            "reduce_bucket_size": case["bucket"],
        },
        **PRECISIONS[case["precision"]],
    }
    if case["tp"] > 1:
        config["tensor_parallel"] = {"autotp_size": case["tp"]}
    if case["sp"] > 1:
        config["sequence_parallel_size"] = case["sp"]
        config["sequence_parallel"] = {"loss": "part" if case["loss"] == "weighted" else "auto"}
    if case["recompute"] != "none" and case["pp"] == 1:
        config["activation_checkpointing"] = {"layers": "auto"}
        if case["recompute"] == "budget":
            config["activation_checkpointing"]["budget"] = "150KiB"
    return config


def model_of(case: Case) -> torch.nn.Module:
    """The model, in fp32 and the same on every rank. Its adapters change the output from the beginning."""
    model = make(case["family"]).train()
    if case["peft"] == "none":
        return model
    from peft import LoraConfig, get_peft_model

    names = ATTENTION.get(case["family"], ["q_proj", "k_proj", "v_proj", "o_proj"])
    torch.manual_seed(3)
    model = get_peft_model(
        model,
        LoraConfig(
            r=3, lora_alpha=5, target_modules="all-linear" if case["peft"] == "all" else names, task_type="CAUSAL_LM"
        ),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.1)
    return model


def batch(step: int, micro: int, data_rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + data_rank)
    tokens = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=generator)
    labels = tokens.clone()
    labels[0, : 2 + data_rank] = -100
    return {"input_ids": tokens, "labels": labels}


Weights = dict[str, torch.Tensor]


def plain(case: Case) -> tuple[Weights, Weights]:
    """All trained weights (at the start, after the steps) of one process. Masters are fp32; the rest is bf16 in a bf16
    case."""
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    model = Plain() if case["pp"] > 1 else model_of(case)
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    start = {name: value.clone() for name, value in masters.items()}
    model.to(dtype)
    for step in range(STEPS):
        for rank in range(case["data"]):
            if case["pp"] > 1:
                for x, y in micro_batches(step, rank, case["gas"]):
                    (loss_fn(model(x), y) / (case["gas"] * case["data"])).backward()
                continue
            for micro in range(case["gas"]):
                loss = model(**batch(step, micro, rank), use_cache=False).loss
                (loss / (case["gas"] * case["data"])).backward()
        params = {name: p for name, p in model.named_parameters() if name in masters}
        norm = torch.stack([p.grad.float().norm() for p in params.values()]).norm().item()
        scale = min(1.0, case["clip"] / (norm + 1e-6)) if case["clip"] else 1.0
        for name, p in params.items():
            masters[name] -= RATE * scale * p.grad.float()
            p.data.copy_(masters[name])
            p.grad = None
    if case["pp"] > 1:
        return tuple({name.removeprefix("built."): value for name, value in of.items()} for of in (start, masters))
    return start, masters


def train_pipeline(case: Case) -> Weights:
    options: dict[str, Any] = {"schedule": case["schedule"]}
    if case["schedule"] == "interleaved":
        options["virtual_stages"] = 2
    if case["recompute"] != "none":
        options["activation_checkpoint_interval"] = 1
    net = module_of(case["pp"], **options)
    engine, *_ = deepspeed_c.initialize(model=net, model_parameters=net.parameters(), config=config_of(case))
    with engine:
        for step in range(STEPS):
            engine.train_batch(iter(micro_batches(step, net.mpu().get_data_parallel_rank(), case["gas"])))
        found = {}
        for name, p in net.named_parameters():
            found[name.replace("tied_modules.embed", "0")] = deepspeed_c.utils.safe_get_full_fp32_param(p)
        return found


def train(rank: int, world: int, case: Case) -> Weights:
    if case["pp"] > 1:
        return train_pipeline(case)
    from deepspeed_c.sequence.loader import UlyssesSPDataLoaderAdapter

    model, sp = model_of(case), case["sp"]
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed_c.initialize(model=model, model_parameters=trained, config=config_of(case))[0]
    with engine:
        data_rank = engine._mesh.index("dp_replicate", "dp_shard")
        places = [(step, micro) for step in range(STEPS) for micro in range(case["gas"])]
        given: list[dict[str, torch.Tensor]] = [batch(*place, data_rank) for place in places]
        if sp > 1:
            group = engine.get_sequence_parallel_group()
            loader = UlyssesSPDataLoaderAdapter(given, torch.distributed.get_rank(group), group, sp, engine.device)
            # All ranks of a sequence load the same batches here, so the loader yields each batch ``sp`` times.
# The first copy is trained on.
            given = [part for i, part in enumerate(loader) if i % sp == 0]
        for part in given:
            if sp > 1:
                part = {**part, "labels": part["shift_labels"]}
            loss = engine(**part, use_cache=False).loss
            if sp > 1:
                loss = WAYS[case["loss"]](loss, part["shift_labels"])
            loss.backward() if case["user_backward"] else engine.backward(loss)
            engine.step()
        assert engine.skipped_steps == 0 and engine.global_steps == STEPS
        return logical(engine)


def check_case(case: Case, *, timeout: float = 120.0) -> str:
    """A description of the case's failure; empty if there is none."""
    try:
        outcomes = run_ranks(world_of(case), train, case, timeout=timeout, preload="tests.hf.preload")
    except RanksFailed as error:
        return str(error)
    start, want = plain(case)
    seen: set[str] = set()
    moved = {name: (value - start[name]).norm().item() for name, value in want.items()}
    least = 0.02 * max(moved.values())
    found = []
    for rank, got in enumerate(outcomes):
        seen |= set(got)
        for name in sorted(set(got) & set(want)):
            off = (got[name] - want[name]).norm().item() / max(moved[name], least)
            if not off <= TOLERANCE[case["precision"]]:
                far = (got[name] - start[name]).norm().item() / max(moved[name], 1e-30)
                found.append(
                    (off, f"rank {rank}: {name} is off by {off:.3g} of its way, and moved {far:.3g} times as far")
                )
    if seen != set(want):
        return f"other weights are trained: {sorted(seen ^ set(want))[:6]}"
    return "; ".join(text for _, text in sorted(found, reverse=True)[:4])


def told(case: Case) -> str:
    return json.dumps({name: value for name, value in case.items() if value != CHOICES[name][0]})


def main(arguments: list[str] | None = None) -> int:
    options = parser_of("tests.deepspeed_c.engine.fuzz_parallel", __doc__.splitlines()[0]).parse_args(arguments)
    torch.set_num_threads(1)
    cases = cases_of(options, CHOICES, draw, settled)
    n_failed, began = 0, time.monotonic()
    for label, case in cases:
        if problem := check_case(case):
            n_failed += 1
            print(f"{label}: --case '{told(case)}'\n{problem}", flush=True)
    print(f"{len(cases)} cases, {n_failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if n_failed else 0


if __name__ == "__main__":
    # Ranks import the functions that they run by the name of this module.
    from tests.deepspeed_c.engine import fuzz_parallel

    sys.exit(fuzz_parallel.main())
