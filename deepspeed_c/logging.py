"""The package's logger: rank 0 says what happens, the other ranks only what is wrong; nothing is written at import."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any, TextIO

from .env import read_env
from .errors import ConfigError

__all__ = [
    "get_current_level",
    "get_dist_msg",
    "get_log_level_from_string",
    "log_dist",
    "log_dist_once",
    "logger",
    "print_configuration",
    "print_dist",
    "print_json_dist",
    "set_level",
    "set_log_level_from_string",
    "set_rank",
    "should_log_le",
    "warning_once",
    "write_line",
]

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

logger = logging.getLogger("deepspeed_c")
"""Level INFO on rank 0 and WARNING on the others, unless DSC_LOG, the configuration's log_level or ``logger.setLevel``
say otherwise. It writes to standard error and hands nothing on to the root logger."""


class _Text(logging.Formatter):
    """``[time] [level] [rank 0] message``"""

    def __init__(self, rank: int) -> None:
        super().__init__(f"[%(asctime)s] [%(levelname)s] [rank {rank}] %(message)s")


class _Json(logging.Formatter):
    """One JSON object a line: time (seconds), level, rank, where, message and, if there is one, the exception."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "rank": self._rank,
            "where": f"{record.filename}:{record.lineno}",
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Stderr(logging.StreamHandler):
    """Writes to the present sys.stderr, so that a later redirection holds."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        # Known by name and not by type: a module that is loaded twice has two types.
        self.set_name(logger.name)

    @property
    def stream(self):
        return sys.stderr


class _Settings:
    """The inputs of the level: the rank, and a level from the environment or the configuration."""

    def __init__(self) -> None:
        self.rank = 0
        self.from_env: int | None = None
        self.from_config: int | None = None
        self.as_json = False
        self.problem: ConfigError | None = None

    @property
    def asked(self) -> int | None:
        """The level that the user asked for: the environment wins over the configuration."""
        return self.from_env if self.from_env is not None else self.from_config

    def apply(self) -> None:
        """Sets level and format of the logger."""
        default = logging.INFO if self.rank == 0 else logging.WARNING
        logger.setLevel(default if self.asked is None else self.asked)
        formatter = _Json(self.rank) if self.as_json else _Text(self.rank)
        for handler in logger.handlers:
            if handler.name == logger.name:
                handler.setFormatter(formatter)


_settings = _Settings()


def set_level(level: str | int | None) -> None:
    """Sets the logger's level on this rank, by name ("debug" to "critical") or number; None gives its default back.

    DSC_LOG, if it names a level, wins.

    Raises:
        ConfigError: there is no level of that name, here or in DSC_LOG (which could not be refused at import).
    """
    if _settings.problem is not None:
        raise _settings.problem
    _settings.from_config = None if level is None else _level(level, "log_level")
    _settings.apply()


def set_rank(rank: int) -> None:
    """Tells the logger its rank, where that was not in the environment when the package was imported."""
    _settings.rank = rank
    _settings.apply()


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Logs ``message`` on the given ranks: None means rank 0 only, and -1 among them means all.

    A rank that is named says it also where it would keep to warnings by default; a level that the user asked for holds.
    """
    if not _is_named(ranks):
        return
    is_default = logger.level == logging.WARNING and _settings.asked is None and _settings.rank != 0
    if logger.isEnabledFor(level) or (is_default and level >= logging.INFO):
        # A reader wants to see the caller's line, not this one.
        frame = sys._getframe(1)
        record = logger.makeRecord(
            logger.name, level, frame.f_code.co_filename, frame.f_lineno, message, (), None, frame.f_code.co_name
        )
        logger.handle(record)


def _is_named(ranks: Collection[int] | None) -> bool:
    wanted = (0,) if ranks is None else ranks
    return _settings.rank in wanted or -1 in wanted

def get_dist_msg(message: str, ranks: Collection[int] | None = None) -> str | None:
    """``message`` with this rank in front, or None on a rank that ``ranks`` (as in ``log_dist``) does not name."""
    return f"[Rank {_settings.rank}] {message}" if _is_named(ranks) else None


def print_dist(message: str, ranks: Collection[int] | None = None) -> None:
    """Prints ``message`` on the given ranks (as in ``log_dist``) at every level."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        write_line(text, sys.stdout)


def write_line(text: str, stream: TextIO) -> None:
    """Write ``text`` and the end of its line in one piece, at once.

    ``print`` writes the end of the line by itself where the stream has no buffer (PYTHONUNBUFFERED), and lines of
    other ranks that share the pipe or the terminal come in between.
    """
    stream.write(f"{text}\n")
    stream.flush()


def log_dist_once(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """``log_dist``, but each message once in a process."""
    _log_once(message, None if ranks is None else frozenset(ranks), level)


@functools.cache
def _log_once(message: str, ranks: frozenset[int] | None, level: int) -> None:
    log_dist(message, ranks, level)


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """``logger.warning``, but with the same arguments once in a process."""
    logger.warning(*args, **kwargs)


def print_json_dist(message: dict[str, Any], ranks: Collection[int] | None = None, path: str | None = None) -> None:
    """Writes ``message`` and this rank's number as one JSON object to the file ``path``, on the given ranks (as in
    ``log_dist``).

    Raises ConfigError without a path.
    """
    if path is None:
        raise ConfigError("no file is named", where="print_json_dist(path=...)", fix="pass the path of a file")
    if _is_named(ranks):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**message, "rank": _settings.rank}, file)


def print_configuration(args: Any, name: str) -> None:
    """Logs the attributes of ``args``, sorted by name, under the heading ``name``."""
    logger.info("%s:", name)
    for key in sorted(vars(args)):
        logger.info("  %s %s", f"{key} ".ljust(30, "."), getattr(args, key))


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level by name: "debug", "info", "warning", "error", "critical". Raises ConfigError (a ValueError)
    for another.
    """
    if not isinstance(log_level_str, str):
        raise ConfigError(f"{log_level_str!r} is not a level", where="log level", fix=f"use one of {', '.join(LEVELS)}")
    return _level(log_level_str, "log level")


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of the package's logger as ``set_level`` does, or of ``custom_logger`` and its handlers. Raises
    ConfigError as above.
    """
    level = get_log_level_from_string(log_level_str)
    if custom_logger is None:
        set_level(level)
        return
    for each in (custom_logger, *custom_logger.handlers):
        each.setLevel(level)


def get_current_level() -> int:
    """The level that holds on this rank."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the present level is at most the given one, so that its messages are shown. Raises ConfigError.
    """
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def _level(level: str | int, where: str) -> int:
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    if isinstance(level, str) and level.lower() in LEVELS:
        return LEVELS[level.lower()]
    raise ConfigError(f"{level!r} is not a level", where=where, fix=f"use one of {', '.join(LEVELS)}")


def _start() -> None:
    """Once, at import, which must neither fail nor write: a malformed variable is reported by who uses it later."""
    if not any(handler.name == logger.name for handler in logger.handlers):
        logger.addHandler(_Stderr())
    logger.propagate = False
    env = read_env()
    with suppress(ConfigError):
        _settings.rank = env.rank
    for word in (env.log or "").lower().split(","):
        word = word.strip()
        if word == "json":
            _settings.as_json = True
        elif word:
            try:
                _settings.from_env = _level(word, "DSC_LOG")
            except ConfigError as error:
                _settings.problem = error
    _settings.apply()


_start()
