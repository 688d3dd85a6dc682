"""The swap file returns the bytes that were sent to it, for every order, size and backend, and under faults."""

from __future__ import annotations

import errno
import gc
import os
import random

import pytest
import torch

from deepspeed_c.errors import ConfigError, OffloadError
from deepspeed_c.offload.swap import PAGE_BYTES, SwapFile, Swapper, SwapSettings, reserve
from deepspeed_c.ops.aio import backends
from deepspeed_c.zero.states.home import Tagged
from tests.open_files import open_files

USABLE = [backend.name for backend in backends() if backend.is_usable]
SIZES = [1, 2, 1023, 1024, 1025, 4099, 65537]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


def make(folder, n_bytes: int = 0, **settings) -> Swapper:
    n_buffers = settings.pop("n_buffers", 4)
    settings = SwapSettings(block_size=4096, queue_depth=4, **settings)
    return Swapper(SwapFile(reserve(str(folder), n_bytes, "here"), settings, str(folder)), n_buffers=n_buffers)


def new_tensor(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, (n,), generator=generator).to(dtype)


def open_file(folder) -> int:
    """A second descriptor of the only file in ``folder``, which has no name."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return os.open(next(link for link in links if os.path.realpath(link).startswith(f"{folder}/")), os.O_RDWR)


def descriptors() -> int:
    return len(open_files())


@pytest.mark.limit(300, reason="many transfers: 32 s on a fast machine")
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("backend", USABLE)
def test_random_traffic(tmp_path, backend, checksum):
    """Groups are brought, changed, sent, only read, dropped and made anew in random order. A dict in memory has the
    expected contents."""
    rng = random.Random(7)
    before = descriptors()
    store = make(tmp_path, 1 << 20, backend=backend, checksum=checksum)
    groups: list[list[Tagged]] = []
    truth: dict[int, torch.Tensor] = {}
    for g in range(6):
        group = []
        for i in range(rng.randint(1, 3)):
            tensor = new_tensor(rng.choice(SIZES), rng.choice(DTYPES), 10 * g + i)
            truth[id(tensor)] = tensor.clone()
            group.append(Tagged(tensor, f"{g}.{i}"))
        groups.append(group)
        store.send(group)
    for round_ in range(60):
        g = rng.randrange(len(groups))
        group = groups[g]
        ahead = groups[rng.randrange(len(groups))]
        action = rng.choice(["change", "read", "drop"])
        store.bring(group)
        if rng.random() < 0.5:
            store.prefetch(ahead)
        for tagged in group:
            assert torch.equal(tagged.tensor, truth[id(tagged.tensor)]), f"round {round_}: {tagged.name}"
        if action == "change":
            for tagged in group:
                tagged.tensor.add_(1)
                truth[id(tagged.tensor)].add_(1)
        if action == "read":
            store.let_go(group)
        store.send(group)
        assert all(store.is_away(tagged.tensor) for tagged in group)
        if action == "drop":
            gone = group.pop()
            del truth[id(gone.tensor)]
            del gone, tagged
            gc.collect()
            fresh = new_tensor(rng.choice(SIZES), rng.choice(DTYPES), round_)
            truth[id(fresh)] = fresh.clone()
            group.append(Tagged(fresh, f"{g}.new{round_}"))
            store.send(group)
    store.wait()
    store.close()
    store.close()
    assert descriptors() == before, "a descriptor was left open"
    assert os.listdir(tmp_path) == []


def test_what_is_away_reads_nan_and_takes_no_memory(tmp_path):
    store = make(tmp_path)
    tensor = torch.ones(3, 5)
    store.send([Tagged(tensor, "t")])
    assert tensor.shape == (3, 5) and tensor.isnan().all() and tensor.untyped_storage().nbytes() == 4
    store.bring([Tagged(tensor, "t")])
    assert torch.equal(tensor, torch.ones(3, 5))
    store.close()


def test_buffers_are_used_again(tmp_path):
    """At most ``n_buffers`` groups have memory, however often groups come and go."""
    n = 10_000
    store = make(tmp_path, n_buffers=4)
    groups = [[Tagged(torch.full((n,), float(g)), f"{g}.{i}") for i in range(2)] for g in range(12)]
    for group in groups:
        store.send(group)
    for _ in range(5):
        for i, group in enumerate(groups):
            store.bring(group)
            store.prefetch(groups[(i + 1) % len(groups)])
            for tagged in group:
                tagged.tensor.add_(1)
            store.send(group)
    store.wait()
    size = -(-4 * n // PAGE_BYTES) * PAGE_BYTES
    assert store.buffer_bytes <= 4 * 2 * size, f"{store.buffer_bytes} bytes of buffers for groups of {2 * size}"
    for g, group in enumerate(groups):
        store.bring(group)
        assert all(t.tensor.eq(g + 5).all() for t in group)
    store.close()


def test_a_flipped_byte_names_the_tensor(tmp_path):
    store = make(tmp_path, checksum=True)
    tensors = [Tagged(torch.arange(3000.0) + i, f"exp_avg of layers.{i}.weight") for i in range(3)]
    store.send(tensors)
    store.wait()
    file = open_file(tmp_path)
    os.pwrite(file, b"\x55", PAGE_BYTES * 3 + 1234)  # within the second tensor
    os.close(file)
    with pytest.raises(
        OffloadError, match=r"exp_avg of layers\.1\.weight: its 12000 bytes at offset 12288 are not those"
    ) as caught:
        store.bring(tensors)
    assert str(tmp_path) in str(caught.value)
    store.bring(tensors[:1])
    assert torch.equal(tensors[0].tensor, torch.arange(3000.0))
    store.bring(tensors[2:])
    assert torch.equal(tensors[2].tensor, torch.arange(3000.0) + 2)
    store.close()


def test_a_file_that_was_made_shorter_is_an_error(tmp_path):
    store = make(tmp_path)
    tagged = Tagged(torch.arange(5000.0), "masters of x")
    store.send([tagged])
    store.wait()
    file = open_file(tmp_path)
    os.ftruncate(file, 8192)
    os.close(file)
    with pytest.raises(OffloadError, match="masters of x"):
        store.bring([tagged])
    store.close()


def test_no_descriptor_is_left_of_a_store_that_nobody_closes(tmp_path):
    before = descriptors()
    make(tmp_path).send([Tagged(torch.ones(5000), "masters of x")])
    with pytest.raises(ValueError):
        make(tmp_path, backend="no such one")
    gc.collect()
    assert descriptors() == before, f"{descriptors()} and {before} descriptors"


def test_what_could_not_be_written_is_still_in_memory(tmp_path, monkeypatch):
    store = make(tmp_path)
    tagged = Tagged(torch.arange(2000.0), "masters of x")
    wait = store._file.wait

    class Failing:
        def __init__(self, file):
            self.file, self.n = file, 0

        def __getattr__(self, name):
            return getattr(self.file, name)

        def wait(self, request):
            wait(request)
            self.n += 1
            if self.n == 1:
                raise OSError(errno.ENOSPC, "full")
            return 8000

    monkeypatch.setattr(store, "_file", Failing(store._file))
    store.send([tagged])
    with pytest.raises(OffloadError, match="masters of x could not be written"):
        store.wait()
    assert not store.is_away(tagged.tensor) and torch.equal(tagged.tensor, torch.arange(2000.0))
    store.send([tagged])
    store.wait()
    store.bring([tagged])
    assert torch.equal(tagged.tensor, torch.arange(2000.0))
    store.close()


def test_no_room_is_said_with_the_numbers(tmp_path):
    with pytest.raises(ConfigError, match=r"GiB\) cannot be reserved, [0-9]+ \([0-9.]+ GiB\) are free") as caught:
        reserve(str(tmp_path), 1 << 60, "offload_optimizer.nvme_path")
    assert "offload_optimizer.nvme_path" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_none(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ConfigError, match="cannot be used"):
        reserve(str(path), 10, "nvme_path")
