"""Options that several ways of ``deepspeed_c plan`` read."""

from __future__ import annotations

import argparse

from deepspeed_c.errors import ConfigError

__all__ = ["read_number", "require_config", "sample_of"]


def read_number(word: str, where: str) -> int:
    """A whole number above 0. Raises ConfigError, with the place ``where``, for other text."""
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(f"{word!r} is no number > 0", where=where, fix="write one, such as 8 (--sample 3x224x224)")
    return int(word)


def sample_of(options: argparse.Namespace) -> tuple[int | None, tuple[int, ...] | None]:
    """(tokens of a sample, shape of a sample that is not made of tokens), as --seq and --sample say. Raises
    ConfigError."""
    sample = None
    if options.sample is not None:
        sample = tuple(read_number(word, "--sample") for word in options.sample.split("x"))
    return None if options.seq is None else read_number(options.seq, "--seq"), sample


def require_config(source: object, where: str) -> None:
    """Raises ConfigError, with the place ``where``, if there is no configuration."""
    if source is None:
        raise ConfigError("no configuration was given", where=where, fix="pass --config FILE")
