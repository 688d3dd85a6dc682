"""The programs that DeepSpeed installs, translated to commands of ``deepspeed_c``. The files in ``compat/alias/bin``
run these programs. ``deepspeed_c run`` and ``deepspeed_c env`` put this folder on PATH.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from deepspeed_c.errors import FeatureError
from deepspeed_c.launcher.main import main as deepspeed_c_main
from deepspeed_c.launcher.main import report_errors

__all__ = ["PROGRAMS", "main"]


def _ds_io(argv: list[str]) -> int:
    """``ds_io``, run as ``deepspeed_c io bench``, which writes and reads in one run. It takes the options that
    have a meaning there.
    """
    parser = argparse.ArgumentParser(prog="ds_io", description="deepspeed_c io bench, with DeepSpeed's names.")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--io_size", required=True, help="bytes, with K, M or G")
    parser.add_argument("--block_size", default="1M")
    parser.add_argument("--queue_depth", default="32")
    parser.add_argument("--io_parallel", default="1")
    parser.add_argument("--loops", default="3")
    parser.add_argument("--read", action="store_true", help="reads are measured in any case, and so are writes")
    options = parser.parse_args(argv)
    size, block = _binary(options.io_size), _binary(options.block_size)
    words = ["io", "bench", options.folder, "--size", size, "--block", block]
    return deepspeed_c_main(
        [*words, "--depth", options.queue_depth, "--parallelism", options.io_parallel, "--rounds", options.loops]
    )


def _binary(size: str) -> str:
    """DeepSpeed's K, M and G are powers of 1024."""
    return f"{size}iB" if size[-1:] in ("K", "M", "G") else size


def _ds_nvme_tune(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ds_nvme_tune", description="deepspeed_c io tune, with DeepSpeed's name.")
    parser.add_argument("--nvme_dir", required=True, help="folder on the device")
    return deepspeed_c_main(["io", "tune", parser.parse_args(argv).nvme_dir])


def _command(*words: str) -> Callable[[list[str]], int]:
    return lambda argv: deepspeed_c_main([*words, *argv])


def _absent(name: str, instead: str) -> Callable[[list[str]], int]:
    def refuse(argv: list[str]) -> int:
        raise FeatureError("is not part of this version", where=name, fix=instead)

    return refuse


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "deepspeed": _command(),
    "deepspeed.pt": _command(),
    "ds": _command(),
    "ds_report": _command("report"),
    "dsr": _command("report"),
    "ds_io": _ds_io,
    "ds_nvme_tune": _ds_nvme_tune,
    "ds_ssh": _command("ssh"),
    "ds_bench": _absent("ds_bench", "`deepspeed_c bench comm` measures ranks of one host"),
    "ds_elastic": _command("elastic"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first word of ``argv`` (default: ``sys.argv[1:]``) names, with the other words as its
    arguments.

    Returns its exit code.
    """
    name, *rest = sys.argv[1:] if argv is None else argv
    return report_errors(lambda: PROGRAMS[name](rest))


if __name__ == "__main__":
    sys.exit(main())
