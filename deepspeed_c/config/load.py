"""Turn the user's configuration into a checked, immutable Config: names, "auto", types, ranges, features, sources."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from ..errors import BatchSizeError, ConfigError, UnsupportedConfigError
from .aliases import NAMES_ELSEWHERE, OLD_KEYS, stage_from_switch
from .batch import resolve_batch
from .checks import conflicts
from .coerce import BadValue, coerce, describe, show
from .config import Config
from .features import FEATURES
from .keys import FrozenDict, Section
from .nearest import abbreviated, nearest
from .optim import FILLED_PARAMS, Kind, OptimizerSection, find_torch_optimizer
from .schema import Root, SectionField, fields_of, kinds_of, walk
from .source import PARKED, copy_plain, is_parked, read_source

__all__ = ["load_config", "load_with_problems", "problems_of", "sequence_parallel_size", "tensor_parallel_size"]

_NAME = re.compile(r"[a-z][a-z0-9_-]*", re.IGNORECASE)
# DeepSpeed ignores a key of these sections if its value is "auto".
_DROP_AUTO = (
    "zero_optimization.",
    "fp16.",
    "bf16.",
    "tensor_parallel.",
    "hybrid_engine.",
    "compile.",
    "comms_logger.",
    "timers.throughput.",
    "tensorboard.",
    "wandb.",
    "csv_monitor.",
    "comet.",
)
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def load_config(
    source: Any,
    *,
    world_size: int,
    overrides: Mapping[str, Any] | None = None,
    batch: Literal["resolve", "skip"] = "resolve",
) -> Config:
    """Read and check a DeepSpeed configuration.

    Args:
        source: a dict (never changed), the path of a JSON file, or base64-encoded JSON.
        world_size: data-parallel ranks, at least 1.
        overrides: keys that replace keys of ``source``, nested or dotted ("optimizer.params.lr"); this is how a caller
            resolves an "auto".
        batch: "skip" is for a configuration that another program has yet to fill. The batch sizes then stay unresolved
            (``Config.batch`` is None). Each "auto" that the Hugging Face Trainer or accelerate fills is replaced by the
            default, and ``Config.unfilled`` names its key. Without "skip" such an "auto" is an error (keys.py has the
            rule).

    Raises:
        ConfigError: all problems, in one message.
        UnsupportedConfigError: the only problem is a request for a feature that this version lacks.
        BatchSizeError: the only problem is the batch sizes.
    """
    config, problems = load_with_problems(source, world_size=world_size, overrides=overrides, batch=batch)
    if problems:
        raise _join(problems)
    return config


def tensor_parallel_size(source: Any) -> tuple[int, str]:
    """(number of tensor-parallel ranks, 1 without tensor parallelism; the key that gives the number). ``load_config``
    needs the number of data-parallel ranks, and this number is needed to compute it. Errors in other keys are not
    reported here."""
    config, _ = load_with_problems(source, world_size=1, batch="skip")
    section = config.tensor_parallel
    sizes = {
        "tensor_parallel.autotp_size": section.autotp_size,
        "tensor_parallel.tp.tp_size": section.tp.tp_size,
    }
    key = next((key for key, size in sizes.items() if size > 1), "tensor_parallel.autotp_size")
    return max(sizes[key], 1), key


def sequence_parallel_size(source: Any) -> int:
    """Number of ranks that hold parts of one sequence, 1 without sequence parallelism. Like ``tensor_parallel_size``,
    it is needed before ``load_config``."""
    config, _ = load_with_problems(source, world_size=1, batch="skip")
    return config.sequence_parallel_size


def problems_of(
    source: Any,
    *,
    world_size: int = 1,
    overrides: Mapping[str, Any] | None = None,
    batch: Literal["resolve", "skip"] = "resolve",
) -> list[ConfigError]:
    """The problems that ``load_config`` would report, as separate errors; empty for a valid configuration."""
    try:
        return load_with_problems(source, world_size=world_size, overrides=overrides, batch=batch)[1]
    except ConfigError as error:
        return [error]


def _join(problems: list[ConfigError]) -> ConfigError:
    if len(problems) == 1:
        return problems[0]
    kinds = {type(problem) for problem in problems}
    lines = "".join(
        f"\n  {number}. " + str(problem).replace("\n", "\n     ") for number, problem in enumerate(problems, 1)
    )
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    return kind(f"{len(problems)} problems{lines}", where="configuration")


def load_with_problems(
    source: Any,
    *,
    world_size: int,
    overrides: Mapping[str, Any] | None = None,
    batch: Literal["resolve", "skip"] = "resolve",
) -> tuple[Config, list[ConfigError]]:
    """The configuration, with defaults for wrong values, and every problem that ``load_config`` would report.

    Raises:
        ConfigError: the source cannot be read.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"{world_size!r} is not a number of ranks", where="world_size", fix="pass an integer >= 1")
    if batch not in ("resolve", "skip"):
        raise ConfigError(f"{batch!r} is not known", where="batch", fix='pass "resolve" or "skip"')
    given, origin = read_source(source)
    reader = _Reader(lenient=batch == "skip")
    tree = reader.rename(reader.undot(copy_plain(given, origin)))
    if overrides:
        tree = reader.override(tree, reader.rename(reader.undot(copy_plain(overrides, "overrides"))))
    root = reader.section(Root, tree, "")
    root, sizes = reader.batch(root, world_size if batch == "resolve" else None)
    reader.report_unfilled()
    if root.zero.overlap_comm is None:
        zero = msgspec.structs.replace(root.zero, overlap_comm=root.zero.stage == 3)
        root = msgspec.structs.replace(root, zero=zero)
        reader.sources["zero_optimization.overlap_comm"] = "derived"
    root = reader.without_inert(root)
    reader.problems += conflicts(root, reader.unfilled)
    if root.strict:
        reader.refuse_notes()
    config = Config(
        **{name: getattr(root, name) for name in root.__struct_fields__},
        batch=sizes,
        origin=origin,
        notes=tuple(map(str, reader.notes)) + reader.to_fill,
        unfilled=tuple(reader.unfilled),
        _inert=FrozenDict(reader.inert),
        _sources=FrozenDict(reader.sources),
        _unpassed=FrozenDict(reader.unpassed),
        _given=given,
    )
    return config, reader.problems


class _Note(NamedTuple):
    """A fact about a key that the user may want to know."""

    where: str
    what: str
    is_harmless: bool = False
    """Whether the note is only information: "strict" makes no error of it."""

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


class _Reader:
    """Reads one configuration. Collects the problems, the notes for the user, and the source of each value."""

    def __init__(self, *, lenient: bool) -> None:
        self.lenient = lenient
        self.problems: list[ConfigError] = []
        self.notes: list[_Note] = []
        # The note about keys that another program has yet to fill. "strict" makes no error of it.
        self.to_fill: tuple[str, ...] = ()
        # Path of a key that was written and has no effect here -> why.
        self.inert: dict[str, str] = {}
        self.sources: dict[str, str] = {}
        # Path of a key -> its spelling in the source, where this is another.
        self.spelt: dict[str, str] = {}
        # Parameters of optimizer and schedule that were written and have no effect.
        self.unpassed: dict[str, Any] = {}
        # Paths that came from the caller's overrides.
        self.overridden: set[str] = set()
        # Path of each "auto" that another program has yet to fill -> a description of possible values.
        self.unfilled: dict[str, str] = {}
        # The section of a missing feature, while it is being read: sections inside it get no separate note.
        self.missing: str | None = None

    # Names

    def undot(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Move dotted top-level keys such as "zero_optimization.stage" into their sections. A dotted key wins over the
        same key in the section."""
        result = {name: value for name, value in tree.items() if "." not in name or is_parked(name)}
        for name, value in tree.items():
            if name in result:
                continue
            *sections, last = name.split(".")
            place = result
            for i, section in enumerate(sections):
                if place.get(section) is None:
                    place[section] = {}
                place = place[section]
                if not isinstance(place, dict):
                    self.fail(
                        f"{'.'.join(sections[: i + 1])} is {show(place)}, which has no keys",
                        name,
                        "write the section as an object {...}, or remove this key",
                    )
                    break
            else:
                if last in place and place[last] != value:
                    self.note(f'"{name}"', f"= {show(value)} replaces {show(place[last])} of the section")
                place[last] = value
        return result

    def rename(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Move old and second names to the schema's names."""
        if isinstance(tree.get("zero_optimization"), bool):
            self.note("zero_optimization", 'as a switch is old: write {"stage": 1}')
            tree["zero_optimization"] = stage_from_switch(tree["zero_optimization"])
        for key in OLD_KEYS:
            *sections, old = key.old.split(".")
            place = _descend(tree, sections)
            if place is None or old not in place:
                continue
            value = place.pop(old)
            if key.new is None:
                self.note(key.old, "is old and has no effect")
                continue
            *sections, new = key.new.split(".")
            place = _descend(tree, sections, make=True)
            value = key.convert(value) if key.convert else value
            if place is None or (new in place and place[new] != value):
                self.fail(f"is the same key as {key.new}, and both are given", key.old, f"keep {key.new}")
                continue
            place[new] = value
            self.spelt[key.new] = key.old
            self.note(key.old, f"is read as {key.new}")
        return tree

    def override(self, tree: dict[str, Any], top: dict[str, Any], path: str = "") -> dict[str, Any]:
        """``tree`` with the keys of ``top`` laid over it, section by section."""
        result = dict(tree)
        for name, value in top.items():
            where = path + name
            if isinstance(value, dict) and isinstance(result.get(name), dict):
                result[name] = self.override(result[name], value, where + ".")
            else:
                result[name] = value
                self.overridden.add(where)
        return result

    # Values

    def section(self, cls: type[Section], given: dict[str, Any], path: str) -> Section:
        """Read one section. Problems are collected; a key with a problem gets its default."""
        fields = fields_of(cls)
        kind = self.kind(cls, given, path)
        values: dict[str, Any] = {}
        for name, value in given.items():
            where = path + name
            if self.is_parked(name, where):
                continue
            if name not in fields:
                self.unknown(name, path, list(fields))
            elif name == "params" and kinds_of(cls) is not None:
                values[name] = self.params(kind, value, where)
                self.mark(where, "user")
            elif name == "type" and kinds_of(cls) is not None:
                if kind is not None:
                    values[name] = kind.name
                    self.mark(where, "user")
            else:
                self.value(fields[name], value, where, values)
        for field in fields.values():
            if field.default is msgspec.NODEFAULT and field.attribute not in values:
                if path + field.name not in self.sources and field.name not in given:
                    self.fail("is missing", path + field.name, f"write {describe(field.hint, field.info)}")
                values[field.attribute] = None
        return cls(**values)

    def value(self, field: SectionField, value: Any, where: str, values: dict[str, Any]) -> None:
        """Read one key into ``values``, or leave it out so that its default holds."""
        if isinstance(value, str) and value == "auto" and field.info.auto != "value":
            self.auto(field, where)
            return
        if field.section is not None and not field.container:
            if value is None:
                return
            if not isinstance(value, dict):
                self.fail(f"{show(value)} is not a section", where, "write an object {...}")
                return
            values[field.attribute] = self.subsection(field, value, where)
        elif field.section is not None and value is not None:
            entries = self.entries(field, value, where)
            if entries is None:
                return
            values[field.attribute] = entries
        else:
            try:
                values[field.attribute] = coerce(value, field.hint, field.info)
            except BadValue as error:
                reason = f" ({error})" if str(error) else ""
                fix = f"write {describe(field.hint, field.info)}"
                if field.default is not msgspec.NODEFAULT:
                    fix += f"; the default is {show(field.default)}"
                self.fail(f"{show(value)} is not {describe(field.hint, field.info)}{reason}", where, fix)
                return
        self.mark(where, "user")
        self.feature(field, values[field.attribute], value, where)

    def subsection(self, field: SectionField, given: dict[str, Any], where: str) -> Section | None:
        """Read a section inside another. A section that leaves a missing feature off gets a note.

        Switches beside ``"enabled": false`` request nothing. Switches in deeper sections still count: in DeepSpeed
        ``data_efficiency.data_routing.random_ltd`` drops tokens even if ``data_efficiency`` is disabled.
        """
        outer, n_problems = self.missing, len(self.problems)
        if not field.info.is_built and outer is None:
            self.missing = where
        section = self.section(field.section, given, where + ".")
        self.missing = outer
        switch = fields_of(field.section).get("enabled")
        if switch is not None and "enabled" in given and not section.enabled:
            beside = {f"{where}.{name}" for name in given}
            self.problems[n_problems:] = [
                problem
                for problem in self.problems[n_problems:]
                if not (isinstance(problem, UnsupportedConfigError) and problem.where in beside)
            ]
        if field.info.is_built or (field.info.is_switch and _is_asking(section, given)):
            return section
        if outer is None and len(self.problems) == n_problems:
            title = FEATURES[field.info.feature].title
            what = f"= {show(given)} has no effect: {title} stays off, and this version does not have it"
            self.notes.append(_Note(where, what, is_harmless=True))
        return field.default if field.info.is_switch else section

    def entries(self, field: SectionField, value: Any, where: str) -> FrozenDict | tuple | None:
        """Read a container of sections: a mapping from names, or a list."""
        wanted = dict if field.container == "dict" else (list, tuple)
        if not isinstance(value, wanted):
            self.fail(
                f"{show(value)} is not {'an object' if wanted is dict else 'a list'} of sections", where, "write one"
            )
            return None
        named = value.items() if wanted is dict else enumerate(value)
        read = {}
        for name, entry in named:
            place = f"{where}.{name}" if wanted is dict else f"{where}[{name}]"
            if not isinstance(entry, dict):
                self.fail(f"{show(entry)} is not a section", place, "write an object {...}")
                continue
            read[name] = self.section(field.section, entry, place + ".")
        return FrozenDict(read) if wanted is dict else tuple(read.values())

    def auto(self, field: SectionField, where: str) -> None:
        """ "auto": treat it by the rule in keys.py: derive it later, note it as not filled, or report an error."""
        if not field.info.auto and where.startswith(_DROP_AUTO) and field.default is not msgspec.NODEFAULT:
            self.mark(where, "auto")
            self.note(where, f'is "auto", which nobody fills: its default {show(field.default)} holds')
            return
        if not field.info.auto:
            fix = f"write {describe(field.hint, field.info)}"
            if field.default is not msgspec.NODEFAULT:
                fix += f"; the default is {show(field.default)}"
            self.fail('"auto" is not a value of this key, and nobody fills it', where, fix)
            return
        self.mark(where, "auto")
        if field.info.auto == "fill":
            self.unfilled[where] = _to_write(field)

    def report_unfilled(self) -> None:
        """Report every "auto" that is left in one problem, or in a note if another program has yet to fill the keys."""
        if not self.unfilled:
            return
        if self.lenient:
            names = ", ".join(self.place(where) for where in self.unfilled)
            self.to_fill = (f'"auto", for the Hugging Face Trainer or accelerate to fill: {names}',)
            return
        if len(self.unfilled) == 1:
            where = self.place(*self.unfilled)
            what = '"auto" stands here, and nothing has put a value in its place'
        else:
            where = "configuration"
            what = f'"auto" stands in {len(self.unfilled)} keys, and nothing has put values in its place'
        self.problems.append(
            ConfigError(
                what,
                where=where,
                fix="the Hugging Face Trainer does so when the configuration goes through TrainingArguments(deepspeed=...), and "
                "accelerate, for all but betas and eps, through DeepSpeedPlugin(hf_ds_config=...). Without them write"
                + "".join(f"\n  {self.place(key)}: {value}" for key, value in self.unfilled.items()),
            )
        )

    def feature(self, field: SectionField, value: Any, written: Any, where: str) -> None:
        """Refuse a value that asks for a missing feature."""
        info = field.info
        if not info.is_switch or info.is_built or value == field.default or value in info.off:
            return
        feature = FEATURES[info.feature]
        self.problems.append(
            UnsupportedConfigError(
                f"{show(written)} asks for {feature.title}, which this version does not have",
                where=self.place(where),
                fix=feature.instead,
            )
        )

    def without_inert(self, root: Root) -> Root:
        """The configuration without values that have no effect in DeepSpeed because of other keys."""
        param = root.zero.offload_param
        if param.device == "none" or root.zero.stage == 3 or "zero_optimization.stage" in self.unfilled:
            return root
        where = "zero_optimization.offload_param.device"
        why = f"ZeRO stage {root.zero.stage} keeps weights whole on each rank"
        self.inert[where] = why
        self.note(where, f"= {show(param.device)} has no effect: {why}")
        zero = msgspec.structs.replace(root.zero, offload_param=msgspec.structs.replace(param, device="none"))
        return msgspec.structs.replace(root, zero=zero)

    # Sections whose params depend on their type

    def kind(self, cls: type[Section], given: dict[str, Any], path: str) -> Kind | None:
        """The entry for ``type`` in the section's table of types. None for a section without a table, or for an unknown
        type."""
        kinds = kinds_of(cls)
        name = given.get("type")
        if kinds is None or name is None and "type" not in given:
            return None
        where = path + "type"
        names = [kind.name for kind in kinds.values()]
        if not isinstance(name, str):
            self.fail(f"{show(name)} is not a name", where, f"write one of {', '.join(names)}")
            return None
        kind = kinds.get(name.lower()) or (find_torch_optimizer(name) if cls is OptimizerSection else None)
        if kind is None:
            near = [kinds[known].name for known in nearest(name.lower(), kinds)]
            fix = f"did you mean {_either(near)}?" if near else f"write one of {', '.join(names)}"
            self.fail(f"{show(name)} is not known", where, fix)
        elif kind.feature is not None and not FEATURES[kind.feature].is_built:
            feature = FEATURES[kind.feature]
            self.problems.append(
                UnsupportedConfigError(
                    f"{show(name)} asks for {feature.title}, which this version does not have",
                    where=self.place(where),
                    fix=feature.instead,
                )
            )
        return kind

    def params(self, kind: Kind | None, given: Any, where: str) -> FrozenDict:
        """The user's params, checked if the type has a struct of parameters. Defaults are not filled in."""
        if given is None:
            return FrozenDict()
        if not isinstance(given, dict):
            self.fail(f"{show(given)} is not a section", where, "write an object {...}")
            return FrozenDict()
        if "max_grad_norm" in given:
            self.fail(
                "is not a parameter of the optimizer",
                where + ".max_grad_norm",
                "set gradient_clipping at the top level",
            )
            given = {name: value for name, value in given.items() if name != "max_grad_norm"}
        if kind is None:
            return FrozenDict()
        if kind.params is None:
            # The parameters of torch's classes are checked by torch.
            passed = {}
            for name, value in given.items():
                place = f"{where}.{name}"
                if self.is_parked(name, place):
                    continue
                if isinstance(value, str) and value == "auto":
                    if name in FILLED_PARAMS:
                        self.mark(place, "auto")
                        self.unfilled[place] = f"what torch.optim.{kind.name} takes, or nothing for its default"
                    else:
                        self.fail('"auto" is not a value of this key, and nobody fills it', place, "write a value")
                else:
                    passed[name] = value
                    self.mark(place, "user")
            return coerce(passed, FrozenDict, fields_of(OptimizerSection)["params"].info)
        read = self.section(kind.params, given, where + ".")
        # An "auto" that has yet to be filled becomes the schema's default, so that reported and used values agree. A
        # key without effect is not passed on, because the constructor may not accept it.
        passed = {}
        for field in fields_of(kind.params).values():
            value, place = getattr(read, field.attribute), f"{where}.{field.name}"
            if place in self.sources and value is not None:
                if field.info.status == "acts":
                    passed[field.name] = value
                else:
                    self.unpassed[place] = value
        return FrozenDict(passed)

    # Batch sizes

    def without_copies(self, root: Root, world_size: int) -> Root:
        """Correct a train_batch_size that counts each sample once for every tensor-parallel rank. Tensor-parallel ranks
        get the same samples. transformers, accelerate and DeepSpeed count such a sample once a rank if all three sizes
        are given. Here train_batch_size counts the distinct samples of one optimizer step.
        """
        train, micro, steps = (getattr(root, name) for name in _BATCH_KEYS)
        n_ranks = root.tensor_parallel.autotp_size
        if None in (train, micro, steps) or n_ranks < 2 or train != micro * steps * world_size * n_ranks:
            return root
        self.note("train_batch_size", f"{train} counts each sample on {n_ranks} tensor-parallel ranks: {train // n_ranks}")
        return msgspec.structs.replace(root, train_batch_size=train // n_ranks)

    def batch(self, root: Root, world_size: int | None):
        """Solve the batch triangle and write the result into the keys. An "auto" that cannot be solved stays unfilled.
        """
        autos = [name for name in _BATCH_KEYS if self.sources.get(name) == "auto"]
        if world_size is None:
            self.leave_open(autos)
            return root, None
        if any(problem.where.split(" ")[0] in _BATCH_KEYS for problem in self.problems):
            return root, None
        if root.train_batch_size is None and root.train_micro_batch_size_per_gpu is None:
            self.leave_open(autos)
            if any(name in autos for name in _BATCH_KEYS[:2]):
                return root, None
        root = self.without_copies(root, world_size)
        try:
            sizes, filled = resolve_batch(*(getattr(root, name) for name in _BATCH_KEYS), world_size)
        except BatchSizeError as error:
            self.problems.append(error)
            return root, None
        self.leave_open([name for name in autos if filled[name] == "default"])
        for name, source in filled.items():
            if source == "derived" or name not in self.sources:
                self.sources[name] = source
        return msgspec.structs.replace(root, **dict(zip(_BATCH_KEYS, sizes))), sizes

    def leave_open(self, names: list[str]) -> None:
        """Note batch sizes that were "auto" and do not follow from the others."""
        for name in names:
            self.unfilled[name] = _to_write(fields_of(Root)[name])

    # Reports

    def is_parked(self, name: str, where: str) -> bool:
        """Whether a key is parked, that is, kept in the file and not read. A parked key gets a note."""
        if not is_parked(name):
            return False
        self.note(where, "is parked")
        return True

    def unknown(self, name: str, path: str, known: list[str]) -> None:
        """Report an unknown key, with the nearest known key of the section, or another section that has the key.

        At the top level, a key that resembles no known key only gets a note, because programs keep their own keys
        there.
        """
        old = [key.old[len(path) :] for key in OLD_KEYS if key.old.startswith(path) and "." not in key.old[len(path) :]]
        near = [path + hit for hit in nearest(name, known + old)]
        if not near:
            # Search the other sections for the exact name, else for a similar name.
            places: dict[str, list[str]] = {}
            for place, field in walk():
                places.setdefault(field.name, []).append(place)
            hits = [name] if name in places else nearest(name, places) or abbreviated(name, places)
            found = {place for hit in hits for place in places[hit]}
            near = sorted(found, key=lambda place: (place.count("."), place))[:3]
        if not near and name in NAMES_ELSEWHERE:
            near = [NAMES_ELSEWHERE[name]]
        if not near and not path and _NAME.fullmatch(name):
            self.note(name, "is not a known key and is like none: it has no effect")
            return
        if near:
            fix = f"did you mean {_either(near)}?"
        else:
            fix = f"the keys here are {', '.join(known)}" if path else "docs/config.md lists the keys"
        self.fail("is not a known key", path + name, f"{fix} To park a key, put {PARKED} in front of it.")

    def note(self, where: str, what: str) -> None:
        self.notes.append(_Note(where, what))

    def refuse_notes(self) -> None:
        """Make an error of every note that is not harmless."""
        self.problems += [
            ConfigError(note.what, where=note.where, fix='write it as it is meant, remove it, or set "strict" to false')
            for note in self.notes
            if not note.is_harmless
        ]

    def fail(self, what: str, where: str, fix: str) -> None:
        self.problems.append(ConfigError(what, where=self.place(where), fix=fix))

    def place(self, where: str) -> str:
        """The path, with its spelling in the source if this is another."""
        for new, old in self.spelt.items():
            if where == new or where.startswith(new + "."):
                return f"{where} (given as {old})"
        return where

    def mark(self, where: str, source: str) -> None:
        parts = where.split(".")
        if source == "user" and any(".".join(parts[:n]) in self.overridden for n in range(1, len(parts) + 1)):
            source = "override"
        self.sources[where] = source


def _is_asking(section: Section, given: dict[str, Any]) -> bool:
    """Whether a section that is null by default requests its feature. A disabled or empty section does not. In a
    section without a switch, DeepSpeed takes any key for a request, even at the key's default.
    """
    if "enabled" in given and hasattr(section, "enabled"):
        return section.enabled
    return not fields_of(type(section)).keys().isdisjoint(given)


def _descend(tree: dict[str, Any], sections: list[str], *, make: bool = False) -> dict[str, Any] | None:
    for section in sections:
        if make and tree.get(section) is None:
            tree[section] = {}
        tree = tree.get(section)
        if not isinstance(tree, dict):
            return None
    return tree


def _to_write(field: SectionField) -> str:
    """Describe the values that can replace "auto" in a key."""
    what = describe(field.hint, field.info).removesuffix(" or null")
    is_needed = field.default is msgspec.NODEFAULT or field.name in _BATCH_KEYS
    return what if is_needed else f"{what} (without the key: {show(field.default)})"


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
