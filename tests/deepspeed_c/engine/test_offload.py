"""States that are moved out and back are the same bits, and nothing runs meanwhile."""

from __future__ import annotations

import pytest
import torch

import deepspeed_c
from deepspeed_c.engine.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed_c.errors import ConfigError, FeatureError, StateError
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import TRAITS, batch, make_model, whole_params
from tests.ranks import run_ranks


def train(engine, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step, 0, rank, 0)
        loss = engine(x.to(engine._precision.dtype or x.dtype), y)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def storages(engine, kind: OffloadStateTypeEnum) -> int:
    return sum(
        {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in engine._offloaded._tensors(kind)}.values()
    )


def body(rank: int, world: int, stage: int, dtype: str) -> None:
    runs = []
    for moves in (False, True):
        model = make_model(TRAITS["plain"])
        config = make_config(stage, dtype, 1, {"zero_optimization": {"reduce_bucket_size": 60}})
        with deepspeed_c.initialize(model=model, config=config)[0] as engine:
            losses = train(engine, rank, range(2))
            if moves:
                sizes = {kind: storages(engine, kind) for kind in OffloadStateTypeEnum}
                engine.offload_states(include=[OffloadStateTypeEnum.optim_states, "hp_params"], pin_memory=False)
                assert storages(engine, OffloadStateTypeEnum.optim_states) == 0
                assert storages(engine, OffloadStateTypeEnum.hp_params) == 0
                assert storages(engine, OffloadStateTypeEnum.lp_grads) == sizes[OffloadStateTypeEnum.lp_grads]
                engine.offload_states(device=OffloadDeviceEnum.cpu)  # the rest; what is away stays away
                assert storages(engine, OffloadStateTypeEnum.lp_params) == 0
                for call in (lambda: engine(*batch(0, 0, rank, 0)), engine.step):
                    with pytest.raises(StateError, match="have been offloaded"):
                        call()
                engine.reload_states()
                assert {kind: storages(engine, kind) for kind in OffloadStateTypeEnum} == sizes
                engine.reload_states()  # nothing to bring back
            losses += train(engine, rank, range(2, 4))
            if moves:
                with pytest.raises(FeatureError, match="NVMe"):
                    engine.offload_states(device="nvme")
                with pytest.raises(ConfigError, match="'moon' is no place"):
                    engine.offload_states(device="moon")
                engine.offload_states(include=[OffloadStateTypeEnum.optim_states])
                engine.reload_states(non_blocking=True)
            runs.append((losses, whole_params(model)))
    (losses0, params0), (losses1, params1) = runs
    assert losses0 == losses1
    for name, a in params0.items():
        assert torch.equal(a, params1[name]), f"{name}: {a} != {params1[name]}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world, stage", [(1, 1), (2, 0), (2, 2), (2, 3)])
def test_out_and_back(world: int, stage: int, dtype: str) -> None:
    run_ranks(world, body, stage, dtype)


def close_body(rank: int, world: int) -> None:
    model = make_model(TRAITS["plain"])
    engine = deepspeed_c.initialize(model=model, config=make_config(3, "bf16", 1, {}))[0]
    train(engine, rank, range(1))
    before = whole_params(model)
    engine.offload_states()
    engine.close()
    for name, value in whole_params(model).items():
        assert torch.equal(value, before[name]), f"{name}: {value} != {before[name]}"


def test_closed_while_states_are_away() -> None:
    run_ranks(2, close_body)
