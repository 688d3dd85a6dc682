"""init_compression and redundancy_clean (deepspeed_c/compression/compress.py) on one model without an engine: what
stays as it was, and every wrong input."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from deepspeed_c.compression.basic_layer import Embedding_Compress, LinearLayer_Compress, QuantAct
from deepspeed_c.compression.compress import (
    check_deepspeed_config,
    get_compress_methods,
    get_module_name,
    init_compression,
    redundancy_clean,
)
from deepspeed_c.compression.scheduler import compression_scheduler
from deepspeed_c.config import load_config
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError, StateError, UnsupportedConfigError
from tests.deepspeed_c.compression.oracle import Model, Oracle, batch, rounded, section

WEIGHTS = {"bits": 8, "symmetric": True, "offset": 0}
STATIC = {"bits": 4, "acts": "static", "symmetric": True, "offset": 0}


def config_of(**options: Any) -> dict[str, Any]:
    return {"compression_training": section(**options)}


def test_parameters_names_hooks_and_ties_stay():
    model, plain = Model().double().float(), Model().state_dict()
    model.mid.bias.requires_grad_(False)
    calls: list[str] = []
    model.mid.register_forward_hook(lambda *_: calls.append("mid"))
    before = dict(model.named_parameters(remove_duplicate=False))
    config = config_of(**WEIGHTS)
    assert init_compression(model, config) is model
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert model.head.weight is model.table.weight and not model.mid.bias.requires_grad
    assert isinstance(model.mid, LinearLayer_Compress) and isinstance(model.table, Embedding_Compress)
    assert model.load_state_dict(plain).missing_keys == [] and list(model.state_dict()) == list(plain)
    model.eval()
    y = model(batch(0))
    torch.testing.assert_close(y, Oracle(**WEIGHTS)(batch(0)), rtol=0, atol=1e-6)
    assert calls == ["mid"]
    redundancy_clean(model, config)
    assert type(model.mid) is nn.Linear and type(model.table) is nn.Embedding and torch.equal(model(batch(0)), y)
    assert model.head.weight is model.table.weight and not any("quantization" in vars(m) for m in model.modules())


def test_a_pattern_for_the_head_quantizes_the_embedding_that_it_shares_a_weight_with():
    config = config_of(**WEIGHTS)
    config["compression_training"]["weight_quantization"]["different_groups"]["all"]["modules"] = ["head"]
    model = init_compression(Model(), config)
    rows = rounded(Model().table.weight, 8)
    torch.testing.assert_close(model.table(batch(1)), rows[batch(1)], rtol=0, atol=1e-6)
    assert not isinstance(model.mid, LinearLayer_Compress) and torch.equal(model.table(torch.tensor(3)), torch.zeros(8))


def test_a_plain_state_dict_has_no_range_and_a_recomputed_forward_does_not_move_it():
    config = config_of(**STATIC)
    model = init_compression(Model(), config)
    assert model.load_state_dict(Model().state_dict()).missing_keys == []
    ranges = [name for name in model.state_dict() if name.endswith("x_min_max")]
    assert ranges == [f"{name}.activation_quantizer.x_min_max" for name in ("mid", "head")]
    twin = copy.deepcopy(model)
    model(batch(0)).sum().backward()
    torch.utils.checkpoint.checkpoint(twin, batch(0), use_reentrant=False).sum().backward()
    for name in ranges:
        moved = model.state_dict()[name]
        print(name, moved, twin.state_dict()[name])
        assert moved.any() and torch.equal(moved, twin.state_dict()[name])
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    model.eval()
    before = model(batch(3))
    redundancy_clean(model, config)
    assert torch.equal(model(batch(3)), before) and isinstance(model.mid, LinearLayer_Compress)


def test_the_running_range_by_hand():
    act = QuantAct(act_range_momentum=0.5, quant_mode="asymmetric")
    x = torch.tensor([[-1.0, 0.0, 3.0]])
    assert torch.equal(act.eval()(x, 8), x)  # no range yet
    act.train()(x, 8)
    y = act(torch.tensor([[-3.0, 0.0, 1.0]]), 4)
    wanted = rounded(torch.tensor([[-3.0, 0.0, 1.0]]), 4, False, torch.tensor(-2.0), torch.tensor(2.0))
    print(act.x_min_max, y, wanted)
    assert act.x_min_max.tolist() == [-2.0, 2.0] and torch.allclose(y, wanted)
    act(torch.tensor([torch.inf]), 8)
    assert act.x_min_max.tolist() == [-2.0, 2.0] and act(torch.zeros(0, 3), 8).shape == (0, 3)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_of_zeros_and_no_rows(rows: int):
    config = config_of(bits=8, acts="dynamic", symmetric=False, offset=0)
    model = init_compression(Model(), config)
    y = model.mid(torch.zeros(rows, 8))
    assert y.shape == (rows, 8) and torch.equal(y, model.mid.bias.expand(rows, 8))
    assert model(torch.zeros(rows, 2, dtype=torch.long)).isfinite().all()


def test_layers_made_by_hand_are_plain():
    x = torch.randn(2, 3)
    linear, table = LinearLayer_Compress(3, 4), Embedding_Compress(5, 3)
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias)) and "None" in repr(linear)
    assert torch.equal(table(torch.tensor([1])), table.weight[1:2]) and not linear.weight_quantization_enabled


def test_the_scheduler_counts_without_an_engine(tmp_path):
    config = config_of(bits=8, acts="dynamic", symmetric=True, offset=2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = init_compression(Model(), str(path))
    methods = load_config(config, world_size=1, batch="skip").resolved_dict()["compression_training"]
    scheduler = compression_scheduler(model, methods)
    assert scheduler.different_compression_methods["activation_quantization"]["different_groups"][0][1] == [
        "mid",
        "head",
    ]
    plain, found = Model()(batch(0)), []
    for _ in range(3):
        found.append((torch.equal(model(batch(0)), plain), scheduler.weight_quantization_enabled))
        scheduler.step(step_zero_check=True)
        scheduler.check_all_modules()
        scheduler.step()
    assert found == [(True, False), (True, False), (False, True)] and scheduler.training_steps == 3
    (weights, _) = get_compress_methods(Model(), {key: methods[key] for key in methods if "quantization" in key})
    assert weights[0] == [["table", "mid", "head"]] and weights[2]["weight_quantization"]["target_bits"] == 8


def test_module_names():
    names, taken = get_module_name("g", Model(), "id|tab", set())
    assert names == ["table", "mid"] and taken == {"table", "mid"}
    assert get_module_name("g", Model(), "*", taken, verbose=False)[0] == ["head"]
    with pytest.raises(ValueError, match="mid is already added"):
        get_module_name("g", Model(), "mid", taken)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.attention = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.MultiheadAttention(4, 2)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)


class Own(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def nan_weights() -> nn.Module:
    model = Odd()
    with torch.no_grad():
        model.second.weight[1, 1] = torch.nan
    return model


def with_own_forward() -> nn.Module:
    model = Odd()
    model.first = Own(6, 4)
    return model


def wrong(modules: list[str] | None = None, bits: int | None = 8, acts: bool = False, **shared: Any) -> dict[str, Any]:
    key = "activation_quantization" if acts else "weight_quantization"
    shared = {"enabled": True, **({} if acts else {"quantize_weight_in_forward": True}), **shared}
    params = {"bits" if acts else "target_bits": bits} if bits else {}
    group = {"params": params, "modules": modules or ["first"]}
    return {"compression_training": {key: {"shared_parameters": shared, "different_groups": {"g": group}}}}


def two_groups(first: int, second: int, modules: str) -> dict[str, Any]:
    config = wrong(["first"], first)
    groups = config["compression_training"]["weight_quantization"]["different_groups"]
    groups["h"] = {"params": {"target_bits": second}, "modules": [modules]}
    return config


def tied() -> nn.Module:
    model = Odd()
    model.second = nn.Linear(6, 4)
    model.second.weight = model.first.weight
    return model


W = "compression_training.weight_quantization"
CASES: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no such module": (Odd, wrong(["frist"]), ConfigError,
     rf"{W}.different_groups.g.modules: 'frist' matches no .*\n.*first"),
    "no regular expression": (Odd, wrong(["(x"]), ConfigError, r"g.modules: '\(x' is not a regular expression"),
    "twice": (Odd, two_groups(8, 8, "f"), ConfigError, "h.modules: 'f' matches first, which another pattern"),
    "twice in a group": (Odd, wrong(["first", "fir"]), ConfigError, "'fir' matches first, which another"),
    "two bits for one weight": (tied, two_groups(8, 4, "second"), ConfigError,
     "first, second share one weight, .* 4 and 8"),
    "bits": (Odd, wrong(bits=3), ConfigError,
     rf"{W}.different_groups.g.params.target_bits: is 3.*\nFix: write 8 or 4"),
    "no bits": (Odd, wrong(bits=None), ConfigError, "target_bits: is missing"),
    "bits of activations": (Odd, wrong(bits=2, acts=True), ConfigError,
     "activation_quantization.*g.params.bits: is 2"),
    "no groups": (Odd, {"compression_training": {"activation_quantization": {"shared_parameters": {"enabled": True}}}},
     ConfigError, "activation_quantization.different_groups: is empty"),
    "groups": (Odd, wrong(quantize_groups=7), ConfigError,
     r"quantize_groups: 7 does not divide the 24 .*first.*\nFix: write 6"),
    "convolution": (Odd, wrong(["*"]), ConfigError, r"'\*' matches conv, and convolutions are not built"),
    "batch norm": (Odd, wrong(["norm"]), ConfigError, "'norm' matches no Linear or Embedding"),
    "embedding's input": (Model, wrong(["table"], acts=True), ConfigError, "'table' matches no Linear"),
    "attention": (Odd, wrong(["attention"]), ModelError, "attention.out_proj: .* torch.nn.MultiheadAttention reads"),
    "own forward": (with_own_forward, wrong(), ModelError,
     "first: the Own cannot be compressed: it has its own forward"),
    "NaN": (nan_weights, wrong(["second"]), ModelError, "second.weight: the weight has NaN or inf"),
    "MoQ": (Odd, wrong(quantize_weight_in_forward=False), ConfigError,
     r"quantize_weight_in_forward: .*MoQ.*\n.*set it to true"),
    "MoQ's mix": (Odd, wrong(fp16_mixed_quantize={"enabled": True}), ConfigError,
     "fp16_mixed_quantize.enabled: is true"),
    "channels": (Odd, {"compression_training": {"channel_pruning": {"shared_parameters": {"enabled": True}}}},
     UnsupportedConfigError, "channel_pruning.shared_parameters.enabled: true asks for channel pruning"),
    "no teacher": (Odd, {"compression_training": {"layer_reduction": {"enabled": True}}}, ConfigError,
     "layer_reduction: the teacher is NoneType.*\nFix: pass teacher_model"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_named_and_changes_nothing(name: str):
    make, config, kind, text = CASES[name]
    model = make()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(kind, match=text) as raised:
        init_compression(model, config)
    print(raised.value)
    assert isinstance(raised.value, DeepSpeedCError) and raised.value.where and raised.value.fix
    assert [type(module) for module in model.modules()] == classes


def test_megatrons_layers_are_refused():
    class ColumnParallelLinear(nn.Module):
        pass

    class Mpu:
        pass

    Mpu.ColumnParallelLinear = ColumnParallelLinear
    model = Odd()
    model.third = ColumnParallelLinear()
    for acts in (False, True):
        with pytest.raises(ModelError, match="third: the ColumnParallelLinear cannot be compressed"):
            init_compression(model, wrong(["third"], acts=acts), mpu=Mpu)
        with pytest.raises(ConfigError, match="'third' matches no Linear"):
            init_compression(model, wrong(["third"], acts=acts))


def test_calls_in_the_wrong_order():
    config = config_of(**WEIGHTS)
    with pytest.raises(StateError, match="table: its weight is not compressed"):
        redundancy_clean(Model(), config)
    model = init_compression(Model(), config)
    with pytest.raises(StateError, match="compressed already"):
        init_compression(model, config)
    with torch.no_grad():
        model.mid.weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match=r"mid\.weight: the weight has NaN or inf"):
        redundancy_clean(model, config)
    with pytest.raises(ValueError, match="a list is not a configuration"):
        check_deepspeed_config([])
    with pytest.raises(ConfigError, match="nowhere"):
        check_deepspeed_config("/nowhere/config.json")
