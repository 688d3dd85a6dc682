"""How long do two ranks take to load 2 GB of weights through `init_inference`, against a read of the file?

A Llama of 1,000M parameters in bf16 is written in Hugging Face's layout, as one safetensors file. Each rank makes the
model on the meta device and loads its tensor-parallel half ("load"), or reads the same number of bytes of the file, one
half each, into new memory ("read"). They take turns, and the slower rank counts. The file is in
the page cache, so the disk does not decide. Bytes that a rank has read, and its live bytes of weights, have to be those
of its part. The peak is the largest resident memory in the first load, above that before, over the part and the largest
tensor.
Run: torchrun --nproc-per-node 2 -m benchmarks.hf.load [--rounds 16] [--layers 16] [--width 2176]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from benchmarks.resident import Peak, anonymous_bytes

WARMUP = 1


def make_config(layers: int, width: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=32000,
        tie_word_embeddings=False,
    )


def write(folder: str, config: Any) -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.fill_(0.001 * (i % 7 + 1))
    model.save_pretrained(folder, max_shard_size="100GB")


def load(folder: str, config: Any) -> torch.nn.Module:
    import transformers

    with deepspeed_c.OnDevice(dtype=torch.bfloat16, device="meta"):
        model = transformers.LlamaForCausalLM(config)
    ranks = {"tp_size": dist.get_world_size()}
    return deepspeed_c.init_inference(model, tensor_parallel=ranks, dtype=torch.bfloat16, checkpoint=folder)


def measure(folder: str, config: Any, rounds: int) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    path = next(Path(folder).glob("*.safetensors"))
    n_bytes = path.stat().st_size

    def read() -> None:
        part = memoryview(torch.empty(n_bytes // world, dtype=torch.uint8).numpy())
        with open(path, "rb", buffering=0) as file:
            file.seek(rank * len(part))
            done = 0
            while done < len(part):
                n = file.readinto(part[done:])
                require(bool(n), "the file has its size")
                done += n

    with Peak(anonymous_bytes) as peak:
        engine = load(folder, config)
    held = sum(param.nbytes for param in engine.module.parameters())
    largest = max(param.nbytes for param in engine.module.parameters()) * world
    require(held < 0.6 * n_bytes, f"a rank holds its part: {held} of {n_bytes} bytes")
    require(peak.above > 0.9 * held, f"the part is new memory: {peak.above} bytes")
    engine.destroy()
    del engine
    seconds: dict[str, list[float]] = {"load": [], "read": []}
    for i in range(rounds + WARMUP):
        for name in in_turn(list(seconds), i):
            gc.collect()
            dist.barrier()
            begin = time.perf_counter()
            if name == "read":
                read()
            else:
                engine = load(folder, config)
            spent = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if i >= WARMUP:
                seconds[name].append(float(spent))
            if name == "load":
                engine.destroy()
                del engine
    return {
        "bytes": n_bytes,
        "ranks": world,
        "load_s": round(median_spread(seconds["load"])[0], 3),
        "read_s": round(median_spread(seconds["read"])[0], 3),
        **ratios("ratio_to_read", seconds["load"], seconds["read"]),
        "peak_of_part_and_tensor": round(peak.above / (held + largest), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2176)
    args = parser.parse_args()
    deepspeed_c.init_distributed()
    rank = dist.get_rank()
    config = make_config(args.layers, args.width)
    place = [tempfile.mkdtemp(dir=os.environ.get("TMPDIR")) if rank == 0 else None]
    dist.broadcast_object_list(place)
    try:
        if rank == 0:
            write(place[0], config)
        dist.barrier()
        line = measure(place[0], config, args.rounds)
        if rank == 0:
            print(json.dumps({"benchmark": "load", **line, "machine": machine()}), flush=True)
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place[0])


if __name__ == "__main__":
    main()
