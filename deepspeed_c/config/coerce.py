"""Read one value as the type of its key: accepted values and their other spellings."""

import math
import numbers
import os
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from .keys import DTYPE_NAMES, FrozenDict, Infinity, KeyInfo, Section
from .schema import arms, bare

__all__ = ["FALSE_WORDS", "TRUE_WORDS", "BadValue", "coerce", "describe", "freeze", "refusal", "show"]

_INT64_MAX = 2**63 - 1
_TRUE_FALSE = {"true": True, "false": False}
TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")
FALSE_WORDS = ("0", "false", "f", "no", "n", "off")
_WORDS = {**dict.fromkeys(TRUE_WORDS, True), **dict.fromkeys(FALSE_WORDS, False)}
_DTYPES = frozenset(DTYPE_NAMES.values())


class BadValue(ValueError):
    """The value cannot be read as the type. The text gives the reason where the reason is not obvious."""


def coerce(value: Any, hint: Any, info: KeyInfo) -> Any:
    """``value`` as exactly the type of ``hint``, immutable all through.

    - integers: also floats and strings that are whole (5e8, "8"); with ``info.floor`` fractions are rounded down;
    - numbers: also integers and strings that spell one ("1e-3"); never NaN, infinity with ``info.allow_inf``;
    - booleans: also 0, 1 and "true", "false"; with ``info.is_lax`` more words;
    - choices from a list of words: in any case; formats under any spelling of DTYPE_NAMES, and torch's dtype objects;
    - strings: also paths;
    - lists: any sequence, with ``info.one_or_many`` a single string too;
    - types whose values may be changed (``list[...]``, ``dict``): as lists and mappings, in a copy.

    Raises:
        BadValue: the value has none of these forms, or is out of range.
    """
    choices = arms(hint)
    if value is None:
        if type(None) in choices:
            return None
        raise BadValue()
    reasons = []
    for arm in choices:
        if arm is type(None):
            continue
        try:
            return msgspec.convert(_as(value, bare(arm), info), arm) if _is_scalar(arm) else _as(value, bare(arm), info)
        except (BadValue, msgspec.ValidationError) as error:
            reasons.append(str(error) if isinstance(error, BadValue) else "")
    raise BadValue(next(filter(None, reasons), ""))


def _is_scalar(arm: Any) -> bool:
    return bare(arm) in (bool, int, float, str)


def _as(value: Any, kind: Any, info: KeyInfo) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return _as_word(value, args)
    if origin is tuple:
        return _as_tuple(value, args, info)
    if origin is list:
        return list(_as_tuple(value, (*args, ...), info))
    if kind is bool:
        return _as_bool(value, info)
    if kind is int:
        return _as_int(value, info)
    if kind is float:
        return _as_float(value, info)
    if kind is str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str):
            return str.__str__(value)  # the value of a member of an enumeration
        raise BadValue()
    if kind in (FrozenDict, dict):
        if isinstance(value, Mapping):
            return freeze(value) if kind is FrozenDict else dict(value)
        raise BadValue()
    if kind is Any:
        return freeze(value)
    raise TypeError(f"the schema uses a type that coerce does not know: {kind!r}")


def _as_bool(value: Any, info: KeyInfo) -> bool:
    if isinstance(value, bool):
        return value
    words, numeric = (_WORDS, numbers.Real) if info.is_lax else (_TRUE_FALSE, numbers.Integral)
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if isinstance(value, numeric) and value in (0, 1):
        return bool(value)
    raise BadValue()


def _as_float(value: Any, info: KeyInfo) -> float:
    if isinstance(value, bool):
        raise BadValue()
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise BadValue() from None
    elif isinstance(value, numbers.Real):
        try:
            value = float(value)
        except OverflowError:
            raise BadValue("it does not fit into a 64-bit float") from None
    else:
        raise BadValue()
    if math.isnan(value) or (math.isinf(value) and not info.allow_inf):
        raise BadValue("it is not finite")
    return value


def _as_int(value: Any, info: KeyInfo) -> int:
    if isinstance(value, bool) and not info.is_lax:
        raise BadValue()
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            value = _as_float(value, info)
    if isinstance(value, numbers.Integral):
        value = int(value)
    else:
        number = _as_float(value, info)
        if math.isinf(number):
            raise BadValue("it is not finite")
        value = math.floor(number)
        if value != number and not info.floor:
            raise BadValue("it is not whole")
    if abs(value) > _INT64_MAX:
        raise BadValue("it does not fit into 64 bits")
    return value


def _as_word(value: Any, words: tuple) -> Any:
    if isinstance(words[0], int):
        number = _as_int(value, KeyInfo(doc=""))
        if number in words:
            return number
        raise BadValue()
    if not isinstance(value, str):
        # A dtype such as torch.bfloat16. torch itself need not be installed.
        value = str(value) if type(value).__module__ == "torch" else ""
    if not _DTYPES.isdisjoint(words):
        value = DTYPE_NAMES.get(value.lower(), value)
    return _one_of(value, words)


def _one_of(value: str, words: tuple) -> str:
    for word in words:
        if word.lower() == value.lower():
            return word
    raise BadValue()


def _as_tuple(value: Any, args: tuple, info: KeyInfo) -> tuple:
    if isinstance(value, str):
        if not info.one_or_many:
            raise BadValue()
        value = [value]
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise BadValue()
    items = sorted(value) if isinstance(value, (set, frozenset)) else value
    if args[-1] is Ellipsis:
        return tuple(coerce(item, args[0], info) for item in items)
    if len(items) != len(args):
        raise BadValue(f"it has {len(items)} entries")
    return tuple(coerce(item, arg, info) for item, arg in zip(items, args))


def freeze(value: Any) -> Any:
    """A copy of plain data that cannot be changed: mappings become FrozenDict, sequences tuples."""
    if isinstance(value, Mapping):
        return FrozenDict({key: freeze(entry) for key, entry in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(entry) for entry in value)
    return value


def describe(hint: Any, info: KeyInfo) -> str:
    """The values that ``coerce`` accepts, in words: "an integer > 0 or null"."""
    # The descriptions keep the order of the types in the union.
    words = [_describe_arm(arm, info) for arm in arms(hint) if arm is not type(None)]
    if type(None) in arms(hint):
        words.append("null")
    return " or ".join(words)


def _describe_arm(arm: Any, info: KeyInfo) -> str:
    kind = bare(arm)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        quoted = [str(word) if isinstance(word, int) else f'"{word}"' for word in args]
        return quoted[0] if len(quoted) == 1 else f"one of {', '.join(quoted)}"
    if origin in (tuple, list):
        if origin is list or args[-1] is Ellipsis:
            return f"a list, each {_describe_arm(args[0], info)}"
        return f"a list of {len(args)}, each {_describe_arm(args[0], info)}"
    if isinstance(kind, type) and issubclass(kind, (Section, dict)) or hasattr(kind, "model_fields") or origin is dict:
        return "an object {...}"
    if arm == Infinity:
        return "Infinity"
    name = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}.get(kind, "any value")
    bounds = []
    for meta in getattr(arm, "__metadata__", ()):
        for sign, bound in ((">", meta.gt), (">=", meta.ge), ("<", meta.lt), ("<=", meta.le)):
            if bound is not None:
                bounds.append(f"{sign} {bound}")
    return f"{name} {' and '.join(bounds)}" if bounds else name


def refusal(value: Any, hint: Any, info: KeyInfo, default: Any, reason: str) -> tuple[str, str]:
    """(what is wrong with a value that ``coerce`` refuses, how to mend it). ``default``: msgspec.NODEFAULT for a
    required key."""
    words = describe(hint, info)
    what = f"{show(value)} is not {words}" + (f" ({reason})" if reason else "")
    fix = f"write {words}"
    return what, fix if default is msgspec.NODEFAULT else f"{fix}; the default is {show(default)}"


def show(value: Any, limit: int = 60) -> str:
    """A value as JSON would write it, cut to ``limit`` characters."""
    if isinstance(value, Section):
        text = "{...}"
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif value is None:
        text = "null"
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, float):
        text = _show_float(value)
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f'"{key}": {show(entry, limit)}' for key, entry in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(show(entry, limit) for entry in value) + "]"
    elif isinstance(value, int):
        # Python refuses to print integers of thousands of digits.
        text = str(int(value)) if value.bit_length() < 200 else f"an integer of {value.bit_length()} bits"
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _show_float(value: float) -> str:
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}" if abs(value) < 1e6 else f"{value:g}"
    return repr(value)
