"""Reads files of torch.save without running anything that they name, and without reading the tensors: those become places in the file.

A pickle is a program. Here it may call what the table in ``_Unpickler`` holds and nothing else: plain Python data, tensors as
``StoredTensor``, and DeepSpeed's own few classes as inert stand-ins. DeepSpeed need not be installed.
"""

from __future__ import annotations

import collections
import datetime
import math
import os
import pathlib
import pickle
import struct
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import torch

from deepspeed_c.checkpoint.ranges import read_bytes
from deepspeed_c.errors import CheckpointError

__all__ = [
    "UPSTREAM",
    "DynamicLossScaler",
    "LossScaleConfig",
    "LossScaleProfile",
    "LossScaler",
    "StoredTensor",
    "TorchFile",
    "fill",
    "fragment_address",
    "materialize",
]

# What is read at once where elements must be converted or moved on: enough for the system call to cost nothing.
STAGING_BYTES = 8 << 20
# torch.save's format before zip: the number its first pickle holds (torch.serialization.MAGIC_NUMBER), and the only version there is.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001

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
    # What it holds is said where the tensor is rebuilt; its length counts bytes.
    "UntypedStorage": torch.uint8,
}


class _Frozen(type):
    """A pickle may set attributes of whatever it can name; of these classes it cannot."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__} cannot be changed")


def _stand_in(path: str) -> type:
    module, _, name = path.rpartition(".")

    def __init__(self: Any, *args: Any) -> None:
        # Enumerations are pickled as a call with their value.
        if args:
            self.value = args[0]

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        if set(vars(self)) == {"value"}:
            return type(self), (self.value,)
        return object.__reduce_ex__(self, 2)

    def __repr__(self: Any) -> str:
        return f"<{path} {vars(self)}>"

    body = {
        "__module__": module,
        "__qualname__": name,
        "__init__": __init__,
        "__reduce_ex__": __reduce_ex__,
        "__repr__": __repr__,
        "__doc__": f"Holds the attributes of a pickled {path}, and does nothing.",
    }
    return _Frozen(name, (), body)


# Classes of DeepSpeed that its checkpoints hold, by the path that their pickles name. Each is a class with attributes and no behaviour.
UPSTREAM: dict[str, type] = {
    path: _stand_in(path)
    for path in (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
        "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.utils.tensor_fragment.tensor_fragment",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
        "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    )
}

LossScaler, DynamicLossScaler, LossScaleConfig, LossScaleProfile = (
    UPSTREAM[f"deepspeed.runtime.fp16.loss_scaler.{name}"]
    for name in ("LossScaler", "DynamicLossScaler", "LossScaleConfig", "LossScaleProfile")
)
fragment_address = UPSTREAM["deepspeed.utils.tensor_fragment.fragment_address"]


class _Mapping(dict, metaclass=_Frozen):
    """An OrderedDict of a pickle; the attributes that torch hangs on those of state_dict() are dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _StorageKind(NamedTuple):
    dtype: torch.dtype


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype
    n_elems: int


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

    Attributes: ``path``; ``content``, the saved object with ``StoredTensor`` in the place of tensors.
    Raises CheckpointError for a file that cannot be read, is cut off, or names what is not allowed.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        # Storage -> (first byte in the file, number of bytes).
        self._extents: dict[str, tuple[int, int]] = {}
        self.content: Any = None
        try:
            with open(self.path, "rb") as file:
                self._file_bytes = os.fstat(file.fileno()).st_size
                if zipfile.is_zipfile(file):
                    self._load_zip(file)
                else:
                    file.seek(0)
                    self._load_legacy(file)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error}", where=self.path) from error
        except CheckpointError:
            raise
        except (
            pickle.UnpicklingError,
            zipfile.BadZipFile,
            struct.error,
            ArithmeticError,
            AttributeError,
            EOFError,
            LookupError,
            MemoryError,
            NotImplementedError,  # zipfile: a feature that torch.save does not use
            RecursionError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise CheckpointError(
                f"is no file of torch.save, or is damaged ({type(error).__name__}: {error})",
                where=self.path,
                fix="take another checkpoint; this one was cut off or changed after it was written",
            ) from error

    def byte_range(self, stored: StoredTensor) -> tuple[int, int]:
        """(first byte, number of bytes) of a contiguous tensor in the file."""
        return self._extents[stored.key][0] + stored.offset * stored.dtype.itemsize, (
            stored.n_elems * stored.dtype.itemsize
        )

    def storage_range(self, key: str) -> tuple[int, int]:
        return self._extents[key]

    def _load_zip(self, file: BinaryIO) -> None:
        with zipfile.ZipFile(file) as archive:
            records = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(pickles) != 1:
                raise pickle.UnpicklingError("a zip without the record data.pkl")
            prefix = pickles[0].removesuffix("data.pkl")
            order = records.get(f"{prefix}byteorder")
            if order is not None and archive.read(order) != sys.byteorder.encode():
                raise CheckpointError("its numbers are of another byte order than this machine's", where=self.path)
            if records[pickles[0]].compress_type != zipfile.ZIP_STORED:
                raise pickle.UnpicklingError("a compressed record, which torch.save does not write")
            unpickler = _Unpickler(archive.open(pickles[0]), self)
            self.content = unpickler.load()
            for storage in unpickler.storages.values():
                name = f"{prefix}data/{storage.key}"
                if name not in records:
                    raise pickle.UnpicklingError(f"the record {name} is missing")
                self._extents[storage.key] = self._locate(file, records[name])
                self._check_length(storage)

    def _locate(self, file: BinaryIO, info: zipfile.ZipInfo) -> tuple[int, int]:
        # The length of the extra field differs between the directory and the header before the payload.
        file.seek(info.header_offset)
        header = file.read(30)
        if len(header) != 30 or header[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"no plain record at the place of {info.filename}")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        return info.header_offset + 30 + name_bytes + extra_bytes, info.file_size

    def _load_legacy(self, file: BinaryIO) -> None:
        if _Unpickler(file, self).load() != LEGACY_MAGIC:
            raise pickle.UnpicklingError("it begins like no file of torch.save")
        version = _Unpickler(file, self).load()
        if version != LEGACY_VERSION:
            raise pickle.UnpicklingError(f"version {version!r} of torch.save's old format is not known")
        if _Unpickler(file, self).load()["little_endian"] != (sys.byteorder == "little"):
            raise CheckpointError("its numbers are of another byte order than this machine's", where=self.path)
        unpickler = _Unpickler(file, self)
        self.content = unpickler.load()
        keys = _Unpickler(file, self).load()
        begin = file.tell()
        for key in keys:
            storage = unpickler.storages[key]
            file.seek(begin)
            (n_elems,) = struct.unpack("<q", file.read(8))
            if n_elems != storage.n_elems:
                raise pickle.UnpicklingError(f"a storage of {n_elems} elements where {storage.n_elems} are expected")
            self._extents[key] = begin + 8, n_elems * storage.dtype.itemsize
            self._check_length(storage)
            begin += 8 + n_elems * storage.dtype.itemsize
        if missing := set(unpickler.storages) - set(keys):
            raise pickle.UnpicklingError(f"{len(missing)} storages are missing")

    def _check_length(self, storage: _Storage) -> None:
        begin, n_bytes = self._extents[storage.key]
        if n_bytes < storage.n_elems * storage.dtype.itemsize or begin + n_bytes > self._file_bytes:
            raise pickle.UnpicklingError(
                f"storage {storage.key} should have {storage.n_elems * storage.dtype.itemsize} bytes from byte {begin} on, "
                f"in a file of {self._file_bytes}"
            )


class _Unpickler(pickle.Unpickler):
    """Calls nothing but what ``find_class`` hands out.

    That are immutable types of Python and torch, frozen classes, and bound methods of this object: none of them can be changed by the pickle
    either (the BUILD instruction sets attributes).
    """

    def __init__(self, file: BinaryIO, owner: TorchFile) -> None:
        super().__init__(file, encoding="utf-8")
        self._owner = owner
        self.storages: dict[str, _Storage] = {}
        self._table: dict[str, Any] = {
            **UPSTREAM,
            "collections.OrderedDict": _Mapping,
            "collections.Counter": self._counter,
            "collections.defaultdict": collections.defaultdict,
            "collections.deque": collections.deque,
            "argparse.Namespace": types.SimpleNamespace,
            "types.SimpleNamespace": types.SimpleNamespace,
            "datetime.datetime": datetime.datetime,
            "datetime.date": datetime.date,
            "datetime.time": datetime.time,
            "datetime.timedelta": datetime.timedelta,
            "_codecs.encode": self._encode,
            "copyreg._reconstructor": self._reconstruct,
            "torch.Size": self._size,
            "torch.device": self._device,
            "torch._utils._rebuild_tensor": self._tensor_v1,
            "torch._utils._rebuild_tensor_v2": self._tensor_v2,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "torch._tensor._rebuild_from_type_v2": self._from_type,
            "torch.Tensor": torch.Tensor,
            "torch.nn.parameter.Parameter": torch.Tensor,
        }
        for path in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            self._table[f"pathlib.{path}"] = self._table[f"pathlib._local.{path}"] = self._path
        for plain in (
            set,
            frozenset,
            list,
            dict,
            tuple,
            int,
            float,
            bool,
            str,
            complex,
            bytearray,
            slice,
            range,
            object,
        ):
            self._table[f"builtins.{plain.__name__}"] = self._table[f"__builtin__.{plain.__name__}"] = plain
        for name, dtype in STORAGE_DTYPES.items():
            self._table[f"torch.{name}"] = self._table[f"torch.storage.{name}"] = _StorageKind(dtype)

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path in self._table:
            return self._table[path]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module.split(".")[0] == "numpy" and (found := self._numpy(module, name)) is not None:
            return found
        raise CheckpointError(
            f"its pickle names {path}, which is not among the classes that are allowed: a pickle can run anything it names",
            where=self._owner.path,
            fix=FIX_TRUST,
        )

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"):
            raise pickle.UnpicklingError(f"an unknown persistent object {str(pid)[:80]}")
        _, kind, key, _, n_elems, *view = pid
        if not isinstance(kind, _StorageKind) or not isinstance(n_elems, int) or n_elems < 0 or (view and view[0]):
            raise pickle.UnpicklingError(f"an unknown kind of storage {str(pid)[:80]}")
        storage = _Storage(str(key), kind.dtype, n_elems)
        # Two types over the same bytes are allowed; the longer one is what must be there.
        known = self.storages.get(storage.key)
        if known is None or known.n_elems * known.dtype.itemsize < n_elems * kind.dtype.itemsize:
            self.storages[storage.key] = storage
        return storage

    # What the table calls.

    def _tensor(
        self, storage: _Storage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
    ) -> StoredTensor:
        shape, stride = tuple(shape), tuple(stride)
        numbers = (offset, *shape, *stride)
        if not isinstance(storage, _Storage) or len(shape) != len(stride) or not all(type(n) is int for n in numbers):
            raise pickle.UnpicklingError("a tensor that is not described by a storage and numbers")
        stored = StoredTensor(self._owner, storage.key, dtype, shape, stride, offset)
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        available = storage.n_elems * storage.dtype.itemsize // dtype.itemsize
        if min(numbers) < 0 or (stored.n_elems and last >= available):
            raise pickle.UnpicklingError(f"a tensor of {list(shape)} that does not lie in its storage of {available}")
        return stored

    def _tensor_v1(self, storage: _Storage, offset: int, shape: Any, stride: Any) -> StoredTensor:
        return self._tensor(storage, storage.dtype, offset, shape, stride)

    def _tensor_v2(self, storage: _Storage, offset: int, shape: Any, stride: Any, *unused: Any) -> StoredTensor:
        return self._tensor(storage, storage.dtype, offset, shape, stride)

    def _tensor_v3(
        self, storage: _Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *unused: Any
    ) -> StoredTensor:
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"{dtype!r} is no dtype")
        return self._tensor(storage, dtype, offset, shape, stride)

    def _parameter(self, data: Any, *unused: Any) -> StoredTensor:
        if not isinstance(data, StoredTensor):
            raise pickle.UnpicklingError("a parameter without a tensor")
        return data

    def _from_type(self, rebuild: Callable, kind: Any, args: Sequence, state: Any) -> StoredTensor:
        # A tensor with Python attributes, as stage 3 leaves them on its shards: the attributes are dropped.
        if rebuild not in (self._tensor_v1, self._tensor_v2, self._tensor_v3, self._parameter):
            raise pickle.UnpicklingError("a tensor that is rebuilt in an unknown way")
        return rebuild(*args)

    def _size(self, sizes: Any = ()) -> tuple[int, ...]:
        return tuple(sizes)

    def _device(self, kind: str, index: int | None = None) -> str:
        return str(kind) if index is None else f"{kind}:{index}"

    def _counter(self, items: Any = ()) -> collections.Counter:
        return collections.Counter(dict(items))

    def _path(self, *parts: str) -> pathlib.PurePath:
        return pathlib.PurePath(*parts)

    def _encode(self, text: str, encoding: str) -> bytes:
        # How protocol 2 writes bytes.
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"the encoding {encoding!r}")
        return text.encode("latin-1")

    def _reconstruct(self, cls: type, base: type, state: Any) -> Any:
        if cls not in UPSTREAM.values() or base is not object:
            raise pickle.UnpicklingError(f"an object of {cls!r} made from {base!r}")
        return cls.__new__(cls)

    def _numpy(self, module: str, name: str) -> Any:
        """Scalars and plain arrays of numpy, if it is installed."""
        try:
            import numpy
        except ImportError:
            return None
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return {"scalar": self._numpy_scalar, "_reconstruct": self._numpy_array}.get(name)
        if module == "numpy" and name in ("dtype", "ndarray"):
            return getattr(numpy, name)
        if module == "numpy.dtypes" and isinstance(found := getattr(numpy.dtypes, name, None), type):
            return found
        return None

    def _numpy_scalar(self, dtype: Any, content: Any = None) -> Any:
        import numpy

        if not isinstance(dtype, numpy.dtype) or dtype.hasobject or not isinstance(content, bytes):
            raise pickle.UnpicklingError("a numpy scalar that is no number")
        return numpy.frombuffer(content, dtype=dtype, count=1)[0]

    def _numpy_array(self, cls: Any, shape: Any, kind: Any) -> Any:
        import numpy

        return numpy.ndarray.__new__(numpy.ndarray, (0,), "b")


def _chunks(begin: int, n: int, at_most: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, begin + n, at_most):
        yield at, min(at_most, begin + n - at)


def fill(jobs: Sequence[tuple[StoredTensor, int, torch.Tensor]]) -> None:
    """For each (stored, begin, into): copies elements [begin, begin + into.numel()) of ``stored`` in row-major order into the flat tensor ``into``.

    Each file is read once from front to back: straight into memory of the CPU that has the same dtype, else through STAGING_BYTES.
    Raises CheckpointError for what cannot be read.
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
    # Rare (a transposed or channels-last weight): the file is mapped, so its pages are the kernel's to drop.
    import mmap

    first_byte, n_bytes = stored.file.storage_range(stored.key)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        storage = torch.frombuffer(
            mapped, dtype=stored.dtype, offset=first_byte, count=n_bytes // stored.dtype.itemsize
        )
        for at, n in _chunks(begin, into.numel(), STAGING_BYTES // 8):
            # Element numbers are counted out into one index a dimension, the last first.
            index = torch.arange(at, at + n)
            place = torch.full((n,), stored.offset)
            for size, stride in zip(reversed(stored.shape), reversed(stored.stride), strict=True):
                place += index % size * stride
                index //= size
            into[at - begin : at - begin + n].copy_(storage[place])
        # The mapping cannot be closed while a tensor points into it.
        del storage


def materialize(content: Any) -> Any:
    """``content`` with real tensors (on the CPU) and dictionaries of Python in the place of those that were read."""
    jobs: list[tuple[StoredTensor, int, torch.Tensor]] = []

    def walk(value: Any) -> Any:
        if isinstance(value, StoredTensor):
            tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            jobs.append((value, 0, tensor.view(-1)))
            return tensor
        if type(value) in (dict, _Mapping):
            return {key: walk(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(item) for item in value)
        if type(value) is types.SimpleNamespace:
            return types.SimpleNamespace(**walk(vars(value)))
        return value

    result = walk(content)
    fill(jobs)
    return result
