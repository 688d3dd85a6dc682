"""The layers that a cut model has in place of its own: linear by columns and by rows, embedding by words.

They keep the parameters of the module that they replace, under the same names. ``Conv1D`` of GPT-2 keeps its weight
[in, out]; everything else has [out, in].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deepspeed_c.inject.ranks import DropoutRegion, TensorRanks

__all__ = ["EmbeddingLayer", "LinearAllreduce", "LinearLayer", "RowPicker"]


class LinearLayer(torch.nn.Module):
    """y = x W + b, of which this rank has some columns: x [..., in] on all ranks, y [..., columns of this rank].

    ``gathers``: y is put together on all ranks, [..., out]. ``picker``: the weight is whole on all ranks, and these
    columns are used of it.
    """

    def __init__(self, module: torch.nn.Module, ranks: TensorRanks, label: str, *, is_transposed: bool) -> None:
        super().__init__()
        self.weight, self.bias = module.weight, module.bias
        self.ranks, self.label, self.is_transposed = ranks, label, is_transposed
        self.sizes: list[int] | None = None
        self.picker: RowPicker | None = None
        self.region: DropoutRegion | None = None
        self.train(module.training)

    @property
    def in_features(self) -> int:
        return self.weight.shape[0 if self.is_transposed else 1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1 if self.is_transposed else 0]

    def gather_output(self, sizes: list[int] | None) -> None:
        """The columns of all ranks are put together. sizes: of each rank; None: they stay apart."""
        self.sizes = sizes

    def pick(self, picker: RowPicker) -> None:
        """The weight stays whole, and this rank's columns are picked at each use."""
        self.picker = picker

    def draw_apart(self, region: DropoutRegion) -> None:
        """Random numbers behind this layer are the rank's own until ``region`` ends."""
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ranks.enter(x, self.label)
        weight, bias = self.weight, self.bias
        if self.picker is not None:
            weight = self.picker.pick(weight, 1 if self.is_transposed else 0)
            bias = None if bias is None else self.picker.pick(bias, 0)
        y = F.linear(x, weight.t() if self.is_transposed else weight, bias)
        if self.sizes is not None:
            return self.ranks.gather(y, self.sizes, self.label)
        if self.region is not None and self.training:
            self.region.enter(y.device)
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class LinearAllreduce(torch.nn.Module):
    """y = x W + b, of which this rank has some rows: x [..., rows of this rank], y [..., out] the sum over ranks.

    The bias is whole and added once, to the sum. ``splits``: x is whole on all ranks, and this rank takes its part.
    """

    def __init__(self, module: torch.nn.Module, ranks: TensorRanks, label: str, *, is_transposed: bool) -> None:
        super().__init__()
        self.weight, self.bias = module.weight, module.bias
        self.ranks, self.label, self.is_transposed = ranks, label, is_transposed
        self.part: tuple[int, int] | None = None
        self.region: DropoutRegion | None = None
        self.train(module.training)

    @property
    def in_features(self) -> int:
        return self.weight.shape[0 if self.is_transposed else 1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1 if self.is_transposed else 0]

    def split_input(self, begin: int, end: int) -> None:
        """The input is whole; this rank takes [begin, end) of its last dimension."""
        self.part = (begin, end)

    def draw_apart(self, region: DropoutRegion) -> None:
        """Random numbers that are the rank's own end before this layer."""
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.region is not None:
            self.region.leave(x.device)
        if self.part is not None:
            x = self.ranks.split(x, *self.part, self.label)
        y = self.ranks.leave(F.linear(x, self.weight.t() if self.is_transposed else self.weight), self.label)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class EmbeddingLayer(torch.nn.Module):
    """Rows of a table of words, of which this rank has the words [begin, end): ids of any shape to [*ids, width]."""

    def __init__(self, module: torch.nn.Embedding, ranks: TensorRanks, label: str, begin: int, end: int) -> None:
        super().__init__()
        self.weight = module.weight
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.padding_idx = module.padding_idx
        self.ranks, self.label, self.begin, self.end = ranks, label, begin, end
        self.train(module.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        is_elsewhere = (ids < self.begin) | (ids >= self.end)
        if self.begin == self.end:
            # No word is here; the gradient is as empty as the weight.
            found = self.weight.new_zeros((*ids.shape, self.embedding_dim)) + self.weight.sum()
        else:
            padding = None if self.padding_idx is None else self.padding_idx - self.begin
            if padding is not None and not 0 <= padding < self.end - self.begin:
                padding = None
            found = F.embedding((ids - self.begin).masked_fill(is_elsewhere, 0), self.weight, padding)
            found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        return self.ranks.leave(found, self.label)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, words=[{self.begin}, {self.end})"


class RowPicker:
    """Runs of one dimension: what a rank computes with, of a parameter that it holds whole."""

    def __init__(self, runs: list[tuple[int, int]]) -> None:
        """runs: (begin, elements), in order."""
        self.runs = runs

    def pick(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """These elements of ``tensor``, one run after the other along ``dim``."""
        return torch.cat([tensor.narrow(dim, begin, n_elems) for begin, n_elems in self.runs], dim=dim)
