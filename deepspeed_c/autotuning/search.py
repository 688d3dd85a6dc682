"""The order in which candidates are tried, and when to stop: kinds of search as rows of a table."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from deepspeed_c.autotuning.space import Candidate
from deepspeed_c.errors import ConfigError

__all__ = ["KINDS", "SMALLER_IS_BETTER", "check_kind", "is_better"]

# The other metrics are rates, and larger is better.
SMALLER_IS_BETTER = frozenset({"latency", "forward", "step"})
_SEED = 0

Values = Mapping[str, float]
"""The metric of each candidate that ran, by name."""


def is_better(metric: str, value: float, than: float | None) -> bool:
    """Whether ``value`` beats ``than``; anything beats None."""
    if than is None:
        return True
    return value < than if metric in SMALLER_IS_BETTER else value > than


def next_of_grid(left: Sequence[Candidate], tried: Sequence[Candidate], values: Values, metric: str) -> Candidate:
    """The candidates in their order."""
    return left[0]


def next_of_random(left: Sequence[Candidate], tried: Sequence[Candidate], values: Values, metric: str) -> Candidate:
    """Any candidate, each as likely. Two searches of one space agree."""
    return random.Random(_SEED + len(tried)).choice(left)


def next_of_model(left: Sequence[Candidate], tried: Sequence[Candidate], values: Values, metric: str) -> Candidate:
    """The candidate next to the point that optuna's Gaussian process suggests; the first one until a candidate has run.

    The process models the logarithm of the metric. A candidate that failed counts as the worst of those that ran, so
    that its neighbours are not what is tried next.
    """
    import optuna

    known = [values[each.name] for each in tried if values.get(each.name, 0.0) > 0]
    if not known:
        return left[0]
    worst = max(known) if metric in SMALLER_IS_BETTER else min(known)
    axes = _axes([*tried, *left])
    distributions = {axis.key: axis.distribution() for axis in axes}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    direction = "minimize" if metric in SMALLER_IS_BETTER else "maximize"
    study = optuna.create_study(direction=direction, sampler=_sampler(_SEED + len(tried)))
    for each in tried:
        value, params = values.get(each.name, 0.0), {axis.key: axis.place(each) for axis in axes}
        logarithm = math.log(value if value > 0 else worst)
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=logarithm))
    point = study.ask(distributions).params
    # A suggestion may be tried, pruned or left out, or no candidate at all.
    return min(left, key=lambda each: sum(axis.distance(axis.place(each), point[axis.key]) for axis in axes))


class _Axis(NamedTuple):
    """A key of the space, as optuna takes it. Numbers of which the largest is four times the smallest, or more, are on
    a logarithmic scale; other values have no order."""

    key: str
    is_number: bool
    values: list[Any]
    """Sorted logarithms to base 2, or sorted texts."""

    def place(self, candidate: Candidate) -> Any:
        value = candidate.choices[self.key]
        return math.log2(value) if self.is_number else repr(value)

    def distribution(self) -> Any:
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        if self.is_number:
            return FloatDistribution(self.values[0], self.values[-1])
        return CategoricalDistribution(self.values)

    def distance(self, place: Any, other: Any) -> float:
        """0 for the same place, 1 for the two ends of a scale and for values without an order."""
        if self.is_number:
            return abs(place - other) / (self.values[-1] - self.values[0])
        return float(place != other)


def _axes(candidates: Sequence[Candidate]) -> list[_Axis]:
    """The keys that differ among the candidates."""
    axes = []
    for key in candidates[0].choices:
        values = [each.choices[key] for each in candidates]
        is_number = all(isinstance(value, (int, float)) and value > 0 for value in values)
        is_number = is_number and max(values) >= 4 * min(values)
        places = sorted({math.log2(value) if is_number else repr(value) for value in values})
        if len(places) > 1:
            axes.append(_Axis(key, is_number, places))
    return axes


def _sampler(seed: int) -> Any:
    """The sampler of a study: a Gaussian process once two experiments have ended."""
    import optuna

    with warnings.catch_warnings():
        # The sampler and its options are experimental features of optuna.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=2, deterministic_objective=True)


def check_kind(kind: str) -> None:
    """Raises ConfigError if a package is absent that this kind of search needs."""
    if kind != "model_based":
        return
    try:
        import optuna  # noqa: F401
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f'"{kind}" needs optuna and scipy: {error}',
            where="autotuning.tuner_type",
            fix='pip install \'deepspeed_c[tuning]\', or choose "gridsearch" or "random"',
        ) from error


KINDS: dict[str, Callable[[Sequence[Candidate], Sequence[Candidate], Values, str], Candidate]] = {
    "gridsearch": next_of_grid,
    "random": next_of_random,
    "model_based": next_of_model,
}
