"""Chooses the layers of each stage, which are consecutive: by number, weight, class or time, or from a list."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from deepspeed_c.errors import ConfigError
from deepspeed_c.utils.runtime import partition_balanced, partition_uniform

__all__ = ["partition_layers"]

_WHERE = "PipelineModule(partition_method=...)"
_METHODS = '"parameters", "uniform", "profile", "type:REGEX" or a list of the first layer of each stage and the number of layers'


def partition_layers(
    method: str | Sequence[int],
    n_stages: int,
    kinds: Sequence[str],
    n_params: Sequence[int],
    times: Callable[[], Sequence[int]],
) -> list[int]:
    """The first layer of each stage, and the number of layers: n_stages + 1 numbers.

    kinds: the class name of each layer. n_params: the number of parameter elements of each layer. times: measures the
    time of each layer; it is called for "profile" only. Raises ConfigError, with both numbers, where there are fewer
    layers than stages. Also raises it where a method matches nothing, or where a list does not fit.
    """
    n = len(kinds)
    if n < n_stages:
        raise ConfigError(
            f"{n} layers for {n_stages} stages",
            where="PipelineModule(layers=...)",
            fix="use fewer stages, or cut the model finer",
        )
    if not isinstance(method, str):
        bounds = [int(bound) for bound in method]
        if len(bounds) != n_stages + 1 or bounds[0] != 0 or bounds[-1] != n or sorted(set(bounds)) != bounds:
            raise ConfigError(
                f"{bounds} does not cut {n} layers into {n_stages} stages",
                where=_WHERE,
                fix=f"write {n_stages + 1} rising numbers from 0 to {n}",
            )
        return bounds
    name = method.lower()
    if name in ("parameters", "best"):
        return partition_balanced(n_params, n_stages)
    if name == "uniform":
        return partition_uniform(n, n_stages)
    if name == "profile":
        return _with_lightest_heaviest(times(), n_stages)
    if name.startswith("type:"):
        pattern = method.split(":", 1)[1]
        try:
            weights = [int(re.search(pattern, kind, re.IGNORECASE) is not None) for kind in kinds]
        except re.error as error:
            raise ConfigError(f"{pattern!r} is no regular expression: {error}", where=_WHERE, fix="mend it") from error
        if sum(weights) < n_stages:
            raise ConfigError(
                f"{pattern!r} matches {sum(weights)} layers, and there are {n_stages} stages; classes are {sorted(set(kinds))}",
                where=_WHERE,
                fix="write a pattern of a class that every stage can have one of",
            )
        return partition_balanced(weights, n_stages)
    raise ConfigError(f"there is no method {method!r}", where=_WHERE, fix=f"use {_METHODS}")


def _with_lightest_heaviest(weights: Sequence[int], n_stages: int) -> list[int]:
    """The cut whose heaviest stage is as light as it can be. A pipeline is as fast as its slowest stage."""
    n = len(weights)
    sums = [0, *accumulate(weights)]

    def bounds_within(limit: int) -> list[int] | None:
        """Each stage takes as much as ``limit`` allows, but leaves a layer for each stage after it."""
        bounds = [0]
        for stage in range(n_stages):
            last = min(bisect_right(sums, sums[bounds[-1]] + limit) - 1, n - (n_stages - stage - 1))
            if last == bounds[-1]:
                return None
            bounds.append(last)
        return bounds if bounds[-1] == n else None

    low, high = max(weights), sums[-1]
    best = bounds_within(high) or []  # never empty: each stage takes a layer, and the last one the rest
    while low < high:
        middle = (low + high) // 2
        found = bounds_within(middle)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best
