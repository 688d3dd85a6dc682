"""inject/part_copy.py: what a cut copy takes over from its model."""

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.inject.part_copy import PartCopy
from tests.ranks import on_ranks
from tests.toys import llama

pytest.importorskip("transformers")


def small() -> torch.nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return llama(0, **sizes, attention_dropout=0.5)


def modes(model: torch.nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@on_ranks(2)
def test_each_module_trains_or_evaluates_as_in_the_model(rank: int, world: int) -> None:
    model = small()
    cut = PartCopy(model, Collectives())
    for chosen in (
        [],
        ["model.layers.1"],
        ["", "model.layers.0.self_attn"],
        ["model.layers.0.mlp.down_proj", "model.norm"],
        [""],
    ):
        for name, module in model.named_modules():
            module.training = name in chosen
        for _ in range(2):  # nothing has changed at the second time
            cut.follow()
            ours, want = modes(cut.module), modes(model)
            assert {name: ours[name] for name in want if name in ours} == want, (chosen, ours, want)
