"""GPT-2's layers as torch's linear layers (deepspeed_c/compression/conv1d.py), compared with transformers' in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.compression.compress import init_compression
from deepspeed_c.compression.conv1d import convert_conv1d_to_linear
from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.zero.weights.param import state_of

transformers = pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D

from tests.ranks import on_ranks
from tests.training import config, engine_of, update


def gpt2(**settings: Any) -> Any:
    torch.manual_seed(3)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 37, "n_positions": 11}
    words = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **words, **settings)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_in", "n_out"), [(37, 23), (1, 5), (7, 1), (129, 64)])
def test_a_layers_outputs_and_gradients(n_in: int, n_out: int, dtype: torch.dtype) -> None:
    """Each product has n_in terms, so fp32 sums differ by n_in roundings from fp64; bf16 adds that of the result."""
    torch.manual_seed(0)
    layer = Conv1D(n_out, n_in).to(dtype)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, n_in, dtype=dtype)
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    wanted, magnitude = x.double() @ weight + bias, x.double().abs() @ weight.abs() + bias.abs()
    root = nn.Sequential(layer)
    assert convert_conv1d_to_linear(root, Conv1D) is root
    linear = root[0]
    assert type(linear) is nn.Linear and (linear.in_features, linear.out_features) == (n_in, n_out)
    assert torch.equal(linear.weight.double(), weight.T) and linear.weight.is_contiguous()
    assert repr(linear) == f"Linear(in_features={n_in}, out_features={n_out}, bias=True)", repr(linear)
    y = linear(x)
    allowed = magnitude * (n_in + 1) * 2**-23 + wanted.abs() * torch.finfo(dtype).eps
    assert ((y.double() - wanted).abs() <= allowed).all(), (y, wanted)
    y.float().sum().backward()
    assert linear.weight.grad.shape == (n_out, n_in)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_gpt2(dtype: torch.dtype) -> None:
    """A model in fp64 says how much rounding the model has of its own; the converted one has at most twice as much."""
    model = gpt2().to(dtype)
    exact, converted = copy.deepcopy(model).double(), copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, module in model.named_modules() if isinstance(module, Conv1D)]
    convert_conv1d_to_linear(converted, Conv1D)
    assert len(names) == 8 and all(type(converted.get_submodule(name)) is nn.Linear for name in names)
    after = converted.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        is_turned = name.removesuffix(".weight") in names
        assert torch.equal(tensor, before[name].T if is_turned else before[name]), name
    ids = torch.randint(37, (3, 11))
    with torch.no_grad():
        wanted, plain, found = (each(ids).logits.double() for each in (exact, model, converted))
        once_more = convert_conv1d_to_linear(converted, Conv1D)(ids).logits.double()
    error, own = (found - wanted).abs().max().item(), (plain - wanted).abs().max().item()
    assert error <= 2 * own, (error, own)
    assert torch.equal(once_more, found), (once_more, found)
    config = {"weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_groups": 24, "quantize_weight_in_forward": True},
        "different_groups": {"all": {"params": {"target_bits": 8}, "modules": ["attn.c_attn", "mlp.c_fc"]}},
    }}  # fmt: skip
    with torch.no_grad():
        quantized = init_compression(converted, {"compression_training": config})(ids).logits.double()
    change = (quantized - wanted).abs().max().item()
    assert own < change < 0.1, (change, own)


def test_what_stays_in_the_model() -> None:
    """Parameters are the same objects, so an optimizer that is there holds them, and a layer with two names stays one."""
    layer, other = Conv1D(5, 7), Conv1D(5, 7)
    other.weight = layer.weight
    model = nn.ModuleDict({"a": layer, "b": layer, "c": other})
    model.c.eval()
    model.c.weight.requires_grad_(False)
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    layer.weight.grad = torch.arange(35.0).view(7, 5)
    weight, old = layer.weight, layer.weight.detach().clone()
    convert_conv1d_to_linear(model, Conv1D)
    assert model.a is model.b and model.a.weight is model.c.weight is weight and not weight.requires_grad
    assert torch.equal(weight, old.T), (weight, old)
    assert torch.equal(weight.grad, torch.arange(35.0).view(7, 5).T), weight.grad
    assert model.a.training and not model.c.training
    model.a(torch.ones(7))
    assert seen == ["hook"], seen


class Scaled(Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Plain(nn.Module):
    """As Conv1D, without a bias."""

    def __init__(self, n_out: int, n_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_a_class_without_a_bias() -> None:
    model, x = nn.Sequential(Plain(3, 4)), torch.randn(5, 4)
    wanted = model(x)
    found = convert_conv1d_to_linear(model, Plain)(x)
    assert model[0].bias is None and torch.allclose(found, wanted, rtol=0, atol=1e-5), (found, wanted)


def test_what_is_refused_changes_nothing() -> None:
    tied = nn.ModuleDict({"first": Conv1D(5, 7), "table": nn.Embedding(7, 5), "layer": Conv1D(5, 7)})
    tied.layer.weight = tied.table.weight
    patched = nn.Sequential(Conv1D(5, 7))
    patched[0].forward = patched[0].forward
    for model, kind, text in (
        (tied, Conv1D, "layer: it shares its weight with table, a Embedding"),
        (nn.Sequential(Conv1D(5, 7), Scaled(5, 7)), Conv1D, "1: the Scaled has its own forward"),
        (patched, Conv1D, "own forward"),
        (nn.Sequential(nn.Conv1d(3, 4, 2)), nn.Conv1d, "3 dimensions"),
        (nn.Sequential(nn.ReLU()), nn.ReLU, "no weight"),
    ):
        types = [type(module) for module in model.modules()]
        shapes = [tuple(param.shape) for param in model.parameters()]
        with pytest.raises(ModelError) as caught:
            convert_conv1d_to_linear(model, kind)
        assert text in str(caught.value), caught.value
        assert types == [type(module) for module in model.modules()], model
        assert shapes == [tuple(param.shape) for param in model.parameters()], model


@on_ranks(2)
def test_a_model_of_zero_init(rank: int, world: int) -> None:
    plain = convert_conv1d_to_linear(gpt2(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0), Conv1D)
    settings = config(3, "AdamW", lr=0.01, zero={"stage3_param_persistence_threshold": 0})
    with deepspeed_c.zero.Init(config_dict_or_path=settings):
        model = gpt2(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    held = model.transformer.h[0].attn.c_attn.weight
    with deepspeed_c.zero.GatheredParameters(held), pytest.raises(StateError, match="outside such contexts"):
        convert_conv1d_to_linear(model, Conv1D)
    assert held.ds_shape == (24, 72), held.ds_shape
    convert_conv1d_to_linear(model, Conv1D)
    assert held.ds_shape == (72, 24) and state_of(held).stand_in.shape == (72, 24)
    assert model.transformer.h[1].mlp.c_fc.in_features == 24 and model.transformer.h[1].mlp.c_fc.out_features == 96
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        with deepspeed_c.zero.GatheredParameters(param):
            assert torch.equal(param, wanted), name
    losses = []
    for each in (model, plain):
        engine = engine_of(each, settings)
        ids = (torch.arange(11) + rank).view(1, 11)
        losses.append([])
        for _ in range(3):
            losses[-1].append(update(engine, engine(ids, labels=ids).loss))
        engine.close()
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0], losses
    engine = engine_of(nn.Sequential(Conv1D(5, 7)), settings)
    with pytest.raises(StateError, match=r"before deepspeed_c\.initialize"):
        convert_conv1d_to_linear(engine.module, Conv1D)
    assert type(engine.module[0]) is Conv1D and engine.module[0].weight.ds_shape == (7, 5)
    engine.close()
