"""How long is a QLoRA step at stage 3 over one at stage 0, how many bytes of the base does a rank hold, and how many does
a gather move?

A Llama of 100M parameters on 2 gloo ranks: a frozen base in nf4 with double quantization (bitsandbytes) under peft's
LoRA of all linear layers, in bf16. Other contenders have the same codes in joint memory (``comm.zero_copy_gather``), and
the base in bf16 at stage 3. They take turns in the same processes. Losses at stage 3 must equal those of stage 0, and
codes must be sharded between steps. The bound of the bytes is half of the codes.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.hf.qlora_step [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.deepspeed_c.train_step import Contender, require_same_losses
from benchmarks.measure import machine, median_spread, ratios, require, time_alternately

LENGTH, VOCAB, WARMUP = 64, 8192, 2
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ZERO_COPY = {"local": "shm", "zero_copy_gather": True}
# Whether the base is quantized, stage, and section comm.
CONTENDERS: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "nf4_stage0": (True, 0, {}),
    "nf4_stage3": (True, 3, {}),
    "nf4_stage3_zero_copy": (True, 3, ZERO_COPY),
    "bf16_stage3": (False, 3, {}),
}


def save_base(folder: str, width: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = width // 64
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=VOCAB,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def make(folder: str, is_quantized: bool, stage: int, comm: dict[str, Any]) -> Contender:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how: dict[str, Any] = {}
    if is_quantized:
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=list(LINEAR), task_type="CAUSAL_LM")).train()
    trained = [param for param in model.parameters() if param.requires_grad]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "comm": comm,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        # Adapters persist, the base does not.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 22 * base.config.hidden_size},
    }
    engine, *_ = deepspeed_c.initialize(model=model, model_parameters=trained, config=settings)

    def update(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Contender(lambda ids: engine(input_ids=ids, labels=ids).loss, update, engine)


def base_weights(engine: Any) -> Iterator[torch.nn.Parameter]:
    """The weights of the base's linear layers."""
    for name, param in engine.module.named_parameters():
        if not param.requires_grad and any(f".{each}." in name for each in LINEAR):
            yield param


def numbers_beside(param: torch.nn.Parameter) -> int:
    """Bytes of the numbers that belong to the codes of a weight."""
    state = getattr(param, "quant_state", None)
    n_bytes = 0
    while state is not None:
        n_bytes += state.absmax.nbytes + state.code.nbytes
        state = state.state2
    return n_bytes


def gathered_bytes(engine: Any, ids: torch.Tensor) -> int:
    """Bytes of the all-gathers of a forward."""
    ledger = engine._comm.ledger
    before = ledger.totals.get("all-gather")
    with torch.no_grad():
        engine(input_ids=ids)
    return ledger.totals["all-gather"].n_bytes - (0 if before is None else before.n_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        if rank == 0:
            save_base(folder, args.width, args.layers)
        dist.barrier()
        steps = {name: make(shared[0], *how) for name, how in CONTENDERS.items()}
        dist.barrier()
    ids = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(rank))
    times = time_alternately(steps, ids, args.rounds, warmup=WARMUP)
    require_same_losses({name: step for name, step in steps.items() if name != "bf16_stage3"}, 1e-3)

    nf4, bf16 = (list(base_weights(steps[name].engine)) for name in ("nf4_stage3", "bf16_stage3"))
    require(all(param.dtype == torch.uint8 for param in nf4), "the base is codes")
    require(all(p.ds_status.name == "NOT_AVAILABLE" for p in (*nf4, *bf16)), "the base is sharded between steps")
    codes, beside = sum(param.ds_numel for param in nf4), sum(map(numbers_beside, nf4))
    held = sum(param.ds_tensor.nbytes for param in nf4) + beside
    wide = sum(param.ds_numel * 2 for param in bf16)
    gathered = {name: gathered_bytes(steps[name].engine, ids) for name in ("nf4_stage3", "bf16_stage3")}
    others = {"nf4_stage3": gathered["nf4_stage3"] - codes, "bf16_stage3": gathered["bf16_stage3"] - wide}
    require(
        len(set(others.values())) == 1, f"gathers of the base are its codes, or its bf16 weights: {gathered}, {others}"
    )
    if rank == 0:
        for name in steps:
            line: dict[str, Any] = {"benchmark": "qlora_step", "contender": name}
            line["params"] = sum(param.ds_numel for param in bf16)
            line["ms"] = round(median_spread(times[name])[0] * 1e3, 1)
            line |= ratios("ratio_to_stage0", times[name], times["nf4_stage0"])
            line |= ratios("ratio_to_bf16", times[name], times["bf16_stage3"])
            if name == "nf4_stage3":
                line["held_of_a_copy"] = round(held / (codes + beside), 4)
                line["gathered_of_bf16"] = round(codes / wide, 4)
            line |= {"ranks": world, "threads": torch.get_num_threads(), "machine": machine()}
            print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
