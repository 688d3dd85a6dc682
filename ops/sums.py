"""Sums whose bits do not depend on the number of ranks: sums of tensors in a binary tree, and exact sums of squares.

The operators have kernels for tensors of the host. On other devices ``sums_reference`` computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_c import _C  # noqa: F401  (registers the operators)
from deepspeed_c.ops import sums_reference as reference
from deepspeed_c.ops.sums_reference import LOWEST_EXPONENT, N_LIMBS, n_levels

__all__ = [
    "LOWEST_EXPONENT",
    "N_LIMBS",
    "exact_squares",
    "limbs_of",
    "n_levels",
    "tree_push_",
    "tree_sum_",
    "value_of_limbs",
]


def tree_push_(levels: Sequence[Tensor], n_before: int, leaves: Sequence[Tensor]) -> None:
    """Push ``leaves`` in order onto the tree of ``n_before`` leaves that lies in ``levels``.

    While the two newest nodes of the tree cover as many leaves as each other, they are merged: older + newer, in
    float32. So level l holds a node of 2^l leaves if bit l of the number of leaves is set, and the additions depend on
    that number alone, not on the division of leaves into calls.

    levels: float32 [n], at least ``n_levels(n_before + len(leaves))``. leaves: float32, bfloat16 or float16 [n], which
    stay as they are. All are contiguous and on one device, and no level overlaps another tensor. ValueError for others,
    with nothing written.
    """
    torch.ops.deepspeed_c.tree_push_(levels, n_before, leaves)
    torch.autograd.graph.increment_version(levels)


def tree_sum_(out: Tensor, levels: Sequence[Tensor], n_leaves: int, *, scale: float = 1.0) -> None:
    """out = scale * (the sum of the tree of ``n_leaves`` leaves, at least 1), in float32, rounded once to out's dtype.

    Nodes are added from the newest to the oldest: sum = older + sum. ``scale`` is rounded to float32. Levels stay as
    they are. out: float32, bfloat16 or float16 [n], contiguous; levels as for `tree_push_`. ValueError for others.
    """
    torch.ops.deepspeed_c.tree_sum_(out, levels, n_leaves, scale)
    torch.autograd.graph.increment_version(out)


def exact_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The exact sum of the squares of all finite elements of float32, bfloat16 or float16 tensors on one device.

    Returns int64 [N_LIMBS + 1]: limbs in [0, 2**32), then the number of non-finite elements. The value is the sum over
    i of ``limbs[i] * 2**(32 * i + LOWEST_EXPONENT)``. Nothing is rounded. Limbs of parts may be added in any order, as
    integers or in float64 (below 2**53): `value_of_limbs` gives the same number for the sums as for the whole.
    ValueError for other dtypes, and for tensors of the host with gaps.
    """
    return torch.ops.deepspeed_c.flat_exact_squares(tensors)


def limbs_of(value: float) -> list[float]:
    """The limbs of one number, which may be negative: whole numbers with the sign of ``value``.

    Bits of ``value`` below 2**LOWEST_EXPONENT are dropped; float32, bfloat16 and float16 have none. All limbs are NaN
    if ``value`` is not finite or not below 2**342 in magnitude.
    """
    if not abs(value) < 2.0 ** (32 * N_LIMBS + LOWEST_EXPONENT):
        return [math.nan] * N_LIMBS
    units = int(math.ldexp(abs(value), -LOWEST_EXPONENT))
    return [math.copysign(float(units >> 32 * i & 0xFFFFFFFF), value) for i in range(N_LIMBS)]


def value_of_limbs(limbs: Sequence[float | int]) -> float:
    """The number with these limbs, or sums of limbs: added as integers, and rounded once. NaN if a limb is NaN."""
    if any(math.isnan(limb) for limb in limbs):
        return math.nan
    units = sum(int(limb) << 32 * i for i, limb in enumerate(limbs))
    return math.ldexp(float(units), LOWEST_EXPONENT)


def _fake_in_place(*arguments: object) -> None:
    """The operator writes to its arguments, and fake tensors have no data."""


def _fake_exact_squares(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(N_LIMBS + 1, dtype=torch.int64)


_LIBRARY = torch.library.Library("deepspeed_c", "FRAGMENT")
for _name, _formula, _fake in (
    ("tree_push_", reference.tree_push_, _fake_in_place),
    ("tree_sum_", reference.tree_sum_, _fake_in_place),
    ("flat_exact_squares", reference.exact_squares, _fake_exact_squares),
):
    _LIBRARY.impl(_name, _formula, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _fake, "Meta")
