"""Learning-rate schedules under DeepSpeed's names: range test, 1cycle, and warm-up followed by a constant rate, a
linear decay or a cosine.

A schedule counts *iterations*: ``last_batch_iteration`` is -1 until the first ``step()``. The engine calls ``step()``
after each applied optimizer step. A schedule sets the learning rates of its optimizer when it is constructed, stepped
or loaded. Learning rates that are tensors are written in place, because compiled and captured optimizers keep
references to them.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed_c.errors import ConfigError
from deepspeed_c.logging import logger

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "build_scheduler",
    "get_config_from_args",
    "get_lr_from_config",
    "get_torch_optimizer",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupLR_params",
    "parse_arguments",
    "update_lr",
]

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"

# The upper limit of the momentum's "decay", which raises the momentum. At 1, old gradients would never fade and
# training would diverge.
_MAX_DECAYED_MOMENTUM = 0.999


def get_torch_optimizer(optimizer: Any) -> Optimizer:
    """``optimizer`` itself, or the ``torch.optim.Optimizer`` that it wraps as its attribute ``optimizer``."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, Optimizer):
            return candidate
    raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer, and wraps none")


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Sets the learning rate of each group; a learning rate that is a tensor is written in place. Returns the rates of
    the groups."""
    for group, lr in zip(param_groups, lrs):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(float(lr))
        else:
            group["lr"] = lr
    return [group["lr"] for group in param_groups]


class _Schedule:
    """The common part of all schedules: the optimizer, the count of steps, and the saved state."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = _count("last_batch_iteration", last_batch_iteration, -1)
        self._last_lr: list[float] = []

    def get_lr(self) -> list[float]:
        """Each group's learning rate at ``last_batch_iteration``."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group that was set last."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Continues at the iteration of a ``state_dict``, and sets its learning rates. Accepts DeepSpeed's state dicts
        too.
        """
        self._go_to(sd["last_batch_iteration"])

    def _go_to(self, iteration: int | None) -> None:
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if iteration is None else _count("last_batch_iteration", iteration, -1)
        )
        self._apply()

    def _apply(self) -> None:
        """Sets the learning rates that ``get_lr`` returns."""
        self._last_lr = self.get_lr()
        update_lr(self.optimizer.param_groups, self._last_lr)

    def _per_group(self, name: str, value: Any) -> list[float]:
        """A list with one number for each group, from such a list or from one number for all groups."""
        n_groups = len(self.optimizer.param_groups)
        values = list(value) if isinstance(value, (list, tuple)) else [value] * n_groups
        if len(values) != n_groups:
            raise ConfigError(
                f"{len(values)} values are given for {n_groups} parameter groups",
                where=_where(self, name),
                fix="give one number, or one for each parameter group of the optimizer",
            )
        return [_number(_where(self, name), v) for v in values]

    def _base_lrs(self) -> list[float]:
        """The initial learning rates of the optimizer.

        They are kept in the groups as ``initial_lr``, as in torch's schedulers, so that a schedule that starts in
        mid-training finds them.
        """
        bases = []
        for group in self.optimizer.param_groups:
            if self.last_batch_iteration == -1:
                group["initial_lr"] = float(group["lr"])
            bases.append(float(group.get("initial_lr", group["lr"])))
        return bases


class LRRangeTest(_Schedule):
    """Raises the learning rate until training diverges, to find the highest usable rate (Smith, arXiv 1803.09820).

    lr = min_lr * (1 + step_rate * t / step_size), t counting from 1; with ``staircase`` t / step_size is rounded down.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        """min_lr may be a list with one entry for each parameter group. In each ``step_size`` iterations the rate grows
        by ``step_rate`` times min_lr.
        """
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _count(_where(self, "lr_range_test_step_size"), lr_range_test_step_size, 1)
        self.step_rate = _number(_where(self, "lr_range_test_step_rate"), lr_range_test_step_rate)
        self.staircase = bool(lr_range_test_staircase)
        self._apply()

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [lr * (1 + self.step_rate * interval) for lr in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        """Goes to the next iteration, or to the one given."""
        self._go_to(batch_iteration)


class OneCycle(_Schedule):
    """The learning rate rises once and falls once, while the momentum falls and rises; then both decay (Smith, arXiv
    1803.09820).

    Each half may change in stairs. After the cycle the learning rate is min_lr / (1 + decay_lr_rate * t /
    decay_step_size). The momentum is max_mom * (1 + decay_mom_rate * t / decay_step_size), at most 0.999.
    decay_step_size 0 means no decay.

    The momentum is the first value of ``betas``, or ``momentum``, whichever the parameter group has. The second beta is
    not changed.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        """Sizes are iterations. Size and stairs of the second half default to the values of the first half. Lists have
        an entry for each group.
        """
        super().__init__(optimizer, last_batch_iteration)

        def positive(name: str, value: float, *, may_be_zero: bool) -> float:
            return _number(_where(self, name), value, minimum=0.0, may_be_minimum=may_be_zero)

        first = positive("cycle_first_step_size", cycle_first_step_size, may_be_zero=False)
        second = first
        if cycle_second_step_size is not None:
            second = positive("cycle_second_step_size", cycle_second_step_size, may_be_zero=True)
        self.first_step_size, self.second_step_size, self.total_size = first, second, first + second
        self.step_ratio = first / self.total_size
        self.first_stair_count = _count(_where(self, "cycle_first_stair_count"), cycle_first_stair_count, 0)
        self.second_stair_count = self.first_stair_count
        if cycle_second_stair_count is not None:
            self.second_stair_count = _count(_where(self, "cycle_second_stair_count"), cycle_second_stair_count, 0)
        self.decay_step_size = positive("decay_step_size", decay_step_size, may_be_zero=True)
        self.decay_lr_rate = positive("decay_lr_rate", decay_lr_rate, may_be_zero=True)
        self.decay_mom_rate = positive("decay_mom_rate", decay_mom_rate, may_be_zero=True)
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = bool(cycle_momentum)
        groups = self.optimizer.param_groups
        if self.cycle_momentum and not any("betas" in group or "momentum" in group for group in groups):
            logger.warning(
                "OneCycle: %s has no momentum to cycle (neither betas nor momentum); cycle_momentum is off",
                type(self.optimizer).__name__,
            )
            self.cycle_momentum = False
        self._apply()

    def _get_scale_factor(self) -> float:
        """0 at the cycle's ends, 1 in its middle."""
        at = (self.last_batch_iteration + 1) % self.total_size
        if at <= self.first_step_size:
            way, size, stairs = at, self.first_step_size, self.first_stair_count
        else:
            way, size, stairs = self.total_size - at, self.second_step_size, self.second_stair_count
        # Multiply before dividing, so that whole numbers of stairs stay exact.
        return math.floor(way * stairs / size) / stairs if stairs else way / size

    @property
    def _n_decayed(self) -> float:
        """Iterations since the end of the cycle; 0 or less within the cycle."""
        return self.last_batch_iteration - self.total_size + 1 if self.last_batch_iteration >= self.total_size else 0

    def _decay(self, rate: float) -> float:
        return 1 + rate * self._n_decayed / self.decay_step_size if self.decay_step_size else 1.0

    def get_lr(self) -> list[float]:
        if self._n_decayed:
            return [lr / self._decay(self.decay_lr_rate) for lr in self.min_lrs]
        height = self._get_scale_factor()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """The momentum of each group at ``last_batch_iteration``; None if momentum is not cycled. For a group with
        betas it is a pair with the group's second beta, else a tuple of one number.
        """
        if not self.cycle_momentum:
            return None
        if self._n_decayed:
            factor = self._decay(self.decay_mom_rate)
            moms = [min(mom * factor, max(mom, _MAX_DECAYED_MOMENTUM)) for mom in self.max_moms]
        else:
            height = self._get_scale_factor()
            moms = [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms)]
        return [(mom, *group.get("betas", ())[1:]) for mom, group in zip(moms, self.optimizer.param_groups)]

    def _apply(self) -> None:
        super()._apply()
        for group, mom in zip(self.optimizer.param_groups, self.get_mom() or ()):
            if "betas" in group:
                group["betas"] = mom
            elif "momentum" in group:
                (group["momentum"],) = mom

    def step(self, batch_iteration: int | None = None) -> None:
        """Goes to the next iteration, or to the one given."""
        self._go_to(batch_iteration)


class _Warmup(_Schedule):
    """The rise from 0 to 1 at the begin of the three warm-up schedules."""

    def __init__(self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int) -> None:
        super().__init__(optimizer, last_batch_iteration)
        n = _count(_where(self, "warmup_num_steps"), warmup_num_steps, 0)
        # As in DeepSpeed 1 counts as 2, because the logarithm of 1 is 0 and cannot be divided by. 0 means no warm-up.
        self.warmup_num_steps = max(2, n) if n else 0
        if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            # As in DeepSpeed, so that a run with a misspelt type trains the same here.
            logger.warning(
                '%s: %r is not "log" or "linear"; warming up by "log"', _where(self, "warmup_type"), warmup_type
            )
            warmup_type = WARMUP_LOG_RATE
        self.warmup_type = warmup_type

    @property
    def _is_warming_up(self) -> bool:
        return bool(self.warmup_num_steps) and self.last_batch_iteration < self.warmup_num_steps

    def _rise(self) -> float:
        """0 before the first step and at iteration 0, just under 1 in the last step of the warm-up."""
        t = max(0, self.last_batch_iteration)
        if self.warmup_type == WARMUP_LOG_RATE:
            return math.log(t + 1) / math.log(self.warmup_num_steps)
        return t / self.warmup_num_steps

    def _check_total(self, total_num_steps: int) -> int:
        total = _count(_where(self, "total_num_steps"), total_num_steps, 0)
        if total < self.warmup_num_steps:
            logger.warning(
                "%s: total_num_steps (%d) is less than warmup_num_steps (%d): the warm-up ends beyond the end",
                type(self).__name__,
                total,
                self.warmup_num_steps,
            )
        return total

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes to the next iteration, or to the one given."""
        self._go_to(last_batch_iteration)


class WarmupLR(_Warmup):
    """From warmup_min_lr to warmup_max_lr, along log(t + 1) / log(warmup_num_steps) or t / warmup_num_steps, then
    constant.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        """warmup_max_lr None means the initial learning rate of each group. Lists have an entry for each group. 0 steps
        mean no warm-up.
        """
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self._max_is_base = warmup_max_lr is None
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._per_group("warmup_max_lr", self._base_lrs() if warmup_max_lr is None else warmup_max_lr)
        self._prepare()
        self._apply()

    def _prepare(self) -> None:
        """Called before the first learning rate is set."""

    def _after(self) -> float:
        """The factor after the warm-up."""
        return 1.0

    def get_lr(self) -> list[float]:
        gamma = self._rise() if self._is_warming_up else self._after()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs)]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._max_is_base:
            state["base_lrs"] = list(self.max_lrs)
        return state

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        if self._max_is_base and "base_lrs" in sd:
            self.max_lrs = self._per_group("warmup_max_lr", list(sd["base_lrs"]))
        super().load_state_dict(sd)


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then a linear decay to warmup_min_lr at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _prepare(self) -> None:
        self.total_num_steps = self._check_total(self.total_num_steps)

    def _after(self) -> float:
        left = self.total_num_steps - max(0, self.last_batch_iteration)
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """The initial learning rate of each group times a ratio. The ratio rises from warmup_min_ratio to 1, then falls
    along half a cosine to cos_min_ratio.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = self._check_total(total_num_steps)
        self.warmup_min_ratio = _number(_where(self, "warmup_min_ratio"), warmup_min_ratio)
        self.cos_min_ratio = _number(_where(self, "cos_min_ratio"), cos_min_ratio)
        self.org_lrs = self._base_lrs()
        self._apply()

    def get_lr_ratio(self) -> float:
        """The factor at ``last_batch_iteration``."""
        if self._is_warming_up:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._rise()
        # Clamped, because the cosine would rise again after the end.
        way = min(
            1.0,
            (self.last_batch_iteration - self.warmup_num_steps + 1)
            / max(1, self.total_num_steps - self.warmup_num_steps),
        )
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * way)) / 2)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base_lrs": list(self.org_lrs)}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        if "base_lrs" in sd:
            self.org_lrs = self._per_group("base_lrs", list(sd["base_lrs"]))
        super().load_state_dict(sd)


_SCHEDULES = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def build_scheduler(name: str, params: Mapping[str, Any] | None, optimizer: Any) -> _Schedule:
    """The schedule of the configuration's ``scheduler`` section: its ``type`` (in any case) and ``params``.

    Raises ``ConfigError`` for a name or parameter that does not exist (naming the nearest one), a missing parameter or
    a bad value.
    """
    cls = {known.lower(): schedule for known, schedule in _SCHEDULES.items()}.get(str(name).lower())
    if cls is None:
        raise ConfigError(
            f"there is no schedule {name!r}{_nearest(str(name), _SCHEDULES)}",
            where="scheduler.type",
            fix=f"use one of {', '.join(_SCHEDULES)}, or pass lr_scheduler= to initialize()",
        )
    params = dict(params or {})
    known = {key: p for key, p in inspect.signature(cls).parameters.items() if key != "optimizer"}
    for key in params:
        if key not in known:
            raise ConfigError(
                f"{cls.__name__} has no parameter {key!r}{_nearest(key, known)}",
                where=f"scheduler.params.{key}",
                fix=f"its parameters are {', '.join(known)}",
            )
    missing = [key for key, p in known.items() if p.default is inspect.Parameter.empty and key not in params]
    if missing:
        raise ConfigError(
            f"{cls.__name__} needs {', '.join(missing)}", where="scheduler.params", fix="add it to the section's params"
        )
    return cls(optimizer, **params)


def _nearest(word: str, words: Any) -> str:
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def _where(schedule: _Schedule, name: str) -> str:
    return f"{type(schedule).__name__}.{name}"


def _count(where: str, value: Any, minimum: int) -> int:
    """An integer, which JSON may give as 1e3."""
    is_whole = (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer()) or hasattr(value, "__index__")
    )
    if isinstance(value, bool) or not is_whole or int(value) < minimum:
        raise ConfigError(f"is {value!r}", where=where, fix=f"use a whole number, {minimum} or more")
    return int(value)


def _number(where: str, value: Any, *, minimum: float = -math.inf, may_be_minimum: bool = True) -> float:
    is_number = isinstance(value, (int, float)) or hasattr(value, "__float__")
    if isinstance(value, (bool, str)) or not is_number or not math.isfinite(value):
        raise ConfigError(f"is {value!r}", where=where, fix="use a finite number")
    number = float(value)
    if number < minimum or (number == minimum and not may_be_minimum):
        raise ConfigError(
            f"is {value!r}", where=where, fix=f"use a number {'of' if may_be_minimum else 'over'} {minimum:g} or more"
        )
    return number


def _truth(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return words[text.lower()]


# (name, type, default, help). The schedule's parameter has the same name as the option.
_RANGE_TEST_OPTIONS = (
    ("lr_range_test_min_lr", float, 0.001, "learning rate at the start"),
    ("lr_range_test_step_rate", float, 1.0, "growth for each step size"),
    ("lr_range_test_step_size", int, 1000, "iterations for each growth"),
    ("lr_range_test_staircase", _truth, False, "grow in stairs (true or false)"),
)
_CYCLE_OPTIONS = (
    ("cycle_first_step_size", int, 1000, "iterations of the rise"),
    ("cycle_first_stair_count", int, -1, "stairs of the rise (-1: none)"),
    ("cycle_second_step_size", int, -1, "iterations of the fall (-1: as the rise)"),
    ("cycle_second_stair_count", int, -1, "stairs of the fall (-1: as the rise)"),
    ("decay_step_size", int, 1000, "iterations for each decay after the cycle"),
    ("cycle_min_lr", float, 0.01, "lower learning rate"),
    ("cycle_max_lr", float, 0.1, "upper learning rate"),
    ("decay_lr_rate", float, 0.0, "decay of the learning rate after the cycle"),
    ("cycle_min_mom", float, 0.8, "lower momentum"),
    ("cycle_max_mom", float, 0.9, "upper momentum"),
    ("decay_mom_rate", float, 0.0, "decay of the momentum after the cycle"),
)
_WARMUP_OPTIONS = (
    ("warmup_min_lr", float, 0.0, "learning rate at the start"),
    ("warmup_max_lr", float, 0.001, "learning rate after the warm-up"),
    ("warmup_num_steps", int, 1000, "iterations of the warm-up"),
    ("warmup_type", str, WARMUP_LOG_RATE, "log or linear"),
)
_COSINE_OPTIONS = (
    ("warmup_min_ratio", float, 0.01, "ratio to the learning rate at the start"),
    ("cos_min_ratio", float, 0.01, "ratio to the learning rate at the end"),
)
# -1 on the command line means the schedule's default.
_UNSET_WHEN_NEGATIVE = frozenset({"cycle_first_stair_count", "cycle_second_step_size", "cycle_second_stair_count"})


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--lr_schedule`` and an option for each parameter of the schedules."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedule")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for name, kind, default, text in _RANGE_TEST_OPTIONS + _CYCLE_OPTIONS + _WARMUP_OPTIONS + _COSINE_OPTIONS:
        group.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default})")
    group.add_argument("--cycle_momentum", action="store_true", help="cycle the momentum too")
    group.add_argument("--total_num_steps", type=int, default=None, help="iterations until a decay ends")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(the tuning arguments on this program's command line, the other arguments)"""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(args: Any, params: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is not None and not (name in _UNSET_WHEN_NEGATIVE and value < 0):
            params[name] = value


def _names(options: Sequence[tuple[Any, ...]]) -> list[str]:
    return [option[0] for option in options]


def override_lr_range_test_params(args: Any, params: dict[str, Any]) -> None:
    """Copies the parameters of LRRangeTest that are set in ``args`` to ``params``."""
    _override(args, params, _names(_RANGE_TEST_OPTIONS))


def override_1cycle_params(args: Any, params: dict[str, Any]) -> None:
    """Copies the parameters of OneCycle that are set in ``args`` to ``params``."""
    _override(args, params, [*_names(_CYCLE_OPTIONS), "cycle_momentum"])


def override_warmupLR_params(args: Any, params: dict[str, Any]) -> None:
    """Copies the parameters of WarmupLR that are set in ``args`` to ``params``."""
    _override(args, params, _names(_WARMUP_OPTIONS))


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Copies every schedule parameter in ``args`` to ``params``."""
    override_lr_range_test_params(args, params)
    override_1cycle_params(args, params)
    override_warmupLR_params(args, params)


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """(a section ``scheduler`` for ``args``, None), or (None, the error)."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params: dict[str, Any] = {}
    if name == LR_RANGE_TEST:
        override_lr_range_test_params(args, params)
    elif name == ONE_CYCLE:
        override_1cycle_params(args, params)
    elif name == WARMUP_COSINE_LR:
        _override(args, params, ["warmup_num_steps", "warmup_type", *_names(_COSINE_OPTIONS), "total_num_steps"])
    else:
        override_warmupLR_params(args, params)
        if name == WARMUP_DECAY_LR:
            _override(args, params, ["total_num_steps"])
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """(the learning rate of a section ``scheduler``, ''), or (None, the reason why it has none)."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    key = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}.get(name, "warmup_max_lr")
    if params.get(key) is None:
        return None, f"{name} takes its learning rate from the optimizer: {key} is not in its params"
    return params[key], ""
