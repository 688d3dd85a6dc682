"""A rank of a launch in the tests: trains a small GPT at ZeRO stage 2 for a few steps, and rank 0 prints the losses.

The global batch is the same for any number of ranks, so the losses are those of one process.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn

import deepspeed_c

STEPS, BATCH, LENGTH, WORDS, WIDTH = 3, 4, 16, 31, 32


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1] - 1)
        x = self.words(ids[:, :-1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


def train() -> list[float]:
    """The loss of each step, the same on all ranks."""
    torch.manual_seed(0)
    model = Gpt()
    deepspeed_c.init_distributed(verbose=False)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine, *_ = deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(WORDS, (BATCH, LENGTH))  # the same on all ranks
        n = BATCH // world_size
        loss = engine(ids[rank * n : (rank + 1) * n])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return losses


def main() -> None:
    losses = train()
    rank = torch.distributed.get_rank()
    if rank == 0:
        sys.stdout.write(f"losses {json.dumps(losses)}\n")
    if len(sys.argv) > 1:  # where the test finds what each rank has seen
        seen = {"rank": rank, "args": sys.argv[1:], "host": os.uname().nodename, "env": dict(os.environ)}
        sys.stdout.write(f"seen {json.dumps(seen)}\n")


if __name__ == "__main__":
    main()
