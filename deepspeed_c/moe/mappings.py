"""Tokens that tensor-parallel ranks have in common, divided among them and put together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed_c import comm
from deepspeed_c.errors import ModelError
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.utils import groups

__all__ = ["drop_tokens", "gather_tokens"]


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return this tensor-parallel rank's part of ``input_`` along ``dim``. The gradient of all parts is gathered.

    Raises ModelError if the size is no multiple of the number of ranks.
    """
    n_ranks = groups.get_tensor_model_parallel_world_size()
    if n_ranks == 1:
        return input_
    if input_.shape[dim] % n_ranks:
        raise ModelError(
            f"{input_.shape[dim]} tokens along dimension {dim} cannot be divided among {n_ranks} tensor-parallel ranks",
            where="drop_tokens",
            fix="pad the tokens to a multiple of the number of ranks",
        )
    return _TokensOfRank.apply(input_, dim)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return the parts of all tensor-parallel ranks along ``dim``, in the order of ranks. Each rank keeps its part of
    the gradient. Collective.
    """
    return input_ if groups.get_tensor_model_parallel_world_size() == 1 else _TokensOfRanks.apply(input_, dim)


def _part(whole: Tensor, dim: int) -> Tensor:
    parts = whole.tensor_split(groups.get_tensor_model_parallel_world_size(), dim)
    return parts[groups.get_tensor_model_parallel_rank()].contiguous()


def _gathered(part: Tensor, dim: int) -> Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(groups.get_tensor_model_parallel_world_size())]
    comm.all_gather(parts, part, group=groups.get_tensor_model_parallel_group())
    return torch.cat(parts, dim)


class _TokensOfRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _part(whole, dim)

    @staticmethod
    @first_derivative_only("drop_tokens")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.dim), None


class _TokensOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _gathered(part, dim)

    @staticmethod
    @first_derivative_only("gather_tokens")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _part(grad, ctx.dim), None
