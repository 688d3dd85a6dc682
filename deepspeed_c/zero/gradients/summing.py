"""How gradients are summed over ranks, and the factors that make the sums a mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from deepspeed_c.config.stages import Sharding

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Unit

__all__ = ["ReduceSettings", "Summing"]


class ReduceSettings(NamedTuple):
    """How gradients are reduced; each field is the configuration key of that name."""

    overlap_comm: bool = True
    reduce_scatter: bool = True
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    is_mean: bool = True  # gradient_allreduce_op
    accum_dtype: torch.dtype | None = None  # grad_accum_dtype; None: the parameters' dtype
    n_grains: int | None = None  # of a window, over all ranks, with same_bits; None without


class Summing(NamedTuple):
    """How the gradients of all buckets are summed over ranks. The product of the three factors makes a sum the mean
    over the data-parallel ranks, if a mean is wanted."""

    settings: ReduceSettings
    pre_factor: float  # of gradients, before they are summed
    post_factor: float = 1.0  # of sums, when they are made
    step_factor: float = 1.0  # of sums, in the optimizer's step
    n_ranks: int = 1  # that count in the mean

    @classmethod
    def make(cls, settings: ReduceSettings, sharding: Sharding, n_ranks: int) -> Summing:
        """n_ranks: the ranks that count in the mean. Tensor-parallel ranks do not: they have parts of one gradient, or
        the same gradient. Ranks that share a sequence do not either: their gradients are terms of one mean."""
        if settings.n_grains is not None:
            return cls(settings, 1.0, n_ranks=n_ranks)
        if settings.prescale_gradients:
            pre_factor, after = 1.0 / n_ranks, 1.0
        else:
            pre_factor = 1.0 / settings.gradient_predivide_factor if n_ranks > 1 else 1.0
            after = 1.0 / (pre_factor * n_ranks)
        if not settings.is_mean:
            after *= n_ranks
        # Sums of shards are averaged in the optimizer's single pass. Callers read whole gradients, so those are
        # averaged when they are summed.
        if sharding.optimizer:
            return cls(settings, pre_factor, step_factor=after, n_ranks=n_ranks)
        return cls(settings, pre_factor, post_factor=after, n_ranks=n_ranks)

    @property
    def is_in_tree(self) -> bool:
        """Whether sums are taken in a tree over the grains of a window. They are multiplied once, when the tree is
        complete, by the number that makes them a mean."""
        return self.settings.n_grains is not None

    def is_in_place(self, unit: Unit) -> bool:
        """Whether collected gradients of ``unit`` are their sum already. An expert that no other rank holds has nobody
        to sum with, but the factors of a mean over all data-parallel ranks apply to it as well."""
        return unit.sums_in_place and self.pre_factor == self.post_factor == 1.0 and not self.is_in_tree

    def dtype_of(self, unit: Unit) -> torch.dtype:
        """The dtype in which the summed gradients of ``unit`` are stored."""
        return self.settings.accum_dtype or unit.dtype
