"""A model whose layers are cut by hand over tensor-parallel ranks, as in Megatron, and the same model uncut."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_c.inject.cut import Cut, CutBox

WORDS, WIDTH, HEADS, HEAD, INNER = 11, 12, 6, 4, 7  # no number of ranks divides 7
SEQUENCE, BATCH = 5, 4


class Mpu:
    """Megatron's ``mpu`` for neighbouring ranks along tensor parallelism. ``leaves_out``: methods that it lacks."""

    def __init__(self, n_tp: int, leaves_out: tuple[str, ...] = ()) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        tp = [dist.new_group(list(range(first, first + n_tp))) for first in range(0, world, n_tp)]
        data = [dist.new_group(list(range(first, world, n_tp))) for first in range(n_tp)]
        self._answers = {
            "get_tensor_model_parallel_group": tp[rank // n_tp], "get_tensor_model_parallel_rank": rank % n_tp,
            "get_tensor_model_parallel_world_size": n_tp, "get_data_parallel_group": data[rank % n_tp],
            "get_data_parallel_rank": rank // n_tp, "get_data_parallel_world_size": world // n_tp,
            "get_pipeline_model_parallel_world_size": 1,
        }  # fmt: skip
        for name in leaves_out:
            del self._answers[name]

    def __getattr__(self, name: str):
        if name.startswith("_") or name not in self._answers:
            raise AttributeError(name)
        return lambda: self._answers[name]


class _Copy(torch.autograd.Function):
    """Passes on an input that all ranks share; backward sums its gradients over them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """Sums the results of the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def sizes_of(n: int, n_ranks: int) -> list[int]:
    """The number of columns of each rank, of ``n`` in all. The first ranks have more."""
    return [n // n_ranks + (rank < n % n_ranks) for rank in range(n_ranks)]


class Toy(nn.Module):
    """An attention layer and an MLP. Queries and values are fused and cut by heads; all ranks share one key head;
    queries are normalised within heads.

    ``group``: the ranks that the model is cut over; None: it is whole.
    """

    def __init__(self, seed: int = 3, group: dist.ProcessGroup | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.group = group
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qv = nn.Linear(WIDTH, 2 * HEADS * HEAD)
        self.key = nn.Linear(WIDTH, HEAD, bias=False)
        self.q_norm = nn.Parameter(torch.randn(HEAD) * 0.1 + 1)
        self.attn_out = nn.Linear(HEADS * HEAD, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        if group is not None:
            self._cut(dist.get_rank(group), dist.get_world_size(group))

    def _cut(self, rank: int, n_ranks: int) -> None:
        heads, inner = sizes_of(HEADS, n_ranks), sizes_of(INNER, n_ranks)
        rows = [n * HEAD for n in heads]
        for linear, dim, sizes, stride in (
            (self.qv, 0, rows, 2),
            (self.attn_out, 1, rows, 1),
            (self.up, 0, inner, 1),
            (self.down, 1, inner, 1),
        ):
            for param in linear.parameters():
                if param.dim() <= dim:
                    continue  # the bias of a layer that is cut over rows is added once, after the sum
                runs = param.data.unflatten(dim, (stride, -1)).narrow(dim + 1, sum(sizes[:rank]), sizes[rank])
                param.data = runs.flatten(dim, dim + 1).contiguous()
                param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
        whole = self.key.weight.shape
        everything = CutBox((0, 0), (0, 0), tuple(whole))
        self.key.weight.tp_cut = Cut(whole, (everything,), n_ranks, rank, n_ranks, tuple(range(n_ranks)))
        self.q_norm.tp_sum_gradients = True

    def copy_in(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else _Copy.apply(x, self.group)

    def sum_out(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else _Reduce.apply(x, self.group)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.words(ids))
        h = self.copy_in(self.norm(x))
        q, v = self.qv(h).unflatten(-1, (2, -1, HEAD)).permute(2, 0, 3, 1, 4)
        q = q * self.q_norm / (q.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        scores = (q @ self.key(h).unsqueeze(1).transpose(-1, -2)) / HEAD**0.5
        h = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.sum_out(h @ self.attn_out.weight.t()) + self.attn_out.bias
        h = torch.tanh(self.up(self.copy_in(x)))
        x = x + self.sum_out(h @ self.down.weight.t()) + self.down.bias
        return nn.functional.cross_entropy(self.out(x).float().flatten(0, 1), labels.flatten())


def batch(step: int, micro: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels, each [BATCH, SEQUENCE]."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + data_rank)
    ids = torch.randint(WORDS, (2, BATCH, SEQUENCE), generator=generator)
    return ids[0], ids[1]
