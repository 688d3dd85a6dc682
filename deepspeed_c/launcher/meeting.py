"""The agents of several hosts meet in one store: what an agent and the chair tell each other, and the agent's end.

[Note: reports and orders] The chair (``chair.py``) runs where the store is: in the launching command, or with --no_ssh
beside the agent of host 0. Every agent rewrites its report, and the chair its orders, each time with the next number. A
number that does not change for some seconds means a lost link or a dead process, on both sides. Orders hold states only
("begin", "pass on signal 15", "end"), no commands. A process without the run's secret can write neither. With --no_ssh
no secret can be shared; then the worst that a stranger can do is to end the run.

[Note: rounds] A launch is a row of rounds, numbered from 1. Orders call a round by naming its members, the hosts whose
ranks train together; ranks, addresses and ports are new in each round. Members answer with the round's number in their
reports, so that a report about an earlier round is never taken for one about this. A launch that is not elastic has one
round, with all hosts.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from datetime import timedelta
from typing import Any, Literal, TypeVar, final

import msgspec
from torch.distributed import DistError, TCPStore

from deepspeed_c.background import BackgroundThread
from deepspeed_c.comm.signed_store import SignedStore
from deepspeed_c.errors import LaunchError

__all__ = [
    "COME_SECONDS",
    "LOST_SECONDS",
    "ORDERS_KEY",
    "Failure",
    "Meeting",
    "Orders",
    "Report",
    "SignedMessages",
    "Silence",
    "connect",
    "period_of",
    "report_key",
]

COME_SECONDS = 60.0
"""How long the chair waits for the agents of all hosts."""
LOST_SECONDS = 8.0
"""Without news for so long, the other side is lost, unless --heartbeat says how long."""
STORE_SECONDS = 5
_SPARE_SECONDS = 5  # from the end of a request's time to the end of the thread, on a busy host
_PERIOD_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_HOSTS_PER_SECOND = 2000  # limit for the chair's reads
_PREFIX = "deepspeed_c/launch/"
ORDERS_KEY, _FAILURES = _PREFIX + "orders", _PREFIX + "failures"

State = Literal["came", "runs", "ended"]
_Message = TypeVar("_Message")


class Failure(msgspec.Struct, frozen=True):
    """How a rank, or a whole host, failed."""

    host: str
    code: int
    """Exit code for the command."""
    how: str
    """For people: "rank 3 (process 77 on worker-1) failed with exit code 2"."""
    order: int = 0
    """The first failure of a run has the lowest number."""
    tail: str = ""
    """Last lines of the rank's stderr, or of its log."""
    log: str = ""
    step: int = 0
    """Optimizer steps that the rank had done; 0 without an engine."""
    is_start: bool = False
    """Whether nothing could be started on the host."""


class Report(msgspec.Struct, frozen=True):
    """The words of a host's agent about itself."""

    number: int
    state: State
    life: str = ""
    """Of this process: an agent that is started again on the host has another."""
    round: int = 0
    """The last round that this host was a member of; all below is about this round. 0: of none yet."""
    master: tuple[str, int] | None = None
    """Of the round's first host: address and port of its first rank."""
    failure: Failure | None = None
    has_all_zeros: bool = False
    """Whether all ranks of the host have ended with exit code 0."""
    was_stopped: bool = False
    """Whether an order has ended them."""
    is_leaving: bool = False
    """Whether this agent was asked to end by a signal of its own host."""
    n_saves: int = 0
    """Complete checkpoints, as the host's first rank counts them."""
    min_seconds: int = 0
    """Least length of a round, by the configuration."""


class Orders(msgspec.Struct, frozen=True):
    """The words of the chair to all agents."""

    number: int
    round: int = 0
    members: tuple[int, ...] = ()
    """The numbers of the hosts in the round, rank 0's first; empty before the first round and between two."""
    master: tuple[str, int] | None = None
    """All members have come: the ranks may begin, and meet here."""
    signal: int = 0
    """Pass this signal on to the ranks."""
    stop: bool = False
    """End the ranks, because another has failed."""
    is_gentle: bool = False
    """The ranks that are to end are well: they have as long as after a signal, to save."""
    kill: bool = False
    """End them at once."""
    code: int | None = None
    """All have ended, and this is the exit code of the launch."""


def connect(address: tuple[str, int], seconds: float = COME_SECONDS) -> TCPStore:
    """The agents' store. Raises LaunchError if it does not answer in time."""
    end = time.monotonic() + seconds
    while True:
        try:
            return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
        except DistError as error:
            # torch waits for an address that does not answer, but not for a name that is not known yet (of a new pod).
            if time.monotonic() < end:
                time.sleep(_RETRY_SECONDS)
                continue
            raise _no_answer(address, error) from error


def _no_answer(address: tuple[str, int], error: DistError) -> LaunchError:
    return LaunchError(
        f"the launching host does not answer: {str(error).splitlines()[0]}",
        where=f"host {socket.gethostname()}, {address[0]}:{address[1]}",
        fix="open its ports to the hosts, or give an address that they reach",
    )


class SignedMessages:
    """Messages of one kind in the store."""

    def __init__(self, store: TCPStore, secret: str) -> None:
        self._store = SignedStore(store, secret)

    def write(self, key: str, message: Any) -> None:
        self._store.write(key, msgspec.json.encode(message).decode())

    def read(self, key: str, kind: type[_Message]) -> _Message | None:
        text = self._store.read(key)
        try:
            return None if text is None else msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError:
            return None  # of another version: the same as no news


@final
class Silence:
    """Time without news from the other side, while this process was running.

    A process that stood still (a stopped job, a machine that was moved or slept) has heard nothing either, and must not
    take the other side for lost when it wakes.
    """

    def __init__(self, period: float) -> None:
        """period: how often ``seconds`` is asked for at least."""
        self._stall = 3 * period
        self._heard = self._asked = time.monotonic()

    def hear(self) -> None:
        """There is news."""
        self._heard = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the last news."""
        now = time.monotonic()
        if now - self._asked > self._stall:
            self._heard += now - self._asked
        self._asked = now
        return max(0.0, now - self._heard)


def report_key(index: int) -> str:
    """The key of the report of the host with that number."""
    return f"{_PREFIX}host{index}"


def period_of(n_hosts: int) -> float:
    """Seconds between two reports of an agent, and between two orders."""
    return max(_PERIOD_SECONDS, n_hosts / _HOSTS_PER_SECOND)


@final
class Meeting:
    """An agent's end: a thread that writes its report and reads the orders."""

    def __init__(
        self,
        store: TCPStore,
        secret: str,
        name: str,
        index: int,
        n_hosts: int,
        *,
        is_elastic: bool = False,
        lost_s: float = LOST_SECONDS,
    ) -> None:
        """name: of this host. index: its number. is_elastic: whether the launch may go on without this host. lost_s:
        seconds without news after which the launching command counts as lost.
        """
        self.name, self.is_elastic, self._index, self._lost_s = name, is_elastic, index, lost_s
        self._store, self._signed, self._key = store, SignedMessages(store, secret), report_key(index)
        self._period = period_of(n_hosts)
        self._lock, self._news = threading.Lock(), threading.Condition()
        self._report = Report(0, "came", life=secrets.token_hex(8))
        self._written: Report | None = None
        self._orders = Orders(0)
        self._silence = Silence(self._period)
        self._problem = ""
        self._is_over = False
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        # Not waited for longer than a request may take: a call to a store behind a dead link may never return.
        limit_s = STORE_SECONDS + _SPARE_SECONDS
        thread = BackgroundThread(self._talk, name="dsc_meeting", end=self.close, limit_s=limit_s)
        thread.start()

    def next_round(self) -> tuple[int, ...] | None:
        """Wait until this host is a member of a new round. Returns the numbers of its members; None if there is none
        any more: the launch is over, this agent leaves, or the launching command is lost after the first round.

        Raises LaunchError if the launching command is lost before this host was a member.
        """
        while (orders := self._next_orders()) is None:
            if self._ends_here():
                return None
            if problem := self.lost():
                if self._report.round:
                    return None
                raise LaunchError(problem, where=f"host {self.name}")
            self._wait()
        with self._lock:
            report = self._report
            self._report = Report(report.number, "came", life=report.life, round=orders.round)
        self._wake()
        return orders.members

    def begin(self, master: tuple[str, int] | None) -> tuple[str, int] | None:
        """Wait until all members have come. Returns where the ranks meet; None if the round has ended before.

        master: of the round's first host, where its ranks listen. Raises LaunchError if the launching command is lost.
        """
        self._tell(master=master)
        while True:
            orders = self._orders
            if self.must_stop() or orders.signal or orders.code is not None:
                return None
            if orders.master is not None:
                self._tell(state="runs")
                return orders.master
            if problem := self.lost():
                raise LaunchError(problem, where=f"host {self.name}")
            self._wait()

    @property
    def round(self) -> int:
        """The number of the last round that this host was a member of."""
        return self._report.round

    @property
    def orders(self) -> Orders:
        """The newest orders."""
        return self._orders

    def must_stop(self) -> bool:
        """Whether the ranks of this host have to end: their round is stopped, or the others are in a later one."""
        orders = self._orders
        return orders.stop or orders.round > self._report.round

    def lost(self) -> str:
        """Why nothing is heard from the launching command; "" if it is heard."""
        if self._problem:
            return f"the launching command is lost: {self._problem}"
        silent = self._silence.seconds()
        return f"nothing was heard from the launching command for {silent:.0f} s" if silent > self._lost_s else ""

    def note(self, n_saves: int, min_seconds: int) -> None:
        """Numbers from the step file of the host's first rank go out with the next report."""
        with self._lock:
            self._report = msgspec.structs.replace(self._report, n_saves=n_saves, min_seconds=min_seconds)

    def fail(self, failure: Failure) -> None:
        """Report the first failure of this host, or add the last lines to it."""
        order = self._report.failure.order if self._report.failure else self._take_number()
        self._tell(failure=msgspec.structs.replace(failure, order=order))

    def end(self, *, has_all_zeros: bool, was_stopped: bool = False, is_leaving: bool = False) -> None:
        """Report that all ranks of this host have ended, and wait until there is something to do: the launch is over, a
        new round has this host as a member, or this agent leaves. Returns at once if the launching command is lost.
        """
        self._tell(state="ended", has_all_zeros=has_all_zeros, was_stopped=was_stopped, is_leaving=is_leaving)
        while not (self._ends_here() or self._next_orders() or self.lost()):
            self._wait()

    def close(self) -> None:
        """Let the thread end, after the request that it makes."""
        self._is_over = True
        self._wake()

    def _next_orders(self) -> Orders | None:
        """The orders that call this host to a new round, if they do."""
        orders = self._orders
        is_called = orders.round > self._report.round and self._index in orders.members
        return orders if is_called and not (orders.stop or orders.signal or orders.code is not None) else None

    def _ends_here(self) -> bool:
        """Whether this agent may go: everybody does, or the chair can know that it leaves."""
        if self._orders.code is not None:
            return True
        written = self._written
        return self.is_elastic and self._report.is_leaving and written is not None and written.is_leaving

    def _take_number(self) -> int:
        try:
            return self._store.add(_FAILURES, 1)
        except (DistError, RuntimeError):
            return 1 << 30  # the thread finds the same problem

    def _tell(self, **changes: Any) -> None:
        with self._lock:
            self._report = msgspec.structs.replace(self._report, **changes)
        self._wake()

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def _wait(self) -> None:
        with self._news:
            self._news.wait(self._period)

    def _talk(self) -> None:
        number = 0
        while not self._is_over:
            number += 1
            with self._lock:
                report = msgspec.structs.replace(self._report, number=number)
            try:
                self._signed.write(self._key, report)
                self._written = report
                orders = self._signed.read(ORDERS_KEY, Orders)
            except (DistError, RuntimeError) as error:
                self._problem = str(error).splitlines()[0]
                self._wake()
                return
            if orders is not None and orders.number != self._orders.number:
                self._silence.hear()
                is_new = msgspec.structs.replace(orders, number=0) != msgspec.structs.replace(self._orders, number=0)
                self._orders = orders
                if is_new:
                    self._wake()
            self._wait()
