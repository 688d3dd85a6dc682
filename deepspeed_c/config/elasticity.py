"""The section ``elasticity``: a global batch that many numbers of ranks can share, and the micro-batch of each of them.

Names and numbers are the same as in ``deepspeed.elasticity`` of DeepSpeed 0.19.6. Version 0.1 of the
rules chooses a batch for many numbers of ranks; version 0.2 chooses one for many numbers of whole hosts, and if the
present number is not among these, a batch for this number alone. Nothing here needs torch.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, overload

from .._version import __version__
from ..env import read_env
from ..errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize
from ..logging import logger

__all__ = [
    "DECIDING",
    "ElasticityConfig",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "batch_of_world",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
    "get_best_candidates",
    "get_candidate_batch_sizes",
    "get_valid_gpus",
]

SECTION = "elasticity"
_SEEN = "DEEPSPEED_ELASTICITY_CONFIG"
OLDEST_DEEPSPEED = (0, 3, 8)
NEWEST_RULES = 0.2
# Highly composite numbers: each has more divisors than all smaller numbers (OEIS A002182).
# fmt: off
_HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)
# fmt: on
# Valid numbers of ranks that a message names on each side of a number that is not valid.
_N_NEAREST = 3

DECIDING = {
    "max_train_batch_size": "max_acceptable_batch_size",
    "micro_batch_sizes": "micro_batches",
    "version": "version",
    "min_gpus": "min_gpus",
    "max_gpus": "max_gpus",
    "prefer_larger_batch": "prefer_larger_batch_size",
    "model_parallel_size": "model_parallel_size",
    "num_gpus_per_node": "num_gpus_per_node",
}
"""The keys that decide the batch, and the attribute of ElasticityConfig for each."""


class ElasticityConfig:
    """The section ``elasticity`` as an object, with DeepSpeed's names for its values.

    Args:
        param_dict: the keys of the section. ``max_train_batch_size`` and ``micro_batch_sizes`` are required if
            ``enabled`` is true.

    Raises:
        ElasticityConfigError: a required key is missing, a value has a wrong type or is out of range.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        get = param_dict.get
        self.enabled = get("enabled", False)
        for key in ("max_train_batch_size", "micro_batch_sizes") if self.enabled else ():
            if key not in param_dict:
                raise _wrong(key, "is missing", "write it: an elastic run takes its batch from this section")
        self.max_acceptable_batch_size = _whole("max_train_batch_size", get("max_train_batch_size", 2000), 1)
        self.micro_batches = get("micro_batch_sizes", [2, 4, 6])
        if not isinstance(self.micro_batches, list) or not self.micro_batches:
            raise _wrong("micro_batch_sizes", f"{self.micro_batches!r} is not a list of sizes", "write [2, 4, 6]")
        for size in self.micro_batches:
            if not isinstance(size, int) or size < 1:
                raise _wrong("micro_batch_sizes", f"{size!r} is not a size", "write integers > 0")
        self.min_gpus, self.max_gpus = (
            _whole(key, get(key, default), 1) for key, default in (("min_gpus", 1), ("max_gpus", 10000))
        )
        if self.max_gpus < self.min_gpus:
            raise _wrong("min_gpus", f"is {self.min_gpus}, above max_gpus {self.max_gpus}", "lower it")
        self.model_parallel_size = _whole("model_parallel_size", get("model_parallel_size", 1), 1)
        self.num_gpus_per_node = _whole("num_gpus_per_node", get("num_gpus_per_node", 1), 1)
        self.min_time = get("min_time", 0)
        if not isinstance(self.min_time, (int, float)) or not self.min_time >= 0:
            raise _wrong("min_time", f"{self.min_time!r} is not a number of minutes", "write a number >= 0")
        self.version = get("version", NEWEST_RULES)
        self.prefer_larger_batch_size = get("prefer_larger_batch", True)
        self.ignore_non_elastic_batch_info = get("ignore_non_elastic_batch_info", False)

    def repr(self) -> dict[str, Any]:
        """The values by the names of their attributes."""
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4)


def _wrong(key: str, what: str, fix: str) -> ElasticityConfigError:
    return ElasticityConfigError(what, where=f"{SECTION}.{key}", fix=fix)


def _whole(key: str, value: Any, least: int) -> int:
    if not isinstance(value, (int, float)) or value != value // 1 or value < least:
        raise _wrong(key, f"{value!r} is not an integer >= {least}", f"write an integer >= {least}")
    return int(value)


def get_candidate_batch_sizes(base_list: Iterable[int], max_acceptable_batch_size: int) -> list[int]:
    """For each base its largest multiple by a highly composite number, at most 720720, that is not above the maximum.
    A base above the maximum gives none. The sizes are in ascending order, each once."""
    sizes = {
        _HIGHLY_COMPOSITE[bisect.bisect_right(_HIGHLY_COMPOSITE, max_acceptable_batch_size // base) - 1] * base
        for base in base_list
        if base < max_acceptable_batch_size
    }
    return sorted(sizes | {base for base in base_list if base == max_acceptable_batch_size})


def get_valid_gpus(
    batch_size: int, micro_batches: Iterable[int], min_valid_gpus: int, max_valid_gpus: int
) -> list[int]:
    """The numbers of ranks within the two limits that can share a batch of ``batch_size`` samples, in ascending order:
    every rank runs the same number of micro-batches of one of the given sizes."""
    numbers: set[int] = set()
    for micro_batch in micro_batches:
        if batch_size % micro_batch == 0:
            numbers |= _divisors(batch_size // micro_batch)
    return sorted(n for n in numbers if min_valid_gpus <= n <= max_valid_gpus)


def _divisors(n: int) -> set[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return {*small, *(n // i for i in small)}


def get_best_candidates(
    candidate_batch_sizes: Iterable[int],
    micro_batches: Sequence[int],
    min_gpus: int,
    max_gpus: int,
    prefer_larger: bool,
) -> tuple[int, list[int] | None]:
    """(the candidate that the most numbers of ranks can share, these numbers). Of equals, the largest or smallest
    candidate. If no number of ranks within the limits can share any candidate, the numbers are an empty list or None,
    as in DeepSpeed.
    """
    best, numbers = int(min(micro_batches)), None
    for size in candidate_batch_sizes:
        found = get_valid_gpus(size, micro_batches, min_gpus, max_gpus)
        gain = len(found) - len(numbers or ())
        if gain > 0 or (gain == 0 and (size > best if prefer_larger else size < best)):
            best, numbers = size, found
    return best, numbers


def _best_batch(section: ElasticityConfig, most: int, min_gpus: int, max_gpus: int) -> tuple[int, list[int] | None]:
    """(a batch of at most ``most`` samples, the numbers of ranks that can share it). A limit of 0 is none."""
    sizes = section.micro_batches
    if max(sizes) > most:
        raise _wrong(
            "micro_batch_sizes",
            f"{max(sizes)} is more than a batch of {most} samples has",
            f"remove it, or raise max_train_batch_size ({section.max_acceptable_batch_size})",
        )
    candidates = get_candidate_batch_sizes([*sizes, math.lcm(*sizes)], most)
    prefers = section.prefer_larger_batch_size
    return get_best_candidates(candidates, sizes, min_gpus or 1, max_gpus or most // min(sizes), prefers)


def _best_batch_of_hosts(section: ElasticityConfig, n_gpus: int) -> tuple[int, list[int], int | None]:
    """(batch, numbers of ranks that can share it, micro-batch of ``n_gpus`` devices, None if none divides its part), by
    version 0.2."""
    per_host, n_parts = section.num_gpus_per_node, section.model_parallel_size
    if per_host % n_parts:
        raise ElasticityError(
            f"{per_host} devices of a host cannot be divided into model copies of {n_parts}",
            where=f"{SECTION}.num_gpus_per_node, {SECTION}.model_parallel_size",
            fix="make num_gpus_per_node a multiple of model_parallel_size",
        )
    copies = per_host // n_parts
    most = section.max_acceptable_batch_size
    batch: float
    batch, n_hosts = _best_batch(section, most // copies, section.min_gpus // per_host, section.max_gpus // per_host)
    if n_hosts is None:
        raise _wrong("min_gpus", "no number of hosts within min_gpus and max_gpus can share a batch", "widen the two")
    batch *= copies
    worlds = [n * copies for n in n_hosts]
    if n_gpus // n_parts not in worlds:
        # Floats, with their rounding: DeepSpeed's numbers for a part of a host follow from it.
        world = n_gpus / per_host * copies
        each = [size * world for size in section.micro_batches]
        sizes = [math.floor(most / least) * least for least in each]
        batch = max(sizes) if section.prefer_larger_batch_size else min(sizes)
        worlds = [int(world)]
    fitting = [size for size in section.micro_batches if batch // n_gpus % size == 0]
    micro = None
    if fitting:
        micro = max(fitting) if section.prefer_larger_batch_size else fitting[0]
    return int(batch), worlds, micro


def _solve(section: ElasticityConfig, world_size: int) -> tuple[int, list[int] | None, int | None]:
    """(batch, valid numbers of ranks, micro-batch). ``world_size`` 0: that of the environment, if it is needed; the
    micro-batch is then that of version 0.2."""
    rules = _rules(section.version)
    if section.model_parallel_size > 1 and rules != NEWEST_RULES:
        raise _wrong(
            "model_parallel_size",
            f"is {section.model_parallel_size} at version {section.version}",
            "set version to 0.2",
        )
    micro = None
    if rules == NEWEST_RULES:
        batch, worlds, micro = _best_batch_of_hosts(section, world_size or _world_of_environment(section.version))
    else:
        most = section.max_acceptable_batch_size
        batch, worlds = _best_batch(section, most, section.min_gpus, section.max_gpus)
    if world_size:
        micro = _micro_batch(section, batch, worlds, world_size)
    return batch, worlds, micro


def _rules(version: Any) -> float:
    try:
        rules = float(version)
    except (TypeError, ValueError):
        rules = math.nan
    if rules not in (0.1, NEWEST_RULES):
        raise _wrong("version", f"{version!r} is not a version of the rules", "write 0.1 or 0.2")
    return rules


def _world_of_environment(version: Any) -> int:
    world_size = read_env().given_world_size
    if world_size is None:
        raise ElasticityConfigError(
            f"version {version} of the rules needs the number of ranks",
            where=f"{SECTION}, WORLD_SIZE",
            fix="pass world_size=..., or set the variable WORLD_SIZE",
        )
    return world_size


def _micro_batch(section: ElasticityConfig, batch: int, worlds: list[int] | None, world_size: int) -> int:
    """The largest micro-batch with which ``world_size`` ranks run the batch."""
    if world_size not in (worlds or ()):
        raise ElasticityIncompatibleWorldSize(
            f"{world_size} ranks cannot share its batch of {batch} samples; {_named(worlds or [], world_size)}",
            where=SECTION,
            fix="start one of these numbers of ranks, or change the section",
        )
    fitting = [size for size in section.micro_batches if batch // world_size % size == 0]
    if not fitting:
        raise ElasticityIncompatibleWorldSize(
            f"no size divides {batch // world_size}, the samples of each of {world_size} ranks in a batch of {batch}",
            where=f"{SECTION}.micro_batch_sizes",
            fix="add a size, or start another number of ranks",
        )
    return max(fitting)


def _named(worlds: list[int], world_size: int) -> str:
    """The valid numbers of ranks, the nearest ones if there are many."""
    if not worlds:
        return "no number within min_gpus and max_gpus can"
    if len(worlds) <= 2 * _N_NEAREST:
        return f"{', '.join(map(str, worlds))} can"
    place = bisect.bisect(worlds, world_size)
    near = worlds[max(place - _N_NEAREST, 0) : place + _N_NEAREST]
    return f"the nearest of {len(worlds)} numbers that can: {', '.join(map(str, near))}"


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for a batch that follows from its section ``elasticity``."""
    return ds_config.get(SECTION, {}).get("enabled", False)


def _check_unchanged(section: Mapping[str, Any]) -> None:
    """Refuse a section of which a key that decides the batch differs from that in the variable
    DEEPSPEED_ELASTICITY_CONFIG, the section that a scheduler has seen."""
    text = read_env().elasticity_config
    if text is None:
        return
    try:
        keys, why = json.loads(text), "it is not an object"
    except ValueError as error:
        keys, why = None, str(error)
    if not isinstance(keys, dict):
        raise ElasticityConfigError(
            f"is not a section elasticity: {why}", where=_SEEN, fix="set it to the section as JSON, or unset it"
        )
    try:
        seen = ElasticityConfig(keys)
    except ElasticityConfigError as error:
        raise ElasticityConfigError(error.what, where=f"{_SEEN}, {error.where}", fix=error.fix) from error
    present = ElasticityConfig(section)
    for key, name in DECIDING.items():
        if getattr(present, name) != getattr(seen, name):
            raise ElasticityConfigError(
                f"is {getattr(present, name)}, and {getattr(seen, name)} in {_SEEN}, which a scheduler has read",
                where=f"{SECTION}.{key}",
                fix="start with the section that the scheduler has seen, or give it this one",
            )


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Checks that the keys that decide the batch are those in the variable DEEPSPEED_ELASTICITY_CONFIG. Logs a warning
    if the variable is not set.

    Raises:
        ElasticityConfigError: a key differs, which the error names; or one of the sections is malformed.
    """
    _check_unchanged(runtime_elastic_config_dict)
    if read_env().elasticity_config is None:
        logger.warning(
            "%s is not set: a scheduler may choose ranks by another section elasticity than this run's", _SEEN
        )


def batch_of_world(section: Mapping[str, Any], world_size: int) -> tuple[int, int, int]:
    """(train_batch_size, micro-batch, accumulation steps) that an enabled section gives to ``world_size`` data-parallel
    ranks.

    Raises:
        ElasticityConfigError: the section is malformed, or differs from DEEPSPEED_ELASTICITY_CONFIG.
        ElasticityIncompatibleWorldSize: this number of ranks cannot share the batch.
    """
    read = ElasticityConfig(section)
    batch, _, micro = _solve(read, world_size)
    _check_unchanged(section)
    if micro is None or batch < micro * world_size:
        raise ElasticityIncompatibleWorldSize(
            f"{read.max_acceptable_batch_size} samples are fewer than a micro-batch on each of {world_size} ranks has",
            where=f"{SECTION}.max_train_batch_size",
            fix="raise it, give smaller micro_batch_sizes, or start fewer ranks",
        )
    return batch, micro, batch // (micro * world_size)


@overload
def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: Literal[0] = 0,
    return_microbatch: Literal[False] = False,
) -> tuple[int, list[int] | None]: ...
@overload
def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int] | None] | tuple[int, list[int] | None, int | None]: ...
def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int] | None] | tuple[int, list[int] | None, int | None]:
    """The global batch of a configuration's section ``elasticity``, and the numbers of ranks that can share it.

    Args:
        ds_config: a whole configuration, as a dictionary.
        target_deepspeed_version: the version that runs it; 0.3.8 was the first one with elasticity.
        world_size: data-parallel ranks. 0: not known; version 0.2 of the rules then reads the variable WORLD_SIZE.
        return_microbatch: whether the micro-batch is returned without ``world_size`` as well; for it, version 0.1 also
            reads WORLD_SIZE.

    Returns:
        (batch, valid numbers of ranks), or with ``world_size`` or ``return_microbatch`` (batch, valid numbers of ranks,
        micro-batch). Batches are in samples.

    Raises:
        ElasticityConfigError: the section is missing, disabled or malformed, or the number of ranks is not known.
        ElasticityIncompatibleWorldSize: this number of ranks cannot share the batch.
        ElasticityError: the version has no elasticity, or hosts cannot be divided into model copies.
    """
    if not isinstance(ds_config, dict):
        raise ElasticityConfigError(
            f"{type(ds_config).__name__} is not a dictionary", where="compute_elastic_config", fix="pass one"
        )
    if SECTION not in ds_config:
        raise ElasticityConfigError("the section is missing", where=SECTION, fix="add it, for an elastic run")
    if not elasticity_enabled(ds_config):
        raise _wrong("enabled", "is false", "set it to true, for an elastic run")
    section = ElasticityConfig(ds_config[SECTION])
    if not isinstance(world_size, int) or world_size < 0:
        raise ElasticityConfigError(f"{world_size!r} is not a number of ranks", where="world_size", fix="pass one")
    _check_target(target_deepspeed_version)
    if return_microbatch and not world_size and _rules(section.version) != NEWEST_RULES:
        world_size = _world_of_environment(section.version)
    batch, worlds, micro = _solve(section, world_size)
    return (batch, worlds, micro) if world_size or return_microbatch else (batch, worlds)


def _check_target(version: str) -> None:
    if version == __version__:  # of this package, which counts from 0.1
        return
    found = re.match(r"v?(\d+(?:\.\d+)*)(a|b|rc|\.dev)?", str(version))
    numbers = tuple(map(int, found[1].split("."))) if found else ()
    if not found or numbers < OLDEST_DEEPSPEED or (numbers == OLDEST_DEEPSPEED and found[2]):
        raise ElasticityError(
            f"{version!r} is not a version of DeepSpeed from {'.'.join(map(str, OLDEST_DEEPSPEED))} on, the first one "
            "with elasticity",
            where="target_deepspeed_version",
            fix="pass deepspeed.__version__",
        )
