"""The module that ``import deepspeed`` finds when this folder's parent is on the path: it puts deepspeed_c in its own
place."""

import sys

try:
    from deepspeed_c.compat.alias.install import activate
except ModuleNotFoundError as _error:
    if _error.name != "deepspeed_c":
        raise
    # No ImportError: code that tries to import deepspeed would go on without it, and nobody would know why.
    raise RuntimeError(
        f"deepspeed_c answers as `deepspeed` here ({__file__} is on PYTHONPATH), but {sys.executable} has no deepspeed_c\n"
        "Fix: start the interpreter that deepspeed_c is installed in, or take the folder off PYTHONPATH"
    ) from None

activate()
