"""The argument parser for all commands of ``deepspeed_c``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Actions", "command_parser", "run_action"]


def command_parser(command: str, description: str, usage: str | None = None) -> argparse.ArgumentParser:
    """A parser for the arguments of ``deepspeed_c COMMAND``. Its help keeps the line breaks of ``description``."""
    return argparse.ArgumentParser(
        prog=f"deepspeed_c {command}",
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


class Actions:
    """The actions of a command, each with its own parser: ``deepspeed_c COMMAND ACTION ...``."""

    def __init__(self, parser: argparse.ArgumentParser, names: str) -> None:
        """names: the list of actions in the help, such as "info | verify"."""
        self._parsers = parser.add_subparsers(required=True, metavar=names)

    def add(self, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        """Adds an action and returns its parser. ``run`` returns the exit code."""
        action = self._parsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.set_defaults(run=run)
        return action


def run_action(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Runs the action that ``argv`` names (default: the process's arguments), and returns its exit code."""
    options: Any = parser.parse_args(argv)
    return options.run(options)
