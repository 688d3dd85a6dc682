"""Turn the user's configuration into a checked, immutable Config: names, "auto", types, ranges, features, sources."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ..errors import ConfigError, UnsupportedConfigError
from .aliases import NAMES_ELSEWHERE, OLD_KEYS, stage_from_switch
from .coerce import BadValue, coerce, describe, refusal, show
from .config import Config
from .features import FEATURES
from .findings import Findings
from .keys import FrozenDict, Section
from .nearest import abbreviated, nearest
from .optim import FILLED_PARAMS, Kind, OptimizerSection, find_torch_optimizer
from .resolve import ReadConfig
from .schema import Root, SectionField, fields_of, kinds_of, walk
from .source import PARKED, GivenConfig, copy_plain, is_parked, read_source

__all__ = ["load_config", "problems_of", "read_config"]

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


def load_config(
    source: Any,
    *,
    world_size: int,
    overrides: Mapping[str, Any] | None = None,
    batch: Literal["resolve", "skip"] = "resolve",
) -> Config:
    """Read and check a DeepSpeed configuration.

    Args:
        source: a dict (never changed), the path of a JSON or Hjson file, or base64 text.
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
    return read_config(read_source(source), overrides=overrides).resolve(world_size=world_size, batch=batch)


def problems_of(
    source: Any,
    *,
    world_size: int = 1,
    overrides: Mapping[str, Any] | None = None,
    batch: Literal["resolve", "skip"] = "resolve",
) -> list[ConfigError]:
    """The problems that ``load_config`` would report, as separate errors; empty for a valid configuration."""
    try:
        config = read_config(read_source(source), overrides=overrides)
        return config.resolve_with_problems(world_size=world_size, batch=batch)[1]
    except ConfigError as error:
        return [error]


def read_config(source: GivenConfig, *, overrides: Mapping[str, Any] | None = None) -> ReadConfig:
    """Read and check every key. What depends on the number of ranks is left to ``ReadConfig.resolve``, which also
    reports the problems."""
    reader = _Reader()
    tree = reader.rename(reader.undot(copy_plain(source.keys, source.origin)))
    if overrides:
        tree = reader.override(tree, reader.rename(reader.undot(copy_plain(overrides, "overrides"))))
    return ReadConfig(source, reader.section(Root, tree, ""), reader.found)


class _Reader:
    """Reads one configuration, and notes what it finds."""

    def __init__(self) -> None:
        self.found = Findings()
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
                    self.found.fail(
                        f"{'.'.join(sections[: i + 1])} is {show(place)}, which has no keys",
                        name,
                        "write the section as an object {...}, or remove this key",
                    )
                    break
            else:
                if last in place and place[last] != value:
                    self.found.note(f'"{name}"', f"= {show(value)} replaces {show(place[last])} of the section")
                place[last] = value
        return result

    def rename(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Move old and second names to the schema's names."""
        if isinstance(tree.get("zero_optimization"), bool):
            self.found.note("zero_optimization", 'as a switch is old: write {"stage": 1}')
            tree["zero_optimization"] = stage_from_switch(tree["zero_optimization"])
        for key in OLD_KEYS:
            *sections, old = key.old.split(".")
            place = _descend(tree, sections)
            if place is None or old not in place:
                continue
            value = place.pop(old)
            if key.new is None:
                self.found.note(key.old, "is old and has no effect")
                continue
            *sections, new = key.new.split(".")
            place = _descend(tree, sections, make=True)
            value = key.convert(value) if key.convert else value
            if place is None or (new in place and place[new] != value):
                self.found.fail(f"is the same key as {key.new}, and both are given", key.old, f"keep {key.new}")
                continue
            place[new] = value
            self.found.spelt[key.new] = key.old
            self.found.note(key.old, f"is read as {key.new}")
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
                self.found.overridden.add(where)
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
                self.found.mark(where, "user")
            elif name == "type" and kinds_of(cls) is not None:
                if kind is not None:
                    values[name] = kind.name
                    self.found.mark(where, "user")
            else:
                self.value(fields[name], value, where, values)
        for field in fields.values():
            if field.default is msgspec.NODEFAULT and field.attribute not in values:
                if path + field.name not in self.found.sources and field.name not in given:
                    self.found.fail("is missing", path + field.name, f"write {describe(field.hint, field.info)}")
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
                self.found.fail(f"{show(value)} is not a section", where, "write an object {...}")
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
                what, fix = refusal(value, field.hint, field.info, field.default, str(error))
                self.found.fail(what, where, fix)
                return
        self.found.mark(where, "user")
        self.feature(field, values[field.attribute], value, where)

    def subsection(self, field: SectionField, given: dict[str, Any], where: str) -> Section | None:
        """Read a section inside another. A section that leaves a missing feature off gets a note.

        Switches beside ``"enabled": false`` request nothing. Switches in deeper sections still count: in DeepSpeed
        ``data_efficiency.data_routing.random_ltd`` drops tokens even if ``data_efficiency`` is disabled.
        """
        outer, n_problems = self.missing, len(self.found.problems)
        if not field.info.is_built and outer is None:
            self.missing = where
        section = self.section(field.section, given, where + ".")
        self.missing = outer
        switch = fields_of(field.section).get("enabled")
        if switch is not None and "enabled" in given and not section.enabled:
            beside = {f"{where}.{name}" for name in given}
            self.found.problems[n_problems:] = [
                problem
                for problem in self.found.problems[n_problems:]
                if not (isinstance(problem, UnsupportedConfigError) and problem.where in beside)
            ]
        if field.info.is_built or (field.info.is_switch and _is_asking(section, given)):
            return section
        if outer is None and len(self.found.problems) == n_problems:
            title = FEATURES[field.info.feature].title
            what = f"= {show(given)} has no effect: {title} stays off, and this version does not have it"
            self.found.note(where, what, is_harmless=True)
        return field.default if field.info.is_switch else section

    def entries(self, field: SectionField, value: Any, where: str) -> FrozenDict | tuple | None:
        """Read a container of sections: a mapping from names, or a list."""
        wanted = dict if field.container == "dict" else (list, tuple)
        if not isinstance(value, wanted):
            self.found.fail(
                f"{show(value)} is not {'an object' if wanted is dict else 'a list'} of sections", where, "write one"
            )
            return None
        named = value.items() if wanted is dict else enumerate(value)
        read = {}
        for name, entry in named:
            place = f"{where}.{name}" if wanted is dict else f"{where}[{name}]"
            if not isinstance(entry, dict):
                self.found.fail(f"{show(entry)} is not a section", place, "write an object {...}")
                continue
            read[name] = self.section(field.section, entry, place + ".")
        return FrozenDict(read) if wanted is dict else tuple(read.values())

    def auto(self, field: SectionField, where: str) -> None:
        """ "auto": treat it by the rule in keys.py: derive it later, note it as not filled, or report an error."""
        if not field.info.auto and where.startswith(_DROP_AUTO) and field.default is not msgspec.NODEFAULT:
            self.found.mark(where, "auto")
            self.found.note(where, f'is "auto", which nobody fills: its default {show(field.default)} holds')
            return
        if not field.info.auto:
            fix = f"write {describe(field.hint, field.info)}"
            if field.default is not msgspec.NODEFAULT:
                fix += f"; the default is {show(field.default)}"
            self.found.fail('"auto" is not a value of this key, and nobody fills it', where, fix)
            return
        self.found.mark(where, "auto")
        if field.info.auto == "fill":
            self.found.leave_open(where, field)

    def feature(self, field: SectionField, value: Any, written: Any, where: str) -> None:
        """Refuse a value that asks for a missing feature."""
        info = field.info
        if not info.is_switch or info.is_built or value == field.default or value in info.off:
            return
        feature = FEATURES[info.feature]
        self.found.problems.append(
            UnsupportedConfigError(
                f"{show(written)} asks for {feature.title}, which this version does not have",
                where=self.found.place(where),
                fix=feature.instead,
            )
        )

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
            self.found.fail(f"{show(name)} is not a name", where, f"write one of {', '.join(names)}")
            return None
        kind = kinds.get(name.lower()) or (find_torch_optimizer(name) if cls is OptimizerSection else None)
        if kind is None:
            near = [kinds[known].name for known in nearest(name.lower(), kinds)]
            fix = f"did you mean {_either(near)}?" if near else f"write one of {', '.join(names)}"
            self.found.fail(f"{show(name)} is not known", where, fix)
        elif kind.feature is not None and not FEATURES[kind.feature].is_built:
            feature = FEATURES[kind.feature]
            self.found.problems.append(
                UnsupportedConfigError(
                    f"{show(name)} asks for {feature.title}, which this version does not have",
                    where=self.found.place(where),
                    fix=feature.instead,
                )
            )
        return kind

    def params(self, kind: Kind | None, given: Any, where: str) -> FrozenDict:
        """The user's params, checked if the type has a struct of parameters. Defaults are not filled in."""
        if given is None:
            return FrozenDict()
        if not isinstance(given, dict):
            self.found.fail(f"{show(given)} is not a section", where, "write an object {...}")
            return FrozenDict()
        if "max_grad_norm" in given:
            self.found.fail(
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
                        self.found.mark(place, "auto")
                        self.found.unfilled[place] = f"what torch.optim.{kind.name} takes, or nothing for its default"
                    else:
                        self.found.fail(
                            '"auto" is not a value of this key, and nobody fills it', place, "write a value"
                        )
                else:
                    passed[name] = value
                    self.found.mark(place, "user")
            return coerce(passed, FrozenDict, fields_of(OptimizerSection)["params"].info)
        read = self.section(kind.params, given, where + ".")
        # An "auto" that has yet to be filled becomes the schema's default, so that reported and used values agree. A
        # key without effect is not passed on, because the constructor may not accept it.
        passed = {}
        for field in fields_of(kind.params).values():
            value, place = getattr(read, field.attribute), f"{where}.{field.name}"
            if place in self.found.sources and value is not None:
                if field.info.status == "acts":
                    passed[field.name] = value
                else:
                    self.found.unpassed[place] = value
        return FrozenDict(passed)

    # Reports

    def is_parked(self, name: str, where: str) -> bool:
        """Whether a key is parked, that is, kept in the file and not read. A parked key gets a note."""
        if not is_parked(name):
            return False
        self.found.note(where, "is parked")
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
            self.found.note(name, "is not a known key and is like none: it has no effect")
            return
        if near:
            fix = f"did you mean {_either(near)}?"
        else:
            fix = f"the keys here are {', '.join(known)}" if path else "docs/config.md lists the keys"
        self.found.fail("is not a known key", path + name, f"{fix} To park a key, put {PARKED} in front of it.")


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


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
