"""The reader of torch.save's files does not run the functions that they name
(deepspeed_c/checkpoint/formats/torch_file.py)."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import pickle
import struct
import subprocess
import warnings
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import UPSTREAM, read_file
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor, TorchFile, fill, materialize
from deepspeed_c.checkpoint.native import state
from deepspeed_c.errors import CheckpointError

FORMATS = [True, False]


def saved(tmp_path: Path, value: object, is_zip: bool = True) -> Path:
    path = tmp_path / "file.pt"
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    return path


def with_pickle(tmp_path: Path, data: bytes, is_zip: bool) -> Path:
    """A file of torch.save whose pickle is ``data``."""
    path = tmp_path / "file.pt"
    if is_zip:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("file/data.pkl", data)
            archive.writestr("file/version", "3\n")
    else:
        head = io.BytesIO()
        torch.save(0, head, _use_new_zipfile_serialization=False)
        # The file has a magic number, a version and the system; then the object; then the list of storages.
        end = head.getvalue().index(pickle.dumps(0, 2))
        path.write_bytes(head.getvalue()[:end] + data + pickle.dumps([], 2))
    return path


def values() -> dict:
    base = torch.arange(24.0)
    return {
        "float32": base.view(2, 3, 4), "slice": base[5:11], "transposed": base.view(4, 6).t(), "strided": base[1::3],
        "bfloat16": torch.randn(7).bfloat16(), "float16": torch.randn(3, 1).half(), "int64": torch.tensor([-1, 2**60]),
        "bool": torch.tensor([True, False, True]), "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16), "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }  # fmt: skip


@pytest.mark.parametrize("is_zip", FORMATS)
def test_tensors_come_back_bit_for_bit(tmp_path, is_zip):
    want = values()
    with_attribute = torch.randn(4)
    with_attribute.ds_id = 3
    want["attribute"] = with_attribute
    got = materialize(TorchFile(saved(tmp_path, want, is_zip)).content)
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(
            got[name].flatten().contiguous().view(torch.uint8), tensor.detach().flatten().contiguous().view(torch.uint8)
        ), name


@pytest.mark.parametrize("is_zip", FORMATS)
@pytest.mark.parametrize("name", ["float32", "slice", "transposed", "strided", "bfloat16"])
def test_every_range_of_a_tensor(tmp_path, is_zip, name):
    want = values()[name]
    torch.manual_seed(0)
    stored = TorchFile(saved(tmp_path, {name: want}, is_zip)).content[name]
    flat = want.contiguous().view(-1)
    for begin in range(flat.numel() + 1):
        for end in range(begin, flat.numel() + 1):
            into = torch.full((end - begin,), -7.0, dtype=torch.float64)
            fill([(stored, begin, into)])
            assert torch.equal(into, flat[begin:end].double()), (begin, end)


def test_reads_more_than_the_staging_buffer_through_it(tmp_path, monkeypatch):
    monkeypatch.setattr("deepspeed_c.checkpoint.formats.torch_file.STAGING_BYTES", 16)
    want = torch.randn(5, 7)
    stored = TorchFile(saved(tmp_path, {"a": want, "b": want.t()})).content
    for name, tensor in (("a", want), ("b", want.t())):
        into = torch.empty(33, dtype=torch.float64)
        fill([(stored[name], 1, into)])
        assert torch.equal(into, tensor.reshape(-1)[1:34].double())


def test_tied_tensors_have_one_identity(tmp_path):
    weight = torch.randn(3, 3)
    content = TorchFile(saved(tmp_path, {"a": weight, "b": weight, "c": weight.clone(), "d": weight[:2]})).content
    assert content["a"].identity == content["b"].identity
    assert len({content[name].identity for name in "abcd"}) == 3


@pytest.mark.parametrize("is_zip", FORMATS)
def test_plain_python_survives(tmp_path, is_zip):
    want = {
        "numbers": [1, 2.5, 1 + 2j, True, None, 2**70], "text": ("a", b"\x00\xff", "ü"), "sets": {1, 2},
        "counter": collections.Counter("aab"), "default": collections.defaultdict(list, {"k": [1]}),
        "ordered": collections.OrderedDict(b=1, a=2), "namespace": argparse.Namespace(lr=0.1),
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "numpy": numpy.float32(1.5),
        "array": numpy.arange(6).reshape(2, 3), "path": Path("/a/b"),
    }  # fmt: skip
    got = materialize(TorchFile(saved(tmp_path, want, is_zip)).content)
    assert list(got) == list(want)
    assert got["namespace"] == argparse.Namespace(lr=0.1)
    assert got["device"] == torch.device("cpu") and str(got["path"]) == "/a/b"
    assert numpy.array_equal(got["array"], want["array"])
    for name in ("numbers", "text", "sets", "counter", "default", "ordered", "size", "dtype", "numpy"):
        assert got[name] == want[name], name


def hostile_calls() -> dict[str, bytes]:
    class Run:
        def __init__(self, function, *arguments):
            self.reduced = function, arguments

        def __reduce__(self):
            return self.reduced

    calls = {
        "posix.system": Run(os.system, "touch pwned"), "eval": Run(eval, "open('pwned', 'w').close()"),
        "exec": Run(exec, "open('pwned', 'w').close()"), "subprocess.Popen": Run(subprocess.Popen, ["touch", "pwned"]),
        "torch.serialization.load": Run(torch.load, "pwned"),
    }  # fmt: skip
    named = [
        "builtins.getattr", "builtins.__import__", "types.FunctionType", "os.execv", "torch.hub.load", "operator.call",
    ]  # fmt: skip
    return {
        **{name: pickle.dumps(call, 2) for name, call in calls.items()},
        **{name: b"\x80\x02c" + "\n".join(name.rsplit(".", 1)).encode() + b"\n." for name in named},
    }


@pytest.mark.parametrize("is_zip", FORMATS)
@pytest.mark.parametrize("name", sorted(hostile_calls()))
def test_hostile_pickle_is_refused_and_named(tmp_path, monkeypatch, name, is_zip):
    monkeypatch.chdir(tmp_path)
    path = with_pickle(tmp_path, hostile_calls()[name], is_zip)
    with pytest.raises(CheckpointError) as error:
        TorchFile(path)
    assert str(path) in str(error.value) and name.split(".")[-1] in str(error.value)
    assert "not among the classes that are allowed" in str(error.value)
    assert not (tmp_path / "pwned").exists()


# Pickles whose BUILD sets attributes on a named global itself, not on an instance of it.
POISON = {
    "stand-in": b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\nN}X\x04\x00\x00\x00evilK\x01s\x86b.",
    "mapping": b"\x80\x02ccollections\nOrderedDict\nN}X\x06\x00\x00\x00updateK\x01s\x86b.",
    "function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__K\x01s\x86b.",
    "type": b"\x80\x02cbuiltins\ndict\nN}X\x06\x00\x00\x00updateK\x01s\x86b.",
    "dtype": b"\x80\x02ctorch\nfloat32\nN}X\x08\x00\x00\x00itemsizeK\x01s\x86b.",
}


@pytest.mark.parametrize("name", sorted(POISON))
def test_pickle_cannot_change_what_it_names(tmp_path, name):
    with pytest.raises(CheckpointError):
        read_file(with_pickle(tmp_path, POISON[name], True))
    assert not hasattr(UPSTREAM["deepspeed.runtime.fp16.loss_scaler.LossScaler"], "evil")


@pytest.mark.parametrize(
    "shape, stride, offset", [((5,), (1,), 0), ((4,), (1,), 1), ((2,), (4,), 0), ((-1,), (1,), 0), ((2,), (1,), -1)]
)
def test_tensor_outside_its_storage_is_refused(tmp_path, shape, stride, offset):
    class Storage:
        pass

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, stride, False, collections.OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if isinstance(obj, Storage) else None

    data = io.BytesIO()
    Pickler(data, 2).dump(Tensor())
    path = with_pickle(tmp_path, data.getvalue(), True)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("file/data/0", bytes(16))
    with pytest.raises(CheckpointError, match="damaged"):
        TorchFile(path)


def test_small_tensors_may_be_expanded_and_large_ones_may_not(tmp_path):
    one = torch.ones(1)
    want = {"mask": one.expand(1, 1, 1024, 1024), "row": torch.arange(8.0).expand(3, 8)}
    got = materialize(TorchFile(saved(tmp_path, want)).content)
    assert all(torch.equal(got[name], want[name]) for name in want)
    for value in ({"a": one.expand(10**6, 10**6)}, {str(i): one.expand(1 << 20, i + 1) for i in range(16)}):
        path = saved(tmp_path, value)
        with pytest.raises(CheckpointError, match="far more memory than the file"):
            TorchFile(path)
        with pytest.raises(CheckpointError, match="far more memory than the file"):
            state.unpack(path.read_bytes(), "state.pt")


def rewritten(
    path: Path, name: str, content: bytes, compression: int = zipfile.ZIP_STORED, twice: bool = False
) -> None:
    """The same zip with other contents of one record."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore")
        for other, record in records.items():
            is_it = other.endswith(name)
            archive.writestr(other, content if is_it else record, compression if is_it else zipfile.ZIP_STORED)
            if is_it and twice:
                archive.writestr(other, content)


@pytest.mark.parametrize("record", ["data.pkl", "data/0"])
def test_records_that_are_deflated_or_there_twice_are_refused(tmp_path, record):
    for options in ({"compression": zipfile.ZIP_DEFLATED}, {"twice": True}):
        path = saved(tmp_path, {"a": torch.zeros(1000)})
        rewritten(path, record, bytes(1 << 20) if record != "data.pkl" else pickle.dumps([0] * 10_000, 2), **options)
        with pytest.raises(CheckpointError, match="compressed|two records"):
            TorchFile(path)


def test_storages_that_lie_in_each_other_are_refused(tmp_path):
    """The directory of a small zip may list one record under many names. In memory each name would take the record's
    size."""
    path = saved(tmp_path, {str(i): torch.full((1000,), float(i)) for i in range(20)})
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        first = next(info for info in infos if info.filename.endswith("data/0")).header_offset
    # Each entry of the directory has the place of its record 42 bytes after its signature.
    at = content.rindex(b"PK\x05\x06")
    at = int.from_bytes(content[at + 16 : at + 20], "little")
    for info in infos:
        if "/data/" in info.filename:
            content[at + 42 : at + 46] = first.to_bytes(4, "little")
        at += 46 + len(info.filename) + len(info.extra)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="lie in each other"):
        TorchFile(path)
    with pytest.raises(CheckpointError, match="lie in each other"):
        state.unpack(bytes(content), "state.pt")


@pytest.mark.parametrize("is_zip", FORMATS)
def test_file_cut_off_anywhere_is_an_error(tmp_path, is_zip):
    whole = saved(tmp_path, {"a": torch.arange(100.0), "b": 1}, is_zip).read_bytes()
    path = tmp_path / "cut.pt"
    for length in [0, 1, 2, 100, len(whole) // 2, len(whole) - 1, *range(0, len(whole), 97)]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            TorchFile(path)


def test_file_cut_off_after_it_was_opened_is_an_error(tmp_path):
    path = saved(tmp_path, {"a": torch.arange(100.0)})
    stored = TorchFile(path).content["a"]
    os.truncate(path, 300)
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        fill([(stored, 0, torch.empty(100))])


def test_flipped_bits_never_crash(tmp_path):
    whole = bytearray(saved(tmp_path, {"a": torch.arange(10.0), "b": [1, "x"]}).read_bytes())
    path = tmp_path / "flipped.pt"
    generator = torch.Generator().manual_seed(5)
    for _ in range(300):
        changed = bytearray(whole)
        at = int(torch.randint(len(whole), (1,), generator=generator))
        changed[at] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        path.write_bytes(changed)
        try:
            content = TorchFile(path).content
        except CheckpointError:
            continue
        for value in content.values() if isinstance(content, dict) else ():
            if isinstance(value, StoredTensor) and value.n_elems < 1000:
                with contextlib.suppress(CheckpointError):
                    fill([(value, 0, torch.empty(value.n_elems, dtype=torch.float64))])


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", struct.pack("<Q", 10) + b"{}", b"\x80\x02K\x01."])
def test_other_files_are_named(tmp_path, content):
    path = tmp_path / "other.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"other\.pt: is no file of torch\.save"):
        TorchFile(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.pt: cannot be read"):
        TorchFile(tmp_path / "gone.pt")
