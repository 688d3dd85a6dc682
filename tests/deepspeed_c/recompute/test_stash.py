"""recompute/stash.py: a file keeps the inputs of layers between forward and backward. The device works or fails."""

from __future__ import annotations

import errno
import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.config.checkpoint import ActivationCheckpointing, ActivationOffload
from deepspeed_c.config.offload import Aio
from deepspeed_c.errors import AioError, ConfigError, DeepSpeedCError, OffloadError, RecomputeError
from deepspeed_c.offload.swap import SwapSettings
from deepspeed_c.recompute import stash as module
from deepspeed_c.recompute.counters import Counters, LayerCalls
from deepspeed_c.recompute.packers import StashPacker
from deepspeed_c.recompute.recomputer import Recomputer, _Keeping, bytes_of, check_section
from deepspeed_c.recompute.stash import Stash, StashFile, _Space
from tests.aio_faults import faults

WIDTH, ROWS, LAYERS = 13, 97, 6
INPUT_BYTES = 4 * WIDTH * ROWS
MASK_BYTES = 4 * ROWS
PAGES = 8192  # the bytes of whole pages that an input takes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 31), nn.Linear(31, WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.drop(x)))) * mask


def plain(layer: nn.Module, *args: Any) -> torch.Tensor:
    return layer(*args)


def forward(call: Callable, rows: int = ROWS, seed: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(seed)
    layers = nn.ModuleList(Block() for _ in range(LAYERS))
    x, mask = torch.randn(rows, WIDTH, requires_grad=True), torch.linspace(0, 1, rows).reshape(-1, 1)
    y = x * 1
    for layer in layers:
        y = call(layer, y, mask)
    return y.square().sum(), [x, *layers.parameters()]


def train(call: Callable, rows: int = ROWS, seed: int = 1) -> list[torch.Tensor]:
    loss, wanted = forward(call, rows, seed)
    loss.backward()
    return [loss.detach(), *(each.grad for each in wanted)]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def on_disk(folder: Path, max_in_cpu: int | str | None = None, aio: dict | None = None, **keys: Any) -> Recomputer:
    offload = ActivationOffload(device="nvme", nvme_path=str(folder), max_in_cpu=max_in_cpu)
    return Recomputer(ActivationCheckpointing(offload=offload, **keys), aio=Aio(**(aio or {})))


def through(recomputer: Recomputer) -> Callable:
    return lambda layer, *args: recomputer.run(layer, args, {}, label=f"layer {id(layer) % 7}")


def is_empty(recomputer: Recomputer) -> bool:
    gc.collect()
    stash = recomputer.stash
    while stash._busy or stash._left:
        stash._settle()
    return (stash.file_bytes, stash.in_cpu_bytes, stash._out) == (0, 0, [])


def test_space_against_a_list_of_bytes() -> None:
    generator, space, owner, taken, n_grown = random.Random(3), _Space(), [], {}, 0
    for step in range(3000):
        if taken and generator.random() < 0.5:
            offset, size = taken.popitem() if generator.random() < 0.5 else (0, 0)
            if not size:
                offset = generator.choice(list(taken))
                size = taken.pop(offset)
            owner[offset : offset + size] = [None] * size
            space.give(offset, size)
            continue
        size = generator.randrange(1, 9)
        offset = space.take(size)
        has_room = any(all(each is None for each in owner[i : i + size]) for i in range(len(owner) - size + 1))
        assert (offset is not None) == has_room, (step, size)
        if offset is None:
            missing = space.missing(size)
            assert 0 < missing <= size
            space.grow(missing)
            owner += [None] * missing
            n_grown += 1
            offset = space.take(size)
        assert owner[offset : offset + size] == [None] * size
        owner[offset : offset + size] = [step] * size
        taken[offset] = size
    assert n_grown and space.end == len(owner)
    for offset, size in taken.items():
        space.give(offset, size)
    assert space._free == [(0, space.end)]


@pytest.mark.always  # the one test that finds a wrong count of bytes that stay (scripts/mutations.py)
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("max_in_cpu", [None, 2 * INPUT_BYTES, "1GiB"])
def test_training_over_a_file_is_plain_training(tmp_path: Path, is_reentrant: bool, max_in_cpu: Any) -> None:
    mine = on_disk(tmp_path, max_in_cpu, {"checksum": True}, use_reentrant=is_reentrant)
    for step in range(3):
        assert same(train(through(mine), seed=step), train(plain, seed=step)), step
        assert is_empty(mine)
    stash = mine.stash
    # The input of the last layer never leaves memory. The mask moves along with the newest call, and is written once.
    n_out, n_masks = {None: (LAYERS - 1, 1), 2 * INPUT_BYTES: (LAYERS - 2, 0), "1GiB": (0, 0)}[max_in_cpu]
    assert stash.written_bytes == 3 * (n_out * INPUT_BYTES + n_masks * MASK_BYTES)
    assert stash.read_bytes == 3 * max(n_out - 1, 0) * INPUT_BYTES  # the input that was written last is still in memory
    assert stash.buffer_bytes <= (module.MAX_AHEAD + 2) * PAGES
    assert list(tmp_path.iterdir()) == []


def test_inputs_leave_memory(tmp_path: Path) -> None:
    mine = on_disk(tmp_path)
    loss, _ = forward(through(mine))
    assert mine.stash.file_bytes == (LAYERS - 1) * PAGES + 4096
    living = [each for each in gc.get_objects() if torch.is_tensor(each) and each.shape == (ROWS, WIDTH)]
    storages = {each.untyped_storage().data_ptr() for each in living}
    assert len(storages) <= 3, len(storages)  # the leaf, and the input and output of the last layer
    loss.backward()
    del loss, living
    assert is_empty(mine)


def test_sizes_that_change_and_two_that_share_a_folder(tmp_path: Path) -> None:
    first, second = on_disk(tmp_path), on_disk(tmp_path)
    for rows in (1, 3, 315, 7, 315, 1000, 2):
        want = train(plain, rows)
        assert same(train(through(first), rows), want) and same(train(through(second), rows), want), rows
    assert is_empty(first) and is_empty(second)
    assert first.stash.buffer_bytes <= (module.MAX_AHEAD + 3) * 52 * 1024


def test_two_forwards_in_flight_two_backwards_and_one_that_is_dropped(tmp_path: Path) -> None:
    mine = on_disk(tmp_path, aio={"checksum": True})
    want = [train(plain, seed=seed) for seed in (1, 2)]
    (a, of_a), (b, of_b), (c, _) = (forward(through(mine), seed=seed) for seed in (1, 2, 3))
    del c
    b.backward()
    a.backward(retain_graph=True)
    once = [each.grad.clone() for each in of_a]
    a.backward()
    assert same([b.detach(), *(each.grad for each in of_b)], want[1]) and same([a.detach(), *once], want[0])
    assert all(torch.equal(each.grad, 2 * first) for each, first in zip(of_a, once))
    del a, b
    assert is_empty(mine)


def test_an_exception_in_forward_or_backward_frees_everything(tmp_path: Path) -> None:
    mine, n_calls = on_disk(tmp_path), 0

    def failing_at(n: int) -> Callable:
        def call(layer: nn.Module, *args: Any) -> torch.Tensor:
            def body(*args: Any) -> torch.Tensor:
                nonlocal n_calls
                n_calls += 1
                if n_calls == n:
                    raise KeyError("by the test")
                return layer(*args)

            return mine.run(body, args, {})

        return call

    for n in (1, LAYERS, LAYERS + 1, 2 * LAYERS):
        n_calls = 0
        with pytest.raises(KeyError):
            train(failing_at(n))
        assert is_empty(mine), n
        assert same(train(through(mine)), train(plain)), n


def test_nested_layers_and_evaluation(tmp_path: Path) -> None:
    mine = on_disk(tmp_path)

    def nested(layer: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mine.run(layer.down, (layer.up(x),), {})
        torch.manual_seed(7)
        return mine.run(lambda x, m: mine.run(layer, (x, m), {}) * 2, (x, mask), {})

    def alone(layer: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return layer(x, mask) * 2

    assert same(train(nested), train(alone)) and mine.stash.written_bytes and is_empty(mine)


def test_what_many_layers_get_is_written_once(tmp_path: Path) -> None:
    mine, wide = on_disk(tmp_path), torch.randn(5, 5, requires_grad=True) * 1
    y = wide
    for i in range(6):
        y = mine.run(torch.mul, (y, wide), {}) if i % 3 == 0 else mine.run(torch.tanh, (y,), {})
    y.sum().backward()
    # Five calls write five inputs. One more is the shared input, which the fourth call gets again.
    assert mine.stash.written_bytes <= 6 * wide.nbytes


def test_a_tensor_that_is_overwritten_is_an_error(tmp_path: Path) -> None:
    for n_after in (0, 3):
        mine = on_disk(tmp_path)
        x = torch.randn(4, 5, requires_grad=True) * 1
        y = mine.run(torch.tanh, (x,), {}, label="the layer")
        for _ in range(n_after):
            y = mine.run(torch.tanh, (y,), {})
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RecomputeError, match="the layer.*\n?.*version 1"):
            y.sum().backward()


@pytest.fixture
def broken() -> Iterator[Any]:
    with faults(seed=11) as plan:
        yield plan


def failure(mine: Recomputer) -> str:
    with pytest.raises(OffloadError) as caught:
        train(through(mine))
    text = str(caught.value)
    assert "the inputs of layer " in text and "nvme_path" in text and "Fix: " in text, text
    return text


def mends(mine: Recomputer, plan: Any) -> None:
    plan.set()
    assert is_empty(mine)
    assert same(train(through(mine)), train(plain)) and is_empty(mine)


@pytest.mark.parametrize(
    ("plan", "words"),
    [({"bad_begin": 0, "bad_end": 1 << 40}, os.strerror(errno.EIO)), ({"full_at": PAGES}, os.strerror(errno.ENOSPC))],
    ids=["EIO", "ENOSPC"],
)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_write_that_fails(tmp_path: Path, broken: Any, plan: dict, words: str, is_reentrant: bool) -> None:
    mine = on_disk(tmp_path, use_reentrant=is_reentrant)
    broken.set(seed=11, **plan)
    text = failure(mine)
    assert "could not be written" in text and words in text, text
    mends(mine, broken)


@pytest.mark.parametrize(
    ("plan", "words"),
    [({"bad_begin": 0, "bad_end": 1 << 40}, os.strerror(errno.EIO)), ({"flip_chance": 256}, "had 0x")],
    ids=["EIO", "flipped"],
)
def test_a_read_that_fails(tmp_path: Path, broken: Any, plan: dict, words: str) -> None:
    mine = on_disk(tmp_path, aio={"checksum": True})
    loss, wanted = forward(through(mine))
    mine.stash._finish_leaving()
    broken.set(seed=11, **plan)
    with pytest.raises(OffloadError) as caught:
        for _ in range(50):  # repeat, because a flipped bit may lie in the padding of a page
            loss.backward(retain_graph=True)
    text = str(caught.value)
    assert "the inputs of layer " in text and "could not be read" in text and words in text, text
    del loss, wanted, caught
    mends(mine, broken)


def test_short_late_and_slow_transfers_change_nothing(tmp_path: Path, broken: Any) -> None:
    mine = on_disk(tmp_path, aio={"checksum": True})
    broken.set(seed=5, short_chance=60, passing_chance=60, late_chance=200, reorders=True, delay_us=300)
    for step in range(3):
        assert same(train(through(mine), seed=step), train(plain, seed=step)), step
    assert broken.counts()["n_short"] > 0 and is_empty(mine)
    assert 1 < mine.stash._n_ahead <= module.MAX_AHEAD  # backward had to wait


def test_what_a_budget_asks_a_disk(tmp_path: Path, broken: Any) -> None:
    mine = on_disk(tmp_path)
    way_ns, thread_ns = mine.stash.probe(3 * INPUT_BYTES, torch.device("cpu"))
    assert way_ns > 0 and thread_ns > 0 and is_empty(mine)
    for plan in ({"bad_begin": 0, "bad_end": 1 << 40}, {"full_at": PAGES}):
        broken.set(seed=11, **plan)
        with pytest.raises(OffloadError, match=f"{3 * INPUT_BYTES} bytes could not be written and read"):
            mine.stash.probe(3 * INPUT_BYTES, torch.device("cpu"))
        mends(mine, broken)


def with_room(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_bavail=n_bytes, f_frsize=1))


def test_a_device_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, 1000)
    with pytest.raises(ConfigError, match=r"67108864 bytes .* 1000 .*are free"):
        on_disk(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="cannot be used"):
        (tmp_path / "file").write_text("")
        on_disk(tmp_path / "file")
    monkeypatch.setattr(module, "_FIRST_BYTES", 2 * PAGES)
    mine = on_disk(tmp_path)
    with_room(monkeypatch, 1000)
    with pytest.raises(OffloadError, match=rf"no room for the inputs of layer \d \({INPUT_BYTES} bytes\).* 1000 "):
        train(through(mine))
    with_room(monkeypatch, PAGES)  # too little for the usual growth of the file
    with pytest.raises(OffloadError):
        with_room(monkeypatch, PAGES - 1)
        train(through(mine))
    monkeypatch.undo()
    assert is_empty(mine) and same(train(through(mine)), train(plain)) and is_empty(mine)


class PretendedCopies:
    """Copies of an accelerator that uses host memory. Data arrive only when the caller waits for the copy."""

    def __init__(self, device: torch.device) -> None:
        self.n_down = self.n_up = 0

    def down(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        self.n_down += 1
        values = source.clone()
        target.fill_(77)
        return SimpleNamespace(synchronize=lambda: target.copy_(values))

    def up(self, source: torch.Tensor) -> Any:
        self.n_up += 1
        return torch.full_like(source, 55), source.clone()

    def arrive(self, coming: Any) -> torch.Tensor:
        return coming[0].copy_(coming[1])


@pytest.mark.parametrize(("has_file", "max_in_cpu"), [(False, 0), (True, 0), (True, 2 * INPUT_BYTES)])
def test_copies_of_an_accelerator(tmp_path: Path, has_file: bool, max_in_cpu: int) -> None:
    mine, made = Recomputer(ActivationCheckpointing()), []

    def copies_of(device: torch.device) -> PretendedCopies:
        made.append(PretendedCopies(device))
        return made[-1]

    file = StashFile(str(tmp_path), SwapSettings(checksum=True)) if has_file else None
    mine.stash = Stash(mine._calls, file, max_in_cpu, copies_of=copies_of)
    mine._keeping = _Keeping([StashPacker(mine.stash)])
    for step in range(3):
        assert same(train(through(mine), seed=step), train(plain, seed=step)), step
        assert is_empty(mine)
    assert (made[0].n_down, made[0].n_up) == (3 * LAYERS, 3 * (LAYERS - 1))  # the mask also stays on the device
    n_in_file = {(False, 0): 0, (True, 0): LAYERS - 1}.get((has_file, max_in_cpu), LAYERS - 2)
    n_masks = int(has_file and not max_in_cpu)
    assert mine.stash.written_bytes == 3 * (n_in_file * INPUT_BYTES + n_masks * MASK_BYTES)
    loss, wanted = forward(through(mine))
    loss.backward(retain_graph=True)
    first = [each.grad.clone() for each in wanted]
    loss.backward()
    assert all(torch.equal(each.grad, 2 * grad) for each, grad in zip(wanted, first))


def test_close_leaves_what_waits(tmp_path: Path) -> None:
    mine = on_disk(tmp_path)
    loss, wanted = forward(through(mine))
    mine.close()
    loss.backward()
    assert same([loss.detach(), *(each.grad for each in wanted)], train(plain))
    del loss, wanted
    gc.collect()
    mine.close()
    assert mine.stash._file is None


def test_what_the_section_says(tmp_path: Path) -> None:
    assert [bytes_of(given) for given in (None, 0, 7, "8GiB")] == [0, 0, 7, 8 << 30]
    for bad in (-1, "many"):
        with pytest.raises(ConfigError, match="max_in_cpu"):
            bytes_of(bad)
    both = ActivationCheckpointing(
        partition_activations=True,
        contiguous_memory_optimization=True,
        number_checkpoints=3,
        offload=ActivationOffload(device="nvme", nvme_path=str(tmp_path)),
    )
    with pytest.raises(ConfigError, match="one piece of memory"):
        check_section(both, None, "here")


def test_figures_of_what_moves(tmp_path: Path) -> None:
    mine = on_disk(tmp_path, profile=True)
    train(lambda layer, *args: mine.run(layer, args, {}, label="all"))
    figures = mine.counters.of("all")
    assert figures.n == LAYERS and figures.bytes_moved == (LAYERS - 1) * INPUT_BYTES + MASK_BYTES
    assert figures.bytes_kept == INPUT_BYTES + (LAYERS - 1) * MASK_BYTES
    assert min(figures.forward_ns, figures.recompute_ns, figures.copy_ns, figures.wait_ns) > 0
    assert mine.counters.as_dict()["all"]["n"] == LAYERS


def test_calls_are_of_their_thread_and_errors_of_our_own() -> None:
    calls = LayerCalls()
    assert (calls.number, calls.label) == (0, "")
    calls.begin("a")
    calls.begin("b")
    assert (calls.number, calls.label) == (2, "b")
    assert issubclass(OffloadError, DeepSpeedCError)
    assert Counters().as_dict() == {}


def test_a_full_device_frees_its_forward_without_a_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, n_bytes: int, folder: str) -> None:
        raise AioError("full", errno=errno.ENOSPC)

    monkeypatch.setattr(module, "reserve_space", full)
    recomputer = Recomputer(ActivationCheckpointing(offload=ActivationOffload(device="nvme", nvme_path=str(tmp_path))))
    layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def step(n_rows: int) -> None:
        y = torch.ones(n_rows, 1024, requires_grad=True)  # 24 MiB for 6144 rows: two inputs fit, three do not
        for layer in layers:
            y = recomputer.run(layer, (y,), {})
        y.sum().backward()

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OffloadError, match="no room") as caught:
            step(6144)
        assert isinstance(caught.value.__cause__, AioError)
        del caught
        assert recomputer.stash.file_bytes == 0, recomputer.stash.file_bytes
        step(64)
    finally:
        gc.enable()
    recomputer.close()
