"""Read the configuration's text: a dict, a file, or base64 text. Text is JSON, or Hjson where JSON refuses it."""

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError

__all__ = [
    "CONFIG_ARGUMENTS",
    "PARKED",
    "GivenConfig",
    "copy_plain",
    "is_parked",
    "read_source",
    "source_among",
    "source_of_engine",
]

# Prefix of a key that is kept in the file and not read.
PARKED = "x-"
_COMMENT = re.compile(r"(_|//|#).*|comments?([ :].*|[_-]?\d+)?", re.IGNORECASE | re.DOTALL)

_MAX_DEPTH = 64
# Decoded text that begins otherwise was not meant as a configuration.
_OPENINGS = ("{", "#", "//", "/*")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}\s*\Z")


class GivenConfig(NamedTuple):
    """A configuration as it was written."""

    keys: dict[str, Any]
    """A dict of its own, which may be changed until ``read_config`` gets it."""
    origin: str
    """A path, "dict" or "base64 text"."""


def read_source(source: Any) -> GivenConfig:
    """Read a configuration, unless it is one that has been read. Nothing else opens, parses or copies one.

    Raises:
        ConfigError: the file does not exist, the text is neither JSON nor Hjson, it is not an object, or a key occurs
            twice.
    """
    if isinstance(source, GivenConfig):
        return source
    if isinstance(source, Mapping):
        data, origin = source, "dict"
    elif isinstance(source, (str, os.PathLike)):
        data, origin = _read_text(os.fspath(source))
    else:
        raise ConfigError(
            f"cannot be read from a {type(source).__name__}",
            where="configuration",
            fix="pass a dict, the path of a JSON or Hjson file, or either encoded by base64",
        )
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"is a JSON {_json_kind(data)}, not an object", where=origin, fix="write the keys between { and }"
        )
    return GivenConfig(copy_plain(data, origin), origin)


def source_among(given: Mapping[str, Any], where: str) -> GivenConfig | None:
    """Read the configuration among the arguments of a call, by name; None if none was given.

    Raises:
        ConfigError: it cannot be read; or several arguments give configurations, and these differ.
    """
    sources = {name: source for name, source in given.items() if source is not None}
    if not sources:
        return None
    (first, written), *others = sources.items()
    chosen = read_source(written)
    for name, other in others:
        if other is written or other == written:
            continue
        keys, other_keys = chosen.keys, read_source(other).keys
        differing = [
            k for k in (*keys, *other_keys) if k not in keys or k not in other_keys or keys[k] != other_keys[k]
        ]
        if differing:
            raise ConfigError(
                f'{first} and {name} give different configurations: they differ in "{differing[0]}"',
                where=where,
                fix="pass one of them",
            )
    return chosen


CONFIG_ARGUMENTS = ("config", "config_params", "args")
"""Arguments of ``initialize`` that give the configuration."""


def source_of_engine(given: Mapping[str, Any]) -> GivenConfig | None:
    """Read the configuration among the arguments of ``initialize``, by name; None if none was given. Raises as
    `source_among`.
    """
    config, config_params, args = (given.get(name) for name in CONFIG_ARGUMENTS)
    in_args = getattr(args, "deepspeed_config", None)
    return source_among(
        {"config": config, "config_params": config_params, "args.deepspeed_config": in_args}, "initialize"
    )


def is_parked(name: str) -> bool:
    """Whether the name marks a parked key or a comment."""
    return name.startswith(PARKED) or _COMMENT.fullmatch(name) is not None


def copy_plain(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy of mappings and sequences. Other values are not copied.

    Raises:
        ConfigError: a key is not a string, or the nesting never ends.
    """
    if depth > _MAX_DEPTH:
        raise ConfigError(
            f"is nested more than {_MAX_DEPTH} deep", where=where, fix="flatten it; does it contain itself?"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"the key {key!r} is not a string", where=where, fix="write it as a string")
        return {key: copy_plain(entry, where, depth + 1) for key, entry in value.items()}
    if isinstance(value, list):
        return [copy_plain(entry, where, depth + 1) for entry in value]
    if isinstance(value, tuple):
        return tuple(copy_plain(entry, where, depth + 1) for entry in value)
    return value


def _read_text(text: str) -> tuple[Any, str]:
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    try:
        # utf-8-sig: editors on Windows put a byte-order mark in front, which JSON does not allow.
        with open(text, encoding="utf-8-sig") as file:
            return _parse(file.read(), text), text
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text ({error.reason})", where=text, fix="save it as UTF-8") from None
    except FileNotFoundError:
        missing = ConfigError(
            "there is no such file", where=text, fix="check the path; it is taken from the working directory"
        )
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        # Text that is too long or odd for a path may still be base64.
        missing = ConfigError(
            f"cannot be read ({getattr(error, 'strerror', None) or error})",
            where=_cut(text),
            fix="check the path and its permissions",
        )
    if not _BASE64.match(text):
        if text.lstrip().startswith("{"):
            missing = ConfigError(
                "is JSON text, which is not read from a string", where="configuration", fix="pass json.loads(text)"
            )
        raise missing
    try:
        # DeepSpeed reads the URL-safe alphabet; the standard one is mapped onto it.
        raw = text.strip().replace("+", "-").replace("/", "_").rstrip("=")
        decoded = base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        raise missing from None
    if not decoded.lstrip().startswith(_OPENINGS):
        raise missing
    return _parse(decoded, "base64 text"), "base64 text"


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_doubles(where))
    except json.JSONDecodeError as error:
        as_json = error
    except (RecursionError, ValueError) as error:
        raise _unreadable(error, where) from None
    if not text.strip():
        raise ConfigError("is empty: line 1, column 1 is not JSON", where=where, fix="write at least {}")
    return _parse_hjson(text, where, as_json)


def _parse_hjson(text: str, where: str, as_json: json.JSONDecodeError) -> Any:
    """Read text that plain JSON refuses, as ``as_json`` says, by the package that DeepSpeed reads it with."""
    # Few files need the package: the others do not wait for its import.
    import hjson

    try:
        return hjson.loads(text, object_pairs_hook=_without_doubles(where))
    except hjson.HjsonDecodeError as error:
        message, at = error.msg, error.pos
    except IndexError:
        # The package looks for the end of a comment or of a text in ''' behind the end of the file.
        message, at = "a comment /* or a text in ''' does not end", len(text)
    except (RecursionError, OverflowError, ValueError) as error:
        raise _unreadable(error, where) from None
    place, line = _place(text, at)
    json_place, _ = _place(text, as_json.pos)
    raise ConfigError(
        f"{place} is not Hjson ({message}): {_cut(line)!r}",
        where=where,
        fix=f"correct that line, or, if the file is plain JSON, {json_place} ({as_json.msg})",
    )


def _place(text: str, at: int) -> tuple[str, str]:
    """``line L, column C`` of the character number ``at``, and that line."""
    before = text[:at].split("\n")
    return f"line {len(before)}, column {len(before[-1]) + 1}", text.split("\n")[len(before) - 1].strip()


def _unreadable(error: Exception, where: str) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, RecursionError):
        return ConfigError("is nested too deep", where=where, fix="flatten it")
    # An integer of thousands of digits, or a number above the largest one of 64 bits.
    return ConfigError(f"holds a number that cannot be read ({error})", where=where, fix="write a shorter one")


def _without_doubles(where: str):
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) != len(pairs):
            names = [name for name, _ in pairs]
            double = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"these keys stand twice: {', '.join(double)}", where=where, fix="keep one of each")
        return seen

    return build


def _json_kind(data: Any) -> str:
    return {list: "list", str: "string", bool: "boolean", type(None): "null"}.get(type(data), "number")


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
