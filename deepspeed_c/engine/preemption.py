"""Ends a run that has been asked to stop: all ranks finish the current step, save, and exit with code 0.

A signal may reach one rank or all, at different moments. The ranks agree on the last step in the exchange that every
step makes anyway.

[Note: engines of one process] All engines of a process share one signal handler, so that a signal reaches all of them.
Each engine saves after its own step together with its own ranks, because the ranks of another engine may be at another
place. The last engine to save ends the process. It does not wait for closed engines.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from deepspeed_c.errors import CheckpointError, DeepSpeedCError, StateError
from deepspeed_c.logging import logger, write_line

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives
    from deepspeed_c.engine.engine import DeepSpeedEngine

__all__ = ["Preemption"]

# Exit code of a process that a signal has ended, as in a shell: 128 plus the number of the signal.
SIGNALLED = 128
# Signals within this time are one request: a cluster may signal every process of a job, and the launcher passes on the
# signal that it gets itself.
SAME_REQUEST_SECONDS = 2.0


class _Handler:
    """The one handler of this process, for the signals of all open engines."""

    def __init__(self) -> None:
        # The references are weak, because an engine that was dropped without being closed has nothing to save.
        self.listeners: weakref.WeakSet[Preemption] = weakref.WeakSet()
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()

    def add(self, listener: Preemption) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise StateError(
                "signals can only be caught from the main thread",
                where="checkpoint.preemption",
                fix='call initialize in the main thread, or set "enabled": false',
            )
        if self._pid != os.getpid():  # forked: earlier listeners belong to the parent
            self._pid = os.getpid()
            self.listeners.clear()
        self.listeners.add(listener)
        for number in listener.numbers:
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._on_signal)

    def remove(self, listener: Preemption) -> None:
        self.listeners.discard(listener)
        self._give_back({number for other in self.listeners for number in other.numbers})

    def _give_back(self, wanted: set[int]) -> None:
        """Restores the previous handlers of all signals except ``wanted``."""
        for number in [number for number in self._previous if number not in wanted]:
            previous = self._previous.pop(number)
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)

    def _on_signal(self, number: int, frame: Any) -> None:
        concerned = [listener for listener in self.listeners if number in listener.numbers]
        # A forked process has nothing to save, so the signal must end it as it ends other processes. A second signal
        # also ends the process at once: its sender does not want to wait.
        is_ours = os.getpid() == self._pid and concerned
        if is_ours and all(tuple(listener.notice(number) for listener in concerned)):
            return
        self.listeners.clear()
        self._give_back(set())
        os.kill(os.getpid(), number)


_handler = _Handler()


class Preemption:
    """Listens for the signals of ``checkpoint.preemption`` until it is closed. It does not listen for an engine that
    never steps (``can_step``)."""

    def __init__(self, settings: Any, can_step: bool) -> None:
        self._settings = settings
        self.numbers = frozenset(signal.Signals[name] for name in settings.signals)
        self.received: int | None = None
        self._received_at = 0.0
        self._ended: DeepSpeedEngine | None = None  # the engine, once a save of it has succeeded or failed
        self._folder: str | None = None  # where to
        self._problem = ""
        if settings.enabled and can_step:
            _handler.add(self)

    def notice(self, number: int) -> bool:
        """Notes a signal. Returns whether it may belong to the same request as the signal before it, if there was one."""
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = number, now
        return number == self.received and now - self._received_at <= SAME_REQUEST_SECONDS

    def is_requested(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self.received is not None

    def end_run(self, engine: DeepSpeedEngine, folder: str | None, comm: Collectives) -> None:
        """Saves, and ends the process unless another engine of it still has to save. Collective; called after a step in
        which some rank was asked to stop.

        folder: the folder to save to if the configuration names none. The process exits with 0 if everything was
        saved, otherwise with 128 plus the signal's number.
        """
        if self._ended is None:
            self._ended = engine
            self._save(engine, folder, comm)
        listeners = list(_handler.listeners)
        if any(listener._ended is None for listener in listeners):
            return
        is_saved = not any(listener._problem for listener in listeners)
        for listener in listeners:
            listener._ended.close()
        sys.exit(0 if is_saved else SIGNALLED + (self.received or signal.SIGTERM))

    def _save(self, engine: DeepSpeedEngine, folder: str | None, comm: Collectives) -> None:
        name = signal.Signals(self.received).name if self.received is not None else "a signal to another rank"
        try:
            engine.wait_checkpoint()
        except CheckpointError as error:
            # An earlier save has failed. This save is made all the same.
            logger.error("%s", error)
        self._folder = self._settings.save_dir or folder
        try:
            hindrances = comm.gather_objects(self._hindrance(), label="preemption")
            for hindrance in filter(None, hindrances):
                raise hindrance
            engine.save_checkpoint(self._folder, client_state=engine.client_state, is_async=False)
        except DeepSpeedCError as error:
            self._problem = str(error)
        if comm.rank == 0:
            if self._problem:
                told = f"step {engine.global_steps} could not be saved, ending without it: {self._problem}"
            else:
                told = f"saved step {engine.global_steps} to {self._folder}; ending, to be resumed from there"
            write_line(f"deepspeed_c: {name}: {told}", sys.stderr)

    def _hindrance(self) -> CheckpointError | None:
        if self._folder is None:
            return CheckpointError(
                "no checkpoint was saved or loaded yet, and there is no folder to save to",
                where="checkpoint.preemption.save_dir",
                fix="set it to a folder",
            )
        others = [other._folder for other in _handler.listeners if other is not self and other._folder is not None]
        if any(os.path.realpath(folder) == os.path.realpath(self._folder) for folder in others):
            return CheckpointError(
                f"another engine of this process has just been saved to {self._folder}",
                where="checkpoint.preemption.save_dir",
                fix="give each engine a folder of its own",
            )
        return None

    def close(self) -> None:
        """Stops listening."""
        _handler.remove(self)
