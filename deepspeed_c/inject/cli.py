"""The command ``deepspeed_c inject``: shows the cut of a model over tensor-parallel ranks, without starting any
rank."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_c.command_line import command_parser
from deepspeed_c.config import load_config
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ConfigError
from deepspeed_c.inject.cutting import preview_cut
from deepspeed_c.inject.folder import model_on_meta
from deepspeed_c.inject.report import CutReport

__all__ = ["main"]

_DESCRIPTION = """\
Which rule cuts each parameter of a Hugging Face model, and what each tensor-parallel rank holds of it. Reads the
folder's config.json; no weight is read or allocated.

  deepspeed_c inject MODEL_DIR --tp 4                     rank 0, parameter by parameter; a line for each other rank
  deepspeed_c inject MODEL_DIR --tp 4 --rank 2            rank 2
  deepspeed_c inject MODEL_DIR --tp 4 --config ds.json    with the section tensor_parallel of a configuration
"""


def main(argv: Sequence[str]) -> int:
    """Run ``deepspeed_c inject`` with the arguments ``argv``. Returns 0 when a report was printed.

    Raises ConfigError for numbers that make no sense and for folders without a configuration, ModelError where no rule
    fits the model or transformers cannot build it, and FeatureError where transformers is missing.
    """
    options = _parser().parse_args(argv)
    n_ranks, rank = options.tp, options.rank
    if n_ranks < 1:
        raise ConfigError(f"{n_ranks} is no number of ranks", where="--tp", fix="write an integer >= 1")
    if rank is not None and not 0 <= rank < n_ranks:
        raise ConfigError(
            f"there is no rank {rank} among {n_ranks}", where="--rank", fix=f"write 0 to {n_ranks - 1}, or leave it out"
        )
    section = TensorParallel() if options.config is None else _section(options.config)
    if section.autotp_size not in (0, n_ranks):
        raise ConfigError(
            f"--tp is {n_ranks}, autotp_size {section.autotp_size}", where=options.config, fix="ask for the same size"
        )
    model = model_on_meta(Path(options.folder), "deepspeed_c inject")
    reports = [
        preview_cut(model, section, number, n_ranks) for number in ([rank] if rank is not None else range(n_ranks))
    ]
    print(json.dumps([_as_json(report) for report in reports]) if options.json else _as_text(reports))
    return 0


def _section(file: str) -> TensorParallel:
    # Batch sizes need the number of data-parallel ranks, which this command does not know.
    return load_config(file, world_size=1, batch="skip").tensor_parallel


def _as_text(reports: list[CutReport]) -> str:
    return "\n".join([str(reports[0]), *(report.summary for report in reports[1:])])


def _as_json(report: CutReport) -> dict[str, Any]:
    rows = [
        {
            "name": row.name,
            "logical_shape": list(row.logical_shape),
            "local_shape": list(row.local_shape),
            "n_copies": row.n_copies,
            "rule": row.rule,
        }
        for row in report.rows
    ]
    return {
        "rank": report.rank,
        "n_ranks": report.n_ranks,
        "logical_elems": report.logical_elems,
        "local_elems": report.local_elems,
        "parameters": rows,
    }


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("inject", _DESCRIPTION)
    parser.add_argument("folder", metavar="MODEL_DIR", help="folder with a config.json")
    parser.add_argument("--tp", type=int, required=True, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--rank", type=int, metavar="R", help="one rank alone")
    parser.add_argument("--config", metavar="FILE", help="configuration whose section tensor_parallel has rules")
    parser.add_argument("--json", action="store_true", help="one line of JSON: a list of ranks")
    return parser
