"""Files of torch.save: the value as plain data, and tensors as places in the file, or made of copies of its bytes.

``unpickle.py`` limits the effects of the pickle in the file. This module checks tensors against the file. Each lies in
its storage, and each storage in the file. All of them together exceed the file by a limited factor at most, however
often their strides repeat one element.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import math
import os
import pickle
import struct
import sys
import types
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import torch

from deepspeed_c.checkpoint.formats.ranges import read_bytes
from deepspeed_c.checkpoint.formats.unpickle import PLAIN, UNREADABLE, Global, Unpickler, check_attributes, in_full
from deepspeed_c.errors import CheckpointError

__all__ = ["Part", "StoredTensor", "TorchFile", "fill", "load_part", "load_plain", "materialize"]

# Size of a read where elements must be converted or moved on: enough for the system call to cost nothing.
STAGING_BYTES = 8 << 20
# torch.save's format before zip: the number its first pickle holds (torch.serialization.MAGIC_NUMBER), and the only
# version there is.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001
# Limit on the bytes of all tensors of a file, each without gaps: this many per byte of the file, plus a constant. Masks
# and positions are saved expanded, in small files too.
TENSORS_PER_BYTE, TENSORS_AT_LEAST_BYTES = 4, 64 << 20
# Dimensions that torch's operators take.
DIMS_LIMIT = 64

FIX_TRUST = "save it again without that object (in client_state: as numbers, strings, lists, dictionaries or tensors)"

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    # The dtype comes later, when the tensor is rebuilt; the length is in bytes.
    "UntypedStorage": torch.uint8,
}
# Dtypes without a storage class in torch; their tensors name the dtype. Others (quantized ones, packed bits) need more
# than bytes.
UNTYPED_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("uint16", "uint32", "uint64", "complex32"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)


class _StorageKind(NamedTuple):
    dtype: torch.dtype
    is_typed: bool


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype
    n_elems: int
    is_typed: bool

    @property
    def n_bytes(self) -> int:
        return self.n_elems * self.dtype.itemsize


class Part(NamedTuple):
    """Bytes [begin, begin + n_bytes) of a file that is open."""

    descriptor: int
    begin: int
    n_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a file that has not been read: ``offset`` and ``stride`` count elements of the storage ``key``."""

    file: TorchFile = field(repr=False)
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def n_elems(self) -> int:
        return math.prod(self.shape)

    @property
    def identity(self) -> tuple:
        """Equal for two tensors that are the same memory in the same shape, as tied weights are."""
        return self.file.path, self.key, self.dtype, self.shape, self.stride, self.offset

    @property
    def is_contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return self.n_elems == 0
            step *= size
        return True


class TorchFile:
    """A file of torch.save, its pickle read. Holds no descriptor: reads open it anew.

    Attributes: ``path``; ``content``, the saved object with ``StoredTensor`` in the place of tensors. ``part`` says
    where in the file at ``path`` the file of torch.save lies, if it is not the whole; ``table`` and ``objects`` list
    the names that a pickle may use besides plain data. Raises CheckpointError for a file that cannot be read, is cut
    off, names something that is not allowed, or is larger in memory than on disk by too much.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        part: Part | None = None,
        table: Mapping[str, Any] | None = None,
        objects: Collection[type] = (),
    ) -> None:
        self.path = os.fspath(path)
        # Storage -> (first byte in the file, number of bytes).
        self._extents: dict[str, tuple[int, int]] = {}
        with _named(self.path):
            if part is None:
                with open(self.path, "rb") as file:
                    n_bytes = os.fstat(file.fileno()).st_size
                    self.content = self._load(file, 0, n_bytes, table or {}, objects)
            else:
                file = io.BufferedReader(_Slice(part))
                self.content = self._load(file, part.begin, part.n_bytes, table or {}, objects)

    def byte_range(self, stored: StoredTensor) -> tuple[int, int]:
        """(first byte, number of bytes) of a contiguous tensor in the file."""
        return self._extents[stored.key][0] + stored.offset * stored.dtype.itemsize, (
            stored.n_elems * stored.dtype.itemsize
        )

    def storage_range(self, key: str) -> tuple[int, int]:
        return self._extents[key]

    def _load(
        self, file: BinaryIO, begin: int, n_bytes: int, table: Mapping[str, Any], objects: Collection[type]
    ) -> Any:
        if zipfile.is_zipfile(file):
            archive = _Archive(file, n_bytes, self.path)
            unpickler = _ToPlaces(archive.open_pickle(), n_bytes, self, table, objects)
            content = unpickler.load()
            extents = {storage.key: archive.find_storage(storage) for storage in unpickler.storages.values()}
        else:
            file.seek(0)
            content, extents = self._load_legacy(file, n_bytes, table, objects)
        self._extents = {key: (begin + first, size) for key, (first, size) in extents.items()}
        return content

    def _load_legacy(
        self, file: BinaryIO, n_bytes: int, table: Mapping[str, Any], objects: Collection[type]
    ) -> tuple[Any, dict[str, tuple[int, int]]]:
        def next_pickle() -> Any:
            return Unpickler(file, n_bytes - file.tell(), {}).load()

        if next_pickle() != LEGACY_MAGIC:
            raise pickle.UnpicklingError("it begins like no file of torch.save")
        if next_pickle() != LEGACY_VERSION:
            raise pickle.UnpicklingError("a version of torch.save's old format that is not known")
        if next_pickle()["little_endian"] != (sys.byteorder == "little"):
            raise CheckpointError("its numbers are of another byte order than this machine's", where=self.path)
        unpickler = _ToPlaces(file, n_bytes - file.tell(), self, table, objects, file_bytes=n_bytes)
        content = unpickler.load()
        keys = next_pickle()
        begin = file.tell()
        extents: dict[str, tuple[int, int]] = {}
        for key in keys:
            storage = unpickler.storages[key]
            file.seek(begin)
            (n_elems,) = struct.unpack("<q", file.read(8))
            if n_elems != storage.n_elems or key in extents or begin + 8 + storage.n_bytes > n_bytes:
                raise pickle.UnpicklingError(f"a storage of {n_elems} elements where {storage.n_elems} are expected")
            extents[key] = begin + 8, storage.n_bytes
            begin += 8 + storage.n_bytes
        if missing := set(unpickler.storages) - set(extents):
            raise pickle.UnpicklingError(f"{len(missing)} storages are missing")
        return content, extents


def load_plain(file: BinaryIO, n_bytes: int, where: str) -> Any:
    """The value in a zip of torch.save with real tensors, which share memory as they did, have copies of the file's
    bytes, and are on the CPU.

    ``file`` has ``n_bytes`` in all. ``where`` names it in messages. Raises CheckpointError as ``TorchFile`` does.
    """
    with _named(where):
        if not zipfile.is_zipfile(file):
            raise pickle.UnpicklingError("no zip of torch.save")
        archive = _Archive(file, n_bytes, where)
        return _ToTensors(archive.open_pickle(), n_bytes, where, archive).load()


def load_part(part: Part, where: str) -> Any:
    """The same of a file that is part of another."""
    return load_plain(io.BufferedReader(_Slice(part)), part.n_bytes, where)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Turns the errors from reading a damaged or hostile file into a CheckpointError that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error}", where=where) from error
    except UNREADABLE as error:
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"is no file of torch.save, or is damaged or hostile ({type(error).__name__}: {what})",
            where=where,
            fix="take another checkpoint; this one was cut off, changed after it was written, or made by hand",
        ) from error


class _Slice(io.RawIOBase):
    """Part of an open file, as a file."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._part.n_bytes - self._at)]
        n = os.preadv(self._part.descriptor, [view], self._part.begin + self._at) if view else 0
        self._at += n
        return n

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._part.n_bytes}[whence]
        self._at = max(0, offset + origin)
        return self._at

    def tell(self) -> int:
        return self._at


class _Archive:
    """The zip of torch.save: records that are stored as they are, each under a name of its own.

    Nothing is ever inflated.
    """

    def __init__(self, file: BinaryIO, n_bytes: int, where: str) -> None:
        self._file, self._n_bytes = file, n_bytes
        # Records that storages have, and their (first byte, end) in order.
        self._claimed: set[str] = set()
        self._taken: list[tuple[int, int]] = []
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
        self._records = {info.filename: info for info in infos}
        if len(self._records) != len(infos):
            raise zipfile.BadZipFile("two records of one name")
        pickles = [name for name in self._records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise pickle.UnpicklingError("a zip without the record data.pkl")
        self._pickle = pickles[0]
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in self._records and self.read(order) != sys.byteorder.encode():
            raise CheckpointError("its numbers are of another byte order than this machine's", where=where)

    def open_pickle(self) -> BinaryIO:
        return io.BytesIO(self.read(self._pickle))

    def find_storage(self, storage: _Storage) -> tuple[int, int]:
        """(first byte, number of bytes) of its record."""
        name = self._storage_name(storage)
        if name not in self._records:
            raise pickle.UnpicklingError(f"the record {in_full(name)} is missing")
        begin, n_bytes = self._locate(name)
        if name not in self._claimed and n_bytes:
            # A directory may list the same bytes under many names, and each name would take its own memory.
            i = bisect.bisect(self._taken, (begin, begin + n_bytes))
            before, behind = self._taken[max(i - 1, 0) : i], self._taken[i : i + 1]
            if any(end > begin for _, end in before) or any(first < begin + n_bytes for first, _ in behind):
                raise pickle.UnpicklingError("storages that lie in each other")
            self._taken.insert(i, (begin, begin + n_bytes))
            self._claimed.add(name)
        if n_bytes < storage.n_bytes:
            raise pickle.UnpicklingError(
                f"storage {in_full(storage.key)} of {n_bytes} bytes instead of {storage.n_bytes}"
            )
        return begin, n_bytes

    def read_storage(self, storage: _Storage) -> bytes:
        self.find_storage(storage)
        return self.read(self._storage_name(storage))

    def read(self, name: str) -> bytes:
        begin, n_bytes = self._locate(name)
        self._file.seek(begin)
        content = self._file.read(n_bytes)
        if len(content) != n_bytes or zlib.crc32(content) != self._records[name].CRC:
            raise zipfile.BadZipFile(f"the record {in_full(name)} does not match its checksum")
        return content

    def _storage_name(self, storage: _Storage) -> str:
        return f"{self._prefix}data/{storage.key}"

    def _locate(self, name: str) -> tuple[int, int]:
        info = self._records[name]
        # The length of the extra field differs between the directory and the header before the payload.
        self._file.seek(info.header_offset)
        header = self._file.read(30)
        if len(header) != 30 or header[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"no record at the place of {in_full(name)}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise zipfile.BadZipFile(
                f"the record {in_full(name)} is compressed or encrypted, as torch.save leaves none"
            )
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        begin = info.header_offset + 30 + name_bytes + extra_bytes
        if begin + info.file_size > self._n_bytes:
            raise zipfile.BadZipFile(f"the record {in_full(name)} ends beyond the file")
        return begin, info.file_size


class _TensorUnpickler(Unpickler):
    """Knows how torch pickles tensors; a subclass decides how to represent them."""

    def __init__(
        self,
        file: BinaryIO,
        n_bytes: int,
        path: str,
        table: Mapping[str, Any],
        *,
        file_bytes: int | None = None,
        objects: Collection[type] = (),
        leaves: Collection[type] = (),
    ) -> None:
        self._path = path
        self.storages: dict[str, _Storage] = {}
        # Bytes that tensors may still take.
        self._room_bytes = TENSORS_AT_LEAST_BYTES + TENSORS_PER_BYTE * (n_bytes if file_bytes is None else file_bytes)
        self._known: set[tuple] = set()
        calls = {
            "torch._utils._rebuild_tensor": self._tensor_v1,
            "torch._utils._rebuild_tensor_v2": self._tensor_v2,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "torch._tensor._rebuild_from_type_v2": self._from_type,
            "torch._utils._rebuild_sparse_tensor": self._sparse,
            "torch.serialization._get_layout": self._layout,
        }
        self._rebuilds = {path: Global(call=call) for path, call in calls.items()}
        kinds = {
            f"{module}.{name}": _StorageKind(dtype, name != "UntypedStorage")
            for name, dtype in STORAGE_DTYPES.items()
            for module in ("torch", "torch.storage")
        }
        # Named as the class of a tensor with attributes.
        classes = {"torch.Tensor": Global(), "torch.nn.parameter.Parameter": Global()}
        super().__init__(
            file,
            n_bytes,
            {**PLAIN, **self._rebuilds, **kinds, **classes, **table},
            objects=objects,
            leaves=leaves,
        )

    def refuse_name(self, path: str) -> Any:
        raise CheckpointError(
            f"its pickle names {in_full(path)}, which is not among the classes that are allowed: a pickle can run anything it names",
            where=self._path,
            fix=FIX_TRUST,
        )

    def persistent_load(self, pid: Any) -> _Storage:
        if not (type(pid) is tuple and len(pid) in (5, 6) and pid[0] == "storage"):
            raise pickle.UnpicklingError("an unknown persistent object")
        _, kind, key, _, n_elems, *view = pid
        if type(kind) is not _StorageKind or type(n_elems) is not int or n_elems < 0 or (view and view[0] is not None):
            raise pickle.UnpicklingError("an unknown kind of storage")
        if type(key) is not str or len(key) > 100:
            raise pickle.UnpicklingError("a storage without a key")
        storage = _Storage(key, kind.dtype, n_elems, kind.is_typed)
        # Two types over the same bytes are allowed; the bytes of the longer one must be there.
        known = self.storages.get(key)
        if known is None or known.n_bytes < storage.n_bytes:
            self.storages[key] = storage
        return storage

    # Representation of tensors, defined by a subclass.

    def place(
        self, storage: _Storage, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> Any:
        """A strided tensor; its numbers fit each other, and the storage as far as the pickle knows that."""
        raise NotImplementedError

    def finish(self, tensor: Any, requires_grad: bool, metadata: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def _parameter(self, data: Any, requires_grad: bool = True, hooks: Any = None, state: Any = None) -> Any:
        raise NotImplementedError

    def _with_attributes(self, tensor: Any, state: Any) -> Any:
        raise NotImplementedError

    def _layout(self, name: str) -> Any:
        raise pickle.UnpicklingError("a layout")

    def _sparse(self, *_: Any) -> Any:
        raise pickle.UnpicklingError("a sparse tensor, which is not read by range")

    # Functions that the table calls.

    def _tensor(self, storage: _Storage, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Any:
        if type(storage) is not _Storage or not all(
            type(sizes) in (tuple, list, torch.Size) for sizes in (shape, stride)
        ):
            raise pickle.UnpicklingError("a tensor that is not described by a storage and numbers")
        shape, stride = tuple(shape), tuple(stride)
        numbers = (offset, *shape, *stride)
        if len(shape) != len(stride) or len(shape) > DIMS_LIMIT:
            raise pickle.UnpicklingError(f"a tensor of {len(shape)} sizes and {len(stride)} strides")
        if not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers) or math.prod(n or 1 for n in shape) >= 1 << 60:
            raise pickle.UnpicklingError("a tensor whose sizes, strides or offset are no sizes in memory")
        n_elems = math.prod(shape)
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        available = storage.n_bytes // dtype.itemsize
        if n_elems and last >= available:
            raise pickle.UnpicklingError(f"a tensor of {list(shape)} that does not lie in its storage of {available}")
        identity = storage.key, dtype, shape, stride, offset
        if identity not in self._known:
            self._known.add(identity)
            self._room_bytes -= n_elems * dtype.itemsize
            if self._room_bytes < 0:
                raise pickle.UnpicklingError(
                    f"tensors that take far more memory than the file, {list(shape)} of {dtype} among them (expanded ones)"
                )
        return self.place(storage, dtype, shape, stride, offset)

    def _tensor_v1(self, storage: _Storage, offset: int, shape: Any, stride: Any) -> Any:
        return self._tensor_v2(storage, offset, shape, stride)

    def _tensor_v2(
        self,
        storage: _Storage,
        offset: int,
        shape: Any,
        stride: Any,
        requires_grad: bool = False,
        hooks: Any = None,
        metadata: Any = None,
    ) -> Any:
        if type(storage) is not _Storage or not storage.is_typed:
            raise pickle.UnpicklingError("a tensor without a dtype")
        tensor = self._tensor(storage, storage.dtype, offset, shape, stride)
        return self._finished(tensor, requires_grad, metadata)

    def _tensor_v3(
        self,
        storage: _Storage,
        offset: int,
        shape: Any,
        stride: Any,
        requires_grad: bool,
        hooks: Any,
        dtype: Any,
        metadata: Any = None,
    ) -> Any:
        if type(dtype) is not torch.dtype or not (dtype in UNTYPED_DTYPES or dtype in STORAGE_DTYPES.values()):
            raise pickle.UnpicklingError("a tensor of an unknown dtype")
        return self._finished(self._tensor(storage, dtype, offset, shape, stride), requires_grad, metadata)

    def _finished(self, tensor: Any, requires_grad: Any, metadata: Any) -> Any:
        metadata = {} if metadata is None else metadata
        # Metadata: whether the file has the tensor's numbers conjugated or negated.
        if type(metadata) is not dict or not all(key in ("conj", "neg") for key in metadata):
            raise pickle.UnpicklingError("a tensor with unknown metadata")
        if type(requires_grad) is not bool:
            raise pickle.UnpicklingError("a tensor that does not say whether it has a gradient")
        return self.finish(tensor, requires_grad, metadata)

    def _from_type(self, rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
        if not any(rebuild is known for known in self._rebuilds.values()) or rebuild.call == self._from_type:
            raise pickle.UnpicklingError("a tensor that is rebuilt in an unknown way")
        return self._with_attributes(self._call(rebuild, arguments), state)


class _ToPlaces(_TensorUnpickler):
    """Tensors become ``StoredTensor``; whether they have a gradient is not kept, nor are their Python attributes, as
    stage 3 leaves some on its shards.
    """

    def __init__(
        self,
        file: BinaryIO,
        n_bytes: int,
        owner: TorchFile,
        table: Mapping[str, Any],
        objects: Collection[type],
        *,
        file_bytes: int | None = None,
    ) -> None:
        super().__init__(
            file, n_bytes, owner.path, table, file_bytes=file_bytes, objects=objects, leaves=(StoredTensor,)
        )
        self._owner = owner

    def place(
        self, storage: _Storage, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> StoredTensor:
        return StoredTensor(self._owner, storage.key, dtype, shape, stride, offset)

    def finish(self, tensor: StoredTensor, requires_grad: bool, metadata: Mapping[str, Any]) -> StoredTensor:
        if any(metadata.values()):
            raise pickle.UnpicklingError("a tensor that is a lazy conjugate or negative, which is not read by range")
        return tensor

    def _parameter(self, data: Any, requires_grad: bool = True, hooks: Any = None, state: Any = None) -> StoredTensor:
        if type(data) is not StoredTensor:
            raise pickle.UnpicklingError("a parameter without a tensor")
        return data

    def _with_attributes(self, tensor: StoredTensor, state: Any) -> StoredTensor:
        return tensor


class _ToTensors(_TensorUnpickler):
    """Tensors become tensors of torch."""

    def __init__(self, file: BinaryIO, n_bytes: int, where: str, archive: _Archive) -> None:
        super().__init__(file, n_bytes, where, {})
        self._archive = archive
        self._memory: dict[tuple[str, bool], torch.UntypedStorage] = {}

    def place(
        self, storage: _Storage, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        is_bool = dtype == torch.bool
        if (storage.key, is_bool) not in self._memory:
            content = bytearray(self._archive.read_storage(storage))
            memory = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            if is_bool:
                # Any byte may be in a file, and compilers rely on 0 and 1.
                memory.copy_(memory != 0)
            self._memory[storage.key, is_bool] = memory.untyped_storage()
        memory = self._memory[storage.key, is_bool]
        if math.prod(shape) and len(memory) // dtype.itemsize <= offset:
            raise pickle.UnpicklingError("a tensor that does not lie in its storage")
        return torch.empty(0, dtype=dtype).set_(memory, offset, shape, stride)

    def finish(self, tensor: torch.Tensor, requires_grad: bool, metadata: Mapping[str, Any]) -> torch.Tensor:
        if metadata.get("conj") is True:
            tensor = tensor.conj()
        if metadata.get("neg") is True:
            tensor = torch._neg_view(tensor)
        return tensor.requires_grad_(requires_grad)

    def _parameter(self, data: Any, requires_grad: bool = True, hooks: Any = None, state: Any = None) -> torch.Tensor:
        if type(data) is not torch.Tensor or type(requires_grad) is not bool:
            raise pickle.UnpicklingError("a parameter without a tensor")
        return self._with_attributes(torch.nn.Parameter(data, requires_grad), state)

    def _with_attributes(self, tensor: torch.Tensor, state: Any) -> torch.Tensor:
        if type(state) is tuple and len(state) == 2 and state[1] in (None, {}):
            state = state[0]
        attributes = check_attributes({} if state is None else state)
        # Freeing a chain of tensors that hold each other takes a level of the C stack for each tensor.
        if not all(type(value) in (type(None), bool, int, float, str) for value in attributes.values()):
            raise pickle.UnpicklingError("a tensor with attributes that are no numbers or texts")
        vars(tensor).update(attributes)
        return tensor

    def _layout(self, name: str) -> Any:
        found = vars(torch).get(name.removeprefix("torch.")) if type(name) is str else None
        return found if type(found) is torch.layout else _no_layout()

    def _sparse(self, layout: Any, data: Any) -> torch.Tensor:
        if type(layout) is not torch.layout or type(data) is not tuple or len(data) != 4:
            raise pickle.UnpicklingError("a sparse tensor that is made in an unknown way")
        is_coo = layout == torch.sparse_coo
        *tensors, size, is_coalesced = data if is_coo else (*data, None)
        if not all(type(tensor) is torch.Tensor and tensor.layout == torch.strided for tensor in tensors):
            raise pickle.UnpicklingError("a sparse tensor without its parts")
        if type(size) is not torch.Size or math.prod(n or 1 for n in size) >= 1 << 60 or min(size, default=0) < 0:
            raise pickle.UnpicklingError("a sparse tensor without a size")
        if is_coo:
            if type(is_coalesced) is not bool:
                raise pickle.UnpicklingError("a sparse tensor in an unknown state")
            return torch.sparse_coo_tensor(*tensors, size, check_invariants=True, is_coalesced=is_coalesced)
        return torch.sparse_compressed_tensor(*tensors, size, layout=layout, check_invariants=True)


def _no_layout() -> Any:
    raise pickle.UnpicklingError("a layout that torch does not have")


def _chunks(begin: int, n: int, at_most: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, begin + n, at_most):
        yield at, min(at_most, begin + n - at)


def fill(jobs: Sequence[tuple[StoredTensor, int, torch.Tensor]]) -> None:
    """For each (stored, begin, into): copies elements [begin, begin + into.numel()) of ``stored`` in row-major order
    into the flat tensor ``into``.

    Each file is read once from front to back: straight into memory of the CPU that has the same dtype, else through
    STAGING_BYTES. Raises CheckpointError if a file cannot be read.
    """
    by_file: dict[str, list[tuple[StoredTensor, int, torch.Tensor]]] = {}
    for job in jobs:
        if job[2].numel():
            by_file.setdefault(job[0].file.path, []).append(job)
    with torch.no_grad():
        for path, of_file in by_file.items():
            of_file.sort(key=lambda job: (job[0].file.storage_range(job[0].key)[0], job[0].offset + job[1]))
            try:
                with open(path, "rb", buffering=0) as file:
                    for stored, begin, into in of_file:
                        read = _read_contiguous if stored.is_contiguous else _read_strided
                        read(file, stored, begin, into)
            except OSError as error:
                raise CheckpointError(f"cannot be read: {error}", where=path) from error


def _read_contiguous(file: BinaryIO, stored: StoredTensor, begin: int, into: torch.Tensor) -> None:
    itemsize = stored.dtype.itemsize
    first_byte, _ = stored.file.byte_range(stored)
    if into.device.type == "cpu" and into.dtype == stored.dtype and into.is_contiguous():
        read_bytes(file.fileno(), first_byte + begin * itemsize, into, stored.file.path)
        return
    at_most = STAGING_BYTES // itemsize
    staging = torch.empty(min(at_most, into.numel()), dtype=stored.dtype, device="cpu")
    for at, n in _chunks(0, into.numel(), at_most):
        read_bytes(file.fileno(), first_byte + (begin + at) * itemsize, staging[:n], stored.file.path)
        into[at : at + n].copy_(staging[:n])


def _read_strided(file: BinaryIO, stored: StoredTensor, begin: int, into: torch.Tensor) -> None:
    # Rare (a transposed or channels-last weight). The file is mapped, so that the kernel can drop its pages.
    import mmap

    first_byte, n_bytes = stored.file.storage_range(stored.key)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        storage = torch.frombuffer(
            mapped, dtype=stored.dtype, offset=first_byte, count=n_bytes // stored.dtype.itemsize
        )
        for at, n in _chunks(begin, into.numel(), STAGING_BYTES // 8):
            # Element numbers are split into one index for each dimension, the last dimension first.
            index = torch.arange(at, at + n)
            place = torch.full((n,), stored.offset)
            for size, stride in zip(reversed(stored.shape), reversed(stored.stride), strict=True):
                place += index % size * stride
                index //= size
            into[at - begin : at - begin + n].copy_(storage[place])
        # The mapping cannot be closed while a tensor points into it.
        del storage


def materialize(content: Any) -> Any:
    """``content`` with real tensors (on the CPU) in the place of stored ones; tensors that are the same in the file are
    made once.
    """
    jobs: list[tuple[StoredTensor, int, torch.Tensor]] = []
    made: dict[tuple, torch.Tensor] = {}

    def walk(value: Any) -> Any:
        kind = type(value)
        if kind is StoredTensor:
            if value.identity not in made:
                made[value.identity] = tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                jobs.append((value, 0, tensor.view(-1)))
            return made[value.identity]
        if kind is dict or kind is OrderedDict:
            return {key: walk(item) for key, item in value.items()}
        if kind is list or kind is tuple:
            return kind(walk(item) for item in value)
        if kind is types.SimpleNamespace or kind is Namespace:
            return kind(**walk(vars(value)))
        return value

    result = walk(content)
    fill(jobs)
    return result
