"""Reads weights that torch.save has written: ``pytorch_model.bin``, several files with an index, or any file with a
state dict. Tensors are read by range, and nothing in a pickle is executed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.checkpoint.formats import torch_file
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
from deepspeed_c.checkpoint.formats.huggingface import shards_of_index
from deepspeed_c.checkpoint.formats.ranges import fill, fill_from_file
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor
from deepspeed_c.checkpoint.source import PARAM, LogicalTensor, Read, Source, Topology
from deepspeed_c.errors import CheckpointError

__all__ = ["TORCH_INDEX_FILE", "TORCH_SINGLE_FILE", "TorchWeightsSource"]

TORCH_SINGLE_FILE = "pytorch_model.bin"
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"
# Usual keys of the state dict in files with further content.
_MODULE_KEYS = ("module", "model", "state_dict", "model_state_dict")


class TorchWeightsSource(Source):
    """A file of torch.save, an index of such files, or a folder with such a file or index.

    Everything is listed as PARAM. Names that share memory in a file are aliases of the first of them. Raises
    CheckpointError for a file that cannot be read, holds no state dict, or lacks a tensor that the index lists.
    """

    format = "torch"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where = os.fspath(path)
        self.aliases, self.params, self.groups, self.state = {}, {}, [], {}
        self.topology = Topology()
        self._stored: dict[str, StoredTensor] = {}
        self._descriptors: dict[str, int] = {}
        for file, names in self._shards().items():
            self._add(file, names)
        self.tensors = {
            (PARAM, name): LogicalTensor(name=name, kind=PARAM, shape=tuple(stored.shape), dtype=stored.dtype)
            for name, stored in self._stored.items()
        }

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            stored = self._stored.get(read.tensor.name)
            if stored is None or read.tensor.kind != PARAM:
                raise CheckpointError(
                    f"holds no {read.tensor.kind} named {read.tensor.name!r}",
                    where=self.where,
                    fix="read what is listed",
                )
            path = stored.file.path
            if stored.is_contiguous:
                offset = stored.file.byte_range(stored)[0] if stored.n_elems else 0
                fill_from_file(read, self._open(path), offset, path)
                continue

            def fetch(first: int, into: torch.Tensor, stored: StoredTensor = stored) -> None:
                torch_file.fill([(stored, first, into)])

            fill(read, fetch, path)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _shards(self) -> dict[str, list[str] | None]:
        """Path of each file -> the tensors that are to be read from it; None: all."""
        if os.path.isdir(self.where):
            index = os.path.join(self.where, TORCH_INDEX_FILE)
            if not os.path.exists(index):
                return {os.path.join(self.where, TORCH_SINGLE_FILE): None}
        elif self.where.endswith(".json"):
            index = self.where
        else:
            return {self.where: None}
        return shards_of_index(index)

    def _add(self, path: str, names: list[str] | None) -> None:
        state = _state_dict_of(read_file(path).content, path)
        first: dict[tuple, str] = {}
        for name in state if names is None else names:
            stored = state.get(name)
            if stored is None:
                raise CheckpointError(
                    f"{name} is missing, and {TORCH_INDEX_FILE} says it is here", where=path, fix="get the file anew"
                )
            known = first.setdefault(stored.identity, name)
            if known == name:
                self._stored[name] = stored
            else:
                self.aliases[name] = known

    def _open(self, path: str) -> int:
        if path not in self._descriptors:
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be opened: {error.strerror}", where=path, fix="check the path"
                ) from error
        return self._descriptors[path]


def _state_dict_of(content: Any, where: str) -> dict[str, StoredTensor]:
    """The tensors of a file's state dict, which lies at its top or under a usual key."""
    for candidate in (content, *(content.get(key) for key in _MODULE_KEYS if isinstance(content, Mapping))):
        if isinstance(candidate, Mapping):
            tensors = {str(name): value for name, value in candidate.items() if isinstance(value, StoredTensor)}
            if tensors:
                return tensors
    raise CheckpointError(
        f"holds no state dict, but a {type(content).__name__}",
        where=where,
        fix=f"save model.state_dict(), by itself or under one of the keys {', '.join(_MODULE_KEYS)}",
    )
