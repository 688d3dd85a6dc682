"""Compares DeepSpeed's transformer layer with the same layer built from torch's operators."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import torch.nn.functional as F

from deepspeed_c.errors import BackwardError, ConfigError, ModelError
from deepspeed_c.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer


def config(**changes):
    settings = {"hidden_size": 24, "heads": 3, "num_hidden_layers": 2, "initializer_range": 0.3, "layer_norm_eps": 1e-5}
    return DeepSpeedTransformerConfig(**{**settings, **changes})


def made(**changes):
    torch.manual_seed(1)
    layer = DeepSpeedTransformerLayer(config(**changes))
    with torch.no_grad():
        for param in layer.parameters():
            if param.dim() == 1:  # so that biases are not zero and norm weights not one
                param.add_(0.3 * torch.randn_like(param))
    return layer


def plain(layer, x, mask):
    """The layer by its textbook formula, in float64."""
    p = {name: param.detach().double().requires_grad_() for name, param in layer.named_parameters()}
    heads = layer.config.heads

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], p[f"{name}w"], p[f"{name}b"], layer.config.layer_norm_eps)

    def attend(x):
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in F.linear(x, p["attn_qkvw"], p["attn_qkvb"]).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores if mask is None else scores + mask.double()
        return F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2), p["attn_ow"], p["attn_ob"])

    def feed(x):
        inner = F.gelu(F.linear(x, p["inter_w"], p["inter_b"]), approximate="tanh")
        return F.linear(inner, p["output_w"], p["output_b"])

    if layer.config.pre_layer_norm:
        added = x + attend(norm(x, "norm_"))
        return added + feed(norm(added, "attn_n")), p
    middle = norm(x + attend(x), "attn_n")
    return norm(middle + feed(middle), "norm_"), p


@pytest.mark.parametrize("pre_layer_norm", [False, True])
@pytest.mark.parametrize("normalize_invertible, gelu_checkpoint", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_values_and_gradients(pre_layer_norm, normalize_invertible, gelu_checkpoint, tokens):
    layer = made(
        pre_layer_norm=pre_layer_norm, normalize_invertible=normalize_invertible, gelu_checkpoint=gelu_checkpoint
    )
    x = torch.randn(2, tokens, 24, requires_grad=True)
    mask = torch.zeros(2, 1, 1, tokens)
    mask[1, ..., tokens // 2 + 1 :] = -10000.0
    wide = x.detach().double().requires_grad_()
    want, params = plain(layer, wide, mask)
    got = layer(x, mask)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(got)
    got.backward(gradient)
    want.backward(gradient.double())
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-3, atol=1e-3)
    for name, param in layer.named_parameters():
        torch.testing.assert_close(param.grad.double(), params[name].grad, rtol=1e-3, atol=1e-3, msg=name)


def test_what_the_backward_does_not_keep():
    def kept_bytes(**changes):
        layer, sizes = made(**changes), {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(torch.randn(2, 16, 24, requires_grad=True))
        return sum(sizes.values())

    tokens, hidden = 2 * 16, 24
    plainly = kept_bytes()
    assert plainly - kept_bytes(gelu_checkpoint=True) == 4 * tokens * 4 * hidden
    # In BERT's order (post-norm) the inputs of both norms are dropped, and the mean of each row too.
    bert = kept_bytes(pre_layer_norm=False) - kept_bytes(pre_layer_norm=False, normalize_invertible=True)
    assert bert >= 2 * 4 * tokens * hidden - 4 * tokens * hidden, bert


def test_dropout_and_evaluation():
    layer, x = made(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.3), torch.randn(2, 7, 24)
    torch.manual_seed(5)
    first = layer(x)
    torch.manual_seed(5)
    assert torch.equal(first, layer(x)) and not torch.equal(first, layer(x))
    layer.eval()
    torch.testing.assert_close(layer(x).double(), plain(layer, x.double(), None)[0], rtol=1e-4, atol=1e-4)


def test_bfloat16_and_a_tuple():
    layer = made(return_tuple=True).to(torch.bfloat16)
    x = torch.randn(2, 7, 24, dtype=torch.bfloat16)
    (got,) = layer(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), plain(layer, x.double(), None)[0], rtol=0.1, atol=0.1)


def test_initial_weights_and_gradients_by_name():
    hidden, inner = 24, 96
    shapes = [(hidden, hidden)] * 4 + [(hidden,), (inner, hidden), (hidden, inner), (hidden,)]
    weights = [torch.randn(shape) for shape in shapes]
    biases = [torch.randn(shape[0]) for shape in shapes]
    layer = DeepSpeedTransformerLayer(config(), weights, biases)
    assert torch.equal(layer.attn_qkvw, torch.cat(weights[:3])) and torch.equal(layer.norm_b, biases[7])
    assert torch.count_nonzero(layer.attn_qkvb) == 0
    grads = []
    layer(torch.randn(1, 3, hidden), grads=grads).sum().backward()
    assert sorted(name for _, name in grads) == sorted(name for name, _ in layer.named_parameters())
    with pytest.raises(ModelError, match=r"attn_ow is given as \(3, 3\), and is \(24, 24\)"):
        DeepSpeedTransformerLayer(config(), [*weights[:3], torch.ones(3, 3), *weights[4:]])


def test_configurations(tmp_path):
    path = tmp_path / "layer.json"
    for encoding in ("utf-8", "utf-16"):
        path.write_text(json.dumps({"hidden_size": 8, "heads": 2}), encoding=encoding)
        read = DeepSpeedTransformerConfig.from_json_file(path)
        assert (read.hidden_size, read.intermediate_size, read.heads) == (8, 32, 2)
    with pytest.raises(ConfigError, match="'hidden' is no setting"):
        DeepSpeedTransformerConfig.from_dict({"hidden": 3})
    with pytest.raises(ConfigError, match="hidden_size is 10 and heads is 3"):
        DeepSpeedTransformerLayer(config(hidden_size=10))
    with pytest.raises(ConfigError, match=r"hidden_dropout_ratio is 1\.5"):
        DeepSpeedTransformerLayer(config(hidden_dropout_ratio=1.5))
    with pytest.raises(ConfigError, match="num_hidden_layers is -1"):
        DeepSpeedTransformerLayer(config(num_hidden_layers=-1))
    with pytest.raises(ValueError, match="has no past_key_value"):
        made()(torch.randn(1, 2, 24), past_key_value=1)


def test_layers_are_smaller_at_the_end_of_a_residual_connection():
    torch.manual_seed(0)
    layer = DeepSpeedTransformerLayer(config(hidden_size=240, num_hidden_layers=8))
    assert float(layer.inter_w.detach().std()) == pytest.approx(0.3, rel=0.02)
    assert float(layer.output_w.detach().std()) == pytest.approx(0.3 / 4, rel=0.02)


@pytest.mark.parametrize("changes", [{}, {"normalize_invertible": True}, {"gelu_checkpoint": True}])
def test_a_second_derivative_is_an_error(changes):
    layer, x = made(**changes), torch.randn(1, 3, 24, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(BackwardError, match="a second derivative is taken through"):
        (gradient.pow(2).sum() + x.sum()).backward()
