"""Attention, MLP and loss of very long sequences, computed chunk by chunk (FPDT, arXiv 2408.16978).

The sequence is cut into chunks of tokens, and each chunk is cut over the ranks. For each chunk, a rank computes query,
key and value of its tokens, exchanges tokens for heads, and attends to this chunk and the chunks before it. Keys and
values of earlier chunks wait in host memory or in a file, and two chunks of them are on the device at a time. Except
for waiting chunks, no rank ever has the activations of more than one chunk. Attention is causal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.ops.attention_parts import merge_
from deepspeed_c.ops.autocast import cast_by_autocast
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.sequence.blocks import block_attention, block_attention_backward
from deepspeed_c.sequence.exchange import Shapes, return_heads, return_tokens, send_heads, send_tokens
from deepspeed_c.sequence.fpdt_shelf import Shelf, ShelvedChunk
from deepspeed_c.sequence.loss import gathered_losses, row_losses
from deepspeed_c.sequence.plans import SequenceCut, plan_heads
from deepspeed_c.sequence.tiles import in_tiles, tile_lengths

__all__ = ["FPDT_FFN", "FPDT_Attention", "FPDT_InputConstruct", "FPDT_LogitsLoss"]


class _Chunks:
    """The division of a sequence into chunks, and of chunks over ranks.

    Each chunk has ``chunk_size`` tokens; the last chunk may have fewer. A chunk is cut into consecutive parts, one for
    each rank. A rank has its parts of all chunks, in the order of the chunks.
    """

    def __init__(self, n_tokens: int, chunk_size: int, n_ranks: int) -> None:
        self.n_tokens, self.n_ranks = n_tokens, n_ranks
        sizes = [min(chunk_size, n_tokens - begin) for begin in range(0, n_tokens, chunk_size)]
        self.begins = [i * chunk_size for i in range(len(sizes))]
        self.cuts = [SequenceCut(size, n_ranks, "contiguous") for size in sizes]

    def __len__(self) -> int:
        return len(self.cuts)

    def local_tokens(self, rank: int) -> int:
        return sum(cut.tokens[rank] for cut in self.cuts)

    def local_rows(self, rank: int) -> list[tuple[int, int]]:
        """(begin, number) of the tokens of each chunk on ``rank``, counted among the tokens of ``rank``."""
        found, begin = [], 0
        for cut in self.cuts:
            found.append((begin, cut.tokens[rank]))
            begin += cut.tokens[rank]
        return found

    def positions(self, rank: int, device: torch.device | str) -> torch.Tensor:
        """int64: the position of each of ``rank``'s tokens in the sequence."""
        parts = [begin + cut.positions(rank, device=device) for begin, cut in zip(self.begins, self.cuts)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def _check_chunk_size(chunk_size: Any, where: str) -> None:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ConfigError(f"chunk_size is {chunk_size!r}", where=where, fix="give a whole number of tokens, at least 1")


class FPDT_InputConstruct(torch.nn.Module):
    """A batch in the order that FPDT requires: each rank's tokens of every chunk.

    tokens, labels, position_ids: [batch, tokens], the whole sequence on every rank. loss_mask: [batch, tokens].
    attention_mask: returned unchanged. args: has ``ds_sequence_parallel_fpdt_chunk_size``, in tokens of the whole
    sequence. Neither the chunk size nor ``sp_size`` has to divide the number of tokens.

    Raises ConfigError for an impossible chunk size or rank.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None,
        loss_mask: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        super().__init__()
        self.tokens, self.labels, self.loss_mask = tokens, labels, loss_mask
        self.attention_mask, self.position_ids = attention_mask, position_ids
        chunk_size = args.ds_sequence_parallel_fpdt_chunk_size
        _check_chunk_size(chunk_size, "FPDT_InputConstruct: ds_sequence_parallel_fpdt_chunk_size")
        if not 0 <= sp_rank < sp_size:
            raise ConfigError(
                f"rank {sp_rank} of {sp_size}", where="FPDT_InputConstruct", fix="give sp_rank from 0 to sp_size - 1"
            )
        self.sp_size, self.sp_rank = sp_size, sp_rank
        self._chunks = _Chunks(tokens.shape[1], chunk_size, sp_size)

    def generate(self) -> tuple[torch.Tensor | None, ...]:
        """Return (tokens, labels, loss_mask, attention_mask, position_ids) of this rank. The masks are whole: loss_mask
        has the tokens of all ranks, rank after rank, in the order of the losses of ``FPDT_LogitsLoss``.
        """
        device = self.tokens.device
        own = self._chunks.positions(self.sp_rank, device)
        mask = self.loss_mask
        if mask is not None:
            mask = mask[:, torch.cat([self._chunks.positions(rank, device) for rank in range(self.sp_size)])]
        tokens, labels, positions = (
            None if each is None else each[:, own] for each in (self.tokens, self.labels, self.position_ids)
        )
        return tokens, labels, mask, self.attention_mask, positions


class _Rotary(NamedTuple):
    """Tables of rotary embeddings, [tokens, 1 or batch, 1, rotated width], by position in the sequence."""

    cos: torch.Tensor
    sin: torch.Tensor

    def turn(self, x: torch.Tensor, begin: int, *, back: bool = False) -> torch.Tensor:
        """Rotate x [tokens, batch, heads, width]. begin: position of the first token. back: rotate a gradient, in the
        backward.
        """
        cos, sin = (table[begin : begin + x.shape[0]].to(x) for table in self)
        width = cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        low, high = (turned * sin if back else turned).chunk(2, dim=-1)
        half = torch.cat((high, -low) if back else (-high, low), dim=-1)
        turned = turned * cos + (half if back else half * sin)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[tokens, batch, heads, width] as [batch, heads, tokens, width]."""
    return x.permute(1, 2, 0, 3).contiguous()


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 0, 1, 3).contiguous()


class _Waiting(NamedTuple):
    """Tensors of one chunk that wait from forward to backward: [batch, heads of this rank, tokens, width]."""

    q: ShelvedChunk
    k: ShelvedChunk
    v: ShelvedChunk


class _AttentionCall:
    """One call of chunked attention."""

    def __init__(
        self,
        comm: Collectives,
        heads: tuple[int, int, int],
        chunks: _Chunks,
        angles: _Rotary | None,
        shelf: Shelf,
        *,
        keeps: bool,
    ) -> None:
        """heads: (number of query heads, number of key heads, width of a head). keeps: whether to keep the tensors that
        the backward needs.
        """
        self._comm, self._chunks, self._angles, self._shelf, self._keeps = comm, chunks, angles, shelf, keeps
        self._n_heads, self._n_keys, width = heads
        self._width = width
        self._plan = plan_heads(self._n_heads, self._n_keys, comm.world_size, comm.rank)
        self._scale = width**-0.5
        self._rows = chunks.local_rows(comm.rank)
        self._keys = torch.tensor(self._plan.keys) if self._plan.repeats_keys else None
        self._waiting: list[_Waiting] = []
        self._out: list[ShelvedChunk] = []
        self._log_sum: list[torch.Tensor] = []

    def _shapes(self, i: int) -> Shapes:
        """The sizes of the exchange for chunk ``i``."""
        width = self._width
        return Shapes(self._n_heads, self._n_keys, width, width, self._chunks.cuts[i].tokens, self._comm.rank)

    def _turn(self, x: torch.Tensor, i: int, *, back: bool = False) -> torch.Tensor:
        return x if self._angles is None else self._angles.turn(x, self._chunks.begins[i], back=back)

    def _spread(self, keys: torch.Tensor) -> torch.Tensor:
        """The key heads, one for each group of query heads. keys: [tokens, batch, heads, width]."""
        return keys if self._keys is None else keys.index_select(2, self._keys.to(keys.device))

    def _collect(self, grads: torch.Tensor) -> torch.Tensor:
        if self._keys is None:
            return grads
        shape = (*grads.shape[:2], self._plan.n_keys, grads.shape[3])
        return grads.new_zeros(shape).index_add_(2, self._keys.to(grads.device), grads)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output, [tokens of this rank, batch, query heads * width]."""
        shelf, comm = self._shelf, self._comm
        counts = self._n_heads, self._n_keys, self._n_keys
        found = x.new_empty(*x.shape[:2], self._n_heads * self._width)
        for i, rows in enumerate(self._rows):
            qkv = F.linear(x.narrow(0, *rows), weight, bias).unflatten(2, (-1, self._width))
            q, k, v = send_tokens(comm, self._shapes(i), qkv.split(counts, dim=2))
            q, k, v = self._turn(q, i), self._spread(self._turn(k, i)), self._spread(v)
            q, k, v = map(_heads_first, (q, k, v))
            waiting = _Waiting(*map(shelf.put, (q, k, v)))
            self._waiting.append(waiting)
            out, log_sum = self._attend(q, i)
            if self._keeps:
                self._out.append(shelf.put(out))
                self._log_sum.append(log_sum)
            local = send_heads(comm, self._shapes(i), _tokens_first(out))
            found.narrow(0, *rows).copy_(local.flatten(2))
        if not self._keeps:
            self._waiting.clear()
        return found

    def _attend(self, q: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of chunk ``i``'s queries to the keys of all chunks up to ``i``: (out, log_sum [batch, heads,
        tokens]).
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        groups = q.shape[0] * q.shape[1]
        out = q.new_zeros((groups, *q.shape[2:]), dtype=wide)
        log_sum = out.new_full(out.shape[:2], -math.inf)
        rows = ((self._waiting[j].k, self._waiting[j].v) for j in range(i + 1))
        for j, (k, v) in enumerate(self._shelf.walk(rows)):
            part, part_log_sum = block_attention(q, k, v, scale=self._scale, is_causal=i == j)
            merge_(out, log_sum, part.flatten(0, 1), part_log_sum.flatten(0, 1).to(wide), 0)
        return out.view(q.shape).to(q.dtype), log_sum.view(q.shape[:3])

    def backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, has_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gradients of x, weight and bias, for ``grad`` of the output of ``forward``."""
        shelf, comm = self._shelf, self._comm
        wide = torch.promote_types(x.dtype, torch.float32)
        n = len(self._chunks)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=wide)
        grad_bias = grad_weight.new_zeros(weight.shape[0]) if has_bias else None
        grad_out: list[ShelvedChunk] = []
        for i, rows in enumerate(self._rows):
            local = grad.narrow(0, *rows).unflatten(2, (self._n_heads, self._width))
            grad_out.append(shelf.put(_heads_first(return_heads(comm, self._shapes(i), local))))
        grad_q: list[ShelvedChunk | None] = [None] * n
        for j in range(n):
            k, v = shelf.get(self._waiting[j].k), shelf.get(self._waiting[j].v)
            grad_k, grad_v = (torch.zeros_like(each, dtype=wide) for each in (k, v))
            rows = ((self._waiting[i].q, self._out[i], grad_out[i]) for i in range(j, n))
            for i, (q, out, of_out) in enumerate(shelf.walk(rows), j):
                log_sum = self._log_sum[i].to(torch.promote_types(q.dtype, torch.float32))
                found = block_attention_backward(of_out, q, k, v, out, log_sum, scale=self._scale, is_causal=i == j)
                of_q = found[0].to(wide)
                if grad_q[i] is not None:
                    of_q = of_q + shelf.get(grad_q[i])
                grad_q[i] = shelf.put(of_q)
                grad_k += found[1]
                grad_v += found[2]
            of_q, grad_q[j] = shelf.get(grad_q[j]), None
            of_q, of_k, of_v = (_tokens_first(each.to(x.dtype)) for each in (of_q, grad_k, grad_v))
            of_q, of_k = self._turn(of_q, j, back=True), self._turn(self._collect(of_k), j, back=True)
            local = torch.cat(return_tokens(comm, self._shapes(j), (of_q, of_k, self._collect(of_v))), dim=2).flatten(2)
            grad_x.narrow(0, *self._rows[j]).copy_(local @ weight)
            flat = local.flatten(0, 1)
            grad_weight += flat.mT @ x.narrow(0, *self._rows[j]).flatten(0, 1)
            if grad_bias is not None:
                grad_bias += flat.sum(0)
        return grad_x, grad_weight.to(weight.dtype), None if grad_bias is None else grad_bias.to(weight.dtype)


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _AttentionCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.call = call, bias is not None
        ctx.save_for_backward(x, weight)
        return call.forward(x, weight, bias)

    @staticmethod
    @first_derivative_only("FPDT attention")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, has_bias = ctx.call
        return (None, *call.backward(grad, *ctx.saved_tensors, has_bias))


class FPDT_Attention(torch.nn.Module):
    """Causal self-attention with its two linear layers, over chunks of a sequence that is cut over ranks.

    config: has hidden_size, kv_channels (the width of a head), num_attention_heads, num_key_value_heads (which divides
    the number of heads) and attention_dropout. The number of ranks need not divide either number of heads, but each
    rank needs a query head. first_weight: [(heads + 2 key heads) * width, hidden], queries, keys, values. first_bias:
    its bias, or None. second_weight: [hidden, heads * width]. second_bias: [hidden], or None. sequence_process_group:
    the ranks that the sequence is cut over, in the way of ``FPDT_InputConstruct``. gather_idx, scatter_idx: 0 and 2,
    because tokens are the first dimension of the input. return_bias: the second bias is returned, and not added.
    chunk_size: tokens of a chunk, over all ranks. enable_offloading: chunks wait in host memory or, if ``nvme_path`` is
    given, in a file without a name there.

    Raises ConfigError for numbers that do not fit, and for dropout in training, which is not applied to chunks.
    """

    def __init__(
        self,
        config: Any,
        first_weight: torch.Tensor,
        first_bias: torch.Tensor | None,
        second_weight: torch.Tensor,
        second_bias: torch.Tensor | None,
        sequence_process_group: Any,
        gather_idx: int = 0,
        scatter_idx: int = 2,
        return_bias: bool = True,
        chunk_size: int = 65536,
        enable_offloading: bool = True,
        *,
        nvme_path: str | None = None,
    ) -> None:
        super().__init__()
        _check_chunk_size(chunk_size, "FPDT_Attention")
        if (gather_idx, scatter_idx) != (0, 2):
            raise ConfigError(
                f"gather_idx is {gather_idx} and scatter_idx {scatter_idx}",
                where="FPDT_Attention",
                fix="give tokens in dimension 0 and heads in dimension 2: gather_idx=0, scatter_idx=2",
            )
        self.width = config.kv_channels
        self.n_heads, self.n_keys = config.num_attention_heads, config.num_key_value_heads
        rows = (self.n_heads + 2 * self.n_keys) * self.width
        expected = (rows, config.hidden_size), (config.hidden_size, self.n_heads * self.width)
        found = _shape_of(first_weight), _shape_of(second_weight)
        if found != expected:
            raise ConfigError(
                f"the weights have the shapes {found[0]} and {found[1]}; {self.n_heads} heads and {self.n_keys} key"
                f" heads of {self.width} make it {expected[0]} and {expected[1]}",
                where="FPDT_Attention",
                fix="give weights that fit num_attention_heads, num_key_value_heads, kv_channels and hidden_size",
            )
        self.qkv_linear_weight, self.qkv_linear_bias = first_weight, first_bias
        self.qkv_dense_weight, self.qkv_dense_bias = second_weight, second_bias
        self.return_bias, self.chunk_size, self.dropout = return_bias, chunk_size, config.attention_dropout
        self.enable_offloading, self.nvme_path = enable_offloading, nvme_path
        self._comm = Collectives(sequence_process_group)
        plan_heads(self.n_heads, self.n_keys, self._comm.world_size, self._comm.rank)  # refuses heads that do not fit

    def forward(
        self,
        layernorm_output: torch.Tensor,
        attention_mask: torch.Tensor | None,
        inference_params: Any,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None,
        cpu_offloading: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns (output [tokens of this rank, batch, hidden], the bias to add to the output, or None).

        layernorm_output: [tokens of this rank, batch, hidden]. rotary_pos_emb: (cos, sin), each [tokens of the
        sequence, 1, 1, rotated width]. cpu_offloading: False keeps all chunks on the device. Collective.
        Raises ConfigError for a mask, for inference, and where a rank has another number of tokens than in the chunks.
        """
        x = layernorm_output
        for name, value in (("attention_mask", attention_mask), ("inference_params", inference_params)):
            if value is not None:
                raise ConfigError(
                    f"{name} is a {type(value).__name__}",
                    where="FPDT_Attention",
                    fix="give None: chunked attention is causal, for training, and has no mask of another kind",
                )
        if self.dropout and self.training:
            raise ConfigError(
                f"attention_dropout is {self.dropout}", where="FPDT_Attention", fix="set it to 0: chunks have none"
            )
        chunks = self._lay_out(x.shape[0])
        angles = None if rotary_pos_emb is None else _Rotary(*rotary_pos_emb)
        if angles is not None and min(angles.cos.shape[0], angles.sin.shape[0]) < chunks.n_tokens:
            raise ConfigError(
                f"rotary_pos_emb has {angles.cos.shape[0]} positions for {chunks.n_tokens} tokens",
                where="FPDT_Attention",
                fix="give cos and sin for the whole sequence, on every rank",
            )
        parks = cpu_offloading and self.enable_offloading and len(chunks) > 1
        shelf = Shelf(x.device, self.nvme_path) if parks else Shelf(x.device, copies_of=lambda _: None)
        params = [p for p in (x, self.qkv_linear_weight, self.qkv_linear_bias) if p is not None]
        keeps = torch.is_grad_enabled() and any(p.requires_grad for p in params)
        heads = self.n_heads, self.n_keys, self.width
        call = _AttentionCall(self._comm, heads, chunks, angles, shelf, keeps=keeps)
        # Cast outside, because autocast is off in a backward.
        operands = cast_by_autocast(x, self.qkv_linear_weight, self.qkv_linear_bias)
        output = _ChunkedAttention.apply(call, *operands)
        output = F.linear(output, self.qkv_dense_weight, None if self.return_bias else self.qkv_dense_bias)
        return output, self.qkv_dense_bias if self.return_bias else None

    def _lay_out(self, n_local: int) -> _Chunks:
        """The chunks of this batch. Collective: ranks gather their numbers of tokens."""
        comm = self._comm
        tokens = [int(n) for n in comm.gather_numbers(n_local, label="tokens of each rank")]
        chunks = _Chunks(sum(tokens), self.chunk_size, comm.world_size)
        wanted = [chunks.local_tokens(rank) for rank in range(comm.world_size)]
        if tokens != wanted:
            raise ConfigError(
                f"the ranks have {tokens} tokens; {chunks.n_tokens} in chunks of {self.chunk_size} make it {wanted}",
                where="FPDT_Attention",
                fix="cut the batch with FPDT_InputConstruct, and the same chunk size",
            )
        return chunks


def _shape_of(weight: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``weight``, even if ZeRO stage 3 has released it."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


class FPDT_FFN:
    """Two linear layers with a GELU (tanh approximation) between them, computed chunk by chunk."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        add_bias: bool,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns (output like x, b2 if it still has to be added, otherwise None).

        x: [tokens, batch, hidden]; the last chunk of ``chunk_size`` tokens may be shorter. w1: [inner, hidden]. w2:
        [hidden, inner]. The backward runs each chunk again, and leaves ``x`` unchanged. Raises ConfigError for a chunk
        size below 1.
        """
        _check_chunk_size(chunk_size, "FPDT_FFN")
        given = {"w1": w1, "b1": b1, "w2": w2, "b2": b2 if add_bias else None}

        def mlp(tiles: list[torch.Tensor], weights: dict[str, torch.Tensor | None]) -> torch.Tensor:
            inner = F.gelu(F.linear(tiles[0], weights["w1"], weights["b1"]), approximate="tanh")
            return F.linear(inner, weights["w2"], weights["b2"])

        lengths = tile_lengths(x.shape[0], max(1, math.ceil(x.shape[0] / chunk_size)))
        return in_tiles(mlp, [x], given, lengths, "FPDT_FFN"), None if add_bias else b2


class FPDT_LogitsLoss:
    """The loss of every token of a sequence that is cut over ranks. The logits exist for one chunk at a time."""

    @staticmethod
    def apply(
        lm_output: torch.Tensor,
        labels: torch.Tensor,
        logit_weights: torch.Tensor,
        rank: int,
        spg_size: int,
        spg: Any,
        num_chunk: int,
    ) -> torch.Tensor:
        """Return losses [all tokens, batch], float32 (float64 of float64), rank after rank.

        lm_output: [tokens of this rank, batch, hidden]. labels: int64 [batch, tokens of this rank]; -100 gives loss 0.
        logit_weights: [vocab_size, hidden]. rank, spg_size: those of ``spg``. num_chunk: number of chunks into which
        this rank's tokens are cut. The backward computes logits again, chunk by chunk. Collective.

        Raises ConfigError if ``rank`` is not this rank's in the group, ModelError and IndexError for labels that do not
        fit, and RankMismatchError on the ranks whose labels fit.
        """
        where = "FPDT_LogitsLoss"
        comm = Collectives(spg, is_alone=spg_size == 1)
        if (comm.rank, comm.world_size) != (rank, spg_size):
            raise ConfigError(
                f"this is rank {comm.rank} of {comm.world_size} in the group, and not {rank} of {spg_size}",
                where=where,
                fix="give the rank and the size of spg",
            )

        def chunk_losses(tiles: list[torch.Tensor], weights: dict[str, torch.Tensor | None]) -> torch.Tensor:
            logits = F.linear(tiles[0].flatten(0, 1), weights["logit_weights"])
            return row_losses(logits, tiles[1].reshape(-1), is_spent=True).view(tiles[1].shape)

        def losses() -> torch.Tensor:
            vocab_size = _shape_of(logit_weights)[0]
            if labels.dtype is not torch.int64 or labels.shape != lm_output.shape[1::-1]:
                raise ModelError(
                    f"labels are {labels.dtype} {tuple(labels.shape)} for the shape {tuple(lm_output.shape)}",
                    where=where,
                    fix="give int64 labels [batch, tokens] for an output [tokens, batch, hidden]",
                )
            wrong = labels[(labels != -100) & ((labels < 0) | (labels >= vocab_size))]
            if wrong.numel():
                raise IndexError(f"{where}: label {int(wrong[0])} is not in the vocabulary of {vocab_size}")
            lengths = tile_lengths(lm_output.shape[0], num_chunk)
            return in_tiles(chunk_losses, [lm_output, labels.t()], {"logit_weights": logit_weights}, lengths, where)

        return gathered_losses(losses, (lm_output.shape[0], lm_output.shape[1]), comm, where)
