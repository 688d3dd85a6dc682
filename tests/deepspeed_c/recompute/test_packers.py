"""recompute/packers.py: activations are cut over any number of ranks, put into one arena, and put into host memory."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_c import checkpointing
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.config.checkpoint import ActivationCheckpointing, ActivationOffload
from deepspeed_c.config.offload import Aio
from deepspeed_c.errors import RankMismatchError
from deepspeed_c.offload.swap import SwapSettings
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.recompute import packers
from deepspeed_c.recompute.configured import configured
from deepspeed_c.recompute.counters import LayerCalls
from deepspeed_c.recompute.packers import Arena, ShardPacker, StashPacker, _Kept, own_range
from deepspeed_c.recompute.recomputer import Recomputer
from deepspeed_c.recompute.stash import Stash, StashFile

WIDTH = 13


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    configured.clear()
    yield
    configured.clear()


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7, 8, 9, 101])
def test_ranges_cover_all_elements_once(numel: int, n_ranks: int) -> None:
    covered = []
    for rank in range(n_ranks):
        begin, n = own_range(numel, rank, n_ranks)
        assert 0 <= n <= -(-numel // n_ranks) and begin + n <= numel
        covered += range(begin, begin + n)
    assert covered == list(range(numel))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(7, 5, 3, generator=generator)
    special = base.clone()
    special[0, 0] = torch.tensor([float("nan"), float("inf"), -0.0])
    return {
        "plain": base,
        "transposed": base.permute(2, 0, 1),
        "channels last": torch.randn(2, 3, 5, 7, generator=generator).contiguous(memory_format=torch.channels_last),
        "sliced": base[1:, ::2],
        "expanded": base[:1].expand(4, 5, 3),
        "one": base[0, 0, :1],
        "scalar": base.sum(),
        "bf16": base.bfloat16(),
        "fp64": base.double(),
        "special": special,
        "as many as ranks": base.reshape(-1)[:3],
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))
    )


def round_trip_body(rank: int, world: int, has_arena: bool) -> list[tuple]:
    from deepspeed_c.comm.collectives import Collectives

    packer = ShardPacker(Collectives(), LayerCalls(), arena=Arena() if has_arena else None, stash=None)
    found = []
    for name, tensor in tensors().items():
        kept = packer.pack(tensor)
        if kept is None:
            found.append((name, None, None, None))
            continue
        again = packer.unpack(kept)
        found.append((name, same_bits(again, tensor), kept[0].flat.numel(), again.stride() == tensor.stride()))
    return found


@pytest.mark.parametrize("has_arena", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_cut_comes_back(run_ranks: Callable, world: int, has_arena: bool) -> None:
    given = tensors()
    results = run_ranks(world, round_trip_body, has_arena)
    for row in zip(*results):
        name = row[0][0]
        if given[name].numel() < world:
            assert all(each[1] is None for each in row), name
            continue
        assert all(each[1] and each[3] for each in row), row
        # One element is kept along an expanded dimension.
        kept = math.prod(n for n, stride in zip(given[name].shape, given[name].stride(), strict=True) if stride)
        assert sum(each[2] for each in row) == kept, (row, kept)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 31), nn.Linear(31, WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, bias: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.tanh(self.up(self.drop(x)))) + bias
        return y if mask is None else y.masked_fill(mask, 0.0)


def train(call: Callable, rows: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(1)
    layers = nn.ModuleList(Block() for _ in range(4))
    x, bias = torch.randn(rows, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
    y, mask = x * 1, torch.arange(WIDTH) % 5 == 0
    for i, layer in enumerate(layers):
        y = call(layer, y, mask if i % 2 else None, bias=bias)
    y.square().sum().backward()
    return [y.detach(), x.grad, bias.grad, *(p.grad for p in layers.parameters())]


def plain(layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    return layer(*args, **kwargs)


def ahead_body(rank: int, world: int, is_reentrant: bool) -> tuple[list[str], list[bool]]:
    """The events in order: a letter (g: gather, r: run) and the number of elements of the input, which differs for each
    layer."""
    checkpointing.configure(
        Mpu(), {"activation_checkpointing": {"use_reentrant": is_reentrant}}, partition_activations=True
    )
    events: list[str] = []

    class Noted(packers.Gather):
        def __init__(self, comm: Any, numel: int, *rest: Any) -> None:
            events.append(f"g{numel}")
            super().__init__(comm, numel, *rest)

    def layer(x: torch.Tensor) -> torch.Tensor:
        events.append(f"r{x.numel()}")
        return torch.tanh(x)[:-1]

    def loss_of(n: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, generator=torch.Generator().manual_seed(rows)).requires_grad_()
        y, other = x * 1, (x.detach() * 1).requires_grad_()
        z = other
        for _ in range(n):
            y, z = checkpointing.checkpoint(layer, y), torch.tanh(z)[:-1]
        want = torch.autograd.grad(z.sum(), other)[0]
        return y.sum(), x, want

    found = []
    original, packers.Gather = packers.Gather, Noted
    # Make ranks free dropped graphs at different times: the collector runs only by hand, on one rank in each step.
    gc.disable()
    try:
        for step in range(5):
            dropped: list = [loss_of(3, 50)[0]]
            dropped.append(dropped)  # a cycle, which only the collector frees
            del dropped
            loss, x, want = loss_of(2 if step == 3 else 4, 20)
            if rank == step % 2:
                gc.collect()
            del events[:]
            loss.backward()
            found.append(torch.equal(x.grad, want))
            if step == 2:
                seen = list(events)
    finally:
        packers.Gather = original
        gc.enable()
        configured.clear()
    return seen, found


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_inputs_are_gathered_one_layer_ahead(run_ranks: Callable, world: int, is_reentrant: bool) -> None:
    for seen, found in run_ranks(world, ahead_body, is_reentrant):
        assert all(found), found
        # The first gather starts alone, because nothing is known of this backward yet. Before the last run there is
        # nothing left to gather.
        assert seen == ["g17", "g18", "r17", "g19", "r18", "g20", "r19", "r20"], seen


class Mpu:
    def get_tensor_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank()


SETTINGS = {
    "cut": {"partition_activations": True},
    "one arena": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4},
    "on the host": {"partition_activations": True, "checkpoint_in_cpu": True},
    "waits": {"partition_activations": True, "synchronize": True},
    "in files": {"partition_activations": True},
}


def partitioned_body(rank: int, world: int, name: str, is_reentrant: bool, folder: str) -> list:
    section: dict[str, Any] = {"activation_checkpointing": {"use_reentrant": is_reentrant}}
    if name == "in files":
        section["activation_checkpointing"]["offload"] = {"device": "nvme", "nvme_path": folder}
        section["aio"] = {"checksum": True}
    checkpointing.configure(Mpu(), section, **SETTINGS[name])
    found = []
    for step in range(3):  # the first step plans the arena
        got, want = train(checkpointing.checkpoint), train(plain)
        found.append([torch.equal(a, b) for a, b in zip(got, want, strict=True)])
    arena, stash = configured.recomputer.arena, configured.recomputer.stash
    if name == "in files":
        # The parts of three layers and of the bias are written. Backward begins with the last layer, whose part never
        # leaves memory.
        found.append([stash.written_bytes > 0, stash.file_bytes == 0])
    configured.clear()
    return [found, None if arena is None else (arena.n_bytes, arena.used_bytes, arena.n_outside)]


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("world", [2, 3])
def test_partitioned_training_is_plain_training(
    run_ranks: Callable, world: int, name: str, is_reentrant: bool, tmp_path: Path
) -> None:
    for found, arena in run_ranks(world, partitioned_body, name, is_reentrant, str(tmp_path)):
        assert all(map(all, found)), found
        if name == "one arena":
            # The arena holds a rank's part of the input of each layer and, once, of the bias, each rounded up to 64
            # bytes. In the first step there is no arena.
            assert arena[0] > 0 and arena[1] == 0 and arena[2] == 5, arena


def kept_body(rank: int, world: int) -> tuple[int, int, int]:
    """The bytes of this rank's parts of the inputs that four layers keep, of the whole inputs, and of whole inputs that
    are still alive."""
    checkpointing.configure(Mpu(), partition_activations=True)
    torch.manual_seed(1)
    layers = nn.ModuleList(Block() for _ in range(4))
    y, bias, inputs, whole = torch.randn(67, WIDTH, requires_grad=True) * 1, torch.zeros(WIDTH), [], 0
    for layer in layers:
        inputs.append(weakref.ref(y.untyped_storage()))
        whole += y.nbytes
        y = checkpointing.checkpoint(layer, y, bias=bias)
    loss = y.sum()
    del y
    gc.collect()
    parts = sum(kept.flat.nbytes for kept in gc.get_objects() if type(kept) is _Kept and kept.numel > WIDTH)
    living = sum(ref() is not None for ref in inputs)
    loss.backward()
    configured.clear()
    return parts, whole, living


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_keeps_its_part_and_nothing_else(run_ranks: Callable, world: int) -> None:
    results = run_ranks(world, kept_body)
    parts, whole, living = zip(*results)
    assert sum(parts) == whole[0] == 4 * 67 * WIDTH * 4 and not any(living), results
    assert max(parts) <= whole[0] / world + 4 * 4 * world, parts


def resident_body(rank: int, world: int) -> tuple[int, int]:
    """The bytes that a step of 12 layers with inputs of 4 MiB adds at its peak: (live tensors, resident memory)."""
    torch.set_num_threads(1)
    checkpointing.configure(Mpu(), partition_activations=True)
    layers = [lambda x: (x * 0.5 + 1).tanh() * x for _ in range(12)]
    shift = torch.zeros(1 << 20, requires_grad=True)

    def step() -> None:
        y = torch.ones(1 << 20) + shift
        for layer in layers:
            y = checkpointing.checkpoint(layer, y)
        y.sum().backward()
        shift.grad = None

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) << 10

    step()
    live = LiveBytes()
    with live, live.phase("step"):
        step()
    gc.collect()
    get_accelerator().empty_cache()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    step()
    return live.peaks["step"], status("VmHWM") - before


def test_what_is_cut_is_no_longer_resident(run_ranks: Callable) -> None:
    for live, resident in run_ranks(2, resident_body):
        print(f"{live >> 20} MiB live, {resident >> 20} MiB resident at the peak")
        assert 40 << 20 < live < 60 << 20, live
        assert resident < 3.2 * live, (live >> 20, resident >> 20)


def way_body(rank: int, world: int) -> list[str]:
    """The way of parts between ranks: by default, and as a configuration says."""
    ways = []
    for config in (None, {"comm": {"local": "shm"}}, {"comm": {"local": "off"}}):
        checkpointing.configure(Mpu(), config, partition_activations=True)
        ways.append(configured.comm.transport_of(torch.zeros(1)).name)
    configured.clear()
    return ways


def test_parts_travel_through_shared_memory_unless_it_is_off(run_ranks: Callable) -> None:
    assert run_ranks(2, way_body) == [["shm", "shm", "gloo"]] * 2


def wrong_body(rank: int, world: int) -> str:
    checkpointing.configure(Mpu(), partition_activations=True)
    try:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        checkpointing.checkpoint(torch.tanh, x)
    except RankMismatchError as error:
        return str(error)
    finally:
        configured.clear()
    return ""


def test_ranks_with_different_inputs_are_an_error(run_ranks: Callable) -> None:
    for text in run_ranks(2, wrong_body):
        assert "shape (4, 4) has checksums" in text and "no_checkpointing" in text and "[0, 1]" in text


def marked_body(rank: int, world: int) -> bool:
    checkpointing.configure(Mpu(), partition_activations=True)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    x.no_checkpointing = True
    checkpointing.checkpoint(torch.tanh, x).sum().backward()
    configured.clear()
    other = x.detach().clone().requires_grad_()
    torch.tanh(other).sum().backward()
    return torch.equal(x.grad, other.grad)


def test_marked_tensors_stay_whole(run_ranks: Callable) -> None:
    assert all(run_ranks(2, marked_body))


def helpers_body(rank: int, world: int) -> list[bool]:
    checkpointing.configure(Mpu())
    x, order = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)), torch.arange(3)
    args, found = [x, order, None, x[0, 0]], []
    for on_host in (False, True):
        parts = checkpointing.partition_activations(args, on_host, False)
        begin, n = checkpointing.get_partition_start(x), checkpointing.get_partition_size(x)
        found.append(torch.equal(parts[0], x.reshape(-1)[begin : begin + n]) and parts[1] is order and parts[2] is None)
        pairs = checkpointing.get_partitioned_activations_for_backward(args, parts, False)
        whole = checkpointing.gather_partitioned_activations(pairs)
        found += [torch.equal(whole[0], x), whole[1] is order, whole[2] is None, torch.equal(whole[3], x[0, 0])]
        found.append(x.numel() == 35)
    configured.clear()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_deepspeeds_helpers(run_ranks: Callable, world: int) -> None:
    assert all(map(all, run_ranks(world, helpers_body)))


def test_the_arena_is_planned_by_the_first_step_and_never_overflows() -> None:
    arena = Arena()
    cpu, device = torch.float32, torch.device("cpu")

    def step(*sizes: int) -> list[int]:
        lent = [arena.take(n, cpu, device) for n in sizes]
        for i, t in enumerate(lent):
            t.fill_(i)
        assert all((t == i).all() for i, t in enumerate(lent)), "they overlap"
        storages = [t.untyped_storage().data_ptr() for t in lent]
        for _ in lent:
            arena.give_back(device)
        return storages

    assert len(set(step(10, 20, 1))) == 3 and arena.n_bytes == 64 + 128 + 64 and arena.used_bytes == 0
    assert len(set(step(10, 20, 1))) == 1 and arena.n_outside == 3
    assert len(set(step(10, 20, 1, 5))) == 2 and arena.n_outside == 4  # an evaluation with one layer more
    assert arena.n_bytes == 64 + 128 + 64 + 64
    assert len(set(step(10, 20, 1, 5))) == 1
    step()
    held = arena.take(3, cpu, device)
    arena.clear()
    assert arena.n_bytes == 320 and held.untyped_storage().nbytes() == 320
    arena.give_back(device)
    arena.clear()
    assert arena.n_bytes == 0


def test_two_forwards_in_flight_and_one_without_a_backward() -> None:
    mine = Recomputer(
        ActivationCheckpointing(partition_activations=True, contiguous_memory_optimization=True, number_checkpoints=2)
    )
    lin = nn.Linear(5, 5)

    def forward(seed: int) -> torch.Tensor:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        return mine.run(torch.tanh, (mine.run(lin, (x * 1,), {}),), {}).sum()

    def gradient(*losses: torch.Tensor) -> torch.Tensor:
        lin.zero_grad()
        for loss in losses:
            loss.backward()
        return lin.weight.grad.clone()

    alone = [gradient(forward(seed)) for seed in (1, 2)]
    first, second, dropped = forward(1), forward(2), forward(3)
    del dropped
    assert torch.equal(gradient(second), alone[1]) and torch.equal(gradient(first), alone[0])
    del first, second
    gc.collect()
    assert mine.arena.used_bytes == 0 and mine.arena.n_bytes > 0
    assert torch.equal(gradient(forward(1)), alone[0])


def test_a_tensor_that_many_layers_get_is_kept_once() -> None:
    packer = ShardPacker(None, LayerCalls(), arena=Arena(), stash=None)
    x = torch.randn(9)
    first = packer.pack(x)
    assert packer.pack(x)[0] is first[0]
    x.add_(1)
    assert packer.pack(x)[0] is not first[0]
    with pytest.raises(RuntimeError, match="at version 1; expected version 0"):
        packer.unpack(first)
    del first
    assert torch.equal(packer.unpack(packer.pack(x)), x)


def test_on_the_cpu_nothing_is_moved_and_the_log_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(packers.logger, "info", said.append)
    packer, x = StashPacker(Stash(LayerCalls(), None)), torch.randn(3)
    assert packer.pack(x) is None and packer.pack(x) is None
    assert len(said) == 1 and "nothing is moved" in said[0]


def _slices() -> dict[str, torch.Tensor]:
    whole = torch.randn(4, 7, 16)
    return {
        "dense": whole,
        "rows": whole[:, 1:],
        "columns": whole[..., 3:9],
        "steps": whole[::2, ::3, ::5],
        "transposed": whole.transpose(0, 2),
        "transposed slice": whole.transpose(0, 1)[2:5],
        "expanded": whole[:, :1].expand(4, 9, 16),
        "one number": torch.randn(1).expand(5, 16),
        "windows": whole.view(-1).unfold(0, 16, 3),
    }


@pytest.mark.parametrize("name", _slices())
@pytest.mark.parametrize("has_arena", [False, True])
def test_inputs_come_back_with_their_strides(name: str, has_arena: bool, tmp_path: Path) -> None:
    tensor, calls = _slices()[name], LayerCalls()
    arena = Arena() if has_arena else None
    file = StashFile(str(tmp_path), SwapSettings.of(Aio()))
    for packer in (ShardPacker(None, calls, arena=arena, stash=None), StashPacker(Stash(calls, file))):
        calls.begin("layer")
        packed = packer.pack(tensor)
        calls.begin("another")
        packer.pack(torch.ones(5))  # moves the first tensor out
        got = packer.unpack(packed)
        assert torch.equal(got, tensor) and got.stride() == tensor.stride(), (got.stride(), tensor.stride())
        kept = packed[0] if isinstance(packed, tuple) else packed
        n_elems = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        assert kept.numel <= n_elems, (kept.numel, n_elems)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("keeping", ["nvme", "contiguous"])
def test_layers_of_slices_train_as_plainly(keeping: str, is_reentrant: bool, tmp_path: Path) -> None:
    section = (
        ActivationCheckpointing(offload=ActivationOffload(device="nvme", nvme_path=str(tmp_path)))
        if keeping == "nvme"
        else ActivationCheckpointing(
            partition_activations=True, contiguous_memory_optimization=True, number_checkpoints=1
        )
    )
    torch.manual_seed(3)
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
    recomputer = Recomputer(section)
    for name in ("rows", "steps", "expanded", "dense"):
        found = []
        for is_plain in (True, False):
            x = _slices_of(name)
            y = layer(x) if is_plain else recomputer.run(layer, (x,), {}, is_reentrant=is_reentrant)
            y.square().sum().backward()
            found.append([x.grad, *[param.grad for param in layer.parameters()]])
            layer.zero_grad()
        for want, got in zip(*found, strict=True):
            assert torch.equal(got, want), (name, got, want)
    recomputer.close()


def _slices_of(name: str) -> torch.Tensor:
    torch.manual_seed(4)
    whole = torch.randn(4, 7, 16)
    cut = {"rows": whole[:, 1:], "steps": whole[::2, ::3], "expanded": whole[:, :1].expand(4, 9, 16), "dense": whole}
    return cut[name].requires_grad_()
