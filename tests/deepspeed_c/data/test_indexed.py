"""data/indexed.py: what was written is read, files of both programs, written by hand, and damaged files."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from deepspeed_c.data.indexed import (
    DEEPSPEED,
    MEGATRON,
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    create_doc_idx,
    dataset_exists,
    make_builder,
    make_dataset,
)
from deepspeed_c.errors import ConfigError, DataFileError

ITEMS = [[3, 1, 2], [], [7], [0, 5, 5, 5, 1]]


def write_by_hand(path, code, dtype, items, modes=False):
    """The files as their description says, without the package."""
    arrays = [np.array(item, dtype) for item in items]
    sizes = [len(a) for a in arrays]
    pointers = [sum(sizes[:i]) * np.dtype(dtype).itemsize for i in range(len(sizes))]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), 2)
    index += struct.pack(f"<{len(sizes)}i{len(sizes)}q2q", *sizes, *pointers, 0, len(sizes))
    Path(f"{path}.idx").write_bytes(index + (bytes(len(sizes)) if modes else b""))
    Path(f"{path}.bin").write_bytes(b"".join(a.tobytes() for a in arrays))


def build(path, items=ITEMS, dtype=np.int32, documents=()):
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype)
    for i, item in enumerate(items):
        builder.add_item_numpy(np.array(item, dtype=builder._dtype))
        if i in documents:
            builder.end_document()
    builder.finalize(f"{path}.idx")
    return MMapIndexedDataset(str(path))


def lists(dataset):
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("dtype", sorted({np.dtype(d).name for d in MEGATRON.values()}))
@pytest.mark.parametrize("items", [ITEMS, [], [[]], [[1]], [[1] * 1000, [2]]])
def test_what_is_written_is_read(tmp_path, items, dtype):
    dataset = build(tmp_path / "a", items, dtype)
    assert lists(dataset) == items and np.dtype(dataset.dtype) == dtype
    assert dataset.sizes.tolist() == [len(item) for item in items]
    assert dataset.flat.tolist() == [value for item in items for value in item]
    assert [item.tolist() for item in dataset[:]] == items
    assert lists(pickle.loads(pickle.dumps(dataset))) == items
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("table", [MEGATRON, DEEPSPEED], ids=["megatron", "deepspeed"])
@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("code", range(1, 9))
def test_files_of_both_programs(tmp_path, table, code, modes):
    write_by_hand(tmp_path / "a", code, table[code], ITEMS, modes)
    dataset = MMapIndexedDataset(str(tmp_path / "a"))
    assert lists(dataset) == ITEMS and dataset.dtype is table[code]
    assert dataset.doc_idx.tolist() == [0, 4]


def test_a_code_that_is_not_to_be_believed(tmp_path):
    write_by_hand(tmp_path / "a", 7, np.uint32, [[0, 0]])  # zeros may be of either dtype
    assert MMapIndexedDataset(str(tmp_path / "a")).dtype is np.float32
    assert MMapIndexedDataset(str(tmp_path / "a"), dtype=np.uint32).dtype is np.uint32


def test_parts_documents_and_merging(tmp_path):
    dataset = build(tmp_path / "a", documents=(1, 3))
    assert dataset.doc_idx.tolist() == [0, 2, 4] and dataset.size(3) == 5
    assert dataset.get(3, 1, 2).tolist() == [5, 5] and dataset.get(-1, 4).tolist() == [1]
    assert [item.tolist() for item in dataset[1:3]] == ITEMS[1:3]
    for bad in (lambda: dataset[4], lambda: dataset.get(3, 4, 2), lambda: dataset.get(0, -1)):
        with pytest.raises(IndexError):
            bad()
    with pytest.raises(ValueError, match="step 1"):
        dataset[::2]
    builder = MMapIndexedDatasetBuilder(f"{tmp_path}/b.bin", torch.int32)
    builder.add_item(torch.tensor([9]))
    builder.end_document()
    builder.merge_file_(f"{tmp_path}/a")
    builder.finalize(f"{tmp_path}/b.idx")
    both = make_dataset(f"{tmp_path}/b", "infer")
    assert lists(both) == [[9], *ITEMS] and both.doc_idx.tolist() == [0, 1, 3, 5]
    other = MMapIndexedDatasetBuilder(f"{tmp_path}/c.bin", np.int64)
    with pytest.raises(DataFileError, match="items of int32, and those before are int64"):
        other.merge_file_(f"{tmp_path}/a")
    assert create_doc_idx([2, 0, 3, 0]) == [0, 2, 4]


def test_files_have_their_names_when_they_are_whole(tmp_path):
    builder = make_builder(f"{tmp_path}/a.bin", "mmap", vocab_size=50000)
    builder.add_items([np.array([1, 2]), np.array([65535])])
    assert not dataset_exists(f"{tmp_path}/a", "mmap")
    builder.finalize(f"{tmp_path}/a.idx")
    assert dataset_exists(f"{tmp_path}/a", "mmap") and MMapIndexedDataset(f"{tmp_path}/a").dtype is np.uint16
    assert build(tmp_path / "b", [[2**32 - 1]], np.uint32).dtype is np.int64  # no code of Megatron's has uint32


def test_values_that_do_not_fit_are_refused(tmp_path):
    builder = MMapIndexedDatasetBuilder(f"{tmp_path}/a.bin", np.uint8)
    for values in ([256], [-1]):
        with pytest.raises(DataFileError, match="cannot hold"):
            builder.add_item_numpy(np.array(values))
    builder.add_item_numpy(np.array([255]))
    builder.finalize(f"{tmp_path}/a.idx")
    assert lists(MMapIndexedDataset(f"{tmp_path}/a")) == [[255]]
    with pytest.raises(ConfigError, match="complex64"):
        MMapIndexedDatasetBuilder(f"{tmp_path}/c.bin", np.complex64)
    with pytest.raises(ConfigError, match="impl=.: is 'lazy'"):
        make_builder(f"{tmp_path}/c.bin", "lazy")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda i: b"", "has 0 bytes"),
        (lambda i: b"X" + i[1:], "begins with"),
        (lambda i: b"TNTIDX\0\0" + i[8:], "not memory-mapped"),
        (lambda i: i[:9] + struct.pack("<Q", 2) + i[17:], "version 2"),
        (lambda i: i[:17] + b"\x09" + i[18:], "dtype code 9"),
        (lambda i: i[:18] + struct.pack("<Q", 2**63) + i[26:], "do not hold 9223372036854775808 items"),
        (lambda i: i[:-1], "do not hold"),
        (lambda i: i[:34] + struct.pack("<i", -3) + i[38:], "negative length"),
        (lambda i: i[:34] + struct.pack("<i", 4) + i[38:], "offsets that are not those"),
        (lambda i: i[:50] + struct.pack("<q", 2**40) + i[58:], "offset outside"),
        (lambda i: i[:82] + struct.pack("<q", 99) + i[90:], "boundaries outside"),
        (lambda i: i[:46] + struct.pack("<i", 6) + i[50:], "up to byte 40, and the data file has 36"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, message):
    write_by_hand(tmp_path / "a", 4, np.int32, ITEMS)
    index = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(change(index))
    with pytest.raises(DataFileError, match=message) as caught:
        MMapIndexedDataset(f"{tmp_path}/a")
    assert "a.idx" in caught.value.where and caught.value.fix
    with pytest.raises(DataFileError, match="is missing"):
        MMapIndexedDataset(f"{tmp_path}/b")


def test_any_damage_is_a_typed_error_or_harmless(tmp_path):
    write_by_hand(tmp_path / "a", 4, np.int32, ITEMS)
    index, random = (tmp_path / "a.idx").read_bytes(), Random(3)
    n_refused = 0
    for _ in range(600):
        damaged = bytearray(index)
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(len(damaged))] = random.choice((0, 1, 127, 255, random.randrange(256)))
        (tmp_path / "a.idx").write_bytes(damaged[: random.choice((len(damaged), random.randrange(len(damaged))))])
        try:
            dataset = MMapIndexedDataset(f"{tmp_path}/a")
            assert all(0 <= len(dataset[i]) <= 36 for i in range(len(dataset)))
        except DataFileError:
            n_refused += 1
    assert n_refused > 400, n_refused
