"""The package's logger: by default rank 0 logs information, and the other ranks only warnings. Nothing is written at
import."""

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
"""Its level is INFO on rank 0 and WARNING on other ranks, unless DSC_LOG, the configuration's log_level or
``logger.setLevel`` sets another. It writes to standard error, and does not propagate to the root logger."""


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
    """Writes to the current value of sys.stderr, so that a later redirection has effect."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        # The handler is found by name, not by type, because a module that is loaded twice has two types.
        self.set_name(logger.name)

    @property
    def stream(self):
        return sys.stderr


class _Settings:
    """The values that determine the level: the rank, and a level from the environment or the configuration."""

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
    """Sets the logger's level on this rank, by name ("debug" to "critical") or number; None restores the default.

    If DSC_LOG names a level, that level wins.

    Raises:
        ConfigError: ``level`` or DSC_LOG is not the name of a level. (A wrong DSC_LOG is reported here because the
            import must not fail.)
    """
    if _settings.problem is not None:
        raise _settings.problem
    _settings.from_config = None if level is None else _level(level, "log_level")
    _settings.apply()


def set_rank(rank: int) -> None:
    """Tells the logger its rank, for ranks that were not in the environment when the package was imported."""
    _settings.rank = rank
    _settings.apply()


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Logs ``message`` on the given ranks: None means rank 0 only, and -1 among them means all.

    A named rank logs the message even if its default level is WARNING. A level that the user has set still applies.
    """
    if not _is_named(ranks):
        return
    is_default = logger.level == logging.WARNING and _settings.asked is None and _settings.rank != 0
    if logger.isEnabledFor(level) or (is_default and level >= logging.INFO):
        # The log record shall show the caller's line, not a line of this function.
        frame = sys._getframe(1)
        record = logger.makeRecord(
            logger.name, level, frame.f_code.co_filename, frame.f_lineno, message, (), None, frame.f_code.co_name
        )
        logger.handle(record)


def _is_named(ranks: Collection[int] | None) -> bool:
    wanted = (0,) if ranks is None else ranks
    return _settings.rank in wanted or -1 in wanted


def get_dist_msg(message: str, ranks: Collection[int] | None = None) -> str | None:
    """``message`` with this rank as prefix, or None on a rank that is not in ``ranks`` (as in ``log_dist``)."""
    return f"[Rank {_settings.rank}] {message}" if _is_named(ranks) else None


def print_dist(message: str, ranks: Collection[int] | None = None) -> None:
    """Prints ``message`` on the given ranks (as in ``log_dist``) at every level."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        write_line(text, sys.stdout)


def write_line(text: str, stream: TextIO) -> None:
    """Write ``text`` and the end of its line in one piece, at once.

    On a stream without a buffer (PYTHONUNBUFFERED), ``print`` writes the end of the line separately. Lines of other
    ranks that share the pipe or the terminal could then come in between.
    """
    stream.write(f"{text}\n")
    stream.flush()


def log_dist_once(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """``log_dist``, but only once in a process for each message."""
    _log_once(message, None if ranks is None else frozenset(ranks), level)


@functools.cache
def _log_once(message: str, ranks: frozenset[int] | None, level: int) -> None:
    log_dist(message, ranks, level)


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """``logger.warning``, but only once in a process for the same arguments."""
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
    """The number of the level "debug", "info", "warning", "error" or "critical". Raises ConfigError (a ValueError) for
    another name.
    """
    if not isinstance(log_level_str, str):
        raise ConfigError(f"{log_level_str!r} is not a level", where="log level", fix=f"use one of {', '.join(LEVELS)}")
    return _level(log_level_str, "log level")


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of the package's logger like ``set_level``, or the level of ``custom_logger`` and its handlers.
    Raises ConfigError for an unknown name.
    """
    level = get_log_level_from_string(log_level_str)
    if custom_logger is None:
        set_level(level)
        return
    for each in (custom_logger, *custom_logger.handlers):
        each.setLevel(level)


def get_current_level() -> int:
    """The level of the logger on this rank."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the current level is at most the given level, so that messages of the given level are shown. Raises
    ConfigError.
    """
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def _level(level: str | int, where: str) -> int:
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    if isinstance(level, str) and level.lower() in LEVELS:
        return LEVELS[level.lower()]
    raise ConfigError(f"{level!r} is not a level", where=where, fix=f"use one of {', '.join(LEVELS)}")


def _start() -> None:
    """Called once, at import. It must neither fail nor write: a malformed variable is reported at its first use."""
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
