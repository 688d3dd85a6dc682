"""The launcher's options as a table, and the parsing of a command line. All words after the script belong to the
script."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.commands import COMMANDS
from deepspeed_c.scheduled import host_of_slurm_step, pod_of

__all__ = ["DEFAULT_HOSTFILES", "Options", "check_rounds", "parse_options", "script_index"]

DEFAULT_RUNNER = "pdsh"
LEAST_HEARTBEAT = 0.5
# The first of them that exists is taken. DeepSpeed's default path, and the path of Kubernetes' MPI operator.
DEFAULT_HOSTFILES = ("/job/hostfile", "/etc/mpi/hostfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a launch."""

    script: str
    """Path of the script; the name of a module with ``module``; a program with ``no_python``."""
    script_args: tuple[str, ...]
    module: bool
    no_python: bool
    no_local_rank: bool
    """Do not pass ``--local_rank=N`` as the first argument."""
    num_procs: int | None
    num_nodes: int | None
    include: str
    exclude: str
    hostfile: str | None
    """None: the first of ``DEFAULT_HOSTFILES`` that exists."""
    launcher: str
    """A name of ``runners.RUNNERS``."""
    launcher_args: str
    """Words for the runner's program, as in a shell."""
    force_multi: bool
    """Start the agent of a single host by the runner too."""
    no_ssh: bool
    """Start the ranks of this host alone, and meet those of the other hosts at the master address. In pods of
    Kubernetes and in Slurm steps the numbers and the address may be left out."""
    node_rank: int | None
    no_ssh_check: bool
    ssh_port: int | None
    venv_script: str | None
    """Shell script to source on each host before its agent starts."""
    gather_logs: bool
    """Write the logs of all ranks on the launching host."""
    master_addr: str | None
    """An address of the host of rank 0."""
    master_port: int | None
    """None: any free port."""
    bind_cores_to_rank: bool
    bind_core_list: str | None
    enable_each_rank_log: str | None
    """Folder of one log file a rank."""
    tag_output: bool
    grace: float
    """Seconds that ranks have to end after a signal."""
    save_pid: bool
    log_level: str
    elastic_training: bool
    """Go on with the hosts that are left after a failure, in another round."""
    min_elastic_nodes: int | None
    """None: 1."""
    max_elastic_nodes: int | None
    """None: all of the hostfile."""
    max_restarts: int
    """Rounds in a row that may fail without having saved a checkpoint."""
    elastic_grace: float
    """Seconds that hosts have to come back before a round begins without them."""
    heartbeat: float | None
    """Without a sign for so many seconds a host is lost. None: ``meeting.LOST_SECONDS``."""
    autotuning: str = ""
    """"tune": search for the best configuration; "run": also start the script with it; "": start the script."""


def parse_options(argv: Sequence[str]) -> Options:
    """Read the options of a launch from the command line.

    Raises ``LaunchError`` for options that exclude each other. Exits with code
    2 on unknown words, and with code 0 for help, like any argparse program.
    """
    parser = _parser()
    end = script_index(argv, _TAKES_VALUE)
    values = vars(parser.parse_args(_joined([word for word in argv[:end] if word != "--"])))
    if end == len(argv):
        parser.error("which script? (deepspeed_c --help shows how to call it)")
    if values.pop("quiet"):
        values["log_level"] = "error"
    if values["enable_each_rank_log"] == "None":  # DeepSpeed's word for "no"
        values["enable_each_rank_log"] = None
    options = Options(script=argv[end], script_args=tuple(argv[end + 1 :]), **values)
    if options.no_ssh:
        options = _scheduled(options, os.environ)
    _check(options)
    return options


def _scheduled(options: Options, environ: Mapping[str, str]) -> Options:
    """The options, with values from Kubernetes or Slurm for those that are not given. Raises CommError for variables
    that are incomplete or malformed.
    """
    has_hosts = options.hostfile is not None or any(map(os.path.isfile, DEFAULT_HOSTFILES))
    is_counted = has_hosts or options.num_nodes is not None
    if is_counted and options.node_rank is not None and options.master_addr is not None:
        return options  # nothing is missing, so the variables may be of any form
    host = pod_of(environ) or host_of_slurm_step(environ)
    if host is None:
        return options
    found: dict[str, Any] = {"node_rank": host.index, "master_addr": host.master_addr, "master_port": host.master_port}
    if not (has_hosts or options.include or options.exclude):
        found |= {"num_nodes": host.n_hosts, "num_procs": host.n_ranks}
    return replace(options, **{name: value for name, value in found.items() if getattr(options, name) is None})


def _joined(words: Sequence[str]) -> list[str]:
    """The words with ``--launcher_args WORDS`` as ``--launcher_args=WORDS``. WORDS mostly begin with a dash, and
    argparse would take them for an option.
    """
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--launcher_args":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _check(options: Options) -> None:
    if options.module and options.no_python:
        raise LaunchError("--module and --no_python exclude each other", fix="drop one of them")
    if options.include and options.exclude:
        raise LaunchError("--include and --exclude exclude each other", fix="drop one of them")
    if (options.include or options.exclude) and (options.num_procs is not None or options.num_nodes is not None):
        raise LaunchError(
            "--include and --exclude say how many processes to start, and so do --num_procs, --num_gpus, --num_nodes",
            fix="drop one of them",
        )
    if options.num_procs is not None and options.num_procs < 1:
        raise LaunchError(f"is {options.num_procs}", where="--num_procs", fix="start at least one process")
    if options.num_nodes is not None and options.num_nodes < 1:
        raise LaunchError(f"is {options.num_nodes}", where="--num_nodes", fix="use at least one host")
    for name, port in (("--master_port", options.master_port), ("--ssh_port", options.ssh_port)):
        if port is not None and not 0 < port < 1 << 16:
            raise LaunchError(f"is {port}", where=name, fix="ports run from 1 to 65535")
    if options.no_ssh and options.node_rank is None:
        raise LaunchError(
            "is given without --node_rank, and neither Kubernetes nor Slurm has set this host's number",
            where="--no_ssh",
            fix="add the number of this host, 0 on the host of rank 0",
        )
    if options.node_rank is not None and not options.no_ssh:
        raise LaunchError("is given without --no_ssh", where="--node_rank", fix="add --no_ssh, or drop it")
    if options.no_ssh and options.force_multi:
        raise LaunchError("--no_ssh and --force_multi exclude each other", fix="drop one of them")
    if options.autotuning and options.no_ssh:
        raise LaunchError(
            "--autotuning and --no_ssh exclude each other: one command has to start the ranks of all hosts",
            fix="drop one of them",
        )
    if options.gather_logs and options.enable_each_rank_log is None:
        raise LaunchError(
            "is given without --enable_each_rank_log DIR", where="--gather_logs", fix="name the folder of the logs"
        )
    if options.bind_core_list is not None and not options.bind_cores_to_rank:
        raise LaunchError(
            "is given without --bind_cores_to_rank", where="--bind_core_list", fix="add --bind_cores_to_rank"
        )
    _check_elastic(options)
    if not 0 <= options.grace < float("inf"):
        raise LaunchError(f"is {options.grace:g}", where="--grace", fix="give a number of seconds, 0 or more")


def check_rounds(options: Options, n_hosts: int) -> None:
    """Raises LaunchError where the options of an elastic launch do not fit ``n_hosts`` hosts."""
    if not options.elastic_training:
        return
    if options.min_elastic_nodes is not None and options.min_elastic_nodes > n_hosts:
        raise LaunchError(
            f"is {options.min_elastic_nodes}, and there are {n_hosts} hosts",
            where="--min_elastic_nodes",
            fix="name more hosts, or lower it",
        )


def _check_elastic(options: Options) -> None:
    least, most = options.min_elastic_nodes, options.max_elastic_nodes
    named = {"--min_elastic_nodes": least, "--max_elastic_nodes": most, "--heartbeat": options.heartbeat}
    for name, value in named.items():
        if value is not None and not options.elastic_training:
            raise LaunchError("is given without --elastic_training", where=name, fix="add it, or drop the option")
    for name, value in (("--min_elastic_nodes", least), ("--max_elastic_nodes", most)):
        if value is not None and value < 1:
            raise LaunchError(f"is {value}", where=name, fix="name at least one host")
    if least is not None and most is not None and least > most:
        raise LaunchError(
            f"is {least}, and --max_elastic_nodes is {most}", where="--min_elastic_nodes", fix="exchange them"
        )
    if options.max_restarts < 0:
        raise LaunchError(
            f"is {options.max_restarts}", where="--max_restarts", fix="give a number of rounds, 0 or more"
        )
    if not 0 <= options.elastic_grace < float("inf"):
        raise LaunchError(
            f"is {options.elastic_grace:g}", where="--elastic_grace", fix="give a number of seconds, 0 or more"
        )
    if options.heartbeat is not None and not LEAST_HEARTBEAT <= options.heartbeat < float("inf"):
        raise LaunchError(
            f"is {options.heartbeat:g}", where="--heartbeat", fix=f"give a number of seconds, {LEAST_HEARTBEAT} or more"
        )
    if options.autotuning and options.elastic_training:
        raise LaunchError(
            "--autotuning and --elastic_training exclude each other: each experiment has one round",
            fix="drop one of them",
        )


def _n_hosts(text: str) -> int | None:
    """A number of hosts. DeepSpeed's default is -1, which scripts pass on."""
    return None if int(text) == -1 else int(text)


# Sections of the help text: (title, ((flags, argparse keywords), ...)). An option takes a value unless it is a flag.
_FLAG = {"action": "store_true"}
_HIDDEN = {"help": argparse.SUPPRESS}
_OPTIONS = (
    (
        "How many processes, and on what",
        (
            (
                ("--num_procs", "--num_gpus", "--num_accelerators"),
                {
                    "type": int,
                    "metavar": "N",
                    "help": "processes to start (default: one a device; without devices one)",
                },
            ),
            (
                ("-i", "--include"),
                {
                    "default": "",
                    "metavar": "HOST:SLOTS",
                    "help": "one process on each of these devices, as in localhost:0,2",
                },
            ),
            (("-e", "--exclude"), {"default": "", "metavar": "HOST:SLOTS", "help": "... on each device but these"}),
            (
                ("-H", "--hostfile"),
                {
                    "metavar": "FILE",
                    "help": f"lines of `HOST slots=N` (default: {' or '.join(DEFAULT_HOSTFILES)}, if there)",
                },
            ),
            (("--num_nodes",), {"type": int, "metavar": "N", "help": "use the first N hosts of the file"}),
        ),
    ),
    (
        "Several hosts",
        (
            (
                ("--launcher",),
                {
                    "default": DEFAULT_RUNNER,
                    "type": str.lower,
                    "metavar": "NAME",
                    "help": "what starts the hosts' agents: pdsh (default), openmpi, mpich, impi, mvapich or slurm",
                },
            ),
            (
                ("--launcher_args",),
                {"default": "", "metavar": "WORDS", "help": "more words for its program, as one argument"},
            ),
            (("--ssh_port",), {"type": int, "metavar": "PORT", "help": "port of the hosts' ssh servers"}),
            (("--venv_script",), {"metavar": "FILE", "help": "shell script to source on each host first"}),
            (("--force_multi",), dict(_FLAG, help="start a single host through the launcher too")),
            (
                ("--no_ssh",),
                dict(_FLAG, help="start this host only; the same command runs on each host, with its --node_rank"),
            ),
            (
                ("--node_rank",),
                {
                    "type": int,
                    "metavar": "I",
                    "help": "number of this host, with --no_ssh (default: Kubernetes' or Slurm's)",
                },
            ),
        ),
    ),
    (
        "After a failure",
        (
            (
                ("--elastic_training",),
                dict(
                    _FLAG,
                    help="go on with the hosts that are left, from the newest checkpoint (checkpoint.auto_resume)",
                ),
            ),
            (
                ("--min_elastic_nodes",),
                {"type": _n_hosts, "metavar": "N", "help": "with at least N hosts (default: 1)"},
            ),
            (
                ("--max_elastic_nodes",),
                {"type": _n_hosts, "metavar": "N", "help": "with at most N hosts (default: all)"},
            ),
            (
                ("--elastic_grace",),
                {
                    "type": float,
                    "default": 5.0,
                    "metavar": "SECONDS",
                    "help": "wait so long for hosts that may come back (default: 5)",
                },
            ),
            (
                ("--heartbeat",),
                {"type": float, "metavar": "SECONDS", "help": "a host without a sign for so long is lost (default: 8)"},
            ),
            (
                ("--max_restarts",),
                {
                    "type": int,
                    "default": 10,
                    "metavar": "N",
                    "help": "end after so many failures in a row without a checkpoint (default: 10)",
                },
            ),
        ),
    ),
    (
        "How they find each other",
        (
            (
                ("--master_addr",),
                {
                    "metavar": "ADDR",
                    "help": "address of the host of rank 0 (default: 127.0.0.1; with several hosts, one that they reach)",
                },
            ),
            (("--master_port",), {"type": int, "metavar": "PORT", "help": "default: a port that is free"}),
        ),
    ),
    (
        "What is started",
        (
            (("--module",), dict(_FLAG, help="SCRIPT is a module, as with python -m")),
            (("--no_python",), dict(_FLAG, help="SCRIPT is a program, started as it is")),
            (("--no_local_rank",), dict(_FLAG, help="do not pass --local_rank=N before ARGS")),
            (
                ("--autotuning",),
                {
                    "default": "",
                    "choices": ("tune", "run"),
                    "metavar": "WHAT",
                    "help": "search for the fastest configuration first: tune, or run to train with it, too",
                },
            ),
        ),
    ),
    (
        "Cores",
        (
            (
                ("--bind_cores_to_rank",),
                dict(_FLAG, help="give each process cores of its own, equally many, next to each other"),
            ),
            (
                ("--bind_core_list",),
                {"metavar": "CORES", "help": "... out of these, as in 0,2-5 (default: all that are allowed)"},
            ),
        ),
    ),
    (
        "Output and end",
        (
            (
                ("--enable_each_rank_log",),
                {"metavar": "DIR", "help": "write what rank N prints to DIR/TIME_rankN.log, not to the terminal"},
            ),
            (
                ("--gather_logs",),
                dict(_FLAG, help="... on the launching host, also for ranks of other hosts"),
            ),
            (
                ("--tag_output",),
                dict(_FLAG, help="begin each line with the rank it comes from, and show whole lines only"),
            ),
            (
                ("--grace",),
                {
                    "type": float,
                    "default": 30.0,
                    "metavar": "SECONDS",
                    "help": "after SIGINT or SIGTERM, until SIGKILL (default: 30)",
                },
            ),
            (
                ("--save_pid",),
                dict(_FLAG, help="write the launcher's process id to TMPDIR/PID.deepspeed while it runs"),
            ),
            (
                ("--log_level",),
                {
                    "default": "warning",
                    "choices": ("debug", "info", "warning", "error", "critical"),
                    "help": "what the launcher itself tells (default: warning)",
                },
            ),
            (("-q", "--quiet"), dict(_FLAG, help="same as --log_level error")),
        ),
    ),
    (
        None,
        ((("--no_ssh_check",), dict(_FLAG, **_HIDDEN)),),
    ),
)

_TAKES_VALUE = {
    flag for _, options in _OPTIONS for flags, keywords in options if "action" not in keywords for flag in flags
}

_DESCRIPTION = """\
Trains on the devices of this host, or of all hosts of a hostfile: starts SCRIPT once a device (or --num_procs times a
host), with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, and stops all when one fails.

  deepspeed_c train.py --deepspeed --deepspeed_config ds_config.json
  deepspeed_c --num_procs 2 --bind_cores_to_rank train.py --lr 0.1
  deepspeed_c --include localhost:0,2 --module package.train
  deepspeed_c --hostfile hosts --exclude worker-1:0 train.py --deepspeed_config ds_config.json
"""

_EPILOG = """\
Everything after SCRIPT belongs to the script. The exit code is that of the rank that failed first (128 + n when signal
n ended it, and when signal n ended the launcher), 2 when nothing could be started.
"""


def _commands() -> str:
    return "\n".join(f"  {use:<31} {text}" for command in COMMANDS.values() for use, text in command.uses)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed_c",
        usage="deepspeed_c [OPTIONS] SCRIPT [ARGS ...]\n       deepspeed_c COMMAND ...",
        description=f"{_DESCRIPTION}\nOther commands:\n{_commands()}\n",
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
        # argparse would accept a prefix of an option, but script_index would not
        allow_abbrev=False,
        add_help=False,
    )
    for title, options in _OPTIONS:
        group = parser.add_argument_group(title) if title else parser
        for flags, keywords in options:
            group.add_argument(*flags, **keywords)
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints a flag and its meaning on one line. If an option has several names, prints only the first."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = "/".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {action.metavar or '{' + ','.join(action.choices) + '}'}"


def script_index(argv: Sequence[str], takes_value: Collection[str]) -> int:
    """Return the script's index: the first word that is neither an option nor the value of an option.

    takes_value: the options that take a value.

    argparse cannot find the script: it drops a ``--`` among the script's arguments, and reads the script's options as
    its own.
    """
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "-":
        if argv[i] == "--":
            return min(i + 1, len(argv))
        i += 2 if argv[i] in takes_value else 1
    return min(i, len(argv))
