"""Runs of a trial: of the whole small copy, and of its ranks, which are threads. See [Note: trial] in ``trial.py``."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from deepspeed_c.background import BackgroundThread
from deepspeed_c.inject.linear import is_transposed
from deepspeed_c.inject.own_heads import SharedKey, count_own_heads
from deepspeed_c.inject.parts import RankParts
from deepspeed_c.inject.stand_ins import RAISED, SmallModel, shared_parts, tensors_of

__all__ = ["TrialRank", "TrialRun", "run_copies"]

_FAILED = "nothing: it has failed"
_LAST_SECONDS = 5.0  # more than the time between two exchanges of a small copy


def run_copies(
    whole: SmallModel, inputs: dict[str, Any], copies: Sequence[RankParts]
) -> tuple[TrialRun, list[TrialRun], list[BaseException | None]]:
    """(the run of the whole copy, the runs of the ranks, the error of each rank that failed). copies: each rank's parts
    of the copy.
    """
    together = TrialRanks(len(copies))
    factors = OutputFactors()
    runs = []
    for rank, parts in enumerate(copies):
        made = _copy_of_rank(whole.model, parts, TrialRank(together, rank))
        runs.append(TrialRun(made, [step.name for step in parts.listed.planned], factors))
    # This comes after the copies were made, because copies of a model have its hooks.
    expected = TrialRun(whole.model, [step.name for step in copies[0].listed.planned], factors)
    expected(inputs)
    together.run([lambda run=run: run(inputs) for run in runs])
    return expected, runs, together.errors


def _copy_of_rank(whole: torch.nn.Module, parts: RankParts, rank: TrialRank) -> torch.nn.Module:
    """A copy of ``whole`` that computes with the part of ``rank``."""
    made = copy.deepcopy(whole, shared_parts(whole))
    for step in parts.listed.planned:
        style, module = step.rule.style, made.get_submodule(step.name)
        if style in ("column", "row"):
            weight = step.module.weight
            dim = 0 if (style == "column") != is_transposed(step.module) else 1
            module.cut(rank, step, _indices(parts, weight, dim), _sizes(parts, weight, dim))
        elif style == "slice":
            _cut_in_place(module, "weight", _indices(parts, step.module.weight, 1), 1)
        elif style == "heads":
            for name in step.rule.params:
                if name in dict(step.module.named_parameters(recurse=False)):
                    _cut_in_place(module, name, _indices(parts, step.module.get_parameter(name), 0), 0)
        elif style == "latent":
            rope = step.attention.owner.qk_rope_head_dim if step.attention is not None else 0
            module.register_forward_hook(SharedKey(rank, rope, step.name))
    for name in {step.attention.name for step in parts.listed.planned if step.attention is not None}:
        attention = parts.listed.attentions[name]
        module = made.get_submodule(name)
        owner = module.get_submodule(attention.heads.owner) if attention.heads.owner else module
        count_own_heads(module, replace(attention, owner=owner))
    return made


def _indices(parts: RankParts, param: torch.nn.Parameter, dim: int) -> torch.Tensor | None:
    """Indices along ``dim`` of those elements of the whole parameter with which the rank computes; None: all elements."""
    if param in parts.runs:
        return torch.cat([torch.arange(begin, begin + size) for begin, size in parts.runs[param]])
    if param not in parts.cuts:
        return None
    boxes = parts.cuts[param][0].boxes
    return torch.cat([torch.arange(box.logical_offset[dim], box.logical_offset[dim] + box.size[dim]) for box in boxes])


def _sizes(parts: RankParts, param: torch.nn.Parameter, dim: int) -> tuple[int, int] | None:
    if param not in parts.cuts:
        return None
    box = parts.cuts[param][0].boxes[0]
    return box.logical_offset[dim], box.size[dim]


def _cut_in_place(module: torch.nn.Module, name: str, index: torch.Tensor | None, dim: int) -> None:
    """Makes ``module`` read elements ``index`` of its parameter. The gradient has the whole shape, and is zero
    elsewhere.
    """
    if index is None:
        return
    param = module._parameters.pop(name)
    module.register_parameter(f"{name}_whole", param)

    def pick(module: torch.nn.Module, args: Any) -> None:
        module.__dict__[name] = param.index_select(dim, index)

    module.register_forward_pre_hook(pick)


class _TrialStopped(Exception):
    """Raised in the other threads when a rank has failed."""


class TrialRanks:
    """Ranks as threads. In an exchange each rank gives a value and gets the values of all ranks."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self.errors: list[BaseException | None] = [None] * n_ranks
        self._values: list[tuple[str, Any]] = [("", None)] * n_ranks
        self._barrier = threading.Barrier(n_ranks)

    def exchange(self, rank: int, label: str, value: Any) -> list[Any]:
        self._values[rank] = (label, value)
        self._barrier.wait()
        labels, values = zip(*self._values, strict=True)
        self._barrier.wait()
        if _FAILED in labels:
            raise _TrialStopped
        if len(set(labels)) > 1:
            raise RuntimeError(f"ranks send different things: {', '.join(sorted(set(labels)))}")
        return list(values)

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run all ranks at once. ``errors`` gets the error of each rank that fails."""

        def one(rank: int) -> None:
            try:
                bodies[rank]()
                self.exchange(rank, "the end", None)
            except _TrialStopped:
                pass
            except RAISED as error:
                self.errors[rank] = error
                # All other ranks reach this point too, at their next exchange. So the set of failed ranks does not
                # depend on timing.
                with contextlib.suppress(_TrialStopped, threading.BrokenBarrierError):
                    self.exchange(rank, _FAILED, None)
            except BaseException:
                self._barrier.abort()  # so that no thread waits for this one
                raise

        # They are left behind where an interrupt ends the wait for them.
        threads = [
            BackgroundThread(one, rank, name="deepspeed_c trial", end=self._barrier.abort, limit_s=_LAST_SECONDS)
            for rank in range(self.n_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class TrialRank:
    """One rank of a trial. It stands in for the ``TensorRanks`` of a cut model."""

    def __init__(self, together: TrialRanks, rank: int) -> None:
        self._together, self.rank = together, rank

    def __deepcopy__(self, memo: dict) -> TrialRank:
        return self

    def exchange(self, label: str, value: torch.Tensor) -> list[torch.Tensor]:
        return self._together.exchange(self.rank, label, value)

    def enter(self, x: torch.Tensor, label: str) -> torch.Tensor:
        return _TrialEnter.apply(x, self, label) if x.requires_grad else x

    def leave(self, x: torch.Tensor, label: str) -> torch.Tensor:
        return _TrialLeave.apply(x, self, label)

    def gather(self, x: torch.Tensor, label: str) -> torch.Tensor:
        return _TrialGather.apply(x, self, label)


class _TrialEnter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: TrialRank, label: str) -> torch.Tensor:
        ctx.rank, ctx.label = rank, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return sum(ctx.rank.exchange(f"input gradient of {ctx.label}", grad)), None, None


class _TrialLeave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: TrialRank, label: str) -> torch.Tensor:
        return sum(rank.exchange(f"output of {label}", x.detach()))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _TrialGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: TrialRank, label: str) -> torch.Tensor:
        parts = rank.exchange(f"columns of {label}", x.detach())
        ctx.begin, ctx.size = sum(part.shape[-1] for part in parts[: rank.rank]), x.shape[-1]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.narrow(-1, ctx.begin, ctx.size), None, None


class OutputFactors:
    """Random factors of a model's outputs in the sum that a trial derives. All runs have the same."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def of(self, number: int, shape: torch.Size) -> torch.Tensor:
        """The factors of output ``number``, which has ``shape``."""
        key = number, shape
        if key not in self._made:
            self._made[key] = torch.randn(shape, generator=torch.Generator().manual_seed(11 + number))
        return self._made[key]


class TrialRun:
    """One forward and backward. It records everything that is compared."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], factors: OutputFactors) -> None:
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
