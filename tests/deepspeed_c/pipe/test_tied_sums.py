"""Sums of the gradients of a tied weight, which four ranks hold: two pipelines, and two stages with the weight."""

from __future__ import annotations

from typing import Any

import torch

from tests.deepspeed_c.pipe.models import micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import config_of
from tests.deepspeed_c.pipe.test_stage3 import SMALL_UNITS
from tests.ranks import run_ranks
from tests.training import engine_of, whole_weights

BF16 = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}


def tied_weights(rank: int, world: int) -> list[torch.Tensor]:
    """The tied weight after a batch at each stage."""
    found = []
    for stage in range(4):
        net = module_of(2)
        zero: dict[str, Any] = {"stage": stage, **(SMALL_UNITS if stage == 3 else {})}
        with engine_of(net, config_of(4, zero_optimization=zero, **BF16)) as engine:
            engine.train_batch(iter(micro_batches(0, net.mpu().get_data_parallel_rank(), 4)))
            found.append(whole_weights(net)["tied_modules.embed.weight"])
    return found


def test_sums_in_fp32_are_not_rounded_in_between():
    """At stages 1 to 3 they are summed over pipelines, then over stages. At stage 0 there is one sum."""
    for rank, (whole, *cut) in enumerate(run_ranks(4, tied_weights)):
        for stage, value in enumerate(cut, 1):
            n_off = int((value != whole).sum())
            assert n_off == 0, f"rank {rank}, stage {stage}: {n_off} of {whole.numel()} differ, {value} and {whole}"
