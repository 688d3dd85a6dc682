"""The commands of ``deepspeed_c``, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable

__all__ = ["COMMANDS", "find_command"]

# Command -> "module:function". The function takes the words after the command and returns the exit code. The module is
# imported when its command runs: help, errors and the configuration commands must not wait for torch.
COMMANDS: dict[str, str] = {
    "run": "deepspeed_c.compat.alias.cli:run",
    "env": "deepspeed_c.compat.alias.cli:env",
    "report": "deepspeed_c.launcher.report:main",
    "ssh": "deepspeed_c.launcher.ssh:main",
    "config": "deepspeed_c.config.cli:main",
    "plan": "deepspeed_c.plan.cli:main",
    "compile": "deepspeed_c.compile.cli:main",
    "generate": "deepspeed_c.inference.cli:main",
    "compress": "deepspeed_c.compression.cli:main",
    "data": "deepspeed_c.data.cli:main",
    "checkpoint": "deepspeed_c.checkpoint.tools.cli:main",
    "io": "deepspeed_c.io.cli:main",
    "bench": "deepspeed_c.bench.cli:main",
    "inject": "deepspeed_c.inject.cli:main",
    "sequence": "deepspeed_c.sequence.cli:main",
    "pipe": "deepspeed_c.pipe.show:main",
    "tune": "deepspeed_c.autotuning.show:main",
}
# If the first word is no command, the words are a script to start, with options.
_LAUNCH = "deepspeed_c.launcher.launch:main"


def find_command(words: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """(the function of the command in ``words``, its arguments)."""
    is_command = bool(words) and words[0] in COMMANDS
    module, _, function = (COMMANDS[words[0]] if is_command else _LAUNCH).partition(":")
    return getattr(importlib.import_module(module), function), words[is_command:]
