"""Lines that the package logs while a test runs."""

from __future__ import annotations

import logging

from typing_extensions import Self

__all__ = ["LogLines"]


class LogLines(logging.Handler):
    """Context in which ``lines`` collects the messages of the package's logger, from ``level`` up."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger("deepspeed_c").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("deepspeed_c").removeHandler(self)
