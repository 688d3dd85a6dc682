"""What a rank's loss is of the loss of the sequences that it holds a part of: gradients are summed over the ranks of a
sequence, so each rank's loss has to be its term of that sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.passes import nodes_between, nodes_of
from deepspeed_c.errors import StateError
from deepspeed_c.logging import log_dist

__all__ = ["LossShare", "Way"]

Way = Literal["auto", "mean", "part", "whole"]
"""mean: a rank's loss is the mean over its own valid tokens. part: it is a term of the sum over ranks already. whole:
it is that of whole sequences, by a collective whose backward adds up what all ranks ask for."""

IGNORED = -100
"""Labels of this value are no valid tokens: torch's and transformers' default."""

# Those of torch.distributed.nn.functional whose outcome is the same on all ranks: their backward adds up the gradients
# that all of them send back, and so counts one loss once a rank.
_WHOLE = {"_AllGatherBackward", "_AllReduceBackward", "_AllGatherBaseBackward"}
_AUTOGRAD = "torch.distributed.nn.functional"
# The same of torch's functional collectives. Torch derives the nodes' classes from the operators' names.
_WHOLE_OPS = tuple(f"GeneratedBackwardFor__c10d_functional_{op}_" for op in ("all_gather_into_tensor", "all_reduce"))


class LossShare:
    """Weighs the losses of one engine's micro-batches. ``way``: ``sequence_parallel.loss``."""

    def __init__(self, mesh: Mesh, way: Way) -> None:
        self._mesh, self._way = mesh, way
        self.is_needed = mesh.size("sp") > 1
        """Whether sequences are cut at all."""
        self._labels: torch.Tensor | None = None
        self._counts_tokens_itself = False
        self._ends: frozenset[Any] = frozenset()
        self._loss_node: Any = None
        self._is_whole_inside: bool | None = None  # of the model's own loss; found out once
        self._has_told = False

    def note(self, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Remembers a training forward: its labels, and where its outputs are in the graph."""
        labels = kwargs.get("shift_labels", kwargs.get("labels"))
        self._labels = labels if torch.is_tensor(labels) else None
        # transformers' models divide by it instead of their own count.
        self._counts_tokens_itself = kwargs.get("num_items_in_batch") is not None
        self._ends = nodes_of(tree_flatten(outputs)[0])
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        self._loss_node = loss.grad_fn if torch.is_tensor(loss) else None

    def forget(self) -> None:
        """Lets go of the forward's graph."""
        self._labels, self._ends, self._loss_node = None, frozenset(), None

    def weight(self, loss: torch.Tensor) -> float:
        """What ``loss`` is to be multiplied with. Collective over the ranks of a sequence.

        Raises StateError where ``sequence_parallel.loss`` is "mean" and the forward was given no labels.
        """
        way = self._way if self._way != "auto" else self._find_way(loss)
        if way == "part":
            return 1.0
        if way == "whole":
            return 1.0 / self._mesh.size("sp")
        if self._labels is None:
            raise StateError(
                "a mean over a rank's valid tokens is weighted by their number, and the forward was given no labels",
                where="engine.backward",
                fix="pass shift_labels=... (or labels=...) to engine(...), or weight the losses yourself and set"
                ' "sequence_parallel": {"loss": "part"}',
            )
        mine = int((self._labels != IGNORED).sum())
        total = sum(self._mesh.along("sp").gather_numbers(mine, label="valid tokens"))
        return mine / total if total else 0.0

    def _find_way(self, loss: torch.Tensor) -> Way:
        if loss.grad_fn is None:
            return "part"
        if loss.grad_fn is not self._loss_node:
            is_whole = any(map(self._is_whole, nodes_between([loss.grad_fn], self._ends)))
            way: Way = "whole" if is_whole else "part"
        else:
            if self._is_whole_inside is None:
                self._is_whole_inside = any(map(self._is_whole, nodes_between([loss.grad_fn])))
            is_mean = self._labels is not None and not self._counts_tokens_itself
            way = "whole" if self._is_whole_inside else "mean" if is_mean else "part"
        self._tell(way)
        return way

    def _is_whole(self, node: Any) -> bool:
        group = _group_of(node)
        if group is None:
            return False
        ranks = dist.get_process_group_ranks(group)
        return set(self._mesh.along("sp").global_ranks) <= set(ranks)

    def _tell(self, way: Way) -> None:
        """Once, how a loss was understood: a wrong scale of gradients hides behind Adam."""
        if self._has_told:
            return
        self._has_told = True
        meaning = {
            "mean": "the model's mean over this rank's tokens; it is weighted by their number",
            "whole": "that of whole sequences, gathered from all ranks; it is counted once",
            "part": "this rank's term of a sum over the ranks of a sequence",
        }
        # A sum of means looks the same, and only its author knows.
        level = logging.WARNING if way == "part" and self._labels is not None else logging.INFO
        log_dist(
            f"sequence parallelism: a rank's loss is taken as {meaning[way]}"
            ' ("sequence_parallel": {"loss": ...} says it)',
            ranks=[0],
            level=level,
        )


def _group_of(node: Any) -> dist.ProcessGroup | None:
    """The ranks of a collective whose outcome is the same on all of them; None where ``node`` is none."""
    name = type(node).__name__
    if name.startswith(_WHOLE_OPS):
        group = node.group_name
        return group if isinstance(group, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(group)
    function: Callable[..., Any] | None = getattr(type(node), "_forward_cls", None)
    if name not in _WHOLE or getattr(function, "__module__", "") != _AUTOGRAD:
        return None
    return node.group or dist.group.WORLD
