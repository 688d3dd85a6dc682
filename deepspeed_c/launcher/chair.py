"""The chair of a launch on several hosts: reads the reports of all agents, and decides when a round begins and ends.

[Note: the life of a round] A round is called with the hosts that are there (``members``); it begins when all members
have answered and the first has said where its ranks meet; it ends when each member's ranks have ended, or the member is
lost. Its end decides about another round:

    all ranks ended by themselves with exit code 0       the launch is over
    a rank failed, or a member is lost or leaves         another round, where the launch is elastic and may go on
    the round was ended to take in a host                another round

The time for hosts that may come back runs from the moment of the failure, while the ranks of the others still end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import msgspec
from torch.distributed import TCPStore

from deepspeed_c.launcher.meeting import (
    COME_SECONDS,
    LOST_SECONDS,
    ORDERS_KEY,
    Failure,
    Orders,
    Report,
    SignedMessages,
    Silence,
    period_of,
    report_key,
)
from deepspeed_c.launcher.options import Options

__all__ = ["Chair", "RoundPolicy"]

SAME_STEP_FAILURES = 3
"""So many rounds in a row that a rank's failure ended at one step are enough: the next would end there, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPolicy:
    """How a launch goes on after a failure of a rank or a host."""

    min_hosts: int
    max_hosts: int
    max_restarts: int
    grace_s: float
    """Time for hosts that may come back."""
    lost_s: float
    """A host without a sign for so long is lost."""
    is_elastic: bool

    @classmethod
    def of(cls, options: Options, n_hosts: int) -> RoundPolicy:
        """The policy of a launch on ``n_hosts`` hosts, by its options."""
        is_elastic = options.elastic_training
        return cls(
            min_hosts=(options.min_elastic_nodes or 1) if is_elastic else n_hosts,
            max_hosts=min(options.max_elastic_nodes or n_hosts, n_hosts) if is_elastic else n_hosts,
            max_restarts=options.max_restarts if is_elastic else 0,
            grace_s=options.elastic_grace,
            lost_s=options.heartbeat or LOST_SECONDS,
            is_elastic=is_elastic,
        )


@final
class Chair:
    """The launching command's end: reads the reports of all hosts, and decides. ``step`` is called again and again."""

    def __init__(
        self,
        store: TCPStore,
        secret: str,
        names: Sequence[str],
        said: Callable[[str], str],
        *,
        rounds: RoundPolicy,
        tell: Callable[[str], object] = lambda line: None,
        own: int | None = None,
    ) -> None:
        """said: the last lines that the runner has printed about a host, for the message if it does not come. tell:
        gets a line for people whenever a round ends and another begins. own: the number of the host whose agent runs in
        the chair's process.
        """
        n = len(names)
        self._rounds = rounds
        self._signed, self._names = SignedMessages(store, secret), list(names)
        self._said, self._tell, self._own = said, tell, own
        self._reports: list[Report | None] = [None] * n
        self._orders = Orders(0)
        self.period = period_of(n)
        self._lost_s = max(self._rounds.lost_s, 5 * self.period)
        self._silences = [Silence(self.period) for _ in names]
        self._silent_s = [0.0] * n
        self.failure: Failure | None = None
        """The failure that ended the launch, or ends the round."""
        self._ended_lives: set[str] = set()  # of agents that the runner has seen end
        self._unfit_lives: set[str] = set()  # of agents that could start no rank
        self._refused: set[int] = set()  # hosts whose first agent could not be started
        self._lost: set[int] = set()  # members of this round that are lost
        self._gone: set[int] = set()  # members whose agent has ended, after their ranks
        self._waiting: dict[int, int] = {}  # host that has come back -> checkpoints when it came
        self._failed_steps: list[int] = []
        self._n_restarts = 0  # rounds in a row that failed and saved nothing
        self._is_between = self._rounds.is_elastic  # no round runs, and none is called
        # Since when hosts are waited for: the beginning, or the failure that ended the last round.
        self._since = self._called_at = self._began_at = time.monotonic()
        if not self._rounds.is_elastic:
            self._call(range(n))
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
        """Whether ranks were started."""
        return self._orders.master is not None or self._orders.round > 1

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the hosts of this round, or of the last."""
        return self._orders.members

    def is_present(self, i: int) -> bool:
        """Whether the agent of the host with that number is heard, and stays."""
        report = self._reports[i]
        return report is not None and not report.is_leaving and not self._is_silent(i)

    def signal(self, number: int) -> None:
        """Pass a signal on to all ranks. A second one kills them."""
        is_second = self._orders.signal != 0
        self._change(signal=self._orders.signal or number, kill=is_second)

    def fail(self, failure: Failure) -> None:
        """End the round because of a failure that no agent has seen."""
        if self.failure is None:
            self.failure = failure
            self._stop()

    def end_of_agent(self, name: str, code: int) -> None:
        """An agent has ended, as its runner says. The round ends, if the agent has not said how."""
        self.step()  # its last report may be there
        i = self._names.index(name) if name in self._names else -1
        if i < 0 or self.is_over:
            return
        report = self._reports[i]
        if report is None:
            self._refused.add(i)
            if not self._rounds.is_elastic and self.failure is None:
                self.fail(self.absent([name], f"did not come: its start ended with exit code {code}"))
            return
        how = f"the agent of host {name} was lost (exit code {code}): it was killed, or its connection broke"
        self._end_of_life(i, how)
        if self._rounds.is_elastic:
            self._reports[i] = None

    def step(self) -> None:
        """Read the reports, and write orders."""
        self._read()
        if self._is_between and not self.is_over:
            self._begin_another()
        elif not self.is_over:
            self._watch()
        self._write()

    def _read(self) -> None:
        for i, before in enumerate(self._reports):
            report = self._signed.read(report_key(i), Report)
            if report is None or report.life in self._ended_lives:
                continue
            if before is None or (report.life, report.number) != (before.life, before.number):
                self._silences[i].hear()
                if before is not None and before.life != report.life:
                    self._end_of_life(i, f"host {self._names[i]} has a new agent: the one before was lost")
                self._reports[i] = report
        self._silent_s = [silence.seconds() for silence in self._silences]

    def _end_of_life(self, i: int, how: str) -> None:
        """The agent whose report is known has ended. how: for people, if its ranks have not."""
        self._ended_lives.add(self._reports[i].life)
        if i not in self._orders.members or self._is_between:
            return
        if self._is_out(i):
            self._gone.add(i)
        else:
            self._lose(i, how)

    def _watch(self) -> None:
        """A round is called, or runs."""
        members, now = self._orders.members, time.monotonic()
        for i in members:
            if self._reports[i] is not None and self._is_silent(i) and not self._is_out(i):
                self._lose(i)
        reports = [r for i in members if (r := self._of_round(i)) is not None]
        failures = [report.failure for report in reports if report.failure is not None]
        if failures and (self.failure is None or self.failure.order):
            self.failure = min(failures, key=lambda failure: failure.order)
            self._stop()
        leaving = [i for i in members if i not in self._lost and self._is_leaving(i)]
        if leaving and self._rounds.is_elastic:
            self._leave(leaving)
        if self._orders.master is None:
            self._begin_when_all_came(now)
        elif not self._is_ending:
            self._take_in_at_a_checkpoint(now)
        if self._all_out():
            self._conclude()

    @property
    def _is_ending(self) -> bool:
        return self._orders.stop or self._orders.signal != 0

    def _of_round(self, i: int) -> Report | None:
        """The report of a host about this round."""
        report = self._reports[i]
        return report if report is not None and report.round == self._orders.round else None

    def _has_come(self, i: int) -> Report | None:
        """The report of a host, if there is one that counts: in the first round any, later one about this round."""
        return self._reports[i] if self._orders.round == 1 else self._of_round(i)

    def _is_silent(self, i: int) -> bool:
        return self._silent_s[i] > self._lost_s

    def _is_leaving(self, i: int) -> bool:
        report = self._of_round(i)
        return report is not None and report.is_leaving

    def _is_out(self, i: int) -> bool:
        """Whether a member's ranks have ended in this round, or it is lost."""
        report = self._of_round(i)
        return i in self._lost or i in self._gone or (report is not None and report.state == "ended")

    def _all_out(self) -> bool:
        if self._orders.master is None and self._is_ending:
            # Nothing runs yet. Members that have not answered start nothing any more.
            return all(self._is_out(i) or self._of_round(i) is None for i in self._orders.members)
        return all(map(self._is_out, self._orders.members))

    def _lose(self, i: int, how: str = "") -> None:
        self._lost.add(i)
        name = self._names[i]
        how = how or f"host {name}: no sign for {self._lost_s:g} s (its link or its agent is lost)"
        if self.failure is None or self._rounds.is_elastic:
            # The ranks that fail because a host is lost may be faster than the sign of its loss.
            self.failure = Failure(name, 1, how)
            self._stop()

    def _leave(self, leaving: Sequence[int]) -> None:
        self._lost.update(leaving)
        if self._own in leaving:  # the chair goes with it
            self._stop(is_gentle=True)
            return
        names = ", ".join(self._names[i] for i in leaving)
        self.failure = Failure(names, 1, f"host {names} was asked to end, and leaves")
        self._stop()

    def _begin_when_all_came(self, now: float) -> None:
        members = self._orders.members
        missing = [i for i in members if self._has_come(i) is None]
        first = self._of_round(members[0])
        if not missing and first is not None and first.master is not None and all(map(self._of_round, members)):
            self._began_at = now
            self._change(master=first.master)
        elif now - self._called_at > COME_SECONDS and self.failure is None and missing:
            self.fail(self.absent([self._names[i] for i in missing], f"did not come within {COME_SECONDS:.0f} s"))
            self._lost.update(missing)

    def _take_in_at_a_checkpoint(self, now: float) -> None:
        """End the round, if a host has come back and the ranks have saved since."""
        members = self._orders.members
        first = self._of_round(members[0])
        if not self._rounds.is_elastic or first is None or len(members) >= self._rounds.max_hosts:
            return
        back = [i for i in range(len(self._names)) if i not in members and self._may_join(i)]
        for i in back:
            if i not in self._waiting:
                self._tell(f"host {self._names[i]} is back: it is taken in after the next checkpoint")
                self._waiting[i] = first.n_saves
        if now - self._began_at < first.min_seconds:
            return
        if any(first.n_saves > self._waiting[i] for i in back):
            names = ", ".join(self._names[i] for i in back)
            self._tell(f"a checkpoint was saved: round {self._orders.round} ends, to take in host {names}")
            self._stop(is_gentle=True)

    def _may_join(self, i: int) -> bool:
        report = self._reports[i]
        return (
            report is not None
            and self.is_present(i)
            and report.state != "runs"
            and report.life not in self._unfit_lives
        )

    def _conclude(self) -> None:
        """All ranks of the round have ended."""
        if self._may_go_on():
            self._is_between = True
        else:
            self._change(code=self._final_code())

    def _may_go_on(self) -> bool:
        """Whether another round follows. Counts the failure of this one."""
        members, failure = self._orders.members, self.failure
        if self._orders.signal or not self._rounds.is_elastic or self._own in self._lost:
            return False
        if failure is None:
            reports = [self._of_round(i) for i in members]
            return not all(r is not None and r.has_all_zeros and not r.was_stopped for r in reports)
        if failure.is_start:
            # In the first round a mistake of the user. Later the host lacks something that the others have.
            unfit = [r for i in members if (r := self._of_round(i)) is not None and r.failure == failure]
            self._unfit_lives.update(report.life for report in unfit)
            return self._orders.round > 1
        first = self._of_round(members[0])
        self._n_restarts = 1 if first is not None and first.n_saves else self._n_restarts + 1
        if self._n_restarts > self._rounds.max_restarts:
            n = self._rounds.max_restarts
            self._add_to_failure(f"; no checkpoint was saved since {n} restarts, and --max_restarts allows no more")
            return False
        if self._lost:
            self._failed_steps.clear()
            return True
        self._failed_steps.append(failure.step)
        if len(self._failed_steps) < SAME_STEP_FAILURES or len(set(self._failed_steps[-SAME_STEP_FAILURES:])) > 1:
            return True
        where = f"after step {failure.step}" if failure.step else "before the end of a first step"
        self._add_to_failure(f", {where} for the third time in a row: no further round is begun")
        return False

    def _add_to_failure(self, words: str) -> None:
        self.failure = msgspec.structs.replace(self.failure, how=self.failure.how + words)

    def _begin_another(self) -> None:
        """Call a round as soon as enough hosts are there."""
        if self._orders.signal:
            self._change(code=self._final_code())
            return
        here = [i for i in range(len(self._names)) if self._may_join(i)]
        n_before = self._orders.round
        waited = time.monotonic() - self._since
        limit = self._rounds.grace_s if n_before else COME_SECONDS
        n_expected = len(self._names) - (0 if n_before else len(self._refused))
        if len(here) >= self._rounds.min_hosts and (len(here) >= n_expected or waited > limit):
            was_member = set(self._orders.members)
            chosen = sorted(here, key=lambda i: (i not in was_member, i))[: self._rounds.max_hosts]
            self._call(sorted(chosen))
        elif waited > max(COME_SECONDS, limit) or (n_expected < self._rounds.min_hosts and not n_before):
            self._give_up(here)

    def _give_up(self, here: Sequence[int]) -> None:
        """Too few hosts are left."""
        if not self._orders.round:
            self.failure = self.absent(self.missing, f"did not come within {COME_SECONDS:.0f} s")
        else:
            n, word = len(here), "host is" if len(here) == 1 else "hosts are"
            words = f"; {n} {word} left, and --min_elastic_nodes asks for {self._rounds.min_hosts}"
            self.failure = self.failure or Failure("", 1, "a round has ended")
            self._add_to_failure(words)
        self._change(code=self._final_code())

    def _call(self, members: Sequence[int]) -> None:
        """Call the next round."""
        number = self._orders.round + 1
        if number > 1:
            why = f"{self.failure.how}; " if self.failure is not None else ""
            n, of = len(members), len(self._names)
            self._tell(f"{why}round {number} begins with {n} of {of} hosts")
        self.failure, self._is_between = None, False
        self._lost.clear()
        self._gone.clear()
        self._waiting.clear()
        self._called_at = time.monotonic()
        self._change(round=number, members=tuple(members), master=None, stop=False, is_gentle=False)

    def _final_code(self) -> int:
        if self.failure is not None:
            return self.failure.code
        reports = [self._of_round(i) for i in self._orders.members]
        if self._orders.signal and not (reports and all(r is not None and r.has_all_zeros for r in reports)):
            return 128 + self._orders.signal
        return 0

    def absent(self, names: Sequence[str], how: str) -> Failure:
        """The failure of hosts that have not come."""
        said = "\n".join(filter(None, (self._said(name) for name in names)))
        word = "host" if len(names) == 1 else "hosts"
        return Failure(", ".join(names), 2, f"{word} {', '.join(names)} {how}", tail=said)

    @property
    def missing(self) -> list[str]:
        """The hosts that have not come yet."""
        return [name for name, report in zip(self._names, self._reports, strict=True) if report is None]

    def _stop(self, *, is_gentle: bool = False) -> None:
        if not self._orders.stop:
            self._since = time.monotonic()
        self._change(stop=True, is_gentle=is_gentle and not self._orders.stop)

    def _change(self, **changes: Any) -> None:
        self._orders = msgspec.structs.replace(self._orders, **changes)

    def _write(self) -> None:
        self._change(number=self._orders.number + 1)
        self._signed.write(ORDERS_KEY, self._orders)
