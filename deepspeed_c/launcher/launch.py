"""``deepspeed_c [OPTIONS] SCRIPT [ARGS ...]``: parse the command line and start the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_c.launcher.options import parse_options
from deepspeed_c.launcher.plan import make_plan

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Start the ranks and wait for them. Returns their exit code. Raises LaunchError if nothing can be started."""
    plan = make_plan(parse_options(argv))
    from deepspeed_c.launcher.run import launch  # imports torch, so help and errors must not need it

    return launch(plan)
