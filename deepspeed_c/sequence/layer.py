"""``DistributedAttention``: any attention over sequences that are cut over ranks, with DeepSpeed's name and signature.

Each rank passes the queries, keys and values of its tokens. They are exchanged so that each rank has all tokens of some
of the heads. The given attention computes these heads, and its outputs are exchanged back (``exchange.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.sequence.collectives import ranks_of
from deepspeed_c.sequence.exchange import gather_heads, gather_tokens

__all__ = ["DistributedAttention"]


class DistributedAttention(torch.nn.Module):
    """Attention over tokens of all ranks of a group.

    local_attention: called with query, key and value of all tokens and of this rank's heads, and with the other
    arguments of ``forward``; returns its output in the same layout. sequence_process_group: the ranks that share a
    sequence, in the order of its parts; None: all ranks. scatter_idx: dimension of the heads, 2. gather_idx: dimension
    of the tokens, 0 or 1; the other of these two is the batch. sp_stream: a stream of the accelerator for the
    exchanges.

    Nothing is kept between two calls.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ConfigError(
                f"heads are dimension {scatter_idx} and tokens dimension {gather_idx}",
                where="DistributedAttention",
                fix="lay tensors out as [tokens, batch, heads, width] or [batch, tokens, heads, width]: scatter_idx 2,"
                " gather_idx 0 or 1",
            )
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx, self.sp_stream = scatter_idx, gather_idx, sp_stream

    def layer_sync(self, layer: Any) -> None:
        """Wait for ``layer.done_event``, if there is one and exchanges have a separate stream."""
        if self.sp_stream is not None and hasattr(layer, "done_event"):
            torch.get_device_module(self.sp_stream.device).current_stream().wait_event(layer.done_event)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int | None = None,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of this rank's tokens to the tokens of all ranks. Collective; all ranks give the same shapes.

        query, key, value: [tokens, batch, heads, width], or with tokens and batch exchanged. With 3 dimensions, the
        last is heads times width, and ranks must divide it. batch_dim_idx: 0 or 1; default: the dimension that
        ``gather_idx`` leaves. rotary_pos_emb: (cosines, sines) [batch or 1, all tokens, 1, width], for rotating queries
        and keys after they have been gathered. Returns the outputs of this rank's tokens, with as many dimensions as
        the output of ``local_attention``.

        Raises ConfigError for shapes and heads that no plan fits, before anything is sent.
        """
        batch_dim = 1 - self.gather_idx if batch_dim_idx is None else batch_dim_idx
        if batch_dim not in (0, 1):
            raise ConfigError(f"the batch is dimension {batch_dim}", where="DistributedAttention", fix="pass 0 or 1")
        for tensor in (query, key, value):
            self.layer_sync(tensor)
        comm = ranks_of(self.spg)
        n_dims = query.dim()
        parts = [_tokens_first(_with_heads(tensor, comm.world_size), batch_dim) for tensor in (query, key, value)]
        with self._exchanging(query):
            shapes, *gathered = gather_tokens(comm, *parts)
        plan = shapes.plan
        if plan.repeats_keys:
            heads = torch.tensor(plan.keys, device=query.device)
            gathered[1:] = [part.index_select(2, heads) for part in gathered[1:]]
        if rotary_pos_emb is not None:
            cos, sin = (part.transpose(0, 1) for part in rotary_pos_emb[:2])
            gathered[:2] = [_rotate(part, cos, sin) for part in gathered[:2]]
        given = [_tokens_first(part, batch_dim) for part in gathered]
        if n_dims == 3:
            given = [part.flatten(2) for part in given]
        out = self.local_attn(*given, *args, **kwargs)
        out_dims = out.dim()
        if out_dims == 3:
            out = out.unflatten(2, (plan.n_queries, -1))
        with self._exchanging(out):
            whole = gather_heads(comm, shapes._replace(value_width=out.shape[-1]), _tokens_first(out, batch_dim))
        whole = _tokens_first(whole, batch_dim)
        return whole.flatten(2) if out_dims == 3 else whole

    @contextmanager
    def _exchanging(self, tensor: torch.Tensor) -> Iterator[None]:
        """The body runs on ``sp_stream``: after the work launched before it, and before the work launched after it."""
        if self.sp_stream is None or tensor.device.type == "cpu":
            yield
            return
        device = torch.get_device_module(tensor.device)
        self.sp_stream.wait_stream(device.current_stream())
        with device.stream(self.sp_stream):
            yield
        device.current_stream().wait_stream(self.sp_stream)


def _tokens_first(tensor: torch.Tensor, batch_dim: int) -> torch.Tensor:
    """Moves the batch from dimension ``batch_dim`` so that the result is [tokens, batch, ...]. Also its own inverse."""
    return tensor.transpose(0, 1) if batch_dim == 0 else tensor


def _with_heads(tensor: torch.Tensor, n_ranks: int) -> torch.Tensor:
    """Split the last of 3 dimensions into as many heads as there are ranks."""
    if tensor.dim() not in (3, 4) or (tensor.dim() == 3 and tensor.shape[2] % n_ranks):
        raise ConfigError(
            f"a tensor {tuple(tensor.shape)} cannot be cut over {n_ranks} ranks",
            where="DistributedAttention",
            fix="give tensors of 4 dimensions, with heads and their width, or 3 of which ranks divide the last",
        )
    return tensor if tensor.dim() == 4 else tensor.unflatten(2, (n_ranks, tensor.shape[2] // n_ranks))


def _rotate(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first elements of each head, as many as ``cos`` has. The two elements of a pair lie half of these
    apart.
    """
    width = cos.shape[-1]
    turned, rest = tensor[..., :width], tensor[..., width:]
    low, high = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-high, low), -1) * sin, rest), -1)


class _SeqAllToAll(torch.autograd.Function):
    """Cuts dimension ``scatter_idx`` of a tensor over the ranks, and gathers dimension ``gather_idx``."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Any,
        input: torch.Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int = 0,
        stream: Any = None,
        handle: Any = None,
        type: Any = None,
        is_fwd: bool = True,
    ) -> torch.Tensor:
        """Parts of a dimension that ranks do not divide differ by one element, the larger parts first. The arguments
        after ``gather_idx`` are DeepSpeed's and have no effect: the two dimensions suffice, and exchanges end before
        this returns.
        """
        comm = ranks_of(group)
        n_ranks = comm.world_size
        scattered = [len(part) for part in torch.arange(input.shape[scatter_idx]).tensor_split(n_ranks)]
        gathered = comm.gather_numbers(input.shape[gather_idx], label="parts of a dimension")
        ctx.comm, ctx.dims, ctx.sizes = comm, (scatter_idx, gather_idx), (scattered, gathered)
        return _exchange(comm, input, scatter_idx, gather_idx, scattered, gathered)

    @staticmethod
    @first_derivative_only("an exchange of sequence ranks")
    def backward(ctx: Any, *grads: torch.Tensor):
        (scatter_dim, gather_dim), (scattered, gathered) = ctx.dims, ctx.sizes
        grad = _exchange(ctx.comm, grads[0], gather_dim, scatter_dim, gathered, scattered)
        return None, grad, *[None] * 7


def _exchange(
    comm: Collectives,
    tensor: torch.Tensor,
    scatter_dim: int,
    gather_dim: int,
    scattered: list[int],
    gathered: list[int],
) -> torch.Tensor:
    """Part i along ``scatter_dim`` goes to rank i. Received parts are joined along ``gather_dim``, in the order of
    ranks.
    """
    parts = [part.contiguous() for part in tensor.split(scattered, scatter_dim)]
    shapes = []
    for n in gathered:
        shape = list(tensor.shape)
        shape[scatter_dim], shape[gather_dim] = scattered[comm.rank], n
        shapes.append(torch.Size(shape))
    flat = torch.cat([part.view(-1) for part in parts])
    received = flat.new_empty(sum(shape.numel() for shape in shapes))
    sizes = [part.numel() for part in parts], [shape.numel() for shape in shapes]
    comm.all_to_all(flat, received, *sizes, label="one tensor of attention").wait()
    return torch.cat([block.view(shape) for block, shape in zip(received.split(sizes[1]), shapes)], gather_dim)
