"""Writes in place to whole 16-bit weights that have masters. The next step goes on from the written values, as if the
masters had been set by hand. Masters of elements that were not written keep every bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import deepspeed_c
from deepspeed_c.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import TRAITS, batch, make_model
from tests.ranks import on_ranks, run_ranks

STEPS = 4
Masters = dict[str, torch.Tensor]


def mask_of(p: torch.Tensor) -> torch.Tensor:
    return torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())) < 0.4


def write_in_place(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.masked_fill_(mask_of(p), 0.25)


def write_nothing_new(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(p.clone())


def write_masters(p: torch.nn.Parameter) -> None:
    """Set the masters that ``write_in_place`` should change. A master that rounds to the written value stays."""
    master = safe_get_full_fp32_param(p)
    safe_set_full_fp32_param(p, master.masked_fill(mask_of(p) & (master.to(p.dtype) != 0.25), 0.25))


def leave(p: torch.nn.Parameter) -> None:
    pass


def read(p: torch.nn.Parameter) -> None:
    write_in_place(p)
    master = safe_get_full_fp32_param(p)
    assert torch.equal(master.to(p.dtype), p.detach()), f"{master} beside {p}"


def run_body(rank: int, world: int, write: Callable, stage: int, precision: str, zero: dict, is_late: bool) -> Masters:
    """The masters after training. In two of the steps ``write`` visits every parameter: before forward, or between
    backward and step if ``is_late``."""
    model = make_model(TRAITS["zero_size"])
    config = make_config(stage, precision, 1, {"zero_optimization": zero})
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    to = next(model.parameters()).dtype
    with engine:
        for step in range(STEPS):
            writes = step in (1, 3)
            if writes and not is_late:
                for p in model.parameters():
                    write(p)
            x, y = batch(step, 0, rank, 0)
            engine.backward(engine(x.to(to), y))
            if writes and is_late:
                for p in model.parameters():
                    write(p)
            engine.step()
        masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            assert torch.equal(masters[name].to(to), p.detach()), f"{name}: {masters[name]} beside {p}"
        return masters


def assert_same(found: Masters, expected: Masters) -> None:
    for name, master in expected.items():
        assert torch.equal(found[name], master), f"{name}: {found[name]} beside {master}"


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "stage, precision, zero",
    [
        (0, "bf16", {}), (1, "fp16", {}), (2, "bf16", {}), (2, "bf16", {"offload_optimizer": {"device": "nvme"}}),
        (2, "fp32", {}),  # the weights are the masters
    ],
)  # fmt: skip
@pytest.mark.parametrize("world", [1, 3])
def test_the_next_step_goes_on_from_what_was_written(world, stage, precision, zero, is_late, tmp_path):
    zero = {section: {**settings, "nvme_path": str(tmp_path)} for section, settings in zero.items()}

    def run(write: Callable) -> Masters:
        found = run_ranks(world, run_body, write, stage, precision, zero, is_late)
        for other in found[1:]:
            assert_same(other, found[0])
        return found[0]

    expected = run(write_masters)
    assert_same(run(write_in_place), expected)
    assert_same(run(read), expected)
    untouched = run(leave)
    assert_same(run(write_nothing_new), untouched)
    assert any(not torch.equal(untouched[name], master) for name, master in expected.items())


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_checkpoints_hold_what_was_written(rank: int, world: int, folder: str) -> None:
    """A checkpoint saved before the next step holds the written values; a load after a write overrides it."""
    model = make_model(TRAITS["zero_size"])
    engine = deepspeed_c.initialize(model=model, config=make_config(2, "bf16", 1, {}))[0]
    with engine:
        x, y = batch(0, 0, rank, 0)
        engine.backward(engine(x.bfloat16(), y))
        engine.step()
        engine.save_checkpoint(folder, tag="before")
        before = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        for p in model.parameters():
            write_in_place(p)
        engine.save_checkpoint(folder, tag="written")
        written = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        for p in model.parameters():
            write_in_place(p.detach().neg_())
        for tag, masters in (("before", before), ("written", written)):
            engine.load_checkpoint(folder, tag=tag)
            assert_same({name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}, masters)
        assert any(not torch.equal(before[name], master) for name, master in written.items())
