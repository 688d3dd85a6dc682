"""The commands of ``deepspeed_c``, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["COMMANDS", "Command", "find_command"]


class Command(NamedTuple):
    """A command, and the lines about it in the help of ``deepspeed_c``."""

    function: str
    """``module:function``. The function takes the words after the command and returns the exit code. The module is
    imported when its command runs: help, errors and the configuration commands must not wait for torch."""
    uses: tuple[tuple[str, str], ...]
    """Words to type, and what they do."""


COMMANDS: dict[str, Command] = {
    "run": Command(
        "deepspeed_c.compat.alias.cli:run",
        (
            (
                "deepspeed_c run COMMAND ...",
                "run a command whose processes all see deepspeed_c as `deepspeed` (Hugging Face, Lightning)",
            ),
        ),
    ),
    "env": Command(
        "deepspeed_c.compat.alias.cli:env",
        (('eval "$(deepspeed_c env)"', "the same for a shell"),),
    ),
    "report": Command(
        "deepspeed_c.launcher.report:main",
        (
            (
                "deepspeed_c report",
                "what was built, what was found on this machine, versions; with --hostfile on all hosts",
            ),
        ),
    ),
    "ssh": Command(
        "deepspeed_c.launcher.ssh:main",
        (("deepspeed_c ssh -f FILE CMD", "a command on all hosts of a hostfile"),),
    ),
    "config": Command(
        "deepspeed_c.config.cli:main",
        (
            ("deepspeed_c config show FILE", "every value of a configuration and where it comes from"),
            ("deepspeed_c config check FILE", "what is wrong with a configuration"),
        ),
    ),
    "elastic": Command(
        "deepspeed_c.config.elastic_cli:main",
        (
            (
                "deepspeed_c elastic -c FILE -w N",
                "the batch of the section elasticity, and which numbers of ranks can share it",
            ),
        ),
    ),
    "plan": Command(
        "deepspeed_c.calibration.cli:main",
        (
            (
                "deepspeed_c plan --help",
                "the memory of each rank of a run, for each ZeRO stage; with --simulate, the time of a step",
            ),
        ),
    ),
    "compile": Command(
        "deepspeed_c.compile.cli:main",
        (
            (
                "deepspeed_c compile show SCRIPT",
                "what engine.compile makes of its model: graphs, passes, what stays eager and why",
            ),
        ),
    ),
    "generate": Command(
        "deepspeed_c.inference.cli:main",
        (("deepspeed_c generate --help", "text by the model of a Hugging Face folder, on one rank or on several"),),
    ),
    "serve": Command(
        "deepspeed_c.server.cli:main",
        (("deepspeed_c serve --help", "the model of a Hugging Face folder for clients of OpenAI's API, over HTTP"),),
    ),
    "compress": Command(
        "deepspeed_c.compression.cli:main",
        (
            (
                "deepspeed_c compress --help",
                "bits, bytes and error of compressed layers, and packed folders for transformers",
            ),
        ),
    ),
    "data": Command(
        "deepspeed_c.data.cli:main",
        (("deepspeed_c data show RUN", "which samples a run has read, by step, rank and micro-batch"),),
    ),
    "checkpoint": Command(
        "deepspeed_c.checkpoint.tools.cli:main",
        (
            (
                "deepspeed_c checkpoint --help",
                "what is in a checkpoint, whether it is whole, and its weights or all of it in other formats",
            ),
        ),
    ),
    "io": Command(
        "deepspeed_c.io.cli:main",
        (
            (
                "deepspeed_c io --help",
                "how fast the device of checkpoints and offloaded state is, and the settings that suit it",
            ),
        ),
    ),
    "bench": Command(
        "deepspeed_c.bench.cli:main",
        (
            (
                "deepspeed_c bench --help",
                "how fast ranks of this host exchange data, and how fast a server answers a load",
            ),
        ),
    ),
    "inject": Command(
        "deepspeed_c.inject.cli:main",
        (
            (
                "deepspeed_c inject --help",
                "how a model is cut over tensor-parallel ranks: the rule of each parameter, what a rank holds",
            ),
        ),
    ),
    "sequence": Command(
        "deepspeed_c.sequence.cli:main",
        (
            (
                "deepspeed_c sequence --help",
                "which rank has which tokens of a sequence, computes which part of attention, sends what",
            ),
        ),
    ),
    "pipe": Command(
        "deepspeed_c.pipe.show:main",
        (("deepspeed_c pipe --help", "a pipeline's schedule, drawn: who does what when, idle time, what ranks hold"),),
    ),
    "tune": Command(
        "deepspeed_c.autotuning.show:main",
        (("deepspeed_c tune show DIR", "what a search by --autotuning found, and what it left out"),),
    ),
}
# If the first word is no command, the words are a script to start, with options.
_LAUNCH = "deepspeed_c.launcher.launch:main"


def find_command(words: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """(the function of the command in ``words``, its arguments)."""
    is_command = bool(words) and words[0] in COMMANDS
    module, _, function = (COMMANDS[words[0]].function if is_command else _LAUNCH).partition(":")
    return getattr(importlib.import_module(module), function), words[is_command:]
