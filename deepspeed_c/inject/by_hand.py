"""Layers that DeepSpeed's users name by hand, in addition to ``layers``, and the switch for training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepspeed_c.errors import ModelError
from deepspeed_c.inject.cut import keep_part
from deepspeed_c.inject.layers import LinearLayer, RowPicker, TensorParallelLayer
from deepspeed_c.inject.parts import cut_along, parts_of
from deepspeed_c.inject.plan import Attention, Planned, RankPlace, RuleSet, find_attentions, match_rules
from deepspeed_c.inject.policy import find_policy
from deepspeed_c.inject.ranks import TensorRanks

__all__ = [
    "EmbeddingLayer",
    "GatherReplacedLayerParams",
    "fused_LinearLayer",
    "is_autotp_training_mode",
    "set_autotp_mode",
]


class EmbeddingLayer(torch.nn.Module):
    """An embedding table that every rank holds whole: ids of any shape to [*ids, width].

    weight: the table [vocab_size, width], kept as it is. Without ``weight`` a table of ``weight_shape`` and ``dtype``
    is allocated and not filled. DeepSpeed takes a bias and ignores it; here a bias is a ValueError.
    """

    def __init__(
        self,
        weight_shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.half,
        weight: torch.nn.Parameter | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        if bias is not None:
            raise ValueError("EmbeddingLayer has no bias to add; leave it None")
        if weight is None:
            if weight_shape is None or len(weight_shape) != 2:
                raise ValueError(
                    f"EmbeddingLayer needs a weight, or weight_shape (vocab_size, width), not {weight_shape}"
                )
            weight = torch.nn.Parameter(torch.empty(*weight_shape, dtype=dtype))
        self.weight = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class fused_LinearLayer(LinearLayer):
    """Query, key and value in one matrix, cut by columns: each rank gets whole heads of all three.

    The policy of the model's family says how the three lie in the matrix (one behind the other, head by head, with one
    key head). Afterwards ``n_heads`` and ``n_key_heads`` are this rank's counts, for the attention's computation.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mp_group: dist.ProcessGroup | TensorRanks | None,
        skip_partition: bool = False,
        *,
        fused_module: torch.nn.Module,
        name: str = "",
    ) -> None:
        """fused_module: the layer of the model that contains ``module``: an attention or a parent of one. Raises
        ModelError where its family has no policy, or where the policy cuts ``module`` in another way.
        """
        super().__init__(module, mp_group, skip_partition=True, name=name)
        place = RankPlace(self.ranks.rank, self.ranks.n_ranks)
        step, attention = _find_rule(fused_module, module, place, self.label)
        stripes = attention.heads.stripes
        self.n_heads = (attention.queries[1] - attention.queries[0]) * stripes
        self.n_key_heads = (attention.keys[1] - attention.keys[0]) * stripes
        if skip_partition or place.n_ranks == 1:
            return
        heads = (attention.n_heads, attention.n_key_heads)
        dims = [(self.weight, 1 if self.is_transposed else 0)] + ([] if self.bias is None else [(self.bias, 0)])
        # All cuts are computed first: if the weight or the bias is refused, neither is cut.
        cuts = [
            cut_along(param.shape, dim, *parts_of(step, param.shape[dim], 1, self.label), heads, place)
            for param, dim in dims
        ]
        for (param, dim), cut in zip(dims, cuts, strict=True):
            if isinstance(cut, list):  # ranks share a key head: the parameter stays whole, and each rank uses its part
                keep_part(param, None)
                self.pick(RowPicker(cut))
                self.ranks.sum_gradient(param, tuple(range(place.n_ranks)), self.label)
            else:
                keep_part(param, cut, dim)
                self.ranks.sum_gradient(param, cut.copies, self.label)


class GatherReplacedLayerParams:
    """Context within which parameters of linear layers that are cut over tensor-parallel ranks are whole on each of
    them. Values that are written to them stay. Collective over the ranks of the layers.

    params: a parameter or some; those that are not cut are left alone. module: a layer, or a module with layers, that
    has them. enabled: False makes the context do nothing. Raises ModelError for a cut parameter that belongs to no
    linear layer of ``module``.
    """

    def __init__(
        self, params: torch.Tensor | Iterable[torch.Tensor], module: torch.nn.Module, enabled: bool = True
    ) -> None:
        given = [params] if torch.is_tensor(params) else list(params)
        cut = {id(param): param for param in given if hasattr(param, "tp_cut")} if enabled else {}
        self._layers: list[tuple[TensorParallelLayer, list[torch.Tensor]]] = []
        for layer in module.modules():
            if isinstance(layer, TensorParallelLayer):
                own = [cut.pop(id(param)) for param in layer.parameters(recurse=False) if id(param) in cut]
                self._layers.append((layer, own))
        if cut:
            shapes = ", ".join(str(list(param.shape)) for param in cut.values())
            raise ModelError(
                f"{len(cut)} cut parameters ({shapes}) belong to no linear layer of {type(module).__name__}",
                where="GatherReplacedLayerParams",
                fix="pass the module that has them; engine.iter_full_weights() gives whole tensors of all layers",
            )

    def __enter__(self) -> None:
        for layer, params in self._layers:
            layer.gather_params(params)

    def __exit__(self, *_: object) -> None:
        for layer, params in self._layers:
            layer._tp_partition(params)


class _Inside(torch.nn.Module):
    """A module that gives its contents the names that they have in a model, because rules match the ends of names. The
    names start at an attention or at the layer around it.
    """

    def __init__(self, name: str, layer: torch.nn.Module) -> None:
        super().__init__()
        setattr(self, name, layer)


def _find_rule(
    layer: torch.nn.Module, linear: torch.nn.Module, place: RankPlace, label: str
) -> tuple[Planned, Attention]:
    """(the rule that cuts ``linear``, the attention around it)."""
    model_type = _model_type_of(layer)
    policy = find_policy(model_type)
    if policy is None:
        raise ModelError(
            f"no policy says how {type(linear).__name__} lies within {type(layer).__name__} (model type {model_type!r})",
            where=label,
            fix="use SubParamLinearLayer with the sizes of query, key and value, or add a policy"
            " (docs/adding/inject-policy.md)",
        )
    sets = [RuleSet(f"policy {model_type}", policy.rules, policy.heads)]
    names = ("attn", "attention", "self_attn", "self_attention")
    for root in (layer, *(_Inside(name, layer) for name in names)):
        attentions = find_attentions(root, sets, place)
        for step in match_rules(root, sets, attentions)[0]:
            if step.module is linear and step.rule.style == "column" and isinstance(step.attention, Attention):
                return step, step.attention
        refusals = [attention.refusal for attention in attentions.values() if attention.refusal]
        if refusals:
            raise ModelError(refusals[0], where=label, fix="use at most as many ranks as there are heads")
    raise ModelError(
        f"the policy of {model_type} cuts no such layer of {type(layer).__name__} by heads",
        where=label,
        fix="pass the projection of query, key and value as it is in the model, and the layer that holds it",
    )


def _model_type_of(layer: torch.nn.Module) -> str:
    for module in layer.modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        if model_type is not None:
            return model_type
    # For blocks without a configuration, the model type is the folder of transformers that has the class.
    folder = re.match(r"transformers\.models\.(\w+)\.", type(layer).__module__)
    return folder[1] if folder else ""


_mode = {"training": True}


def set_autotp_mode(training: bool = False) -> None:
    """Set whether tensor-parallel layers are to train.

    Only ``is_autotp_training_mode`` depends on it here: layers sum gradients whenever a gradient is computed, and send
    nothing for gradients otherwise. Raises TypeError if ``training`` is no bool.
    """
    if not isinstance(training, bool):
        raise TypeError(f"training is True or False, not {training!r}")
    _mode["training"] = training


def is_autotp_training_mode() -> bool:
    """Return the last value given to ``set_autotp_mode``; True before the first call."""
    return _mode["training"]
