"""Counts, bytes and times as people write them: 7B, 350M, 4GB, 1.5GiB, 60s, 5m."""

from __future__ import annotations

import re

from deepspeed_c.errors import ConfigError

__all__ = ["as_binary", "count_in_words", "parse_bytes", "parse_count", "parse_seconds"]

_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTE_UNITS = {"": 1} | {f"{u}b": 1000**n for n, u in enumerate(("", "k", "m", "g", "t"))}
_BYTE_UNITS |= {f"{u}ib": 1024**n for n, u in enumerate(("k", "m", "g", "t"), 1)}
_TIME_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d+)?|\.\d+)\s*([a-z]*)", re.IGNORECASE)


def _parse(text: str, units: dict[str, int], where: str, fix: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    factor = None if match is None else units.get(match[2].lower())
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not understood", where=where, fix=fix)
    return float(match[1]) * factor


def parse_count(text: str, where: str) -> int:
    """A number such as 7e9, 7B, 350M or 124000. Raises ConfigError, with the place ``where``, for other text."""
    return round(_parse(text, _COUNT_UNITS, where, "write a number such as 7e9, 7B or 350M"))


def parse_bytes(text: str, where: str) -> int:
    """A number of bytes such as 2e9, 4GB (powers of 1000) or 1.5GiB (powers of 1024). Raises ConfigError, with the
    place ``where``, for other text.
    """
    return round(_parse(text, _BYTE_UNITS, where, "write a number of bytes such as 2e9, 4GB or 1.5GiB"))


def parse_seconds(text: str, where: str) -> float:
    """A time in seconds, such as 90, 60s, 5m or 1.5h. Raises ConfigError, with the place ``where``, for other text."""
    return _parse(text, _TIME_UNITS, where, "write a time such as 90, 60s, 5m or 1.5h")


def as_binary(n_bytes: int) -> str:
    """Bytes in the largest unit (powers of 1024) in which the number is at least 1. Numbers below 1000 get three
    digits, others are rounded to integers: 1.5 GiB, 1000 B.
    """
    value, unit = float(n_bytes), 0
    while value >= 1024 and unit < 4:
        value, unit = value / 1024, unit + 1
    # The format .3g would write a number of four digits with an exponent.
    number = f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"
    return f"{number} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def count_in_words(n: int) -> str:
    """``7B``, ``350M``, ``1.234k``: a count in four digits, with the unit of its size."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.4g}{unit}"
    return str(n)
