"""The command ``deepspeed_c io``: measures a device (bench), and finds the settings for it (tune)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_c import _C
from deepspeed_c.command_line import Actions, command_parser, run_action
from deepspeed_c.config.offload import Aio
from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.io.bench import FIO_ENGINES, Settings, compare, find_fio, fio, ours, summary
from deepspeed_c.io.scratch import ScratchFile, scratch
from deepspeed_c.io.tune import tune
from deepspeed_c.ops.aio import aio_handle, backends
from deepspeed_c.quantity import as_binary, parse_bytes

__all__ = ["main"]

BACKENDS = ("auto", "uring", "libaio", "threads", "sync")
_DESCRIPTION = """\
The device that checkpoints and offloaded state live on. Files that are made have no name: nothing is left, however this ends.

  deepspeed_c io bench DIR     writes and reads with our engine, and with fio where it is installed
  deepspeed_c io tune DIR      the section "aio" for the configuration, found in seconds
"""


def main(argv: Sequence[str]) -> int:
    """Runs ``deepspeed_c io`` with these arguments. Returns 0.

    Raises AioError for a folder that cannot be used, ConfigError for numbers out of range, FeatureError for a backend
    that this kernel does not allow.
    """
    return run_action(_parser(), argv)


def _bench(options: argparse.Namespace) -> int:
    unit = _C.aio_alignment()
    block_size = -(-parse_bytes(options.block, "--block") // unit) * unit
    settings = Settings(options.backend, block_size, options.depth, options.parallelism)
    handle = _handle(settings)
    # Whole blocks, so that all contenders transfer the same number of bytes.
    n_bytes = parse_bytes(options.size, "--size") // block_size * block_size
    if n_bytes < 1 or options.rounds < 1:
        raise ConfigError(
            f"--size {options.size} in blocks of {block_size} bytes, --rounds {options.rounds}: nothing to measure",
            where="deepspeed_c io bench",
            fix="measure one block and one round at least",
        )
    program = None if options.no_fio else find_fio()
    with scratch(options.folder, n_bytes) as file:
        rates = compare(_contenders(file, settings, handle, program), n_bytes, options.rounds)
    result = {
        "folder": os.path.abspath(options.folder),
        "bytes": n_bytes,
        "block_size": block_size,
        "queue_depth": settings.queue_depth,
        "intra_op_parallelism": settings.intra_op_parallelism,
        "backend": handle.backend,
        "rounds": options.rounds,
        "is_direct": not file.note,
        "notes": _notes(file, rates.absent, program, options.no_fio),
        "results": summary(rates),
    }
    print(json.dumps(result, indent=2) if options.json else _as_text(result))
    return 0


def _handle(settings: Settings) -> aio_handle:
    for backend in backends():
        if backend.name == settings.backend and not backend.is_usable:
            raise FeatureError(backend.reason, where=f"--backend {backend.name}", fix="--backend auto takes another")
    try:
        return settings.handle()
    except ValueError as error:
        raise ConfigError(str(error), where="deepspeed_c io bench", fix="see deepspeed_c io bench --help") from error


def _contenders(file: ScratchFile, settings: Settings, handle: aio_handle, program: str | None) -> dict[str, Any]:
    locked = handle.new_cpu_locked_tensor(file.n_bytes, torch.empty(0, dtype=torch.uint8)).random_()
    # At an odd address, which no allocator returns: the slowest case.
    ordinary = torch.empty(file.n_bytes + 1, dtype=torch.uint8)[1:].copy_(locked)
    contenders = {"ordinary tensor": ours(file, ordinary, handle), "locked tensor": ours(file, locked, handle)}
    for engine in FIO_ENGINES if program else ():
        contenders[f"fio {engine}"] = fio(program, engine, file, settings)
    return contenders


def _notes(file: ScratchFile, absent: dict[str, str], program: str | None, is_unwanted: bool) -> list[str]:
    notes = [f"not the device but the page cache was measured: {file.note}"] if file.note else []
    if program is None and not is_unwanted:
        notes.append("fio is not installed: without it there is no bound to compare with")
    return notes + [f"{name}: {reason}" for name, reason in absent.items()]


def _as_text(result: dict[str, Any]) -> str:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in result["results"]:
        by_name.setdefault(row["contender"], []).append(row)
    rows = [["", "write, GB/s", "of fio", "read, GB/s", "of fio"]]
    for name, found in by_name.items():
        cells = [name]
        for row in found:
            ratio = row["ratio_to_fio"]
            cells += [
                f"{row['gb_per_s']:.2f} ({row['gb_per_s_min']:.2f} to {row['gb_per_s_max']:.2f})",
                "" if ratio is None else f"{ratio:.2f}",
            ]
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rounds = f"{result['rounds']} round{'s' if result['rounds'] > 1 else ''}"
    head = (
        f"{result['folder']}: {as_binary(result['bytes'])} in blocks of {as_binary(result['block_size'])}, "
        f"{result['queue_depth']} deep, backend {result['backend']}; median of {rounds} (min to max); "
        "the bound is the better fio of each round"
    )
    table = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"note: {note}" for note in result["notes"]]
    return "\n".join([head, "", *table, *[""] * bool(notes), *notes])


def _tune(options: argparse.Namespace) -> int:
    if not 0 < options.budget < float("inf"):
        raise ConfigError(f"{options.budget} seconds", where="--budget", fix="give it a second at least")
    found = tune(options.folder, options.budget)
    notes = [f"not the device but the page cache was measured: {found.note}"] if found.note else []
    if options.json:
        result = {
            "aio": found.as_config(),
            "write_gb_per_s": round(found.rates["write"] / 1e9, 4),
            "read_gb_per_s": round(found.rates["read"] / 1e9, 4),
            "bytes": found.n_bytes,
            "measured": found.n_measured,
            "candidates": found.n_candidates,
            "notes": notes,
        }
        print(json.dumps(result, indent=2))
        return 0
    # Standard output gets only the section of the configuration.
    print(
        f"{found.n_measured} of {found.n_candidates} settings timed with transfers of {as_binary(found.n_bytes)}; "
        f"the best: write {found.rates['write'] / 1e9:.2f} GB/s, read {found.rates['read'] / 1e9:.2f} GB/s",
        *(f"note: {note}" for note in notes),
        sep="\n",
        file=sys.stderr,
    )
    print(f'"aio": {json.dumps(found.as_config(), indent=2)}')
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("io", _DESCRIPTION)
    actions = Actions(parser, "bench | tune")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = actions.add(name, run, text)
        command.add_argument("folder", metavar="DIR", help="a folder on the device")
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    default = Aio()
    bench = add("bench", _bench, "write and read speed of a device with our engine and with fio, in turn")
    bench.add_argument(
        "--size", default="1GiB", help="bytes of a transfer: 1GiB (default), 500MB; held twice in memory"
    )
    bench.add_argument("--block", default=str(default.block_size), help="bytes of a request; default %(default)s")
    bench.add_argument(
        "--depth", type=int, default=default.queue_depth, metavar="N", help="requests in flight; default %(default)s"
    )
    bench.add_argument("--backend", choices=BACKENDS, default=default.backend, help="default %(default)s")
    bench.add_argument(
        "--parallelism", type=int, default=default.intra_op_parallelism, metavar="N",
        help="intra_op_parallelism, for the backend threads; default %(default)s",
    )  # fmt: skip
    bench.add_argument("--rounds", type=int, default=3, metavar="N", help="default %(default)s")
    bench.add_argument("--no-fio", action="store_true", help="do not measure fio")

    search = add("tune", _tune, 'find the best settings of the section "aio" for a device, and print it')
    search.add_argument("--budget", type=float, default=10.0, metavar="SECONDS", help="about; default %(default)s")
    return parser
