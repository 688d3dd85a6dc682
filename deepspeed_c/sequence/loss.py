"""Cross-entropy of long sequences. No rank ever has the logits of all tokens; in tiles, it has only some of its own
tokens' logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ModelError, RankMismatchError
from deepspeed_c.ops import cross_entropy
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.sequence.tiles import IGNORED, loss_in_tiles, tile_lengths

RowLosses = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(logits [n, ...], targets [n], ignore_index) -> [n], 0 where the target is ignored"""

__all__ = [
    "RowLosses",
    "gathered_losses",
    "ranks_of_gathered_losses",
    "row_losses",
    "tiled_cross_entropy",
    "vocab_sequence_parallel_cross_entropy",
]


def _check_targets(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, ignore_index: int, where: str) -> None:
    if targets.dtype is not torch.int64 or targets.shape != logits.shape[:-1]:
        raise ModelError(
            f"targets are {targets.dtype} {tuple(targets.shape)} for logits of the shape {tuple(logits.shape)}",
            where=where,
            fix="give int64 targets, one for each row of logits",
        )
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))]
    if wrong.numel():
        raise IndexError(f"{where}: target {int(wrong.flatten()[0])} is not in the vocabulary of {vocab_size}")


class _RowLosses(torch.autograd.Function):
    """-log softmax of each row's logits, at the row's target.

    vocab: the ranks that the vocabulary is cut over; None: this rank has the whole vocabulary. is_spent: the backward
    may write the gradient into the memory of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        ignore_index: int,
        smoothing: float,
        is_spent: bool,
        vocab: Collectives | None,
        sizes: list[int],
    ) -> torch.Tensor:
        rank = 0 if vocab is None else vocab.rank
        is_counted = targets != ignore_index
        # A target on a later rank has an index above this rank's columns, a target on an earlier rank an index below 0.
        here = torch.where(is_counted, targets - sum(sizes[:rank]), -1)
        rows = cross_entropy.rows(logits.contiguous(), here)
        parts = [rows] if vocab is None else vocab.all_gather_list(rows, label="cross-entropy")
        log_sum, at_target, total = cross_entropy.join(parts)
        loss = log_sum - (1 - smoothing) * at_target
        if smoothing:
            loss = loss - smoothing * total / sum(sizes)
        ctx.save_for_backward(logits, here, log_sum, is_counted)
        ctx.call = smoothing, sum(sizes), is_spent
        return torch.where(is_counted, loss, 0.0)

    @staticmethod
    @first_derivative_only("a vocabulary-parallel loss")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, here, log_sum, is_counted = ctx.saved_tensors
        smoothing, vocab_size, is_spent = ctx.call
        scale = torch.where(is_counted, grad.to(log_sum.dtype), 0.0).contiguous()
        found = logits.contiguous()
        if found.data_ptr() == logits.data_ptr() and not is_spent:
            found = logits.clone(memory_format=torch.contiguous_format)
        cross_entropy.grad_(found, here, log_sum, scale, smoothing, vocab_size)
        return (found, *[None] * 6)


def row_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    is_spent: bool = False,
) -> torch.Tensor:
    """The loss of each row: float32 [n] (float64 of float64), 0 where the target is ``ignore_index``.

    logits: [n, vocab_size]. targets: int64 [n]. is_spent: the logits are not read again, so the backward may write
    their gradient into their memory.
    """
    return _RowLosses.apply(logits, targets, ignore_index, label_smoothing, is_spent, None, [logits.shape[-1]])


def tiled_cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    n_tiles: int,
    *,
    weights: Iterable[torch.Tensor] = (),
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    n_counted: torch.Tensor | float | None = None,
    is_spent: bool | None = None,
    losses: RowLosses | None = None,
) -> torch.Tensor:
    """The cross-entropy of ``head(hidden)`` as one number, float32. Its logits exist for one tile at a time.

    head: maps some rows of hidden to their logits. is_spent: the backward of ``head`` does not read the logits, so
    their gradient may be written into their memory; None: true if ``head`` is a ``Linear``. hidden: [..., width].
    targets: int64 [...]. weights: the parameters of ``head``, which ZeRO stage 3 gathers once for all tiles. n_counted:
    the divisor of the sum; None: the number of targets that are not ``ignore_index``, at least 1. losses: a function
    for the loss of each row, if ``head`` returns the logits of a part of the vocabulary; labels are not smoothed then.

    Raises ModelError for shapes that do not fit, IndexError for a target outside the vocabulary.
    """
    is_spent = type(head) is torch.nn.Linear if is_spent is None else is_spent
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if wanted.shape[0] != rows.shape[0]:
        raise ModelError(
            f"{tuple(targets.shape)} targets for the shape {tuple(hidden.shape)}",
            where="a loss in tiles",
            fix="give a target for each token",
        )

    def sum_of(tiles: list[torch.Tensor]) -> torch.Tensor:
        logits = head(tiles[0])
        if losses is not None:
            return losses(logits, tiles[1], ignore_index).sum()
        _check_targets(logits, tiles[1], logits.shape[-1], ignore_index, "a loss in tiles")
        found = row_losses(
            logits, tiles[1], ignore_index=ignore_index, label_smoothing=label_smoothing, is_spent=is_spent
        )
        return found.sum()

    lengths = tile_lengths(rows.shape[0], n_tiles)
    total = loss_in_tiles(sum_of, [rows, wanted], lengths, None, weights, "a loss in tiles")
    if n_counted is None:
        n_counted = (wanted != ignore_index).sum().clamp(min=1)
    elif torch.is_tensor(n_counted):
        n_counted = n_counted.to(total.device)
    return total / n_counted


def _gather_rows(part: torch.Tensor, sizes: list[int], comm: Collectives, label: str) -> torch.Tensor:
    """The ``part`` of all ranks, one after the other. Rank i's part has ``sizes[i]`` rows. The result is not in the
    graph.
    """
    if comm.world_size == 1:
        return part.clone()
    padded = F.pad(part, [0] * (2 * part.dim() - 1) + [max(sizes) - part.shape[0]]).contiguous()
    found = comm.all_gather_list(padded, label=label)
    return torch.cat([each.narrow(0, 0, size) for each, size in zip(found, sizes)])


class _GatherLosses(torch.autograd.Function):
    """Gathers the losses of all ranks on each rank. Every rank computes the same number from them, so a rank's gradient
    is its own part of the result's gradient.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, sizes: list[int], comm: Collectives) -> torch.Tensor:
        ctx.call, ctx.ranks = (sum(sizes[: comm.rank]), part.shape[0]), tuple(comm.global_ranks)
        return _gather_rows(part, sizes, comm, "losses of all tokens")

    @staticmethod
    @first_derivative_only("losses gathered over sequence ranks")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad.narrow(0, *ctx.call), None, None


def ranks_of_gathered_losses(node: Any) -> tuple[int, ...]:
    """The ranks that ``node`` of a graph gathers losses of, if it is the node of ``gathered_losses``; otherwise none.

    A loss behind the node is the same on all of these ranks, and its backward gives each rank its own term.
    """
    return node.ranks if getattr(type(node), "_forward_cls", None) is _GatherLosses else ()


def gathered_losses(
    compute: Callable[[], torch.Tensor], shape: tuple[int, int], comm: Collectives, where: str
) -> torch.Tensor:
    """Gather the losses that ``compute`` returns on each rank. shape: [tokens, batch] on this rank. Returns [all
    tokens, batch].

    An error on one rank raises on all ranks.
    """
    problem: Exception | None = None
    losses = None
    try:
        losses = compute()
    except (ModelError, IndexError) as error:
        problem = error
    told = [0.0] * (2 * comm.world_size)
    told[2 * comm.rank : 2 * comm.rank + 2] = map(float, (-1, -1) if problem else shape)
    told = comm.sum_numbers(told, label="tokens of each rank")
    if problem is not None:
        raise problem
    sizes, batches = [int(n) for n in told[::2]], [int(n) for n in told[1::2]]
    if min(sizes) < 0:
        raise RankMismatchError(
            f"rank {sizes.index(-1)} of {comm.world_size} has refused its targets or logits",
            where=where,
            fix="look at that rank's exception",
        )
    if len(set(batches)) > 1:
        raise RankMismatchError(
            f"ranks have batches of {batches} sequences", where=where, fix="cut the same batch over all of the ranks"
        )
    return _GatherLosses.apply(losses, sizes, comm)


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    sp_group: Any,
    *,
    vocab_group: Any = None,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """The loss of every token of a sequence that is cut over ranks: [all tokens, batch], the same on all ranks.

    vocab_parallel_logits: [tokens of this rank, batch, vocab_size]; the number of tokens may differ between ranks.
    target: int64 [tokens of this rank, batch]. Losses are float32 (float64 of float64), 0 where the target is
    ``ignore_index``. sp_group: the ranks that the tokens are cut over. vocab_group: the ranks that the vocabulary is
    cut over, in the order of the cut; None: each rank has all logits of its tokens. No rank ever holds more logits than
    it passes.

    Each rank's backward computes the gradient of its own tokens, so every rank must compute the same loss from the
    result. The backward may run several times (``retain_graph``).

    Collective. Raises ModelError for shapes and IndexError for targets that do not fit, and RankMismatchError on the
    other ranks. Raises RankMismatchError on all ranks where batches differ. All errors come before losses are
    exchanged.
    """
    where = "vocab_sequence_parallel_cross_entropy"
    comm = Collectives(sp_group)
    vocab = None if vocab_group is None else Collectives(vocab_group)
    logits = vocab_parallel_logits
    vocab_size = logits.shape[-1] if logits.dim() else 0
    sizes = (
        [vocab_size]
        if vocab is None
        else [int(n) for n in vocab.gather_numbers(vocab_size, label="columns of each rank's logits")]
    )

    def losses() -> torch.Tensor:
        if logits.dim() != 3:
            raise ModelError(
                f"logits have the shape {tuple(logits.shape)}",
                where=where,
                fix="give them as [tokens, batch, vocab_size]",
            )
        _check_targets(logits, target, sum(sizes), ignore_index, where)
        flat = logits.reshape(-1, vocab_size) if logits.numel() else logits.flatten(0, 1)
        found = _RowLosses.apply(flat, target.reshape(-1), ignore_index, 0.0, False, vocab, sizes)
        return found.view(target.shape)

    return gathered_losses(losses, tuple(target.shape) if target.dim() == 2 else (0, 0), comm, where)
