"""``deepspeed_c ssh COMMAND``: runs a command on all hosts of a hostfile at once."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from collections.abc import Sequence

from deepspeed_c.command_line import command_parser
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.hostfile import hosts_of
from deepspeed_c.launcher.runners.pdsh import PdshRunner, pdsh_command

__all__ = ["main"]

_DESCRIPTION = """\
Runs COMMAND on all hosts of a hostfile at once, over ssh by pdsh. Each line of output begins with the name of its host.

  deepspeed_c ssh -f hosts nvidia-smi -L
  deepspeed_c ssh -f hosts 'du -sh /data/* | sort -h'     one word is a line for the hosts' shells
  deepspeed_c ssh -f hosts touch 'a b'                    of several words, each arrives as it is

The exit code is the largest of all hosts; that of a host which ssh does not reach is 255.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the largest exit code. Raises LaunchError for a hostfile that is not there or bad, and
    if pdsh is not installed."""
    parser = command_parser("ssh", _DESCRIPTION, usage="deepspeed_c ssh [-f FILE] [--ssh_port PORT] COMMAND [ARGS ...]")
    parser.add_argument("-f", "-H", "--hostfile", metavar="FILE", help="lines of `HOST slots=N`")
    parser.add_argument("--ssh_port", type=int, metavar="PORT", help="port of the hosts' ssh servers")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the words of the command")
    options = parser.parse_args(argv)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        parser.error("which command?")
    if options.ssh_port is not None and not 0 < options.ssh_port < 1 << 16:
        raise LaunchError(f"is {options.ssh_port}", where="--ssh_port", fix="ports run from 1 to 65535")
    hosts = hosts_of(options.hostfile)
    PdshRunner().check()
    line = words[0] if len(words) == 1 else shlex.join(words)
    command = pdsh_command(hosts, options.ssh_port, line, "-b")
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
