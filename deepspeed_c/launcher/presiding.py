"""The launching command's part in a launch on several hosts, while the host agents run.

It holds their store, reads their reports, gives them orders and says how the launch ended. In an elastic launch it also
starts agents anew on hosts that were lost.
"""

from __future__ import annotations

import sys
import time
from typing import final

from torch.distributed import TCPStore

from deepspeed_c.launcher.chair import Chair, RoundPolicy
from deepspeed_c.launcher.cluster import END_SECONDS, RunnerProcess, Signals
from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.meeting import Failure
from deepspeed_c.launcher.run import explain, set_up_logging
from deepspeed_c.logging import write_line

__all__ = ["preside"]

FIRST_TRY_SECONDS, NEXT_TRY_SECONDS = 1.0, 10.0
"""From the end of an agent to the first try to start it anew, and from the end of each try to the next."""


def preside(job: Job, listening: int, process: RunnerProcess, signals: Signals) -> int:
    """Presides over the agents of ``job``, which the runner's program ``process`` starts, until the launch is over.
    Returns its exit code. ``listening``: a socket's number, for the agents' store."""
    set_up_logging(job.options.log_level)
    store = TCPStore(*job.store, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    rounds = RoundPolicy.of(job.options, len(job.hosts))
    chair = Chair(store, job.token, list(job.hosts), process.said, rounds=rounds, tell=tell)
    try:
        _lead(chair, process, signals, _Starter(process, list(job.hosts)) if rounds.is_elastic else None)
        process.wait(END_SECONDS)
    finally:
        process.kill()
    if chair.failure is not None:
        explain(chair.failure, job.n_ranks(chair.members) if chair.has_begun else 0)
    elif signals.n_taken and chair.code == 0:
        write_line("deepspeed_c: all ranks ended by themselves, with exit code 0", sys.stderr)
    del store  # the agents have read the exit code
    return chair.code


def tell(line: str) -> None:
    """Print a line of the launching command."""
    write_line(f"deepspeed_c: {line}", sys.stderr)


@final
class _Starter:
    """Starts agents anew on hosts whose agents have ended."""

    def __init__(self, process: RunnerProcess, hosts: list[str]) -> None:
        self._process, self._hosts = process, hosts
        self._due: dict[str, float] = {}

    def end_of_agent(self, host: str) -> None:
        """The agent of the host has ended."""
        self._due.setdefault(host, time.monotonic() + FIRST_TRY_SECONDS)

    def step(self, chair: Chair) -> None:
        """Start agents that are due."""
        now = time.monotonic()
        for host, due in list(self._due.items()):
            if self._process.is_starting_again(host):
                self._due[host] = now + NEXT_TRY_SECONDS
                if chair.is_present(self._hosts.index(host)):
                    self._process.show(host)
                    del self._due[host]  # until it ends
            elif now >= due:
                self._process.start_again(host)


def _lead(chair: Chair, process: RunnerProcess, signals: Signals, starter: _Starter | None) -> None:
    """Read reports and write orders until the launch is over."""
    ended_at: float | None = None
    while not chair.is_over:
        for number in signals.take():
            chair.signal(number)
        chair.step()
        for host, code in process.take_ends():
            chair.end_of_agent(host, code)
            if starter is not None:
                starter.end_of_agent(host)
        if starter is not None:
            starter.step(chair)
        elif ended_at is None and process.has_ended():
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
