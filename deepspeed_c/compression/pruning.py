"""Masks of pruned linear layers: single weights, rows, or attention heads.

Method "l1" measures magnitudes. It makes the mask when the technique starts, and keeps it in a buffer. Method "topk"
learns a score for each weight, row or head: the mask keeps the largest scores, and the gradient of the mask goes to the
scores unchanged (Sanh et al. 2020, Movement pruning: adaptive sparsity by fine-tuning).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from deepspeed_c.zero.weights.param import shape_of

if TYPE_CHECKING:
    from deepspeed_c.compression.basic_layer import LinearLayer_Compress

__all__ = ["Kind", "PruneRule", "Pruner", "keep_largest"]

Kind = Literal["sparse", "row", "head"]

# DeepSpeed's names of the scores.
_SCORES: dict[Kind, str] = {"sparse": "sparse_mask_scores", "row": "row_mask_scores", "head": "head_pruning_scores"}
_SEED = 0x3C6E_F372_0000_0000


@dataclass(frozen=True, kw_only=True)
class PruneRule:
    """How a linear layer is pruned by one technique."""

    kind: Kind
    method: Literal["l1", "topk"]
    dense_ratio: float
    """Part that is kept in the end."""
    first_step: int
    """Number of applied steps before it starts."""
    last_step: int
    """Number of applied steps after which ``dense_ratio`` is reached."""
    stride: int = 1
    """Steps between prunings on the way there."""
    n_of_m: tuple[int, int] | None = None
    """(n, m): n of each m neighbours in a row are kept, at each step. None: any weights."""
    num_heads: int = 0
    """Equal blocks of input columns, for heads."""
    index: int = 0
    """Number of the layer in the model: other first scores for each. All ranks count alike."""

    def due(self, step: int) -> int:
        """The last step up to ``step`` at which a mask is made. The technique has started."""
        if step >= self.last_step:
            return self.last_step
        return step - (step - self.first_step) % self.stride

    def density(self, step: int) -> float:
        """Part that a mask of a step keeps: a cubic curve down from 1 (Zhu and Gupta 2017, To prune, or not to prune)."""
        left = 0.0
        if step < self.last_step:
            left = 1 - (step - self.first_step) / (self.last_step - self.first_step)
        return self.dense_ratio + (1 - self.dense_ratio) * left**3

    def score_shape(self, weight: torch.Size) -> tuple[int, int]:
        """Shape of the mask and of the scores for a weight of this shape [rows, columns]."""
        return {"sparse": tuple(weight), "row": (weight[0], 1), "head": (1, self.num_heads)}[self.kind]


def keep_largest(values: Tensor, density: float, n_of_m: tuple[int, int] | None = None) -> Tensor:
    """A mask, True where values [rows, columns] are the largest. Of equal values the first ones are kept.

    density: part that is kept, rounded up to whole elements. n_of_m: see ``PruneRule``; density does not count then.
    """
    if n_of_m is None:
        groups, n_kept = values.reshape(1, -1), math.ceil(density * values.numel())
    else:
        groups, n_kept = values.reshape(-1, n_of_m[1]), n_of_m[0]
    order = groups.sort(dim=1, descending=True, stable=True).indices
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order[:, :n_kept], True)
    return mask.view(values.shape)


@dataclass
class Pruner:
    """One technique on one layer. Its tensors belong to the layer: ``*_scores`` is a parameter, ``*_pruning_mask`` and
    ``*_pruning_step`` are buffers, so that optimizers, ZeRO and checkpoints hold them."""

    rule: PruneRule
    _seen: tuple[Tensor, int, int] | None = field(default=None, init=False, compare=False, repr=False)
    """(buffer, its version, its value) when the step of the mask was read: reading waits for a device."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layer's tensors."""
        kind = self.rule.kind
        return (_SCORES[kind],) if self.rule.method == "topk" else (f"{kind}_pruning_mask", f"{kind}_pruning_step")

    def begin(self, layer: nn.Linear) -> None:
        """Give the layer the tensors."""
        rule, weight = self.rule, layer.weight
        shape = rule.score_shape(shape_of(weight))
        if rule.method == "topk":
            # All ranks draw the same, and the user's random numbers stay as they were. The range is DeepSpeed's.
            generator = torch.Generator().manual_seed(_SEED ^ rule.index)
            bound = 1 / math.sqrt(max(shape[1], 1))
            scores = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            layer.register_parameter(self.names[0], nn.Parameter(scores.to(weight.device, weight.dtype)))
        else:
            mask, step = self.names
            layer.register_buffer(mask, torch.ones(shape, dtype=torch.bool, device=weight.device))
            layer.register_buffer(step, torch.tensor(-1, device=weight.device))

    def fill(self, layer: nn.Linear, state_dict: dict[str, Any], prefix: str) -> None:
        """Add the layer's tensors to a state dict of the plain model, which has none."""
        for name in self.names:
            state_dict.setdefault(f"{prefix}{name}", getattr(layer, name))

    def is_on(self, step: int) -> bool:
        """Whether the schedule has reached the technique."""
        return step >= self.rule.first_step

    def mask(self, layer: LinearLayer_Compress, step: int) -> Tensor:
        """The mask for a step, in ``PruneRule.score_shape``: bool, or with a gradient that goes to the scores."""
        rule, due = self.rule, self.rule.due(step)
        if rule.method == "topk":
            scores = getattr(layer, self.names[0])
            kept = keep_largest(scores.detach(), rule.density(due), rule.n_of_m).to(scores.dtype)
            return kept + (scores - scores.detach())
        mask, made = (getattr(layer, name) for name in self.names)
        if self._read(made) < due:
            with torch.no_grad():
                layer.check_weight("load a checkpoint from before they came up")
                mask.copy_(keep_largest(self._magnitudes(layer.weight), rule.density(due), rule.n_of_m))
                made.fill_(due)
        return mask

    def _magnitudes(self, weight: Tensor) -> Tensor:
        if self.rule.kind == "row":
            return weight.float().abs().sum(1, keepdim=True)
        if self.rule.kind == "head":
            return weight.float().abs().view(len(weight), self.rule.num_heads, -1).sum((0, 2)).view(1, -1)
        return weight.abs()

    def _read(self, made: Tensor) -> int:
        if self._seen is None or self._seen[0] is not made or self._seen[1] != made._version:
            self._seen = made, made._version, int(made)
        return self._seen[2]

    def applied(self, mask: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) with the mask."""
        if self.rule.kind == "head":
            blocks = weight.view(len(weight), self.rule.num_heads, -1) * mask.unsqueeze(2)
            return blocks.view(weight.shape), bias
        if self.rule.kind == "row" and bias is not None:
            bias = bias * mask.view(-1)
        return weight * mask, bias
