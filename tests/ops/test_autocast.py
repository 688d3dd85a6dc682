"""Operators under autocast, compared with torch's own operators under the same autocast: dtypes, values, gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_c.ops import nn
from deepspeed_c.ops.autocast import cast_by_autocast, without_autocast
from deepspeed_c.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

BF16 = torch.bfloat16


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def test_operands_are_cast_as_torchs() -> None:
    """torch's product under autocast is the reference for every dtype: it raises where dtypes stay different."""
    for dtype in (torch.float32, BF16, torch.float16, torch.float64):
        x, weight = numbers(1, 3, 5, dtype=dtype), numbers(2, 4, 5, dtype=dtype)
        with torch.autocast("cpu", BF16):
            wanted = F.linear(x, weight).dtype
            found = [each.dtype for each in cast_by_autocast(x, weight)]
        assert found == [wanted] * 2, f"{dtype}: {found}, torch computes in {wanted}"
    x, ids = numbers(1, 3), torch.arange(3)
    assert cast_by_autocast(x, None)[0] is x
    with torch.autocast("cpu", BF16):
        assert cast_by_autocast(x, None, ids)[1:] == (None, ids)
        with without_autocast(x):
            assert cast_by_autocast(x)[0] is x


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32, BF16), (torch.float32,) * 3])
def test_attention(dtypes: tuple[torch.dtype, ...]) -> None:
    results = []
    for attend in (F.scaled_dot_product_attention, nn.attention):
        q, k, v = (numbers(i, 2, 3, 37, 16, dtype=dtype) for i, dtype in enumerate(dtypes))
        with torch.autocast("cpu", BF16):
            out = attend(q, k, v)
        gradient = numbers(9, *out.shape, dtype=out.dtype).detach()
        results.append((out, *torch.autograd.grad(out, (q, k, v), gradient)))
    for wanted, got in zip(*results, strict=True):
        assert got.dtype == wanted.dtype, f"{got.dtype}, torch has {wanted.dtype}"
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


ELEMENTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "bias_dropout_residual": (
        lambda x, bias, wide: nn.bias_dropout_residual(x, bias, wide, 0.0),
        lambda x, bias, wide: wide + (x + bias.to(x.dtype)),
    ),
    "bias_gelu": (lambda x, bias, wide: nn.bias_gelu(x, bias), lambda x, bias, wide: F.gelu(x + bias.to(x.dtype))),
    "swiglu": (lambda x, bias, wide: nn.swiglu(x, wide), lambda x, bias, wide: F.silu(x) * wide),
    "layer_norm": (
        lambda x, bias, wide: nn.layer_norm(wide, bias, bias),
        lambda x, bias, wide: F.layer_norm(wide, bias.shape, bias, bias),
    ),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_what_lies_between_products(name: str) -> None:
    """x comes from a product of autocast and is bfloat16; parameters and the stream past the layer are float32."""
    ours, formula = ELEMENTS[name]
    inputs = numbers(1, 5, 33, dtype=BF16), numbers(2, 33), numbers(3, 5, 33)
    with torch.autocast("cpu", BF16):
        got, wanted = ours(*inputs), formula(*inputs)
    assert got.dtype == wanted.dtype, f"{got.dtype}, torch has {wanted.dtype}"
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    gradient = numbers(9, 5, 33).detach().to(got.dtype)
    pairs = (torch.autograd.grad(out, inputs, gradient, allow_unused=True) for out in (got, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=4e-2, atol=6e-2)


class Plain(torch.nn.Module):
    """DeepSpeed's transformer layer made of torch's modules, which autocast knows."""

    def __init__(self, layer: DeepSpeedTransformerLayer) -> None:
        super().__init__()
        self.p = torch.nn.ParameterDict({name: p.detach().clone() for name, p in layer.named_parameters()})
        self.config = layer.config

    def forward(self, x: Tensor) -> Tensor:
        p, n_heads = self.p, self.config.heads

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], p[f"{name}w"], p[f"{name}b"], self.config.layer_norm_eps)

        def attend(x: Tensor) -> Tensor:
            parts = F.linear(x, p["attn_qkvw"], p["attn_qkvb"]).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (n_heads, -1)).transpose(1, 2) for part in parts)
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
            return F.linear(out, p["attn_ow"], p["attn_ob"])

        def feed(x: Tensor) -> Tensor:
            inner = F.gelu(F.linear(x, p["inter_w"], p["inter_b"]), approximate="tanh")
            return F.linear(inner, p["output_w"], p["output_b"])

        if self.config.pre_layer_norm:
            added = x + attend(norm(x, "norm_"))
            return added + feed(norm(added, "attn_n"))
        middle = norm(x + attend(x), "attn_n")
        return norm(middle + feed(middle), "norm_")


@pytest.mark.parametrize(
    "pre_layer_norm, normalize_invertible, gelu_checkpoint", list(itertools.product([False, True], repeat=3))
)
def test_a_transformer_layer(pre_layer_norm: bool, normalize_invertible: bool, gelu_checkpoint: bool) -> None:
    torch.manual_seed(1)
    layer = DeepSpeedTransformerLayer(
        DeepSpeedTransformerConfig(
            hidden_size=24, heads=3, num_hidden_layers=2, initializer_range=0.3, pre_layer_norm=pre_layer_norm,
            normalize_invertible=normalize_invertible, gelu_checkpoint=gelu_checkpoint,
        )
    )  # fmt: skip
    with torch.no_grad():
        for param in layer.parameters():
            if param.dim() == 1:
                param.add_(0.3 * torch.randn_like(param))
    plain = Plain(layer)
    x = numbers(2, 2, 13, 24).detach()
    with torch.autocast("cpu", BF16):
        got, wanted = layer(x), plain(x)
    assert got.dtype == wanted.dtype == torch.float32
    assert (got - wanted).abs().max() < 0.05 * wanted.abs().max()
    gradient = numbers(9, *got.shape).detach()
    got.backward(gradient)
    wanted.backward(gradient)
    for name, param in layer.named_parameters():
        want = plain.p[name].grad
        assert param.grad.dtype == torch.float32
        assert (param.grad - want).norm() < 0.05 * want.norm(), f"{name}: {param.grad.norm()} and {want.norm()}"
