"""What starts the agents of the hosts, by its name on the command line: one file each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_c.launcher.runners.runner import Runner

__all__ = ["RUNNERS", "find_runner"]

# Name -> "module:class", a subclass of ``runner.Runner``. The module is imported when its runner is asked for.
RUNNERS: dict[str, str] = {
    "pdsh": "deepspeed_c.launcher.runners.pdsh:PdshRunner",
}


def find_runner(name: str) -> Runner:
    """A new runner of that name in ``RUNNERS``."""
    module, _, kind = RUNNERS[name].partition(":")
    return getattr(importlib.import_module(module), kind)()
