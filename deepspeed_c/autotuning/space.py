"""The tuning space: the configurations that experiments may try, made from the user's configuration.

A key that the user wrote as a list of values, and that takes no list, is a range of that key.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from deepspeed_c.config import problems_of, read_config
from deepspeed_c.config.source import read_source
from deepspeed_c.config.stages import STAGES
from deepspeed_c.config.tuning import Autotuning
from deepspeed_c.errors import ConfigError

__all__ = ["Candidate", "Space", "make_space", "spread"]

MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
TRAIN_BATCH = "train_batch_size"
STAGE = "zero_optimization.stage"
_BATCH_KEYS = (MICRO_BATCH, ACCUMULATION, TRAIN_BATCH)
_BUCKETS = ("zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size")
_BUCKET_ELEMS = (5 * 10**7, 5 * 10**8)
_LONGEST_NAME = 120
_MISSING = object()


class Candidate(NamedTuple):
    """One configuration of the space."""

    name: str
    """Unique in the space, and the name of the experiment's folder."""
    config: dict[str, Any]
    choices: Mapping[str, Any]
    """The value of each key that differs in the space, by dotted key."""
    group: str
    """Candidates of one group differ in batch sizes only."""

    @property
    def micro_batch(self) -> int:
        return self.config[MICRO_BATCH]


class Space(NamedTuple):
    """The candidates, smallest micro-batches first, and the section that describes the search."""

    candidates: list[Candidate]
    section: Autotuning
    has_listed_batches: bool
    """Whether the user listed the micro-batches; otherwise a search tries some of them."""
    mappings: Mapping[str, str]
    """Dotted key -> the script's option that takes its value too."""
    autos: frozenset[str]
    """The keys of the batch that are "auto" in the file."""


def make_space(config: Mapping[str, Any], n_ranks: int, *, has_accelerator: bool) -> Space:
    """Returns the space of ``config`` for ``n_ranks`` ranks. ``config`` is not changed.

    Raises ConfigError for a configuration that is wrong, or whose space is empty.
    """
    autos = frozenset(key for key in _BATCH_KEYS if config.get(key) == "auto")
    config = copy.deepcopy(dict(config))
    config["autotuning"] = {**_section_of(config), "enabled": True}
    if get(config, STAGE) in ("all", ["all"]):  # DeepSpeed's words for every stage
        _put(config, STAGE, list(STAGES))
    ranges = _ranges_of(config)
    for path, values in ranges.items():
        if not values:
            raise ConfigError("is an empty list of values", where=path, fix="write one value or more")
        for value in reversed(values):  # the first one stays
            _put(config, path, value)
            wrong = [each for each in problems_of(config, batch="skip") if each.where == path]
            if wrong:
                raise wrong[0]
    loaded, problems = read_config(read_source(config)).resolve_with_problems(world_size=1, batch="skip")
    if problems:
        raise problems[0]
    section = loaded.autotuning
    if not section.fast:
        ranges = {**_default_ranges(config, n_ranks, has_accelerator=has_accelerator), **ranges}
    sizes = _micro_batches(ranges.pop(MICRO_BATCH, None), section)
    candidates = _candidates(config, ranges, sizes.values, section, n_ranks)
    if not candidates:
        raise ConfigError(
            f"no micro-batch from {section.min_train_micro_batch_size_per_gpu} to"
            f" {section.max_train_micro_batch_size_per_gpu} fits the global batch on {_n_copies(section, n_ranks, _n_together(config))} data-parallel ranks",
            where="autotuning",
            fix="widen min_train_micro_batch_size_per_gpu, max_train_micro_batch_size_per_gpu, min_train_batch_size"
            " and max_train_batch_size, or remove train_batch_size",
        )
    return Space(candidates, section, sizes.are_listed, section.arg_mappings or {}, autos)


def spread(values: Sequence[Any], n: int) -> list[Any]:
    """Returns ``n`` of the values, the first and the last included, with even steps between them; all if there are no
    more. One value is the last."""
    if n >= len(values):
        return list(values)
    if n == 1:
        return [values[-1]]
    return [values[i * (len(values) - 1) // (n - 1)] for i in range(n)]


def get(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value of a dotted key; ``default`` if it is not there."""
    found: Any = config
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    return found


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *parts, last = path.split(".")
    for part in parts:
        config = config.setdefault(part, {})
    config[last] = value


def _section_of(config: Mapping[str, Any]) -> dict[str, Any]:
    section = config.get("autotuning", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"{section!r} is not an object", where="autotuning", fix="write the keys between { and }")
    return dict(section)


def _ranges_of(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The lists at keys whose type takes no list."""
    refused = {problem.where for problem in problems_of(config, batch="skip")}
    return {path: values for path, values in _lists_in(config, "") if path in refused}


def _lists_in(section: Mapping[str, Any], prefix: str) -> list[tuple[str, list[Any]]]:
    found = []
    for key, value in section.items():
        if isinstance(value, Mapping):
            found += _lists_in(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            found.append((prefix + key, value))
    return found


def _default_ranges(config: Mapping[str, Any], n_ranks: int, *, has_accelerator: bool) -> dict[str, list[Any]]:
    """Ranges of keys that the user did not write."""
    ranges: dict[str, list[Any]] = {STAGE: list(STAGES)}
    if has_accelerator:
        ranges["zero_optimization.offload_optimizer.device"] = ["none", "cpu"]
    if "tensor_parallel" in config:
        ranges["tensor_parallel.autotp_size"] = [n for n in range(1, n_ranks + 1) if n_ranks % n == 0]
    ranges |= {path: list(_BUCKET_ELEMS) for path in _BUCKETS}
    ranges["activation_checkpointing.layers"] = [None, "auto"]
    return {path: values for path, values in ranges.items() if get(config, path, _MISSING) is _MISSING}


class _Sizes(NamedTuple):
    values: list[int]
    are_listed: bool


def _micro_batches(listed: list[int] | None, section: Autotuning) -> _Sizes:
    if listed is not None:
        return _Sizes(sorted(set(listed)), True)
    most = section.max_train_micro_batch_size_per_gpu
    if section.max_train_batch_size is not None:
        most = min(most, section.max_train_batch_size)
    sizes, size = [], section.min_train_micro_batch_size_per_gpu
    while size <= most:
        sizes.append(size)
        size *= 2
    return _Sizes(sizes, False)


def _candidates(
    config: Mapping[str, Any],
    ranges: Mapping[str, list[Any]],
    sizes: Sequence[int],
    section: Autotuning,
    n_ranks: int,
) -> list[Candidate]:
    # Gradient accumulation follows from the micro-batch, unless its own range was written.
    steps = {path: ranges[path] for path in (ACCUMULATION, TRAIN_BATCH) if path in ranges}
    others = {path: values for path, values in ranges.items() if path not in steps}
    found, names = [], set()
    for size in sizes:
        for values in itertools.product(*others.values()):
            for batch in itertools.product(*steps.values()):
                made = copy.deepcopy(dict(config))
                choices = {**dict(zip(others, values, strict=True)), **dict(zip(steps, batch, strict=True))}
                for path, value in choices.items():
                    _put(made, path, value)
                n_together = _n_together(made)
                if not _makes_sense(made, n_ranks, n_together):
                    continue
                n_steps = _accumulation(made, size, section, _n_copies(section, n_ranks, n_together))
                if n_steps is None:
                    continue
                made[MICRO_BATCH], made[ACCUMULATION] = size, n_steps
                made.pop(TRAIN_BATCH, None)
                name = _name(made, others, n_steps)
                if name in names:
                    continue
                names.add(name)
                group = json.dumps({key: made[key] for key in made if key not in _BATCH_KEYS}, sort_keys=True)
                varied = {MICRO_BATCH: size, ACCUMULATION: n_steps, **dict(zip(others, values, strict=True))}
                found.append(Candidate(name, made, varied, group))
    return found


def _accumulation(
    config: Mapping[str, Any], size: int, section: Autotuning, n_copies: int
) -> int | Literal["auto"] | None:
    """Accumulation steps for a micro-batch; None if its global batch is not wanted.

    With ``max_train_batch_size`` the global batch comes as near to it as it can. Otherwise a ``train_batch_size``
    stays what it is, or else the accumulation steps do; "auto" is what the script's own option says.
    """
    per_step = size * n_copies
    if section.max_train_batch_size is not None:
        steps = section.max_train_batch_size // per_step
    elif isinstance(config.get(TRAIN_BATCH), int):
        steps = config[TRAIN_BATCH] // per_step if config[TRAIN_BATCH] % per_step == 0 else 0
    elif config.get(ACCUMULATION) == "auto":
        return "auto"
    else:
        steps = config[ACCUMULATION] if isinstance(config.get(ACCUMULATION), int) else 1
    return steps if steps > 0 and steps * per_step >= section.min_train_batch_size else None


def _n_together(config: Mapping[str, Any]) -> int:
    """Ranks that hold a model, or a sequence, together."""
    read = read_config(read_source(config))
    return read.tensor_parallel_size[0] * read.sequence_parallel_size


def _n_copies(section: Autotuning, n_ranks: int, n_together: int) -> int:
    """Data-parallel ranks."""
    return max(n_ranks // max(section.mp_size, n_together), 1)


def _makes_sense(config: Mapping[str, Any], n_ranks: int, n_together: int) -> bool:
    """Whether stage and offload go together, since a stage that shards no states offloads none, and whether the ranks
    can be cut like this."""
    offloads = get(config, "zero_optimization.offload_optimizer.device", "none") not in ("none", None)
    return not (offloads and get(config, STAGE, 0) == 0) and n_ranks % n_together == 0


def _name(config: Mapping[str, Any], ranges: Mapping[str, Any], n_steps: int | str) -> str:
    """A name like DeepSpeed's: the stage, the accumulation steps, the micro-batch, and each other range by the first
    letters of its key."""
    parts = [f"z{get(config, STAGE, 0)}", f"gas{n_steps}", f"tmbspg{config[MICRO_BATCH]}"]
    for path in ranges:
        if path != STAGE:
            letters = "".join(word[0] for word in path.rpartition(".")[2].split("_") if word)
            parts.append(letters + _shown(get(config, path)))
    name = "_".join(parts)
    same_letters = len({part for part in parts[3:]}) < len(parts[3:])
    if len(name) <= _LONGEST_NAME and not same_letters:
        return name
    varied = json.dumps({path: get(config, path) for path in ranges}, sort_keys=True)
    return f"{'_'.join(parts[:3])}_{hashlib.sha256(varied.encode()).hexdigest()[:12]}"


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "T", False: "F", None: "N"}[value]
    text = f"{value:g}" if isinstance(value, (int, float)) else str(value)
    return "".join(c if c.isalnum() or c in "+-." else "-" for c in text)
