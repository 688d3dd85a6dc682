"""Checkpoints of tensor-parallel ranks, which hold a part of every tensor each: rules by name, whole tensors out of
parts and parts out of whole tensors.

The rules come from DeepSpeed's ``universal_checkpoint_info``, which its engine saves with AutoTP and
Megatron-DeepSpeed always, and, for files without it, from the names of Megatron's layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.checkpoint.formats.ranges import fill
from deepspeed_c.checkpoint.source import BUFFER, LogicalTensor, Read, Source, Topology
from deepspeed_c.errors import CheckpointError

__all__ = ["MergedSource", "PartSource", "TensorCut", "TensorRules", "megatron_cut", "rules_of_info"]

_FIX_RULES = (
    "give rules: --tp-rules FILE, a JSON object with the keys of universal_checkpoint_info"
    " (parameter_with_row_parallelism_patterns, tp_replicated_parameter_patterns, ...)"
)
_FIX_FILES = "take the files of all tensor-parallel ranks from one checkpoint"
_VERSIONS = (0, 1.0, 2.0, 3.0)


class TensorCut(NamedTuple):
    """Rule for making up a tensor from the ranks' parts."""

    dim: int | None
    """The dimension that is cut; None for a tensor that every rank has whole."""
    n_parts: int = 1
    """Number of parts along that dimension, one after the other; each part is cut separately."""
    widths: tuple[tuple[int, ...], ...] | None = None
    """Elements of each rank in each part, by part, where they are not all equal."""
    is_average: bool = False
    """Whether the ranks' whole tensors differ, and their mean is meant."""
    takes_first: bool = False
    """Whether the first rank's whole tensor is meant, even if the others differ."""
    n_rows: int | None = None
    """Rows that count; the rows after them pad the ranks' vocabulary tables."""

    def widths_of(self, n_elems: int, n_ranks: int, where: str) -> list[list[int]]:
        """Elements of each rank in each part, for a whole dimension of ``n_elems``."""
        if self.widths is not None and all(len(part) == n_ranks for part in self.widths):
            return [list(part) for part in self.widths]
        sizes = [n_elems // self.n_parts] * self.n_parts
        if self.widths is not None:  # made for another number of ranks, so only the sizes of parts are used
            sizes = [sum(part) for part in self.widths]
        for size in sizes:
            if sum(sizes) != n_elems or size % n_ranks:
                raise CheckpointError(
                    f"{n_elems} elements along dimension {self.dim} are not {n_ranks} equal parts"
                    + (f" of {len(sizes)} each" if len(sizes) > 1 else ""),
                    where=where,
                    fix="take a number of tensor-parallel ranks that divides the model's sizes",
                )
        return [[size // n_ranks] * n_ranks for size in sizes]

    def merge(self, parts: Sequence[torch.Tensor], where: str) -> torch.Tensor:
        """The whole tensor out of all ranks' parts. Raises CheckpointError where they do not fit."""
        dim = self.dim
        if dim is None:
            if self.is_average:
                return torch.stack([part.double() for part in parts]).mean(0).to(parts[0].dtype)
            if not self.takes_first and any(not _same(parts[0], part) for part in parts[1:]):
                raise CheckpointError("differs among ranks that should have it whole", where=where, fix=_FIX_RULES)
            return parts[0]
        if any(not _fits(parts[0].shape, part.shape, dim) for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise CheckpointError(f"its parts {shapes} do not fit along dimension {dim}", where=where, fix=_FIX_FILES)
        if self.n_parts > 1 or self.widths is not None:
            total = sum(part.shape[dim] for part in parts)
            widths = self.widths_of(total, len(parts), where)
            if any(sum(of_rank) != part.shape[dim] for of_rank, part in zip(zip(*widths), parts)):
                raise CheckpointError(f"its parts are not {widths} wide", where=where, fix=_FIX_FILES)
            split = [part.split(list(of_rank), dim) for of_rank, part in zip(zip(*widths), parts)]
            return torch.cat([of_rank[i] for i in range(len(widths)) for of_rank in split], dim)
        whole = torch.cat(list(parts), dim)
        if self.n_rows is None or dim != 0:
            return whole
        if self.n_rows > len(whole):
            raise CheckpointError(f"has {len(whole)} rows of {self.n_rows}", where=where, fix=_FIX_FILES)
        return whole[: self.n_rows]

    def runs(self, n_elems: int, n_ranks: int, rank: int, where: str) -> list[tuple[int, int]]:
        """(begin, elements) along the cut dimension of the ranges that ``rank`` has of ``n_elems``, in order."""
        found, begin = [], 0
        for widths in self.widths_of(n_elems, n_ranks, where):
            found.append((begin + sum(widths[:rank]), widths[rank]))
            begin += sum(widths)
        return found

    def split(self, whole: torch.Tensor, n_ranks: int, rank: int, where: str) -> torch.Tensor:
        """The part of ``whole`` that ``rank`` has. Raises CheckpointError where it cannot be cut so."""
        dim = self.dim
        if dim is None:
            return whole
        if dim >= whole.dim():
            raise CheckpointError(f"has no dimension {dim}: {tuple(whole.shape)}", where=where, fix=_FIX_RULES)
        runs = self.runs(whole.shape[dim], n_ranks, rank, where)
        return torch.cat([whole.narrow(dim, begin, n) for begin, n in runs], dim)


TensorRules = Callable[[str], TensorCut | None]
"""Tensor's name -> its cut; None where no rule knows the name."""

WHOLE = TensorCut(None)
# The ends of Megatron's names; the first match counts.
_MEGATRON: tuple[tuple[str, TensorCut], ...] = (
    (r"(attention|self_attention)\.dense\.weight", TensorCut(1)),
    (r"mlp\.dense_4h_to_h\.weight", TensorCut(1)),
    (r"mlp\.dense_h_to_4h\.(weight|bias)", TensorCut(0)),
    (r"(word_embeddings|final_linear|lm_head)\.weight", TensorCut(0)),
    (r"(dense|dense_4h_to_h)\.bias", WHOLE),
    (r"(position|tokentype)_embeddings(\.weight)?", WHOLE),
    (r"[a-z_]*(layernorm|layer_norm|norm|ln_f)\.(weight|bias)", WHOLE),
    (r"rotary_emb\.inv_freq|attention\.(masked_)?bias", WHOLE),
)


def megatron_cut(name: str, version: float) -> TensorCut | None:
    """Megatron's cut for the tensor of this name; None if the name is not Megatron's.

    version: the file's ``checkpoint_version``. Query, key and value of all heads lie one behind the other in version 0,
    and head by head later. Raises CheckpointError for a version that is not known.
    """
    if version not in _VERSIONS:
        raise CheckpointError(
            f"checkpoint version {version} is not known", where=name, fix="there are 0, 1.0, 2.0 and 3.0"
        )
    if re.search(r"attention\.query_key_value\.(weight|bias)$", name):
        return TensorCut(0, n_parts=3 if version == 0 else 1)
    return next((cut for pattern, cut in _MEGATRON if re.search(rf"(^|\.)({pattern})$", name)), None)


def rules_of_info(info: Mapping[str, Any], where: str) -> TensorRules:
    """The rules in DeepSpeed's ``universal_checkpoint_info``; a tensor that it does not name is cut along dimension 0.

    Raises CheckpointError for patterns that are no regular expressions, and, when asked, for a tensor that cannot be
    put together according to it.
    """
    widths = {
        pattern: tuple(tuple(int(n) for n in part) for part in parts)
        for pattern, parts in _mapping(info, "sub_param_shard_widths", where).items()
    }
    unsupported = _mapping(info, "autotp_unsupported_parameter_patterns", where)
    rules: list[tuple[re.Pattern[str], TensorCut | str]] = []

    def add(patterns: Sequence[str], cut: TensorCut | str) -> None:
        for pattern in patterns:
            try:
                rules.append((re.compile(pattern), cut))
            except (re.error, TypeError) as error:
                raise CheckpointError(f"{pattern!r} is no pattern: {error}", where=where, fix=_FIX_RULES) from error

    for pattern, reason in unsupported.items():
        add([pattern], str(reason))
    add(_list(info, "tp_replicated_parameter_patterns", where), WHOLE)
    add(_list(info, "parameter_to_average_patterns", where), TensorCut(None, is_average=True))
    add(_list(info, "parameter_with_2_sub_params_cat_dim_0", where), TensorCut(0, n_parts=2))
    for entry in _list(info, "parameter_with_sub_params", where):
        dim = int(entry.get("partition_dim", 0))
        parts = entry["shape"][dim]
        for pattern in entry["patterns"]:
            sizes = widths.get(pattern)
            if sizes is not None:
                add([pattern], TensorCut(dim, len(sizes), sizes))
            elif isinstance(parts, (list, tuple)):
                add([pattern], TensorCut(dim, len(parts), tuple((int(size),) for size in parts)))
            else:
                add([pattern], TensorCut(dim, max(int(parts), 1)))
    add(_list(info, "parameter_with_row_parallelism_patterns", where), TensorCut(1))
    rows = info.get("original_vocab_size")
    add(_list(info, "vocabulary_parameter_patterns", where), TensorCut(0, n_rows=rows if type(rows) is int else None))

    def find(name: str) -> TensorCut | None:
        cut = next((cut for pattern, cut in rules if pattern.match(name)), TensorCut(0))
        if isinstance(cut, str):
            raise CheckpointError(
                f"cannot be put together: {cut}", where=f"{where}, {name}", fix="save it with one tensor-parallel rank"
            )
        return cut

    return find


def _list(info: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    value = info.get(key) or []
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"{key} is a {type(value).__name__}, not a list", where=where, fix=_FIX_RULES)
    return value


def _mapping(info: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = info.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{key} is a {type(value).__name__}, not an object", where=where, fix=_FIX_RULES)
    return value


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)  # a NaN counts as equal to a NaN


def _fits(first: torch.Size, other: torch.Size, dim: int) -> bool:
    return len(first) == len(other) > dim and all(a == b for d, (a, b) in enumerate(zip(first, other)) if d != dim)


def _known(rules: TensorRules, tensor: LogicalTensor, where: str) -> TensorCut:
    cut = rules(tensor.name)
    if tensor.kind == BUFFER or not tensor.shape:
        return WHOLE
    if cut is None:
        raise CheckpointError(
            "no rule says along which dimension it is cut", where=f"{where}, {tensor.name}", fix=_FIX_RULES
        )
    # A bias is cut like the rows of its matrix. If the matrix is cut along a dimension that the bias does not have, the
    # bias is whole.
    return cut if cut.dim is None or cut.dim < len(tensor.shape) else WHOLE


class _MadeSource(Source):
    """A source whose tensors are made whole in memory, one after the other, out of other sources' tensors."""

    def __init__(self, like: Source, sources: Sequence[Source]) -> None:
        self.where, self.format, self.identity = like.where, like.format, like.identity
        self.aliases, self.params, self.groups = dict(like.aliases), dict(like.params), list(like.groups)
        self.state, self.topology = like.state, like.topology
        self.tensors = {}
        self.problem = next((source.problem for source in sources if source.problem), "")
        self._sources = sources
        self._last: tuple[tuple[str, str], torch.Tensor] | None = None

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            if read.tensor.key not in self.tensors:
                raise CheckpointError(
                    f"has no {read.tensor.kind} of that name", where=f"{self.where}, {read.tensor.name}"
                )

            def fetch(first: int, into: torch.Tensor, key: tuple[str, str] = read.tensor.key) -> None:
                into.copy_(self._made(key).view(-1)[first : first + into.numel()])

            fill(read, fetch, self.where)

    def _made(self, key: tuple[str, str]) -> torch.Tensor:
        if self._last is None or self._last[0] != key:
            self._last = (key, self._make(key).contiguous())
        return self._last[1]

    def _make(self, key: tuple[str, str]) -> torch.Tensor:
        raise NotImplementedError

    def close(self) -> None:
        self._last = None
        for source in self._sources:
            source.close()


def _read_whole(source: Source, tensor: LogicalTensor) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    source.read([Read(tensor, 0, whole.view(-1))])
    return whole


class MergedSource(_MadeSource):
    """Whole tensors out of the sources of all tensor-parallel ranks, in their order.

    Memory: the tensor that was read last, and its parts. Raises CheckpointError if ranks hold different tensors, or if
    a tensor has no rule.
    """

    def __init__(self, sources: Sequence[Source], rules: TensorRules) -> None:
        first = sources[0]
        super().__init__(first, sources)
        self._rules = rules
        old = first.topology
        self.topology = Topology(world_size=old.world_size, stage=old.stage, tensor_parallel=len(sources))
        self._list()

    def _list(self) -> None:
        first = self._sources[0]
        for number, source in enumerate(self._sources):
            if (differing := sorted(set(source.tensors) ^ set(first.tensors)))[:1]:
                raise CheckpointError(
                    f"tensor-parallel rank {number} and rank 0 do not both hold {' '.join(differing[0])}",
                    where=source.where,
                    fix=_FIX_FILES,
                )
        self.tensors = {}
        for key, tensor in first.tensors.items():
            cut = _known(self._rules, tensor, self.where)
            shape = list(tensor.shape)
            if cut.dim is not None:
                shape[cut.dim] = sum(source.tensors[key].shape[cut.dim] for source in self._sources)
                if cut.n_rows is not None and cut.dim == 0:
                    shape[0] = min(shape[0], cut.n_rows)
            self.tensors[key] = LogicalTensor(
                name=tensor.name, kind=tensor.kind, shape=tuple(shape), dtype=tensor.dtype
            )

    def _make(self, key: tuple[str, str]) -> torch.Tensor:
        parts = [_read_whole(source, source.tensors[key]) for source in self._sources]
        return _known(self._rules, self._sources[0].tensors[key], self.where).merge(parts, f"{self.where}, {key[1]}")

    def name_groups(self, names: Sequence[Sequence[str]]) -> None:
        for source in self._sources:
            source.name_groups(names)
        first = self._sources[0]
        self.params, self.groups, self.problem = dict(first.params), list(first.groups), first.problem
        self._list()

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        return self._sources[0].rank_state(rank)


class PartSource(_MadeSource):
    """The part of a whole checkpoint for tensor-parallel rank ``rank`` of ``n_ranks``. Does not close the whole.

    Raises CheckpointError where no rule knows a tensor, or it cannot be cut into so many parts.
    """

    def __init__(self, source: Source, rules: TensorRules, n_ranks: int, rank: int) -> None:
        super().__init__(source, ())
        self._whole, self._rules, self._n_ranks, self._rank = source, rules, n_ranks, rank
        for key, tensor in source.tensors.items():
            cut, where = _known(rules, tensor, self.where), f"{self.where}, {tensor.name}"
            shape = list(tensor.shape)
            if cut.dim is not None:
                shape[cut.dim] = sum(n for _, n in cut.runs(shape[cut.dim], n_ranks, rank, where))
            self.tensors[key] = LogicalTensor(
                name=tensor.name, kind=tensor.kind, shape=tuple(shape), dtype=tensor.dtype
            )

    def _make(self, key: tuple[str, str]) -> torch.Tensor:
        tensor = self._whole.tensors[key]
        cut = _known(self._rules, tensor, self.where)
        whole = _read_whole(self._whole, tensor)
        return cut.split(whole, self._n_ranks, self._rank, f"{self.where}, {tensor.name}")
