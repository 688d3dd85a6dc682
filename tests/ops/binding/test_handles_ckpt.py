"""The Python interface of checksums, reshape plans, name swaps and block files: the same bytes as plain files, typed
errors, and other threads that run meanwhile.
"""

from __future__ import annotations

import array
import ctypes
import errno
import itertools
import os
import random
import struct
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspeed_c import _C
from tests import fresh
from tests.open_files import open_files
from tests.waits import exit_status, fork_with_alarm, joined

BLOCK = 4096
BUFFER = 4 * BLOCK
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BUFFER - 1, BUFFER, BUFFER + 1, 5 * BUFFER + 77]


def crc32c_by_definition(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 if crc & 1 else crc >> 1
    return crc ^ 0xFFFFFFFF


def data_of(n_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def crcs_of(data: np.ndarray, block_bytes: int) -> bytes:
    """The expected checksums, computed by _C.crc32c. Another test compares _C.crc32c with its definition."""
    return b"".join(
        struct.pack("<I", _C.crc32c(data[i : i + block_bytes].tobytes())) for i in range(0, data.size, block_bytes)
    )


def write(path: Path, data: np.ndarray, block_bytes: int = BLOCK, **options: object) -> bytes:
    writer = _C.BlockWriter(str(path), block_bytes, **options)
    writer.write(data.ctypes.data, data.size)
    return writer.finish()


def copies_of(*triples: tuple[int, int, int]) -> array.array:
    return array.array("q", [number for triple in triples for number in triple])


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))


# Checksums


def test_crc32c_values():
    assert _C.crc32c(b"123456789") == 0xE3069283
    assert _C.crc32c(b"") == 0
    assert _C.crc32c(b"", 77) == 77
    for n_bytes in (1, 7, 8, 9, 255, 769, 13_000):
        data = data_of(n_bytes, n_bytes).tobytes()
        assert _C.crc32c(data) == crc32c_by_definition(data), n_bytes
        cut = n_bytes // 3
        assert _C.crc32c(data[cut:], _C.crc32c(data[:cut])) == _C.crc32c(data), n_bytes


def test_crc32c_takes_any_contiguous_buffer():
    data = data_of(999)
    wanted = _C.crc32c(data.tobytes())
    for buffer in (data, bytearray(data), memoryview(data.tobytes()), data.reshape(27, 37)):
        assert _C.crc32c(buffer) == wanted
    with pytest.raises((BufferError, ValueError)):
        _C.crc32c(data[::2])
    with pytest.raises(TypeError):
        _C.crc32c("text")
    with pytest.raises(TypeError):
        _C.crc32c(b"", -1)


# Reshape plans


def part(start: list[int], size: list[int], begin: int = 0, n_elems: int | None = None) -> list[int]:
    return [*start, *size, begin, int(np.prod(size, dtype=np.int64)) - begin if n_elems is None else n_elems]


def stored(tensor: np.ndarray, piece: list[int]) -> np.ndarray:
    n_dims = tensor.ndim
    box = tensor[tuple(slice(s, s + n) for s, n in zip(piece[:n_dims], piece[n_dims : 2 * n_dims]))]
    return box.reshape(-1)[piece[-2] : piece[-2] + piece[-1]]


def assemble(tensor: np.ndarray, pieces: list[list[int]], wanted: list[int]) -> np.ndarray:
    numbers = array.array("q", itertools.chain.from_iterable(pieces))
    runs = _C.reshape_plan(list(tensor.shape), numbers, len(pieces), array.array("q", wanted))
    assert isinstance(runs, array.array) and runs.typecode == "q" and len(runs) % 4 == 0
    into = np.full(wanted[-1], -1, dtype=np.int64)
    for piece, src, dst, n in zip(*[iter(runs)] * 4):
        assert (into[dst : dst + n] == -1).all()
        into[dst : dst + n] = stored(tensor, pieces[piece])[src : src + n]
    return into


@pytest.mark.parametrize("shape", [(24,), (4, 6), (3, 4, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_reshape_between_cuts_along_all_axes(shape, n_ranks):
    tensor = np.arange(np.prod(shape)).reshape(shape)

    def cut(axis: int, n: int) -> list[list[int]]:
        pieces = []
        for i in range(n):
            start, size = [0] * len(shape), list(shape)
            start[axis] = shape[axis] * i // n
            size[axis] = shape[axis] * (i + 1) // n - start[axis]
            n_elems = int(np.prod(size))
            bounds = [n_elems * rank // n_ranks for rank in range(n_ranks + 1)]
            pieces += [part(start, size, begin, end - begin) for begin, end in itertools.pairwise(bounds)]
        return pieces

    for axis in range(len(shape)):
        for target in range(len(shape)):
            for wanted in cut(target, 2):
                np.testing.assert_array_equal(assemble(tensor, cut(axis, 3), wanted), stored(tensor, wanted))


def test_a_part_of_a_file(tmp_path):
    tensor = np.arange(4 * 900, dtype=np.int16).reshape(4, 900)
    (tmp_path / "f").write_bytes(b"abc" + tensor.tobytes())
    wanted = part([1, 300], [3, 500], 100, 1200)
    into = np.full(1200, -1, dtype=np.int16)
    with open(tmp_path / "f", "rb") as file:
        assert _C.read_part(file.fileno(), 3, 2, [4, 900], wanted, into.ctypes.data) is None
        np.testing.assert_array_equal(into, stored(tensor, wanted))
        assert _C.read_part(file.fileno(), 3, 2, [4, 900], part([0, 0], [4, 900], 3600, 0), 0) is None
        end = 3 + tensor.nbytes
        found = _C.read_part(file.fileno(), end - 6, 1, [8], part([0], [8]), into.ctypes.data)
        assert found == (end - 6, end + 2, end, 0)
        with pytest.raises(ValueError, match="read_part: wanted starts at 300 with size 601 along dimension 1"):
            _C.read_part(file.fileno(), 3, 2, [4, 900], part([1, 300], [3, 601]), into.ctypes.data)
        with pytest.raises(ValueError, match="wanted has 5 numbers, 6 belong to 2 dimensions"):
            _C.read_part(file.fileno(), 3, 2, [4, 900], wanted[:-1], into.ctypes.data)
        with pytest.raises(ValueError, match="shape has 65 dimensions"):
            _C.read_part(file.fileno(), 3, 2, [1] * 65, part([0] * 65, [1] * 65), into.ctypes.data)
    assert _C.read_part(10**6, 0, 1, [4], part([0], [4]), into.ctypes.data) == (0, 4, 0, errno.EBADF)


def test_reshape_of_scalars_and_nothing():
    np.testing.assert_array_equal(assemble(np.array(7), [part([], [])], part([], [])), [7])
    assert _C.reshape_plan([3, 0], b"", 0, array.array("q", part([0, 0], [3, 0]))).tolist() == []
    whole = np.array(part([0], [9]), dtype=np.int64)
    assert _C.reshape_plan(array.array("q", [9]), whole, 1, whole.tobytes()).tolist() == [0, 0, 0, 9]


def test_reshape_plans_are_merged():
    whole = part([0, 0], [1000, 1000])
    runs = _C.reshape_plan([1000, 1000], array.array("q", whole), 1, array.array("q", part([5, 0], [20, 1000], 7)))
    assert runs.tolist() == [0, 5007, 0, 19_993]


def test_reshape_errors():
    half, whole = part([0, 0], [2, 6]), part([0, 0], [4, 6])

    def plan(shape, pieces, n_pieces, wanted):
        return _C.reshape_plan(shape, array.array("q", pieces), n_pieces, array.array("q", wanted))

    with pytest.raises(ValueError, match=r"reshape_plan: no piece holds element \[2, 0\].*number there is 12"):
        plan([4, 6], half, 1, whole)
    with pytest.raises(ValueError, match=r"pieces\[1\] starts at 0 with size 5 along dimension 0"):
        plan([4, 6], half + part([0, 0], [5, 6]), 2, whole)
    with pytest.raises(ValueError, match="wanted"):
        plan([4, 6], whole, 1, part([0, 0], [4, 6], 20, 5))
    with pytest.raises(ValueError, match="pieces has 6 numbers, not 6 for each of 2"):
        plan([4, 6], half, 2, whole)
    with pytest.raises(ValueError, match="wanted has 5 numbers"):
        plan([4, 6], half, 1, whole[:-1])
    with pytest.raises(ValueError, match="pieces has"):
        plan([4, 6], [], -1, whole)
    with pytest.raises(ValueError, match="dimensions"):
        plan([1] * 65, [], 0, part([0] * 65, [1] * 65))
    with pytest.raises(ValueError, match="whole int64"):
        _C.reshape_plan([4], b"1234567", 1, b"")
    with pytest.raises(ValueError, match="int64_t"):
        plan([2**62, 4], [], 0, part([0, 0], [1, 1]))


# Names


def test_exchange_swaps_folders_or_does_nothing(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    (a / "in a").touch()
    (b / "in b").touch()
    swapped = _C.exchange_paths(str(a), str(b))
    assert isinstance(swapped, bool)
    assert os.listdir(a) == (["in b"] if swapped else ["in a"])
    assert os.listdir(b) == (["in a"] if swapped else ["in b"])


def test_exchange_with_a_missing_name(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(FileNotFoundError) as caught:
        _C.exchange_paths(tmp_path / "a", str(tmp_path / "missing"))
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == tmp_path / "a"
    assert caught.value.filename2 == str(tmp_path / "missing")


# Block files


@pytest.mark.parametrize("n_bytes", SIZES)
@pytest.mark.parametrize("block_bytes", [BLOCK, 1000])
def test_files_are_what_was_written(tmp_path, n_bytes, block_bytes):
    data = data_of(n_bytes, n_bytes)
    draw = random.Random(n_bytes)
    writer = _C.BlockWriter(str(tmp_path / "file"), block_bytes, buffer_bytes=BUFFER, n_buffers=3)
    at = 0
    while at < n_bytes:
        n = min(n_bytes - at, draw.choice([0, 1, 7, 511, BLOCK, BUFFER + 3]))
        if draw.random() < 0.5:
            writer.write(data.ctypes.data + at, n)
        else:
            writer.write_bytes(data[at : at + n])
        at += n
        assert writer.n_bytes == at
    assert writer.finish() == crcs_of(data, block_bytes)
    assert writer.n_bytes == n_bytes
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_new_files_have_the_umask_and_old_ones_are_not_touched(tmp_path):
    path = tmp_path / "file"
    before = os.umask(0o027)
    try:
        write(path, data_of(10))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileExistsError) as caught:
        _C.BlockWriter(str(path), BLOCK)
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(path))
    assert path.read_bytes() == data_of(10).tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_reads_only_the_blocks_that_are_asked_for(tmp_path, seed):
    data = data_of(37 * BLOCK + 123, seed)
    path = tmp_path / "file"
    crcs = write(path, data)
    draw = random.Random(seed)
    asked, needed = [], set()
    for _ in range(draw.choice([1, 3, 50])):
        offset = draw.randrange(data.size)
        n = draw.choice([0, 1, 100, BLOCK, 3 * BLOCK])
        n = min(n, data.size - offset)
        asked.append((offset, n, np.zeros(n, dtype=np.uint8)))
        needed |= set(range(offset // BLOCK, (offset + n - 1) // BLOCK + 1)) if n else set()
    copies = copies_of(*[(offset, n, into.ctypes.data) for offset, n, into in asked])
    n_read = _C.read_blocks(str(path), data.size, BLOCK, crcs, copies, buffer_bytes=BUFFER, n_buffers=2)
    assert n_read == sum(min(BLOCK, data.size - block * BLOCK) for block in needed)
    for offset, n, into in asked:
        np.testing.assert_array_equal(into, data[offset : offset + n])


def test_nothing_to_read_opens_nothing(tmp_path):
    missing = str(tmp_path / "missing")
    assert _C.read_blocks(missing, 10, BLOCK, b"1234", b"") == 0
    assert _C.read_blocks(missing, 10, BLOCK, b"", copies_of((3, 0, 0))) == 0


def test_every_flipped_bit_is_found(tmp_path):
    data = data_of(20 * BLOCK + 5)
    path = tmp_path / "file"
    crcs = write(path, data)
    assert _C.verify_blocks(str(path), data.size, BLOCK, crcs) == []
    draw = random.Random(4)
    for at in [0, BLOCK - 1, BLOCK, data.size - 1, *(draw.randrange(data.size) for _ in range(20))]:
        flip(path, at)
        into = np.zeros_like(data)
        with pytest.raises(_C.BlockError, match=f"block {at // BLOCK} .*does not match") as caught:
            _C.read_blocks(str(path), data.size, BLOCK, crcs, copies_of((0, data.size, into.ctypes.data)))
        assert (caught.value.path, caught.value.block) == (str(path), at // BLOCK)
        assert isinstance(caught.value, ValueError)
        begin = at // BLOCK * BLOCK
        np.testing.assert_array_equal(into[:begin], data[:begin])
        assert not into[begin : begin + BLOCK].any()
        assert _C.verify_blocks(str(path), data.size, BLOCK, crcs) == [at // BLOCK]
        # Without checksums the caller accepts the bytes as they are.
        _C.read_blocks(str(path), data.size, BLOCK, b"", copies_of((0, data.size, into.ctypes.data)))
        assert np.flatnonzero(into != data).tolist() == [at]
        flip(path, at)
    for at in (3, 5 * BLOCK, 5 * BLOCK + 9, 20 * BLOCK):
        flip(path, at)
    assert _C.verify_blocks(str(path), data.size, BLOCK, crcs) == [0, 5, 20]


@pytest.mark.parametrize("change", [-BLOCK, -1, 1, BLOCK])
def test_files_of_another_length(tmp_path, change):
    data = data_of(5 * BLOCK)
    path = tmp_path / "file"
    crcs = write(path, data)
    os.truncate(path, data.size + change)
    into = np.zeros(1, dtype=np.uint8)
    message = f"has {data.size + change} bytes and should have {data.size}"
    for call in (
        lambda: _C.read_blocks(str(path), data.size, BLOCK, crcs, copies_of((0, 1, into.ctypes.data))),
        lambda: _C.verify_blocks(str(path), data.size, BLOCK, crcs),
    ):
        with pytest.raises(OSError, match=message) as caught:
            call()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


def test_missing_and_forbidden_paths(tmp_path):
    into = np.zeros(1, dtype=np.uint8)
    missing = str(tmp_path / "folder" / "file")
    for call in (
        lambda: _C.BlockWriter(missing, BLOCK),
        lambda: _C.read_blocks(missing, 1, BLOCK, b"", copies_of((0, 1, into.ctypes.data))),
        lambda: _C.verify_blocks(missing, 1, BLOCK, b"1234"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, missing)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        _C.BlockWriter(tmp_path / "file" / "below", BLOCK)
    with pytest.raises(ValueError, match="null"):
        _C.BlockWriter("a\0b", BLOCK)
    with pytest.raises(TypeError):
        _C.BlockWriter(3.5, BLOCK)


def test_paths_need_not_be_utf_8(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\xfe"
    writer = _C.BlockWriter(os.fsdecode(path), BLOCK)
    writer.write_bytes(b"abc")
    crcs = writer.finish()
    assert _C.verify_blocks(path, 3, BLOCK, crcs) == []


def test_bad_arguments(tmp_path):
    path = str(tmp_path / "file")
    for options, name in (
        ({"block_bytes": 0}, "block_bytes"),
        ({"block_bytes": -1}, "block_bytes"),
        ({"block_bytes": BLOCK, "buffer_bytes": 0}, "buffer_bytes"),
        ({"block_bytes": BLOCK, "buffer_bytes": 2**31}, "buffer_bytes"),
        ({"block_bytes": BLOCK, "n_buffers": 1}, "n_buffers"),
        ({"block_bytes": BLOCK, "backend": "tape"}, "tape"),
    ):
        with pytest.raises(ValueError, match=name):
            _C.BlockWriter(path, **options)
    assert os.listdir(tmp_path) == []
    into = np.zeros(1, dtype=np.uint8)
    with pytest.raises(ValueError, match=r"copies\[1\]"):
        _C.read_blocks(path, 10, BLOCK, b"", copies_of((0, 1, into.ctypes.data), (10, 1, into.ctypes.data)))
    with pytest.raises(ValueError, match="three belong to each"):
        _C.read_blocks(path, 10, BLOCK, b"", array.array("q", [1, 2]))
    with pytest.raises(ValueError, match="n_crcs is 2"):
        _C.read_blocks(path, 10, BLOCK, b"12345678", b"")
    with pytest.raises(ValueError, match="whole uint32"):
        _C.verify_blocks(path, 10, BLOCK, b"123")
    with pytest.raises(ValueError, match="crcs"):
        _C.verify_blocks(path, 10, BLOCK, b"")
    writer = _C.BlockWriter(path, BLOCK)
    with pytest.raises(ValueError, match="n_bytes is -1"):
        writer.write(into.ctypes.data, -1)
    assert writer.finish() == b""  # a refused argument does no harm


def test_writers_end_once(tmp_path):
    writer = _C.BlockWriter(str(tmp_path / "finished"), BLOCK)
    writer.finish()
    for call in (writer.finish, lambda: writer.write_bytes(b"a")):
        with pytest.raises(RuntimeError, match="finished"):
            call()
    writer.abort()
    writer = _C.BlockWriter(str(tmp_path / "aborted"), BLOCK, buffer_bytes=BLOCK)
    writer.write_bytes(bytes(10 * BLOCK))
    writer.abort()
    writer.abort()
    for call in (writer.finish, lambda: writer.write_bytes(b"a")):
        with pytest.raises(RuntimeError, match="aborted"):
            call()
    assert (tmp_path / "aborted").exists()


def test_no_descriptor_stays_open(tmp_path):
    before = open_files()
    for i in range(20):
        path = tmp_path / str(i)
        writer = _C.BlockWriter(str(path), BLOCK, buffer_bytes=BLOCK, n_buffers=2)
        writer.write_bytes(bytes(5 * BLOCK))
        if i % 3 == 0:
            writer.finish()
        elif i % 3 == 1:
            writer.abort()
        del writer
        with pytest.raises(OSError, match="exists"):
            _C.BlockWriter(str(path), BLOCK)
        with pytest.raises(OSError, match="should have"):
            _C.verify_blocks(str(path), 1, BLOCK, b"1234")
    assert open_files() == before


FULL_DISK = """
import resource, sys
from deepspeed_c import _C

for n_allowed in (0, 30_000, 190_000):
    for backend in ("auto", "threads", "sync"):
        path = f"{sys.argv[1]}/{n_allowed}-{backend}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_allowed, -1))
        writer = _C.BlockWriter(path, 4096, buffer_bytes=16384, n_buffers=2, backend=backend)
        failures = []
        for _ in range(40):
            try:
                writer.write_bytes(bytes(5000))
            except (OSError, RuntimeError) as error:
                failures.append(error)
        try:
            writer.finish()
        except (OSError, RuntimeError) as error:
            failures.append(error)
        first, *others = failures
        assert type(first) is OSError and (first.errno, first.filename) == (27, path), (path, first)
        assert all(type(error) is RuntimeError and "failed before" in str(error) for error in others), (path, others)
"""


def test_what_the_disk_refuses_is_told_once(tmp_path):
    """A limit on the size of files stands for a full disk. The test writes 200 000 bytes."""
    done = fresh.run(["-c", FULL_DISK, tmp_path])
    assert done.returncode == 0, done.stderr
    assert len(os.listdir(tmp_path)) == 9


def test_writers_work_in_background_threads(tmp_path):
    data = [data_of(50 * BLOCK + i, i) for i in range(4)]
    crcs: list[bytes | None] = [None] * len(data)

    def run(i: int) -> None:
        crcs[i] = write(tmp_path / str(i), data[i], buffer_bytes=BUFFER)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert crcs == [crcs_of(array_, BLOCK) for array_ in data]
    for i, array_ in enumerate(data):
        assert _C.verify_blocks(str(tmp_path / str(i)), array_.size, BLOCK, crcs[i]) == []


def test_one_thread_at_a_time(tmp_path):
    """A second thread that writes at the same time is refused. It does not wait, and none of its bytes are written."""
    writer = _C.BlockWriter(str(tmp_path / "file"), 1 << 18)
    data = np.zeros(16 << 20, dtype=np.uint8)
    is_over = threading.Event()
    refused: list[str] = []  # by either thread
    n_written = 0

    def run() -> None:
        nonlocal n_written
        while not is_over.is_set() and n_written < 64:
            try:
                writer.write(data.ctypes.data, data.size)
                n_written += 1
            except RuntimeError as error:
                refused.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not refused:
        try:
            writer.write_bytes(b"")
        except RuntimeError as error:
            refused.append(str(error))
    is_over.set()
    joined(thread)
    assert refused and all("another thread" in text for text in refused), (refused, n_written)
    assert writer.n_bytes == n_written * data.size
    writer.abort()


def test_other_threads_run_meanwhile(tmp_path):
    data = data_of(64 << 20)
    n_turns = 0
    is_over = False

    def count() -> None:
        nonlocal n_turns
        while not is_over:
            n_turns += 1
            time.sleep(0.001)  # gives the GIL away, long enough for another thread to take it

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    sys.setswitchinterval(60)  # a thread that holds the GIL keeps it
    thread.start()
    try:
        # The call is repeated: on a busy machine the other thread may get no core during one call.
        before, into = n_turns, np.zeros_like(data)
        for k in range(200):
            path = tmp_path / str(k)
            crcs = write(path, data)
            if n_turns > before:
                break
            path.unlink()
        assert n_turns > before
        before = n_turns
        for _ in range(200):
            _C.read_blocks(str(path), data.size, BLOCK, crcs, copies_of((0, data.size, into.ctypes.data)))
            if n_turns > before:
                break
        assert n_turns > before
    finally:
        is_over = True
        sys.setswitchinterval(interval)
    joined(thread)
    np.testing.assert_array_equal(into, data)


def test_forked_children_leave_a_writer_alone(tmp_path):
    """A forked child clears the frames of other threads and so destroys its copy of the writer.

    This must not wait and must not consume the parent's completions.
    """
    data = data_of(40 * BLOCK)
    writer = _C.BlockWriter(str(tmp_path / "file"), BLOCK, buffer_bytes=BLOCK)
    writer.write(data.ctypes.data, data.size // 2)
    child = fork_with_alarm()
    if child == 0:
        code = 1
        try:
            writer.write_bytes(b"a")
        except RuntimeError:
            code = 0
        del writer
        os._exit(code)
    assert exit_status(child) == 0
    writer.write(data.ctypes.data + data.size // 2, data.size - data.size // 2)
    assert writer.finish() == crcs_of(data, BLOCK)
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_tensors_by_address(tmp_path):
    tensors = [torch.randn(n) for n in (1, 1000, 70_000)]
    writer = _C.BlockWriter(str(tmp_path / "file"), BLOCK)
    for tensor in tensors:
        writer.write(tensor.data_ptr(), tensor.nbytes)
    n_bytes, crcs = writer.n_bytes, writer.finish()
    back = [torch.empty_like(tensor) for tensor in tensors]
    offsets = [0, 4, 4004]
    triples = [(offset, into.nbytes, into.data_ptr()) for offset, into in zip(offsets, back)]
    assert _C.read_blocks(str(tmp_path / "file"), n_bytes, BLOCK, crcs, copies_of(*triples)) == n_bytes
    for tensor, into in zip(tensors, back):
        assert torch.equal(tensor, into)


def test_blocks_larger_than_the_ring_and_large_reads(tmp_path):
    data = data_of((5 << 20) + 17)
    crcs = write(tmp_path / "file", data, 1 << 20, buffer_bytes=BLOCK, n_buffers=2)
    into = (ctypes.c_ubyte * data.size)()
    copies = copies_of((0, data.size, ctypes.addressof(into)))
    n_read = _C.read_blocks(str(tmp_path / "file"), data.size, 1 << 20, crcs, copies, buffer_bytes=BLOCK, n_buffers=2)
    assert n_read == data.size
    assert bytes(into) == data.tobytes()
