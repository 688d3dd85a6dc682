"""How long do the whole weights of a model at ZeRO stage 3 take to come one after the other (``iter_full_weights``), against a copy of the same bytes, and how much memory beside the shards?

Two ranks hold a Llama in bf16. The contenders take turns in the same processes: the iterator, whose tensors nobody
reads, and a copy of as many bytes by ``Tensor.copy_`` from one whole set of tensors to another. Each rank gets all
weights. Memory is the bytes of gathered units that are live together.
The bound of the time is the copy itself: a rank cannot receive what nobody writes.
With an adapter of LoRA the bytes that ``send_weights`` sends are counted: of the adapter alone, and of merged weights
after a step that has changed the adapter.
Run: torchrun --nproc-per-node 2 -m benchmarks.deepspeed_c.full_weights
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.measure import machine, median_spread, ratios, require, time_alternately

AHEAD = 64_000_000
WARMUP = 1
CASES = {
    "shared memory": {"local": "shm"},
    "gloo": {"local": "off"},
    "joint memory": {"local": "shm", "zero_copy_gather": True},
}
VOCAB = 15_000


def make_model(width: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(width // 128, 1)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=heads, num_key_value_heads=heads, **sizes)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def make_engine(model: Any, comm: dict[str, Any], *, trains: bool = False) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "comm": comm,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": AHEAD // 4},
        **({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}} if trains else {}),
    }
    return deepspeed_c.initialize(model=model, config=config)[0]


def measure(case: str, width: int, layers: int, rounds: int) -> dict[str, Any]:
    model = make_model(width, layers)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    engine = make_engine(model, CASES[case])
    n_bytes = sum(entry.n_bytes for entry in engine.iter_full_weights().entries)
    require(n_bytes == 2 * sum(shape.numel() for shape in shapes.values()), "all weights come")
    groups = engine._fetcher.groups
    peak = 0
    for name, tensor in engine.iter_full_weights(AHEAD):
        require(tensor.shape == shapes.pop(name), name)
        live = sum(group.source.cost.memory for group in groups if group.buffer is not None)
        peak = max(peak, live)
    require(not shapes, f"each weight comes once: {list(shapes)}")
    whole = [torch.empty(entry.shape, dtype=entry.dtype) for entry in engine.iter_full_weights().entries]
    target = [torch.empty_like(tensor) for tensor in whole]
    for tensor in (*whole, *target):
        tensor.zero_()

    def iterate(n: int) -> None:
        for _ in range(n):
            for _name, _tensor in engine.iter_full_weights(AHEAD):
                pass

    def copy(n: int) -> None:
        for _ in range(n):
            for to, tensor in zip(target, whole, strict=True):
                to.copy_(tensor)

    seconds = time_alternately({"iterator": iterate, "copy": copy}, 1, rounds, WARMUP)
    engine.close()
    return {
        "transport": case,
        "mb": round(n_bytes / 1e6, 1),
        "ms": round(median_spread(seconds["iterator"])[0] * 1e3, 1),
        "ms_copy": round(median_spread(seconds["copy"])[0] * 1e3, 1),
        **ratios("ratio_to_copy", seconds["iterator"], seconds["copy"]),
        "peak_mb": round(peak / 1e6, 2),
        "largest_unit_mb": round(max(group.source.cost.memory for group in groups) / 1e6, 2),
    }


def measure_adapter(width: int, layers: int) -> dict[str, Any]:
    import peft

    model = peft.get_peft_model(make_model(width, layers), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=8))
    adapter = sum(p.numel() * 2 for p in model.parameters() if p.requires_grad)
    below = sum(
        module.base_layer.weight.numel() * 2
        for module in model.modules()
        if isinstance(module, peft.tuners.lora.Linear)
    )
    engine = make_engine(model, CASES["shared memory"], trains=True)

    def nothing(name: str, tensor: torch.Tensor) -> None:
        pass

    def step() -> None:
        tokens = torch.randint(VOCAB, (1, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    only = engine.send_weights(nothing, adapters="only")
    step()
    engine.send_weights(nothing)
    step()
    gathers = engine._fetcher.stats.n_received_bytes
    merged = engine.send_weights(nothing)
    received = engine._fetcher.stats.n_received_bytes - gathers
    engine.close()
    return {
        "adapter_mb": round(adapter / 1e6, 3),
        "sent_mb": round(only.n_bytes / 1e6, 3),
        "sent_over_adapter": round(only.n_bytes / adapter, 4),
        "sent_merged_over_adapted": round(merged.n_bytes / below, 4),
        "received_merged_mb": round(received / 1e6, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    deepspeed_c.init_distributed("gloo", verbose=False)
    rows = [measure(case, args.width, args.layers, args.rounds) for case in CASES]
    rows.append({"transport": "adapter", **measure_adapter(args.width // 4, args.layers)})
    for row in rows:
        if dist.get_rank() == 0:
            ends = {"ranks": dist.get_world_size(), "machine": machine()}
            print(json.dumps({"benchmark": "full_weights", **row, **ends}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
