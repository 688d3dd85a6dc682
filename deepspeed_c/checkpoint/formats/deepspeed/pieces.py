"""Builds logical tensors from pieces of stored tensors. The readers of DeepSpeed's two formats share this code."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.checkpoint.formats.ranges import runs
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor, fill
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, ParamInfo, Read, Source
from deepspeed_c.errors import CheckpointError

__all__ = ["PieceSource", "StoredPiece", "counters_of", "is_count", "scaler_state"]

# Number of copies that are collected before they are made: a box cut along the last dimension has one copy for each
# row.
JOBS_AT_ONCE = 1 << 14


class StoredPiece(NamedTuple):
    """Elements [begin, begin + n_elems) of a logical tensor are elements from ``first`` on of ``stored``."""

    begin: int
    n_elems: int
    stored: StoredTensor
    first: int


class PieceSource(Source):
    """A source whose tensors are listed with ``_add``."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.tensors: dict[tuple[str, str], LogicalTensor] = {}
        self.aliases: dict[str, str] = {}
        self.params: dict[str, ParamInfo] = {}
        self.groups: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self._pieces: dict[tuple[str, str], list[StoredPiece]] = {}

    def _add(
        self, kind: str, name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[StoredPiece]
    ) -> None:
        tensor = LogicalTensor(name=name, kind=kind, shape=tuple(shape), dtype=dtype)
        kept = [piece for piece in pieces if piece.n_elems]
        end = 0
        for piece in kept:
            if piece.begin != end or piece.first + piece.n_elems > piece.stored.n_elems:
                break
            end += piece.n_elems
        else:
            if end == math.prod(shape):
                self.tensors[tensor.key] = tensor
                self._pieces[tensor.key] = kept
                return
        raise CheckpointError(
            f"its {kind} has shape {tuple(shape)}, {math.prod(shape)} elements, and the files hold {end} of them from the first on",
            where=f"{self.where}, {name}",
            fix="the files are not of one checkpoint, or one of them is an older one: take another checkpoint",
        )

    def _add_whole(self, kind: str, name: str, stored: StoredTensor, shape: Sequence[int] | None = None) -> None:
        self._add(
            kind,
            name,
            stored.shape if shape is None else shape,
            stored.dtype,
            [StoredPiece(0, stored.n_elems, stored, 0)],
        )

    def _order(self, names: Sequence[str]) -> None:
        """Puts the tensors into the order of ``names``, of each name the weight first."""
        place = {name: i for i, name in enumerate(names)}
        kinds = {PARAM: 0, BUFFER: 0, MASTER: 1}
        self.tensors = dict(
            sorted(self.tensors.items(), key=lambda item: (place.get(item[0][1], len(place)), kinds.get(item[0][0], 2)))
        )

    def read(self, reads: Sequence[Read]) -> None:
        jobs: list[tuple[StoredTensor, int, torch.Tensor]] = []
        for tensor, begin, into, box in reads:
            if tensor.key not in self._pieces:
                raise CheckpointError(f"has no {tensor.kind} of that name", where=f"{self.where}, {tensor.name}")
            pieces = self._pieces[tensor.key]
            shape = self.tensors[tensor.key].shape
            available = math.prod(shape if box is None else box.size)
            if begin < 0 or begin + into.numel() > available:
                raise CheckpointError(
                    f"elements [{begin}, {begin + into.numel()}) are asked of {available}",
                    where=f"{self.where}, {tensor.name}",
                )
            begins = [piece.begin for piece in pieces]
            filled = 0
            for first, count in runs(shape, box, begin, into.numel()):
                i = bisect_right(begins, first) - 1
                while count:
                    piece = pieces[i]
                    skip = first - piece.begin
                    n = min(count, piece.n_elems - skip)
                    jobs.append((piece.stored, piece.first + skip, into[filled : filled + n]))
                    first, count, filled, i = first + n, count - n, filled + n, i + 1
                    if len(jobs) == JOBS_AT_ONCE:
                        fill(jobs)
                        jobs.clear()
        fill(jobs)


def is_count(value: Any) -> bool:
    """Whether an optimizer state counts for its parameter as a whole."""
    return isinstance(value, (bool, int, float)) or (isinstance(value, StoredTensor) and value.shape == ())


def scaler_state(saved: Any, n_steps: int) -> dict[str, Any] | None:
    """The state of our loss scaler (csrc/include/dsc/scaler.h), converted from DeepSpeed's: from the attributes of its
    object, or from the mapping that fp16 without ZeRO saves.
    """
    attributes: Mapping[str, Any] = saved if isinstance(saved, Mapping) else vars(saved)
    if "cur_scale" not in attributes:
        return None
    last_overflow = attributes.get("last_overflow_iter")
    return {
        "scale": float(attributes["cur_scale"]),
        # A static scale counts nothing.
        "step": int(attributes.get("cur_iter", n_steps)),
        "last_overflow_step": -1 if last_overflow is None else int(last_overflow),
        # Without ZeRO there is no hysteresis in DeepSpeed: the first overflow cuts the scale.
        "hysteresis_left": int(attributes.get("cur_hysteresis", 1)),
    }


def counters_of(model: Mapping[str, Any]) -> dict[str, int]:
    """Counters of the engine, from the entries that DeepSpeed saves with the model."""
    counters = {
        name: int(model[name])
        for name in ("global_steps", "global_samples", "skipped_steps")
        if isinstance(model.get(name), int)
    }
    config = model.get("ds_config")
    accumulation = config.get("gradient_accumulation_steps") if isinstance(config, Mapping) else None
    if isinstance(accumulation, int) and "global_steps" in counters:
        counters["micro_steps"] = counters["global_steps"] * accumulation
    return counters
