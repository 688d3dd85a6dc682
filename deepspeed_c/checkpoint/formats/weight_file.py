"""Plans where each tensor of a weight file lies, from names, shapes and dtypes alone: safetensors, and the zip that
``torch.load`` reads.

A plan gives each tensor's payload its offset, so payloads may be written in any order, and at the end it gives the
bytes around them. A file without those bytes is not readable: a half-written file cannot be taken for a whole one.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from deepspeed_c.errors import CheckpointError

__all__ = ["FileEntry", "FilePlan", "SafetensorsPlan", "TorchZipPlan", "plan_file"]


@dataclass(frozen=True)
class FileEntry:
    """A tensor of the file. Payloads are contiguous in row-major order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_elems(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elems * self.dtype.itemsize


class FilePlan(Protocol):
    """The layout of a file in some format, as a writer needs it."""

    payload_offset: Mapping[str, int]
    total_bytes: int
    needs_crc32: bool

    def frame(self, crc32: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of all that is no payload; ``crc32`` has the CRC-32 of every payload if the format needs
        them.
        """
        ...


def plan_file(path: str, entries: Sequence[FileEntry], aliases: Mapping[str, str]) -> FilePlan:
    """The plan of the format that the suffix of ``path`` asks for: ``.safetensors``, else ``torch.load``'s."""
    plan = SafetensorsPlan if path.endswith(".safetensors") else TorchZipPlan
    return plan(path, entries, aliases)


# A file of safetensors: 8 bytes of header length, the header as JSON, the payloads without gaps.
SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Readers refuse a longer header (MAX_HEADER_SIZE in the reference implementation).
SAFETENSORS_HEADER_LIMIT_BYTES = 100_000_000
SAFETENSORS_METADATA = "__metadata__"


class SafetensorsPlan:
    """A file of the safetensors format (https://github.com/huggingface/safetensors, "Format").

    The format has no aliases and forbids overlaps, so of a tied weight only the first name is stored. The other names
    go into the metadata as ``{"other": "first"}``, as ``safetensors.torch.save_model`` writes them.
    ``safetensors.torch.load_model`` and transformers tie by the model and load such a file. The plain dictionary of
    ``load_file`` lacks the other names.
    """

    needs_crc32 = False

    def __init__(self, where: str, entries: Sequence[FileEntry], aliases: Mapping[str, str]) -> None:
        if sys.byteorder != "little":
            raise CheckpointError("safetensors holds little-endian numbers, this machine has others", where=where)
        # transformers looks at "format" to know which framework wrote the file, so an alias of that name must not take
        # its place.
        metadata = {**aliases, "format": "pt"}
        header: dict[str, Any] = {SAFETENSORS_METADATA: metadata}
        # Wide dtypes first, as the reference writer does: every payload is then aligned to its elements.
        begins: dict[str, int] = {}
        begin = 0
        for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
            if entry.name == SAFETENSORS_METADATA:
                raise CheckpointError(
                    "this name is reserved by the safetensors format", where=f"{where}, {entry.name}", fix="rename it"
                )
            if entry.dtype not in SAFETENSORS_DTYPES:
                raise CheckpointError(
                    f"safetensors has no dtype for {entry.dtype}",
                    where=f"{where}, {entry.name}",
                    fix="convert the tensor, or save to a file that ends in .bin, which torch.load reads",
                )
            begins[entry.name] = begin
            header[entry.name] = {
                "dtype": SAFETENSORS_DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [begin, begin + entry.n_bytes],
            }
            begin += entry.n_bytes
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > SAFETENSORS_HEADER_LIMIT_BYTES:
            raise CheckpointError(
                f"the header takes {len(text)} bytes, and readers accept {SAFETENSORS_HEADER_LIMIT_BYTES}",
                where=where,
                fix="save to several files, or to one that ends in .bin",
            )
        self._header = struct.pack("<Q", len(text)) + text
        self.payload_offset = {name: len(self._header) + begin for name, begin in begins.items()}
        self.total_bytes = len(self._header) + begin

    def frame(self, crc32: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        yield 0, self._header


# A file of torch: an uncompressed zip with one record a storage, and a pickle that describes the tensors.
# The storage class that a pickle names for a dtype. Dtypes that came after torch 2.0 have none and name the untyped
# class.
TORCH_STORAGES: dict[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}

# Each payload begins at a multiple of this, as in the files of torch.save: torch.load(mmap=True) then sees aligned
# elements.
ZIP_ALIGNMENT_BYTES = 64
ZIP_UINT16_MAX = 0xFFFF
ZIP_UINT32_MAX = 0xFFFFFFFF
ZIP_EXTRA_ZIP64 = 0x0001
# An extra field that no one reads; its length aligns the payload. "FB" is the number that torch.save uses.
ZIP_EXTRA_PADDING = 0x4246
# 1 January 1980: a zip has no earlier day, and equal tensors shall give equal files.
ZIP_DATE = (1 << 5) | 1


class _StorageStandIn(NamedTuple):
    """A storage in the pickle, as torch's persistent id describes it."""

    key: str
    kind: type
    n_elems: int


class _Tensor:
    """Stands for a tensor in the pickle, and is pickled as torch pickles one."""

    def __init__(self, reduced: tuple[Callable, tuple]) -> None:
        self._reduced = reduced

    def __reduce__(self):
        return self._reduced


class _StandInPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple | None:
        if isinstance(obj, _StorageStandIn):
            return ("storage", obj.kind, obj.key, "cpu", obj.n_elems)
        return None


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _stand_in(where: str, entry: FileEntry, key: str) -> _Tensor:
    # torch itself decides how it pickles a tensor of this dtype; only storage, sizes and strides are replaced. device:
    # the caller may be under `with torch.device(...)`. Computed anew for each tensor: loaded tensors would otherwise
    # share objects, such as the dictionary of hooks.
    rebuild, (storage, offset, _, _, *rest) = torch.empty(0, dtype=entry.dtype, device="cpu").__reduce_ex__(2)
    if isinstance(storage, torch.UntypedStorage):
        ours = _StorageStandIn(key, torch.UntypedStorage, entry.n_bytes)
    elif entry.dtype in TORCH_STORAGES:
        ours = _StorageStandIn(key, TORCH_STORAGES[entry.dtype], entry.n_elems)
    else:
        raise CheckpointError(
            f"{entry.dtype} cannot be saved", where=f"{where}, {entry.name}", fix="convert the tensor"
        )
    return _Tensor((rebuild, (ours, offset, entry.shape, _contiguous_strides(entry.shape), *rest)))


class _Record(NamedTuple):
    """One member of the zip: offsets and sizes in bytes."""

    name: bytes
    header_offset: int
    n_bytes: int
    extra: bytes

    @property
    def payload_offset(self) -> int:
        return self.header_offset + 30 + len(self.name) + len(self.extra)

    @property
    def end(self) -> int:
        return self.payload_offset + self.n_bytes

    @property
    def is_large(self) -> bool:
        return self.n_bytes >= ZIP_UINT32_MAX

    def local_header(self, crc32: int) -> bytes:
        n_bytes = ZIP_UINT32_MAX if self.is_large else self.n_bytes
        # fmt: off
        return struct.pack(
            "<4s5H3L2H", b"PK\x03\x04", 45 if self.is_large else 20, 0, 0, 0, ZIP_DATE,
            crc32, n_bytes, n_bytes, len(self.name), len(self.extra),
        ) + self.name + self.extra
        # fmt: on

    def directory_entry(self, crc32: int) -> bytes:
        n_bytes, header_offset, wide = self.n_bytes, self.header_offset, b""
        if self.is_large:
            wide += struct.pack("<QQ", n_bytes, n_bytes)
            n_bytes = ZIP_UINT32_MAX
        if header_offset >= ZIP_UINT32_MAX:
            wide += struct.pack("<Q", header_offset)
            header_offset = ZIP_UINT32_MAX
        extra = struct.pack("<HH", ZIP_EXTRA_ZIP64, len(wide)) + wide if wide else b""
        version = 45 if wide else 20
        # fmt: off
        return struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", version, version, 0, 0, 0, ZIP_DATE,
            crc32, n_bytes, n_bytes, len(self.name), len(extra), 0, 0, 0, 0, header_offset,
        ) + self.name + extra
        # fmt: on


def _place(name: str, offset: int, n_bytes: int) -> _Record:
    """The record whose header begins at ``offset``, its payload aligned by padding in the header."""
    extra = struct.pack("<HHQQ", ZIP_EXTRA_ZIP64, 16, n_bytes, n_bytes) if n_bytes >= ZIP_UINT32_MAX else b""
    unpadded = _Record(name.encode(), offset, n_bytes, extra + bytes(4)).payload_offset
    padding = -unpadded % ZIP_ALIGNMENT_BYTES
    return _Record(
        name.encode(), offset, n_bytes, extra + struct.pack("<HH", ZIP_EXTRA_PADDING, padding) + bytes(padding)
    )


class TorchZipPlan:
    """A file that ``torch.load(path, weights_only=True)`` reads as a dictionary of tensors on the CPU; aliases share
    storage.

    It has no record ``.format_version``. Without that record torch takes offsets from the zip's own directory in every
    mode of loading. With it torch may compute them from how its own writer lays out a zip.
    """

    needs_crc32 = True

    def __init__(self, where: str, entries: Sequence[FileEntry], aliases: Mapping[str, str]) -> None:
        tensors = {entry.name: _stand_in(where, entry, str(i)) for i, entry in enumerate(entries)}
        # An alias is the same tensor under a second name: the pickle refers to the first, and one tensor object is
        # loaded.
        tensors.update({alias: tensors[first] for alias, first in aliases.items()})
        pickled = io.BytesIO()
        _StandInPickler(pickled, protocol=2).dump(tensors)
        self._small = {
            "archive/data.pkl": pickled.getvalue(),
            "archive/version": b"3\n",
            "archive/byteorder": sys.byteorder.encode(),
        }
        self._tensor_records = {f"archive/data/{i}": entry.name for i, entry in enumerate(entries)}
        sizes = {name: len(content) for name, content in self._small.items()}
        sizes.update({name: entry.n_bytes for name, entry in zip(self._tensor_records, entries, strict=True)})
        self._records: dict[str, _Record] = {}
        end = 0
        for name, n_bytes in sizes.items():
            self._records[name] = _place(name, end, n_bytes)
            end = self._records[name].end
        self._directory_offset = end
        self.payload_offset = {
            tensor: self._records[name].payload_offset for name, tensor in self._tensor_records.items()
        }
        # The directory's length does not depend on the checksums.
        self.total_bytes = end + len(self._directory(dict.fromkeys(self._records, 0)))

    def frame(self, crc32: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        checksums = {name: zlib.crc32(content) for name, content in self._small.items()}
        checksums.update({name: crc32[tensor] for name, tensor in self._tensor_records.items()})
        for name, record in self._records.items():
            yield record.header_offset, record.local_header(checksums[name]) + self._small.get(name, b"")
        yield self._directory_offset, self._directory(checksums)

    def _directory(self, checksums: Mapping[str, int]) -> bytes:
        """The central directory and the end records (.ZIP File Format Specification, sections 4.3.12 to 4.3.16)."""
        directory = b"".join(record.directory_entry(checksums[name]) for name, record in self._records.items())
        offset, n_bytes, n_records = self._directory_offset, len(directory), len(self._records)
        end = b""
        if n_records >= ZIP_UINT16_MAX or n_bytes >= ZIP_UINT32_MAX or offset >= ZIP_UINT32_MAX:
            end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, n_records, n_records, n_bytes, offset)
            end += struct.pack("<4sLQL", b"PK\x06\x07", 0, offset + n_bytes, 1)
        narrow_count, narrow_bytes = min(n_records, ZIP_UINT16_MAX), min(n_bytes, ZIP_UINT32_MAX)
        end += struct.pack(
            "<4s4H2LH", b"PK\x05\x06", 0, 0, narrow_count, narrow_count, narrow_bytes, min(offset, ZIP_UINT32_MAX), 0
        )
        return directory + end
