"""The host memory that a load takes on a rank. It holds the rank's part of the new tensors and the reader's buffers,
and never the whole model."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import PARAM, Read
from deepspeed_c.errors import StateError
from tests.ranks import run_ranks
from tests.toys import Stack

WIDTH, DEPTH, WORLD = 1024, 15, 2
WHOLE = 4 * WIDTH * WIDTH * DEPTH  # 63 MB
SHARD = WHOLE // WORLD
# The ring of _C.read_blocks: 8 buffers of 2 MiB.
READER = 16 << 20
# Other memory that a load touches: code, heaps of threads, the manifest. Reading the whole model would add three times
# as much to a rank's part.
SLACK = SHARD // 3


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},  # one moment a weight
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def make(seed: int) -> Any:
    torch.manual_seed(seed)
    with deepspeed_c.zero.Init(config_dict_or_path=CONFIG):
        model = Stack(DEPTH, lambda: nn.Linear(WIDTH, WIDTH, bias=False))  # of 4 MB
    return deepspeed_c.initialize(model=model, config=CONFIG)[0]


def growth(what: Callable[[], Any]) -> int:
    """How far a call raises the peak of the resident memory, in bytes."""
    accelerator = get_accelerator()
    gc.collect()
    # Give free memory of the heap back: if the call used it, resident memory would not grow.
    ctypes.CDLL(None).malloc_trim(0)
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    what()
    return accelerator.max_memory_allocated() - before


def shards(engine: Any) -> list[torch.Tensor]:
    return [unit.param_shard.clone() for unit in engine._optimizer.units]


def read_whole(path: str) -> None:
    """Read every tensor whole, as a load must not do."""
    with open_checkpoint(path, None) as source:
        reads = [
            Read(tensor, 0, torch.empty(tensor.shape).view(-1))
            for (kind, _), tensor in source.tensors.items()
            if kind == PARAM
        ]
        source.read(reads)


def body(rank: int, world: int, folder: str) -> dict[str, int]:
    ckpt, model = os.path.join(folder, "ckpt"), os.path.join(folder, "model")
    grown: dict[str, int] = {}
    with make(0) as engine:
        engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
        engine.step()
        engine.save_checkpoint(ckpt, tag="one")
        engine.save_model(model)
        wanted = shards(engine)
        engine.load_checkpoint(ckpt)  # one-time imports, connections and threads must not count below
        grown["into the engine that saved"] = growth(lambda: engine.load_checkpoint(ckpt))
    with make(1) as engine:
        loads = {
            "weights": lambda: engine.load_checkpoint(ckpt, load_module_only=True),
            "a Hugging Face folder": lambda: engine.load_checkpoint(model, load_module_only=True),
            "weights and new states": lambda: engine.load_checkpoint(ckpt),
        }
        for what, load in loads.items():
            with torch.no_grad():
                for unit in engine._optimizer.units:
                    unit.param_shard.fill_(math.nan)
            grown[what] = growth(load)
            assert all(map(torch.equal, shards(engine), wanted)), f"{what}: other weights than were saved"
    grown["the whole model"] = growth(lambda: read_whole(os.path.join(ckpt, "one")))
    return grown


def test_a_load_takes_a_ranks_own_part_and_the_readers_buffers(tmp_path):
    try:
        get_accelerator().reset_peak_memory_stats()
    except StateError as error:
        pytest.skip(str(error))
    allowed = {
        "into the engine that saved": READER, "weights": READER, "a Hugging Face folder": READER,
        "weights and new states": SHARD + READER,  # the load allocates the moments
    }  # fmt: skip
    for rank, grown in enumerate(run_ranks(WORLD, body, str(tmp_path))):
        print(f"rank {rank}, MB: " + ", ".join(f"{what} {n / 1e6:.1f}" for what, n in grown.items()))
        for what, n_bytes in allowed.items():
            assert grown[what] <= n_bytes + SLACK, (
                f"rank {rank}, {what}: the peak rose by {grown[what] / 1e6:.1f} MB, allowed are {n_bytes / 1e6:.1f} and {SLACK / 1e6:.1f}"
            )
        # The measurement notices a read of all weights.
        assert grown["the whole model"] > WHOLE > READER + SLACK, (
            f"rank {rank}: reading the whole model, {WHOLE / 1e6:.1f} MB, was seen as {grown['the whole model'] / 1e6:.1f} MB"
        )
