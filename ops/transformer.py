"""DeepSpeed's transformer layer, built from fused operators: BERT's layer (arXiv 1810.04805), or this layer with GPT's
order of norms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.ops import nn
from deepspeed_c.ops.autocast import cast_by_autocast
from deepspeed_c.ops.first_derivative import first_derivative_only

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]

_WHERE = "DeepSpeedTransformerConfig"


class DeepSpeedTransformerConfig:
    """The shape of a layer, and the parts that its backward recomputes to save memory.

    hidden_size, heads: of the layer; heads divide hidden_size. intermediate_size: by default 4 * hidden_size.
    attn_dropout_ratio, hidden_dropout_ratio: probabilities; -1 is 0. pre_layer_norm: each norm comes before its half of
    the layer (GPT), not after its residual connection (BERT). normalize_invertible: norms save their results instead of
    their inputs, and the backward recomputes the inputs, so norm weights must not be 0. gelu_checkpoint: the activation
    is computed again. adjust_init_range: projections before a residual connection are initialised smaller, by the
    factor sqrt(2 * num_hidden_layers). return_tuple: ``forward`` returns (output,). ``act``, by ``from_dict``: the
    activation.

    These have no effect here: batch_size, seed (random numbers come from torch's generator), local_rank, fp16
    (parameters have the dtype that the module is given), attn_dropout_checkpoint (attention saves no dropped
    probabilities), stochastic_mode (results have the same bits in every run).
    """

    def __init__(
        self,
        batch_size: int = -1,
        hidden_size: int = -1,
        intermediate_size: int = -1,
        heads: int = -1,
        attn_dropout_ratio: float = -1,
        hidden_dropout_ratio: float = -1,
        num_hidden_layers: int = -1,
        initializer_range: float = -1,
        layer_norm_eps: float = 1e-12,
        local_rank: int = -1,
        seed: int = -1,
        fp16: bool = False,
        pre_layer_norm: bool = True,
        normalize_invertible: bool = False,
        gelu_checkpoint: bool = False,
        adjust_init_range: bool = True,
        attn_dropout_checkpoint: bool = False,
        stochastic_mode: bool = False,
        return_tuple: bool = False,
        training: bool = True,
    ) -> None:
        self.layer_id = -1
        self.act: nn.Act = "gelu_tanh"  # activation of the replaced layer, if there is one
        self.batch_size = batch_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size if intermediate_size > 0 else 4 * hidden_size
        self.heads = heads
        self.attn_dropout_ratio = attn_dropout_ratio
        self.hidden_dropout_ratio = hidden_dropout_ratio
        self.num_hidden_layers = num_hidden_layers
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        self.local_rank = local_rank
        self.seed = seed
        self.fp16 = fp16
        self.pre_layer_norm = pre_layer_norm
        self.normalize_invertible = normalize_invertible
        self.gelu_checkpoint = gelu_checkpoint
        self.adjust_init_range = adjust_init_range
        self.attn_dropout_checkpoint = attn_dropout_checkpoint
        self.stochastic_mode = stochastic_mode
        self.return_tuple = return_tuple
        self.training = training

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> DeepSpeedTransformerConfig:
        """The settings by their names. Raises ConfigError for an unknown name."""
        made = cls()
        for key, value in json_object.items():
            if key not in vars(made):
                raise ConfigError(
                    f"{key!r} is no setting of a transformer layer",
                    where=_WHERE,
                    fix=f"there are {', '.join(vars(made))}",
                )
            setattr(made, key, value)
        if "intermediate_size" not in json_object:
            made.intermediate_size = 4 * made.hidden_size
        return made

    @classmethod
    def from_json_file(cls, json_file: str) -> DeepSpeedTransformerConfig:
        """The settings in a JSON file, of UTF-8 or (as DeepSpeed writes it) UTF-16 with its mark."""
        with open(json_file, "rb") as file:
            data = file.read()
        is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        return cls.from_dict(json.loads(data.decode("utf-16" if is_utf16 else "utf-8")))

    def check(self) -> None:
        """Raises ConfigError for sizes that fit no layer."""
        if self.hidden_size < 1 or self.heads < 1 or self.hidden_size % self.heads:
            raise ConfigError(
                f"hidden_size is {self.hidden_size} and heads is {self.heads}",
                where=_WHERE,
                fix="give both, hidden_size a multiple of heads",
            )
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", where=_WHERE, fix="give a probability, or -1 for none"
                )
        if self.adjust_init_range and self.initializer_range > 0 and self.num_hidden_layers < 1:
            raise ConfigError(
                f"adjust_init_range needs the number of layers, and num_hidden_layers is {self.num_hidden_layers}",
                where=_WHERE,
                fix="give num_hidden_layers, or adjust_init_range=False",
            )


class _InvertibleNorm(torch.autograd.Function):
    """A layer norm that saves its result and not its input. The next matrix product saves that result anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, _, _, rstd = torch.ops.deepspeed_c.nn_norm(x, None, weight, bias, eps, False)
        ctx.save_for_backward(y, weight, bias, rstd)
        return y

    @staticmethod
    @first_derivative_only("an invertible norm of DeepSpeedTransformerLayer")
    def backward(ctx: Any, dy: Tensor) -> tuple:
        y, weight, bias, rstd = ctx.saved_tensors
        # The normalised rows have mean 0 and variance 1, so dx is the gradient of a norm of these rows, times rstd.
        normed = (y - bias) / weight
        unit = torch.ones_like(rstd)
        dx, dweight, dbias = torch.ops.deepspeed_c.nn_norm_backward(
            dy, None, normed, weight, torch.zeros_like(rstd), unit, False, True, True, bias
        )
        return dx * rstd.to(dx.dtype).view(*dx.shape[:-1], 1), dweight, dbias, None


class _ActThenLinear(torch.autograd.Function):
    """act(x + bias) @ weight.T; the backward computes the activation again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, weight: Tensor, act: nn.Act) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(x, bias, weight)
        return F.linear(nn.bias_act(x, bias, ctx.act), weight)

    @staticmethod
    @first_derivative_only("the feed-forward network of DeepSpeedTransformerLayer")
    def backward(ctx: Any, dy: Tensor) -> tuple:
        x, bias, weight = ctx.saved_tensors
        act = nn.bias_act(x, bias, ctx.act)
        dweight = dy.flatten(0, -2).t() @ act.flatten(0, -2)
        dx, dbias = torch.ops.deepspeed_c.nn_bias_act_backward(dy @ weight, x, bias, ctx.act, True)
        return dx, dbias, dweight, None


class DeepSpeedTransformerLayer(torch.nn.Module):
    """Attention and a feed-forward network with their norms, dropouts and residual connections.

    On the CPU each step between the matrix products is one operator of ``deepspeed_c.ops.nn``, forward and backward. On
    other devices the steps are operators of torch. Attention is torch's scaled_dot_product_attention. Takes any length,
    and any dtype of these operators.

    initial_weights, initial_biases: for query, key, value, attention's projection, attention's norm, the network's two
    projections and its norm, in this order. The biases of query, key and value start at 0. Raises ConfigError for
    invalid sizes, and ModelError for weights of wrong shapes.
    """

    # Layers of this process are numbered, as in DeepSpeed.
    layer_id = 0

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.layer_id = DeepSpeedTransformerLayer.layer_id
        config.layer_id = self.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = {
            "attn_qkvw": (3 * hidden, hidden),
            "attn_qkvb": (3 * hidden,),
            "attn_ow": (hidden, hidden),
            "attn_ob": (hidden,),
            "attn_nw": (hidden,),
            "attn_nb": (hidden,),
            "inter_w": (inner, hidden),
            "inter_b": (inner,),
            "output_w": (hidden, inner),
            "output_b": (hidden,),
            "norm_w": (hidden,),
            "norm_b": (hidden,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))
        self.init_transformer_weights(config.adjust_init_range)
        if initial_weights is not None:
            self._begin_with("attn_qkvw", torch.cat([weight.detach() for weight in initial_weights[:3]]))
            for name, weight in zip(("attn_ow", "attn_nw", "inter_w", "output_w", "norm_w"), initial_weights[3:]):
                self._begin_with(name, weight)
        if initial_biases is not None:
            for name, bias in zip(("attn_ob", "attn_nb", "inter_b", "output_b", "norm_b"), initial_biases[3:]):
                self._begin_with(name, bias)

    def _begin_with(self, name: str, values: Tensor) -> None:
        param = self.get_parameter(name)
        if values.shape != param.shape:
            raise ModelError(
                f"{name} is given as {tuple(values.shape)}, and is {tuple(param.shape)}",
                where="DeepSpeedTransformerLayer",
                fix="give weights of the configuration's sizes",
            )
        param.data.copy_(values.detach())

    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Matrices normal with ``initializer_range``, biases 0, norms 1."""
        std = max(self.config.initializer_range, 0.0)
        ending = std / math.sqrt(2.0 * self.config.num_hidden_layers) if adjust_init_range and std > 0 else std
        with torch.no_grad():
            for name, param in self.named_parameters():
                if name in ("attn_nw", "norm_w"):
                    param.fill_(1.0)
                elif param.dim() == 1:
                    param.zero_()
                else:
                    param.normal_(std=ending if name in ("attn_ow", "output_w") else std)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Any = None,
        layer_head_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: list | None = None,
    ) -> Any:
        """hidden_states: [batch, tokens, hidden_size] -> the same shape, in a tuple with ``return_tuple``.

        attention_mask: added to the scores, broadcasts to [batch, heads, tokens, tokens]; or bool, True takes part.
        grads: a list that gets [gradient, name] of each parameter in the backward. The other arguments exist because
        callers pass them. They raise ValueError unless they have no effect.
        """
        for name, value in (
            ("head_mask", head_mask),
            ("layer_head_mask", layer_head_mask),
            ("encoder_hidden_states", encoder_hidden_states),
            ("encoder_attention_mask", encoder_attention_mask),
            ("past_key_value", past_key_value),
        ):
            if value is not None:
                raise ValueError(f"DeepSpeedTransformerLayer has no {name}; leave it None")
        if output_attentions:
            raise ValueError("DeepSpeedTransformerLayer does not give attention probabilities")
        if grads is not None:
            for name, param in self.named_parameters():
                param.register_hook(lambda gradient, name=name: grads.append([gradient, name]))
        config = self.config
        if config.pre_layer_norm:
            attended = self._attend(self._norm(hidden_states, "norm"), attention_mask)
            added = self._join(attended, self.attn_ob, hidden_states)
            output = self._join(self._feed(self._norm(added, "attn_n")), self.output_b, added)
        else:
            attended = self._attend(hidden_states, attention_mask)
            middle = self._norm(self._join(attended, self.attn_ob, hidden_states), "attn_n")
            output = self._norm(self._join(self._feed(middle), self.output_b, middle), "norm")
        return (output,) if config.return_tuple else output

    def _norm(self, x: Tensor, which: str) -> Tensor:
        weight, bias = (self.attn_nw, self.attn_nb) if which == "attn_n" else (self.norm_w, self.norm_b)
        if self.config.normalize_invertible and x.device.type == "cpu":
            return _InvertibleNorm.apply(x, weight, bias, self.config.layer_norm_eps)
        return nn.layer_norm(x, weight, bias, self.config.layer_norm_eps)

    def _join(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        ratio = max(self.config.hidden_dropout_ratio, 0.0)
        return nn.bias_dropout_residual(x, bias, residual, ratio, training=self.training)

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = self.config.heads
        projected = F.linear(x, self.attn_qkvw, self.attn_qkvb)
        query, key, value = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        if mask is not None and mask.dtype not in (torch.bool, x.dtype):
            mask = mask.to(x.dtype)
        ratio = max(self.config.attn_dropout_ratio, 0.0) if self.training else 0.0
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=ratio)
        return F.linear(context.transpose(1, 2).flatten(-2), self.attn_ow)

    def _feed(self, x: Tensor) -> Tensor:
        inner = F.linear(x, self.inter_w)
        if self.config.gelu_checkpoint and x.device.type == "cpu":
            # Cast outside, because autocast is off in a backward.
            return _ActThenLinear.apply(*cast_by_autocast(inner, self.inter_b, self.output_w), self.config.act)
        return F.linear(nn.bias_act(inner, self.inter_b, self.config.act), self.output_w)
