"""A gradient penalty through messages between the ranks of a model raises an error. It never loses a term silently."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.errors import BackwardError
from tests.deepspeed_c.inject.families import feed, make
from tests.deepspeed_c.sequence.test_engine import batch, config_of, make_engine, part
from tests.ranks import run_ranks
from tests.training import config, engine_of


def penalised(rank: int, world: int, way: str) -> tuple[str, str]:
    if way == "sequence":
        engine = make_engine(2, config_of(1))
        x, labels = part(engine, batch(0, 0, 0))
        x = x.requires_grad_()
        loss = engine(x, labels=labels)["loss"]
    else:
        settings = config(rows=2, tensor_parallel={"autotp_size": world, "tp_overlap_comm": way == "overlap"})
        engine = engine_of(make("llama").train(), settings)
        given = feed("llama")
        x = torch.randn(*given["input_ids"].shape, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = engine(inputs_embeds=x, labels=given["labels"]).loss
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(BackwardError, match="second derivative") as caught:
        grad.square().sum().backward()
    engine.zero_grad()
    engine.close()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("way", ["tensor", "overlap", "sequence"])
def test_a_penalty_is_refused(way: str) -> None:
    for name, text in run_ranks(2, penalised, way, preload="tests.deepspeed_c.inject.preload"):
        assert name == "BackwardError" and "create_graph=True" in text, text
