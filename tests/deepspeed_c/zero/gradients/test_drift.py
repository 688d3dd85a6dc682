"""A step that finds different values on twins names the cause: different data, different random numbers, an edit, or a
gradient that is only a part of the sum."""

from __future__ import annotations

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import RankMismatchError
from tests import training
from tests.deepspeed_c.inject.families import feed, make
from tests.ranks import run_ranks

SAYS = {
    "data": ("different data in this window", "position_ids", "same batch"),
    # These labels are words of rank 1, so this rank's sums do not change.
    "labels": (
        "differs on ranks that hold one model together",
        "different data in this window",
        "labels",
        "same batch",
    ),
    "random": ("drew different random numbers", "seed all ranks"),
    "part": ("gradients of transformer.ln_f.weight", "part of its gradient", "tp_sum_gradients"),
    # Different seeds are no cause where nothing is drawn.
    "part, seeds apart": ("gradients of transformer.ln_f.weight", "part of its gradient", "tp_sum_gradients"),
    "edit": ("weights of transformer.ln_f.bias", "edited or loaded apart"),
}


def body(rank: int, world: int, cause: str) -> tuple[str, str]:
    model = make("gpt2").train()
    if cause == "random":
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
    config = training.config(1, rows=2, tensor_parallel={"autotp_size": world})
    batch = {**feed("gpt2"), "position_ids": torch.arange(9).expand(2, -1)}

    def step(engine, batch):
        training.step(engine, **batch)

    with deepspeed_c.initialize(model=model, config=config)[0] as engine:
        torch.manual_seed(3)
        step(engine, batch)  # the engine checks all of the first window, and finds nothing wrong
        if cause == "data":
            batch["position_ids"] = batch["position_ids"].clone()
            batch["position_ids"][1, 5] += rank
        elif cause == "labels":
            batch["labels"] = batch["labels"].clone()
            batch["labels"][1, 5] = 90 if rank == 0 else 91  # both words belong to rank 1
        elif cause == "random" or "seeds" in cause:
            torch.manual_seed(3 + rank)
        if "part" in cause:
            model.transformer.ln_f.weight.register_hook(lambda grad: grad * (rank + 1))
        if cause == "edit":
            with torch.no_grad():
                model.transformer.ln_f.bias[0] += rank
        try:
            step(engine, batch)
            if cause == "edit":
                step(engine, batch)
        except RankMismatchError as error:
            return type(error).__name__, str(error)
    return "", "nothing was said"


@pytest.mark.parametrize("cause", SAYS)
def test_the_error_says_why(cause: str) -> None:
    first, *others = run_ranks(2, body, cause, preload="tests.deepspeed_c.inject.preload")
    assert all(other == first for other in others), (first, others)
    assert first[0] == "RankMismatchError" and all(part in first[1] for part in SAYS[cause]), first
