"""The command ``deepspeed_c elastic``, also named ``ds_elastic``. It needs no torch."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from deepspeed_c.command_line import command_parser

from .._version import __version__
from .elasticity import SECTION, batch_of_world, compute_elastic_config
from .load import problems_of
from .source import read_source

__all__ = ["main"]

_RULE = "-" * 42


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``deepspeed_c elastic`` with these arguments; return 0. Errors of the configuration are raised."""
    options = _parser().parse_args(argv)
    print("\n".join(_answer(read_source(options.config).keys, options.world_size)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "elastic", "The batch of the section elasticity, and the numbers of ranks that can share it."
    )
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="JSON or Hjson file of the configuration")
    parser.add_argument(
        "-w", "--world-size", type=int, default=0, metavar="N", help="data-parallel ranks, for their micro-batch"
    )
    return parser


def _answer(keys: dict[str, Any], world_size: int) -> list[str]:
    """The lines of DeepSpeed's ds_elastic. A section that ``initialize`` refuses raises its error here."""
    for problem in problems_of(keys, batch="skip"):
        if problem.where.startswith(SECTION):
            raise problem
    batch, worlds, *micro = compute_elastic_config(keys, __version__, world_size)
    if world_size:
        batch_of_world(keys[SECTION], world_size)
    title = f"Calculated results for world size {world_size}:" if world_size else "Calculated results:"
    return [
        *(_RULE, "Elasticity config:", _RULE, json.dumps(keys[SECTION], indent=4, sort_keys=True)),
        *(_RULE, title, _RULE, f"final_batch_size .... {batch}", f"valid_gpus .......... {worlds}"),
        *(f"micro_batch_size .... {size}" for size in micro),
    ]
