"""The manifest of a checkpoint: it maps bytes of files to parts of logical tensors (docs/concepts/checkpoint.md).

The manifest is JSON, with its CRC32C in another file. It is checked as a whole before any part is used, because it may
be damaged or untrusted.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.formats.torch_file import TENSORS_AT_LEAST_BYTES, TENSORS_PER_BYTE
from deepspeed_c.checkpoint.formats.weight_file import SAFETENSORS_DTYPES
from deepspeed_c.config.stages import STAGES
from deepspeed_c.errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "DTYPES",
    "MANIFEST",
    "Manifest",
    "Number",
    "ParamEntry",
    "PayloadFile",
    "Piece",
    "StateFile",
    "TensorEntry",
    "decode_number",
    "dtype_name",
    "encode_number",
    "read_checksum",
    "read_manifest",
    "write_manifest",
]

MANIFEST = "manifest.json"
MANIFEST_CRC = "manifest.crc32c"
FORMAT, VERSION = "deepspeed_c", 1
# Bytes of a payload file under one checksum, which is also the smallest unit of reading.
BLOCK_BYTES = 1 << 18
# Limits for numbers in a manifest: the longest block that the core reads, and more ranks than any job has.
BLOCK_LIMIT_BYTES = 1 << 30
RANKS_LIMIT = 1 << 20
# Longer manifests are refused before they are read into memory.
MANIFEST_LIMIT_BYTES = 4 << 30

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """The name of a dtype in manifests and payload files ("F32", "BF16", ...).

    Raises CheckpointError for a dtype without a name.
    """
    name = SAFETENSORS_DTYPES.get(dtype)
    if name is None:
        raise CheckpointError(
            f"tensors of {dtype} cannot be saved",
            where=where,
            fix="convert the tensor, or leave it out of state_dict()",
        )
    return name


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """Elements [begin, begin + n_elems) of a box of a logical tensor, in row-major order, stored from ``offset`` on in
    a file.

    ``start`` and ``size`` are the box along each dimension; without them it is the whole tensor.
    """

    file: int
    offset: int
    begin: int
    n_elems: int
    start: tuple[int, ...] | None = None
    size: tuple[int, ...] | None = None


class TensorEntry(msgspec.Struct):
    """One logical tensor."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    pieces: list[Piece]


class PayloadFile(msgspec.Struct):
    """A safetensors file of pieces; ``crc32c`` is base64 of one little-endian u32 for each block of the file."""

    name: str
    n_bytes: int
    crc32c: str

    @property
    def crcs(self) -> bytes:
        return base64.b64decode(self.crc32c, validate=True)


class StateFile(msgspec.Struct):
    """A small file of state, with the CRC32C of all of it."""

    name: str
    n_bytes: int
    crc32c: int


# JSON has no numbers for inf and NaN, so these are text.
Number = int | float | bool | str
NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def encode_number(value: float) -> Number:
    """A number as it stands in a manifest; ``decode_number`` is the way back."""
    if math.isfinite(value):
        return value
    return NOT_FINITE[0] if math.isnan(value) else NOT_FINITE[1] if value > 0 else NOT_FINITE[2]


def decode_number(value: Number) -> float:
    """The number that ``encode_number`` encoded."""
    return float(value) if isinstance(value, str) else value


class ParamEntry(msgspec.Struct, omit_defaults=True):
    """Facts about a parameter besides its tensors; each count is a number and the dtype of the tensor that held it (""
    for a plain number).
    """

    group: int | None = None
    counts: dict[str, tuple[Number, str]] = {}


class TopologyEntry(msgspec.Struct):
    """The arrangement of ranks that saved it."""

    world_size: int
    stage: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    axes: dict[str, int] = {}
    """Sizes of the mesh's axes of more than one rank; none in checkpoints of before there was a mesh."""
    expert_parallel: int = 1
    """The largest number of ranks that experts of a layer were spread over."""


class Manifest(msgspec.Struct):
    """The whole manifest.

    ``states`` has the common state first, then one file a rank (which may be missing where ranks have none).
    """

    format: str
    version: int
    tag: str
    block_bytes: int
    topology: TopologyEntry
    counters: dict[str, int]
    versions: dict[str, str]
    excludes_frozen: bool
    files: list[PayloadFile]
    states: list[StateFile]
    tensors: list[TensorEntry]
    aliases: dict[str, str]
    params: dict[str, ParamEntry]
    config: dict[str, Any]


def write_manifest(folder: str, manifest: Manifest, write: Callable[[str, bytes], None]) -> None:
    """Writes manifest and checksum into ``folder``, each by ``write(path, content)``."""
    content = msgspec.json.encode(manifest)
    write(os.path.join(folder, MANIFEST), content)
    write(os.path.join(folder, MANIFEST_CRC), f"{_C.crc32c(content):08x}\n".encode())


def read_manifest(folder: str, held: int) -> Manifest:
    """Reads and checks a manifest; ``held`` is a descriptor of the folder, which may have another name by now.

    Raises CheckpointError, naming the file and what is wrong with it.
    """
    path = os.path.join(folder, MANIFEST)
    content, expected = _read(folder, MANIFEST, held), _read(folder, MANIFEST_CRC, held)
    actual = f"{_C.crc32c(content):08x}"
    if expected.strip() != actual.encode():
        raise CheckpointError(
            f"is damaged: its CRC32C is {actual}, {MANIFEST_CRC} says {expected.strip().decode('ascii', 'replace')[:16]}",
            where=path,
            fix="load another tag; the file was changed after it had been written",
        )
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.format != FORMAT or not 1 <= head.version <= VERSION:
            raise CheckpointError(
                f"is format {head.format!r} version {head.version}; this version reads {FORMAT!r} up to {VERSION}",
                where=path,
                fix="update deepspeed_c",
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"is no manifest: {error}", where=path, fix="load another tag") from error
    problem = next(_problems(manifest), None)
    if problem:
        raise CheckpointError(f"is inconsistent: {problem}", where=path, fix="load another tag")
    return manifest


def read_checksum(folder: str, held: int) -> str:
    """The checksum that belongs to a manifest. It covers the checksums of all files, so checkpoints with equal
    checksums are the same.
    """
    return _read(folder, MANIFEST_CRC, held).strip().decode("ascii", "replace")


class _Head(msgspec.Struct):
    format: str
    version: int


def _read(folder: str, name: str, held: int) -> bytes:
    path = os.path.join(folder, name)
    try:
        with open(name, "rb", opener=lambda name, flags: os.open(name, flags, dir_fd=held)) as file:
            if os.fstat(file.fileno()).st_size > MANIFEST_LIMIT_BYTES:
                raise CheckpointError(f"is longer than {MANIFEST_LIMIT_BYTES} bytes", where=path)
            return file.read()
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror}", where=path, fix="the checkpoint is incomplete: load another tag"
        ) from error


def _problems(manifest: Manifest) -> Iterator[str]:
    """The contradictions in a manifest, each as a sentence.

    Coverage of tensors is checked where they are read (``reshape_plan``).
    """
    if not 0 < manifest.block_bytes <= BLOCK_LIMIT_BYTES:
        yield f"blocks of {manifest.block_bytes} bytes"
        return
    topology = manifest.topology
    of_kinds = (topology.tensor_parallel, topology.pipeline_parallel, topology.expert_parallel)
    for count in (topology.world_size, *of_kinds, *topology.axes.values()):
        if not 0 < count <= RANKS_LIMIT:
            yield f"{count} ranks"
    if topology.stage not in STAGES:
        yield f"stage {topology.stage}"
    for name, number in manifest.counters.items():
        if not 0 <= number < 1 << 63:
            yield f"{name} is {number}"
    seen: set[str] = set()
    for file in (*manifest.files, *manifest.states):
        is_plain = file.name == os.path.basename(file.name) and file.name not in ("", ".", "..")
        if not is_plain or not file.name.isprintable():
            yield f"{file.name!r} is no plain file name"
        if file.name in seen:
            yield f"the file {file.name!r} is listed twice"
        seen.add(file.name)
        if file.n_bytes < 0:
            yield f"{file.name} has {file.n_bytes} bytes"
    for file in manifest.files:
        n_blocks = -(-file.n_bytes // manifest.block_bytes)
        try:
            if len(file.crcs) != 4 * n_blocks:
                yield f"{file.name} has {len(file.crcs) // 4} checksums for {n_blocks} blocks"
        except (binascii.Error, ValueError):
            yield f"the checksums of {file.name} are no base64"
    # Parts may be missing; the reader names them. A shape larger than all parts would only decide how much memory is
    # allocated.
    most_bytes = TENSORS_PER_BYTE * sum(file.n_bytes for file in manifest.files) + TENSORS_AT_LEAST_BYTES
    keys: set[tuple[str, str]] = set()
    for tensor in manifest.tensors:
        where = f"{tensor.kind} of {tensor.name}"
        if (tensor.kind, tensor.name) in keys:
            yield f"{where} is listed twice"
        keys.add((tensor.kind, tensor.name))
        if tensor.dtype not in DTYPES:
            yield f"{where} has the unknown dtype {tensor.dtype!r}"
            continue
        if any(size < 0 for size in tensor.shape) or math.prod(size or 1 for size in tensor.shape) >= 1 << 60:
            yield f"{where} has shape {tensor.shape}"
            continue
        itemsize, n_dims = DTYPES[tensor.dtype].itemsize, len(tensor.shape)
        if math.prod(tensor.shape) * itemsize > most_bytes:
            yield f"{where} has shape {tensor.shape}, far more than all files hold"
        for piece in tensor.pieces:
            if not 0 <= piece.file < len(manifest.files):
                yield f"{where} lies in file {piece.file} of {len(manifest.files)}"
                continue
            file = manifest.files[piece.file]
            if piece.n_elems < 0 or piece.offset < 0 or piece.offset + piece.n_elems * itemsize > file.n_bytes:
                yield f"{where} lies outside {file.name}"
            if (piece.start is None) != (piece.size is None):
                yield f"{where} has half a box"
                continue
            shape = tensor.shape
            if piece.start is not None:
                shape = piece.size
                if len(piece.start) != n_dims or len(shape) != n_dims:
                    yield f"{where} has a box of other dimensions"
                    continue
                if any(
                    low < 0 or size < 0 or low + size > whole
                    for low, size, whole in zip(piece.start, shape, tensor.shape)
                ):
                    yield f"{where} has a box outside its shape"
            numel = math.prod(shape)
            if piece.begin < 0 or piece.begin + piece.n_elems > numel:
                yield f"{where} has a piece outside its box"
    for name, param in manifest.params.items():
        for key, (value, dtype) in param.counts.items():
            if dtype and dtype not in DTYPES:
                yield f"{key} of {name} has the unknown dtype {dtype!r}"
            elif isinstance(value, str) and value not in NOT_FINITE:
                yield f"{key} of {name} is {value[:40]!r} and no number"
            elif dtype and not _can_hold(DTYPES[dtype], value):
                yield f"{key} of {name} is {value}, which {dtype} cannot hold"
    for alias, name in manifest.aliases.items():
        if alias == name or name in manifest.aliases:
            yield f"the alias {alias!r} leads to {name!r}"


def _can_hold(dtype: torch.dtype, value: Number) -> bool:
    if isinstance(value, str):
        return dtype.is_floating_point
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point:
        return abs(value) <= torch.finfo(dtype).max
    return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
