"""``python -m deepspeed_c.launcher.agent``: the process that starts, binds, labels and ends the ranks of its host, in a
launch on several hosts. A runner (``launcher/runners``) starts one agent on each host.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from deepspeed_c.env import JOB_VARIABLE, read_env
from deepspeed_c.errors import DeepSpeedCError, LaunchError
from deepspeed_c.launcher.addresses import interface_of, own_address
from deepspeed_c.launcher.hostfile import is_this_host
from deepspeed_c.launcher.job import Job, name_of
from deepspeed_c.launcher.main import report_errors
from deepspeed_c.launcher.meeting import LOST_SECONDS, Failure, Meeting, connect
from deepspeed_c.launcher.plan import Plan, make_plan
from deepspeed_c.launcher.run import launch

__all__ = ["main", "run_host"]

# A rank under an agent is no process of MPI: with these, mpi4py in a rank would take it for the agent.
_MPI_VARIABLES = (
    *("OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "HYDI_", "HYDRA_", "MPIR_", "MPI_LOCAL", "MV2_COMM_WORLD_"),
)
_RANKS = ("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent of this host. Returns the exit code of the launch."""
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}")
    parser.add_argument("--host", help="name of this host; the job comes over stdin")
    options = parser.parse_args(argv)
    return report_errors(lambda: _main(options.host))


def _main(name: str | None) -> int:
    job = Job.from_json(sys.stdin.readline() if name else read_env().launch_job or "")
    # Ranks find no job, and nothing to read, as with the launching command under a batch system.
    os.environ.pop(JOB_VARIABLE, None)
    index = _index(job, name, os.environ)
    for variable in [v for v in os.environ if v.startswith(_MPI_VARIABLES)]:
        os.environ.pop(variable)
    try:
        os.chdir(job.folder)
    except OSError as error:
        raise LaunchError(
            f"the working directory cannot be entered: {error}",
            where=f"host {list(job.hosts)[index]}",
            fix="start from a folder that all hosts have",
        ) from error
    # mpirun and srun would end the other agents after a failure, and print a message beside that of the launch.
    return run_host(job, index, hides_code=name is None)


def run_host(job: Job, index: int, *, hides_code: bool = False) -> int:
    """Run the ranks of the host with that number in each round that it is a member of, together with the other hosts.
    Returns the exit code of the launch.

    hides_code: return 0 if the launching command knows the exit code from the agents' reports.
    """
    name, options = list(job.hosts)[index], job.options
    meeting = Meeting(
        connect(job.store),
        job.token,
        name,
        index,
        len(job.hosts),
        is_elastic=options.elastic_training,
        lost_s=max(options.heartbeat or 0.0, LOST_SECONDS),
    )
    code = 0
    try:
        while (members := meeting.next_round()) is not None:
            try:
                code = launch(_plan(job, index, members, meeting.round), meeting)
            except DeepSpeedCError as error:
                if meeting.lost():
                    raise
                meeting.fail(Failure(name, 2, f"host {name}: {error}", is_start=True))
                meeting.end(has_all_zeros=False)
                code = 2
    finally:
        meeting.close()
    said = meeting.orders.code
    if said is None:
        return code
    return 0 if hides_code else said


def _plan(job: Job, index: int, members: Sequence[int], number: int) -> Plan:
    """The ranks of this host in the round of that number."""
    options = job.options
    address = own_address(job.store[0])
    is_of_another = options.elastic_training and options.master_addr and not is_this_host(options.master_addr)
    if options.master_addr is None or is_of_another:
        options = replace(options, master_addr=address)
    environment = dict(job.environment)
    interface = interface_of(address)
    if interface and not (environment.get("GLOO_SOCKET_IFNAME") or read_env().gloo_interface):
        # gloo would take the address of the host's name, which on many systems is a loopback address.
        environment["GLOO_SOCKET_IFNAME"] = interface
    return make_plan(
        options,
        place=job.place(index, members),
        environment=environment,
        # A rank that an earlier round has left behind a dead link can write nothing into this round's store.
        token=job.token and f"{job.token}{number}",
        n_restarts=number - 1,
    )


def _index(job: Job, name: str | None, environ: Mapping[str, str]) -> int:
    """The number of this host among those of the job."""
    names = [name_of(host) for host in job.hosts]
    name = name or environ.get("SLURMD_NODENAME")
    if name in names:
        return names.index(name)
    own = [i for i, host in enumerate(names) if is_this_host(host)]
    if len(own) == 1:
        return own[0]
    for variable in _RANKS:
        if environ.get(variable, "").isdecimal() and int(environ[variable]) < len(names):
            return int(environ[variable])
    raise LaunchError(
        f"is none of {', '.join(names)}",
        where=f"host {socket.gethostname()}",
        fix="name the hosts as they name themselves",
    )


if __name__ == "__main__":
    sys.exit(main())
