"""Plans of files are right at sizes that tests cannot write in full: beyond 4 GiB (in sparse files), and with more
records than a plain zip counts."""

from __future__ import annotations

import itertools
import struct
import zipfile
import zlib

import pytest
import safetensors
import torch

from deepspeed_c.checkpoint.formats import weight_file as formats
from deepspeed_c.checkpoint.formats.weight_file import FileEntry, SafetensorsPlan, TorchZipPlan, plan_file
from deepspeed_c.errors import CheckpointError

GIB = 1 << 30
DTYPES = [
    *formats.TORCH_STORAGES, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz,
]  # fmt: skip


def put(path, plan, crc32, payloads=()):
    """Write the frame and the payloads. The rest of the file stays sparse: it reads as zeros and takes no disk."""
    with open(path, "wb") as file:
        for offset, content in [*plan.frame(crc32), *payloads]:
            file.seek(offset)
            file.write(content)
        file.truncate(plan.total_bytes)


def test_suffix_chooses_the_format():
    assert isinstance(plan_file("a.safetensors", [], {}), SafetensorsPlan)
    for name in ("pytorch_model.bin", "a.pt", "a.pth", "safetensors", "a.safetensors.bak"):
        assert isinstance(plan_file(name, [], {}), TorchZipPlan)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (0, 4), (4, 0), (2, 0, 3), (1, 1, 1), (2, 3, 5, 7)])
def test_strides_are_those_of_torch(shape):
    assert formats._contiguous_strides(shape) == torch.empty(shape).stride()
    entry = FileEntry("x", shape, torch.bfloat16)
    assert (entry.n_elems, entry.n_bytes) == (torch.empty(shape).numel(), torch.empty(shape).numel() * 2)


@pytest.mark.parametrize("plan_type", [SafetensorsPlan, TorchZipPlan])
def test_payloads_neither_overlap_nor_leave_the_file(plan_type):
    dtypes = [dtype for dtype in DTYPES if plan_type is TorchZipPlan or dtype in formats.SAFETENSORS_DTYPES]
    shapes = [(), (0,), (1,), (13,), (31, 3), (64,), (5, 0)]
    entries = [
        FileEntry(f"{i}", shape, dtype) for i, (dtype, shape) in enumerate(itertools.product(reversed(dtypes), shapes))
    ]
    plan = plan_type("file", entries, {})
    taken = [(offset, offset + len(content)) for offset, content in plan.frame(dict.fromkeys(plan.payload_offset, 0))]
    for entry in entries:
        begin = plan.payload_offset[entry.name]
        assert begin % (64 if plan_type is TorchZipPlan else entry.dtype.itemsize) == 0, entry
        if entry.n_bytes:
            taken.append((begin, begin + entry.n_bytes))
    taken.sort()
    # There are no gaps either: a gap would be bytes that nothing writes.
    assert taken[0][0] == 0 and taken[-1][1] == plan.total_bytes
    assert [end for _, end in taken[:-1]] == [begin for begin, _ in taken[1:]]


def zip_of_large_entries():
    # One record has 5 GiB, a header begins beyond 4 GiB, and sizes lie just below, at and just above the 32-bit
    # limit.
    entries = [
        FileEntry("first", (3,), torch.float32), FileEntry("large", (5 * GIB // 4,), torch.float32),
        FileEntry("below", (0xFFFFFFFE,), torch.uint8), FileEntry("border", (0xFFFFFFFF,), torch.uint8),
        FileEntry("above", (0x100000000,), torch.int8), FileEntry("last", (2, 2), torch.bfloat16),
    ]  # fmt: skip
    return entries, TorchZipPlan("file", entries, {"tied": "large"})


def test_zip_beyond_4_gib_is_read_by_torch_and_zipfile(tmp_path):
    entries, plan = zip_of_large_entries()
    assert plan.total_bytes > 17 * GIB
    first, last = struct.pack("<3f", 1, 2, 3), bytes.fromhex("803f0040404080 40".replace(" ", ""))
    tail = struct.pack("<f", 7.5)
    crc32 = {"first": zlib.crc32(first), "last": zlib.crc32(last), "large": 11, "below": 12, "border": 13, "above": 14}
    payloads = [
        (plan.payload_offset["first"], first), (plan.payload_offset["large"] + 5 * GIB - 4, tail),
        (plan.payload_offset["border"] + 0xFFFFFFFE, b"\xfe"), (plan.payload_offset["above"], b"\x7f"),
        (plan.payload_offset["last"], last),
    ]  # fmt: skip
    path = tmp_path / "large.pt"
    put(path, plan, crc32, payloads)
    assert path.stat().st_blocks * 512 < 16 << 20, "the file system has no holes, and this test wrote gigabytes"

    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        for i, entry in enumerate(entries):
            info = infos[f"archive/data/{i}"]
            assert (info.file_size, info.compress_size, info.CRC) == (entry.n_bytes, entry.n_bytes, crc32[entry.name])
        assert archive.read("archive/data/0") == first
        assert archive.read("archive/data/5") == last
        with archive.open("archive/data/3") as member:
            assert member.read(4) == bytes(4)

    loaded = torch.load(path, weights_only=True, mmap=True)
    assert {name: (tuple(t.shape), t.dtype) for name, t in loaded.items() if name != "tied"} == {
        entry.name: (entry.shape, entry.dtype) for entry in entries
    }
    assert loaded["first"].tolist() == [1, 2, 3]
    assert loaded["large"][-1] == 7.5 and loaded["large"][-2] == 0 and loaded["large"][0] == 0
    assert loaded["tied"][-1] == 7.5
    assert loaded["border"][-1] == 0xFE and loaded["border"][-2] == 0
    assert loaded["above"][0] == 0x7F and loaded["above"][-1] == 0
    assert loaded["last"].tolist() == [[1, 2], [3, 4]]


def test_safetensors_beyond_4_gib(tmp_path):
    entries = [FileEntry("large", (5 * GIB // 2,), torch.float16), FileEntry("last", (3,), torch.int8)]
    path = tmp_path / "large.safetensors"
    plan = SafetensorsPlan(str(path), entries, {})
    put(path, plan, {}, [(plan.payload_offset["last"], b"\x01\x02\x03")])
    with safetensors.safe_open(path, "pt") as file:
        assert file.get_tensor("last").tolist() == [1, 2, 3]
        assert file.get_slice("large").get_shape() == [5 * GIB // 2]
        assert file.get_slice("large")[5 * GIB // 2 - 2 :].tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("n_tensors", [65531, 65532, 65533])
def test_more_records_than_16_bits_count(tmp_path, n_tensors):
    # Three records are not tensors, so there are 65534, 65535 and 65536 records in all.
    entries = [FileEntry(f"{i}", (1,), torch.uint8) for i in range(n_tensors)]
    plan = TorchZipPlan("file", entries, {})
    path = tmp_path / "many.pt"
    crc32 = {entry.name: zlib.crc32(bytes([i % 251])) for i, entry in enumerate(entries)}
    put(path, plan, crc32, [(plan.payload_offset[e.name], bytes([i % 251])) for i, e in enumerate(entries)])
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == n_tensors + 3
        assert archive.read(f"archive/data/{n_tensors - 1}") == bytes([(n_tensors - 1) % 251])
    # torch takes seconds to load so many records. So it loads only the file whose count equals the number that means
    # "read the zip64 record".
    if n_tensors + 3 == 0xFFFF:
        loaded = torch.load(path, weights_only=True, mmap=True)
        assert torch.equal(torch.cat([*loaded.values()]), (torch.arange(n_tensors) % 251).to(torch.uint8))


def test_safetensors_header_that_readers_refuse(monkeypatch):
    entries = [FileEntry(f"layers.{i}.weight", (1,), torch.uint8) for i in range(20)]
    n_bytes = len(next(content for _, content in SafetensorsPlan("f", entries, {}).frame({}))) - 8
    monkeypatch.setattr(formats, "SAFETENSORS_HEADER_LIMIT_BYTES", n_bytes)
    SafetensorsPlan("f", entries, {})
    monkeypatch.setattr(formats, "SAFETENSORS_HEADER_LIMIT_BYTES", n_bytes - 1)
    with pytest.raises(CheckpointError, match=f"{n_bytes} bytes, and readers accept {n_bytes - 1}"):
        SafetensorsPlan("f", entries, {})


def test_safetensors_dtypes_are_those_of_the_reference():
    from safetensors.torch import _TYPES

    assert {name: dtype for dtype, name in formats.SAFETENSORS_DTYPES.items()}.items() <= _TYPES.items()


def test_safetensors_refuses_a_foreign_byte_order(monkeypatch):
    monkeypatch.setattr(formats.sys, "byteorder", "big")
    with pytest.raises(CheckpointError, match="little-endian"):
        SafetensorsPlan("f", [], {})


def test_what_a_format_does_not_have_is_refused():
    with pytest.raises(CheckpointError, match=r"f, x: safetensors has no dtype for torch.complex64"):
        SafetensorsPlan("f", [FileEntry("x", (1,), torch.complex64)], {})
    with pytest.raises(CheckpointError, match="reserved"):
        SafetensorsPlan("f", [FileEntry("__metadata__", (1,), torch.float32)], {})
