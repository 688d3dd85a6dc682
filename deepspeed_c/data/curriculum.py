"""Difficulty by step, in DeepSpeed's schedules (Li et al., Curriculum learning, arXiv 2108.06084)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError, StateError

__all__ = ["CurriculumScheduler"]

SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")


class CurriculumScheduler:
    """The difficulty of each step.

    ``config`` is a section ``curriculum_learning``, or one of ``curriculum_metrics``: ``min_difficulty``,
    ``max_difficulty``, ``schedule_type`` and ``schedule_config``. "fixed_linear" and "fixed_root" grow from the minimum
    to the maximum in ``total_curriculum_step`` steps, with a root of ``root_degree``, in multiples of
    ``difficulty_step``. "fixed_discrete" has one of ``difficulty`` until the step in ``max_step``. "custom" calls the
    function of ``set_custom_get_difficulty``. Difficulties are whole numbers. Raises ConfigError for a schedule that is
    incomplete or goes down.
    """

    def __init__(self, config: Mapping[str, Any], *, where: str = "curriculum_learning") -> None:
        self._where = where
        self._min = self._int(config, "min_difficulty")
        self._max = self._int(config, "max_difficulty")
        self._kind = self._need(config, "schedule_type")
        if self._kind not in SCHEDULES:
            raise self._error(f"is {self._kind!r}", "schedule_type", f"use one of {', '.join(SCHEDULES)}")
        if self._min > self._max:
            raise self._error(f"is {self._max}, below min_difficulty {self._min}", "max_difficulty", "let it grow")
        self._schedule_config = dict(config.get("schedule_config") or {})
        self._custom: Callable[[int], int] | None = None
        self._core = None if self._kind == "custom" else self._make(self._schedule_config)
        self._difficulty = self._min

    def _make(self, config: Mapping[str, Any]) -> _C.Curriculum:
        name = "schedule_config"
        if self._kind == "fixed_discrete":
            arguments = (self._need(config, "difficulty", name), self._need(config, "max_step", name))
        else:
            steps, multiple = (self._int(config, key, name) for key in ("total_curriculum_step", "difficulty_step"))
            degree = float(self._need(config, "root_degree", name)) if self._kind == "fixed_root" else 1.0
            arguments = (self._min, self._max, steps, multiple, degree)
        try:
            return _C.Curriculum(*arguments)
        except (OverflowError, TypeError, ValueError) as error:
            raise self._error(str(error), name, "give whole numbers that grow") from error

    def _need(self, config: Mapping[str, Any], key: str, inside: str = "") -> Any:
        value = config.get(key)
        if value is None:
            kind = getattr(self, "_kind", None)
            needs = "every schedule" if not inside else f'schedule_type "{kind}"'
            raise self._error("is missing", f"{inside}.{key}" if inside else key, f"set it: {needs} needs it")
        return value

    def _int(self, config: Mapping[str, Any], key: str, inside: str = "") -> int:
        value = self._need(config, key, inside)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            raise self._error(f"is {value!r}", f"{inside}.{key}" if inside else key, "use a whole number")
        return int(value)

    def _error(self, problem: str, key: str, fix: str) -> ConfigError:
        return ConfigError(problem, where=f"{self._where}.{key}", fix=fix)

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty of a step. Raises ConfigError for a "custom" schedule without a function."""
        if self._core is not None:
            return self._core.at(global_steps)
        if self._custom is None:
            raise self._error(
                "is custom, and there is no function",
                "schedule_type",
                "call engine.set_custom_curriculum_learning_schedule, or set_custom_get_difficulty, before the first step",
            )
        return self._custom(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Sets the current difficulty to that of a step, and returns it. The maximum stays once it is reached."""
        if self._difficulty < self._max or self._kind == "custom":
            self._difficulty = self.get_difficulty(global_steps)
        return self._difficulty

    def get_current_difficulty(self) -> int:
        return self._difficulty

    def set_current_difficulty(self, difficulty: int) -> None:
        self._difficulty = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Sets the function from step to difficulty of a "custom" schedule."""
        self._custom = schedule_function

    def get_state(self) -> dict[str, Any]:
        """The schedule and the current difficulty."""
        return {
            "current_difficulty": self._difficulty,
            "min_difficulty": self._min,
            "max_difficulty": self._max,
            "schedule_type": self._kind,
            "schedule_config": self._schedule_config,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Sets the current difficulty. Raises StateError if the state is another schedule's."""
        mine = self.get_state()
        for key in ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config"):
            if key in state and state[key] != mine[key]:
                raise StateError(
                    f"the state has {key} {state[key]!r}, this schedule has {mine[key]!r}",
                    where=self._where,
                    fix="resume with the section that was saved, or do not load the state",
                )
        self._difficulty = state["current_difficulty"]
