"""``deepspeed_c [OPTIONS] SCRIPT [ARGS ...]``: from the words of the command line to ranks that run."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_c.launcher.options import parse_options
from deepspeed_c.launcher.plan import make_plan

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Start the ranks and wait for them. Returns their exit code; raises LaunchError where nothing can be started."""
    plan = make_plan(parse_options(argv))
    from deepspeed_c.launcher.run import launch  # here: it needs torch, and help and errors must not wait for that

    return launch(plan)
