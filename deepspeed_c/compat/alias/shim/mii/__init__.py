"""The module that ``import mii`` finds when this folder's parent is on the path. It replaces itself by
deepspeed_c.mii."""

import sys

try:
    from deepspeed_c.compat.alias.install import activate
except ModuleNotFoundError as _error:
    if _error.name != "deepspeed_c":
        raise
    raise RuntimeError(
        f"deepspeed_c answers as `mii` here ({__file__} is on PYTHONPATH), but {sys.executable} has no deepspeed_c\n"
        "Fix: start the interpreter that deepspeed_c is installed in, or take the folder off PYTHONPATH"
    ) from None

activate("mii")
