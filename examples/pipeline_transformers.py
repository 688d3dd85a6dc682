"""Trains a small Llama of transformers as a pipeline, on the source of Python's standard library, one token a byte.

    deepspeed_c --num_procs 2 examples/pipeline_transformers.py --out out/pipeline

Each process builds only the layers of its stages. At the end the model is saved as a folder that transformers loads,
and its loss there is compared with the pipeline's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from text import Windows, standard_library, unigram_entropy
from transformers import AutoModelForCausalLM, LlamaConfig

import deepspeed_c
from deepspeed_c.pipe import from_transformers

MICRO_BATCH, ACCUMULATION = 4, 4


def batches(text: bytes, context: int, seed: int, *, rank: int = 0, n_ranks: int = 1) -> Iterator[tuple]:
    """Endless micro-batches of (inputs, labels): the loss shifts labels by one token."""
    windows = Windows(text, context)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    mine = order[rank::n_ranks].tolist()
    while True:
        for first in range(0, len(mine) - MICRO_BATCH + 1, MICRO_BATCH):
            ids = torch.stack([windows[i] for i in mine[first : first + MICRO_BATCH]]).long()
            yield {"input_ids": ids}, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model to go on with; default: a new one")
    parser.add_argument("--stages", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lib-bytes", type=int, default=1 << 20, help="bytes of text")
    parser.add_argument("--out", type=Path, default=Path("out/pipeline"))
    parser.add_argument("--local_rank", type=int, help="set by launchers")
    args = parser.parse_args()
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.context + 1,
        vocab_size=256,
        tie_word_embeddings=True,
    )
    module = from_transformers(args.model or config, args.stages, schedule=args.schedule)
    engine, *_ = deepspeed_c.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
            "zero_optimization": {"stage": 1},
            "steps_per_print": 10,
        },
    )
    train, held_out = standard_library(args.lib_bytes)
    place = engine.grid
    with engine:
        data = batches(
            train, args.context, 0, rank=place.get_data_parallel_rank(), n_ranks=place.get_data_parallel_world_size()
        )
        for _ in range(args.steps):
            engine.train_batch(data)
        loss = float(engine.eval_batch(batches(held_out, args.context, 1)))
        engine.save_16bit_model(str(args.out))
        if engine.global_rank == 0:
            print(f"held-out loss {loss:.4f} nats/byte; entropy of bytes {unigram_entropy(held_out):.4f}")
            print(f"the same loss by transformers {loss_by_transformers(args.out, held_out, args.context):.4f}")


def loss_by_transformers(folder: Path, text: bytes, context: int) -> float:
    """The loss of the saved model on the micro-batches of the evaluation."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    data = batches(text, context, 1)
    with torch.no_grad():
        losses = [
            float(model(**inputs, labels=labels).loss) for inputs, labels in (next(data) for _ in range(ACCUMULATION))
        ]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
