"""The commands ``deepspeed_c config show FILE`` and ``deepspeed_c config check FILE``. They need no torch."""

import argparse
import sys
from collections.abc import Sequence

from .load import load_config, problems_of

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 when the configuration is good, 1 when it is not, 2 when the command line is wrong."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:
        # argparse has printed its message (2) or the help text (0).
        return int(stop.code or 0)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepspeed_c config", description="Look at a configuration without training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print every value that holds, where it came from, and what has no effect")
    show.add_argument("--all", action="store_true", help="also keys of features that are not in use")
    show.set_defaults(run=_show)
    check = commands.add_parser("check", help="print everything that is wrong")
    check.set_defaults(run=_check)
    for command in (show, check):
        command.add_argument("file", metavar="FILE", help="JSON file, or base64-encoded JSON")
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
