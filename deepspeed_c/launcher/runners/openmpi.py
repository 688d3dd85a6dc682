"""Open MPI's mpirun, over ssh or within the allocation of a batch system that it knows."""

from __future__ import annotations

import os

from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.runners.mpi import MpiRunner, ssh_words
from deepspeed_c.launcher.runners.runner import Start

__all__ = ["OpenMpiRunner"]

KEEPALIVE = {"time": "5", "intvl": "1", "probes": "3"}
SYSTEM_FOLDERS = ("/bin", "/usr/bin")


class OpenMpiRunner(MpiRunner):
    """Runs ``mpirun`` with one process for each host. Variables reach the hosts by name (``-x NAME``), over Open MPI's
    own connections.
    """

    name = "openmpi"
    package = "Open MPI (Debian: apt-get install openmpi-bin openssh-client)"
    programs = ("mpirun.openmpi", "orterun", "prterun", "mpirun", "mpiexec")
    says = r"\(Open MPI\)|\(PRRTE\)|OpenRTE"

    def start(self, job: Job, job_file: str) -> Start:
        environment = self.job_environment(job)
        words = ["-n", str(len(job.hosts)), "--host", ",".join(f"{host}:1" for host in job.hosts)]
        # Agents bind their ranks themselves.
        words += ["--map-by", "ppr:1:node", "--bind-to", "none", "--wdir", job.folder]
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        for name in environment:
            words += ["-x", name]
        ssh = ssh_words(job)
        settings = {
            "OMPI_MCA_plm_rsh_args": ssh,
            "PRTE_MCA_plm_ssh_args": ssh,  # the name since version 5
            # Otherwise hosts would start one another, and each would need keys for the others.
            "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            # A host whose link to this one is lost ends its part soon; by default after minutes.
            **{f"{mpi}_MCA_oob_tcp_keepalive_{key}": n for mpi in ("OMPI", "PRTE") for key, n in KEEPALIVE.items()},
        }
        program = self.program() or "mpirun"
        if os.path.dirname(program) in SYSTEM_FOLDERS:
            # By its full path it would tell the hosts to search for their part in /usr, and for libraries in /usr/lib.
            program = os.path.basename(program)
        return Start([program, *words, *self.more_words(job), *self.agent(job)], {**environment, **settings})
