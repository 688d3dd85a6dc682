"""The trial of a cut before a weight is changed. A small copy of the model runs whole and on all ranks, in one process.

[Note: trial] A rule names layers, but the computation between the layers is the model's own code. That code may hold
parameters of single heads, counts that were not changed, or a weight that each rank uses with a different part of the
tokens' columns. So the trial runs the model's code: once whole, and once on each rank, where a rank is a thread and
sums are taken between the threads. To take little memory for a model of any size, linear layers keep their sizes and
names but have products of two thin matrices as weights, lists keep one layer of each kind, and embedding tables are
short. Values and the gradients of all parameters are compared. Every rank of a job tries all ranks, and so comes to the
same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_c.errors import DeepSpeedCError, ModelError
from deepspeed_c.inject.plan import Planned, RankPlace
from deepspeed_c.inject.stand_ins import (
    RAISED,
    CutPlan,
    Skeleton,
    SmallModel,
    TrialRank,
    TrialRanks,
    TrialTooLong,
    tensors_of,
)

__all__ = ["TrialFindings", "try_cut"]

_WHERE = "tensor_parallel"
_FIX = (
    'leave the block whole with "partition_type": "skip" in tensor_parallel.partition_config, or add a policy that'
    " cuts it (docs/adding/inject-policy.md)"
)
# A sum of a few thousand fp32 products of order 1, several layers deep, has an error of about 1e-5 of its largest
# value.
_CLOSE, _NOTHING = 2e-3, 3e-6
# Number of calls of torch that a trial may take: about 20 s on one core. A forward with its backward takes as long as 3
# forwards.
_MOST_CALLS, _WITH_BACKWARD = 300_000, 3


@dataclass
class TrialFindings:
    """The outcome of a trial without errors."""

    sums: set[str] = field(default_factory=set)
    """Parameters that no rule names and whose gradients are right only if they are summed over ranks."""
    ran: set[str] = field(default_factory=set)
    """Modules with a rule that took part in the trial."""
    obstacle: str = ""
    """The reason why there was no trial; "" if there was one."""
    is_unfinished: bool = False
    """Whether there was no trial because it would take too long."""


def try_cut(
    model: torch.nn.Module,
    n_ranks: int,
    plan: Callable[[torch.nn.Module, RankPlace], CutPlan],
    planned: Sequence[Planned],
) -> TrialFindings:
    """Compare ``model`` cut over ``n_ranks`` with the whole model. plan: makes the plan for one rank's copy.

    planned: the modules of ``model`` that have a rule. Raises ModelError for the first module or parameter that
    disagrees. Nothing of ``model`` is changed.
    """
    if not callable(getattr(model, "get_input_embeddings", None)) or getattr(model, "config", None) is None:
        return TrialFindings(obstacle=f"{type(model).__name__} is no model of transformers, whose inputs are known")
    obstacle = ""
    with _OwnRandomness():
        for shortens in (True, False):
            try:
                skeleton = Skeleton(model, [step.name for step in planned], shortens=shortens)
                plans = [plan(skeleton.model, RankPlace(rank, n_ranks)) for rank in range(n_ranks)]
                whole = SmallModel(skeleton.model, plans[0])
                inputs = whole.find_inputs(_MOST_CALLS / (1 + _WITH_BACKWARD * (1 + n_ranks)))
            except TrialTooLong:
                obstacle = (
                    f"a trial of {type(model).__name__} over {n_ranks} ranks takes more than {_MOST_CALLS:,} calls"
                )
                return TrialFindings(obstacle=f"{obstacle} of torch, and was not finished", is_unfinished=True)
            except (DeepSpeedCError, *RAISED) as error:
                obstacle = f"{type(model).__name__} does not run on stand-ins: {type(error).__name__}: {_line(error)}"
                continue
            return _compare(whole, inputs, plans, skeleton, [name for name, _ in model.named_parameters()])
    return TrialFindings(obstacle=obstacle)


def _compare(
    whole: SmallModel, inputs: dict[str, Any], plans: Sequence[CutPlan], skeleton: Skeleton, names: Sequence[str]
) -> TrialFindings:
    for step in plans[0].planned:
        if step.rule.style == "row":
            whole.model.get_submodule(step.name).mark_row()
    together = TrialRanks(len(plans))
    factors = _OutputFactors()
    runs: list[_TrialRun] = []
    for rank, found in enumerate(plans):
        copied = whole.on_rank(found, TrialRank(together, rank))
        runs.append(_TrialRun(copied, [step.name for step in found.planned], factors))
    # This comes after the copies were made, because copies of a model have its hooks.
    expected = _TrialRun(whole.model, [step.name for step in plans[0].planned], factors)
    expected(inputs)
    together.run([lambda run=run: run(inputs) for run in runs])
    for number, error in enumerate(together.errors):
        if error is not None:
            raise ModelError(
                f"rank {number} of {len(runs)} cannot compute with its part: {type(error).__name__}: {_line(error)}",
                where=skeleton.real_name(runs[number].where) or _WHERE,
                fix=_FIX,
            ) from error
    _compare_values(expected, runs, skeleton)
    sums = _compare_gradients(expected, runs, {step.name: step for step in plans[0].planned}, skeleton)
    wanted = {name for name in names if skeleton.small_name(name) in sums}
    return TrialFindings(wanted, {name for name in skeleton.names if skeleton.small_name(name) in expected.rows})


def _compare_values(expected: _TrialRun, runs: Sequence[_TrialRun], skeleton: Skeleton) -> None:
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


def _wrong_gradients(expected: _TrialRun, runs: Sequence[_TrialRun]) -> Iterator[str]:
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
    expected: _TrialRun, runs: Sequence[_TrialRun], steps: Mapping[str, Planned], skeleton: Skeleton
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


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


class _OwnRandomness:
    """Random numbers for the trial. The states of the caller's generators are restored afterwards."""

    def __enter__(self) -> None:
        self._state = torch.get_rng_state()
        torch.manual_seed(20)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._state)


class _OutputFactors:
    """Random factors of a model's outputs in the sum that a trial derives. All runs have the same."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def of(self, number: int, shape: torch.Size) -> torch.Tensor:
        """The factors of output ``number``, which has ``shape``."""
        key = number, shape
        if key not in self._made:
            self._made[key] = torch.randn(shape, generator=torch.Generator().manual_seed(11 + number))
        return self._made[key]


class _TrialRun:
    """One forward and backward. It records everything that is compared."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], factors: _OutputFactors) -> None:
        self.model, self._factors = model, factors
        self.rows: dict[str, torch.Tensor | None] = {}
        self.outputs: list[torch.Tensor] = []
        self.grads: dict[str, torch.Tensor] = {}
        self._running: list[str] = []
        wanted = set(names)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            note = name in wanted
            module.register_forward_hook(
                lambda module, args, output, name=name, note=note: self._leave(name, module, output, note=note)
            )

    @property
    def where(self) -> str:
        """The innermost module that was running when an error ended the run; "" if the error came in the backward."""
        return self._running[-1] if self._running else ""

    def _enter(self, name: str) -> None:
        self._running.append(name)

    def _leave(self, name: str, module: torch.nn.Module, output: Any, *, note: bool) -> None:
        self._running.pop()
        if not note:
            return
        is_row = isinstance(output, torch.Tensor) and getattr(module, "is_row", False)
        self.rows[name] = output.detach().clone() if is_row else None

    def __call__(self, inputs: dict[str, Any]) -> None:
        outputs = list(tensors_of(self.model(**inputs)))
        self.outputs = [value.detach() for value in outputs]
        loss = sum(
            (value * self._factors.of(number, value.shape)).sum()
            for number, value in enumerate(outputs)
            if value.requires_grad
        )
        if isinstance(loss, torch.Tensor):
            loss.backward()
        for name, param in self.model.named_parameters():
            if param.requires_grad and param.grad is not None:
                self.grads[name.removesuffix("_whole")] = param.grad
