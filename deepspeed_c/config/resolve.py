"""Resolve a configuration that has been read: batch sizes, values that follow from others, keys without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ..errors import BatchSizeError, ConfigError, ElasticityConfigError, ElasticityError
from .batch import Batch, resolve_batch
from .checks import conflicts
from .coerce import show
from .config import Config
from .elasticity import ElasticityConfig, batch_of_world
from .findings import BATCH_KEYS, Findings
from .keys import FrozenDict
from .schema import Root, fields_of
from .source import GivenConfig
from .tuning import Elasticity

__all__ = ["ReadConfig"]


class ReadConfig:
    """A configuration that has been read, before the number of ranks is known. ``resolve`` may be called for several
    numbers of ranks.

    Make one with ``read_config``.
    """

    def __init__(self, source: GivenConfig, root: Root, found: Findings) -> None:
        self._source, self._root, self._found = source, root, found

    @property
    def tensor_parallel_size(self) -> tuple[int, str]:
        """(number of tensor-parallel ranks, 1 without tensor parallelism; the key that gives the number). ``resolve``
        needs the number of data-parallel ranks, and this number is needed to compute it. Errors in other keys are not
        reported here."""
        section = self._root.tensor_parallel
        sizes = {
            "tensor_parallel.autotp_size": section.autotp_size,
            "tensor_parallel.tp.tp_size": section.tp.tp_size,
        }
        key = next((key for key, size in sizes.items() if size > 1), "tensor_parallel.autotp_size")
        return max(sizes[key], 1), key

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that hold parts of one sequence, 1 without sequence parallelism. Like
        ``tensor_parallel_size``, it is needed before ``resolve``."""
        return self._root.sequence_parallel_size

    def resolve(self, *, world_size: int, batch: Literal["resolve", "skip"] = "resolve") -> Config:
        """The configuration on ``world_size`` data-parallel ranks. ``batch`` and the errors are those of
        ``load_config``."""
        config, problems = self.resolve_with_problems(world_size=world_size, batch=batch)
        if problems:
            raise _join(problems)
        return config

    def resolve_with_problems(
        self, *, world_size: int, batch: Literal["resolve", "skip"] = "resolve"
    ) -> tuple[Config, list[ConfigError]]:
        """The configuration, with defaults for wrong values, and every problem that ``resolve`` would report."""
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(
                f"{world_size!r} is not a number of ranks", where="world_size", fix="pass an integer >= 1"
            )
        if batch not in ("resolve", "skip"):
            raise ConfigError(f"{batch!r} is not known", where="batch", fix='pass "resolve" or "skip"')
        found = self._found.copy()
        root = _with_grain(self._root, found)
        root, sizes = _with_batch(root, found, world_size if batch == "resolve" else None)
        to_fill = _report_unfilled(found, is_error=batch == "resolve")
        if root.zero.overlap_comm is None:
            zero = msgspec.structs.replace(root.zero, overlap_comm=root.zero.sharding.parameters)
            root = msgspec.structs.replace(root, zero=zero)
            found.sources["zero_optimization.overlap_comm"] = "derived"
        root, inert = _without_inert(root, found)
        found.problems.extend(conflicts(root, found.unfilled))
        if root.strict:
            found.refuse_notes()
        config = Config(
            **{name: getattr(root, name) for name in root.__struct_fields__},
            batch=sizes,
            origin=self._source.origin,
            notes=(*map(str, found.notes), *to_fill),
            unfilled=tuple(found.unfilled),
            _inert=FrozenDict(inert),
            _sources=FrozenDict(found.sources),
            _unpassed=FrozenDict(found.unpassed),
            _given=self._source.keys,
        )
        return config, found.problems


def _join(problems: list[ConfigError]) -> ConfigError:
    if len(problems) == 1:
        return problems[0]
    kinds = {type(problem) for problem in problems}
    lines = "".join(
        f"\n  {number}. " + str(problem).replace("\n", "\n     ") for number, problem in enumerate(problems, 1)
    )
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    return kind(f"{len(problems)} problems{lines}", where="configuration")


def _with_grain(root: Root, found: Findings) -> Root:
    """Take the micro-batch from same_bits.grain. The global batch must be given: with a batch that follows from the
    number of ranks, bits would depend on it."""
    section, (train, micro, _) = root.same_bits, BATCH_KEYS
    if not section.enabled or root.elasticity.enabled:
        return root
    if getattr(root, train) is None and found.sources.get(train) != "auto":
        found.fail(
            "is missing: without it the samples of a step depend on the number of ranks",
            train,
            'write it ("auto" if the Trainer or accelerate fills it), and leave gradient_accumulation_steps out: it follows from the number of ranks',
        )
    if section.grain is None or getattr(root, micro) is not None:
        return root
    found.sources[micro] = "derived"
    return msgspec.structs.replace(root, **{micro: section.grain})


def _with_batch(root: Root, found: Findings, world_size: int | None) -> tuple[Root, Batch | None]:
    """Solve the batch triangle and write the result into the keys. An "auto" that cannot be solved stays unfilled.
    ``world_size`` None: leave the triangle as it is."""
    if root.elasticity.enabled:
        return _with_elastic_batch(root, found, world_size)
    autos = [name for name in BATCH_KEYS if found.sources.get(name) == "auto"]
    if world_size is None:
        _leave_open(found, autos)
        return root, None
    if any(problem.where.split(" ")[0] in BATCH_KEYS for problem in found.problems):
        return root, None
    if root.train_batch_size is None and root.train_micro_batch_size_per_gpu is None:
        _leave_open(found, autos)
        if any(name in autos for name in BATCH_KEYS[:2]):
            return root, None
    root = _without_copies(root, found, world_size)
    try:
        sizes, filled = resolve_batch(*(getattr(root, name) for name in BATCH_KEYS), world_size)
    except BatchSizeError as error:
        found.problems.append(error)
        return root, None
    _leave_open(found, [name for name in autos if filled[name] == "default"])
    for name, source in filled.items():
        if source == "derived" or name not in found.sources:
            found.sources[name] = source
    return msgspec.structs.replace(root, **dict(zip(BATCH_KEYS, sizes))), sizes


def _with_elastic_batch(root: Root, found: Findings, world_size: int | None) -> tuple[Root, Batch | None]:
    """Take the batch from the section elasticity, and refuse other keys of the batch unless the section allows them.
    ``world_size`` None: only check the section.
    """
    if any(problem.where.startswith("elasticity") for problem in found.problems):
        return root, None
    if root.autotuning.enabled:
        found.fail("both decide the batch", "autotuning.enabled, elasticity.enabled", "enable one of them")
    beside = [name for name in BATCH_KEYS if name in found.sources]
    try:
        if beside and not root.elasticity.ignore_non_elastic_batch_info:
            raise ElasticityConfigError(
                "is given beside the section elasticity, which decides the batch",
                where=", ".join(map(found.place, beside)),
                fix='remove it, or set "ignore_non_elastic_batch_info": true in the section',
            )
        section = _given_keys(root.elasticity, found.sources)
        if world_size is None:
            ElasticityConfig(section)
            return root, None
        sizes, _ = resolve_batch(*batch_of_world(section, world_size), world_size)
    except (BatchSizeError, ElasticityError) as error:
        found.problems.append(error)
        return root, None
    for name, size in zip(BATCH_KEYS, sizes):
        if name in beside:
            given = '"auto"' if found.sources[name] == "auto" else show(getattr(root, name))
            found.note(name, f"= {given} is ignored: elasticity makes it {size}", is_harmless=True)
        found.sources[name] = "derived"
    return msgspec.structs.replace(root, **dict(zip(BATCH_KEYS, sizes))), sizes


def _given_keys(section: Elasticity, sources: Mapping[str, str]) -> dict[str, Any]:
    """The keys of the section that were given, as a dictionary in JSON's types."""
    given = {name: getattr(section, name) for name in section.__struct_fields__ if f"elasticity.{name}" in sources}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def _without_copies(root: Root, found: Findings, world_size: int) -> Root:
    """Correct a train_batch_size that counts each sample once for every tensor-parallel rank. Tensor-parallel ranks get
    the same samples. transformers, accelerate and DeepSpeed count such a sample once a rank if all three sizes are
    given. Here train_batch_size counts the distinct samples of one optimizer step.
    """
    train, micro, steps = (getattr(root, name) for name in BATCH_KEYS)
    n_ranks = root.tensor_parallel.autotp_size
    if None in (train, micro, steps) or n_ranks < 2 or train != micro * steps * world_size * n_ranks:
        return root
    found.note("train_batch_size", f"{train} counts each sample on {n_ranks} tensor-parallel ranks: {train // n_ranks}")
    return msgspec.structs.replace(root, train_batch_size=train // n_ranks)


def _leave_open(found: Findings, names: list[str]) -> None:
    """Note batch sizes that were "auto" and do not follow from the others."""
    for name in names:
        found.leave_open(name, fields_of(Root)[name])


def _report_unfilled(found: Findings, *, is_error: bool) -> tuple[str, ...]:
    """Report every "auto" that is left in one problem, or else in the returned note. "strict" makes no error of it."""
    if not found.unfilled:
        return ()
    if not is_error:
        names = ", ".join(found.place(where) for where in found.unfilled)
        return (f'"auto", for the Hugging Face Trainer or accelerate to fill: {names}',)
    if len(found.unfilled) == 1:
        where = found.place(*found.unfilled)
        what = '"auto" stands here, and nothing has put a value in its place'
    else:
        where = "configuration"
        what = f'"auto" stands in {len(found.unfilled)} keys, and nothing has put values in its place'
    found.problems.append(
        ConfigError(
            what,
            where=where,
            fix="the Hugging Face Trainer does so when the configuration goes through TrainingArguments(deepspeed=...), and "
            "accelerate, for all but betas and eps, through DeepSpeedPlugin(hf_ds_config=...). Without them write"
            + "".join(f"\n  {found.place(key)}: {value}" for key, value in found.unfilled.items()),
        )
    )
    return ()


def _without_inert(root: Root, found: Findings) -> tuple[Root, dict[str, Any]]:
    """The configuration without values that have no effect in DeepSpeed because of other keys, and the reason for each
    such key."""
    param = root.zero.offload_param
    if param.device == "none" or root.zero.sharding.parameters or "zero_optimization.stage" in found.unfilled:
        return root, {}
    where = "zero_optimization.offload_param.device"
    why = f"ZeRO stage {root.zero.stage} keeps weights whole on each rank"
    found.note(where, f"= {show(param.device)} has no effect: {why}")
    zero = msgspec.structs.replace(root.zero, offload_param=msgspec.structs.replace(param, device="none"))
    return msgspec.structs.replace(root, zero=zero), {where: why}
