"""The resolved configuration: every section as an attribute, and where each value came from."""

import copy
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from ..errors import ConfigError
from .batch import Batch
from .coerce import show
from .features import FEATURES
from .keys import FrozenDict, Section
from .nearest import nearest
from .schema import Root, SectionField, fields_of, find, kinds_of, walk

__all__ = ["Config", "ConfigRow"]


class ConfigRow(typing.NamedTuple):
    """One line of the table that ``config show`` prints."""

    key: str
    value: str
    source: str
    """"user", "override", "auto", "derived" or "default"."""
    note: str
    """The reason if the value has no effect, else empty."""


class Config(Root, kw_only=True, rename={"zero": "zero_optimization"}):
    """A checked configuration; nothing in it can be changed.

    Sections are attributes under their JSON names (``config.fp16.enabled``), zero_optimization as ``config.zero``.
    Make one with ``load_config``.
    """

    batch: Batch | None
    """The batch sizes; None if they are unresolved."""
    origin: str
    """Source of the configuration: a path, "dict" or "base64 text"."""
    notes: tuple[str, ...]
    """Facts for the user: old names, parked keys, keys that were given twice, keys without effect."""
    unfilled: tuple[str, ...]
    """The keys that are still "auto" and that another program fills before training. Until then they have their
    defaults."""
    _inert: FrozenDict
    _sources: FrozenDict
    _unpassed: FrozenDict
    _given: dict[str, Any]

    def source_of(self, path: str) -> str:
        """Return the origin of a key's value.

        "user": written by the user; "override": passed to ``load_config``; "auto": the user wrote "auto" (the engine
        resolves the value when it knows the model, but another program resolves the keys in ``unfilled``); "derived":
        computed from other keys; "default": DeepSpeed's default.

        Raises:
            ConfigError: there is no such key.
        """
        if path in self._sources:
            return self._sources[path]
        if find(path) is None:
            near = nearest(path, (known for known, _ in walk()))
            raise ConfigError(
                "is not a known key", where=path, fix=f"did you mean {' or '.join(near)}?" if near else ""
            )
        return "default"

    def is_chosen(self, path: str) -> bool:
        """Whether the user or a program chose the key's value, and "auto" does not stand there."""
        return self.source_of(path) not in ("default", "auto")

    @property
    def forces_own_optimizer(self) -> bool:
        """Whether the user demands an optimizer of this package with offload. The default demands none."""
        return self.zero_force_ds_cpu_optimizer and self.is_chosen("zero_force_ds_cpu_optimizer")

    def as_dict(self) -> dict[str, Any]:
        """A copy of the user's configuration as given, with "auto" values and parked keys. The copy may be changed."""
        return copy.deepcopy(self._given)

    def resolved_dict(self) -> dict[str, Any]:
        """Every key under its JSON name with its value in effect, as plain dicts and lists that may be changed."""
        tree = _thaw_section(self, Root)
        for path, value in self._unpassed.items():
            section, params, name = path.split(".")
            tree[section][params][name] = _thaw(value)
        return tree

    def summary_line(self, idle: Mapping[str, str] = MappingProxyType({})) -> str:
        """One line for rank 0 at the start: the batch sizes, and values other than the defaults with their sources.

        idle: sections without an effect on this engine, each with the reason, which the line gives in place of the
        section's values.
        """
        parts = []
        if self.batch is not None:
            size = self.batch
            how = self.source_of
            parts.append(
                f"batch {size.train_batch_size} ({how('train_batch_size')}) = micro {size.micro_batch_size} "
                f"({how('train_micro_batch_size_per_gpu')}) x accumulation {size.accumulation_steps} "
                f"({how('gradient_accumulation_steps')}) x {size.world_size} ranks"
            )
        # Always printed: DeepSpeed changed this default, and users easily overlook clipping that they did not ask for.
        parts.append(f"gradient_clipping {self.gradient_clipping:g} ({self.source_of('gradient_clipping')})")
        skip = {
            "gradient_clipping",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        }
        for row in self.rows():
            if row.key.partition(".")[0] in idle:
                continue
            if row.key not in skip and row.source != "default" and not row.note:
                parts.append(f"{row.key} {row.value}" + ("" if row.source == "user" else f" ({row.source})"))
        unused = [
            row.key for row in self.rows() if row.source not in ("default", "derived") and row.note.startswith("unused")
        ]
        if unused:
            parts.append(f"unused: {', '.join(unused)}")
        for section, reason in idle.items():
            if section in self._given:
                parts.append(f'"{section}" has no effect: {reason}')
        return f"configuration from {self.origin}: " + "; ".join(parts)

    def rows(self, *, everything: bool = False) -> list[ConfigRow]:
        """The rows for keys that have an effect and for keys that the user wrote; ``everything`` adds all other
        keys."""
        return [row for row in self._all_rows() if everything or row.source != "default" or not row.note]

    def _all_rows(self, limit: int = 60) -> list[ConfigRow]:
        return [
            ConfigRow(key, show(self._unpassed.get(key, value), limit), self.source_of(key), self._note_of(key, field))
            for key, field, value in _leaves(self, Root, "")
        ]

    def _note_of(self, key: str, field: SectionField) -> str:
        return f"no effect: {self._inert[key]}" if key in self._inert else _note(field, self)

    def lines(self) -> list[str]:
        """Every key with its value as text, always in the same order, so that equal configurations give equal lists."""
        return [f"{row.key} = {row.value}" for row in self._all_rows(limit=10_000)]

    def table(self, *, everything: bool = False) -> str:
        """The rows as aligned text, with the notes below."""
        rows = [ConfigRow("key", "value", "source", ""), *self.rows(everything=everything)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row.note]).rstrip() for row in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _note(field: SectionField, root: Root) -> str:
    info = field.info
    if info.inherent:
        return f"no effect: {info.inherent}"
    if info.status == "later" or (
        info.feature is not None and not info.is_switch and not FEATURES[info.feature].is_on(root)
    ):
        return f"unused: {FEATURES[info.feature].title} only"
    return ""


def _leaves(section: Section, cls: type[Section], path: str):
    """(path, field, value) of every key that is not a section."""
    for field in fields_of(cls).values():
        value = getattr(section, field.attribute)
        where = path + field.name
        if field.name == "params" and kinds_of(cls) is not None:
            yield from _param_leaves(section, cls, where)
        elif isinstance(value, Section):
            yield from _leaves(value, field.section, where + ".")
        elif field.container and value:
            named = value.items() if field.container == "dict" else enumerate(value)
            for name, entry in named:
                place = f"{where}.{name}." if field.container == "dict" else f"{where}[{name}]."
                yield from _leaves(entry, field.section, place)
        else:
            yield where, field, value


def _param_leaves(section: Section, cls: type[Section], where: str):
    kind = kinds_of(cls).get((section.type or "").lower())
    known = fields_of(kind.params) if kind is not None and kind.params is not None else {}
    for name, field in known.items():
        default = None if field.default is msgspec.NODEFAULT else field.default
        yield f"{where}.{name}", field, section.params.get(name, default)
    for name, value in section.params.items():
        if name not in known:
            yield f"{where}.{name}", fields_of(cls)["params"], value


def _thaw_section(section: Section, cls: type[Section]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for field in fields_of(cls).values():
        value = getattr(section, field.attribute)
        if field.name == "params" and kinds_of(cls) is not None:
            result[field.name] = {
                key.rsplit(".", 1)[-1]: _thaw(value) for key, _, value in _param_leaves(section, cls, "")
            }
        else:
            result[field.name] = _thaw(value)
    return result


def _thaw(value: Any) -> Any:
    if isinstance(value, Section):
        return _thaw_section(value, type(value))
    if isinstance(value, dict):
        return {key: _thaw(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_thaw(entry) for entry in value]
    return value
