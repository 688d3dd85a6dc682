"""Weights on NVMe and in host memory (stage 3). Evaluation and training read them in time, and every way to edit
weights reaches them there."""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import AioError, ConfigError, OffloadError
from deepspeed_c.offload import place
from deepspeed_c.offload.swap import Swapper
from deepspeed_c.utils import safe_get_full_fp32_param
from tests.aio_faults import faults
from tests.ranks import run_ranks

WIDTHS = (7, 13, 11, 5, 3)
NVME = {"device": "nvme", "max_in_cpu": 0, "buffer_count": 4}


def build(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(m for a, b in pairwise(WIDTHS) for m in (nn.Linear(a, b), nn.Tanh())))


def make(folder: str, model: nn.Module, params: dict | None, *, trains: bool, states: dict | None = None, **more):
    zero = {
        "stage": 3, "reduce_bucket_size": 100, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }  # fmt: skip
    if params:
        zero["offload_param"] = {"nvme_path": folder, **params}
    if states:
        zero["offload_optimizer"] = {"nvme_path": folder, **states}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **more}
    if trains:
        config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "bf16": {"enabled": True}}
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # as engines with offloaded states do
    return deepspeed_c.initialize(model=model, config=config)[0]


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, WIDTHS[0], generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(inputs(rank, step).bfloat16()).float().square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def masters(engine) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


def n_in_memory(engine) -> int:
    """The number of elements of weight shards that take memory. A shard that is away is one element with stride 0."""
    units = (*engine._layout.trained, *engine._layout.frozen)
    return sum(t.numel() for unit in units for t in unit.weight_slices if t.stride(0) or t.numel() < 2)


def forward_alone(rank: int, world: int, folder: str) -> None:
    want = build()(inputs(rank, 0))
    cells = [(NVME, False), ({"device": "cpu"}, True), ({**NVME, "buffer_count": 2}, True)]
    for params, is_apart in cells:
        with mock.patch.object(place, "is_apart", lambda device: is_apart):  # noqa: B023
            engine = make(folder, build(), params, trains=False)
        for _ in range(3):
            got = engine(inputs(rank, 0))
            assert torch.equal(got, want), (params, got, want)
        if params["device"] == "nvme":
            assert n_in_memory(engine) == 0, n_in_memory(engine)
        state = engine._zero3_consolidated_16bit_state_dict()
        if rank == 0:
            for name, tensor in build().state_dict().items():
                assert torch.equal(state[name], tensor), name
        module = engine.module
        engine.close()
        # The module outlives its engine and the file.
        with deepspeed_c.zero.GatheredParameters(module.parameters()):
            assert torch.equal(module(inputs(rank, 0)), want)


@pytest.mark.parametrize("world", [1, 2])
def test_forward_without_training(world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world, forward_alone, folder)
        assert list(Path(folder).iterdir()) == []  # files have no names, so a crash leaves nothing


def read_ahead(rank: int, world: int, folder: str) -> None:
    engine = make(folder, build(), NVME, trains=True)
    train(engine, rank, range(3))
    log: list[tuple[str, str, bool]] = []
    bring, prefetch = Swapper.bring, Swapper.prefetch

    def spy_bring(self, tensors, *, reads=True):
        for t in tensors:
            if reads and self.is_away(t.tensor):
                log.append(("use", t.name, self._extents[id(t.tensor)].read is not None))
        with mock.patch.object(Swapper, "prefetch", prefetch):
            bring(self, tensors, reads=reads)

    def spy_prefetch(self, tensors):
        tensors = list(tensors)
        log.extend(("ahead", t.name, True) for t in tensors)
        prefetch(self, tensors)

    with mock.patch.object(Swapper, "bring", spy_bring), mock.patch.object(Swapper, "prefetch", spy_prefetch):
        train(engine, rank, range(3, 4))
    uses = [(name, was_on_its_way) for kind, name, was_on_its_way in log if kind == "use"]
    # Forward and backward use one layer at a time. The last layer of forward, which is the first of backward, is also
    # gathered twice.
    assert len(uses) == 2 * (len(WIDTHS) - 1), log
    assert all(was_on_its_way for _, was_on_its_way in uses), log
    # While one layer is gathered the next one is already on its way.
    at = {(kind, name): i for i, (kind, name, _) in reversed(list(enumerate(log)))}
    first, second = uses[0][0], uses[1][0]
    assert at["ahead", second] < at["use", first], log
    engine.close()


@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_read_before_they_are_due(world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world, read_ahead, folder)


def edited(rank: int, world: int, folder: str, params: dict | None, states: dict | None) -> dict[str, torch.Tensor]:
    engine = make(folder, build(), params, trains=True, states=states)
    train(engine, rank, range(2))
    weight = engine.module[2].weight
    with deepspeed_c.zero.GatheredParameters(weight, modifier_rank=0):
        if rank == 0:
            weight.data.fill_(0.25)
    state = {k: v.to(torch.bfloat16) for k, v in build(seed=7).state_dict().items() if k.startswith("0.")}
    engine.load_module_state_dict(state, strict=False)
    losses = train(engine, rank, range(2, 4))
    engine.set_trainable(["2.*", "6.*"])
    losses += train(engine, rank, range(4, 6))
    engine.set_trainable(["*"])
    losses += train(engine, rank, range(6, 8))
    found = {**masters(engine), "losses": torch.tensor(losses)}
    engine.save_checkpoint(f"{folder}/ckpt{rank if world == 1 else ''}", tag="x")
    engine.close()
    return found


def resumed(rank: int, world: int, folder: str, params: dict | None, states: dict | None) -> dict[str, torch.Tensor]:
    engine = make(folder, build(5), params, trains=True, states=states)
    engine.load_checkpoint(f"{folder}/ckpt")
    found = {**masters(engine), "losses": torch.tensor(train(engine, rank, range(8, 10)))}
    engine.close()
    return found


def test_edits_and_checkpoints_are_those_of_weights_in_memory() -> None:
    both = (NVME, {"device": "nvme", "pipeline_read": True, "pipeline_write": True})
    with tempfile.TemporaryDirectory() as folder:
        want = run_ranks(2, edited, folder, None, None)
        got = run_ranks(2, edited, f"{folder}/b", *both)
        for a, b in zip(got, want):
            for key, value in a.items():
                assert torch.equal(value, b[key]), (key, value, b[key])
        # A checkpoint written with offload is loaded without, and the reverse.
        cases = [(folder, both), (f"{folder}/b", (None, None)), (folder, (None, None)), (f"{folder}/b", (NVME, None))]
        found = []
        for source, kinds in cases:
            found.append(run_ranks(2, resumed, source, *kinds))
        for other in found[1:]:
            for a, b in zip(other, found[0]):
                for key, value in a.items():
                    assert torch.equal(value, b[key]), (key, value, b[key])


def kept(rank: int, world: int, folder: str) -> None:
    n_params = sum(p.numel() for p in build().parameters())
    for limit in (0, 100, 10**9):
        engine = make(folder, build(), {**NVME, "max_in_cpu": limit}, trains=True)
        groups = engine._fetcher.groups
        away = [group.unit.weights.needs_open(group.bucket) for group in groups]
        n_kept = n_in_memory(engine)
        assert away == sorted(away), away  # the first weights stay in memory
        assert n_kept <= limit and (all(away), any(away)) == (limit == 0, limit < n_params), (limit, n_kept, away)
        if limit == 100:
            first_away = groups[away.index(True)]
            assert 0 < n_kept and n_kept + first_away.unit.slice_elems[first_away.bucket] > limit
        engine.close()


def test_max_in_cpu_keeps_the_first_weights_in_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(1, kept, folder)


def unnamed_file(folder: str) -> int:
    """The descriptor of the only unnamed file that this process has in ``folder``."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and os.readlink(path).startswith(folder) and os.readlink(path).endswith("(deleted)"):
            return int(name)
    raise AssertionError(f"no file in {folder}")


def failing(rank: int, world: int, folder: str) -> None:
    with faults(seed=1) as broken:
        engine = make(folder, build(), NVME, trains=False, aio={"checksum": True})
        want = engine(inputs(rank, 0))
        broken.set(bad_begin=0, bad_end=1 << 40)
        with pytest.raises((AioError, OffloadError)):
            engine(inputs(rank, 0))
        broken.set(bad_begin=0, bad_end=0)
        assert torch.equal(engine(inputs(rank, 0)), want)  # no weight is lost

        with open(f"/proc/self/fd/{unnamed_file(folder)}", "r+b", buffering=0) as file:
            before = os.pread(file.fileno(), 1, 5)
            os.pwrite(file.fileno(), bytes([before[0] ^ 4]), 5)
            with pytest.raises(OffloadError, match="weights of .* not those that were written"):
                engine(inputs(rank, 0))
            os.pwrite(file.fileno(), before, 5)
        assert torch.equal(engine(inputs(rank, 0)), want)
        engine.close()


def test_a_device_that_fails_is_an_error_and_no_wrong_result() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(1, failing, folder)


def refused(rank: int, world: int, folder: str) -> None:
    Path(f"{folder}/file").write_text("")
    with pytest.raises(ConfigError, match="offload_param.nvme_path"):
        make(folder, build(), {**NVME, "nvme_path": f"{folder}/file"}, trains=False)
    # The room is missing on one rank only, but all ranks raise.
    size = 1 << (60 if rank == world - 1 else 0)
    with (
        mock.patch.object(place, "whole_pages", lambda n: size),
        pytest.raises(ConfigError, match=r"offload_param.nvme_path.*\d"),
    ):
        make(folder, build(), NVME, trains=False)


@pytest.mark.parametrize("world", [1, 2])
def test_no_room_and_no_folder_are_told_at_the_start(world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world, refused, folder)
