"""The layers that replace a model's own layers when it is cut: linear by columns and by rows, embedding by vocabulary.

They keep the parameters of the module that they replace, under the same names. They can also be made by hand:
``LinearLayer(torch.nn.Linear(8, 6), group)`` cuts the linear layer's parameters in place over the ranks of ``group``,
and every rank of the group passes the same weights. ``Conv1D`` of GPT-2 keeps its weight [in, out]; all other weights
are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.inject.candidates import ColumnGather
from deepspeed_c.inject.cut import keep_part
from deepspeed_c.inject.draws import DropoutRegion
from deepspeed_c.inject.linear import Product, is_transposed, product_of
from deepspeed_c.inject.overlap import Border
from deepspeed_c.inject.parts import column_sizes, cut_along
from deepspeed_c.inject.plan import RankPlace, part_sizes
from deepspeed_c.inject.ranks import TensorRanks

__all__ = [
    "LinearAllreduce",
    "LinearLayer",
    "LmHeadLinearAllreduce",
    "RowPicker",
    "SubParamLinearAllreduce",
    "SubParamLinearLayer",
    "TensorParallelLayer",
    "WordsEmbedding",
]


class TensorParallelLayer(torch.nn.Module):
    """Base of the linear layers. It holds weight and bias, or this rank's parts of them."""

    def __init__(
        self, module: torch.nn.Module, mp_group: dist.ProcessGroup | TensorRanks | None, *, name: str = ""
    ) -> None:
        """module: a linear layer. mp_group: the ranks that the layer is cut over; None: this rank alone. name: for
        messages.
        """
        super().__init__()
        self.weight, self.bias = module.weight, module.bias
        self.product = product_of(module) or F.linear
        if not isinstance(mp_group, TensorRanks):
            mp_group = TensorRanks(None if mp_group is None else Collectives(mp_group))
        self.ranks, self.label, self.is_transposed = mp_group, name or type(self).__name__, is_transposed(module)
        self._parts: dict[torch.nn.Parameter, torch.Tensor] = {}  # this rank's parts while parameters are whole
        self.train(module.training)

    @property
    def in_features(self) -> int:
        return self.weight.shape[0 if self.is_transposed else 1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1 if self.is_transposed else 0]

    def cut(self, param: torch.nn.Parameter | None, dim: int, sizes: Sequence[int]) -> None:
        """Replaces the whole values of ``param`` by this rank's shares. The parts of ``param`` have ``sizes`` elements
        along ``dim``, and the rank gets a share of each.

        Raises ModelError where the sizes do not add up to the dimension, or where ``param`` is cut already.
        """
        if param is None or self.ranks.n_ranks == 1:
            return
        if sum(sizes) != param.shape[dim] or hasattr(param, "tp_cut"):
            raise ModelError(
                f"the parts {list(sizes)} make {sum(sizes)}, the dimension has {param.shape[dim]}"
                if sum(sizes) != param.shape[dim]
                else "it is cut already",
                where=self.label,
                fix="pass a whole layer, and the size of each part in the order in which they lie",
            )
        parts = [(_C.TP_COLUMNS, size, 1) for size in sizes]
        cut = cut_along(param.shape, dim, parts, 1, (0, 0), RankPlace(self.ranks.rank, self.ranks.n_ranks))
        keep_part(param, cut, dim)

    def multiply_by(self, product: Product) -> None:
        """From now on ``product`` is the layer's function of (x, weight [out, in], bias)."""
        self.product = product

    @torch.no_grad()
    def gather_params(self, params_list: Iterable[torch.nn.Parameter | None]) -> None:
        """Make the cut parameters in ``params_list`` whole, on all ranks together, until ``_tp_partition``.

        Raises StateError where a parameter is whole already.
        """
        for param in self._cut_ones(params_list):
            if param in self._parts:
                raise StateError("its parameters are whole already", where=self.label, fix="call _tp_partition first")
            cut = param.tp_cut
            whole = param.new_zeros(cut.logical_shape)
            if cut.rank == cut.copies[0]:
                cut.put(param.data, whole)
            self.ranks.comm.all_reduce(whole.view(-1), label=f"whole {self.label}").wait()
            self._parts[param], param.data = param.data, whole

    @torch.no_grad()
    def _tp_partition(self, params_list: Iterable[torch.nn.Parameter | None]) -> None:
        """End ``gather_params``. Values that were written to the whole parameters stay."""
        for param in self._cut_ones(params_list):
            if param not in self._parts:
                raise StateError("its parameters are not whole", where=self.label, fix="call gather_params first")
            # The values go into the memory that an optimizer knows.
            part = self._parts.pop(param)
            part.copy_(param.tp_cut.take(param.data))
            param.data = part

    @staticmethod
    def _cut_ones(params_list: Iterable[torch.nn.Parameter | None]) -> list[torch.nn.Parameter]:
        return [param for param in params_list if param is not None and hasattr(param, "tp_cut")]

    def is_training_mode(self) -> bool:
        """Whether the layer's parameters are trained."""
        return any(param.requires_grad for param in self.parameters())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class LinearLayer(TensorParallelLayer):
    """y = x W + b with some columns of W on each rank: from x [..., in], whole on all ranks, to y [..., own columns].

    ``gather_output``: y is gathered on all ranks, [..., out]. ``picker``: the weight is whole on all ranks, and each
    rank uses the columns that its picker selects.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mp_group: dist.ProcessGroup | TensorRanks | None = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        *,
        name: str = "",
    ) -> None:
        """skip_partition: ``module`` already holds only this rank's part."""
        super().__init__(module, mp_group, name=name)
        self.sizes: list[int] | None = None
        self.picker: RowPicker | None = None
        self.region: DropoutRegion | None = None
        self.neighbours: tuple[LinearLayer, ...] = ()
        self.candidates: ColumnGather | None = None
        self.border: Border | None = None
        if not skip_partition:
            n_columns = self.out_features
            self._cut_columns((n_columns,))
            if gather_output:
                self.gather_columns(column_sizes(n_columns, self.ranks.n_ranks, 1))
        elif gather_output:
            cut = getattr(self.weight, "tp_cut", None)
            if cut is None and self.ranks.n_ranks > 1:
                raise ModelError(
                    "gather_output needs the columns of all ranks, and this part does not say them",
                    where=self.label,
                    fix="pass the whole layer, without skip_partition",
                )
            if cut is not None:
                n_columns = cut.logical_shape[1 if self.is_transposed else 0]
                self.gather_columns(column_sizes(n_columns, self.ranks.n_ranks, 1))

    def _cut_columns(self, sizes: Sequence[int]) -> None:
        self.cut(self.weight, 1 if self.is_transposed else 0, sizes)
        self.cut(self.bias, 0, sizes)

    def gather_columns(self, sizes: list[int] | None) -> None:
        """Sets whether the columns of all ranks are gathered. sizes: columns of each rank; None: no gather."""
        self.sizes = sizes

    def gather_by(self, candidates: ColumnGather | None) -> ColumnGather | None:
        """From now on ``candidates`` gathers the columns; None: whole columns are gathered. Returns the one before."""
        before, self.candidates = self.candidates, candidates
        return before

    def pick(self, picker: RowPicker) -> None:
        """Keeps the weight whole. ``picker`` selects this rank's columns at each use."""
        self.picker = picker

    def draw_apart(self, region: DropoutRegion) -> None:
        """Random numbers after this layer differ between ranks, until ``region`` ends."""
        self.region = region

    @property
    def can_defer(self) -> bool:
        """Whether the weight's gradient may be computed separately from the input's gradient (``overlap.py``)."""
        return self.product is F.linear and self.picker is None

    def overlap(self, neighbours: Sequence[LinearLayer]) -> None:
        """neighbours: the layers that may take the same input, including this layer."""
        self.neighbours = tuple(neighbours)

    def stay_in(self, border: Border) -> None:
        """While ``border`` is open, treat inputs as tensors inside the region."""
        self.border = border

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._columns(x)
        if self.sizes is not None:
            if self.candidates is not None:
                return self.candidates.gather(y, self.sizes, self.ranks, self.label)
            return self.ranks.gather(y, self.sizes, self.label)
        if self.region is not None and self.training:
            self.region.enter(y.device)
        return y

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the output, computed separately from other layers, without overlap and without a
        gather.
        """
        return self._product(self.ranks.enter(x, self.label))

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        if self.border is not None and self.border.is_open:
            y = self.border.product(self, x)
            if y is not None:
                return y
        elif self.ranks.overlaps and self.can_defer:
            entered = self.ranks.enter_columns(x, self.neighbours, self.label)
            if entered is not None:
                return entered.product(self)
            # The backward sends nothing, because x needs no gradient.
        else:
            x = self.ranks.enter(x, self.label)
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if self.picker is not None:
            weight = self.picker.pick(weight, 1 if self.is_transposed else 0)
            bias = None if bias is None else self.picker.pick(bias, 0)
        return self.product(x, weight.t() if self.is_transposed else weight, bias)


class LinearAllreduce(TensorParallelLayer):
    """y = x W + b with some rows of W on each rank. x [..., rows of this rank]; y [..., out] is the sum over ranks.

    The bias is whole and added once, to the sum. ``split_input``: x is whole on all ranks, and each rank takes its part
    of x.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mp_group: dist.ProcessGroup | TensorRanks | None,
        *,
        skip_partition: bool = False,
        name: str = "",
    ) -> None:
        """skip_partition: ``module`` already holds only this rank's part."""
        super().__init__(module, mp_group, name=name)
        self.part: tuple[int, int] | None = None
        self.region: DropoutRegion | None = None
        self.border: Border | None = None
        if not skip_partition:
            self._cut_rows((self.in_features,))

    def _cut_rows(self, sizes: Sequence[int]) -> None:
        self.cut(self.weight, 0 if self.is_transposed else 1, sizes)

    def split_input(self, begin: int, end: int) -> None:
        """Declares the input whole: this rank takes elements [begin, end) of its last dimension."""
        self.part = (begin, end)

    def draw_apart(self, region: DropoutRegion) -> None:
        """Random numbers differ between ranks inside ``region``. The region ends before this layer."""
        self.region = region

    def stay_in(self, border: Border) -> None:
        """Makes the region of ``border`` end at this layer."""
        self.border = border

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.region is not None:
            self.region.leave(x.device)
        if self.part is not None:
            x = self.ranks.split(x, *self.part, self.label)
        y = self.product(x, self.weight.t() if self.is_transposed else self.weight, None)
        if self.border is not None and self.border.is_open:
            return self.border.leave(y, self.bias, self.label)
        y = self.ranks.leave(y, self.label)
        return y if self.bias is None else y + self.bias


class LmHeadLinearAllreduce(LinearAllreduce):
    """An output head with a separate weight, even if the weight of ``module`` is tied. x [..., in] and y are whole on
    all ranks.
    """

    def __init__(
        self, module: torch.nn.Module, mp_group: dist.ProcessGroup | TensorRanks | None, *, name: str = "lm_head"
    ) -> None:
        super().__init__(module, mp_group, skip_partition=True, name=name)
        self.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=module.weight.requires_grad)
        n_rows = self.in_features
        self._cut_rows((n_rows,))
        sizes = column_sizes(n_rows, self.ranks.n_ranks, 1)
        begin = sum(sizes[: self.ranks.rank])
        self.split_input(begin, begin + sizes[self.ranks.rank])


class SubParamLinearLayer(LinearLayer):
    """A column layer whose weight consists of several concatenated matrices. Each matrix is cut separately."""

    def __init__(
        self,
        module: torch.nn.Module,
        mp_group: dist.ProcessGroup | TensorRanks | None,
        shape: Sequence[int | Sequence[int]],
        partition_dim: int = 0,
        *,
        name: str = "",
    ) -> None:
        """shape: (3, -1) for three equal parts, ((4096, 1024, 1024), -1) for parts of these sizes. partition_dim: must
        be 0.
        """
        super().__init__(module, mp_group, skip_partition=True, name=name)
        self._cut_columns(_sizes_along(0, self, shape, partition_dim))


class SubParamLinearAllreduce(LinearAllreduce):
    """A row layer whose input consists of several concatenated parts. Each part is cut separately."""

    def __init__(
        self,
        module: torch.nn.Module,
        mp_group: dist.ProcessGroup | TensorRanks | None,
        shape: Sequence[int | Sequence[int]],
        partition_dim: int = 1,
        *,
        name: str = "",
    ) -> None:
        """shape: (-1, 2) for two equal parts, (-1, (48, 16)) for parts of these sizes. partition_dim: must be 1."""
        super().__init__(module, mp_group, skip_partition=True, name=name)
        self._cut_rows(_sizes_along(1, self, shape, partition_dim))


def _sizes_along(
    usual: int, layer: TensorParallelLayer, shape: Sequence[int | Sequence[int]], partition_dim: int
) -> tuple[int, ...]:
    if partition_dim != usual or layer.is_transposed:
        raise ModelError(
            "a weight [in, out] has no parts by this name"
            if layer.is_transposed
            else f"its weight [out, in] is cut along dimension {usual}, not {partition_dim}",
            where=layer.label,
            fix="write rules in tensor_parallel.partition_config, or use the layer for the other dimension",
        )
    return part_sizes(shape, layer.weight.shape, usual, "weight", f"{layer.label}: shape")


class WordsEmbedding(torch.nn.Module):
    """An embedding table of which this rank holds tokens [begin, end). It maps ids of any shape to [*ids, width]."""

    def __init__(self, module: torch.nn.Embedding, ranks: TensorRanks, label: str, begin: int, end: int) -> None:
        super().__init__()
        self.weight = module.weight
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.padding_idx = module.padding_idx
        self.ranks, self.label, self.begin, self.end = ranks, label, begin, end
        self.train(module.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Raises IndexError, on all ranks, for an id outside the vocabulary. An accelerator reports it by itself."""
        is_word = (ids >= 0) & (ids < self.num_embeddings)
        is_elsewhere = is_word & ((ids < self.begin) | (ids >= self.end))
        # No rank has a row for an id outside the vocabulary. torch's own look-up refuses such an id without reading
        # values.
        rows = (ids - self.begin).masked_fill(is_elsewhere, 0)
        try:
            if self.begin == self.end:
                # This rank has no rows, so the gradient is as empty as the weight.
                none = self.weight.new_zeros((1, self.embedding_dim)) + self.weight.sum()
                found = F.embedding((~is_word).long(), none)
            else:
                padding = None if self.padding_idx is None else self.padding_idx - self.begin
                if padding is not None and not 0 <= padding < self.end - self.begin:
                    padding = None
                found = F.embedding(rows, self.weight, padding)
        except IndexError as error:
            wrong = ids[~is_word]
            if not wrong.numel():
                raise
            raise IndexError(
                f"{self.label}: id {int(wrong[0])} is not in the vocabulary of {self.num_embeddings}"
            ) from error
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        return self.ranks.leave(found, self.label)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ids=[{self.begin}, {self.end})"


class RowPicker:
    """Selects runs of one dimension: the part of a whole parameter with which a rank computes."""

    def __init__(self, runs: list[tuple[int, int]]) -> None:
        """runs: (first element, number of elements) of each run, in order."""
        self.runs = runs

    def pick(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The selected elements of ``tensor``, one run after the other along ``dim``."""
        return torch.cat([tensor.narrow(dim, begin, n_elems) for begin, n_elems in self.runs], dim=dim)
