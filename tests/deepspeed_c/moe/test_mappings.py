"""Tokens divided among tensor-parallel ranks and put together again (deepspeed_c/moe/mappings.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.errors import ModelError
from deepspeed_c.moe.mappings import drop_tokens, gather_tokens
from deepspeed_c.utils import groups
from tests.ranks import run_ranks


class TwoByTwo:
    """Ranks (0, 1) and (2, 3) are tensor-parallel."""

    def __init__(self, rank: int) -> None:
        made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        self.of_tensors, self.of_data, self.rank = made[rank // 2], made[2 + rank % 2], rank

    def get_model_parallel_group(self) -> Any:
        return self.of_tensors

    def get_data_parallel_group(self) -> Any:
        return self.of_data

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_rank(self) -> int:
        return self.rank % 2

    def get_data_parallel_rank(self) -> int:
        return self.rank // 2


def divide(rank: int, world: int, dim: int) -> list[torch.Tensor]:
    groups.initialize(mpu=TwoByTwo(rank))
    try:
        whole = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(rank // 2)).requires_grad_()
        part = drop_tokens(whole, dim)
        (part * (rank + 1)).sum().backward()
        mine = torch.full_like(part, float(rank)).requires_grad_()
        gathered = gather_tokens(mine, dim)
        factors = torch.arange(float(gathered.numel())).view(gathered.shape)
        (gathered * factors).sum().backward()
        with pytest.raises(ModelError, match="3 tokens along dimension 0 cannot be divided among 2"):
            drop_tokens(torch.zeros(3, 2))
        return [whole.detach(), part.detach(), whole.grad, gathered.detach(), mine.grad]
    finally:
        groups.set_mesh(None)


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_parts_of_tensor_parallel_ranks(dim):
    for rank, (whole, part, grad, gathered, of_mine) in enumerate(run_ranks(4, divide, dim)):
        first, place = rank - rank % 2, rank % 2
        halves = whole.chunk(2, dim)
        assert torch.equal(part, halves[place]), (rank, part, halves)
        wanted = torch.cat([torch.full_like(half, first + i + 1.0) for i, half in enumerate(halves)], dim)
        assert torch.equal(grad, wanted), (rank, grad, wanted)
        wanted = torch.cat([torch.full_like(half, float(first + i)) for i, half in enumerate(halves)], dim)
        assert torch.equal(gathered, wanted), (rank, gathered, wanted)
        factors = torch.arange(float(gathered.numel())).view(gathered.shape).chunk(2, dim)[place]
        assert torch.equal(of_mine, factors), (rank, of_mine, factors)


def test_nothing_happens_without_tensor_parallel_ranks():
    x = torch.randn(3, 2)
    assert drop_tokens(x) is x and gather_tokens(x) is x
