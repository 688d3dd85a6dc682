"""The order in which candidates are tried, and when to stop: kinds of search as rows of a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from deepspeed_c.autotuning.space import Candidate

__all__ = ["KINDS", "SMALLER_IS_BETTER", "is_better"]

# The other metrics are rates, and larger is better.
SMALLER_IS_BETTER = frozenset({"latency", "forward", "step"})
_SEED = 0
# Weight of the squared coefficients in the fit: a unit of it is one observation that says 0.
_RIDGE = 0.1

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
    """The candidate that a model of the metric expects most of.

    The model is a ridge regression of the metric's logarithm on a term for each value of each key, and on the
    micro-batch's logarithm and its square. A candidate whose values have not been tried yet is expected to do as the
    best of the others, plus the uncertainty of the fit (an upper confidence bound).
    """
    seen = [each for each in tried if values.get(each.name, 0.0) > 0]
    if not seen:
        return left[0]
    everyone = [*seen, *left]
    features = _features(everyone)
    sign = -1.0 if metric in SMALLER_IS_BETTER else 1.0
    target = sign * np.log([values[each.name] for each in seen])
    known, mean = features[: len(seen)], target.mean()
    inverse = np.linalg.inv(known.T @ known + _RIDGE * np.eye(features.shape[1]))
    weights = inverse @ known.T @ (target - mean)
    unknown = features[len(seen) :]
    # Of a ridge regression, x' inverse x times the variance of the noise is the variance of the prediction.
    noise = max(float(np.std(target)), 1e-3)
    bound = unknown @ weights + noise * np.sqrt(np.einsum("ij,jk,ik->i", unknown, inverse, unknown))
    return left[int(np.argmax(bound))]


def _features(candidates: Sequence[Candidate]) -> np.ndarray:
    """One row a candidate."""
    terms = sorted({(key, repr(value)) for each in candidates for key, value in each.choices.items()})
    columns = {term: i for i, term in enumerate(terms)}
    rows = np.zeros((len(candidates), len(columns) + 2))
    for row, each in zip(rows, candidates, strict=True):
        for key, value in each.choices.items():
            row[columns[key, repr(value)]] = 1.0
        row[-2] = np.log2(each.micro_batch)
        row[-1] = row[-2] ** 2
    scale = np.abs(rows).max(axis=0)
    return rows / np.where(scale > 0, scale, 1.0)


KINDS: dict[str, Callable[[Sequence[Candidate], Sequence[Candidate], Values, str], Candidate]] = {
    "gridsearch": next_of_grid,
    "random": next_of_random,
    "model_based": next_of_model,
}
