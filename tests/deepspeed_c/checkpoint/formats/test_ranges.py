"""Ranges of a tensor, or of a box of it, equal brute-force slices. The error for a file that is too short names the
file."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest
import torch

from deepspeed_c.checkpoint.formats import ranges
from deepspeed_c.checkpoint.formats.ranges import fill, fill_from_file, read_bytes, runs
from deepspeed_c.checkpoint.source import PARAM, Box, LogicalTensor, Read
from deepspeed_c.errors import CheckpointError


def boxes(shape):
    spans = [[(a, n) for a in range(s + 1) for n in range(s - a + 1)] for s in shape]
    for choice in itertools.product(*spans):
        yield Box(tuple(a for a, _ in choice), tuple(n for _, n in choice))


def part_of(whole, box):
    for d, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        whole = whole.narrow(d, start, size)
    return whole.reshape(-1)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 2), (1, 3, 1, 2)])
def test_every_box_of_small_shapes(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    flat = whole.reshape(-1)
    for box in boxes(shape):
        want = part_of(whole, box)
        for begin in range(want.numel() + 1):
            n = want.numel() - begin
            for count in {0, 1, n // 2, n} if n else {0}:
                found = list(runs(shape, box, begin, count))
                got = [e for first, k in found for e in flat[first : first + k].tolist()]
                assert got == want[begin : begin + count].tolist(), f"{box} {begin} {count}: {found}"
                assert all(k > 0 for _, k in found)
    assert list(runs(shape, None, 0, whole.numel())) == ([(0, whole.numel())] if whole.numel() else [])


def test_runs_are_as_long_as_they_can_be():
    assert list(runs((4, 3, 5), Box((1, 0, 0), (2, 3, 5)), 0, 30)) == [(15, 30)]
    assert list(runs((4, 3, 5), Box((0, 1, 0), (4, 1, 5)), 2, 10)) == [(7, 3), (20, 5), (35, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("into_dtype", [torch.float32, torch.bfloat16])
def test_filling_converts_in_pieces(monkeypatch, dtype, into_dtype):
    monkeypatch.setattr(ranges, "STAGING_BYTES", 24)
    whole = torch.randn(7, 11).to(dtype)
    tensor = LogicalTensor(name="w", kind=PARAM, shape=(7, 11), dtype=dtype)
    sizes = []

    def fetch(first, into):
        sizes.append(into.numel())
        into.copy_(whole.view(-1)[first : first + into.numel()])

    for box in (None, Box((2, 3), (4, 5)), Box((0, 0), (7, 11))):
        into = torch.empty(13, dtype=into_dtype)
        fill(Read(tensor, 5, into, box), fetch, "file")
        want = (whole.reshape(-1) if box is None else part_of(whole, box))[5:18].to(into_dtype)
        assert torch.equal(into, want)
    if dtype != into_dtype:
        assert max(sizes) * dtype.itemsize <= 24


@pytest.mark.parametrize(
    ("begin", "n", "box"),
    [
        (0, 13, None), (12, 1, None), (-1, 1, None), (0, 5, Box((0, 0), (2, 2))), (0, 1, Box((2, 0), (2, 4))),
        (0, 1, Box((0,), (3,))), (0, 1, Box((-1, 0), (2, 4))),
    ],
)  # fmt: skip
def test_what_the_tensor_does_not_have(begin, n, box):
    tensor = LogicalTensor(name="w", kind=PARAM, shape=(3, 4), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="f, w: "):
        fill(Read(tensor, begin, torch.empty(n), box), lambda *_: pytest.fail("was read"), "f")
    with pytest.raises(CheckpointError, match="f, w: "):
        fill_from_file(Read(tensor, begin, torch.empty(n), box), -1, 0, "f")


def test_bytes_come_into_the_tensors_own_memory(tmp_path):
    want = torch.randn(1000, dtype=torch.float64)
    path = tmp_path / "f"
    path.write_bytes(b"abc" + bytes(want.view(torch.uint8).tolist()))
    file = os.open(path, os.O_RDONLY)
    try:
        into = torch.zeros(1002, dtype=torch.float64)
        read_bytes(file, 3, into[1:1001], "f")
        assert torch.equal(into[1:1001], want) and into[0] == into[1001] == 0
        read_bytes(file, 10**9, into[:0], "f")
        with pytest.raises(CheckpointError, match="f: the file ends at byte 8003, and 8011 are needed"):
            read_bytes(file, 3, torch.empty(1001, dtype=torch.float64), "f")
    finally:
        os.close(file)
    with pytest.raises(CheckpointError, match="cannot be read: Bad file descriptor"):
        read_bytes(file, 0, torch.empty(1), "f")


@contextlib.contextmanager
def open_file(path, whole, offset, n_bytes=None):
    """A descriptor of a file that has ``whole`` from ``offset`` on, cut to ``n_bytes``."""
    path.write_bytes((b"x" * offset + whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes())[:n_bytes])
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 2), (1, 3, 1, 2)])
def test_every_box_of_a_file(tmp_path, shape):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    tensor = LogicalTensor(name="w", kind=PARAM, shape=shape, dtype=torch.int16)
    with open_file(tmp_path / "f", whole, 3) as file:
        for box in (None, *boxes(shape)):
            want = whole.reshape(-1) if box is None else part_of(whole, box)
            for begin in range(want.numel() + 1):
                n = want.numel() - begin
                for count in {0, n // 2, n}:
                    into = torch.full((count,), -1, dtype=torch.int16)
                    fill_from_file(Read(tensor, begin, into, box), file, 3, "f")
                    got = into.tolist()
                    assert got == want[begin : begin + count].tolist(), f"{box} {begin} {count}: {got}"


@pytest.mark.parametrize("columns", [61, 1031, 4099, 20011])
@pytest.mark.parametrize("into_dtype", [torch.bfloat16, torch.float32])
def test_parts_of_rows_of_a_file(tmp_path, monkeypatch, columns, into_dtype):
    monkeypatch.setattr(ranges, "STAGING_BYTES", 30_001)
    whole = torch.randn(7, 13, columns).bfloat16()
    tensor = LogicalTensor(name="w", kind=PARAM, shape=whole.shape, dtype=whole.dtype)
    half = columns // 2
    parts = [
        Box((0, 0, half), (7, 13, columns - half)), Box((1, 2, 0), (5, 11, half)), Box((0, 0, 3), (7, 13, columns - 4)),
        Box((6, 0, columns - 1), (1, 13, 1)),
    ]  # fmt: skip
    with open_file(tmp_path / "f", whole, 11) as file:
        for box in parts:
            want = part_of(whole, box)
            for begin, end in [(0, want.numel()), (min(half + 1, want.numel() - 1), want.numel() - 1)]:
                into = torch.empty(end - begin, dtype=into_dtype)
                fill_from_file(Read(tensor, begin, into, box), file, 11, "f")
                n_wrong = int((into != want[begin:end].to(into_dtype)).sum())
                assert n_wrong == 0, f"{box}, {begin} to {end}: {n_wrong} of {end - begin} elements differ"


@pytest.mark.parametrize("columns", [200, 5000])  # runs that are read at once, and one by one
def test_a_file_that_ends_within_the_runs(tmp_path, columns):
    whole = torch.randn(40, columns)
    tensor = LogicalTensor(name="w", kind=PARAM, shape=whole.shape, dtype=whole.dtype)
    box = Box((0, 0), (40, columns // 2))
    into = torch.empty(20 * columns)
    for row, column in [(0, 0), (17, 5), (17, columns - 1), (39, 0), (39, columns // 2 - 1)]:
        n_bytes = 8 + 4 * (row * columns + column) + 1
        with (
            open_file(tmp_path / "f", whole, 8, n_bytes) as file,
            pytest.raises(CheckpointError, match=rf"f: the file ends at byte {n_bytes}, and \d+ are needed"),
        ):
            fill_from_file(Read(tensor, 0, into, box), file, 8, "f")
    with open_file(tmp_path / "f", whole, 8, 8 + 4 * (39 * columns + columns // 2)) as file:
        fill_from_file(Read(tensor, 0, into, box), file, 8, "f")  # the rest of the last row is not needed
    assert torch.equal(into, part_of(whole, box))
    with pytest.raises(CheckpointError, match="cannot be read: Bad file descriptor"):
        fill_from_file(Read(tensor, 0, into, box), file, 8, "f")
