"""Conclude from the positions of all ranks whether they have diverged, wait for a slow rank, or wait for a slow
transfer.

Waiting forms a graph: a rank that waits in a collective waits for all members of its group that have not entered it.
Ranks on a cycle wait for ever, and so do all ranks that wait for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

from deepspeed_c.comm.ledger import ENTERED, group_in_words, ranks_in_words
from deepspeed_c.comm.position import GroupPosition, Life, Position, Presence, ToldEntry

__all__ = ["EXIT_CODE", "Verdict", "ended_ranks", "judge"]

EXIT_CODE = 76
"""Exit code of a run that the watchdog ends; EX_PROTOCOL of sysexits.h."""

# Collectives whose sizes may differ over ranks.
_UNEVEN = frozenset(
    {
        "comm.all_gather",
        "comm.all_to_all",
        "comm.all_to_all_single",
        "comm.gather",
        "comm.reduce_scatter",
        "comm.scatter",
    }
)

_MAX_LINES = 24

_FIX = (
    "Fix: all ranks must use the same modules in the same order and equally often; look at what decides otherwise on the ranks named"
    " (a condition on the data, a loop that ends early, an exception)"
)


class Verdict(NamedTuple):
    """A conclusion that the positions prove."""

    kind: Literal["diverged", "slow", "transfer"]
    """diverged: ranks wait for an event that cannot come. slow: they wait for a rank that runs and can still come.
    transfer: they wait for data that is under way.
    """
    text: str
    """Message for the user."""
    lasting: frozenset[str] = frozenset()
    """Proofs of divergence that stay true once they are true."""
    passing: frozenset[str] = frozenset()
    """Proofs of divergence that count only if two rounds find them, because ranks report their positions at different
    moments.
    """


class _Absent(NamedTuple):
    """A rank that did not answer."""

    is_lost: bool
    text: str


def judge(
    positions: Mapping[int, Position], presences: Mapping[int, Presence], world_size: int, long_s: float
) -> Verdict:
    """The verdict on the ranks. ``positions`` are of the ranks that answered, ``presences`` of the other ranks, as far
    as they ever came.

    long_s: a rank that has waited for so many seconds needs an explanation.
    """
    return _Judge(positions, presences, world_size, long_s).verdict()


def ended_ranks(presences: Mapping[int, Presence | None], lives: Mapping[int, Life]) -> list[str]:
    """A sentence for each rank that has ended or is stopped, according to the rank itself or to its neighbours."""
    absent = {rank: _absent(presence, lives.get(rank, "runs")) for rank, presence in presences.items()}
    return [f"rank {rank} {_singular(a.text, 1)}" for rank, a in sorted(absent.items()) if a.is_lost]


class _Judge:
    def __init__(
        self, positions: Mapping[int, Position], presences: Mapping[int, Presence], world_size: int, long_s: float
    ) -> None:
        self._positions, self._world, self._long_s = positions, list(range(world_size)), long_s
        seen: dict[int, Life] = {}
        for position in positions.values():
            seen.update(position.neighbours)
        self._absent = {
            rank: _absent(presences.get(rank), seen.get(rank)) for rank in self._world if rank not in positions
        }
        self._groups: dict[str, dict[int, GroupPosition]] = defaultdict(dict)
        for position in positions.values():
            for group in position.groups:
                self._groups[group.name][position.rank] = group
        self._members = {
            name: next(iter(by_rank.values())).ranks or self._world for name, by_rank in self._groups.items()
        }
        self._waits_for = {rank: self._missing(rank) for rank in positions}

    def verdict(self) -> Verdict:
        waiting = {r for r, p in self._positions.items() if any(c.seconds >= self._long_s for _, c in _blocking(p))}
        involved = self._reach(waiting)
        lost = sorted(rank for rank in involved if rank in self._absent and self._absent[rank].is_lost)
        running = [rank for rank in involved if self._is_running(rank)]
        mismatches = [found for name in self._groups if (found := self._mismatch(name)) is not None]
        cycle = self._cycle(waiting)
        crossed = self._crossed()
        # A call outside the ledger may wait for any rank that still runs. So it proves nothing while any rank runs.
        outside = [r for r in involved if self._is_outside(r)] if not any(map(self._is_running, self._world)) else []

        lasting = {f"mismatch {name} {seq}" for name, seq in mismatches} | {f"lost {rank}" for rank in lost}
        passing = {f"cycle {sorted((r, *self._at(r)) for r in cycle)}"} if cycle else set()
        passing |= {f"outside {rank} {self._positions[rank].dist_call}" for rank in outside}
        passing |= {f"crossed {pair}" for pair in crossed}
        if lasting or passing:
            if mismatches:
                name, seq = mismatches[0]
                head = f"collective #{seq}{self._of_group(name)} is not the same on all ranks"
            elif lost:
                head = f"{ranks_in_words(lost)} will not come"
            elif outside:
                head = f"{ranks_in_words(outside)} wait{'s' if len(outside) == 1 else ''} in a call that other ranks are not in"
            elif cycle:
                head = f"{ranks_in_words(cycle)} wait for each other"
            else:
                head = "ranks wait for the same collectives in different orders"
            body = [line for name, seq in mismatches for line in self._differing(name, seq)]
            text = [f"ranks have diverged: {head}", *body, *self._standing(), _FIX]
            return Verdict("diverged", "\n".join(text), frozenset(lasting), frozenset(passing))
        if running or any(self._waits_for[rank] for rank in waiting):
            slow = sorted(running) or sorted({m for rank in waiting for m in self._waits_for[rank]})
            they = "it comes" if len(slow) == 1 else "they come"
            head = f"{ranks_in_words(slow)} let{'s' if len(slow) == 1 else ''} others wait; the run goes on when {they}"
            text = [head, *self._standing()]
            return Verdict("slow", "\n".join(text))
        return Verdict("transfer", "\n".join(["all ranks are in what the others wait for", *self._standing()]))

    def _missing(self, rank: int) -> set[int]:
        """Ranks that ``rank`` waits for: members of the group that have not entered its collective, as far as is known."""
        missing: set[int] = set()
        for group, call in _blocking(self._positions[rank]):
            if call.seq == 0:
                continue  # a message: the ledger does not know the progress of the other rank
            for member in self._members[group.name]:
                theirs = self._groups[group.name].get(member)
                if member in self._absent or (member != rank and (theirs is None or theirs.last < call.seq)):
                    missing.add(member)
        return missing

    def _reach(self, ranks: Iterable[int]) -> set[int]:
        reached, todo = set(), list(ranks)
        while todo:
            rank = todo.pop()
            if rank not in reached:
                reached.add(rank)
                todo.extend(self._waits_for.get(rank, ()))
        return reached

    def _cycle(self, ranks: Iterable[int]) -> list[int]:
        """Ranks that wait for each other and are reached from ``ranks``; empty if there are none."""
        state: dict[int, int] = {}  # 1: on the path, 2: left
        for root in sorted(ranks):
            path, edges = [root], [iter(sorted(self._waits_for.get(root, ())))]
            if state.get(root):
                continue
            state[root] = 1
            while path:
                for member in edges[-1]:
                    if state.get(member) == 1:
                        return sorted(path[path.index(member) :])
                    if member not in state:
                        state[member] = 1
                        path.append(member)
                        edges.append(iter(sorted(self._waits_for.get(member, ()))))
                        break
                else:
                    state[path.pop()] = 2
                    edges.pop()
        return []

    def _crossed(self) -> list[tuple[int, int]]:
        """Pairs of ranks of one group that have waited for long, each for an entry that the other rank has started and
        not yet waited for.
        """
        pairs = []
        for by_rank in self._groups.values():
            waits = defaultdict(list)
            for rank, group in by_rank.items():
                first = group.blocking[0] if group.blocking else None
                if first is not None and first.seq and first.seconds >= self._long_s:
                    waits[first.seq].append(rank)
            # One rank stands for all ranks that wait for the same number: they are at the same place.
            firsts = [(seq, min(ranks)) for seq, ranks in sorted(waits.items())]
            for (seq_a, a), (seq_b, b) in pairwise(firsts):
                if _is_put_off(by_rank[a], seq_b) and _is_put_off(by_rank[b], seq_a):
                    pairs.append((a, b))
        return pairs

    def _is_running(self, rank: int) -> bool:
        if rank in self._absent:
            return not self._absent[rank].is_lost
        position = self._positions[rank]
        return not position.dist_call and all(call.seq == 0 for _, call in _blocking(position))

    def _is_outside(self, rank: int) -> bool:
        position = self._positions.get(rank)
        return position is not None and bool(position.dist_call) and not _blocking(position)

    def _at(self, rank: int) -> tuple[tuple[str, int], ...]:
        return tuple((group.name, call.seq) for group, call in _blocking(self._positions[rank]))

    def _mismatch(self, name: str) -> tuple[str, int] | None:
        """(group, number) of the first entry that differs between ranks."""
        first: dict[int, ToldEntry] = {}
        differing = set()
        for group in self._groups[name].values():
            for call in group.recent:
                if not _agree(first.setdefault(call.seq, call), call):
                    differing.add(call.seq)
        return (name, min(differing)) if differing else None

    def _differing(self, name: str, seq: int) -> list[str]:
        """A line for each version of entry ``seq``, with its ranks."""
        kinds: dict[str, list[int]] = defaultdict(list)
        for rank, group in sorted(self._groups[name].items()):
            call = next((call for call in group.recent if call.seq == seq), None)
            if call is not None:
                kinds[f"{call}, {call.n_bytes} bytes"].append(rank)
        ordered = sorted(kinds.items(), key=lambda kind: kind[1])
        return _cut([f"  {ranks_in_words(ranks)} entered {what}" for what, ranks in ordered])

    def _standing(self) -> list[str]:
        """The position of each rank; ranks at the same place share a line."""
        places: dict[str, list[int]] = defaultdict(list)
        longest: dict[str, float] = defaultdict(float)
        for rank in self._world:
            text, seconds = self._place(rank)
            places[text].append(rank)
            longest[text] = max(longest[text], seconds)
        ordered = sorted(places.items(), key=lambda place: place[1])
        return _cut(
            [
                f"  {ranks_in_words(ranks)} {_singular(text, len(ranks))}"
                + (f" for {longest[text]:.0f} s" if longest[text] else "")
                for text, ranks in ordered
            ]
        )

    def _place(self, rank: int) -> tuple[str, float]:
        """(activity, seconds of waiting) of a rank. The text of the activity begins with a plural verb, a key of
        ``_VERBS``.
        """
        if rank in self._absent:
            return self._absent[rank].text, 0.0
        position = self._positions[rank]
        blocking = _blocking(position)
        if blocking:
            group, call = blocking[0]
            return f"wait in {call}{self._of_group(group.name)}", max(call.seconds, 0.5)
        newest = [group.recent[-1] for group in position.groups if group.recent]
        after = f", after {min(newest, key=lambda call: call.seconds)}" if newest else ""
        if position.dist_call:
            return f"are in torch.distributed.{position.dist_call}, called at {position.where}{after}", 0.0
        return f"are at {position.where}{after}", 0.0

    def _of_group(self, name: str) -> str:
        members = self._members[name]
        if len(members) == len(self._world):
            return ""
        axes = next(iter(self._groups[name].values())).axes
        return f" {group_in_words(axes, sorted(members))}"


def _absent(presence: Presence | None, life: Life | None) -> _Absent:
    if presence is None:
        return _Absent(False, "have not come to deepspeed_c.initialize() yet")
    who = f"process {presence.pid} on {presence.host.split()[0]}"
    if presence.state == "ended":
        return _Absent(True, f"have ended{presence.how} ({who})")
    if life == "gone":
        return _Absent(True, f"have ended without a word ({who})")
    if life == "stopped":
        return _Absent(True, f"are stopped by a signal ({who})")
    if life == "traced":
        return _Absent(False, f"are held by a debugger ({who})")
    if presence.state == "closed":
        return _Absent(False, f"have closed every engine{presence.how} ({who})")
    if life == "runs":
        return _Absent(False, f"give no answer: something holds Python's interpreter lock ({who})")
    return _Absent(True, f"do not answer ({who})")


def _blocking(position: Position) -> list[tuple[GroupPosition, ToldEntry]]:
    """The collectives that a rank waits for, the longest wait first, each with its group."""
    calls = [(group, call) for group in position.groups for call in group.blocking]
    return sorted(calls, key=lambda pair: -pair[1].seconds)


def _is_put_off(group: GroupPosition, seq: int) -> bool:
    return any(call.seq == seq and call.state == ENTERED for call in group.recent)


def _agree(a: ToldEntry, b: ToldEntry) -> bool:
    return a.op == b.op and a.label == b.label and (a.n_bytes == b.n_bytes or a.op in _UNEVEN)


_VERBS: Mapping[str, str] = {
    "wait": "waits",
    "are": "is",
    "have": "has",
    "give": "gives",
    "do": "does",
}


def _singular(text: str, n: int) -> str:
    if n != 1:
        return text
    verb, _, rest = text.partition(" ")
    return f"{_VERBS[verb]} {rest}"


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"  ... and {more} more places"]
