"""The model, the data and the optimizer groups of peer.py, for DeepSpeed and for us. It needs only torch."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, WIDTH, INNER = 7, 5, 3


class Tiny(nn.Module):
    """Has two optimizer groups, a frozen layer, a tied weight, buffers (one of integers, one not persistent), and sizes
    that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.up = nn.Linear(WIDTH, INNER)
        self.gain = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("seen", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += tokens.numel()
        h = self.embed(tokens)
        h = h + self.frozen(h) + self.offset.to(h.dtype)
        h = h + self.down(torch.tanh(self.up(h))) * self.gain
        logits = self.head(self.norm(h))
        return nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), labels.view(-1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 4), generator=generator)
    return tokens, (tokens + 1) % VOCABULARY


def groups_of(model: nn.Module) -> list[dict]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in named if name.startswith("norm.") or name.endswith("bias") or name == "gain"]
    return [
        {"params": [p for _, p in named if all(p is not q for q in plain)], "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0, "lr": 0.02},
    ]


def train(engine, first: int, n_steps: int) -> list[float]:
    """Trains ``n_steps`` steps from step ``first`` on, and returns the losses. ``engine`` is ours or DeepSpeed's."""
    losses = []
    for step in range(first, first + n_steps):
        loss = engine(*batch(step, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
