"""What reading a configuration finds: problems, notes for the user, and the source of each value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from ..errors import ConfigError
from .coerce import describe, show
from .schema import SectionField

__all__ = ["BATCH_KEYS", "Findings", "Note"]

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Note(NamedTuple):
    """A fact about a key that the user may want to know."""

    where: str
    what: str
    is_harmless: bool = False
    """Whether the note is only information: "strict" makes no error of it."""

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


@dataclass
class Findings:
    """What was found about the keys of one configuration."""

    problems: list[ConfigError] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    """Path of a key -> where its value comes from."""
    spelt: dict[str, str] = field(default_factory=dict)
    """Path of a key -> its spelling in the source, where this is another."""
    unpassed: dict[str, Any] = field(default_factory=dict)
    """Parameters of optimizer and schedule that were written and have no effect."""
    overridden: set[str] = field(default_factory=set)
    """Paths that came from the caller's overrides."""
    unfilled: dict[str, str] = field(default_factory=dict)
    """Path of each "auto" that another program has yet to fill -> a description of possible values."""

    def copy(self) -> Findings:
        """A copy to which more can be added."""
        return Findings(**{name: value.copy() for name, value in vars(self).items()})

    def note(self, where: str, what: str, *, is_harmless: bool = False) -> None:
        self.notes.append(Note(where, what, is_harmless))

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

    def leave_open(self, where: str, key: SectionField) -> None:
        """Note an "auto" whose value does not follow from other keys."""
        what = describe(key.hint, key.info).removesuffix(" or null")
        is_needed = key.default is msgspec.NODEFAULT or key.name in BATCH_KEYS
        self.unfilled[where] = what if is_needed else f"{what} (without the key: {show(key.default)})"
