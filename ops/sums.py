"""Sums whose bits do not depend on the number of ranks: sums of tensors in a binary tree.

The operators have kernels for tensors of the host. On other devices ``sums_reference`` computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_c import _C  # noqa: F401  (registers the operators)
from deepspeed_c.ops import sums_reference as reference
from deepspeed_c.ops.sums_reference import n_levels

__all__ = ["n_levels", "tree_push_", "tree_sum_"]


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


def _fake_in_place(*arguments: object) -> None:
    """The operator writes to its arguments, and fake tensors have no data."""


_LIBRARY = torch.library.Library("deepspeed_c", "FRAGMENT")
for _name, _formula, _fake in (
    ("tree_push_", reference.tree_push_, _fake_in_place),
    ("tree_sum_", reference.tree_sum_, _fake_in_place),
):
    _LIBRARY.impl(_name, _formula, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _fake, "Meta")
