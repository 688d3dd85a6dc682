"""How the agents of several hosts meet: each writes a report into one store, and one chair writes orders for all.

[Note: reports and orders] The chair runs where the store is: in the launching command, or with --no_ssh beside the
agent of host 0. Every agent rewrites its report, and the chair its orders, each time with the next number. A number
that does not change for LOST_SECONDS means a lost link or a dead process, on both sides. Orders hold states only
("begin", "pass on signal 15", "end"), no commands. A process without the run's secret can write neither. With --no_ssh
no secret can be shared; then the worst that a stranger can do is to end the run.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, final

import msgspec
from torch.distributed import DistError, TCPStore

from deepspeed_c.background import BackgroundThread
from deepspeed_c.comm.signed_store import SignedStore
from deepspeed_c.errors import LaunchError

__all__ = ["COME_SECONDS", "LOST_SECONDS", "Chair", "Failure", "Meeting", "Orders", "Report", "connect"]

COME_SECONDS = 60.0
"""How long the chair waits for the agents of all hosts."""
LOST_SECONDS = 8.0
"""Without news for so long, the other side is lost."""
STORE_SECONDS = 5
_SPARE_SECONDS = 5  # from the end of a request's time to the end of the thread, on a busy host
_PERIOD_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_HOSTS_PER_SECOND = 2000  # limit for the chair's reads
_PREFIX = "deepspeed_c/launch/"
_ORDERS, _FAILURES = _PREFIX + "orders", _PREFIX + "failures"

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


class Report(msgspec.Struct, frozen=True):
    """The words of a host's agent about itself."""

    number: int
    state: State
    master: tuple[str, int] | None = None
    """Of host 0: where its ranks listen."""
    failure: Failure | None = None
    has_all_zeros: bool = False
    """Whether all ranks of the host have ended with exit code 0."""


class Orders(msgspec.Struct, frozen=True):
    """The words of the chair to all agents."""

    number: int
    master: tuple[str, int] | None = None
    """All hosts have come: the ranks may begin, and meet here."""
    signal: int = 0
    """Pass this signal on to the ranks."""
    stop: bool = False
    """End the ranks, because another has failed."""
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


class _Signed:
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
class _Silence:
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


def _report_key(index: int) -> str:
    return f"{_PREFIX}host{index}"


def _period(n_hosts: int) -> float:
    return max(_PERIOD_SECONDS, n_hosts / _HOSTS_PER_SECOND)


@final
class Meeting:
    """An agent's end: a thread that writes its report and reads the orders."""

    def __init__(self, store: TCPStore, secret: str, name: str, index: int, n_hosts: int) -> None:
        """name: of this host. index: its number."""
        self.name = name
        self._store, self._signed, self._key = store, _Signed(store, secret), _report_key(index)
        self._period = _period(n_hosts)
        self._lock, self._news = threading.Lock(), threading.Condition()
        self._report = Report(0, "came")
        self._orders = Orders(0)
        self._silence = _Silence(self._period)
        self._problem = ""
        self._is_over = False
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        # Not waited for longer than a request may take: a call to a store behind a dead link may never return.
        limit_s = STORE_SECONDS + _SPARE_SECONDS
        thread = BackgroundThread(self._talk, name="dsc_meeting", end=self.close, limit_s=limit_s)
        thread.start()

    def begin(self, master: tuple[str, int] | None) -> tuple[str, int] | None:
        """Wait until all hosts have come. Returns where the ranks meet; None if the launch has ended before.

        master: of host 0, where its ranks listen. Raises LaunchError if the launching command is lost.
        """
        self._tell(master=master)
        while True:
            orders = self._orders
            if orders.stop or orders.signal or orders.code is not None:
                return None
            if orders.master is not None:
                self._tell(state="runs")
                return orders.master
            if problem := self.lost():
                raise LaunchError(problem, where=f"host {self.name}")
            self._wait()

    @property
    def orders(self) -> Orders:
        """The newest orders."""
        return self._orders

    def lost(self) -> str:
        """Why nothing is heard from the launching command; "" if it is heard."""
        if self._problem:
            return f"the launching command is lost: {self._problem}"
        silent = self._silence.seconds()
        return f"nothing was heard from the launching command for {silent:.0f} s" if silent > LOST_SECONDS else ""

    def fail(self, failure: Failure) -> None:
        """Report the first failure of this host, or add the last lines to it."""
        order = self._report.failure.order if self._report.failure else self._take_number()
        self._tell(failure=msgspec.structs.replace(failure, order=order))

    def end(self, *, has_all_zeros: bool) -> int | None:
        """Report that all ranks of this host have ended, and wait for the exit code of the launch. None if the
        launching command is lost.
        """
        self._tell(state="ended", has_all_zeros=has_all_zeros)
        while (code := self._orders.code) is None:
            if self.lost():
                return None
            self._wait()
        return code

    def close(self) -> None:
        """Let the thread end, after the request that it makes."""
        self._is_over = True
        self._wake()

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
                orders = self._signed.read(_ORDERS, Orders)
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


@final
class Chair:
    """The launching command's end: reads the reports of all hosts, and decides. ``step`` is called again and again."""

    def __init__(self, store: TCPStore, secret: str, names: Sequence[str], said: Callable[[str], str]) -> None:
        """said: the last lines that the runner has printed about a host, for the message if it does not come."""
        self._signed, self._names, self._said = _Signed(store, secret), list(names), said
        self._reports: list[Report | None] = [None] * len(names)
        self._began = time.monotonic()
        self._orders = Orders(0)
        self.period = _period(len(names))
        self._silences = [_Silence(self.period) for _ in names]
        self.failure: Failure | None = None
        """The failure that ended the launch."""
        self._write()

    @property
    def is_over(self) -> bool:
        """Whether all hosts that can be reached have ended, or had the time to."""
        return self._orders.code is not None

    @property
    def code(self) -> int:
        """The exit code, once the launch is over."""
        return self._orders.code or 0

    @property
    def has_begun(self) -> bool:
        return self._orders.master is not None

    def signal(self, number: int) -> None:
        """Pass a signal on to all ranks. A second one kills them."""
        is_second = self._orders.signal != 0
        self._change(signal=self._orders.signal or number, kill=is_second)

    def fail(self, failure: Failure) -> None:
        """End the launch because of a failure that no agent has seen."""
        if self.failure is None:
            self.failure = failure
            self._change(stop=True)

    def end_of_agent(self, name: str, code: int) -> None:
        """End the launch, if an agent has ended and has not said how."""
        self.step()  # its last report may be there
        i = self._names.index(name) if name in self._names else -1
        if i < 0 or self._is_out(i) or self.failure is not None:
            return
        if self._reports[i] is None:
            self.fail(self.absent([name], f"did not come: its start ended with exit code {code}"))
        else:
            how = f"the agent of host {name} was lost (exit code {code}): it was killed, or its connection broke"
            self.fail(Failure(name, 1, how))
            self._reports[i] = msgspec.structs.replace(self._reports[i], state="ended")

    def step(self) -> None:
        """Read the reports, and write orders."""
        now = time.monotonic()
        for i, before in enumerate(self._reports):
            report = self._signed.read(_report_key(i), Report)
            if report is not None and (before is None or report.number != before.number):
                self._reports[i] = report
                self._silences[i].hear()
        seconds = [silence.seconds() for silence in self._silences]
        silent = [i for i, n in enumerate(seconds) if self._is_out(i) is False and n > LOST_SECONDS]
        failures = [r.failure for r in self._reports if r is not None and r.failure is not None]
        if failures and (self.failure is None or self.failure.order):
            self.failure = min(failures, key=lambda failure: failure.order)
            self._change(stop=True)
        if not self.has_begun:
            self._begin_when_all_came(now)
        if silent and self.failure is None:
            self.fail(self._lost(silent))
        if self._all_out(silent) and not self.is_over:
            self._change(code=self._final_code())
        self._write()

    def _is_out(self, i: int) -> bool | None:
        """Whether the host has ended; None if it has never come."""
        report = self._reports[i]
        return None if report is None else report.state == "ended"

    def _all_out(self, silent: Sequence[int]) -> bool:
        if self.has_begun:
            return all(self._is_out(i) or i in silent for i in range(len(self._names)))
        return self._orders.stop or self._orders.signal != 0

    def _final_code(self) -> int:
        if self.failure is not None:
            return self.failure.code
        if self._orders.signal and not all(report is not None and report.has_all_zeros for report in self._reports):
            return 128 + self._orders.signal
        return 0

    def _begin_when_all_came(self, now: float) -> None:
        first = self._reports[0]
        if all(self._reports) and first is not None and first.master is not None:
            self._change(master=first.master)
        elif now - self._began > COME_SECONDS and self.failure is None:
            missing = [name for name, report in zip(self._names, self._reports, strict=True) if report is None]
            self.fail(self.absent(missing, f"did not come within {COME_SECONDS:.0f} s"))

    def absent(self, names: Sequence[str], how: str) -> Failure:
        """The failure of hosts that have not come."""
        said = "\n".join(filter(None, (self._said(name) for name in names)))
        word = "host" if len(names) == 1 else "hosts"
        return Failure(", ".join(names), 2, f"{word} {', '.join(names)} {how}", tail=said)

    @property
    def missing(self) -> list[str]:
        """The hosts that have not come yet."""
        return [name for name, report in zip(self._names, self._reports, strict=True) if report is None]

    def _lost(self, silent: Sequence[int]) -> Failure:
        names = ", ".join(self._names[i] for i in silent)
        word = "host" if len(silent) == 1 else "hosts"
        return Failure(names, 1, f"{word} {names}: no sign for {LOST_SECONDS:.0f} s (its link or its agent is lost)")

    def _change(self, **changes: Any) -> None:
        self._orders = msgspec.structs.replace(self._orders, **changes)

    def _write(self) -> None:
        self._change(number=self._orders.number + 1)
        self._signed.write(_ORDERS, self._orders)
