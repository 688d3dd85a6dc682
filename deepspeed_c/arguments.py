"""The command-line arguments that a training script shares with DeepSpeed."""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the group "DeepSpeed" to ``parser`` and returns the same parser.

    ``--deepspeed`` (flag, default False) is for the script's own use. ``initialize`` reads ``--deepspeed_config FILE``
    (default None) from ``args``. ``--deepscale`` and ``--deepscale_config`` are the deprecated former names of these
    options. All are as in DeepSpeed 0.19.6.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name, note in (("deepspeed", ""), ("deepscale", " (deprecated: --deepspeed)")):
        group.add_argument(
            f"--{name}",
            action="store_true",
            default=False,
            help=f"train with the engine; for the script's own use, the engine does not look at it{note}",
        )
        group.add_argument(
            f"--{name}_config", type=str, default=None, metavar="FILE", help=f"JSON configuration of the engine{note}"
        )
    return parser
