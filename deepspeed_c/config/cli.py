"""The commands ``deepspeed_c config show FILE`` and ``deepspeed_c config check FILE``. They need no torch."""

import argparse
import sys
from collections.abc import Sequence

from deepspeed_c.command_line import Actions, command_parser, run_action

from .load import load_config, problems_of

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``deepspeed_c config`` with these arguments; return 0 for a valid configuration, 1 for an invalid one."""
    return run_action(_parser(), argv)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("config", "Look at a configuration without training.")
    actions = Actions(parser, "show | check")
    show = actions.add("show", _show, "print every value that holds, where it came from, and what has no effect")
    show.add_argument("--all", action="store_true", help="also keys of features that are not in use")
    check = actions.add("check", _check, "print everything that is wrong")
    for command in (show, check):
        command.add_argument("file", metavar="FILE", help="JSON or Hjson file, or either as base64 text")
        command.add_argument(
            "--world-size",
            type=int,
            metavar="N",
            help='data-parallel ranks; without it the batch sizes are not resolved, and an "auto" may be left for others to fill',
        )
    return parser


def _how(options: argparse.Namespace) -> dict:
    if options.world_size is None:
        return {"world_size": 1, "batch": "skip"}
    return {"world_size": options.world_size}


def _show(options: argparse.Namespace) -> int:
    problems = problems_of(options.file, **_how(options))
    if problems:
        return _report(options.file, problems)
    print(load_config(options.file, **_how(options)).table(everything=options.all))
    return 0


def _check(options: argparse.Namespace) -> int:
    problems = problems_of(options.file, **_how(options))
    if problems:
        return _report(options.file, problems)
    config = load_config(options.file, **_how(options))
    print(config.summary_line())
    for note in config.notes:
        print(f"note: {note}")
    return 0


def _report(file: str, problems: list) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{file}: {len(problems)} problem{'' if len(problems) == 1 else 's'}", file=sys.stderr)
    return 1
