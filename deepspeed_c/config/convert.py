"""Convert a value of a configuration to the type of an annotation, by pydantic's lenient rules."""

from __future__ import annotations

import enum
import functools
import math
import operator
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from deepspeed_c.config.coerce import FALSE_WORDS, TRUE_WORDS
from deepspeed_c.config.keys import FrozenDict
from deepspeed_c.errors import ConfigError

__all__ = ["convert", "kind_of", "thaw", "thawed_kind"]

_LONGEST_SHOWN = 200  # characters
_BOUNDS = {
    "ge": (lambda value, bound: value >= bound, ">="),
    "gt": (lambda value, bound: value > bound, ">"),
    "le": (lambda value, bound: value <= bound, "<="),
    "lt": (lambda value, bound: value < bound, "<"),
}


def convert(value: Any, kind: Any, where: str, bounds: Mapping[str, Any] | None = None) -> Any:
    """Convert ``value`` to ``kind``: a class, a union, a Literal, or a list, tuple, set or dict of these, with or
    without annotations.

    Members of enumerations become their values. If ``kind`` is a class that takes the keys of a mapping as keywords,
    the mapping becomes an object of the class. ``bounds`` maps each of ge, gt, le and lt to a number or None.

    Raises:
        ConfigError: the value cannot be converted, or is out of bounds. ``where`` names the key in the error.
    """
    new = _convert(value, kind, where)
    for name, bound in (bounds or {}).items():
        if bound is not None and isinstance(new, (int, float)) and not _BOUNDS[name][0](new, bound):
            raise ConfigError(f"is {_shown(value)}", where=where, fix=f"write a number {_BOUNDS[name][1]} {bound}")
    return new


def thaw(value: Any) -> Any:
    """Convert the default of a section to the form in a model: tuples become lists, frozen dictionaries plain
    dictionaries."""
    if isinstance(value, tuple):
        return [thaw(each) for each in value]
    if isinstance(value, dict):
        return {key: thaw(each) for key, each in value.items()}
    return value


def thawed_kind(kind: Any) -> Any:
    """Convert the type of a section's key to the form in a model: a tuple of any length becomes a list, a frozen
    dictionary a plain dictionary.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return typing.Annotated[(thawed_kind(args[0]), *args[1:])]
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(thawed_kind, args))
    if origin is tuple and args[-1] is ...:
        return list[thawed_kind(args[0])]
    return dict if kind is FrozenDict else kind


def kind_of(kind: Any) -> str:
    """A type in words."""
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return getattr(kind, "__name__", str(kind).replace("typing.", ""))


def _convert(value: Any, kind: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or isinstance(kind, typing.TypeVar):
        return value
    if origin is typing.Annotated:
        new = _convert(value, args[0], where)
        for meta in args[1:]:
            if isinstance(meta, msgspec.Meta):
                convert(new, Any, where, {name: getattr(meta, name) for name in _BOUNDS})
        return new
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args, where)
    if origin is typing.Literal:
        if value in args:
            return value
        raise _wrong(value, where, "one of " + ", ".join(map(repr, args)))
    if origin in (list, tuple, set) or kind in (list, tuple, set):
        return _convert_sequence(value, origin or kind, args, where)
    if origin is dict or kind is dict or (isinstance(kind, type) and issubclass(kind, dict)):
        if not isinstance(value, Mapping):
            raise _wrong(value, where, "a dictionary")
        entry = args[1] if args else Any
        return {key: _convert(each, entry, f"{where}.{key}") for key, each in value.items()}
    return _convert_class(value, kind, where)


def _convert_union(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    # A value that already has one of the types is kept: a number given for "int | str" does not become text.
    for kind in kinds:
        if kind is type(None):
            if value is None:
                return None
        elif isinstance(kind, type) and type(value) is kind:
            return _convert(value, kind, where)
    problems = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return _convert(value, kind, where)
            except ConfigError as error:
                problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    raise _wrong(value, where, " or ".join(map(kind_of, kinds)))


def _convert_sequence(value: Any, kind: type, args: tuple[Any, ...], where: str) -> Any:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _wrong(value, where, "a list")
    entry = args[0] if args else Any
    if kind is tuple and args and args[-1] is not ...:
        if len(args) != len(value):
            raise _wrong(value, where, f"a list of {len(args)}")
        return tuple(_convert(each, one, where) for each, one in zip(value, args))
    return kind(_convert(each, entry, f"{where}[{i}]") for i, each in enumerate(value))


def _convert_class(value: Any, kind: Any, where: str) -> Any:
    if kind in _CONVERTERS:
        return _CONVERTERS[kind](value, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if isinstance(value, kind):
            return value.value
        for member in kind:
            if value == member.value or (isinstance(member.value, int) and str(value) == str(member.value)):
                return member.value
        raise _wrong(value, where, "one of " + ", ".join(repr(member.value) for member in kind))
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    if isinstance(kind, type) and hasattr(kind, "model_fields") and isinstance(value, Mapping):
        return kind(**value)
    raise _wrong(value, where, kind_of(kind) if not hasattr(kind, "model_fields") else "a dictionary of its keys")


def _to_bool(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in TRUE_WORDS + FALSE_WORDS:
        return value.lower() in TRUE_WORDS
    raise _wrong(value, where, "true or false")


def _to_int(value: Any, where: str) -> int:
    try:
        if isinstance(value, str):
            return int(value)
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and value == int(value)):
            return int(value)
    except ValueError:
        pass
    raise _wrong(value, where, "a whole number")


def _to_float(value: Any, where: str) -> float:
    try:
        if isinstance(value, (int, float, str)):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise _wrong(value, where, "a number")


def _to_str(value: Any, where: str) -> str:
    if isinstance(value, str):
        return str(value.value) if isinstance(value, enum.Enum) else value
    raise _wrong(value, where, "text")


def _to_path(value: Any, where: str) -> Path:
    if isinstance(value, (str, Path)):
        return Path(value)
    raise _wrong(value, where, "a path")


_CONVERTERS = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str, Path: _to_path}


def _wrong(value: Any, where: str, wanted: str) -> ConfigError:
    return ConfigError(f"is {_shown(value)}", where=where, fix=f"write {wanted}")


def _shown(value: Any) -> str:
    """``repr`` of a value for an error, cut, because a request of a stranger may be long."""
    if isinstance(value, int) and value.bit_length() > 2 * _LONGEST_SHOWN:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print integers of thousands of digits
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
