"""Worker processes of torch's loader that die."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

__all__ = ["begin", "dead"]

LOOK_SECONDS = 10.0
"""Time for a worker whose connection is broken to end."""


def begin(loader: DataLoader) -> tuple[Iterator[Any], tuple[BaseProcess, ...]]:
    """Begins torch's loader. Returns the batches and the workers. By torch's default a worker's death interrupts the
    main thread anywhere with an error. Here the loader finds a dead worker when the next batch does not come.
    """
    batches = iter(loader)
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    return batches, tuple(getattr(batches, "_workers", ()))


def dead(workers: Sequence[BaseProcess], is_sure: bool) -> str:
    """The workers that have died, and the cause; "" if none has. is_sure: one has, and may only not be known yet."""
    if is_sure and workers:
        ended = wait([worker.sentinel for worker in workers], LOOK_SECONDS)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join()  # its files are closed before it has an exit code
    return " and ".join(
        f"the data worker of process id {worker.pid} "
        + (f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}")
        for worker in workers
        if (code := worker.exitcode) is not None
    )
