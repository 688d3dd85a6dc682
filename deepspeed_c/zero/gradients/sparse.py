"""Sums embedding gradients over ranks by exchanging only the rows that were touched (``sparse_gradients``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_c.comm.collectives import Collectives

__all__ = ["sparse_sum"]


def sparse_sum(grads: Sequence[torch.Tensor], comm: Collectives) -> None:
    """Replaces each of ``grads`` ([rows, ...], dense storage, mostly zero rows) by its sum over all ranks, in place.

    Ranks may have touched different numbers of rows. Contributions are added in rank order, so that every rank gets
    the same bits.
    """
    if comm.world_size == 1:
        return
    for grad in grads:
        if grad.numel() == 0:
            continue
        rows = grad.view(grad.shape[0], -1)
        touched = (rows != 0).any(dim=1).nonzero().view(-1)
        n_touched = comm.gather_numbers(touched.numel())
        widest = max(n_touched)
        if widest == 0:
            continue
        index = torch.zeros(widest, dtype=torch.int64, device=grad.device)
        index[: touched.numel()] = touched
        value = torch.zeros(widest, rows.shape[1], dtype=grad.dtype, device=grad.device)
        value[: touched.numel()] = rows[touched]
        all_index = comm.all_gather_list(index)
        all_value = comm.all_gather_list(value)
        rows.zero_()
        for n, i, v in zip(n_touched, all_index, all_value):
            rows.index_add_(0, i[:n], v[:n])
