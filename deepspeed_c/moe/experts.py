"""The experts of one layer that this rank holds, and the base of layers whose experts are spread over ranks."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ModelError

__all__ = ["Experts", "SpreadLayer"]


class SpreadLayer(nn.Module, ABC):
    """A layer whose experts are spread over ranks. ``connect_experts`` finds the layers of a model by this class.

    Args:
        ep_size: number of ranks that hold the experts together.
    """

    num_local_experts: int
    """Experts of this rank."""
    exp_counts: torch.Tensor | None = None
    """Tokens of each expert in the last forward, before any was dropped: int64 [experts of all ranks]."""
    kept_counts: torch.Tensor | None = None
    """The same, of the tokens that were not dropped."""

    _name = "MoE"

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.ep_size = ep_size

    @abstractmethod
    def connect(self, ep: Collectives) -> None:
        """Take the ranks that hold the experts together, this rank among them: ``ep_size`` ranks."""

    @property
    def name(self) -> str:
        """The layer's name in errors and in the labels of its collectives."""
        return self._name

    def rename(self, name: str) -> None:
        """Give the layer another name, the same on all ranks."""
        self._name = name


class Experts(nn.Module):
    """``num_local_experts`` copies of ``expert``, with the same values at first.

    Each parameter of an expert has DeepSpeed's marks: ``allreduce`` is False, and ``group_name`` is
    ``expert_group_name``.
    """

    runs_every_expert = True
    """So weights that are sharded are gathered one expert after the other, in the same order on all ranks."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        self.first_expert = 0
        """Number of the first of these experts among all experts of the layer; 0 until the layer has ranks."""
        self._group_name = expert_group_name
        self.mark()

    def mark(self) -> None:
        """Marks the parameters as experts'. Call it again for parameters that were added later, by LoRA say."""
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False
            param.group_name = self._group_name

    def number_from(self, first_expert: int) -> None:
        """Number these experts from ``first_expert`` on."""
        self.first_expert = first_expert

    def forward(self, inputs: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Run each expert on its part of ``inputs``, also where the part is empty: so every parameter has a gradient,
        and ranks with sharded weights gather in step.

        counts: rows of each expert, for ``inputs`` [rows, hidden] in the order of experts. Without counts, ``inputs``
        [ranks, experts * places, ..., hidden] are cut into equal parts along dimension 1, as in DeepSpeed.
        """
        dim = 1 if counts is None else 0
        parts = inputs.tensor_split(self.num_local_experts, 1) if counts is None else inputs.split(list(counts))
        outputs = []
        for number, (part, expert) in enumerate(zip(parts, self.deepspeed_experts, strict=True), self.first_expert):
            output = expert(part)
            if isinstance(output, tuple):
                output = output[0]
            if output.shape[: dim + 1] != part.shape[: dim + 1]:
                raise ModelError(
                    f"expert {number} returned {tuple(output.shape)} for {tuple(part.shape)}",
                    where="MoE",
                    fix="use an expert that returns one row for each row, or a tuple that begins with such a tensor",
                )
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim)
