"""Exchange whole layers for DeepSpeed's layers, and back; swap kernels into the layers that the caller names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
from deepspeed_c.checkpoint.formats.huggingface import HuggingFaceSource
from deepspeed_c.checkpoint.formats.torch_file import materialize
from deepspeed_c.checkpoint.source import Read
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import CheckpointError, ConfigError, ModelError
from deepspeed_c.inject.cutting import cut_model
from deepspeed_c.inject.kernels import KernelReport, inject_kernels
from deepspeed_c.inject.layer_policies import HFBertLayerPolicy, LayerParts, layer_classes, policy_for
from deepspeed_c.ops.transformer import DeepSpeedTransformerLayer

__all__ = [
    "InjectedLayer",
    "generic_injection",
    "get_transformer_name",
    "replace_module",
    "replace_transformer_layer",
    "revert_transformer_layer",
    "skip_level_0_prefix",
]

_QKV = ("query", "key", "value")
# Names in our layer's parameters -> names in ``LayerParts``, in the order of the layer's constructor.
_NAMES = {"attn_o": "out", "attn_n": "attention_norm", "inter_": "inner", "output_": "outer", "norm_": "norm"}


class InjectedLayer(DeepSpeedTransformerLayer):
    """DeepSpeed's layer with the call signature that Hugging Face's encoders use for their layers."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Maps [batch, tokens, hidden] to the same shape. Raises ValueError if ``others`` ask for anything more."""
        others = {"encoder_hidden_states": encoder_hidden_states, **others}
        for name in ("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "head_mask"):
            if others.get(name) is not None:
                raise ValueError(f"a layer that was replaced has no {name}; leave it None")
        return super().forward(hidden_states, attention_mask)


def replace_module(
    model: torch.nn.Module,
    orig_class: type | None,
    replace_fn: Callable[..., torch.nn.Module],
    _replace_policy: Any,
    checkpoint: str | os.PathLike[str] | None = None,
) -> torch.nn.Module:
    """Put ``replace_fn(module, policy, number)`` in the place of every module of ``orig_class`` below ``model``.

    orig_class: the exact class; None for all classes that ``layer_policies`` knows, each with its policy. checkpoint: a
    file of safetensors or of torch.save. The model first takes the weights in it, and nothing in it is executed. A
    ``replace_fn`` that takes ``prefix`` and ``state_dict`` gets the module's name and those weights. Raises ModelError
    where there is no such module, and CheckpointError for weights that do not fit. The model is then unchanged.
    """
    policies = layer_classes() if orig_class is None else {orig_class: _replace_policy}
    places = _places(model, tuple(policies))
    if not places:
        raise ModelError(
            f"has no module of {' or '.join(kind.__name__ for kind in policies) or 'a class with a policy'}",
            where=type(model).__name__,
            fix="name the class of the model's layers",
        )
    weights = None if checkpoint is None else _take_weights(model, os.fspath(checkpoint))
    takes = inspect.signature(replace_fn).parameters
    more = {"prefix", "state_dict"} <= set(takes) or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    made = []
    for number, name in enumerate(places):
        module = model.get_submodule(name)
        extra = {"prefix": name, "state_dict": weights} if more else {}
        made.append(replace_fn(module, policies[type(module)], number, **extra))
    for name, module in zip(places, made, strict=True):
        _put(model, name, module)
    return model


def replace_transformer_layer(
    orig_layer_impl: type | None,
    model: torch.nn.Module,
    checkpoint_dict: Mapping[str, Any] | None,
    config: Any,
    model_config: Any,
    training_mode: bool = False,
) -> torch.nn.Module:
    """Give ``model`` DeepSpeed's layers, kernels, or 1/tp of its layers, according to ``config``. Return the changed
    model.

    orig_layer_impl: a class of layers. Layers with a policy in ``layer_policies`` become ``DeepSpeedTransformerLayer``.
    checkpoint_dict: {"checkpoints": files, "base_dir": folder}; weights are first taken from these files. config: a
    mapping or an object with any of ``replace_with_kernel_inject`` (kernels go into every other kind of layer),
    ``tensor_parallel`` {tp_size, tp_group}, ``injection_policy`` {class of blocks: ends of the names of their row
    layers} (or ``injection_policy_tuple``, for ``orig_layer_impl``) and ``dtype``. model_config: not needed here.
    training_mode: True refuses a layer that computes something else in training.

    Raises ConfigError where ``config`` asks for nothing, or for a feature of inference engines, and ModelError where
    layers do not fit.
    """
    tensor = _of(config, "tensor_parallel") or {}
    n_ranks, swaps = _of(tensor, "tp_size") or 1, bool(_of(config, "replace_with_kernel_inject"))
    dtype = _of(config, "dtype")
    for key, is_wanted in (
        ("dtype", dtype == torch.int8),
        ("enable_cuda_graph", bool(_of(config, "enable_cuda_graph"))),
    ):
        if is_wanted:
            raise ConfigError(
                f"{_of(config, key)} needs an inference engine", where=f"config.{key}", fix="leave it out"
            )
    policy = None if orig_layer_impl is None else policy_for(orig_layer_impl)
    if n_ranks == 1 and not swaps and policy is None:
        kind = "no class" if orig_layer_impl is None else orig_layer_impl.__name__
        raise ConfigError(
            f"there is nothing to do: no policy knows {kind}, tp_size is 1, replace_with_kernel_inject is off",
            where="replace_transformer_layer",
            fix="set replace_with_kernel_inject",
        )
    for file in (checkpoint_dict or {}).get("checkpoints", ()):
        _take_weights(model, os.path.join((checkpoint_dict or {}).get("base_dir", ""), file))
    if n_ranks > 1:
        rows = _of(config, "injection_policy_tuple")
        blocks = {orig_layer_impl: rows} if rows and orig_layer_impl is not None else _of(config, "injection_policy")
        _cut(model, n_ranks, _of(tensor, "tp_group"), blocks)
    elif policy is not None:
        replace_module(model, orig_layer_impl, _replacer(inference=not training_mode), policy)
    if swaps and (policy is None or n_ranks > 1):
        inject_kernels(model)
    return model if dtype is None else model.to(dtype)


def revert_transformer_layer(
    orig_layer_impl: type, model: torch.nn.Module, config: Any, preln: bool = False
) -> torch.nn.Module:
    """Put ``orig_layer_impl(config)``, with the same weights, in the place of every DeepSpeedTransformerLayer.

    preln: in the class the norms come first (Turing's BERT). Raises ModelError where the model has no such layer, or
    where the class has other shapes. The model is then unchanged.
    """
    kind = policy_for(orig_layer_impl) or HFBertLayerPolicy

    def revert(layer: DeepSpeedTransformerLayer, _: Any, number: int) -> torch.nn.Module:
        made = orig_layer_impl(config)
        policy = kind(made)
        if policy.pre_attn_norm != preln:
            raise ModelError(
                f"preln is {preln}, and its norms come {'before' if policy.pre_attn_norm else 'after'} their halves",
                where=orig_layer_impl.__name__,
                fix=f"pass preln={policy.pre_attn_norm}",
            )
        _copy(layer, policy.parts(), orig_layer_impl.__name__)
        return made.to(dtype=layer.attn_qkvw.dtype, device=layer.attn_qkvw.device).train(layer.training)

    kinds = {type(module) for module in model.modules() if isinstance(module, DeepSpeedTransformerLayer)}
    if len(kinds) > 1:
        raise ModelError(
            f"has layers of {', '.join(sorted(found.__name__ for found in kinds))}",
            where=type(model).__name__,
            fix="revert one kind after the other with replace_module",
        )
    return replace_module(model, next(iter(kinds), DeepSpeedTransformerLayer), revert, None)


def generic_injection(
    module: Any, dtype: torch.dtype | None = None, enable_cuda_graph: bool = True
) -> dict[str, KernelReport]:
    """Swap kernels into a model, or into every model that ``module`` holds as an attribute (a pipeline of diffusers).

    dtype: the models are first cast to it; None keeps their dtype. enable_cuda_graph: has no effect, because there are
    no graphs. Returns a report for each attribute, with the key "" for the model itself. Raises ModelError where no
    module has a kernel.
    """
    models = {"": module} if isinstance(module, torch.nn.Module) else dict(_models_in(module))
    reports: dict[str, KernelReport] = {}
    refusal: ModelError | None = None
    for name, model in models.items():
        if dtype is not None:
            model.to(dtype)
        try:
            reports[name] = inject_kernels(model)
        except ModelError as error:
            refusal = error
    if not reports:
        raise refusal or ModelError(
            "holds no torch.nn.Module", where=type(module).__name__, fix="pass a model, or an object that holds some"
        )
    return reports


def get_transformer_name(replaced_module: torch.nn.Module) -> str:
    """Return the path of the list of layers, such as "bert." or "model.layers". It is the name of the first child that
    contains a list of layers, and the name of the list if the list belongs to the child directly. "" if there is none.
    """
    for name, child in replaced_module.named_children():
        if any(isinstance(module, torch.nn.ModuleList) for module in child.modules()):
            own = [inner for inner, module in child.named_children() if isinstance(module, torch.nn.ModuleList)]
            return f"{name}.{own[0] if own else ''}"
    return ""


def skip_level_0_prefix(model: torch.nn.Module, state_dict: Mapping[str, Any] | None) -> bool:
    """Whether names in ``state_dict`` lack the name of the model's first child. This is True for BLOOM and OPT, unless
    a name begins with "model.".
    """
    if any(name.startswith("model.") for name in state_dict or ()):
        return False
    return type(model).__name__.lower().startswith(("bloom", "opt"))


def _models_in(holder: Any) -> list[tuple[str, torch.nn.Module]]:
    return [(name, value) for name, value in vars(holder).items() if isinstance(value, torch.nn.Module)]


def _places(model: torch.nn.Module, kinds: tuple[type, ...]) -> list[str]:
    """Names of the modules of exactly these classes, without modules inside such a module."""
    found: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if name and type(module) in kinds and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def _replacer(*, inference: bool) -> Callable[..., torch.nn.Module]:
    def replace(module: torch.nn.Module, policy: type[HFBertLayerPolicy], number: int) -> torch.nn.Module:
        chosen = policy(module, inference)
        parts = chosen.parts()
        layer = InjectedLayer(chosen.config())
        _copy(layer, parts, type(module).__name__, back=True)
        weight = parts.query.weight
        return layer.to(dtype=weight.dtype, device=weight.device).train(module.training)

    return replace


@torch.no_grad()
def _copy(layer: DeepSpeedTransformerLayer, parts: LayerParts, where: str, *, back: bool = False) -> None:
    """Copies the values of ``layer`` into ``parts``, or with ``back`` from ``parts``. ``requires_grad`` is copied, too."""
    hidden = layer.attn_ow.shape[0]
    pairs: list[tuple[torch.Tensor, torch.nn.Parameter, torch.nn.Parameter]] = []
    for number, name in enumerate(_QKV):
        part = getattr(parts, name)
        rows = slice(number * hidden, (number + 1) * hidden)
        pairs += [
            (layer.attn_qkvw[rows], part.weight, layer.attn_qkvw),
            (layer.attn_qkvb[rows], part.bias, layer.attn_qkvb),
        ]
    for name, source in _NAMES.items():
        part = getattr(parts, source)
        for suffix, theirs in (("w", part.weight), ("b", part.bias)):
            ours = layer.get_parameter(f"{name}{suffix}")
            pairs.append((ours.data, theirs, ours))
    for ours, theirs, owner in pairs:
        if theirs is None or ours.shape != theirs.shape or theirs.is_meta:
            shape = (
                "missing or has no values" if theirs is None or theirs.is_meta else f"of shape {tuple(theirs.shape)}"
            )
            raise ModelError(
                f"a weight is {shape}, the layer's is of shape {tuple(ours.shape)}",
                where=where,
                fix="build the layer with the configuration of the model, with biases and real weights",
            )
    for ours, theirs, owner in pairs:
        if back:
            ours.copy_(theirs)
            owner.requires_grad_(theirs.requires_grad)
        else:
            theirs.copy_(ours)
            theirs.requires_grad_(owner.requires_grad)


def _cut(model: torch.nn.Module, n_ranks: int, group: Any, blocks: Mapping[type, Sequence[str]] | None) -> None:
    comm = Collectives() if group is None else Collectives(group)
    if comm.world_size != n_ranks:
        raise ConfigError(
            f"tp_size is {n_ranks}, the group has {comm.world_size} ranks",
            where="config.tensor_parallel",
            fix="pass the group of this rank, of tp_size ranks",
        )
    cut_model(model, TensorParallel(autotp_size=n_ranks), comm, blocks)


def _of(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _take_weights(model: torch.nn.Module, path: str) -> dict[str, torch.Tensor]:
    """Fill ``model`` with the weights of a file and return the weights. Raises CheckpointError where they are another
    model's.
    """
    weights = _weights_of(path)
    own = model.state_dict()
    known = {name: value for name, value in weights.items() if name in own}
    wrong = [name for name, value in known.items() if value.shape != own[name].shape]
    if wrong or not known:
        what = (
            f"{wrong[0]} has the shape {tuple(known[wrong[0]].shape)}, the model's {tuple(own[wrong[0]].shape)}"
            if wrong
            else f"none of its {len(weights)} tensors has a name of the model's"
        )
        raise CheckpointError(what, where=path, fix="pass a file with this model's state dict")
    model.load_state_dict(known, strict=False)
    return weights


def _weights_of(path: str) -> dict[str, torch.Tensor]:
    if path.endswith(".safetensors"):
        with HuggingFaceSource(path) as source:
            weights = {}
            for (_, name), tensor in source.tensors.items():
                weights[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                source.read([Read(tensor, 0, weights[name].view(-1))])
            return weights
    content = materialize(read_file(path).content)
    if isinstance(content, Mapping) and isinstance(content.get("module"), Mapping):
        content = content["module"]  # DeepSpeed's engine writes files of this form
    if not isinstance(content, Mapping):
        raise CheckpointError(f"is a {type(content).__name__}", where=path, fix="pass a file with a state dict")
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


def _put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
