"""Safetensors files are read as the library of the format reads them. Files with false headers are refused before any
tensor is read."""

from __future__ import annotations

import json
import os
import random

import pytest
import safetensors
import safetensors.torch
import torch

from deepspeed_c.checkpoint.formats.huggingface import HuggingFaceSource, read_header
from deepspeed_c.checkpoint.formats.weight_file import SAFETENSORS_DTYPES
from deepspeed_c.checkpoint.source import PARAM, Box, LogicalTensor, Read
from deepspeed_c.checkpoint.tools.export import export
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.memory_source import adam_checkpoint


def read_all(source) -> dict[str, torch.Tensor]:
    into = {t.name: torch.empty(torch.Size(t.shape).numel(), dtype=t.dtype) for t in source.tensors.values()}
    source.read([Read(t, 0, into[t.name]) for t in source.tensors.values()])
    return {t.name: into[t.name].view(t.shape) for t in source.tensors.values()}


def same(got, want):
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        raw = [t.contiguous().view(-1).view(torch.uint8) for t in (got[name], tensor)]
        assert torch.equal(*raw), name


def write(path, header, payload=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + payload)
    return path


def test_every_dtype_as_the_library_writes_it(tmp_path):
    tensors = {
        f"{dtype} {shape}": torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,))
        .to(torch.uint8)
        .view(dtype)
        .view(shape)
        for dtype in SAFETENSORS_DTYPES
        for shape in ((), (0,), (3,), (2, 0), (5, 7))
        if shape or dtype.itemsize == 1
    }
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", {"format": "pt", "other": "text"})
    with HuggingFaceSource(tmp_path / "m.safetensors") as source:
        same(read_all(source), tensors)
        assert source.aliases == {} and source.format == "huggingface"


def test_a_folder_with_an_index(tmp_path):
    export(adam_checkpoint(), tmp_path / "out", max_shard_size=100)
    with HuggingFaceSource(tmp_path / "out") as source:
        want = {}
        for file in os.listdir(tmp_path / "out"):
            if file.endswith(".safetensors"):
                want |= safetensors.torch.load_file(tmp_path / "out" / file)
        same(read_all(source), want)
        assert source.aliases == {"head.weight": "embed.weight"}
        assert len(source._files) > 2
        embed = source.tensors[PARAM, "embed.weight"]
        into = torch.empty(6)
        source.read([Read(embed, 1, into, Box((3, 2), (4, 3)))])
        assert torch.equal(into, want["embed.weight"][3:7, 2:5].reshape(-1)[1:7].float())
        files = list(source._files.values())
    for file in files:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(file)


def test_what_is_not_listed(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with HuggingFaceSource(tmp_path) as source:
        for kind, name in ((PARAM, "b"), ("master", "a")):
            tensor = LogicalTensor(name=name, kind=kind, shape=(2,), dtype=torch.float32)
            with pytest.raises(CheckpointError, match="holds no"):
                source.read([Read(tensor, 0, torch.empty(2))])
        os.truncate(tmp_path / "model.safetensors", os.path.getsize(tmp_path / "model.safetensors") - 4)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: the file ends at byte"):
            source.read([Read(source.tensors[PARAM, "a"], 0, torch.empty(2))])
        assert HuggingFaceSource.close(source) is None
        os.unlink(tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
            source.read([Read(source.tensors[PARAM, "a"], 0, torch.empty(2))])


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "no JSON": (b"{", b""), "no object": ([1], b""), "no text": (b'{"\xff":1}', b""),
    "nested": (b'{"a":' * 100000 + b"1" + b"}" * 100000, b""), "no fields": ({"a": {"dtype": "F32"}}, b""),
    "not a dict": ({"a": 3}, b""),
    "twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"xx",
    ),
    "twice within": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "dtype": ({"a": entry(0, 4, [1], "F33")}, bytes(4)),
    "dtype of no text": ({"a": entry(0, 4, [1], ["F32"])}, bytes(4)),
    "overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
    "the same": ({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, bytes(8)),
    "gap": ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)),
    "gap at the front": ({"a": entry(4, 8, [1])}, bytes(8)), "beyond the end": ({"a": entry(0, 8, [2])}, bytes(4)),
    "left over": ({"a": entry(0, 4, [1])}, bytes(5)), "backwards": ({"a": entry(4, 0, [1])}, bytes(4)),
    "shape": ({"a": entry(0, 4, [2])}, bytes(4)), "negative": ({"a": entry(0, 4, [-1])}, bytes(4)),
    "both negative": ({"a": entry(0, 4, [-1, -1])}, bytes(4)), "fraction": ({"a": entry(0, 4, [1.0])}, bytes(4)),
    "truth": ({"a": entry(0, 4, [True])}, bytes(4)), "huge": ({"a": entry(0, 4, [2**62, 2**62])}, bytes(4)),
    "wraps": ({"a": entry(0, 4, [2**32, 2**32, 1])}, bytes(4)),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, bytes(4)),
    "metadata": ({"__metadata__": {"a": 1}}, b""), "metadata list": ({"__metadata__": []}, b""),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers(tmp_path, what):
    header, payload = HOSTILE[what]
    path = write(tmp_path / "m.safetensors", header, payload)
    with pytest.raises(CheckpointError, match=r"m\.safetensors: .*(.|\n)*Fix: "):
        read_header(str(path))


@pytest.mark.parametrize("length", [3, 2**63, 2**64 - 1, 100_000_001])
def test_header_lengths(tmp_path, length):
    path = write(tmp_path / "m.safetensors", b"{}", length=length)
    with pytest.raises(CheckpointError, match=f"a header of {length} bytes does not fit"):
        read_header(str(path))
    path.write_bytes(b"\0" * 7)
    with pytest.raises(CheckpointError, match="does not fit"):
        read_header(str(path))


def test_flipped_bytes_never_give_another_error(tmp_path):
    """Our reader raises only CheckpointError. It refuses every file that the library refuses, and reads accepted files
    as the library does."""
    safetensors.torch.save_file(
        {"a": torch.arange(3), "b": torch.ones(2, 2), "c": torch.ones(0)}, tmp_path / "m.safetensors"
    )
    good = (tmp_path / "m.safetensors").read_bytes()
    n_header = 8 + int.from_bytes(good[:8], "little")
    chooser = random.Random(1)
    path = tmp_path / "bad.safetensors"
    n_refused = 0
    for _ in range(1500):
        bad = bytearray(good)
        for _ in range(chooser.randint(1, 2)):
            bad[chooser.randrange(n_header)] = chooser.choice([chooser.randrange(256), *b'0123456789[]{},:"'])
        path.write_bytes(bad)
        try:
            theirs = {k: (tuple(t.shape), t.dtype) for k, t in safetensors.torch.load_file(path).items()}
        except (safetensors.SafetensorError, KeyError, RuntimeError, ValueError, AttributeError):
            theirs = None
        try:
            ours = {k: (t.shape, t.dtype) for k, t in read_header(str(path)).tensors.items()}
        except CheckpointError:
            ours = None
            n_refused += 1
        assert ours is None or ours == theirs, bytes(bad[:n_header])
    assert n_refused > 500


@pytest.mark.parametrize(
    "file", ["../m.safetensors", "/etc/passwd", "", ".", "..", "a/b.safetensors", 3, None, "nul\0.safetensors"]
)
def test_an_index_leads_nowhere_else(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="is no file of this folder"):
        HuggingFaceSource(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"weight_map": []}', '{"weight_map": {"a": "x", "a": "y"}}'])
def test_an_index_that_is_none(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        HuggingFaceSource(tmp_path)


def test_an_index_that_does_not_fit_its_files(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m.safetensors", "b": "m.safetensors"}}))
    with pytest.raises(CheckpointError, match="b is missing"):
        HuggingFaceSource(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: cannot be read"):
        HuggingFaceSource(index)
