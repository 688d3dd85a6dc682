"""The time of a step on many ranks: recorded programs of ranks, run by the C core over the links of a machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.plan.machine import PULL, Machine
from deepspeed_c.plan.recorded import RUN, START, WAIT, Recorder, Transfer

__all__ = ["Cluster", "CollectiveTime", "SimulatedStep", "Span", "simulate"]

# Lanes of a rank: transfers of one lane run one after the other.
_NETWORK, _FILE = range(2)
_N_LANES = 2

_KINDS = {RUN: _C.PLAN_RUN, START: _C.PLAN_START, WAIT: _C.PLAN_WAIT}

_USUAL_PPM = 1_000_000  # the factor of a usual rank's computations

# Operations of a ledger that the core knows by another name.
_SAME_AS = {"barrier": "all-gather"}
_IN_TWO_LEVELS = ("all-gather", "reduce-scatter", "all-reduce")


class Cluster(NamedTuple):
    """The ranks of a run, and the machine that each host is."""

    machine: Machine
    n_ranks: int
    per_host: int
    """Ranks of a host; the last host may have fewer."""
    slow: Mapping[int, float] = MappingProxyType({})
    """rank -> the factor by which it computes longer."""

    @property
    def n_hosts(self) -> int:
        return -(-self.n_ranks // self.per_host)


class CollectiveTime(NamedTuple):
    """All collectives of one kind of a step, as one rank sees them."""

    op: str
    axis: str  # that its ranks lie along, or "all"; "" for files
    link: str  # the name of the highest link that they cross; "" for none
    phase: str
    count: int
    n_bytes: int  # as in ``comm.ledger.Total``
    seconds: float  # from the start of each to its end, added up
    exposed_seconds: float  # in which the rank waits for them and does nothing else


class Span(NamedTuple):
    """A piece of a lane."""

    lane: str  # "compute", "wait", or the name of a link
    label: str
    begin_ns: int
    end_ns: int


class SimulatedStep(NamedTuple):
    """A step of all ranks."""

    seconds: float
    busy_seconds: tuple[float, ...]  # of each rank, in which it computes
    waited_seconds: tuple[float, ...]  # of each rank, in which it waits or moves bytes itself
    collectives: tuple[CollectiveTime, ...]  # of the first rank
    spans: tuple[Span, ...]  # of the first rank
    n_flops: int  # of one rank's products
    flops_seconds: float  # in which they would run at the machine's rate
    link_bytes: Mapping[str, int]  # that cross each level of links, of all ranks

    @property
    def flops_share(self) -> float:
        """Part of the step in which products would run at the machine's rate."""
        return self.flops_seconds / self.seconds if self.seconds else 0.0


def _families(patterns: Iterable[tuple[int, ...]], n_ranks: int) -> dict[tuple[int, ...], list[list[int]]]:
    """The groups of all ranks along each axis, from the group of the first rank.

    Ranks lie on a grid, so the groups along an axis are the first rank's group, moved.
    """
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for pattern in patterns:
        if pattern in found:
            continue
        groups, covered = [], [False] * n_ranks
        for first in range(n_ranks):
            if covered[first]:
                continue
            group = [first + rank for rank in pattern]
            if group[-1] >= n_ranks or any(covered[rank] for rank in group):
                raise RuntimeError(f"groups like {pattern} do not cover {n_ranks} ranks")
            for rank in group:
                covered[rank] = True
            groups.append(group)
        found[pattern] = groups
    return found


def _level_of(group: Sequence[int], sizes: Sequence[int]) -> int:
    """The highest level of links that a group crosses. sizes: ranks below one node of each level."""
    for level, size in enumerate(sizes):
        if all(rank // size == group[0] // size for rank in group):
            return level
    return len(sizes)


def simulate(recorder: Recorder, cluster: Cluster, flops: Mapping[str, int]) -> SimulatedStep:
    """Runs the program in ``recorder`` on all ranks of ``cluster``. flops: of the products in a rank's step, by dtype.

    Raises ConfigError if the machine lacks a link or a rate that the step needs.
    """
    machine, n_ranks = cluster.machine, cluster.n_ranks
    tree = _Tree(cluster)
    groups_along = _families((each.ranks for each in recorder.transfers if each.ranks), n_ranks)
    axes = list(groups_along)
    groups: list[list[int]] = []
    group_of = [[-1] * len(axes) for _ in range(n_ranks)]
    for axis, pattern in enumerate(axes):
        for group in groups_along[pattern]:
            for rank in group:
                group_of[rank][axis] = len(groups)
            groups.append(group)
    actions = [(_KINDS[action.kind], action.value) for action in recorder.actions]
    transfers = [tree.transfer(each, axes) for each in recorder.transfers]
    slow = [round(cluster.slow.get(rank, 1.0) * _USUAL_PPM) for rank in range(n_ranks)]
    found: _C.PlanTimes = _C.plan_simulate(
        nodes=tree.nodes,
        ranks=[(tree.host_of(rank), 0, slow[rank], *tree.port, tree.copy) for rank in range(n_ranks)],
        programs=[(actions, transfers)],
        groups=groups,
        group_of=group_of,
        n_lanes=_N_LANES,
        shown=[0],
    )
    usages = found.ranks  # each access copies the list
    seconds_of_flops = sum(n / machine.flops[dtype] for dtype, n in flops.items())
    return SimulatedStep(
        found.makespan_ns / 1e9,
        tuple(usage.busy_ns / 1e9 for usage in usages),
        tuple(usage.waited_ns / 1e9 for usage in usages),
        _collectives(recorder.transfers, found.transfers[0], found.exposed_ns[0], tree),
        _spans(recorder, found.actions[0], found.transfers[0], tree),
        sum(flops.values()),
        seconds_of_flops,
        tree.bytes_by_link(usages, found.nodes),
    )


class _Tree:
    """The nodes of a cluster as the core takes them: the root first, hosts last."""

    def __init__(self, cluster: Cluster) -> None:
        machine, self._cluster = cluster.machine, cluster
        links = machine.links
        # Ranks below a node of each level: a host, a rack, and so on.
        self.sizes = [cluster.per_host]
        for link in links[1:]:
            below = link.n_below or math.ceil(cluster.n_ranks / self.sizes[-1])
            self.sizes.append(self.sizes[-1] * below)
        if cluster.n_ranks > 1 and not links:
            raise _no_link(machine, "ranks of a host")
        if cluster.n_hosts > 1 and len(links) < 2:
            raise _no_link(machine, "hosts")
        top = next((level for level, size in enumerate(self.sizes) if size >= cluster.n_ranks), len(self.sizes) - 1)
        if self.sizes[top] < cluster.n_ranks:
            raise _no_link(machine, f"groups of {self.sizes[top]} ranks")
        # A way between two ranks goes up and down: each port and link has half of the latency that its level adds.
        latencies = [0 if link.mode == PULL else link.latency_ns for link in links]
        self._latencies = [max(high - low, 0) // 2 for low, high in zip([0, *latencies], latencies)]
        self.port = (links[0].bytes_per_s, self._latencies[0]) if links else (0, 0)
        self.names = [link.name for link in links]
        self.nodes: list[tuple[int, ...]] = []
        begin = 0  # the first node of the level above
        for level in range(top, -1, -1):
            n_nodes = math.ceil(cluster.n_ranks / self.sizes[level])
            first = len(self.nodes)
            for i in range(n_nodes):
                parent = -1 if level == top else begin + i * self.sizes[level] // self.sizes[level + 1]
                self.nodes.append(self._node(machine, level, parent))
            begin = first
        self._hosts = begin
        self._levels = [
            level for level in range(top, -1, -1) for _ in range(math.ceil(cluster.n_ranks / self.sizes[level]))
        ]
        self.copy = round(machine.copy_bytes_per_s)

    def _node(self, machine: Machine, level: int, parent: int) -> tuple[int, ...]:
        links = machine.links
        up = links[level + 1] if level + 1 < len(links) else None
        below = links[level] if links else None
        pulls = level == 0 and below is not None and below.mode == PULL
        file = machine.file if level == 0 else None
        return (
            parent,
            0 if up is None or parent < 0 else up.bytes_per_s,
            0 if up is None or parent < 0 else self._latencies[level + 1],
            0 if below is None else below.inner_bytes_per_s,
            below.bytes_per_s if pulls else 0,
            below.latency_ns if pulls else 0,
            *((0, 0, 0) if file is None else (file.read_bytes_per_s, file.write_bytes_per_s, file.latency_ns)),
        )

    def host_of(self, rank: int) -> int:
        return self._hosts + rank // self._cluster.per_host

    def level_of(self, transfer: Transfer) -> int:
        """The highest level of links that the transfer crosses."""
        return _level_of(transfer.ranks, self.sizes)

    def link_of(self, transfer: Transfer) -> str:
        if not transfer.ranks:
            return "file"
        return self.names[self.level_of(transfer)]

    def transfer(self, transfer: Transfer, axes: Sequence[tuple[int, ...]]) -> tuple[int, int, int, int, int]:
        machine, op = self._cluster.machine, _SAME_AS.get(transfer.op, transfer.op)
        if op not in _C.PLAN_OPS:
            raise FeatureError(f"{op} is not simulated", where=transfer.label, fix="simulate a run without it")
        if not transfer.ranks:
            if machine.file is None:
                raise ConfigError(
                    "has no rates of a file, and the step reads or writes one",
                    where=f"machine {machine.name}: file",
                    fix="add read_bytes_per_s, write_bytes_per_s and latency_ns",
                )
            return _C.PLAN_OPS[op], 0, _FILE, 0, transfer.n_bytes
        flags = 0
        if machine.links[0].mode == PULL:
            if self.level_of(transfer) == 0:
                flags = _C.PLAN_PULL
            elif op in _IN_TWO_LEVELS:
                flags = _C.PLAN_TWO_LEVELS
        return _C.PLAN_OPS[op], axes.index(transfer.ranks), _NETWORK, flags, transfer.n_bytes

    def bytes_by_link(self, usages: Sequence[_C.PlanUsage], nodes: Sequence[_C.PlanTraffic]) -> dict[str, int]:
        """Bytes that cross each level of links, counted where they enter it, and bytes of files."""
        by_link = dict.fromkeys(self.names, 0)
        pulls = bool(self.names) and self._cluster.machine.links[0].mode == PULL
        for usage in [] if pulls or not self.names else usages:
            by_link[self.names[0]] += usage.up_bytes
        for level, node in zip(self._levels, nodes):
            if level + 1 < len(self.names):
                by_link[self.names[level + 1]] += node.up_bytes
            if level == 0 and pulls:
                by_link[self.names[0]] += node.inner_bytes
            if node.read_bytes + node.written_bytes:
                by_link["file"] = by_link.get("file", 0) + node.read_bytes + node.written_bytes
        return by_link


def _no_link(machine: Machine, what: str) -> ConfigError:
    return ConfigError(
        f"has no link between {what}", where=f"machine {machine.name}: links", fix="add it, or simulate fewer ranks"
    )


def _collectives(
    transfers: Sequence[Transfer], spans: Sequence[tuple[int, int]], exposed_ns: Sequence[int], tree: _Tree
) -> tuple[CollectiveTime, ...]:
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for transfer, (begin, end), exposed in zip(transfers, spans, exposed_ns, strict=True):
        key = transfer.op, transfer.axis, tree.link_of(transfer), transfer.phase
        sums = found.setdefault(key, [0, 0, 0.0, 0.0])
        for i, more in enumerate((1, transfer.n_bytes, max(end - begin, 0) / 1e9, exposed / 1e9)):
            sums[i] += more
    return tuple(CollectiveTime(*key, int(sums[0]), int(sums[1]), *sums[2:]) for key, sums in found.items())


def _spans(
    recorder: Recorder, actions: Sequence[tuple[int, int]], transfers: Sequence[tuple[int, int]], tree: _Tree
) -> tuple[Span, ...]:
    found = []
    for action, (begin, end) in zip(recorder.actions, actions, strict=True):
        if end > begin:
            found.append(Span("compute" if action.kind == RUN else "wait", action.label, begin, end))
    for transfer, (begin, end) in zip(recorder.transfers, transfers, strict=True):
        if end > begin:
            found.append(Span(tree.link_of(transfer), f"{transfer.op} of {transfer.label}".strip(), begin, end))
    return tuple(found)
