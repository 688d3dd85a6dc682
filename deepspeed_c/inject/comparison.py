"""Compares the runs of a trial: values and gradients on all ranks with those of the whole copy. See [Note: trial] in
``trial.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.inject.parts import RankParts
from deepspeed_c.inject.plan import Planned
from deepspeed_c.inject.stand_ins import Skeleton
from deepspeed_c.inject.trial_runs import TrialRun

__all__ = ["compare_runs", "refuse_unknown"]

_FIX = (
    'leave the block whole with "partition_type": "skip" in tensor_parallel.partition_config, or add a policy that'
    " cuts it (docs/adding/inject-policy.md)"
)
# A sum of a few thousand fp32 products of order 1, several layers deep, has an error of about 1e-5 of its largest
# value.
_CLOSE, _NOTHING = 2e-3, 3e-6


def compare_runs(
    expected: TrialRun,
    runs: Sequence[TrialRun],
    errors: Sequence[BaseException | None],
    planned: Sequence[Planned],
    skeleton: Skeleton,
) -> set[str]:
    """Names of parameters that no rule speaks of and whose gradients are right only if they are summed over ranks.

    errors: the error of each rank that failed. planned: the modules with a rule. Raises ModelError for the first rank,
    module or parameter that disagrees.
    """
    for number, error in enumerate(errors):
        if error is not None:
            text = " ".join(str(error).split())[:300]
            raise ModelError(
                f"rank {number} of {len(runs)} cannot compute with its part: {type(error).__name__}: {text}",
                where=skeleton.real_name(runs[number].where) or "tensor_parallel",
                fix=_FIX,
            ) from error
    _compare_values(expected, runs, skeleton)
    return _compare_gradients(expected, runs, {step.name: step for step in planned}, skeleton)


def refuse_unknown(parts: RankParts, ran: Collection[str], obstacle: str) -> None:
    """Require a rule for each parameter of a block that took part in no trial: names alone tell what such parameters
    hold.

    ran: modules with a rule that took part. obstacle: the reason why there was no trial, or "".
    """
    listed = parts.listed
    # The whole factor of a cut adapter is known too: see adapters.py.
    modules = [listed.model.get_submodule(step.adapted) if step.adapted else step.module for step in listed.planned]
    known = {param for module in modules for param in module.parameters()}
    styles: dict[str, dict[str, str]] = {}
    for step in listed.planned:
        if step.source.startswith(("policy", "preset", "tp_plan")) and step.name not in ran:
            styles.setdefault(step.region, {})[step.rule.style] = step.source
    for region, found in styles.items():
        if not region or not {"column", "row"} <= set(found):
            continue
        for name, param in listed.model.get_submodule(region).named_parameters():
            if param not in known and param not in parts.reasons:
                raise ModelError(
                    f"no rule says whether it lies between layers that are cut ({found['column']}), and there was no"
                    f" trial: {obstacle or 'nothing that is known reaches it'}",
                    where=f"{region}.{name}",
                    fix='name its module in tensor_parallel.partition_config, "skip" for one that every rank uses'
                    " alike",
                )


def _compare_values(expected: TrialRun, runs: Sequence[TrialRun], skeleton: Skeleton) -> None:
    pairs = [(name, value, [run.rows.get(name) for run in runs]) for name, value in expected.rows.items()]
    pairs += [
        (f"output {number}", value, [run.outputs[number] for run in runs])
        for number, value in enumerate(expected.outputs)
    ]
    for where, value, others in pairs:
        if value is None:
            continue
        for rank, other in enumerate(others):
            far = _distance(other, value)
            if far > _CLOSE * max(value.abs().max().item(), 1e-12):
                wrong = [name for name in _wrong_gradients(expected, runs) if _is_beside(name, where)]
                inside = [skeleton.real_name(name) for name in wrong]
                raise ModelError(
                    f"rank {rank} of {len(runs)} computes another value than the whole layer: off by {far:.3g}, the"
                    f" largest is {value.abs().max().item():.3g}. Parameters whose gradients are wrong as well:"
                    f" {', '.join(inside[:4]) or 'none beside it'}",
                    where=skeleton.real_name(where),
                    fix=_FIX,
                )


def _wrong_gradients(expected: TrialRun, runs: Sequence[TrialRun]) -> Iterator[str]:
    """Parameters whose gradients on the ranks do not add up to the gradient of the whole model."""
    for name, grad in expected.grads.items():
        of_ranks = [run.grads.get(name, torch.zeros_like(grad)) for run in runs]
        limit = _CLOSE * grad.abs().max().item()
        is_same = all(_distance(other, grad) <= limit for other in of_ranks)
        if not is_same and _distance(torch.stack(of_ranks).sum(0), grad) > limit:
            yield name


def _is_beside(name: str, where: str) -> bool:
    """Whether the parameter ``name`` belongs to no module with thin weights, and to the block of the row layer
    ``where``.
    """
    last = name.rpartition(".")[2]
    return name.startswith(f"{where.rpartition('.')[0]}.") and last not in ("first", "second")


def _compare_gradients(
    expected: TrialRun, runs: Sequence[TrialRun], steps: Mapping[str, Planned], skeleton: Skeleton
) -> set[str]:
    """Parameters whose gradients must be summed although no rule says so."""
    largest = max((grad.abs().max().item() for grad in expected.grads.values()), default=0.0)
    verdicts: dict[str, dict[str, str]] = {}
    for name, grad in expected.grads.items():
        limit = _CLOSE * grad.abs().max().item() + _NOTHING * largest
        of_ranks = [run.grads.get(name, torch.zeros_like(grad)) for run in runs]
        is_same = all(_distance(other, grad) <= limit for other in of_ranks)
        is_sum = _distance(torch.stack(of_ranks).sum(0), grad) <= limit
        module, _, last = name.rpartition(".")
        step = steps.get(module)
        if step is not None and step.rule.style in ("column", "row", "slice", "heads", "shared"):
            is_row_bias = step.rule.style == "row" and last == "bias"
            is_mine = step.rule.style != "heads" or last in step.rule.params
            if is_mine and not (is_same if is_row_bias else is_sum):
                _refuse_gradient(skeleton.real_name(name), grad, of_ranks)
            if is_mine:
                continue
        if not is_same and not is_sum:
            _refuse_gradient(skeleton.real_name(name), grad, of_ranks)
        real = f"{module}.weight" if last in ("first", "second") else name
        verdicts.setdefault(real, {})[name] = "either" if is_same and is_sum else "same" if is_same else "sum"
    sums = set()
    for real, found in verdicts.items():
        kinds = set(found.values()) - {"either"}
        if len(kinds) > 1:
            name = next(iter(found))
            _refuse_gradient(skeleton.real_name(real), expected.grads[name], [run.grads.get(name) for run in runs])
        if kinds == {"sum"}:
            sums.add(real)
    return sums


def _refuse_gradient(name: str, grad: torch.Tensor, of_ranks: Sequence[torch.Tensor | None]) -> None:
    norms = ", ".join("none" if other is None else f"{other.norm().item():.4g}" for other in of_ranks)
    raise ModelError(
        f"its gradient is neither the same on all ranks nor their sum: of norm {grad.norm().item():.4g} in the whole"
        f" layer, {norms} on the ranks",
        where=name,
        fix=_FIX,
    )


def _distance(a: torch.Tensor | None, b: torch.Tensor) -> float:
    if a is None or a.shape != b.shape:
        return float("inf")
    far = (a - b).abs().max().item() if a.numel() else 0.0
    return float("inf") if math.isnan(far) else far
