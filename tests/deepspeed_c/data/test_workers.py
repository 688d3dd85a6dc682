"""deepspeed_c/data/workers.py: when a worker counts as dead. The loader's tests kill real ones."""

from __future__ import annotations

import os
import signal

from deepspeed_c.data.workers import dead


class Ending:
    """A worker in the middle of its end: the kernel closes its files, frees its memory, and only then has its exit code."""

    pid, exitcode = 17, None

    def __init__(self):
        self.sentinel, written = os.pipe()
        os.close(written)

    def join(self):
        os.close(self.sentinel)
        self.exitcode = -signal.SIGKILL


def test_a_worker_whose_files_are_closed_is_dead():
    assert dead([Ending()], is_sure=True) == "the data worker of process id 17 was killed by SIGKILL"
