"""Stage 3 on CUDA devices over NCCL, with gathers and reductions on streams of their own, against the plain run on the
host."""

from __future__ import annotations

import pytest
import torch

import deepspeed_c
from deepspeed_c.utils import safe_get_full_fp32_param
from tests.deepspeed_c.zero.test_oracle import FINE, make_config
from tests.deepspeed_c.zero.traits import STEPS, TRAITS, batch, make_groups, make_model, plain_run
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


def cuda_run(rank: int, world: int, trait_name: str, fine: str) -> dict[str, torch.Tensor]:
    torch.cuda.set_device(rank)
    deepspeed_c.init_distributed("nccl")
    trait = TRAITS[trait_name]
    model = make_model(trait)
    config = make_config(3, "fp32", 1, {**trait.config, "zero_optimization": FINE[fine]})
    engine, *_ = deepspeed_c.initialize(model=model, model_parameters=make_groups(model, trait.groups), config=config)
    with engine:
        assert engine.device.type == "cuda"
        for step in range(STEPS):
            for part in range(trait.n_backwards):
                x, y = batch(step, 0, rank, part)
                # Keep the default stream busy: a gather that does not wait for it would read too early.
                torch.cuda._sleep(2_000_000)
                engine.backward(engine(x.to(engine.device), y.to(engine.device)))
            engine.step()
        return {n: safe_get_full_fp32_param(p).cpu() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("fine", list(FINE))
@pytest.mark.parametrize(
    "trait", ["plain", "tied", "used_twice", "checkpoint", "checkpoint_reentrant", "two_backwards"]
)
def test_parity_on_devices(trait: str, fine: str) -> None:
    want = plain_run(TRAITS[trait], 2, 1).params
    for rank, got in enumerate(run_ranks(2, cuda_run, trait, fine, fresh=True)):
        for name, value in got.items():
            assert torch.allclose(value, want[name], rtol=1e-4, atol=1e-5), (
                f"rank {rank}, {name}: {value} not {want[name]}"
            )
