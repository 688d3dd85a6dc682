"""A small model with two layers of experts, and its batches, for our engine and for DeepSpeed's. Imports nothing but
torch, because peer_moe.py has no deepspeed_c."""

from __future__ import annotations

import torch
from torch import nn

HIDDEN, N_EXPERTS = 6, 4


class TinyMoE(nn.Module):
    """``moe``: the class of the layers. ``ep_sizes``: the number of ranks that hold each layer's experts together."""

    def __init__(self, moe: type[nn.Module], ep_sizes: tuple[int, int]) -> None:
        super().__init__()
        self.before = nn.Linear(HIDDEN, HIDDEN)
        for name, ep_size, k in (("first", ep_sizes[0], 1), ("second", ep_sizes[1], 2)):
            expert = nn.Sequential(nn.Linear(HIDDEN, 5), nn.Tanh(), nn.Linear(5, HIDDEN, bias=False))
            expert.register_buffer("scale", torch.full((3,), 2.0))
            # Every expert has room for every token, and nothing is drawn.
            layer = moe(
                HIDDEN,
                expert,
                num_experts=N_EXPERTS,
                ep_size=ep_size,
                k=k,
                capacity_factor=4.0,
                eval_capacity_factor=4.0,
                use_residual=k == 1,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )
            setattr(self, name, layer)
        self.between = nn.LayerNorm(HIDDEN)
        self.after = nn.Linear(HIDDEN, 1)
        self.register_buffer("offset", torch.linspace(-1, 1, HIDDEN))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, param in self.named_parameters():
                if "deepspeed_experts" not in name:
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.to(self.before.weight.dtype)
        out, first_loss, _ = self.first(self.before(x) + self.offset.to(x.dtype))
        x = x + out
        out, second_loss, _ = self.second(self.between(x))
        x = x + out
        error = (self.after(x).squeeze(-1).float() - y).square().mean()
        return error + 0.01 * (first_loss + second_loss).float()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, HIDDEN, generator=generator), torch.randn(8, generator=generator)


def train(engine, first: int, n_steps: int) -> list[float]:
    """Trains ``n_steps`` steps from step ``first`` on, and returns this rank's losses."""
    losses = []
    for step in range(first, first + n_steps):
        loss = engine(*batch(step, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
