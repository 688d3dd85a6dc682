"""``python -m deepspeed.launcher.launch``: starts the ranks of one host. DeepSpeed's launchers call it on each host."""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed_c.comm.discover import DEFAULT_PORT
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.main import report_errors
from deepspeed_c.launcher.options import Options, parse_options, script_index
from deepspeed_c.launcher.without_runner import launch_without_runner

__all__ = ["decode_world_info", "main"]

# Options of DeepSpeed's program with a value, and flags; ``parse_options`` knows the others.
OWN_VALUES = ("--world_info", "--node_rank", "--master_addr", "--master_port", "--save_pid")
VALUES = (*OWN_VALUES, "--enable_each_rank_log", "--bind_core_list", "--log_level")
ELASTIC = ("--min_elastic_nodes", "--max_elastic_nodes")


def main(args: Sequence[str] | None = None) -> int:
    """Start the ranks of this host, and wait for them. Returns the exit code of the launch, the same on all hosts."""
    words = list(sys.argv[1:] if args is None else args)
    return report_errors(lambda: launch_without_runner(*_read(words)))


def _read(words: list[str]) -> tuple[Options, dict[str, list[int]]]:
    """(options, host -> slots) of a command line. Raises LaunchError for a --world_info that is missing or broken."""
    end = script_index(words, (*VALUES, *ELASTIC))
    parser = argparse.ArgumentParser(prog="python -m deepspeed.launcher.launch", allow_abbrev=False)
    parser.add_argument("--world_info", default="None", metavar="BASE64", help="host -> slots, as JSON in base64")
    parser.add_argument("--node_rank", type=int, default=0, metavar="I", help="number of this host")
    parser.add_argument("--master_addr", default="127.0.0.1", metavar="ADDR", help="address of the host of rank 0")
    parser.add_argument("--master_port", type=int, default=DEFAULT_PORT, metavar="PORT")
    # DeepSpeed gives the number of the process that called; the file here has the number of the process that writes it.
    parser.add_argument("--save_pid", type=int, default=0, metavar="PID")
    parser.add_argument("--enable_elastic_training", action="store_true", help=argparse.SUPPRESS)
    own, others = parser.parse_known_args([word for word in words[:end] if word != "--"])
    if own.enable_elastic_training:
        others.append("--elastic_training")
    hosts = decode_world_info(own.world_info)
    given = ["--no_ssh", "--node_rank", str(own.node_rank), "--num_nodes", str(len(hosts))]
    given += ["--master_addr", own.master_addr, "--master_port", str(own.master_port)]
    given += ["--save_pid"] if own.save_pid else []
    return parse_options([*given, *others, "--", *words[end:]]), hosts


def decode_world_info(text: str) -> dict[str, list[int]]:
    """Host -> slots of a word that ``encode_world_info`` has made. Raises LaunchError for other words."""
    try:
        hosts: Any = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError) as error:
        hosts = error
    is_valid = isinstance(hosts, dict) and all(
        isinstance(slots, list) and slots and all(type(slot) is int and slot >= 0 for slot in slots)
        for slots in hosts.values()
    )
    if not is_valid or not hosts:
        raise LaunchError(
            f"{text!r} is not host -> list of slots, as JSON in base64",
            where="--world_info",
            fix="make it by deepspeed.launcher.runner.encode_world_info, or start the script with deepspeed_c",
        )
    return {host: sorted(set(slots)) for host, slots in hosts.items()}
