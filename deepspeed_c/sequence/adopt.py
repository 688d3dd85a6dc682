"""Sets up attention over ranks for an engine, from the section ``sequence_parallel``, the model and the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deepspeed_c.comm.axes import SP, TP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.sequence.collectives import ModelOrder, TokenOrder, bind_collectives
from deepspeed_c.sequence.huggingface import Registration, registration_of
from deepspeed_c.sequence.plans import plan_heads
from deepspeed_c.sequence.ring_huggingface import RingSPAttentionHF

__all__ = ["SharedAttention", "take_over_attention"]

_SECTION = "sequence_parallel"


class _AttentionWay(NamedTuple):
    is_ring: bool
    order: str
    n_inner: int
    """Number of ranks of a row, which exchange heads; 1 in a plain ring."""


class SharedAttention:
    """The cut of one engine's sequences over ranks and the attention over them, until ``close``."""

    def __init__(self, order: ModelOrder, registration: Registration | None) -> None:
        self._order, self._registration = order, registration

    def close(self) -> None:
        """Restore the functions of the model and of transformers. Batches are no longer cut in the model's order."""
        self._order.close()
        if self._registration is not None:
            self._registration.close()


def take_over_attention(
    model: torch.nn.Module, mesh: Mesh, section: Any, *, ranks_of_host: int
) -> SharedAttention | None:
    """Called when an engine is made over ``model``, whose sequences ``mesh`` cuts. If the model is registered, the
    engine takes its registration. A model of transformers without a registration gets one, with its own attention.
    Other models attend by ``DistributedAttention``. section: ``sequence_parallel``. ranks_of_host: processes of this
    job on one host. None where no sequence is cut.

    Raises ConfigError where ranks, heads and the section do not fit together.
    """
    if mesh.size(SP) == 1:
        return None
    comm = mesh.sequence
    found = registration_of(model, mesh.process_group(SP))
    if found is None:
        if section.attention in ("ring", "hybrid"):
            raise FeatureError(
                f"{section.attention!r} is for models of transformers, and the model is a {type(model).__name__}",
                where=f"{_SECTION}.attention",
                fix="call deepspeed_c.sequence.ring_attention in the model's own code, or leave the key out",
            )
        bind_collectives(comm)
        return SharedAttention(ModelOrder(model, mesh.process_group(SP), TokenOrder("contiguous", 1)), None)
    try:
        # Tensor-parallel ranks divide the heads, so each has a fraction of them.
        heads = (max(1, n // mesh.size(TP)) for n in found.heads)
        way = _choose(section, *heads, comm, ranks_of_host)
    except ConfigError:
        found.close()
        raise
    bind_collectives(comm)
    if way.is_ring:
        members = {"order": way.order, "n_inner": way.n_inner}
        found.attend_by(type(RingSPAttentionHF.__name__, (RingSPAttentionHF,), members))
    found.take(model)
    return SharedAttention(ModelOrder(model, mesh.process_group(SP), TokenOrder(way.order, way.n_inner)), found)


def _choose(section: Any, n_heads: int, n_key_heads: int, comm: Collectives, ranks_of_host: int) -> _AttentionWay:
    attention, n_ranks = section.attention, comm.world_size
    if attention == "auto":
        attention = "ulysses" if n_heads >= n_ranks else "hybrid"
    if attention == "ulysses":
        plan_heads(n_heads, n_key_heads, n_ranks, comm.rank)
        if section.order == "zigzag":
            raise ConfigError(
                "ranks that exchange heads have runs of tokens, and not one from each end",
                where=f"{_SECTION}.order",
                fix='leave it out, or use "attention": "ring" or "hybrid"',
            )
        return _AttentionWay(False, "contiguous", 1)
    order = "zigzag" if section.order == "auto" else section.order
    most = min(n_heads, ranks_of_host, n_ranks - 1) if attention == "hybrid" else 1
    return _AttentionWay(True, order, max(n for n in range(1, max(most, 1) + 1) if n_ranks % n == 0))
