"""Runs a user's training script in this process, with another function in place of ``initialize``."""

from __future__ import annotations

import argparse
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from deepspeed_c.errors import ModelError

__all__ = ["StopScript", "line_of", "run_script", "script_index"]


class StopScript(BaseException):
    """Raised within a script to end it. It is a BaseException, so that the script's ``except Exception`` does not catch
    it."""


def run_script(
    script: str,
    arguments: Sequence[str],
    n_ranks: int,
    port: int,
    initialize: Callable[[Callable[..., Any], dict[str, Any]], Any],
) -> None:
    """Runs ``script`` as rank 0 of ``n_ranks``, which meet at ``port``. Where it calls ``deepspeed_c.initialize``,
    ``initialize`` is called with that function and its arguments by name, and the script gets the result.

    Raises ModelError if there is no such file, and whatever the script raises.
    """
    if not os.path.isfile(script):
        raise ModelError(
            "there is no such script", where=script, fix="give the path of a Python file, after all options"
        )
    package = sys.modules[__name__.partition(".")[0]]
    original = package.initialize
    signature = inspect.signature(original)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return initialize(original, dict(signature.bind(*args, **kwargs).arguments))

    folder = os.path.dirname(os.path.abspath(script))
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [script, *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [folder, *sys.path]))
        stack.enter_context(mock.patch.dict(os.environ, place))
        for owner in (package, sys.modules[original.__module__]):  # scripts look the name up in both
            stack.enter_context(mock.patch.object(owner, "initialize", stand_in))
        runpy.run_path(script, run_name="__main__")


def line_of(error: BaseException, script: str) -> str:
    """The innermost line of the script in the error's traceback."""
    path = os.path.abspath(script)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == path]
    return f"{script}:{lines[-1]}" if lines else script


def script_index(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """The index of the script: the first word that is neither an option nor the value of an option. All later words are
    arguments of the script."""
    takes_value = {flag for action in parser._actions if action.nargs != 0 for flag in action.option_strings}
    i = 0
    while i < len(argv) and argv[i].startswith("-"):
        i += 2 if argv[i] in takes_value else 1
    return min(i, len(argv))
