"""The launching command's part in a launch on several hosts, while the host agents run.

It holds their store, reads their reports, gives them orders and says how the launch ended.
"""

from __future__ import annotations

import sys
import time

from torch.distributed import TCPStore

from deepspeed_c.launcher.cluster import END_SECONDS, RunnerProcess, Signals
from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.meeting import Chair, Failure
from deepspeed_c.launcher.run import explain, set_up_logging
from deepspeed_c.logging import write_line

__all__ = ["preside"]


def preside(job: Job, listening: int, process: RunnerProcess, signals: Signals) -> int:
    """Presides over the agents of ``job``, which the runner's program ``process`` starts, until the launch is over.
    Returns its exit code. ``listening``: a socket's number, for the agents' store."""
    set_up_logging(job.options.log_level)
    store = TCPStore(*job.store, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    chair = Chair(store, job.token, list(job.hosts), process.said)
    try:
        _lead(chair, process, signals)
        process.wait(END_SECONDS)
    finally:
        process.kill()
    if chair.failure is not None:
        explain(chair.failure, job.world_size if chair.has_begun else 0)
    elif signals.n_taken and chair.code == 0:
        write_line("deepspeed_c: all ranks ended by themselves, with exit code 0", sys.stderr)
    del store  # the agents have read the exit code
    return chair.code


def _lead(chair: Chair, process: RunnerProcess, signals: Signals) -> None:
    """Read reports and write orders until the launch is over."""
    ended_at: float | None = None
    while not chair.is_over:
        for number in signals.take():
            chair.signal(number)
        chair.step()
        for host, code in process.take_ends():
            chair.end_of_agent(host, code)
        if ended_at is None and process.has_ended():
            ended_at = time.monotonic()
        # The agents end a moment before their runner. If they do not report it, they are lost with it.
        if ended_at is not None and time.monotonic() - ended_at > 2 * chair.period and not chair.is_over:
            chair.fail(_early_end(chair, process))
        time.sleep(chair.period)
    chair.step()


def _early_end(chair: Chair, process: RunnerProcess) -> Failure:
    code = process.exit_code()
    how = f"{process.name} ended with exit code {code}" if code >= 0 else f"{process.name} was ended by signal {-code}"
    if chair.missing:
        return chair.absent(chair.missing, f"did not come: {how}")
    return Failure("", code if code > 0 else 1, f"{how} before the ranks had ended", tail=process.said(""))
