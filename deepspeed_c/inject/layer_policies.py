"""The places of the parts of a transformer layer in Hugging Face's classes, for ``replace_transformer_layer``.

Each policy takes one layer and returns its weights in the order of DeepSpeed's layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.ops import nn
from deepspeed_c.ops.transformer import DeepSpeedTransformerConfig

__all__ = [
    "LAYER_POLICIES",
    "HFBertLayerPolicy",
    "HFDistilBertLayerPolicy",
    "LayerParts",
    "layer_classes",
    "policy_for",
]

_FIX = "replace_with_kernel_inject swaps kernels into any model, and leaves its layers"


class LayerParts(NamedTuple):
    """The modules of a layer, each by its function."""

    query: torch.nn.Module
    key: torch.nn.Module
    value: torch.nn.Module
    out: torch.nn.Module
    attention_norm: torch.nn.Module
    inner: torch.nn.Module
    outer: torch.nn.Module
    norm: torch.nn.Module


class HFBertLayerPolicy:
    """A layer of BERT or of models built like BERT. ``pre_attn_norm``: the norms come first (Turing's variants).

    client_module: the layer. inference: stored, but has no effect: the same layer serves training and inference.
    """

    classes = (
        "transformers.models.bert.modeling_bert:BertLayer",
        "transformers.models.roberta.modeling_roberta:RobertaLayer",
        "transformers.models.electra.modeling_electra:ElectraLayer",
    )

    def __init__(self, client_module: torch.nn.Module | None, inference: bool = False) -> None:
        self.client_module, self.inference = client_module, inference
        self.pre_attn_norm = hasattr(client_module, "PreAttentionLayerNorm")

    def parts(self) -> LayerParts:
        """The layer's modules."""
        layer: Any = self.client_module
        own = layer.attention.self
        norms = (layer.attention.output, layer.output)
        first, second = (norm.LayerNorm for norm in norms) if not self.pre_attn_norm else (None, None)
        return LayerParts(
            *(own.query, own.key, own.value, layer.attention.output.dense),
            layer.PostAttentionLayerNorm if self.pre_attn_norm else first,
            layer.intermediate.dense_act if self.pre_attn_norm else layer.intermediate.dense,
            layer.output.dense,
            layer.PreAttentionLayerNorm if self.pre_attn_norm else second,
        )

    def attention(self, enable_training: bool = False) -> tuple[torch.Tensor, ...]:
        """(weight [3 * hidden, hidden] and bias of query, key and value; weight and bias of the output projection)."""
        parts = self.parts()
        qkv = (parts.query, parts.key, parts.value)
        weight = torch.cat([part.weight.detach() for part in qkv])
        bias = torch.cat([part.bias.detach() for part in qkv])
        made = [torch.nn.Parameter(value, requires_grad=enable_training) for value in (weight, bias)]
        return (*made, parts.out.weight, parts.out.bias)

    def mlp(self, enable_training: bool = False) -> tuple[torch.Tensor, ...]:
        """(weight [inner, hidden] and bias of the first projection, weight and bias of the second projection)."""
        parts = self.parts()
        return parts.inner.weight, parts.inner.bias, parts.outer.weight, parts.outer.bias

    def layernorm(self) -> tuple[torch.Tensor, ...]:
        """(weight and bias of the attention's norm, weight and bias of the other norm)."""
        parts = self.parts()
        return parts.attention_norm.weight, parts.attention_norm.bias, parts.norm.weight, parts.norm.bias

    def n_heads(self) -> int:
        """Number of heads of the attention."""
        return self.client_module.attention.self.num_attention_heads

    def get_hidden_heads(self) -> tuple[int, int, float, int]:
        """(hidden size, number of heads, epsilon of the norms, inner size)."""
        parts = self.parts()
        return parts.query.weight.shape[1], self.n_heads(), parts.norm.eps, parts.inner.weight.shape[0]

    def activation(self) -> Callable[..., torch.Tensor]:
        """The function between the two projections of the MLP."""
        layer: Any = self.client_module
        return torch.nn.functional.gelu if self.pre_attn_norm else layer.intermediate.intermediate_act_fn

    def dropouts(self) -> tuple[float, float]:
        """Return (the dropout ratio of attention weights, the dropout ratio of values added to the residual). Raises
        ModelError where the layer has other ratios.
        """
        layer: Any = self.client_module
        return _ratio(layer.attention.self.dropout), _ratio(layer.output.dropout)

    def config(self) -> DeepSpeedTransformerConfig:
        """Return the configuration of a DeepSpeedTransformerLayer that computes the same as the layer. Raises
        ModelError where there is none."""
        layer: Any = self.client_module
        for name, value in (("decoder", "is_decoder"), ("cross attention", "add_cross_attention")):
            if getattr(layer, value, False):
                raise ModelError(f"{type(layer).__name__} is a layer with {name}", where=type(self).__name__, fix=_FIX)
        hidden, heads, eps, inner = self.get_hidden_heads()
        attention_dropout, hidden_dropout = self.dropouts()
        return DeepSpeedTransformerConfig.from_dict(
            {
                "hidden_size": hidden,
                "intermediate_size": inner,
                "heads": heads,
                "attn_dropout_ratio": attention_dropout,
                "hidden_dropout_ratio": hidden_dropout,
                "layer_norm_eps": eps,
                "adjust_init_range": False,
                "pre_layer_norm": self.pre_attn_norm,
                "act": _name_of(self.activation(), type(layer).__name__),
            }
        )


class HFDistilBertLayerPolicy(HFBertLayerPolicy):
    """DistilBERT's layer. It applies dropout after the MLP, but not after the attention."""

    classes = ("transformers.models.distilbert.modeling_distilbert:TransformerBlock",)

    def parts(self) -> LayerParts:
        layer: Any = self.client_module
        own, ffn = layer.attention, layer.ffn
        norms = layer.sa_layer_norm, layer.output_layer_norm
        return LayerParts(own.q_lin, own.k_lin, own.v_lin, own.out_lin, norms[0], ffn.lin1, ffn.lin2, norms[1])

    def n_heads(self) -> int:
        return self.client_module.attention.n_heads

    def activation(self) -> Callable[..., torch.Tensor]:
        return self.client_module.ffn.activation

    def dropouts(self) -> tuple[float, float]:
        layer: Any = self.client_module
        ratio = _ratio(layer.ffn.dropout)
        if ratio > 0 and not self.inference:
            raise ModelError(
                f"it drops out {ratio} behind its network alone, DeepSpeed's layer behind the attention too",
                where=type(layer).__name__,
                fix=f"set its dropout to 0, or replace it for inference; {_FIX}",
            )
        return _ratio(layer.attention.dropout), 0.0


LAYER_POLICIES: tuple[type[HFBertLayerPolicy], ...] = (HFBertLayerPolicy, HFDistilBertLayerPolicy)
"""The policies that ``replace_transformer_layer`` uses if the caller gives none."""


def policy_for(kind: type) -> type[HFBertLayerPolicy] | None:
    """The policy for layers of the class ``kind``; None if there is none."""
    path = f"{kind.__module__}:{kind.__qualname__}"
    return next((policy for policy in LAYER_POLICIES if path in policy.classes), None)


def layer_classes() -> dict[type, type[HFBertLayerPolicy]]:
    """The classes of layers that the policies are for, as far as the installed transformers has them, and their
    policies.
    """
    found: dict[type, type[HFBertLayerPolicy]] = {}
    for policy in LAYER_POLICIES:
        for path in policy.classes:
            module, _, name = path.partition(":")
            try:
                found[getattr(importlib.import_module(module), name)] = policy
            except (ImportError, AttributeError):
                continue  # transformers is older and lacks the class, or is not installed
    return found


def _ratio(dropout: Any) -> float:
    return float(getattr(dropout, "p", dropout))


def _name_of(function: Callable[..., torch.Tensor], where: str) -> str:
    x = torch.linspace(-6.0, 6.0, 97)
    for act in get_args(nn.Act):
        if torch.allclose(function(x.clone()), nn.bias_act(x, None, act), rtol=1e-5, atol=2e-6):
            return act
    raise ModelError(
        f"no kernel computes its activation {getattr(function, '__name__', type(function).__name__)}",
        where=where,
        fix="leave such layers as they are",
    )
