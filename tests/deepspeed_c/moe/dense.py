"""A mixture of experts that computes every expert on every token, and exchanges whole batches: slow, and independent of
the package's own layer. Tests of ZeRO, checkpoints and groups use it."""

from __future__ import annotations

import copy

import torch
from torch import nn

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.moe.experts import SpreadLayer

HIDDEN = 6


class _Gather(torch.autograd.Function):
    """The rows of all ranks, in the order of ranks."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, ep: Collectives) -> torch.Tensor:
        ctx.ep = ep
        return torch.cat(ep.all_gather_list(rows.contiguous(), label="rows of all ranks"))

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        total = grad.contiguous().clone()
        ctx.ep.all_reduce(total.view(-1), label="gradients of rows").wait()
        return total.chunk(ctx.ep.world_size)[ctx.ep.rank], None


class _Sum(torch.autograd.Function):
    """This rank's rows of the sum over ranks."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, ep: Collectives) -> torch.Tensor:
        ctx.ep = ep
        total = rows.contiguous().clone()
        ep.all_reduce(total.view(-1), label="sum of rows").wait()
        return total.chunk(ep.world_size)[ep.rank].clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return torch.cat(ctx.ep.all_gather_list(grad.contiguous(), label="gradients of the sum")), None


class Experts(nn.Module):
    def __init__(self, expert: nn.Module, n_local: int, group_name: str) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(n_local)])
        self.first_expert = 0
        for param in self.deepspeed_experts.parameters():
            param.allreduce, param.group_name = False, group_name


class DenseMoE(SpreadLayer):
    """Top-k of ``n_experts`` experts, which are spread over ``ep_size`` ranks."""

    def __init__(self, n_experts: int, ep_size: int, k: int = 1, expert: nn.Module | None = None) -> None:
        super().__init__(ep_size)
        self.k = k
        self.router = nn.Linear(HIDDEN, n_experts, bias=False)
        expert = nn.Sequential(nn.Linear(HIDDEN, 5), nn.Tanh(), nn.Linear(5, HIDDEN)) if expert is None else expert
        self.experts = Experts(expert, n_experts // ep_size, f"ep_size_{ep_size}")
        self.ep: Collectives | None = None

    def connect(self, ep: Collectives) -> None:
        self.ep = ep
        self.experts.first_expert = ep.rank * len(self.experts.deepspeed_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(self.router(x).float(), dim=-1)
        chosen = probabilities.topk(self.k, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(1, chosen.indices, chosen.values).to(x.dtype)
        ep = self.ep
        is_spread = ep is not None and ep.world_size > 1
        if is_spread:
            x, weights = _Gather.apply(x, ep), _Gather.apply(weights, ep)
        total = 0
        for i, expert in enumerate(self.experts.deepspeed_experts):
            total = total + weights[:, self.experts.first_expert + i, None] * expert(x)
        return _Sum.apply(total, ep) if is_spread else total


class Model(nn.Module):
    """Two layers of experts between dense layers. ``sizes``: the number of ranks that the experts of each layer are
    spread over."""

    def __init__(self, n_experts: int, sizes: tuple[int, int], k: int = 1) -> None:
        super().__init__()
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.first = DenseMoE(n_experts, sizes[0], k)
        self.between = nn.LayerNorm(HIDDEN)
        self.second = DenseMoE(n_experts, sizes[1], k)
        self.after = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.before(x))
        x = x + self.second(self.between(x))
        return (self.after(x).squeeze(-1) - y).square().mean()


def fill(model: Model, seed: int = 3) -> None:
    """Gives every tensor values of its own by its name, with experts by their number among all."""
    from deepspeed_c.zero.layout.experts import ExpertNames

    numbered = ExpertNames(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(seed + sum(map(ord, numbered.logical(name))) * 31)
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)


def batch(step: int, micro: int, rank: int, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(rows, HIDDEN, generator=generator), torch.randn(rows, generator=generator)
