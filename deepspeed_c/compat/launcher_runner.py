"""The functions of ``deepspeed.launcher.runner``: hostfiles, filters and the command line, under DeepSpeed's names."""

from __future__ import annotations

import base64
import json
import os
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from deepspeed_c.comm.discover import DEFAULT_PORT
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.exports import EXCLUDED, PREFIXES
from deepspeed_c.launcher.hostfile import filter_hosts, parse_filter, parse_hostfile, read_hostfile
from deepspeed_c.launcher.launch import main as launch
from deepspeed_c.launcher.main import main as command
from deepspeed_c.launcher.options import DEFAULT_HOSTFILES, parse_options
from deepspeed_c.logging import logger

__all__ = [
    "DEEPSPEED_ENVIRONMENT_PATHS",
    "DLTS_HOSTFILE",
    "EXCLUDE_ENVS",
    "EXPORT_ENVS",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_node_config_list",
    "parse_resource_filter",
]

DLTS_HOSTFILE = DEFAULT_HOSTFILES[0]
EXPORT_ENVS = list(PREFIXES)
EXCLUDE_ENVS = {sign: list(names) for sign, names in EXCLUDED.items()}
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
UNSET = -1


def main(args: Sequence[str] | None = None) -> None:
    """Starts the ranks and waits for them. If a rank failed, the process ends with its exit code, as in DeepSpeed.

    args: words of a command line, without the program's name. Words that cannot be launched raise LaunchError, which is
    a ValueError. None takes the words of this process, and reports an error as the command `deepspeed_c` does.
    """
    code = command() if args is None else launch(args)
    if code:
        sys.exit(code)


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Host -> number of slots; None, with a warning, if there is no such file. Raises LaunchError for a bad file."""
    if not os.path.isfile(hostfile_path):
        logger.warning("there is no hostfile %s: only this host is used", hostfile_path)
        return None
    return OrderedDict(read_hostfile(hostfile_path))


def _parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    return OrderedDict(parse_hostfile(hostfile_lines, "hostfile"))


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """Host -> slots of a filter such as ``worker-0@worker-1:0,2``; an empty list stands for all slots."""
    return {host: slots or [] for host, slots in parse_filter(node_config_list).items()}


def parse_resource_filter(
    host_info: Mapping[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> Mapping[str, list[int]]:
    """The hosts and slots of ``host_info`` that a filter leaves, in their order. Raises LaunchError for two filters,
    and for hosts and slots that are not there.
    """
    if include_str and exclude_str:
        raise LaunchError("include_str and exclude_str exclude each other", fix="drop one of them")
    if not (include_str or exclude_str):
        return host_info
    left = filter_hosts(host_info, include_str, exclude_str)
    return OrderedDict((host, slots) for host, slots in left.items() if slots)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> Mapping[str, list[int]]:
    """As ``parse_resource_filter``, for a pool that gives the number of slots of each host."""
    every = OrderedDict((host, list(range(n))) for host, n in resource_pool.items())
    return parse_resource_filter(every, include_str=inclusion, exclude_str=exclusion)


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Host -> slots as a word for ``deepspeed.launcher.launch --world_info``."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def parse_args(args: Sequence[str] | None = None) -> Namespace:
    """The options of a command line (default: this process's), with DeepSpeed's names and defaults."""
    words = sys.argv[1:] if args is None else list(args)
    options = parse_options(words)
    values = {name: getattr(options, name) for name in options.__dataclass_fields__}
    values["user_script"], values["user_args"] = values.pop("script"), list(values.pop("script_args"))
    values["num_gpus"] = values.pop("num_procs")
    of_hosts = ("num_nodes", "node_rank", "min_elastic_nodes", "max_elastic_nodes")
    defaults = dict.fromkeys(("num_gpus", *of_hosts), UNSET)
    defaults |= {"hostfile": DLTS_HOSTFILE, "master_addr": "", "master_port": DEFAULT_PORT}
    defaults["enable_each_rank_log"] = "None"
    values |= {name: default for name, default in defaults.items() if values[name] is None}
    own = words[: len(words) - 1 - len(options.script_args)]
    return Namespace(**values, quiet=options.log_level == "error", launcher_words=own)
