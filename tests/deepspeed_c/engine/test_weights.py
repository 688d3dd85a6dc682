"""Weights of the whole model, into and out of an engine. They equal a plain model's, rank 0 alone writes them, and
weights that do not fit are refused as a whole."""

from __future__ import annotations

import os

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import CheckpointError, StateError
from deepspeed_c.utils import safe_get_full_fp32_param
from deepspeed_c.zero import GatheredParameters
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import TRAITS, batch, make_model
from tests.ranks import run_ranks
from tests.training import step

UNITS = {"zero_optimization": {"reduce_bucket_size": 60}}
HALF_WHOLE = {"zero_optimization": {"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 30}}


def make(trait: str, stage: int, dtype: str = "fp32", extra: dict = UNITS):
    model = make_model(TRAITS[trait])
    model.register_buffer("table", torch.arange(3.0))
    return model, deepspeed_c.initialize(model=model, config=make_config(stage, dtype, 1, extra))[0]


def plain(trait: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = make_model(TRAITS[trait])
    model.register_buffer("table", torch.arange(3.0))
    return {k: v.to(dtype) if k != "table" else v for k, v in model.state_dict().items()}


def check_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], label: str) -> None:
    assert list(got) == list(want), f"{label}: names {list(got)}, want {list(want)}"
    for name, value in want.items():
        assert got[name].dtype is value.dtype and torch.equal(got[name], value), (
            f"{label}, {name}: {got[name]} is not {value}"
        )


# -- out of the engine -------------------------------------------------------------------------------------------------


def saving_body(rank: int, world: int, folder: str, trait: str, stage: int, dtype: str) -> None:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model, engine = make(trait, stage, dtype)
    want = plain(trait, kind)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    label = f"{trait} stage {stage} {dtype}"
    with engine:
        for exclude in (False, True):
            expected = {k: v for k, v in want.items() if not (exclude and k in frozen)}
            path = os.path.join(folder, f"{label} {exclude}")
            assert engine.save_16bit_model(path, exclude_frozen_parameters=exclude) is True
            check_equal(torch.load(os.path.join(path, "pytorch_model.bin"), weights_only=True), expected, label)
            assert engine.save_fp16_model(path, "model.safetensors", exclude_frozen_parameters=exclude) is True
            assert os.path.getsize(os.path.join(path, "model.safetensors")) > 4 * len(expected)
            assert sorted(os.listdir(path)) == ["model.safetensors", "pytorch_model.bin"], os.listdir(path)
            state = engine.module_state_dict(exclude_frozen_parameters=exclude)
            check_equal(state, expected, f"{label}: module_state_dict")
            check_equal(
                engine.module_state_dict(prefix="m.", exclude_frozen_parameters=exclude),
                {f"m.{k}": v for k, v in expected.items()},
                label,
            )
            if stage == 3:
                whole = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=exclude)
                assert (whole is None) == (rank > 0), whole
                if rank == 0:
                    check_equal(whole, expected, f"{label}: consolidated")
                    if trait == "tied":
                        assert whole["inp.weight"].data_ptr() == whole["forth.weight"].data_ptr()
                    whole["gain"].fill_(77.0)  # the dict holds a copy: the model does not change
            else:
                try:
                    engine._zero3_consolidated_16bit_state_dict()
                except ValueError as error:
                    assert "stage 3" in str(error)
                else:
                    raise AssertionError("ValueError was not raised")
        if stage == 3 and world > 1:
            check_equal(engine.module_state_dict(), want, label)
        # Training goes on, and a later save holds the trained weights.
        x, y = batch(0, 0, rank, 0)
        step(engine, x.to(kind), y)
        state = engine.module_state_dict()
        for name, p in model.named_parameters():
            master = safe_get_full_fp32_param(p)
            if master is not None:
                assert torch.equal(state[name], master.to(kind)), f"{label}, after a step, {name}"
    try:
        engine.save_16bit_model(folder)
    except StateError as error:
        assert "closed" in str(error)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("trait", ["tied", "frozen", "zero_size"])
def test_saved_weights_are_a_plain_models(tmp_path, trait: str, world: int) -> None:
    for stage, dtype in ((3, "fp32"), (3, "bf16"), (1, "bf16")):
        run_ranks(world, saving_body, str(tmp_path), trait, stage, dtype)


def safetensors_body(rank: int, world: int, folder: str) -> None:
    _, engine = make("zero_size", 3)
    with engine:
        engine.save_16bit_model(folder, "model.safetensors")


def test_safetensors_hold_the_same_values(tmp_path) -> None:
    """Reads the file by the definition of its format: a length, a JSON header, then the bytes."""
    import json

    run_ranks(2, safetensors_body, str(tmp_path))
    raw = (tmp_path / "model.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    want = plain("zero_size", torch.float32)
    assert set(header) - {"__metadata__"} == set(want)
    for name, value in want.items():
        begin, end = header[name]["data_offsets"]
        data = bytearray(raw[8 + n + begin : 8 + n + end])
        got = torch.frombuffer(data, dtype=torch.float32) if data else torch.empty(0)
        assert header[name]["shape"] == list(value.shape) and torch.equal(got.view(value.shape), value), name


def failing_body(rank: int, world: int, blocked: str, folder: str) -> str:
    _, engine = make("plain", 3)
    with engine:
        want = engine.module_state_dict()
        for path in (blocked, os.path.join(blocked, "deeper")):
            try:
                engine.save_16bit_model(path)
            except CheckpointError as error:
                message = str(error)
                assert path in message, message
            else:
                raise AssertionError(f"rank {rank}: CheckpointError was not raised")
        assert engine.save_16bit_model(folder)
        check_equal(engine.module_state_dict(), want, "after a failure")
    return message


def test_a_folder_that_cannot_be_written_raises_on_all_ranks(tmp_path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    run_ranks(2, failing_body, str(blocked), str(tmp_path))
    assert blocked.read_text() == "in the way"
    assert sorted(os.listdir(tmp_path)) == ["a file", "pytorch_model.bin"]


# -- into the engine ---------------------------------------------------------------------------------------------------


def loading_body(rank: int, world: int, stage: int, dtype: str, half_whole: bool) -> None:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model, engine = make("frozen", stage, dtype, HALF_WHOLE if half_whole else UNITS)
    label = f"stage {stage} {dtype}"
    generator = torch.Generator().manual_seed(1)
    before = {k: v.clone() for k, v in engine.module_state_dict().items()}
    new = {k: torch.randn(v.shape, generator=generator).to(v.dtype) for k, v in before.items()}
    with engine:
        bad = {
            "missing": {k: v for k, v in new.items() if k != "out.bias"},
            "unexpected": {**new, "nobody": torch.zeros(1)},
            "shape": {**new, "out.weight": torch.zeros(3, 3)},
        }
        if stage == 3 and world > 1:
            for what, state in bad.items():
                try:
                    engine.load_module_state_dict(state)
                except StateError as error:
                    name = {"missing": "out.bias", "unexpected": "nobody", "shape": "out.weight"}[what]
                    assert what in str(error) and name in str(error), error
                else:
                    raise AssertionError(f"{label}: {what} was loaded")
                check_equal(engine.module_state_dict(), before, f"{label}, {what}: half-changed")
        engine.load_module_state_dict({**bad["missing"], "nobody": torch.zeros(1)}, strict=False)
        check_equal(engine.module_state_dict(), {**new, "out.bias": before["out.bias"]}, f"{label}: not strict")
        engine.load_module_state_dict(new)
        check_equal(engine.module_state_dict(), new, label)
        for name, p in model.named_parameters():
            master = safe_get_full_fp32_param(p)
            assert (master is None) == (not p.requires_grad), name
            if master is not None:
                assert torch.equal(master, new[name].float()), f"{label}: master of {name} is {master}"
        twin = make_model(TRAITS["frozen"]).to(kind)
        twin.register_buffer("table", torch.zeros(3))
        twin.load_state_dict(new)
        x, y = batch(0, 0, 0, 0)
        with torch.no_grad():
            a, b = engine(x.to(kind), y).item(), twin(x.to(kind), y).item()
        assert a == b, f"{label}: the loss is {a}, of a plain model {b}"

        def custom(src, dst):
            with torch.no_grad():
                for name, p in dst.named_parameters():
                    p.copy_(src[name])

        other = {k: v * 2 for k, v in new.items()}
        engine.load_module_state_dict(other, custom_load_fn=custom)
        check_equal(engine.module_state_dict(), {**other, "table": new["table"]}, f"{label}: custom")
        with GatheredParameters(model.parameters()):
            assert torch.equal(model.out.weight.data, other["out.weight"])
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert torch.equal(safe_get_full_fp32_param(p), other[name].float()), f"{label}: {name}, custom"
        step(engine, x.to(kind), y)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loaded_weights_reach_shards_masters_and_forward(dtype: str, world: int) -> None:
    for stage, half_whole in ((3, False), (3, True), (2, False)):
        run_ranks(world, loading_body, stage, dtype, half_whole)
