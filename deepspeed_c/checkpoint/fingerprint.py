"""Fingerprints: a CRC32C of each logical tensor, and one number over all of them, so that two states of training can be
compared without either of them at hand.

A CRC is linear in the bytes (``csrc/ckpt/fingerprint.c``). So ranks that hold parts of a tensor get the CRC of the
whole from one number for each part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, Read, Source

__all__ = ["Fingerprint", "TensorPrint", "fingerprint_of_source"]

# Most bytes of a tensor that are read at once.
READ_BYTES = 16 << 20


class TensorPrint(NamedTuple):
    """One logical tensor. ``crc`` is the CRC32C of its bytes: row-major, little-endian, in its dtype."""

    kind: str
    """"param" (the master, where the weight has one), or the name of an optimizer state."""
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    crc: int

    def __str__(self) -> str:
        return f"{_type_of(self.dtype, self.shape)} {self.crc:08x}"

    @property
    def is_unmade(self) -> bool:
        """Whether it is an optimizer state of zeros. A state that the optimizer has not made yet counts as zeros,
        because places of states make them at different times."""
        return self.kind != PARAM and self.crc == _crc_of_zeros(math.prod(self.shape) * self.dtype.itemsize)


# A model has few shapes, and a fingerprint is taken again and again.
@lru_cache(maxsize=4096)
def _type_of(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


@lru_cache(maxsize=4096)
def _crc_of_zeros(n_bytes: int) -> int:
    return _C.crc32c_of_parts(0, n_bytes)


class Fingerprint:
    """The prints of weights and optimizer states, in the order of ``tensors``."""

    def __init__(self, tensors: Iterable[TensorPrint]) -> None:
        """tensors: a weight that has a master is left out in favour of the master, since rounding the master gives the
        weight, and buffers are left out, since ranks may differ in them. So are states that are zero in every element:
        before the first step that is applied some places of states hold zeros, and others hold nothing."""
        tensors = list(tensors)
        mastered = {tensor.name for tensor in tensors if tensor.kind == MASTER}
        self.tensors: dict[tuple[str, str], TensorPrint] = {}
        """(kind, name) -> print"""
        for tensor in tensors:
            if tensor.kind == BUFFER or (tensor.kind == PARAM and tensor.name in mastered):
                continue
            of_weight = tensor._replace(kind=PARAM) if tensor.kind == MASTER else tensor
            if not of_weight.is_unmade:
                self.tensors[of_weight.kind, of_weight.name] = of_weight

    @property
    def number(self) -> int:
        """64 bits that stand for all tensors: names, dtypes, shapes and bytes. The order of tensors does not count."""
        lines = sorted(f"{kind}\0{name}\0{tensor}" for (kind, name), tensor in self.tensors.items())
        return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest(), "big")

    def first_difference(self, other: Fingerprint) -> str:
        """The first tensor that differs, and how; "" if none does."""
        for key in dict.fromkeys([*self.tensors, *other.tensors]):
            mine, theirs = self.tensors.get(key), other.tensors.get(key)
            if mine != theirs:
                return f"{key[0]} of {key[1]}: {mine or 'missing'} and {theirs or 'missing'}"
        return ""


def fingerprint_of_source(source: Source, like: Source | None = None) -> Fingerprint:
    """The fingerprint of an open checkpoint. Reads all of it, at most 16 MiB at a time.

    like: a checkpoint to compare with. What it lists as buffers is left out, because some formats list buffers as
    weights. Raises CheckpointError as ``Source.read`` does.
    """
    buffers = {name for other in (source, like) if other is not None for kind, name in other.tensors if kind == BUFFER}
    mastered = {name for kind, name in source.tensors if kind == MASTER}
    return Fingerprint(
        TensorPrint(tensor.kind, tensor.name, tensor.dtype, tuple(tensor.shape), _crc_of(source, tensor))
        for tensor in source.tensors.values()
        if tensor.name not in buffers and not (tensor.kind == PARAM and tensor.name in mastered)
    )


def _crc_of(source: Source, tensor: LogicalTensor) -> int:
    numel, crc = math.prod(tensor.shape), 0
    most = max(READ_BYTES // tensor.dtype.itemsize, 1)
    buffer = torch.empty(min(numel, most), dtype=tensor.dtype)
    for begin in range(0, numel, most):
        part = buffer[: min(most, numel - begin)]
        source.read([Read(tensor, begin, part)])
        crc = _C.crc32c(part.view(torch.uint8).numpy(), crc)
    return crc
