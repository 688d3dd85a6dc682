"""The package's logger: rank 0 says what happens, the other ranks only what is wrong; nothing is written at import."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection

from .env import read_env
from .errors import ConfigError

__all__ = ["log_dist", "logger", "set_level", "set_rank"]

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
    """Writes to what sys.stderr is at that moment, so that a redirection made later holds."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        # Known by name and not by type: a module that is loaded twice has two types.
        self.set_name(logger.name)

    @property
    def stream(self):
        return sys.stderr


class _Settings:
    """What decides the level: the rank, and a level that was asked for."""

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
    wanted = (0,) if ranks is None else ranks
    if _settings.rank not in wanted and -1 not in wanted:
        return
    is_default = logger.level == logging.WARNING and _settings.asked is None and _settings.rank != 0
    if logger.isEnabledFor(level) or (is_default and level >= logging.INFO):
        # The caller's line is what a reader wants to see, not this one.
        frame = sys._getframe(1)
        record = logger.makeRecord(
            logger.name, level, frame.f_code.co_filename, frame.f_lineno, message, (), None, frame.f_code.co_name
        )
        logger.handle(record)


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
    try:
        env = read_env()
    except ConfigError:
        _settings.apply()
        return
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
