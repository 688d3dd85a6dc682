"""Ends a run that is asked to stop: after the step under way all ranks save, and exit with code 0.

A signal may reach one rank or all, and each at another moment; the ranks agree on the step in the exchange that every step makes anyway.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from deepspeed_c.errors import CheckpointError, StateError
from deepspeed_c.logging import logger

if TYPE_CHECKING:
    from deepspeed_c.engine.engine import DeepSpeedEngine

__all__ = ["Preemption"]

# As a shell counts: 128 and the number of the signal.
SIGNALLED = 128


class Preemption:
    """Listens for the signals of the configuration's ``checkpoint.preemption`` until it is closed."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        if not settings.enabled:
            return
        if threading.current_thread() is not threading.main_thread():
            raise StateError(
                "signals can only be caught from the main thread",
                where="checkpoint.preemption",
                fix='call initialize in the main thread, or set "enabled": false',
            )
        for name in settings.signals:
            number = signal.Signals[name]
            self._previous[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        # A second one, from somebody who does not want to wait, does what it does elsewhere.
        if self._received is not None:
            self.close()
            os.kill(os.getpid(), number)
            return
        self._received = number

    def is_requested(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self._received is not None

    def end_run(self, engine: DeepSpeedEngine) -> None:
        """Saves and ends the process. Collective; called after a step that some rank was asked to stop in."""
        name = signal.Signals(self._received).name if self._received is not None else "a signal to another rank"
        folder = self._settings.save_dir or engine._checkpoints.last_dir
        if folder is None:
            logger.error(
                "%s: no checkpoint was saved or loaded yet and checkpoint.preemption.save_dir is not set: ending without saving",
                name,
            )
            engine.close()
            sys.exit(SIGNALLED + (self._received or signal.SIGTERM))
        try:
            engine.wait_checkpoint()
        except CheckpointError as error:
            # Of an earlier one: no reason to lose this one too.
            logger.error("%s", error)
        engine.save_checkpoint(folder, is_async=False)
        if engine.global_rank == 0:
            print(
                f"deepspeed_c: {name}: saved step {engine.global_steps} to {folder}; ending, to be resumed from there",
                file=sys.stderr,
                flush=True,
            )
        engine.close()
        sys.exit(0)

    def close(self) -> None:
        """Gives the signals back to whoever had them."""
        while self._previous:
            number, handler = self._previous.popitem()
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
