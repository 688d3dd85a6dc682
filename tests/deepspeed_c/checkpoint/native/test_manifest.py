"""Hostile manifests: opening or reading raises a CheckpointError that names the place and the fix."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.native import save as saving
from deepspeed_c.checkpoint.native import state
from deepspeed_c.checkpoint.native.held import read_held
from deepspeed_c.checkpoint.native.manifest import (
    Manifest,
    ParamEntry,
    TopologyEntry,
    decode_number,
    encode_number,
    read_manifest,
    write_manifest,
)
from deepspeed_c.checkpoint.native.ranks import Ranks
from deepspeed_c.checkpoint.native.reader import NativeSource
from deepspeed_c.checkpoint.source import ParamInfo, Read
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.handmade import crc32c, manifest_of, put_manifest, state_entry, write_pieces

# The memory that a reader may allocate for a manifest of a few hundred bytes.
MEMORY_LIMIT_BYTES = 32 << 20


@pytest.fixture
def checkpoint(tmp_path) -> tuple[Path, dict[str, Any]]:
    """A good checkpoint and its manifest, in which no entry is empty."""
    array = np.arange(600, dtype="float32").reshape(20, 30)
    pieces = [
        (0, "cut", array, (slice(0, 20), slice(0, 10)), 0, 200),
        (1, "cut", array, (slice(0, 20), slice(10, 30)), 0, 150),
        (0, "cut", array, (slice(0, 20), slice(10, 30)), 150, 250),
        (0, "flat", array, None, 0, 300),
        (1, "flat", array, None, 300, 300),
    ]
    files, tensors = write_pieces(tmp_path, pieces)
    states = []
    for name in ("state.pt", "rank_00000.pt"):
        content = state.pack({"groups": [{"lr": 1.0}], "name": name}, name)
        (tmp_path / name).write_bytes(content)
        states.append(state_entry(name, content))
    manifest = manifest_of(
        files,
        tensors,
        states=states,
        aliases={"tied": "flat"},
        params={"cut": {"group": 0, "counts": {"step": [3.0, "F32"], "plain": [4, ""]}}, "flat": {"group": None}},
        config={"nested": {"list": [1, 2.5, None]}},
    )
    manifest["topology"].update(tensor_parallel=2, pipeline_parallel=1)
    return tmp_path, manifest


def use(folder: Path) -> None:
    """Opens, reads and verifies a checkpoint. Reads at most 1000 elements of a tensor, however many the manifest
    has."""
    with NativeSource(str(folder)) as source:
        for tensor in source.tensors.values():
            source.read([Read(tensor, 0, torch.zeros(min(math.prod(tensor.shape), 1000), dtype=tensor.dtype))])
        source.rank_state(0)
        assert source.verify() == []


def refusal(folder: Path, manifest: Any, action: Callable[[Path], None] = use) -> str:
    """Return the message of the CheckpointError for a manifest. Fail if another exception or none is raised, or if the
    read takes too much memory."""
    put_manifest(folder, manifest)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as raised:
            action(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_LIMIT_BYTES, f"{peak} bytes were allocated to find out that {raised.value}"
    assert raised.value.where and str(folder) in raised.value.where and raised.value.fix, raised.value
    return str(raised.value)


def changed(manifest: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(manifest)
    at = manifest
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return manifest


def test_what_is_written_by_hand_is_read(checkpoint):
    folder, manifest = checkpoint
    put_manifest(folder, manifest)
    use(folder)
    with NativeSource(str(folder)) as source:
        assert source.params["cut"].counts == {"step": torch.tensor(3.0), "plain": 4}
        assert source.params["cut"].group == 0 and source.params["flat"].group is None
        assert source.aliases == {"tied": "flat"} and source.state["config"] == manifest["config"]


def test_what_is_written_is_read(tmp_path):
    manifest = Manifest(
        format="deepspeed_c",
        version=1,
        tag="tag ü",
        block_bytes=1 << 18,
        topology=TopologyEntry(7, 3),
        counters={"global_steps": (1 << 63) - 1},
        versions={},
        excludes_frozen=True,
        files=[],
        states=[],
        tensors=[],
        aliases={"b": "a"},
        params={"a": ParamEntry(1, {"n": (math.pi, "F64"), "k": (-(1 << 53) - 1, "I64"), "x": ("-Infinity", "BF16")})},
        config={"é": [None, {}, []]},
    )
    write_manifest(str(tmp_path), manifest, lambda path, content: Path(path).write_bytes(content))
    assert read_held(str(tmp_path), lambda held: read_manifest(str(tmp_path), held)) == manifest
    assert json.loads((tmp_path / "manifest.json").read_bytes())["params"]["a"]["counts"]["n"] == [math.pi, "F64"]
    assert (tmp_path / "manifest.crc32c").read_text() == f"{crc32c((tmp_path / 'manifest.json').read_bytes()):08x}\n"


# (path, new value, part of the message)
HOSTILE = [
    (("format",), "deepspeed", "is format 'deepspeed'"),
    (("version",), 2, "version 2"),
    (("version",), 0, "version 0"),
    (("version",), -1, "version -1"),
    (("version",), "1", "version"),
    (("block_bytes",), 0, "blocks of 0 bytes"),
    (("block_bytes",), -4096, "blocks of -4096 bytes"),
    (("block_bytes",), 1 << 40, "blocks of"),
    (("block_bytes",), 1, "checksums for"),
    (("topology", "world_size"), 0, "0 ranks"),
    (("topology", "world_size"), 1 << 62, "ranks"),
    (("topology", "tensor_parallel"), -1, "-1 ranks"),
    (("topology", "stage"), 4, "stage 4"),
    (("topology", "stage"), -1, "stage -1"),
    (("counters", "global_steps"), -1, "global_steps is -1"),
    (("counters", "global_steps"), 1 << 63, "global_steps is"),
    (("counters", "global_steps"), 0.5, "no manifest"),
    *(
        (("files", 0, "name"), name, "plain file name")
        for name in ("", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b")
    ),
    *((("states", 0, "name"), name, "plain file name") for name in ("", "..", "x/../y", "\0", "a\nb")),
    (("files", 0, "name"), "x" * 5000, "cannot be read"),
    (("files", 0, "name"), "rank_00001.safetensors", "listed twice"),
    (("files", 0, "name"), "rank_00007.safetensors", "cannot be read"),
    (("states", 0, "name"), "rank_00000.safetensors", "listed twice"),
    (("files", 0, "n_bytes"), -1, "-1 bytes"),
    (("files", 0, "n_bytes"), 0, "checksums for 0 blocks"),
    (("files", 0, "n_bytes"), 1 << 62, "checksums for"),
    (("files", 0, "crc32c"), "", "0 checksums"),
    (("files", 0, "crc32c"), "!!!!", "no base64"),
    (("files", 0, "crc32c"), "é", "no base64"),
    (("files", 0, "crc32c"), "AAAAAA==", "param of"),  # the right length, but wrong
    (("states", 0, "n_bytes"), 5, "and 5 were written"),
    (("states", 0, "crc32c"), 0, "checksum"),
    (("states", 1, "crc32c"), 1 << 70, "checksum"),
    (("tensors", 0, "name"), "flat", "listed twice"),
    (("tensors", 0, "dtype"), "F33", "unknown dtype 'F33'"),
    (("tensors", 1, "dtype"), "F64", "lies outside"),
    (("tensors", 0, "shape"), [20, 31], "incomplete"),
    (("tensors", 0, "shape"), [20, -30], "has shape"),
    (("tensors", 0, "shape"), [1 << 31, 1 << 31], "has shape"),
    (("tensors", 0, "shape"), [0, 1 << 62], "has shape"),
    (("tensors", 0, "shape"), [1 << 70], "has shape"),
    (("tensors", 1, "shape"), [1 << 59], "far more than all files hold"),
    (("tensors", 0, "shape"), [600], "box of other dimensions"),
    (("tensors", 0, "shape"), [1] * 100000, "box of other dimensions"),
    (("tensors", 0, "pieces"), [], "incomplete"),
    (("tensors", 1, "pieces", 0, 0), 2, "lies in file 2 of 2"),
    (("tensors", 1, "pieces", 0, 0), -1, "lies in file -1"),
    (("tensors", 1, "pieces", 0, 1), -4, "lies outside"),
    (("tensors", 1, "pieces", 0, 1), 1 << 62, "lies outside"),
    (("tensors", 1, "pieces", 0, 2), -1, "piece outside its box"),
    (("tensors", 1, "pieces", 0, 2), 301, "piece outside its box"),
    (("tensors", 1, "pieces", 0, 2), 1, "incomplete"),
    (("tensors", 1, "pieces", 0, 3), -1, "lies outside"),
    (("tensors", 1, "pieces", 0, 3), 299, "incomplete"),
    (("tensors", 1, "pieces", 0, 3), 1 << 61, "lies outside"),
    (("tensors", 0, "pieces", 0, 4), None, "half a box"),
    (("tensors", 0, "pieces", 0, 5), None, "half a box"),
    (("tensors", 0, "pieces", 0, 4), [0], "box of other dimensions"),
    (("tensors", 0, "pieces", 0, 4), [0, -1], "box outside its shape"),
    (("tensors", 0, "pieces", 0, 4), [0, 21], "box outside its shape"),
    (("tensors", 0, "pieces", 0, 5), [1 << 62, 10], "box outside its shape"),
    (("tensors", 0, "pieces", 0), [0, 8, 0], "no manifest"),
    (("tensors", 0, "pieces", 0), {"file": 0}, "no manifest"),
    (("aliases",), {"a": "a"}, "the alias 'a'"),
    (("aliases",), {"a": "b", "b": "a"}, "the alias 'a'"),
    (("params", "cut", "counts", "step"), [1, "F33"], "unknown dtype"),
    (("params", "cut", "counts", "step"), [1 << 200, "I64"], "cannot hold"),
    (("params", "cut", "counts", "step"), [-1, "U8"], "cannot hold"),
    (("params", "cut", "counts", "step"), [1e39, "F32"], "cannot hold"),
    (("params", "cut", "counts", "step"), ["NaN", "I32"], "cannot hold"),
    (("params", "cut", "counts", "step"), ["rm -rf", ""], "no number"),
    (("params", "cut", "counts", "step"), ["nan", "F32"], "no number"),
    (("params", "cut", "counts", "step"), [None, "F32"], "no manifest"),
    (("params", "cut", "counts", "step"), 3, "no manifest"),
]


@pytest.mark.parametrize(
    ("path", "value", "expected"), HOSTILE, ids=lambda value: str(value)[:30] if not isinstance(value, str) else ""
)
def test_a_manifest_that_is_wrong_is_refused_and_says_what_is(checkpoint, path, value, expected):
    folder, manifest = checkpoint
    message = refusal(folder, changed(manifest, path, value))
    assert expected in message, message


def test_what_is_no_manifest_at_all_is_refused(checkpoint):
    folder, manifest = checkpoint
    whole = json.dumps(manifest).encode()
    deep = b'{"config":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}"
    for content in (
        *(b"", b"\0" * len(whole), b"null", b"[]", b"{}", b'"text"', b"\xff\xfe" + whole),
        *(whole.replace(b"handmade", b"hand\xc0\xafmade"), whole.replace(b"handmade", b"hand\\ud800made")),
        *(whole + whole, whole[:-1], whole[: len(whole) // 2], b"[" * 1_000_000, deep),
        whole.replace(b'"config": {', b'"config": {"a": ' + b"[" * 200_000 + b"]" * 200_000 + b", "),
        whole.replace(b'"global_steps": 3', b'"global_steps": ' + b"9" * 100_000),
        whole.replace(b'"version": 1', b'"version": 1e400'),
    ):
        assert content != whole
        assert "manifest.json" in refusal(folder, content), content[:80]


def test_a_checksum_that_is_wrong_is_refused(checkpoint):
    folder, manifest = checkpoint
    put_manifest(folder, manifest)
    right = (folder / "manifest.crc32c").read_bytes()
    content = (folder / "manifest.json").read_bytes()
    for wrong in (b"", b"\n", b"0" * 8, right[:7], right.strip() + b"0", b"0x" + right, b"\xff" * 8, b"a" * 100_000):
        (folder / "manifest.crc32c").write_bytes(wrong)
        with pytest.raises(CheckpointError, match="is damaged") as raised:
            use(folder)
        assert len(str(raised.value)) < 1000 and str(folder / "manifest.json") in raised.value.where
    (folder / "manifest.crc32c").write_bytes(right)
    for i in range(0, len(content), 97):
        (folder / "manifest.json").write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(CheckpointError, match="is damaged"):
            use(folder)


def leaves(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values in a JSON document, with containers."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def test_no_value_anywhere_leads_to_another_exception(checkpoint):
    folder, manifest = checkpoint
    values = [None, True, -1, 0, 7, 1 << 31, 1 << 63, 10**400, 0.5, "", "../x\0", [[]], {}]
    n_refused = n_read = 0
    for path, value in itertools.product(leaves(manifest), values):
        put_manifest(folder, changed(manifest, path, value), _C.crc32c)
        try:
            use(folder)
            n_read += 1
        except CheckpointError as error:
            n_refused += 1
            assert error.where and error.fix, (path, value, error)
    # Names, versions and the configuration may have any value, so some reads succeed.
    assert n_refused > 1000 and n_read > 100, (n_refused, n_read)


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "state.pt"])
def test_files_that_are_no_files_are_refused(checkpoint, name):
    folder, manifest = checkpoint
    put_manifest(folder, manifest)
    path = folder / name
    path.unlink()
    for make in (lambda: path.mkdir(), lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        make()
        with pytest.raises(CheckpointError, match="is no regular file") as raised:
            use(folder)
        assert raised.value.where == str(path)
        path.rmdir() if path.is_dir() else path.unlink()


# -- numbers -------------------------------------------------------------------------------------------------------------


def counts() -> dict[str, Any]:
    """Numbers of the kinds that optimizers count with, and values as in a diverged run."""
    found: dict[str, Any] = {f"float {v}": v for v in (0.0, -0.0, 1e-320, math.pi, math.inf, -math.inf, math.nan)}
    found |= {f"int {v}": v for v in (0, -1, (1 << 63) - 1)} | {"true": True, "false": False}
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
        for v in (0.25, math.inf, -math.inf, math.nan, torch.finfo(dtype).max):
            found[f"{dtype} {v}"] = torch.tensor(v, dtype=dtype)
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        found[f"{dtype}"] = torch.tensor(1, dtype=dtype)
    return found


def test_counts_come_back_as_they_were_also_where_they_are_no_numbers(tmp_path):
    expected = counts()
    contents = saving.Contents(
        pieces=[saving.OwnedPiece("param", "a", (2,), 0, torch.ones(2))],
        stage=0,
        params={"a": ParamInfo(group=0, counts=expected)},
        common=state.pack({}, "test"),
    )
    saving.save(contents, saving.Destination(save_dir=str(tmp_path), tag="x"), Ranks(0, [0]))
    json.loads((tmp_path / "x" / "manifest.json").read_bytes(), parse_constant=pytest.fail)  # JSON without extensions
    with NativeSource(str(tmp_path / "x")) as source:
        actual = source.params["a"].counts
        saving.write_native(source, str(tmp_path), "again")
    with NativeSource(str(tmp_path / "again")) as source:
        again = source.params["a"].counts
    for found in (actual, again):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            other = found[key]
            assert type(other) is type(value), (key, other)
            if torch.is_tensor(value):
                assert other.dtype == value.dtype and other.shape == value.shape, (key, other)
                value, other = value.item(), other.item()
            same = math.isnan(other) if math.isnan(value) else other == value
            assert same and math.copysign(1, other) == math.copysign(1, value), f"{key}: {other}"


def test_numbers_are_told_from_text():
    for value in (0, 1.5, math.inf, -math.inf, True):
        assert decode_number(encode_number(value)) == value
    assert math.isnan(decode_number(encode_number(math.nan)))
    assert encode_number(-math.inf) == "-Infinity" and encode_number(math.nan) == "NaN"
