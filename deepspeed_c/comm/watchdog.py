"""A thread that notices when a rank waits for long, compares the positions of all ranks, and ends a run that cannot go
on.

[Note: alarms] Ranks talk through the store of the default group, over a separate connection. A rank that has waited for
its timeout raises alarm k: the first rank to write the key ``alarm/k`` is the judge. Every watchdog looks for alarms
every few seconds and answers an alarm with its rank's position. The judge collects the answers, has a divergence
confirmed by a second round (if positions of two rounds agree, they held at one moment between the rounds), and writes
one report that all ranks read. A judge that dies is replaced: the next rank that waits raises alarm k + 1.

Any process that reaches the store can write to it. So ranks draw conclusions from signed values only
(comm/signed_store.py, [Note: signed keys]). A report from outside is ignored, and a disturbed exchange ends no run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta
from typing import Literal

import msgspec
import torch.distributed as dist

from deepspeed_c.background import BackgroundThread
from deepspeed_c.comm import ledger as ledgers
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.position import Life, Position, Presence, life_of, own_presence, take_position
from deepspeed_c.comm.signed_store import SignedStore
from deepspeed_c.comm.verdict import EXIT_CODE, Verdict, ended_ranks, judge
from deepspeed_c.env import read_env
from deepspeed_c.errors import ConfigError
from deepspeed_c.logging import logger

__all__ = ["EXIT_CODE", "Watch", "watch"]

_PREFIX = "deepspeed_c/watch"
# Seconds. A live watchdog answers an alarm within _POLL_S (or within a sixth of the timeout, if that is less). After
# _GRACE_S more without an answer the rank is taken for lost.
_POLL_S = 5.0
_GRACE_S = 5.0
# Pause before the second round.
_CONFIRM_S = 1.0
# Wait before the process ends: the other ranks print too, and rank 0 may hold the store from which they read the
# report. The wait begins when all ranks have read the report. A connection that is lost earlier would give another rank
# an error before that rank knows the reason. _READ_S limits the wait for a rank that does not read.
_LINGER_S = 2.0
_READ_S = 10.0
# Longest time for one request to the store; after that the store counts as lost.
_STORE_TIMEOUT = timedelta(seconds=10)
# Pause between looks at the store during an alarm: a thousand ranks make some thousand requests a second.
_STEP_S = 0.1
_STEP_S_PER_RANK = 0.0005
# Number of looks at processes when a collective has failed: a killed process closes its connections a little before it
# counts as gone.
_N_LOOKS = 3
_STRANGER = (
    "keys of the watchdog in the store at MASTER_ADDR and MASTER_PORT were written by somebody who is not of this run (or by ranks that were"
    " started with another DSC_RUN_TOKEN)"
)
# Number of ranks named in the message of a collective that failed. The first rank to end is the cause; the others
# follow.
_MAX_ENDED = 4


class _Report(msgspec.Struct, frozen=True):
    kind: Literal["diverged", "slow", "transfer"]
    text: str
    speaker: int
    """The rank that logs the report, unless all ranks log it."""
    n_readers: int
    """Number of ranks that have answered, and read the report."""


class Watch:
    """One watched ``Collectives``. ``close`` ends the watching; the last ``close`` ends the thread."""

    def __init__(self, dog: _Watchdog | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._dog = dog

    def close(self) -> None:
        """Stops watching. May be called twice."""
        dog, self._dog = self._dog, None
        if dog is not None:
            dog.remove(self)


def watch(comm: Collectives, timeout_s: float) -> Watch:
    """Watches this rank's collectives until ``comm.close()`` (or until ``comm`` is gone).

    All ranks call it. A rank that waits in a collective for ``timeout_s`` seconds has all ranks report where they are;
    with 0 nothing is watched. If the ranks have diverged, each prints the same text to standard error and ends its
    process with ``EXIT_CODE``, by ``os._exit``: the main thread is stuck in a call that nothing interrupts. If a rank
    is merely late, the text is a warning and the run goes on.

    Raises:
        ConfigError: timeout_s is negative or not a number.
    """
    if not 0 <= timeout_s < float("inf"):
        raise ConfigError(
            f"{timeout_s} is no number of seconds",
            where="collective_timeout_s",
            fix="pass a positive number, or 0 for off",
        )
    if timeout_s == 0 or comm.world_size == 1:
        return Watch(None, timeout_s)
    with _lock:
        dog = _dogs.get("it")
        if dog is None or not dog.serves(dist.group.WORLD):
            if dog is not None:
                dog.stop()  # its default group was destroyed
            dog = _dogs["it"] = _Watchdog()
        watched = dog.add(timeout_s, comm.ledger)
    comm.call_on_close(watched.close)
    # Nothing here holds ``comm``, so an engine that is dropped without close() is not kept alive.
    weakref.finalize(comm, watched.close).atexit = False
    return watched


# Each process has one watchdog thread, as it has one default group. The lock is reentrant: a garbage collection may
# close a watch while another watch is made.
_dogs: dict[str, _Watchdog] = {}
_lock = threading.RLock()


class _StopRequested(Exception):
    """Not an error: leaves the exchange when the thread is to end."""


class _Watchdog:
    """The thread and its connection to the store."""

    def __init__(self) -> None:
        self._group = weakref.ref(dist.group.WORLD)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._pid = os.getpid()
        self._store = _own_store()
        self._signed = SignedStore(self._store, read_env().run_token or "")
        self._watches: set[Watch] = set()
        self._ledgers: weakref.WeakSet[ledgers.Ledger] = weakref.WeakSet()
        self._timeout_s = float("inf")
        self._stop = threading.Event()
        self._step_s = max(_STEP_S, _STEP_S_PER_RANK * self._world_size)
        self._quiet_until = 0.0
        self._next = 1
        self._presence = own_presence()
        self._has_store = True
        self._is_disturbed = False
        self._is_ending = False
        self._leaves_as: tuple[Literal["closed", "ended"], str] = ("closed", "")
        # The thread that makes the engine announces this rank's process before any collective can hang.
        before = self._presence_of(self._rank)
        self._say_presence("watching")
        self._store.add("n_watching", 1)
        if before is None or before.pid != self._pid:
            host = self._presence.host
            self._signed.write(f"on/{host}/{self._store.add(f'n_on/{host}', 1)}", str(self._rank))
        # After _at_exit it is waited for once more: a request to a store that does not answer takes longer.
        limit_s = _STORE_TIMEOUT.total_seconds() + _LINGER_S
        self._thread = BackgroundThread(self._run, name="deepspeed_c watchdog", end=self._stop.set, limit_s=limit_s)
        atexit.register(self._at_exit)

    def serves(self, group: dist.ProcessGroup | None) -> bool:
        """Whether the watchdog runs and uses the store of ``group``."""
        return self._group() is group and not self._stop.is_set()

    def add(self, timeout_s: float, ledger: ledgers.Ledger) -> Watch:
        watched = Watch(self, timeout_s)
        self._watches.add(watched)
        self._ledgers.add(ledger)
        ledger.explain_by(self.who_has_ended)
        self._timeout_s = min(w.timeout_s for w in self._watches)
        if not self._thread.ident:
            self._thread.start()
        return watched

    def remove(self, watched: Watch) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has neither the thread nor a right to the connection
        with _lock:
            self._watches.discard(watched)
            if self._watches:
                self._timeout_s = min(w.timeout_s for w in self._watches)
                return
            self.stop()
            if _dogs.get("it") is self:
                del _dogs["it"]

    def stop(self) -> None:
        """Ends the thread, which announces that it has closed. Returns when the thread has ended, except where it could
        not be ended.
        """
        atexit.unregister(self._at_exit)
        for ledger in self._ledgers:
            ledger.explain_by(None)
        self._stop.set()
        if threading.current_thread() is not self._thread and self._thread.ident:
            self._thread.join(2 * self._step_s + _LINGER_S)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        self._leaves_as = "ended", f" with {type(error).__name__}: {error}".splitlines()[0] if error is not None else ""
        self._stop.set()
        self._thread.join(2 * self._step_s + _LINGER_S)
        if self._has_store and not self._thread.is_alive():
            with self._store_errors():
                # The store may end with rank 0, and torch logs long complaints about a store that is gone.
                n_steps = round(_LINGER_S / self._step_s) if self._rank == 0 and error is None else 0
                for _ in range(n_steps):
                    if self._store.add("n_watching", 0) <= 0:
                        break
                    time.sleep(self._step_s)

    def who_has_ended(self) -> str:
        """``rank 1 has ended with ValueError: ... (process 7 on host)``; "" if none has, as far as is known.

        May be called on any thread.
        """
        if self._is_ending:
            # The other ranks have ended a moment earlier. Their connections are lost because of the report, and the
            # report has the reason.
            time.sleep(_READ_S + 2 * _LINGER_S)
        if self._stop.is_set() or not self._has_store:
            return ""
        for _ in range(_N_LOOKS):
            try:
                # The presences of some ranks only: every rank asks at the same moment.
                lives = self._neighbours()
                said = [self._signed.read(f"ended/{i}") for i in range(1, self._n_ended() + 1)]
                known = [int(rank) for rank in said if rank is not None]
                ended = ended_ranks({rank: self._presence_of(rank) for rank in {*known, *lives}}, lives)
            except RuntimeError as error:  # see _store_errors
                return f"the store of the ranks is gone: {error}"
            if ended:
                return "; ".join(ended)
            time.sleep(_STEP_S)
        return ""

    def _run(self) -> None:
        with self._store_errors():
            self._next = self._first_alarm()
            while not self._stop.wait(self._pause()):
                try:
                    if self._store.check([f"alarm/{self._next}"]) or self._is_due():
                        self._attend(self._next)
                        self._next += 1
                except _StopRequested:
                    break
        if self._is_disturbed:
            logger.warning("the watchdog of rank %d ends: %s", self._rank, _STRANGER)
        elif not self._has_store:
            self._watch_alone()
        else:
            with self._store_errors():
                self._leave(*self._leaves_as)

    def _first_alarm(self) -> int:
        """Number of the alarm that is under way; if there is none, of the next alarm."""
        newest = int(self._signed.read("newest_alarm") or 0)
        while self._store.check([f"alarm/{newest + 1}"]):
            newest += 1
        return newest + 1 if newest == 0 or self._signed.read(f"report/{newest}") is not None else newest

    @property
    def _poll_s(self) -> float:
        return min(_POLL_S, self._timeout_s / 6)

    @property
    def _grace_s(self) -> float:
        return min(_GRACE_S, max(1.0, self._timeout_s / 2))

    def _pause(self) -> float:
        return max(0.01, min(self._poll_s, self._due_at() - time.monotonic()))

    def _is_due(self) -> bool:
        return time.monotonic() >= self._due_at()

    def _due_at(self) -> float:
        """The time at which both this rank's wait and the last report are a timeout old; never if the rank does not
        wait.
        """
        since = [entry.since for book in ledgers.all_ledgers() for entry in book.blocking()]
        return max(min(since) + self._timeout_s, self._quiet_until) if since else float("inf")

    def _attend(self, k: int) -> None:
        """Takes part in alarm ``k``. If no other rank has raised it, this rank raises it."""
        is_judge = self._signed.claim(f"alarm/{k}", str(self._rank))
        if is_judge:
            self._signed.write("newest_alarm", str(k))
        self._answer(k, 1)
        report = self._judge(k) if is_judge else self._follow(k)
        self._quiet_until = time.monotonic() + (self._timeout_s if report is not None else 0.0)
        if report is not None:
            self._act_on(report, k)

    def _answer(self, k: int, round_: int) -> None:
        position = take_position(self._rank, self._world_size, ledgers.all_ledgers(), self._neighbours())
        self._signed.write(f"at/{k}/{round_}/{self._rank}", msgspec.json.encode(position).decode())
        self._store.add(f"n_at/{k}/{round_}", 1)

    def _neighbours(self) -> dict[int, Life]:
        host = self._presence.host
        lives: dict[int, Life] = {}
        for i in range(1, min(self._store.add(f"n_on/{host}", 0), self._world_size) + 1):
            rank = self._signed.read(f"on/{host}/{i}")
            if rank is not None and int(rank) != self._rank:
                presence = self._presence_of(int(rank))
                if presence is not None and presence.host == host:
                    lives[int(rank)] = life_of(presence)
        return lives

    def _follow(self, k: int) -> _Report | None:
        """Answers alarm ``k`` until the judge has reported. Returns the report, or None if the judge never reports."""
        is_asked_again = False
        for _ in self._steps(2 * (self._poll_s + self._grace_s) + _CONFIRM_S + _LINGER_S):
            report = self._signed.read(f"report/{k}")
            if report is not None:
                return msgspec.json.decode(report, type=_Report)
            if not is_asked_again and self._signed.read(f"again/{k}") is not None:
                is_asked_again = True
                self._answer(k, 2)
        logger.debug("watchdog: the judge of alarm %d has gone", k)
        return None

    def _judge(self, k: int) -> _Report:
        n_forged, is_whole = self._signed.n_forged, True
        positions = self._collect(k, 1, range(self._world_size))
        verdict = self._verdict(positions)
        if verdict.kind == "diverged" and not verdict.lasting:
            for _ in self._steps(min(_CONFIRM_S, self._timeout_s / 2)):
                pass
            self._signed.write(f"again/{k}", "")
            self._answer(k, 2)
            positions = self._collect(k, 2, positions)
            is_whole = self._signed.read(f"again/{k}") is not None
            second = self._verdict(positions)
            if second.kind == "diverged" and not second.lasting and not (second.passing & verdict.passing):
                second = second._replace(kind="transfer")  # all waits have changed between the rounds
            verdict = second
        is_whole = is_whole and self._signed.read(f"alarm/{k}") is not None and self._signed.n_forged == n_forged
        if verdict.kind == "diverged" and not is_whole:
            # A rank that seems silent may have answered, or may not have been asked.
            verdict = verdict._replace(
                kind="slow", text=f"a rank has waited for long, and nothing can be said of it: {_STRANGER}"
            )
        report = _Report(verdict.kind, verdict.text, min(positions), len(positions))
        self._signed.write(f"report/{k}", msgspec.json.encode(report).decode())
        for round_ in (1, 2):
            for rank in positions:
                self._store.delete_key(f"at/{k}/{round_}/{rank}")
        return report

    def _verdict(self, positions: dict[int, Position]) -> Verdict:
        silent = [rank for rank in range(self._world_size) if rank not in positions]
        presences = {rank: presence for rank in silent if (presence := self._presence_of(rank)) is not None}
        return judge(positions, presences, self._world_size, 0.8 * self._timeout_s)

    def _collect(self, k: int, round_: int, ranks: Collection[int]) -> dict[int, Position]:
        """The answers of ``ranks`` that come in time, by rank."""
        found: dict[int, Position] = {}
        for _ in self._steps(self._poll_s + self._grace_s):
            # The count only says when it is worth looking: any process may have raised it.
            if self._store.add(f"n_at/{k}/{round_}", 0) >= len(ranks):
                self._look_for(found, k, round_, ranks)
                if len(found) == len(ranks):
                    return found
        self._look_for(found, k, round_, ranks)
        return found

    def _look_for(self, found: dict[int, Position], k: int, round_: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in found:
                position = self._signed.read(f"at/{k}/{round_}/{rank}")
                if position is not None:
                    found[rank] = msgspec.json.decode(position, type=Position)

    def _steps(self, seconds: float) -> Iterator[None]:
        """Yields once a step for ``seconds``.

        Steps are counted, not timed: while a process was stopped, it did not wait for others.
        """
        for _ in range(max(1, round(seconds / self._step_s))):
            yield
            if self._stop.wait(self._step_s):
                raise _StopRequested

    def _act_on(self, report: _Report, k: int) -> None:
        if report.kind == "transfer":
            logger.debug("watchdog: %s", report.text)
        elif report.kind == "slow":
            if report.speaker == self._rank:
                logger.warning("%s", report.text)
        else:
            self._is_ending = True
            # Includes groups that nobody watches: their connections, too, are lost with the first rank that ends.
            for book in ledgers.all_ledgers():
                book.explain_by(self.who_has_ended)
            with self._store_errors():
                self._wait_for_readers(k, report.n_readers)
            self._end_process(report.text)

    def _wait_for_readers(self, k: int, n_readers: int) -> None:
        n_read = self._store.add(f"n_read/{k}", 1)
        for _ in range(round(_READ_S / self._step_s)):
            if n_read >= n_readers:
                break
            time.sleep(self._step_s)
            n_read = self._store.add(f"n_read/{k}", 0)

    def _watch_alone(self) -> None:
        """Watches without the store. The store was lost with the process that held it, so a wait of this rank is in
        vain.
        """
        while not self._stop.wait(self._pause()):
            if self._is_due():
                position = take_position(self._rank, self._world_size, ledgers.all_ledgers(), {})
                waits = [str(call) for group in position.groups for call in group.blocking]
                self._end_process(
                    f"rank {self._rank} waits in {', '.join(waits)}, and the store of the ranks cannot be reached: the process that held"
                    " it (rank 0, or the launcher on its host) has ended"
                )

    def _end_process(self, text: str) -> None:
        self._is_ending = True
        logger.critical("%s\nThis process ends with exit code %d", text, EXIT_CODE)
        time.sleep(_LINGER_S)
        _flush([sys.stdout, sys.stderr])
        os._exit(EXIT_CODE)

    def _say_presence(self, state: Literal["watching", "closed", "ended"], how: str = "") -> None:
        said = msgspec.structs.replace(self._presence, state=state, how=how)
        self._signed.write(f"rank/{self._rank}", msgspec.json.encode(said).decode())

    def _leave(self, state: Literal["closed", "ended"], how: str = "") -> None:
        newest = [entry for book in ledgers.all_ledgers() for entry in book.recent(1)]
        after = f", after {max(newest, key=lambda entry: entry.since)}" if newest else ""
        self._say_presence(state, how + after)
        if state == "ended":
            i = self._store.add("n_ended", 1)
            self._signed.write(f"ended/{i}", str(self._rank))
        self._store.add("n_watching", -1)

    def _n_ended(self) -> int:
        """Number of ranks that have announced their end and whose entries are written, up to the first few."""
        n = min(self._store.add("n_ended", 0), _MAX_ENDED)
        return next((i - 1 for i in range(1, n + 1) if not self._store.check([f"ended/{i}"])), n)

    def _presence_of(self, rank: int) -> Presence | None:
        presence = self._signed.read(f"rank/{rank}")
        return None if presence is None else msgspec.json.decode(presence, type=Presence)

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Treats the loss of the store as no error: the store goes with the process that holds it, and every process
        ends at some time.
        """
        try:
            yield
        except RuntimeError as error:  # torch's error for a lost connection, and base of its other errors
            self._has_store = False
            # The store closes a connection that counts with a key whose value is no number any more.
            self._is_disturbed = isinstance(error, dist.DistNetworkError) and _is_reached(self._store)
            logger.debug("watchdog: the store is lost: %s", error)


def _own_store() -> dist.Store:
    """The default group's store over a separate connection, so that the training thread never waits for the watchdog's
    requests.
    """
    store = dist.distributed_c10d._get_default_store().clone()
    store.set_timeout(_STORE_TIMEOUT)
    return dist.PrefixStore(_PREFIX, store)


def _is_reached(store: dist.Store) -> bool:
    """Whether some process still listens at the address of the store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return False
    try:
        with socket.create_connection((store.host, store.port), timeout=_STORE_TIMEOUT.total_seconds()):
            return True
    except OSError:
        return False


def _flush(streams: Iterable) -> None:
    for stream in streams:
        # The stream is closed, or was replaced by something that is no file: there is nothing to flush then.
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
