"""engine/build.py: optimizer.params.state_dtype and the bf16 section set the format of the optimizer's states."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.config import load_config
from deepspeed_c.engine.build import build_optimizer
from deepspeed_c.errors import ConfigError

MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 1}}


def built(kind, params, **sections):
    tree = {"train_batch_size": 1, "optimizer": {"type": kind, "params": {"lr": 0.1, **params}}, **sections}
    model = torch.nn.Linear(20, 20)
    config = load_config(tree, world_size=1)
    return build_optimizer(config.optimizer, config.bf16, model, None, None), model


def moments(optimizer, model):
    """The dtypes in the state of the first parameter after a step."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state[next(iter(model.parameters()))]
    return {key: value.dtype for key, value in state.items() if key != "step"}


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Lamb", "Lion", "Adagrad", "SGD", "Muon"])
@pytest.mark.parametrize("name, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_every_optimizer_takes_a_state_dtype(kind, name, dtype):
    params = {"momentum": 0.9} if kind == "SGD" else {}
    found = moments(*built(kind, {**params, "state_dtype": name}))
    assert found and set(found.values()) == {dtype}


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Lion", "SGD"])
def test_int8_makes_codes_and_scales(kind):
    found = moments(
        *built(kind, {"momentum": 0.9, "state_dtype": "int8"} if kind == "SGD" else {"state_dtype": "int8"})
    )
    codes = {key: dtype for key, dtype in found.items() if not key.endswith("_scale")}
    assert set(codes.values()) == ({torch.int8, torch.uint8} if "Adam" in kind else {torch.int8})
    assert {key: found[f"{key}_scale"] for key in codes} == dict.fromkeys(codes, torch.float32)


@pytest.mark.parametrize(
    "params, section, dtype",
    [
        ({}, {}, torch.float32),
        ({}, {"bf16_optimizer_states": True}, torch.bfloat16),
        ({"state_dtype": "bf16"}, {}, torch.bfloat16),
        ({"state_dtype": "bf16"}, {"bf16_optimizer_states": True}, torch.bfloat16),
        ({"state_dtype": "int8"}, {}, torch.int8),
    ],
)
def test_masters_of_bf16(params, section, dtype):
    optimizer, _ = built("AdamW", params, **{**MASTERS, "bf16": {**MASTERS["bf16"], **section}})
    assert optimizer.state_dtype == dtype


def test_the_default_follows_the_weights():
    assert built("AdamW", {})[0].state_dtype is None
    assert isinstance(built("AdamW", {"torch_adam": True}, **MASTERS)[0], torch.optim.AdamW)


@pytest.mark.parametrize(
    "kind, params, word",
    [
        ("Lamb", {"state_dtype": "int8"}, "Lamb makes its update"),
        ("Muon", {"state_dtype": "int8"}, "Muon orthogonalises"),
        ("AdamW", {"state_dtype": "fp16"}, "fp16"),
        ("AdamW", {"state_dtype": "bf16", "torch_adam": True}, "torch"),
        ("RMSprop", {"state_dtype": "bf16"}, "state_dtype"),
    ],
)
def test_what_cannot_be_is_a_configuration_error(kind, params, word):
    with pytest.raises(ConfigError, match=word):
        built(kind, params)


def test_contradiction_is_a_configuration_error():
    section = {**MASTERS, "bf16": {**MASTERS["bf16"], "bf16_optimizer_states": True}}
    with pytest.raises(ConfigError, match="state_dtype says what states are kept in"):
        built("AdamW", {"state_dtype": "int8"}, **section)
