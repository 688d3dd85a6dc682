"""Styles of rules: each gives a list of cuts of one module's parameters, as data."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepspeed_c.inject.linear import is_transposed, product_of
from deepspeed_c.inject.plan import ParamCut, Planned
from deepspeed_c.inject.policy import Rule

__all__ = ["ExpertCut", "cuts_of_module", "expert_cuts"]


def cuts_of_module(step: Planned, grain: int) -> tuple[list[ParamCut], bool]:
    """(the cuts of the module's parameters, whether the rule can be followed). grain: number of columns that stay
    together.
    """
    style, module = step.rule.style, step.module
    if style in ("latent", "shared"):
        reason = f"{step.source}: whole, used on each rank's heads"
        sums = style == "shared"
        return [ParamCut(param, reason=reason, step=step, is_summed=sums) for param in module.parameters()], True
    if style == "experts":
        return _cuts_of_experts(step, grain)
    if style == "slice":
        return [ParamCut(module.weight, f"{step.name}.weight", 1, step, grain)], True
    own = dict(module.named_parameters(recurse=False))
    if style == "heads":
        named = [(name, param) for name, param in own.items() if name in step.rule.params]
        return [ParamCut(param, f"{step.name}.{name}", 0, step, grain) for name, param in named], True
    # Other classes (quantised, adapted) hold weights of other shapes, and a parametrized layer computes its weight.
    if product_of(module) is None or "weight" not in own:
        reason = f"{type(module).__name__} is no linear layer that can be cut"
        return [ParamCut(param, reason=reason) for param in own.values()], False
    dim = 0 if (style == "column") != is_transposed(module) else 1
    cuts = [ParamCut(module.weight, f"{step.name}.weight", dim, step, grain)]
    if module.bias is not None:
        whole = ParamCut(module.bias, reason=f"{step.source}: added once, to the sum")
        cuts.append(ParamCut(module.bias, f"{step.name}.bias", 0, step, grain) if style == "column" else whole)
    return cuts, True


def _cuts_of_experts(step: Planned, grain: int) -> tuple[list[ParamCut], bool]:
    found = expert_cuts(step.module)
    if isinstance(found, str):
        return [ParamCut(param, reason=found) for param in step.module.parameters()], False
    cuts = []
    for name, cut in found.items():
        param = step.module.get_parameter(name)
        if cut is None:
            reason = f"{step.source}: whole, used on the first rank"
            cuts.append(ParamCut(param, reason=reason, step=step, is_summed=True))
            continue
        rule = Rule(step.rule.pattern, "experts", ("columns",) * cut.n_parts)
        whole = Planned(step.name, step.module, rule, step.source)
        # torch's grouped products take rows of multiples of 16 bytes, that is, of 8 half-precision numbers.
        cuts.append(ParamCut(param, f"{step.name}.{name}", cut.dim, whole, max(grain, 8) * cut.n_mixed))
    return cuts, True


class ExpertCut(NamedTuple):
    """How one parameter of experts is cut."""

    dim: int
    n_parts: int
    """Number of equal parts that lie one behind the other along ``dim``: gate and up."""
    n_mixed: int
    """Number of elements of ``dim`` for one column of the inner dimension: 2 where gate and up alternate column by
    column.
    """


def expert_cuts(experts: torch.nn.Module) -> dict[str, ExpertCut | None] | str:
    """Return the cut of each parameter (None for a bias that stays whole), or the reason why the experts cannot be cut."""
    if any(hasattr(param, "expert_cut") for param in experts.parameters()):
        return "each expert lies on one rank as a whole (expert_parallel)"
    # Weights are [experts, out, in], and in some families [experts, in, out].
    out, inner = (2, 1) if _are_transposed(experts) else (1, 2)
    is_mixed = not getattr(experts, "is_concatenated", True)
    gate_up = (1, 2) if is_mixed else (2, 1)
    known = {
        "gate_up_proj": ExpertCut(out, *gate_up),
        "gate_up_proj_bias": ExpertCut(1, *gate_up),
        "gate_proj": ExpertCut(out, 1, 1),
        "up_proj": ExpertCut(out, 1, 1),
        "up_proj_bias": ExpertCut(1, 1, 1),
        "down_proj": ExpertCut(inner, 1, 1),
        "down_proj_bias": None,
    }
    names = [name for name, _ in experts.named_parameters(recurse=False)]
    inside = [name for name, _ in experts.named_parameters() if "." in name]
    if inside or getattr(experts, "has_post_expert_norm", False):
        # The output of down_proj is summed over ranks. A norm of one expert's output must not come before that sum.
        return f"its experts have modules in them ({', '.join(inside) or 'a norm behind down_proj'})"
    if "down_proj" not in names or any(name not in known or experts.get_parameter(name).dim() < 2 for name in names):
        return f"its experts have other weights than are known ({', '.join(names)})"
    return {name: known[name] for name in names}


def _are_transposed(experts: torch.nn.Module) -> bool:
    """Whether the experts' weights are [experts, in, out]. Their shapes tell; where both orders fit, the class tells."""
    first = getattr(experts, "gate_up_proj", getattr(experts, "up_proj", None))
    last = getattr(experts, "down_proj", None)
    if first is None or last is None or first.dim() != 3 or last.dim() != 3 or first.shape[2] == last.shape[1]:
        return bool(getattr(experts, "is_transposed", False))
    return first.shape[1] == last.shape[2]
