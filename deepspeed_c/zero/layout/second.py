"""Groups of ranks that keep second shards together (``zero_hpz_partition_size``, hpZ of ZeRO++).

The ranks that share the weights are taken host by host and cut into groups of n, so that a group lies on one host. The
near ranks of a unit are the ranks of its shards that are in one such group. Experts on other ranks hold other weights,
so they may have fewer near ranks than n, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from deepspeed_c.comm.axes import SHARDS
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config.zero import Zero
from deepspeed_c.errors import ConfigError
from deepspeed_c.logging import log_dist
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.weights.sources.second import NearRanks

__all__ = ["SecondGroups", "second_groups"]

_KEY = "zero_optimization.zero_hpz_partition_size"


class SecondGroups:
    """The groups of ranks that keep second shards together.

    groups: ranks of ``mesh.comm``, ascending in each group. n_host: how many ranks of each host share the weights.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[Sequence[int]], n_host: int) -> None:
        self._mesh, self._groups, self._n_host = mesh, groups, n_host
        mesh.connect_near(next(group for group in groups if mesh.comm.rank in group))
        self.near_of = cache(self._find)
        """(unit) -> the ranks that keep its second shards, or None. Collective at the first call for a unit."""

    def _find(self, unit: Unit) -> NearRanks | None:
        places = {rank: i for i, rank in enumerate(self._mesh.comm.global_ranks)}
        ranks = {places[rank] for rank in unit.comm.global_ranks}
        parts = [part for group in self._groups if (part := [rank for rank in group if rank in ranks])]
        n = len(parts[0])
        if len(parts) == 1 or n == 1 or any(len(part) != n for part in parts):
            return None
        mine = next(part for part in parts if self._mesh.comm.rank in part)
        near = self._mesh.connected(mine, "hpz")
        if near.why_not_joint(unit.device):
            return NearRanks(near, None)
        return NearRanks(near, near.join([unit.bucket_bytes(bucket) for bucket in range(unit.n_buckets)]))

    def tell(self, units: Sequence[Unit]) -> None:
        """Logs on rank 0 what second shards of ``units`` cost and save."""
        found = [(unit, near) for unit in units if (near := self.near_of(unit)) is not None]
        if not found:
            return
        whole = [sum(unit.bucket_bytes(bucket) for bucket in range(unit.n_buckets)) for unit, _ in found]
        kept = sum(n_bytes // near.comm.world_size for n_bytes, (_, near) in zip(whole, found))
        n_ranks, n_group = sum(map(len, self._groups)), len(self._groups[0])
        n_hosts, n_spanned = n_ranks // self._n_host, max(n_group // self._n_host, 1)
        first, further = (sum(whole) * (n - 1) / n / 2**20 for n in (n_hosts, n_spanned))
        log_dist(
            f"hpZ: {n_ranks // n_group} groups of {n_group} ranks keep second shards of {kept / 2**20:.1f} MiB on each"
            f" rank. Until the weights change, each gather after the first brings {further:.1f} MiB to a host instead of"
            f" {first:.1f} MiB",
            ranks=[0],
        )


def second_groups(zero: Zero, mesh: Mesh, *, is_joint: bool) -> SecondGroups | None:
    """The groups that the configuration asks for; None where it asks for none, or where no gather would become shorter.
    is_joint: all ranks read the weights in joint memory.

    Collective. Raises ConfigError on all ranks if ``zero_hpz_partition_size`` does not fit the ranks and their hosts.
    """
    n = zero.zero_hpz_partition_size
    if n <= 1:
        return None
    sharing = set(mesh.ranks(*SHARDS))
    by_host = [part for host in mesh.comm.by_host if (part := [rank for rank in host if rank in sharing])]
    found = _why_refused(n, [len(part) for part in by_host], is_joint=is_joint)
    # Along other axes of the mesh the hosts may hold other numbers of ranks.
    refusal = next((each for each in mesh.comm.gather_objects(found, label="hpZ") if each is not None), None)
    if refusal is not None:
        what, fix = refusal
        raise ConfigError(what, where=_KEY, fix=fix)
    if len(by_host) == 1 or n == len(sharing):
        why = "on one host" if len(by_host) == 1 else f"in one group of {n}"
        log_dist(
            f'"zero_hpz_partition_size": {n} has no effect: all {len(sharing)} ranks that share the weights are {why},'
            " so no gather would become shorter; no second shards are kept",
            ranks=[0],
        )
        return None
    n_host = len(by_host[0])
    if n > n_host:
        log_dist(
            f'"zero_hpz_partition_size": {n}: a group spans {n // n_host} hosts of {n_host} ranks, so that gathers within'
            f" it cross the link between them; with {n_host} none would",
            ranks=[0],
            level=logging.WARNING,
        )
    ordered = [rank for part in by_host for rank in part]
    return SecondGroups(mesh, [sorted(ordered[i : i + n]) for i in range(0, len(ordered), n)], n_host)


def _why_refused(n: int, per_host: Sequence[int], *, is_joint: bool) -> tuple[str, str] | None:
    """(what is wrong, the fix); None if groups of ``n`` fit. per_host: numbers of ranks that share the weights."""
    n_ranks = sum(per_host)
    if is_joint:
        return (
            f'is {n}, and "comm": {{"zero_copy_gather": true}} holds the weights once for all {n_ranks} ranks already',
            "set one of them: the size to 1, or zero_copy_gather to false",
        )
    if n_ranks % n:
        return (
            f"is {n}, which does not divide the {n_ranks} ranks that share the weights",
            f"use a divisor of {n_ranks}",
        )
    if len(set(per_host)) > 1:
        return (
            f"is {n}, and the hosts have {min(per_host)} to {max(per_host)} of the ranks that share the weights",
            "start equally many ranks on each host, or set the size to 1",
        )
    if n % per_host[0] and per_host[0] % n:
        return (
            f"is {n}, and each host has {per_host[0]} of the ranks that share the weights",
            f"use {per_host[0]}, or a divisor of it",
        )
    return None
