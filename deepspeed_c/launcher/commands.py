"""The commands of ``deepspeed_c``, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable

__all__ = ["COMMANDS", "find_command"]

# Command -> "module:function", which takes the words behind the command and returns the exit code. The module is
# imported when its command runs: help, errors and the configuration commands must not wait for torch.
COMMANDS: dict[str, str] = {
    "run": "deepspeed_c.compat.alias.cli:run",
    "env": "deepspeed_c.compat.alias.cli:env",
    "report": "deepspeed_c.launcher.report:main",
    "config": "deepspeed_c.config.cli:main",
    "plan": "deepspeed_c.plan.cli:main",
    "checkpoint": "deepspeed_c.checkpoint.tools.cli:main",
    "io": "deepspeed_c.io.cli:main",
    "bench": "deepspeed_c.bench.cli:main",
    "inject": "deepspeed_c.inject.cli:main",
    "sequence": "deepspeed_c.sequence.cli:main",
    "pipe": "deepspeed_c.pipe.show:main",
}
# Words that begin with no command are a script to start, and its options.
_LAUNCH = "deepspeed_c.launcher.launch:main"


def find_command(words: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """The function that ``words`` ask for, and the words that it takes."""
    is_command = bool(words) and words[0] in COMMANDS
    module, _, function = (COMMANDS[words[0]] if is_command else _LAUNCH).partition(":")
    return getattr(importlib.import_module(module), function), words[is_command:]
