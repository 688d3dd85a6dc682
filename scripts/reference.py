"""Builds the API reference from the docstrings, as HTML, with pdoc: ``python -m scripts.reference out/site``."""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed_c

__all__ = ["MODULES", "main"]

# Public modules, and the modules that define public names.
MODULES = sorted(
    {
        *(f"{deepspeed_c.__name__}.{name}" for name in deepspeed_c.PUBLIC_MODULES if name != "checkpointing"),
        *deepspeed_c.PUBLIC_NAMES.values(),
        "deepspeed_c.compat.checkpointing",
        "deepspeed_c.data.loader",
        "deepspeed_c.engine.host",
        "deepspeed_c.engine.pipeline",
        "deepspeed_c.engine.training",
        "deepspeed_c.engine.whole",
        "deepspeed_c.pipe",
        "deepspeed_c.sequence",
        "deepspeed_c.utils.zero_to_fp32",
    }
)


def main(argv: list[str]) -> int:
    """Write the reference below the folder that is named on the command line."""
    if len(argv) != 1:
        print("usage: python -m scripts.reference FOLDER", file=sys.stderr)
        return 2
    import pdoc  # imported here, because only this command needs pdoc

    pdoc.render.configure(docformat="google", footer_text=f"deepspeed_c {deepspeed_c.__version__}")
    pdoc.pdoc(*MODULES, output_directory=Path(argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
