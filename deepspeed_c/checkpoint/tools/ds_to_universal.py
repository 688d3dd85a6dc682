"""DeepSpeed's program ``ds_to_universal``: its universal format from a checkpoint of DeepSpeed or ours."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.tools.convert import Target, convert
from deepspeed_c.errors import CheckpointError, DeepSpeedCError
from deepspeed_c.logging import logger

__all__ = ["main", "parse_arguments"]

EXIT_FAILED = 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of DeepSpeed's program; options for its worker processes and temporary files change nothing here."""
    parser = argparse.ArgumentParser(
        prog="ds_to_universal", description="Writes DeepSpeed's universal format from one checkpoint."
    )
    parser.add_argument("--input_folder", required=True, help="folder of one checkpoint (of a tag)")
    parser.add_argument(
        "--output_folder",
        required=True,
        help="new folder of one checkpoint, beside which latest_universal will name it",
    )
    unused = "accepted, and changes nothing: one process converts, and keeps no temporary files"
    parser.add_argument("--num_extract_workers", type=int, default=4, help=unused)
    parser.add_argument("--num_merge_workers", type=int, default=2, help=unused)
    parser.add_argument("--keep_temp_folder", action="store_true", help=unused)
    parser.add_argument(
        "--no_strict", dest="strict", action="store_false", help="accepted; what is inconsistent is always an error"
    )
    parser.add_argument(
        "--inject_missing_state", action="store_true", help="accepted; what the format wants is always there"
    )
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """Converts ``args.input_folder`` to ``args.output_folder``. Raises CheckpointError."""
    output = os.path.abspath(args.output_folder)
    folder, tag = os.path.split(output)
    if not tag:
        raise CheckpointError("is no folder that can be made", where=output, fix="name a new folder")
    with open_checkpoint(args.input_folder) as source:
        path = convert(source, folder, "deepspeed-universal", Target(tag=tag))
    logger.info("%s was written from %s", path, args.input_folder)


def _run() -> int:
    try:
        main(parse_arguments())
    except DeepSpeedCError as error:
        print(f"ds_to_universal: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(_run())
