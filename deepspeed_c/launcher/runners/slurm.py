"""Slurm's srun: a step of the allocation that the launching command is in, or an allocation of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from deepspeed_c.env import read_env
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.options import Options
from deepspeed_c.launcher.runners.runner import HostRunner, Start
from deepspeed_c.scheduled import expand_nodelist

__all__ = ["SrunRunner"]

# Options of the job that srun reads from the environment. With one task a host, the step would have only a part of the
# devices and cores.
_PER_TASK = {
    *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_CPUS_PER_GPU", "SLURM_CPUS_PER_TASK"),
    *("SRUN_CPUS_PER_TASK", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET", "SLURM_DISTRIBUTION", "SLURM_EXACT"),
    *("SLURM_THREADS_PER_CORE", "SLURM_HINT"),
}


class SrunRunner(HostRunner):
    """Runs ``srun`` with one task for each host. Variables reach the hosts because srun exports its environment."""

    name = "slurm"
    package = "Slurm's client (Debian: apt-get install slurm-client)"

    def program(self) -> str | None:
        return shutil.which("srun")

    def start(self, job: Job, job_file: str) -> Start:
        n = str(len(job.hosts))
        words = ["--nodes", n, "--ntasks", n, "--ntasks-per-node", "1", "--nodelist", ",".join(job.hosts)]
        words += ["--export", "ALL", "--chdir", job.folder, "--unbuffered"]
        # Agents bind their ranks themselves, and end together.
        words += ["--cpu-bind", "none", "--kill-on-bad-exit=0", "--wait", "0"]
        if read_env().slurm_job:
            # The launching command may be a step itself, which holds the allocation's cores and devices.
            words.append("--overlap")
        else:
            words += ["--exclusive", "--mem", "0"]  # the whole hosts
        unset = [word for name in sorted(os.environ.keys() & _PER_TASK) for word in ("-u", name)]
        program = [*(["env", *unset] if unset else []), self.program() or "srun"]
        return Start([*program, *words, *self.more_words(job), *self.agent(job)], self.job_environment(job))

    def allocated(self, options: Options) -> dict[str, int] | None:
        env = read_env()
        if not env.slurm_job or not env.slurm_hosts:
            return None
        return dict.fromkeys(expand_nodelist(env.slurm_hosts), options.num_procs or _slots(os.environ))


def _slots(environ: Mapping[str, str]) -> int:
    """The slots of each host of the allocation."""
    # SLURM_GPUS_PER_NODE is the job's. In a step, SLURM_GPUS_ON_NODE is the step's, which may have less.
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE"):
        text = environ.get(name, "").rpartition(":")[2]  # "a100:4": with the kind of the devices
        if text.isdecimal() and int(text) > 0:
            return int(text)
    raise LaunchError(
        "does not say how many processes a host has",
        where=f"Slurm job {environ['SLURM_JOB_ID']}",
        fix="ask for devices (sbatch --gpus-per-node N) or tasks (sbatch --ntasks-per-node N), or give --num_gpus N",
    )
