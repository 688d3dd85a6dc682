"""pdsh over ssh: needs nothing on the hosts but an ssh server that takes this user's key."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable

from deepspeed_c.env import read_env
from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.runners.runner import HostRunner, Start, which

__all__ = ["PdshRunner", "pdsh_command", "ssh_command"]

FAN_OUT = 1024  # hosts at once; pdsh's default of 32 would leave the others waiting
CONNECT_SECONDS = 30
ALIVE_SECONDS = 5
# They stand for what pdsh fills in, until the words are in its notation, in which % is written twice.
HOST, USER = "\0host\0", "\0user\0"


class PdshRunner(HostRunner):
    """Runs ``ssh`` for each host. The job comes over its stdin, which is encrypted and which ``ps`` does not show.

    pdsh's own ssh module closes stdin, so its exec module runs ssh here.
    """

    name = "pdsh"
    package = "pdsh and an ssh client (Debian: apt-get install pdsh openssh-client)"

    def program(self) -> str | None:
        return shutil.which("pdsh") if shutil.which("ssh") else None

    def labels_hosts(self) -> bool:
        return True

    def start(self, job: Job, job_file: str) -> Start:
        return self._start(job, job_file, job.hosts)

    def start_again(self, job: Job, job_file: str, host: str) -> Start:
        return self._start(job, job_file, [host])

    def _start(self, job: Job, job_file: str, hosts: Iterable[str]) -> Start:
        remote = f"cd {shlex.quote(job.folder)} && exec {shlex.join(self.agent(job, '--host'))} {HOST}"
        if path := job.environment.get("PYTHONPATH"):
            remote = f"export PYTHONPATH={shlex.quote(path)}; {remote}"
        # The user's shell on the host may be of any kind, so it only starts sh.
        remote = f"exec sh -c {shlex.quote(remote)}"
        return Start(pdsh_command(hosts, job.options.ssh_port, remote, *self.more_words(job), stdin=job_file))


def pdsh_command(
    hosts: Iterable[str], port: int | None, line: str, *options: str, stdin: str | None = None
) -> list[str]:
    """The command that runs a line of shell on all hosts (``HOST`` or ``USER@HOST``) at once, over ssh. In the line,
    HOST stands for the name of each host.

    options: more words for pdsh. stdin: path of a file that each host gets as stdin.
    """
    hosts = list(hosts)
    words = [*ssh_command(port), HOST, line]
    if any("@" in host for host in hosts):
        words[1:1] = ["-l", USER]  # otherwise the user is that of ssh's own configuration
    if stdin is not None:
        # sh opens the file for each host anew, at its beginning.
        words = ["sh", "-c", f'exec "$@" < {shlex.quote(stdin)}', "sh", *words]
    pdsh = [which(["pdsh"]) or "pdsh", "-S", "-f", str(FAN_OUT), "-R", "exec", "-w", ",".join(hosts), *options]
    return [*pdsh, *map(_in_pdsh_notation, words)]


def _in_pdsh_notation(word: str) -> str:
    return word.replace("%", "%%").replace(HOST, "%h").replace(USER, "%u")


def ssh_command(port: int | None) -> list[str]:
    """ssh without questions. Its connection ends soon after its link does."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": 2,
        "LogLevel": "ERROR",
    }
    words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    more = shlex.split(read_env().pdsh_ssh_arguments or "")  # pdsh's own variable
    return [which(["ssh"]) or "ssh", "-x", *words, *(["-p", str(port)] if port else []), *more]
