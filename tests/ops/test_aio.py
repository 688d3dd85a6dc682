"""ops/aio.py: compares the handle's writes and reads with plain file functions, on every backend.

Failures are typed and do not affect other requests.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import threading
import time
import weakref

import pytest
import torch

from deepspeed_c import _C
from deepspeed_c.config import load_config
from deepspeed_c.errors import AioError, ConfigError, DeepSpeedCError, FeatureError, StateError
from deepspeed_c.ops.aio import AsyncIOBuilder, PinnedPool, aio_handle, backends
from tests.aio_faults import faults
from tests.open_files import open_files

USABLE = [backend.name for backend in backends() if backend.is_usable]
SIZES = [0, 1, 511, 512, 4095, 4096, 4097, 1000003, (3 << 20) + 1]


@pytest.fixture(params=USABLE)
def handle(request):
    made = aio_handle(1 << 16, 8, backend=request.param)
    assert made.backend == request.param
    yield made
    made.close()


def random_bytes(n: int, shift: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + shift)
    return torch.randint(0, 256, (n + shift,), dtype=torch.uint8, generator=generator)[shift:]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("shift", "offset"), [(0, 0), (1, 0), (0, 1), (3, 4099), (64, 4096)])
def test_write_and_read(handle, tmp_path, n, shift, offset):
    path = tmp_path / "data"
    before = bytes(range(256)) * 40
    path.write_bytes(before)
    tensor = random_bytes(n, shift)
    assert handle.sync_pwrite(tensor, path, offset) == 1
    wanted = before[:offset] + tensor.numpy().tobytes() + before[offset + n :]
    assert path.read_bytes() == wanted
    found = torch.full((n + shift,), 7, dtype=torch.uint8)
    assert handle.sync_pread(found[shift:], str(path), offset) == 1
    assert torch.equal(found[shift:], tensor)
    assert (found[:shift] == 7).all()


def test_wait_counts_and_keeps_what_it_needs(handle, tmp_path):
    assert handle.wait() == 0
    tensors = [random_bytes(100_000 + i) for i in range(5)]
    for i, tensor in enumerate(tensors):
        assert handle.async_pwrite(tensor.clone(), tmp_path / str(i)) == 0  # nobody else refers to the copy
    assert handle.wait() == 5
    assert handle.wait() == 0
    for i, tensor in enumerate(tensors):
        assert (tmp_path / str(i)).read_bytes() == tensor.numpy().tobytes()


def on_array(values: torch.Tensor) -> tuple[torch.Tensor, weakref.ref]:
    """A tensor of these values, and a weak reference that tells whether its memory still exists."""
    array = values.numpy().copy()
    return torch.from_numpy(array), weakref.ref(array)


def move_away(tensor: torch.Tensor, how: str) -> None:
    if how == "data":
        tensor.data = torch.empty(0, dtype=torch.uint8)
    elif how == "set_":
        tensor.set_(torch.zeros(5, dtype=torch.uint8))


@pytest.mark.parametrize("how", ["del", "data", "set_"])
def test_memory_lives_as_long_as_its_transfer_and_no_longer(handle, tmp_path, how):
    tensor, alive = on_array(random_bytes(50_000))
    handle.async_pwrite(tensor, tmp_path / "data")
    move_away(tensor, how)
    if how == "del":
        del tensor
    gc.collect()
    assert alive() is not None
    assert handle.wait() == 1
    gc.collect()
    assert alive() is None
    assert (tmp_path / "data").read_bytes() == random_bytes(50_000).numpy().tobytes()


@pytest.mark.parametrize("how", ["data", "set_"])
def test_a_tensor_that_is_pointed_elsewhere_while_it_is_read(handle, tmp_path, how):
    """The read continues into the tensor's old memory. Tensors allocated afterwards are not overwritten."""
    wanted = random_bytes(4_000_001)
    (tmp_path / "data").write_bytes(wanted.numpy().tobytes())
    for is_held in (True, False):
        tensor = torch.zeros(4_000_001, dtype=torch.uint8)
        held = tensor[:] if is_held else None
        handle.pread(tensor, tmp_path / "data", True, True)
        move_away(tensor, how)
        others = [torch.full((4_000_001,), 7, dtype=torch.uint8) for _ in range(3)]
        assert handle.wait() == 1
        assert all((other == 7).all() for other in others)
        assert held is None or torch.equal(held, wanted)
        assert tensor.numel() < 10


def test_a_storage_that_is_resized_meanwhile_is_told(tmp_path):
    """Uses the backend "sync", whose transfers finish when they are submitted, so that this test harms no memory."""
    handle = aio_handle(backend="sync")
    for verb in ("read", "write"):
        for resize in (lambda t: t.untyped_storage().resize_(0), lambda t: t.resize_(10_000_000)):
            tensor = torch.ones(1000)
            handle.sync_pwrite(tensor, tmp_path / "data", 4096)
            (handle.async_pread if verb == "read" else handle.async_pwrite)(tensor, tmp_path / "data", 4096)
            handle.async_pwrite(torch.ones(9), tmp_path / "other")
            resize(tensor)
            with pytest.raises(StateError, match=f"resized while a {verb} of 4000 bytes at offset 4096 was on its way"):
                handle.wait()
            assert handle.wait() == 0
    tensor = torch.ones(1000)
    handle.async_pread(tensor[:500], tmp_path / "data", 4096)
    tensor.resize_(700)  # within its memory
    assert handle.wait() == 1


def test_paths_are_taken_whole(handle, tmp_path):
    tensor = random_bytes(100)
    (tmp_path / "data").write_bytes(b"as it was")
    for path in (f"{tmp_path}/data\0.tmp", os.fsencode(tmp_path / "data") + b"\0"):
        with pytest.raises(ValueError, match="null byte"):
            handle.sync_pwrite(tensor, path)
    assert (tmp_path / "data").read_bytes() == b"as it was"
    name = os.fsencode(tmp_path) + b"/\xff\xfe"  # no UTF-8
    for path in (name, os.fsdecode(name)):
        handle.sync_pwrite(tensor, path)
        found = torch.zeros_like(tensor)
        handle.sync_pread(found, path)
        assert torch.equal(found, tensor)
    with pytest.raises(TypeError):
        handle.sync_pwrite(tensor, 3.5)


def test_a_file_that_is_closed_while_another_thread_is_about_to_use_it(tmp_path):
    """A thread waits for the engine while another thread uses the engine.

    The waiting thread's file is closed meanwhile.
    """
    (tmp_path / "data").write_bytes(bytes(1_000_000))
    first, second = (_C.AioFile(str(tmp_path / "data"), _C.AIO_READ) for _ in range(2))
    memory, errors, tids = torch.zeros(1_000_000, dtype=torch.uint8), [], []

    def submit() -> None:
        tids.append(threading.get_native_id())
        try:
            engine.submit_read(second, 0, memory.data_ptr(), 10, memory)
        except RuntimeError as error:
            errors.append(str(error))

    def state_of(thread: int) -> str:
        with open(f"/proc/self/task/{thread}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    with faults(is_auto=False, delay_us=300_000, late_chance=256) as broken:
        engine = _C.AioEngine("fault", block_bytes=4096, queue_depth=4)
        request = engine.submit_read(first, 0, memory.data_ptr(), 1_000_000, memory)
        waiting = threading.Thread(target=engine.wait, args=(request,))
        using = threading.Thread(target=submit)
        waiting.start()
        while not broken.counts()["n_transfers"]:  # it holds the engine, for more than a minute if undisturbed
            time.sleep(0.001)
        using.start()
        while not tids or state_of(tids[0]) != "S":  # it sleeps until the engine is free
            time.sleep(0.001)
        second.close()
        broken.set()
        for thread in (waiting, using):
            thread.join(300)
            assert not thread.is_alive()
    assert errors == ["AioEngine.submit_read: the file has been closed"]
    first.close()
    for use in (lambda: first.n_bytes, lambda: first.is_direct, lambda: first.note):
        with pytest.raises(RuntimeError, match="the file has been closed"):
            use()
    engine.close()


def test_memory_is_kept_when_nobody_knows_whether_the_kernel_is_done_with_it(tmp_path):
    (tmp_path / "data").write_bytes(bytes(400_000))
    with faults(is_auto=False, dies_after=2, late_chance=256):
        engine = _C.AioEngine("fault", block_bytes=4096, queue_depth=4)
        file = _C.AioFile(str(tmp_path / "data"), _C.AIO_READ)
        requests, alive = [], []
        for _ in range(3):
            tensor, memory = on_array(torch.zeros(400_000, dtype=torch.uint8))
            requests.append(engine.submit_read(file, 0, tensor.data_ptr(), 400_000, tensor))
            alive.append(memory)
        del tensor
        for _ in range(3):
            with pytest.raises(OSError, match="Bad file descriptor"):
                engine.wait(requests.pop())
        assert engine.has_given_up and engine.pending == 0
        with pytest.raises(RuntimeError, match="has given up"):
            engine.submit_read(file, 0, 0, 0, None)
        handle = aio_handle(backend="fault")
        with pytest.raises(AioError, match="Bad file descriptor"):
            for _ in range(3):
                handle.sync_pread(torch.zeros(1_000_000, dtype=torch.uint8)[:400_000], tmp_path / "data")
        with pytest.raises(StateError, match="has given up"):
            handle.sync_pread(torch.zeros(4, dtype=torch.uint8), tmp_path / "data")
    engine.close()
    del engine
    gc.collect()
    assert all(memory() is not None for memory in alive)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_dtypes_and_shapes(handle, tmp_path, dtype):
    tensor = (torch.randn(7, 11, 13) * 3).to(dtype)
    found = torch.empty_like(tensor)
    assert handle.write(tensor, tmp_path / "data", True) == 1
    assert handle.read(found, tmp_path / "data", True) == 1
    assert torch.equal(tensor, found)


def test_deepspeed_keyword_and_descriptor(handle, tmp_path):
    tensor = random_bytes(9999)
    with open(tmp_path / "data", "wb") as file:
        assert handle.async_pwrite(tensor, file.fileno()) == 0
        assert handle.wait() == 1
    found = torch.empty_like(tensor)
    assert handle.pread(found, tmp_path / "data", False, **{"async": True}) == 0
    assert handle.wait() == 1
    assert torch.equal(found, tensor)
    with pytest.raises(TypeError, match="asink"):
        handle.pread(found, tmp_path / "data", asink=True)


def test_getters():
    handle = aio_handle(1 << 14, 5, True, False, 3, backend="sync")
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1 << 14, 5, 3)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (True, False)
    assert handle.get_alignment() % 4096 == 0


def test_auto_takes_the_first_that_is_usable():
    assert aio_handle().backend == USABLE[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"block_size": 0}, "block_bytes"), ({"queue_depth": 0}, "queue_depth"), ({"backend": "tape"}, "tape")],
)
def test_settings_out_of_range(arguments, word):
    with pytest.raises(ValueError, match=word):
        aio_handle(**arguments)


def test_reading_past_the_end_is_an_error(handle, tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(AioError, match="the file ends 3 bytes short of a read of 5001 bytes at offset 2") as caught:
        handle.sync_pread(torch.empty(5001, dtype=torch.uint8), path, 2)
    error = caught.value
    assert isinstance(error, OSError) and isinstance(error, DeepSpeedCError)
    assert (error.errno, error.filename, error.offset, error.n_bytes) == (errno.ENODATA, str(path), 2, 5001)


def test_failures_name_file_and_reason(handle, tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(AioError, match="No such file") as caught:
        handle.sync_pread(torch.empty(3), missing)
    assert (caught.value.errno, caught.value.filename, caught.value.offset) == (errno.ENOENT, str(missing), None)
    with pytest.raises(AioError, match="No space left on device") as caught:
        handle.sync_pwrite(torch.empty(3000), "/dev/full", 64)
    assert (caught.value.errno, caught.value.offset, caught.value.n_bytes) == (errno.ENOSPC, 64, 12000)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.errno, copy.filename, copy.offset, copy.n_bytes) == (
        str(caught.value),
        errno.ENOSPC,
        "/dev/full",
        64,
        12000,
    )


def test_one_failure_leaves_the_others_alone(handle, tmp_path):
    tensor = random_bytes(200_001)
    handle.async_pwrite(tensor, tmp_path / "a")
    handle.async_pwrite(tensor, "/dev/full")
    handle.async_pwrite(tensor, "/dev/full", 4096)
    handle.async_pwrite(tensor, tmp_path / "b")
    with pytest.raises(AioError, match="offset 0 failed: No space left on device .*; 1 other transfers failed too"):
        handle.wait()
    assert handle.wait() == 0
    for name in "ab":
        assert (tmp_path / name).read_bytes() == tensor.numpy().tobytes()


def test_tensors_that_cannot_be_taken(handle, tmp_path):
    with pytest.raises(ValueError, match=r"strides \[1, 4\] is not contiguous"):
        handle.sync_pwrite(torch.empty(3, 4).t(), tmp_path / "data")
    with pytest.raises(FeatureError, match="meta"):
        handle.sync_pwrite(torch.empty(3, device="meta"), tmp_path / "data")
    with pytest.raises(ValueError, match="offset is -1"):
        handle.sync_pwrite(torch.empty(3), tmp_path / "data", -1)


def test_validate_sees_a_difference(handle, tmp_path):
    tensor = random_bytes(5000)
    handle.pwrite(tensor, tmp_path / "data", True, True)
    while not handle._engine.poll(handle._pending[0].id):
        pass
    (tmp_path / "data").write_bytes(bytes(5000))  # after the transfer, before the comparison
    with pytest.raises(AioError, match="not those of the tensor"):
        handle.wait()


def test_no_descriptor_and_no_thread_is_left(tmp_path):
    def count() -> tuple[int, int]:
        return len(open_files()), len(os.listdir("/proc/self/task"))

    tensor = random_bytes(10_000)
    before = count()
    for i in range(40):
        handle = aio_handle(4096, 4, backend=USABLE[i % len(USABLE)])
        handle.async_pwrite(tensor, tmp_path / "data")
        if i % 3:
            handle.wait()
        with pytest.raises(AioError):
            handle.sync_pread(tensor, tmp_path / "missing")
        del handle
    # The kernel lists a thread for a moment after it has been joined.
    limit = time.monotonic() + 200
    while (now := count()) > before and time.monotonic() < limit:
        time.sleep(0.01)
    assert now <= before, (now, before)  # files of earlier tests may have been closed meanwhile


def test_threads_share_a_handle(handle, tmp_path):
    wrong = []

    def work(i: int) -> None:
        tensor = random_bytes(30_000 + i)
        for _ in range(5):
            handle.sync_pwrite(tensor, tmp_path / str(i))
            found = torch.empty_like(tensor)
            handle.sync_pread(found, tmp_path / str(i))
            if not torch.equal(found, tensor):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)


def test_a_pipe_is_refused_and_nothing_hangs(handle, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR)  # so that opening it for reading does not wait for a writer
    with pytest.raises(AioError, match="Illegal seek"):
        handle.sync_pread(torch.zeros(3, dtype=torch.uint8), path)
    os.close(keep)


def test_closed_engine_says_so():
    engine = _C.AioEngine("sync")
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        engine.wait(1)


def test_builder():
    builder = AsyncIOBuilder()
    assert builder.is_compatible() and builder.NAME == "async_io"
    assert builder.load().aio_handle is aio_handle


def test_locked_tensors(handle, tmp_path):
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    assert tensor.shape == (1000,) and tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() % handle.get_alignment() == 0
    assert handle.is_pinned(tensor) and not handle.is_pinned(torch.empty(3))
    tensor.fill_(3)
    handle.sync_pwrite(tensor, tmp_path / "data")
    assert handle.free_cpu_locked_tensor(tensor)
    assert not handle.free_cpu_locked_tensor(tensor)
    assert (tensor == 3).all()  # the memory lives as long as the tensor
    assert handle.new_cpu_locked_tensor(0, tensor).numel() == 0


def test_pool_holds_its_budget():
    pool = PinnedPool(3 * 4096)
    first = pool.new_tensor(4097, torch.uint8)
    assert (pool.used_bytes, pool.held_bytes) == (8192, 8192)
    with pytest.raises(MemoryError, match="8192 of the 12288 bytes"):
        pool.new_tensor(2049, torch.float32)
    view = first[10:]
    del first
    assert pool.used_bytes == 8192  # a view keeps the memory in use
    del view
    gc.collect()
    assert (pool.used_bytes, pool.held_bytes) == (0, 8192)
    assert pool.new_tensor(3 * 4096, torch.uint8).numel() == 12288
    with pytest.raises(ValueError, match="-1"):
        pool.new_tensor(-1, torch.uint8)


def test_what_an_engine_has_to_mend_is_mended(tmp_path):
    tensors = [random_bytes(100_000 + i) for i in range(4)]
    plan = {"short_chance": 100, "passing_chance": 30, "late_chance": 60, "reorders": True, "takes_part": True}
    with faults(seed=1, delay_us=1, **plan) as broken:
        handle = aio_handle(1 << 14, 8)
        assert handle.backend == "fault"
        for i, tensor in enumerate(tensors):
            handle.async_pwrite(tensor, tmp_path / str(i))
        assert handle.wait() == 4
        found = [torch.zeros_like(tensor) for tensor in tensors]
        for i, tensor in enumerate(found):
            handle.async_pread(tensor, tmp_path / str(i))
        assert handle.wait() == 4
        counts = broken.counts()
    for i, tensor in enumerate(tensors):
        assert (tmp_path / str(i)).read_bytes() == tensor.numpy().tobytes()
        assert torch.equal(found[i], tensor)
    assert counts["n_short"] > 0 and counts["n_passing"] > 0 and counts["n_failures"] == 0, counts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_no_failed_transfer_passes_for_a_good_one(tmp_path, seed, number):
    n_good = n_bad = 0
    with faults(seed=seed, failure_chance=20, failure_err=number, short_chance=50, reorders=True) as broken:
        handle = aio_handle(1 << 14, 8)
        for i in range(20):
            tensor = random_bytes(70_000 + i)
            try:
                assert handle.sync_pwrite(tensor, tmp_path / str(i)) == 1
            except AioError as error:
                assert (error.errno, error.filename, error.offset) == (number, str(tmp_path / str(i)), 0)
                n_bad += 1
            else:
                assert (tmp_path / str(i)).read_bytes() == tensor.numpy().tobytes()
                n_good += 1
        assert broken.counts()["n_failures"] >= n_bad
    assert n_good and n_bad, (n_good, n_bad)


def test_faults_begin_and_end_for_an_engine_in_use(tmp_path):
    tensor = random_bytes(4 << 14)
    with faults() as broken:
        handle = aio_handle(1 << 14, 8)
        handle.sync_pwrite(tensor, tmp_path / "data")
        broken.set(bad_begin=20_000, bad_end=20_001, bad_err=errno.EIO)
        with pytest.raises(AioError, match="Input/output error"):
            handle.sync_pread(torch.empty_like(tensor), tmp_path / "data")
        broken.set(full_at=30_000)
        with pytest.raises(AioError, match="No space left on device"):
            handle.sync_pwrite(tensor, tmp_path / "data")
        broken.set(seed=2, flip_chance=256)
        found = torch.empty_like(tensor)
        handle.sync_pread(found, tmp_path / "data")
        assert (found != tensor).sum() == broken.counts()["n_flipped"] == 4
        with pytest.raises(AioError, match="not those of the tensor"):
            handle.read(found, tmp_path / "data", True)
        broken.set()
        handle.sync_pread(found, tmp_path / "data")
        assert torch.equal(found, tensor)
        with pytest.raises(TypeError, match="shrt_chance"):
            broken.set(shrt_chance=1)
    handle.sync_pread(found.zero_(), tmp_path / "data")  # made before the failure, and still usable
    assert torch.equal(found, tensor)


def test_faults_are_reached_by_no_setting():
    with faults(is_auto=False):
        assert aio_handle().backend == USABLE[0]
        assert aio_handle(backend="fault").backend == "fault"
        with pytest.raises(ConfigError, match="backend"):
            load_config({"train_micro_batch_size_per_gpu": 1, "aio": {"backend": "fault"}}, world_size=1)
    assert "fault" not in [backend.name for backend in backends()]
    with pytest.raises(ValueError, match='no I/O backend "fault"'):
        aio_handle(backend="fault")
