"""Every name of DeepSpeed and MII, from upstream.tsv and mii.tsv.

The files are read at the first request for a name that no other table has.

scripts/upstream_names.py writes the files, and explains their rows.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Name", "Upstream", "upstream"]

FOLDER = os.path.dirname(os.path.abspath(__file__))
FILES = tuple(os.path.join(FOLDER, name) for name in ("upstream.tsv", "mii.tsv"))


class Name(NamedTuple):
    kind: str
    """module, class, exception, function or constant"""
    module: str
    """The module that defines it."""
    name: str
    """Its name in that module; empty for a module."""
    value: str
    """The literal of a plain constant, or the bases of an exception."""


class Upstream:
    """The modules of DeepSpeed and MII, their names, and plain constants in classes."""

    def __init__(self, files: Sequence[str] = FILES) -> None:
        self.modules: dict[str, dict[str, Name]] = {}
        self._stars: dict[str, list[str]] = {}
        self._constants: dict[tuple[str, str], dict[str, str]] = {}
        for file in files:
            self._read(file)

    def _read(self, file: str) -> None:
        module = ""
        with open(file, encoding="utf-8") as lines:
            next(lines)
            for line in lines:
                where, name, kind, defined, value, *_ = *line.rstrip("\n").split("\t"), "", "", "", ""
                if where.startswith(":"):
                    self._constants.setdefault((module, where[1:]), {})[name] = value
                elif where:
                    module = where
                    self.modules[module] = {}
                elif name == "*":
                    self._stars.setdefault(module, []).append(defined)
                else:
                    at, colon, there = defined.partition(":")
                    self.modules[module][name] = Name(kind, at or module, there if colon else name, value)

    def find(self, module: str, name: str) -> Name | None:
        """Return the entry for ``name`` in DeepSpeed's ``module``; None if there is no such name, or only a
        submodule."""
        found = self.modules.get(module, {}).get(name)
        if found is None and not name.startswith("_"):
            found = next((each for star in self._stars.get(module, ()) if (each := self.find(star, name))), None)
        return found

    def public_names(self, module: str) -> set[str]:
        """All names of a module that do not begin with an underscore, without its submodules."""
        own = {name for name in self.modules.get(module, ()) if not name.startswith("_")}
        return own.union(*(self.public_names(star) for star in self._stars.get(module, ())))

    def class_constants(self, module: str, name: str) -> dict[str, str]:
        """Constants in a class's body: name to literal."""
        return self._constants.get((module, name), {})


@functools.cache
def upstream() -> Upstream:
    return Upstream()
