"""The section ``expert_parallel``: finds the experts of a model's mixtures and gives each rank its part of them.

Everything is checked on the whole model before a weight moves. A stack of experts is cut along its first dimension, so
it stays one logical tensor for checkpoints, whole weights and files (``Cut``). Adapters on stacks (peft's
``ParamWrapper``) are cut with them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed_c.comm.axes import EP, PP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config.parallel import ExpertParallel
from deepspeed_c.errors import CommError, ConfigError, FeatureError, ModelError
from deepspeed_c.inject.saving import save_whole
from deepspeed_c.logging import log_dist
from deepspeed_c.moe.adapters import is_adapter, keep_stacked, outermost
from deepspeed_c.moe.auto import ExpertWeights, RoutedExperts, as_routed
from deepspeed_c.moe.balance import RouterBias, find_bias
from deepspeed_c.moe.whole_state import keep_state_whole
from deepspeed_c.zero.layout.experts import connect_holders, cut_of_stack, mark_stack
from deepspeed_c.zero.weights.init import materialize
from deepspeed_c.zero.weights.param import shape_of, state_of, take_over, whole_of

__all__ = ["Spread", "find_experts", "plan_spread", "spread_experts"]

_SECTION = "expert_parallel"
_MAX_NAMED = 5


class Stack(NamedTuple):
    """A parameter that is cut with the experts."""

    owner: nn.Module
    key: str
    name: str
    dim: int
    n_runs: int = 1
    """Number of runs along ``dim``; each has an element, or a block, of every expert in turn."""

    @property
    def param(self) -> nn.Parameter:
        return self.owner._parameters[self.key]


class FoundExperts(NamedTuple):
    """The experts of one layer."""

    name: str
    module: nn.Module
    n_experts: int
    weights: ExpertWeights
    activation: Callable[[torch.Tensor], torch.Tensor]
    stacks: list[Stack]
    adapters: list[nn.Module]
    """peft's wrappers around ``module``."""
    bias: RouterBias | None
    """The bias that ``load_balance_coeff`` moves."""


def find_experts(model: nn.Module, section: ExpertParallel) -> list[FoundExperts]:
    """The experts of ``model`` that ``section`` spreads over ranks, in the model's order.

    Raises ConfigError for a preset of another family and for patterns that fit nothing; ModelError for a dense model,
    and for a mixture of a form that no rule knows.
    """
    _check_preset(model, section)
    named = dict(model.named_modules())
    wrappers = _wrappers(named)
    found: list[FoundExperts] = []
    unknown: list[str] = []
    by_pattern = _by_pattern(named, section)
    for name, module in named.items():
        if name in by_pattern or hasattr(module, "_is_expert_parallel") or isinstance(module, RoutedExperts):
            found.append(_describe(name, named, wrappers.get(id(module), []), section))
        elif (reason := _unknown_form(module)) and not any(name.startswith(f"{other}.") for other in by_pattern):
            unknown.append(f"{name} ({type(module).__name__}: {reason})")
    if unknown:
        raise ModelError(
            f"no rule knows the experts of {len(unknown)} layers: {', '.join(unknown[:_MAX_NAMED])}"
            + (f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""),
            where=_SECTION,
            fix="experts must lie stacked in one module that is called with (rows, chosen experts, weights), as those of"
            " transformers 5 do; name such modules of your own by moe_layer_pattern and expert_pattern",
        )
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no mixture of experts",
            where=f"{_SECTION}.enabled",
            fix='set "enabled": false, or name the layers by moe_layer_pattern and expert_pattern',
        )
    return found


def _check_preset(model: nn.Module, section: ExpertParallel) -> None:
    if section.preset_model is None:
        return
    families: dict[str, None] = {}
    for module in model.modules():
        family = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(family, str) and family:
            families[family] = None
    if section.preset_model not in families:
        near = difflib.get_close_matches(section.preset_model, families, 1, cutoff=0.0)
        raise ConfigError(
            f"{section.preset_model!r} is not the family of {type(model).__name__}"
            + (f", which is {', '.join(map(repr, families))}" if families else ""),
            where=f"{_SECTION}.preset_model",
            fix=f"write {near[0]!r}, or leave it out: the family follows from the model" if near else "leave it out",
        )


def _by_pattern(named: dict[str, nn.Module], section: ExpertParallel) -> set[str]:
    """The names of the modules of experts that the section's patterns name."""
    if section.moe_layer_pattern is None:
        return set()
    try:
        pattern = re.compile(section.moe_layer_pattern)
    except re.error as error:
        raise ConfigError(
            f"{section.moe_layer_pattern!r} is no regular expression: {error}",
            where=f"{_SECTION}.moe_layer_pattern",
            fix="write a pattern of Python's module re",
        ) from error
    layers = [name for name in named if pattern.fullmatch(name)]
    child = section.expert_pattern or "experts"
    found = {f"{layer}.{child}" if layer else child for layer in layers}
    if not layers or (missing := sorted(found - named.keys())):
        what = f"no module has a name that {section.moe_layer_pattern!r} matches from end to end"
        if layers:
            what = f"there is no module {', '.join(missing[:_MAX_NAMED])}"
        raise ConfigError(
            what,
            where=f"{_SECTION}.{'expert_pattern' if layers else 'moe_layer_pattern'}",
            fix=f"name modules of the model, such as {', '.join(list(named)[1 : 1 + _MAX_NAMED])}",
        )
    return found


def _unknown_form(module: nn.Module) -> str:
    """A sign that a module holds the experts of a mixture in another form; "" for other modules."""
    if type(module).__module__.startswith("deepspeed_c."):
        return ""
    is_named = "expert" in type(module).__name__.lower()
    if is_named and any(param.dim() > 2 for param in module._parameters.values() if param is not None):
        return "stacked weights, another call"
    children = module._modules.get("experts")
    if isinstance(children, nn.ModuleList) and len(children) > 1:
        return "a list of modules"
    return ""


def _wrappers(named: dict[str, nn.Module]) -> dict[int, list[nn.Module]]:
    """peft's wrappers of single parameters, by the id of the module that has the parameters."""
    found: dict[int, list[nn.Module]] = {}
    for module in named.values():
        if is_adapter(module):
            found.setdefault(id(module.get_base_layer()), []).append(module)
    return found


def _describe(
    name: str, named: dict[str, nn.Module], adapters: list[nn.Module], section: ExpertParallel
) -> FoundExperts:
    module = named[name]
    own = {key: param for key, param in module._parameters.items() if param is not None}
    if isinstance(module, RoutedExperts):
        raise ModelError(
            f"its experts have been spread over {module.ep_size} ranks already",
            where=name,
            fix="build the model anew for another engine",
        )
    gate, down, up = _names_of_weights(name, own, section)
    attribute = section.num_experts_attr or "num_experts"
    n_experts = getattr(module, attribute, shape_of(own[down])[0])
    shapes = {key: tuple(shape_of(param)) for key, param in own.items()}
    odd = [key for key, shape in shapes.items() if not shape or shape[0] != n_experts]
    if odd or any(len(shapes[key]) != 3 for key in (gate, up, down) if key is not None):
        raise ModelError(
            f"its parameters have the shapes {shapes}, and stacks of {n_experts} experts are expected",
            where=name,
            fix="name modules with stacked experts only, and their number by num_experts_attr",
        )
    is_in_out = _is_in_out(module, shapes, gate or up, down)
    inner = shapes[down][1 if is_in_out else 2]
    is_joined = gate is None and shapes[up][2 if is_in_out else 1] == 2 * inner
    activation = _activation_of(name, module, section, is_needed=not (is_joined and hasattr(module, "_apply_gate")))
    stacks = [Stack(module, key, f"{name}.{key}", 0) for key in own]
    for adapter in adapters:
        stacks += _stacks_of_adapter(name, adapter, n_experts)
    weights = ExpertWeights(up, down, gate, is_joined, is_in_out)
    bias = None
    if section.load_balance_coeff is not None:
        bias = find_bias(named, outermost(name, named), n_experts, section.router_pattern)
    return FoundExperts(name, module, n_experts, weights, activation, stacks, adapters, bias)


def _names_of_weights(name: str, own: dict[str, nn.Parameter], section: ExpertParallel) -> tuple[str | None, str, str]:
    """The names of the stacks (gate or None, down, up)."""
    if section.expert_w1 is not None or section.expert_w2 is not None or section.expert_w3 is not None:
        # DeepSpeed's w1 is the gate, or gate and up together if there is no w3.
        first, down, up = section.expert_w1 or "gate_up_proj", section.expert_w2 or "down_proj", section.expert_w3
        names = (None, down, first) if up is None else (first, down, up)
    elif "gate_proj" in own and "up_proj" in own:
        names = ("gate_proj", "down_proj", "up_proj")
    else:
        names = (None, "down_proj", "gate_up_proj" if "gate_up_proj" in own else "up_proj")
    if missing := [key for key in names if key is not None and key not in own]:
        raise ModelError(
            f"it has no parameter {', '.join(missing)}; it has {', '.join(own) or 'none'}",
            where=name,
            fix="name the stacks by expert_w1 (gate), expert_w2 (down) and expert_w3 (up)",
        )
    return names


def _is_in_out(module: nn.Module, shapes: dict[str, tuple[int, ...]], first: str, down: str) -> bool:
    """Whether the stacks are [experts, in, out]. The class tells (transformers' ``is_transposed``), otherwise shapes:
    ``down`` ends with the width that ``first`` begins with."""
    if hasattr(module, "is_transposed"):
        return bool(module.is_transposed)
    return shapes[first][1] == shapes[down][2] and shapes[first][2] != shapes[down][1]


def _activation_of(
    name: str, module: nn.Module, section: ExpertParallel, *, is_needed: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    if section.expert_activation is not None:
        found = getattr(nn.functional, section.expert_activation, None)
        if not callable(found):
            raise ConfigError(
                f"{section.expert_activation!r} is no function of torch.nn.functional",
                where=f"{_SECTION}.expert_activation",
                fix='write the name of one, such as "silu" or "gelu"',
            )
        return found
    for key in ("act_fn", "activation", "act"):
        if callable(getattr(module, key, None)):
            return getattr(module, key)
    if is_needed:
        raise ModelError(
            "it has no act_fn, and the activation of its experts is not known",
            where=name,
            fix='name it: "expert_parallel": {"expert_activation": "silu"}',
        )
    return nn.functional.silu


def _stacks_of_adapter(name: str, adapter: Any, n_experts: int) -> Iterator[Stack]:
    for key in adapter.lora_A:
        first, last = adapter.lora_A[key], adapter.lora_B[key]
        n_rows = shape_of(first.weight)[0]
        rank = n_rows // n_experts
        if adapter.num_experts != n_experts or rank * n_experts != n_rows:
            raise ModelError(
                f"the adapter {key!r} of {adapter.parameter_name} is made for {adapter.num_experts} experts",
                where=name,
                fix="add adapters by peft's target_parameters",
            )
        # A has a block of rows for each expert. In B the experts of the first rank come first, one column each.
        yield Stack(first, "weight", f"{name}.lora_A.{key}", 0)
        yield Stack(last, "weight", f"{name}.lora_B.{key}", 1, rank)


def _check_settings(section: ExpertParallel, mesh: Mesh) -> None:
    """Checks what does not depend on the model: a stage of a pipeline may have no experts."""
    if section.expert_tensor_parallel_size != 1:
        raise FeatureError(
            f"an expert cannot be cut over {section.expert_tensor_parallel_size} ranks: each lies on one rank as a whole",
            where=f"{_SECTION}.expert_tensor_parallel_size",
            fix="set it to 1",
        )
    if mesh.size(PP) > 1:
        raise FeatureError(
            "experts of a pipeline's layers cannot be spread over ranks by configuration",
            where=f"{_SECTION}.enabled",
            fix="use deepspeed_c.moe.layer.MoE in the layers, or train the model without a PipelineModule",
        )


def _check_numbers(found: list[FoundExperts], n_ranks: int, mesh: Mesh) -> None:
    for layer in found:
        if layer.n_experts % n_ranks:
            raise ConfigError(
                f"{layer.n_experts} experts of {layer.name} cannot be divided among {n_ranks} ranks",
                where=f"{_SECTION}.autoep_size",
                fix=f"use a divisor of {layer.n_experts}",
            )
    try:
        mesh.with_experts(n_ranks)
    except CommError as error:
        raise ConfigError(error.what, where=f"{_SECTION}.autoep_size", fix=error.fix) from error


class Spread(NamedTuple):
    """The result of ``spread_experts``."""

    layers: list[FoundExperts]
    n_ranks: int

    def __str__(self) -> str:
        sizes = sorted({layer.n_experts for layer in self.layers})
        return (
            f"expert parallelism: {len(self.layers)} layers of {', '.join(map(str, sizes))} experts over {self.n_ranks}"
            f" ranks, {', '.join(str(size // self.n_ranks) for size in sizes)} each"
        )


def spread_experts(model: nn.Module, section: ExpertParallel, mesh: Mesh, device: torch.device) -> Spread | None:
    """Gives each rank its part of the experts of ``model``, in place, as ``section`` says. None if it is not enabled.

    Values are those of the first rank. One stack at a time is whole, also of a model that ``zero.Init`` has sharded.
    Of the experts of a model on the meta device, those of this rank alone are initialised here on ``device``: their
    random numbers depend on ``autoep_size``.

    Collective. Raises the errors of ``find_experts``; ConfigError and FeatureError for numbers that do not fit. The
    model is unchanged then.
    """
    if not section.enabled:
        return None
    spread = _spread(model, section, mesh, device)
    if spread.n_ranks > 1:
        keep_state_whole(model, mesh.with_experts(spread.n_ranks).along(EP))
        save_whole(model, mesh.stage)
    log_dist(str(spread), ranks=[0])
    return spread


def plan_spread(model: nn.Module, section: ExpertParallel, mesh: Mesh) -> Spread | None:
    """``spread_experts`` for a model on the meta device, which stays there: its stacks get the shapes of a rank's part.
    ``mesh`` may be one of pretended ranks."""
    return _spread(model, section, mesh, None) if section.enabled else None


def _spread(model: nn.Module, section: ExpertParallel, mesh: Mesh, device: torch.device | None) -> Spread:
    """``device``: see ``spread_experts``; None: weights on the meta device stay there."""
    _check_settings(section, mesh)
    found = find_experts(model, section)
    n_ranks = section.autoep_size
    _check_numbers(found, n_ranks, mesh)
    connect_holders(mesh, n_ranks)
    ep = mesh.with_experts(n_ranks).along(EP)
    for layer in found:
        as_routed(layer.module, layer.weights, layer.activation, layer.n_experts, n_ranks, layer.name)
        layer.module.balance_by(layer.bias)
        if section.validate_folding_routing:
            layer.module.compare_over(mesh.tensors)
        if n_ranks > 1:
            _cut(layer, ep, mesh)
    if n_ranks > 1 and device is not None:
        _materialize(model, found, ep, mesh, device)
    return Spread(found, n_ranks)


def _materialize(
    model: nn.Module, found: list[FoundExperts], ep: Collectives, mesh: Mesh, device: torch.device
) -> None:
    owners = {stack.owner for layer in found for stack in layer.stacks if stack.param.is_meta}
    if not owners:
        return
    mine = torch.randint(1 << 31, ()).item()
    seed = int(mesh.stage.gather_numbers(mine, label="seed of experts")[0]) + ep.rank
    with torch.random.fork_rng():  # ranks draw other experts here, and the same numbers afterwards
        torch.manual_seed(seed)
        materialize(model, device, only=owners)


def _cut(layer: FoundExperts, ep: Collectives, mesh: Mesh) -> None:
    for stack in layer.stacks:
        param = stack.param
        cut = cut_of_stack(torch.Size(shape_of(param)), stack.dim, stack.n_runs, ep.rank, ep.world_size)
        with torch.no_grad():
            if state_of(param) is None:
                whole = param.data.contiguous()
                if not whole.is_meta:
                    mesh.stage.broadcast(whole, 0, label=stack.name)
                param.data = cut.take(whole)
            else:
                take_over(param, cut.take(whole_of(param)))
        mark_stack(param, cut)
    for adapter in layer.adapters:
        adapter.num_experts = layer.n_experts // ep.world_size
        for key in adapter.lora_A:
            adapter.lora_A[key].out_features //= ep.world_size
            adapter.lora_B[key].in_features //= ep.world_size
        if adapter.num_experts == 1:
            keep_stacked(adapter)
