"""How a pipeline stops when a stage has raised an exception on some rank.

[Note: peers] A stage can have several ranks, which exchange tensors within the layers (tensor and sequence
parallelism): the *peers* of each other. If an exception is raised on one of them alone, its peers wait for it in a
collective. So a rank that stops writes a notice into the store of the default group, and waits until its peers have
stopped, too. If they have not stopped in time, it closes the connections among them. Their collectives then fail, they
find the notice, and stop as if they had raised the exception themselves.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from functools import cached_property

import torch.distributed as dist

from deepspeed_c.comm.closing import close_groups_within
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.signed_store import SignedStore
from deepspeed_c.env import read_env
from deepspeed_c.errors import CommError, DeepSpeedCError, StageError, StateError

__all__ = ["Peers", "Stopped", "raise_on_all"]

# Peers that raise the same exception do so at nearly the same time: they have left the same collective. A rank that a
# busy machine does not run for a while must not count as one that waits.
_LEAST_WAIT_S = 3.0


class Stopped(Exception):
    """A run ended without results, because a stage of the pipeline raised an exception. All messages of the run have
    been exchanged, so the links can be used again. ``text`` says where, and ``cause`` is what the stage of this rank
    raised. They are empty and None on ranks whose stages did not raise."""

    def __init__(self, text: str = "", cause: Exception | None = None) -> None:
        super().__init__(text)
        self.text, self.cause = text, cause
        self.is_first = True
        """Whether no peer had stopped before. Otherwise the exception can be a consequence of the peer's."""


class Peers:
    """The ranks that compute the stages of this rank together with it. See [Note: peers]."""

    def __init__(self, comm: Collectives, ranks: Sequence[int]) -> None:
        """comm: all ranks of the mesh. ranks: this rank and its peers, by their numbers in the world. Collective over
        ``comm``.
        """
        self._rank, self._ranks = comm.global_rank, ranks
        self._others = [rank for rank in ranks if rank != self._rank]
        # Engines do not read one another's notices.
        self._name = comm.gather_objects(uuid.uuid4().hex, label="name of the engine")[0] if self._others else ""
        self._n_runs, self._begin_s = 0, 0.0
        self.has_closed = False
        """Whether this rank has closed the connections."""
        self._lost = ""
        """The failure after which connections were closed on some rank of the mesh; "" if there was none."""

    @cached_property
    def _store(self) -> SignedStore:
        store = dist.PrefixStore("deepspeed_c/stopped", dist.distributed_c10d._get_default_store())
        return SignedStore(store, read_env().run_token or "")

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._n_runs}/{rank}"

    def begin(self) -> None:
        """Begins the next run. All ranks of the mesh begin the same runs."""
        self._n_runs += 1
        self._begin_s = time.monotonic()

    def notice(self) -> str | None:
        """The text of a peer that has stopped in this run: "" if it raised nothing itself; None if no peer has stopped."""
        found: list[str | None] = []
        with contextlib.suppress(RuntimeError):  # the store has gone with the process that held it
            found += [self._store.read(self._key(rank)) for rank in self._others]
        return max((text for text in found if text is not None), key=bool, default=None)

    def stop(self, stopped: Stopped) -> None:
        """Tells the peers that this rank has stopped, and sees to it that they stop, too."""
        if not self._others:
            return
        stopped.is_first = self.notice() is None
        has_all = False
        # A peer may take as long as this rank has taken until now.
        limit_s = max(_LEAST_WAIT_S, time.monotonic() - self._begin_s)
        with contextlib.suppress(RuntimeError):  # the store has gone with the process that held it
            self._store.write(self._key(self._rank), f"rank {self._rank}: {stopped.text}" if stopped.text else "")
            has_all = self._store.wait([self._key(rank) for rank in self._others], limit_s)
        if not has_all:
            self.has_closed = True
            close_groups_within(self._ranks)

    def lose(self, text: str) -> None:
        """Notes that connections have been closed on some rank of the mesh."""
        self._lost = text

    def require_connected(self, what: str) -> None:
        """Raises StateError if connections have been closed on some rank of the mesh. ``what``: the engine's method."""
        if self._lost:
            raise StateError(
                f"connections were closed after a stage had failed on some of its ranks only ({self._lost})",
                where=f"engine.{what}",
                fix="start the program again from a checkpoint",
            )


def raise_on_all(comm: Collectives, stopped: Stopped | None, peers: Peers, what: str) -> None:
    """Raises StageError on all ranks of ``comm``, which is the whole mesh, if a stage has raised an exception on one of
    them. Collective. ``stopped``: how the run of this rank ended; None: with results. ``what``: the engine's method.
    """
    stopped = stopped or Stopped()
    label = f"{what}: exceptions of stages"
    fix = stopped.cause.fix if isinstance(stopped.cause, DeepSpeedCError) else ""
    text = f"rank {comm.global_rank}: {stopped.text}" if stopped.text else ""
    order = 1 + stopped.is_first if text else 0
    try:
        found = comm.gather_numbers(10 * peers.has_closed + order, label=label)
        if not any(found):
            return
        orders = [number % 10 for number in found]
        text, fix = comm.gather_objects((text, fix), label=label)[orders.index(max(orders))]
        is_lost = max(found) >= 10
    except CommError:
        # The ranks of a single stage can be the whole mesh. Then its connections have been closed, too.
        text = text or peers.notice() or ""
        if not text:
            raise
        is_lost = True
    if is_lost:
        peers.lose(text)
        again = "then start the program again from a checkpoint: other ranks of the stage did not fail, and the"
        again += " connections to them were closed so that they do not wait"
    else:
        again = "the engine can run the next batch"
    fix = fix or "correct the layers, the loss function or the data"
    raise StageError(text, where=f"engine.{what}", fix=f"{fix}; {again}") from stopped.cause
