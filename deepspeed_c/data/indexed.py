"""Indexed data sets, the files of Megatron-LM: items of different lengths after one another in ``NAME.bin``, and where
they lie in ``NAME.idx``.

The index: "MMIDIDX\\0\\0", version 1 (uint64), code of the dtype (uint8), number of items and of document boundaries
(uint64); then lengths (int32), offsets in bytes (int64), document boundaries (int64), and for some files the modes of
items (int8). Numbers are little-endian. Megatron-LM and DeepSpeed give codes from 6 on different meanings; the reader
tells them apart by the offsets, and the writer uses Megatron's.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from deepspeed_c.checkpoint.native.commit import sync_path
from deepspeed_c.errors import ConfigError, DataFileError

__all__ = [
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "create_doc_idx",
    "data_file_path",
    "dataset_exists",
    "get_available_dataset_impl",
    "index_file_path",
    "make_builder",
    "make_dataset",
    "numpy_dtype",
]

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_OLD_MAGIC = b"TNTIDX\0\0"

MEGATRON = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
DEEPSPEED = {**MEGATRON, 6: np.uint16, 7: np.uint32, 8: np.uint64}

# Types that Megatron's codes lack, and the type that holds their values.
_WIDER = {np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64, np.dtype(np.bool_): np.uint8}

WHOLE_BELOW = 1e-30
"""Code 7 is float32 or uint32, which are equally long. Whole numbers below 2 * 10^8 read as floats below this."""


def index_file_path(prefix_path: str) -> str:
    return str(prefix_path) + ".idx"


def data_file_path(prefix_path: str) -> str:
    return str(prefix_path) + ".bin"


def create_doc_idx(sizes: Iterable[int]) -> list[int]:
    """Document boundaries, where an empty item ends a document."""
    return [0, *(i + 1 for i, size in enumerate(sizes) if size == 0)]


class _Index:
    """The index of a data set: where each item lies. ``n_bytes`` is the size of the other file."""

    def __init__(self, path: str, n_bytes: int, dtype: Any = None) -> None:
        self.path = path
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            head = file.read(_HEADER.size)
        self._require(len(head) == _HEADER.size, f"has {len(head)} bytes, a header has {_HEADER.size}")
        magic, version, self.code, self.n_items, self.n_boundaries = _HEADER.unpack(head)
        if head.startswith(_OLD_MAGIC):
            raise DataFileError(
                "is of the kind that is not memory-mapped (lazy, cached)",
                where=path,
                fix="convert it with Megatron-LM's preprocess_data.py --dataset-impl mmap",
            )
        self._require(magic == _MAGIC, f"begins with {magic!r}, an index begins with {_MAGIC!r}")
        self._require(version == 1, f"is of version {version}, version 1 is known")
        self._require(self.code in MEGATRON, f"has the dtype code {self.code}, codes are 1 to 8")
        rest = size - _HEADER.size - 12 * self.n_items - 8 * self.n_boundaries
        self._require(
            rest in (0, self.n_items),
            f"has {size} bytes, which do not hold {self.n_items} items and {self.n_boundaries} document boundaries",
        )
        mapped = np.memmap(path, mode="r") if self.n_items or self.n_boundaries else np.empty(0, np.uint8)
        at = _HEADER.size
        self.sizes = mapped[at : at + 4 * self.n_items].view("<i4")
        at += 4 * self.n_items
        self.pointers = mapped[at : at + 8 * self.n_items].view("<i8")
        at += 8 * self.n_items
        self.doc_idx = mapped[at : at + 8 * self.n_boundaries].view("<i8")
        self._check(n_bytes)
        self.dtype = np.dtype(dtype or self._dtype())
        self._require(
            self._fits(self.dtype.itemsize), f"has offsets that are not those of items of {self.dtype.itemsize} bytes"
        )
        end = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if self.n_items else 0
        self._require(end <= n_bytes, f"has items up to byte {end}, and the data file has {n_bytes}")
        self.n_elems = end // self.dtype.itemsize

    def _require(self, is_good: bool, problem: str) -> None:
        if not is_good:
            raise DataFileError(
                problem, where=self.path, fix="make the files again; they are damaged or of another kind"
            )

    def _check(self, n_bytes: int) -> None:
        for i in range(0, self.n_items, _BLOCK):
            sizes, pointers = self.sizes[i : i + _BLOCK], self.pointers[i : i + _BLOCK]
            self._require(bool((sizes >= 0).all()), "has an item of negative length")
            self._require(
                bool((pointers >= 0).all() and (pointers <= n_bytes).all()), "has an offset outside of the data"
            )
        bounds = self.doc_idx
        self._require(
            not len(bounds)
            or bool((bounds >= 0).all() and (bounds <= self.n_items).all() and (np.diff(bounds) >= 0).all()),
            f"has document boundaries outside of its {self.n_items} items, or not in order",
        )

    def _dtype(self) -> Any:
        """The dtype of the code, in the program's table whose items are as long as the offsets say."""
        megatron, deepspeed = MEGATRON[self.code], DEEPSPEED[self.code]
        if megatron is deepspeed or self._fits(np.dtype(megatron).itemsize) > self._fits(np.dtype(deepspeed).itemsize):
            return megatron
        if self._fits(np.dtype(megatron).itemsize) < self._fits(np.dtype(deepspeed).itemsize):
            return deepspeed
        return megatron if self.code != 7 or not self._holds_whole_numbers() else deepspeed

    def _fits(self, item_size: int) -> bool:
        """Whether items of this size follow one another as the offsets say."""
        for i in range(0, self.n_items, _BLOCK):
            pointers, sizes = self.pointers[i : i + _BLOCK + 1], self.sizes[i : i + _BLOCK]
            if i == 0 and pointers[0] != 0:
                return False
            if not np.array_equal(np.diff(pointers), sizes[: len(pointers) - 1].astype(np.int64) * item_size):
                return False
        return True

    def _holds_whole_numbers(self) -> bool:
        data = self.path.removesuffix(".idx") + ".bin"
        n = min(int(self.sizes.sum(dtype=np.int64)), _LOOKED_AT)
        values = np.fromfile(data, dtype="<f4", count=n)
        return bool(n) and bool((np.abs(values) < WHOLE_BELOW).all()) and bool((values != 0).any())


_BLOCK = 1 << 20  # items that are checked at once
_LOOKED_AT = 1 << 12


class MMapIndexedDataset(Dataset):
    """The items of ``path``.bin, as numpy arrays that are views of the mapped file.

    ``dtype``: of the items, if the index's code is not to be believed. Raises DataFileError for files that are damaged
    or do not belong together, before an item is read. A forked or spawned worker opens the files by itself.
    """

    def __init__(self, path: str, skip_warmup: bool = True, dtype: Any = None) -> None:
        """skip_warmup: not used; the files are read when items are."""
        super().__init__()
        self._path, self._asked = str(path), dtype
        data = data_file_path(self._path)
        for name in (index_file_path(self._path), data):
            if not os.path.isfile(name):
                raise DataFileError("is missing", where=name, fix="give the path of both files, without .idx and .bin")
        self._index = _Index(index_file_path(self._path), os.path.getsize(data), dtype)
        n, item = self._index.n_elems, self._index.dtype
        self.flat: np.ndarray = np.memmap(data, dtype=item, mode="r", shape=(n,)) if n else np.empty(0, item)
        """All items after one another."""
        self._doc_idx = self._index.doc_idx

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path, True, self._asked)

    def __len__(self) -> int:
        return self._index.n_items

    def __getitem__(self, idx: int | slice) -> Any:
        """An item, or the list of the items of a slice of step 1."""
        if not isinstance(idx, slice):
            return self.get(idx)
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ValueError(f"items {idx}: only slices of step 1 lie after one another")
        return [self.get(i) for i in range(start, stop)]

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """``length`` elements of an item from ``offset`` on; by default all. Raises IndexError outside of the item."""
        n_items = len(self)
        if not -n_items <= idx < n_items:
            raise IndexError(f"item {idx} of {n_items}")
        size = int(self._index.sizes[idx])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"elements {offset} to {offset + length} of item {idx}, which has {size}")
        first = int(self._index.pointers[idx]) // self._index.dtype.itemsize + offset
        return np.asarray(self.flat[first : first + length])

    @property
    def sizes(self) -> np.ndarray:
        """The lengths of the items, int32."""
        return self._index.sizes

    def size(self, index: int) -> int:
        return int(self._index.sizes[index])

    @property
    def doc_idx(self) -> np.ndarray:
        """Numbers of the items at which documents begin, and of items at the end, int64."""
        return self._doc_idx

    def get_doc_idx(self) -> np.ndarray:
        return self._doc_idx

    def set_doc_idx(self, doc_idx_: np.ndarray) -> None:
        self._doc_idx = doc_idx_

    @property
    def dtype(self) -> type:
        return self._index.dtype.type

    @property
    def supports_prefetch(self) -> bool:
        return False

    @staticmethod
    def exists(path: str) -> bool:
        return os.path.exists(index_file_path(path)) and os.path.exists(data_file_path(path))


class MMapIndexedDatasetBuilder:
    """Writes the two files. They have their names only when ``finalize`` has written all of both, the index last.

    Items of uint32 and uint64 are stored as int64, because Megatron's codes do not have them.
    """

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        """out_file: name of the .bin file. dtype: numpy's or torch's."""
        self._dtype = _stored_dtype(dtype)
        self._out = str(out_file)
        self._data_file = Path(_unfinished(self._out)).open("wb")  # noqa: SIM115  (finalize closes it)
        self._sizes: list[int] = []
        self._doc_idx = [0]

    def add_item(self, tensor: torch.Tensor) -> None:
        self.add_item_numpy(tensor.detach().cpu().numpy())

    def add_items(self, arr_list: Iterable[np.ndarray]) -> None:
        for array in arr_list:
            self.add_item_numpy(array)

    def add_item_numpy(self, np_array: np.ndarray) -> None:
        """Appends an item. Raises DataFileError if the dtype cannot hold its values."""
        self.add_flat(np_array, [np.size(np_array)])

    def add_flat(self, np_array: np.ndarray, sizes: Iterable[int]) -> None:
        """Appends items that lie after one another in an array: as many elements each as ``sizes`` says."""
        given = np.asarray(np_array)
        stored = given.astype(self._dtype)
        is_cut = given.dtype != stored.dtype and self._dtype.kind in "iu"
        if is_cut and not np.array_equal(stored.astype(given.dtype) if given.dtype.kind == "f" else stored, given):
            raise DataFileError(
                f"an item has values that {self._dtype} cannot hold", where=self._out, fix="build it with a wider dtype"
            )
        self._data_file.write(stored.tobytes())
        self._sizes.extend(np.asarray(sizes, dtype=np.int64).tolist())

    def end_document(self) -> None:
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file: str) -> None:
        """Appends the items and documents of another data set (its path without ending)."""
        other = MMapIndexedDataset(another_file)
        if np.dtype(other.dtype) != self._dtype:
            raise DataFileError(
                f"has items of {np.dtype(other.dtype)}, and those before are {self._dtype}",
                where=index_file_path(another_file),
                fix="build both with one dtype",
            )
        n = len(self._sizes)
        self._sizes.extend(other.sizes.tolist())
        self._doc_idx.extend((other.doc_idx[1:] + n).tolist())
        with open(data_file_path(another_file), "rb") as data:
            shutil.copyfileobj(data, self._data_file, 1 << 20)

    def finalize(self, index_file: str) -> None:
        """Writes the index and gives both files their names."""
        self._data_file.close()
        Path(_unfinished(index_file)).write_bytes(b"".join(self._index()))
        for name in (self._out, index_file):
            sync_path(_unfinished(name))
        for name in (self._out, index_file):
            os.replace(_unfinished(name), name)
            sync_path(os.path.dirname(name) or ".")

    def _index(self) -> Iterator[bytes]:
        sizes = np.array(self._sizes, dtype=np.int64)
        if len(sizes) and sizes.max() > np.iinfo(np.int32).max:
            raise DataFileError(
                f"an item has {sizes.max()} elements, lengths have 32 bits",
                where=self._out,
                fix="cut it into several items",
            )
        pointers = np.zeros(len(sizes), dtype="<i8")
        np.cumsum(sizes[:-1] * self._dtype.itemsize, out=pointers[1:])
        yield _HEADER.pack(_MAGIC, 1, _CODES[self._dtype], len(sizes), len(self._doc_idx))
        yield sizes.astype("<i4").tobytes()
        yield pointers.tobytes()
        yield np.array(self._doc_idx, dtype="<i8").tobytes()


_CODES = {np.dtype(kind): code for code, kind in MEGATRON.items()}


def numpy_dtype(dtype: Any) -> np.dtype:
    """numpy's dtype of numpy's or torch's. Raises TypeError where numpy has none."""
    return np.dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)


def _stored_dtype(dtype: Any) -> np.dtype:
    try:
        asked = numpy_dtype(dtype)
        stored = np.dtype(_WIDER.get(asked, asked))
    except TypeError:
        stored = None
    if stored not in _CODES:
        raise ConfigError(
            f"is {dtype}", where="MMapIndexedDatasetBuilder(dtype=)", fix=f"use one of {', '.join(map(str, _CODES))}"
        )
    return stored


def _unfinished(name: str) -> str:
    return f"{name}.unfinished"


def make_builder(out_file: str, impl: str, vocab_size: int | None = None) -> MMapIndexedDatasetBuilder:
    """A builder of tokens: uint16 for a vocabulary below 65500, else int32. ``impl`` is "mmap"."""
    _require_mmap(impl, "make_builder")
    return MMapIndexedDatasetBuilder(out_file, np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32)


def get_available_dataset_impl() -> list[str]:
    """The values of ``impl``."""
    return ["mmap"]


def make_dataset(path: str, impl: str, skip_warmup: bool = False) -> MMapIndexedDataset:
    """The data set ``path``. ``impl`` is "mmap" or "infer"."""
    if impl != "infer":
        _require_mmap(impl, "make_dataset")
    return MMapIndexedDataset(path, skip_warmup)


def dataset_exists(path: str, impl: str) -> bool:
    return MMapIndexedDataset.exists(path)


def _require_mmap(impl: str, where: str) -> None:
    if impl != "mmap":
        raise ConfigError(f"is {impl!r}", where=f"{where}(impl=)", fix='use "mmap": files of other kinds are old')
