"""States that are moved out and back keep their bits, and the engine refuses to run while they are away."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from deepspeed_c.engine import offload
from deepspeed_c.engine.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed_c.errors import ConfigError, OffloadError, StateError
from tests.aio_faults import faults
from tests.deepspeed_c.offload.test_swap import open_file
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import TRAITS, batch, make_model
from tests.ranks import run_ranks
from tests.training import engine_of, update, whole_weights

PIECE_BYTES = offload.PIECE_BYTES


def make(stage: int, dtype: str, folder: str = "", **more):
    zero = {"reduce_bucket_size": 60}
    if folder:
        zero["offload_optimizer"] = {"nvme_path": folder}
    return engine_of(make_model(TRAITS["plain"]), make_config(stage, dtype, 1, {"zero_optimization": zero, **more}))


def train(engine, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step, 0, rank, 0)
        losses.append(update(engine, engine(x.to(engine._precision.dtype or x.dtype), y)))
    return losses


def storages(engine, kind: OffloadStateTypeEnum, device: str = "nvme") -> int:
    found = [tagged.tensor.untyped_storage() for tagged in engine._offloaded._tensors(kind, device)]
    return sum({storage._cdata: has_memory(storage) for storage in found}.values())


def has_memory(storage) -> int:
    """The bytes of the storage that are in memory; 0 if its memory is released. The system tells for shared memory."""
    n_bytes = storage.nbytes()
    if storage.resizable() or n_bytes == 0:
        return n_bytes
    pages = (ctypes.c_ubyte * -(-n_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(n_bytes), pages) == 0
    return n_bytes if any(page & 1 for page in pages) else 0


def all_storages(engine) -> dict[OffloadStateTypeEnum, int]:
    return {kind: storages(engine, kind) for kind in OffloadStateTypeEnum}


def files_in(folder: str) -> list[str]:
    """The files in ``folder`` that this process has open, unlinked files too."""
    links = [os.path.realpath(os.path.join("/proc/self/fd", name)) for name in os.listdir("/proc/self/fd")]
    return [link for link in links if link.startswith(f"{folder}/")]


def failure(call: Callable[[], None], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def body(rank: int, world: int, stage: int, dtype: str, folder: str) -> None:
    runs = []
    offload.PIECE_BYTES = 100  # several pieces, the last one short
    try:
        for place in (None, OffloadDeviceEnum.cpu, OffloadDeviceEnum.nvme):
            with make(stage, dtype, folder, aio={"checksum": stage % 2 == 0}) as engine:
                losses = train(engine, rank, range(2))
                if place is not None:
                    out_and_back(engine, rank, place, folder)
                losses += train(engine, rank, range(2, 4))
                if place is not None:
                    with pytest.raises(ConfigError, match="'moon' is no place"):
                        engine.offload_states(device="moon")
                    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=place)
                    engine.reload_states(non_blocking=True)
                runs.append((losses, whole_weights(engine.module)))
    finally:
        offload.PIECE_BYTES = PIECE_BYTES
    for losses, params in runs[1:]:
        assert losses == runs[0][0], f"{losses} != {runs[0][0]}"
        for name, a in params.items():
            assert torch.equal(a, runs[0][1][name]), f"{name}: {a} != {runs[0][1][name]}"


def out_and_back(engine, rank: int, place: OffloadDeviceEnum, folder: str) -> None:
    sizes = all_storages(engine)
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states, "hp_params"], device=place, pin_memory=False)
    assert storages(engine, OffloadStateTypeEnum.optim_states) == 0
    assert storages(engine, OffloadStateTypeEnum.hp_params) == 0
    assert storages(engine, OffloadStateTypeEnum.lp_grads) == sizes[OffloadStateTypeEnum.lp_grads]
    engine.offload_states(device=place)  # moves the rest; states that are away stay away
    engine.offload_states(device=place)  # nothing is left to move
    assert all_storages(engine) == dict.fromkeys(OffloadStateTypeEnum, 0)
    for call in (
        *(lambda: engine(*batch(0, 0, rank, 0)), engine.step, lambda: engine.save_checkpoint(f"{folder}/checkpoint")),
        *(lambda: engine.save_16bit_model(folder), lambda: engine.save_model(folder), engine.optimizer.state_dict),
    ):
        assert "have been offloaded" in failure(call, StateError)
    # Each of the two calls that moved something holds two descriptors: one goes through the page cache, one past it.
    is_filed = place is OffloadDeviceEnum.nvme
    assert bool(files_in(folder)) == is_filed, files_in(folder)
    assert os.listdir(folder) == [], "the file has a name"
    engine.reload_states()
    assert all_storages(engine) == sizes
    engine.reload_states()  # nothing to bring back
    assert files_in(folder) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world, stage", [(1, 1), (2, 0), (2, 2), (2, 3)])
def test_out_and_back(world: int, stage: int, dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world, body, stage, dtype, folder)


# Place of states -> (offload_optimizer, whether device and host memory differ, destination -> the label of the homes
# whose tensors move there).
HOMES = {
    "all in a file": ({"device": "nvme"}, False, {"cpu": "none", "nvme": "none"}),
    "some in a file": ({"device": "nvme", "ratio": 0.5}, False, {"cpu": "device", "nvme": "device"}),
    "some in a file, apart": ({"device": "nvme", "ratio": 0.5}, True, {"cpu": "device", "nvme": "device"}),
    "in host memory": ({"device": "cpu"}, True, {"cpu": "none", "nvme": "host"}),
    "some in host memory": ({"device": "cpu", "ratio": 0.5}, True, {"cpu": "device", "nvme": "both"}),
}


def homes_body(rank: int, world: int, stage: int, name: str, folder: str) -> None:
    states, is_apart, moves = HOMES[name]
    zero = {"reduce_bucket_size": 60, "offload_optimizer": {"nvme_path": folder, **states}}
    config = {"zero_optimization": zero}
    runs = []
    with mock.patch("deepspeed_c.offload.place.is_apart", lambda device: is_apart):
        for device in (None, "cpu", "nvme"):
            with engine_of(make_model(TRAITS["plain"]), make_config(stage, "bf16", 1, config)) as engine:
                losses = train(engine, rank, range(2))
                if device is not None:
                    units = engine._layout.trained
                    moving = [unit for unit in units if moves[device] in (unit.states.label, "both")]
                    assert bool(moving) == (moves[device] != "none"), [unit.states.label for unit in units]
                    # Each element of this rank has two moments of Adam and a master, of four bytes each.
                    n_masters = sum(4 * unit.shard_elems for unit in moving)
                    for kind, n_bytes in (("optim_states", 2 * n_masters), ("hp_params", n_masters)):
                        assert storages(engine, OffloadStateTypeEnum(kind), device) == n_bytes, kind
                    engine.offload_states(include=["optim_states", "hp_params"], device=device)
                    for unit in units:
                        for bucket in range(unit.n_buckets):
                            stays = unit not in moving
                            in_memory = unit.states.in_memory(bucket)
                            # A bucket in a file has no tensors in memory; any other bucket has masters and two moments.
                            assert len(in_memory) == (0 if unit.states.label == "file" else 3), in_memory
                            for tagged in in_memory:
                                nbytes = tagged.tensor.untyped_storage().nbytes()
                                assert (nbytes > 0) == (stays and tagged.tensor.numel() > 0), tagged.name
                    assert "have been offloaded" in failure(lambda: engine(*batch(0, 0, rank, 0)), StateError)
                    engine.reload_states()
                losses += train(engine, rank, range(2, 4))
                runs.append((losses, whole_weights(engine.module)))
    for losses, params in runs[1:]:
        assert losses == runs[0][0], f"{losses} != {runs[0][0]}"
        for param, value in params.items():
            assert torch.equal(value, runs[0][1][param]), f"{param}: {value} != {runs[0][1][param]}"


@pytest.mark.parametrize("name", HOMES)
@pytest.mark.parametrize("world, stage", [(1, 3), (2, 1)])
def test_each_home_moves_what_it_has_in_memory(world: int, stage: int, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world, homes_body, stage, name, folder)


def weights_body(rank: int, world: int, folder: str) -> None:
    """Weights lie in a file, except the first elements of the model, which stay in memory."""
    zero = {"reduce_bucket_size": 60, "offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 60}}
    runs = []
    for device in (None, "cpu", "nvme"):
        with engine_of(make_model(TRAITS["plain"]), make_config(3, "bf16", 1, {"zero_optimization": zero})) as engine:
            losses = train(engine, rank, range(2))
            if device is not None:
                units = [unit for unit in engine._layout.trained if unit.weights.label == "file"]
                kept = [(u, b) for u in units for b in range(u.n_buckets) if not u.weights.needs_open(b)]
                assert 0 < len(kept) < sum(unit.n_buckets for unit in units)
                n_bytes = sum(2 * unit.slice_elems[bucket] for unit, bucket in kept)
                assert storages(engine, OffloadStateTypeEnum.lp_params, device) == n_bytes
                engine.offload_states(include=["lp_params"], device=device)
                assert storages(engine, OffloadStateTypeEnum.lp_params, device) == 0
                engine.reload_states()
            losses += train(engine, rank, range(2, 4))
            runs.append((losses, whole_weights(engine.module)))
    for losses, params in runs[1:]:
        assert losses == runs[0][0], f"{losses} != {runs[0][0]}"
        for name, value in params.items():
            assert torch.equal(value, runs[0][1][name]), f"{name}: {value} != {runs[0][1][name]}"


def test_weights_that_a_file_leaves_in_memory_move() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, weights_body, folder)


def close_body(rank: int, world: int, folder: str) -> None:
    for place in ("cpu", "nvme"):
        engine = make(3, "bf16", folder)
        train(engine, rank, range(1))
        before = whole_weights(engine.module)
        engine.offload_states(device=place)
        module = engine.module
        engine.close()
        assert files_in(folder) == []
        for name, value in whole_weights(module).items():
            assert torch.equal(value, before[name]), f"{place}: {name}: {value} != {before[name]}"


def test_closed_while_states_are_away() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, close_body, folder)


def refusals(rank: int, world: int, folder: str) -> None:
    with make(2, "bf16") as engine, pytest.raises(ConfigError, match="names no folder on NVMe"):
        engine.offload_states(device="nvme")
    # One rank has no room: all ranks refuse to move, and go on.
    with make(2, "bf16", folder) as engine:
        want = train(engine, rank, range(4))
    with make(2, "bf16", folder) as engine:
        losses = train(engine, rank, range(2))
        whole_pages = offload.whole_pages
        if rank == 1:
            offload.whole_pages = lambda n_bytes: 1 << 55
        try:
            said = failure(lambda: engine.offload_states(device="nvme"), ConfigError)
        finally:
            offload.whole_pages = whole_pages
        assert "bytes (" in said and "cannot be reserved" in said and "are free" in said, said
        assert ("rank 1 on" in said) == (rank == 0), said
        shutil.rmtree(folder) if rank == 0 else None
        engine._comm.barrier()
        with open(folder, "w") if rank == 0 else open(os.devnull):
            engine._comm.barrier()
        assert "cannot be used" in failure(lambda: engine.offload_states(device="nvme"), ConfigError)
        engine._comm.barrier()
        if rank == 0:
            os.remove(folder)
            os.mkdir(folder)
        engine._comm.barrier()
        assert not engine._offloaded.kinds and files_in(folder) == []
        assert losses + train(engine, rank, range(2, 4)) == want


def test_without_a_folder_or_room() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, refusals, os.path.join(folder, "nvme"))


EVERYTHING = {"bad_begin": 0, "bad_end": 1 << 40}


def reload_fails(engine, rank: int, why: str) -> None:
    said = failure(engine.reload_states, OffloadError)
    assert why in said, said
    assert "call reload_states() again" in said if rank == 0 else "rank 0 on" in said, said


def failing(rank: int, world: int, folder: str) -> None:
    offload.PIECE_BYTES = 100
    try:
        with faults(seed=rank) as broken:
            with make(3, "bf16", folder) as engine:
                want = train(engine, rank, range(6))
            with make(3, "bf16", folder, aio={"checksum": True}) as engine:
                losses = train(engine, rank, range(2))
                sizes = all_storages(engine)
                # Rank 1 cannot write a part: nothing moves on any rank.
                broken.set(**({"full_at": 3 * 4096} if rank == 1 else {}))
                said = failure(lambda: engine.offload_states(device="nvme"), OffloadError)
                assert "could not be written" in said or "failed" in said, said
                assert all_storages(engine) == sizes and not engine._offloaded.kinds and files_in(folder) == []
                broken.set()
                losses += train(engine, rank, range(2, 4))

                # Rank 0 first cannot read, and then reads corrupted bytes. All ranks get the error, and the states
                # stay in the file.
                engine.offload_states(device="nvme")
                broken.set(**(EVERYTHING if rank == 0 else {}))
                reload_fails(engine, rank, "failed")
                broken.set()
                file = open_file(folder)
                byte = os.pread(file, 1, 10)
                os.pwrite(file, bytes([byte[0] ^ (rank == 0)]), 10)
                reload_fails(engine, rank, "are not those that were written")
                os.pwrite(file, byte, 10)
                os.close(file)
                broken.set(short_chance=500, reorders=True)
                engine.reload_states()
                assert all_storages(engine) == sizes and files_in(folder) == []
                broken.set()
                losses += train(engine, rank, range(4, 6))
                assert losses == want, f"{losses} != {want}"

                # The engine is closed while its device fails: this raises, weights read NaN, and no file stays open.
                engine.offload_states(device="nvme")
                module = engine.module
                broken.set(**EVERYTHING)
                assert "failed" in failure(engine.destroy, Exception)
                assert files_in(folder) == []
                weights = whole_weights(module)
                assert any(value.isnan().all() for value in weights.values()), weights
    finally:
        offload.PIECE_BYTES = PIECE_BYTES


def test_a_device_that_fails() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, failing, folder)
