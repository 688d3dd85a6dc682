"""The ranks of an engine as a grid of named axes, and the group of ranks along any of them.

A rank has one place on each axis. Ranks that differ on the data-parallel axes only see different samples and train the
same parameters. ``zero/layout/layout.py`` decides for each parameter over which of these axes its states are cut, and
over which its gradient is summed besides.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.groups import timeout_of
from deepspeed_c.errors import CommError, FeatureError

__all__ = ["AXES", "DATA", "Mesh", "mesh_of_device_mesh", "mesh_of_mpu", "refuse_later_axes"]

# From the outermost to the innermost: ranks of the last axis are neighbours. dp_shard and dp_replicate together are
# data parallelism: shards of one copy lie along the first, copies along the second (MiCS, arXiv 2205.00119; HSDP of
# PyTorch, arXiv 2304.11277).
AXES = ("pp", "dp_replicate", "dp_shard", "ep", "sp", "tp")
DATA = ("dp_replicate", "dp_shard")

_LATER = {
    "pp": "pipeline parallelism",
    "ep": "expert parallelism",
    "sp": "sequence parallelism",
    "tp": "tensor parallelism",
}

# What the dimensions of a DeviceMesh are called elsewhere.
_ALIASES = {
    **{axis: axis for axis in AXES},
    **dict.fromkeys(("dp", "data", "data_parallel", "fsdp", "shard"), "dp_shard"),
    **dict.fromkeys(("replicate", "ddp"), "dp_replicate"),
    **dict.fromkeys(("cp", "sequence_parallel", "context_parallel"), "sp"),
    **dict.fromkeys(("mp", "tensor_parallel", "model_parallel"), "tp"),
    **dict.fromkeys(("pipe", "pipeline_parallel"), "pp"),
    "expert_parallel": "ep",
}

# How an mpu is asked for the size of an axis. Megatron's model-parallel size is that of its tensor-parallel groups.
_MPU_GETTERS = {
    "get_model_parallel_world_size": "tp",
    "get_tensor_model_parallel_world_size": "tp",
    "get_slice_parallel_world_size": "tp",
    "get_sequence_parallel_world_size": "sp",
    "get_context_parallel_world_size": "sp",
    "get_pipeline_model_parallel_world_size": "pp",
    "get_pipe_parallel_world_size": "pp",
}

Connect = Callable[[Sequence[int], Sequence[str]], Any]


class Mesh:
    """The ranks of ``comm``, laid out on ``AXES``.

    ``sizes`` are those of the axes, 1 where an axis is left out; by default all ranks lie along ``dp_shard``. ``grid``
    says which rank of ``comm`` is where ([size of each of AXES], int64): by default they are counted along the last
    axis first. ``connect`` makes the group of some ranks of ``comm`` along some axes, by default a new one of
    ``torch.distributed``; it is called for the same axes in the same order on all ranks.

    Raises CommError where sizes and ranks do not fit.
    """

    def __init__(
        self,
        comm: Collectives,
        sizes: Mapping[str, int] | None = None,
        *,
        grid: torch.Tensor | None = None,
        connect: Connect | None = None,
    ) -> None:
        sizes = {"dp_shard": comm.world_size} if sizes is None else sizes
        unknown = [axis for axis in sizes if axis not in AXES]
        if unknown or math.prod(sizes.values()) != comm.world_size or min(sizes.values(), default=1) < 1:
            raise CommError(
                f"axes {dict(sizes)} do not fit {comm.world_size} ranks"
                if not unknown
                else f"there is no axis {unknown[0]!r}",
                where="mesh",
                fix=f"name axes of {', '.join(AXES)} whose sizes multiply to {comm.world_size}",
            )
        self.comm = comm
        """All ranks of the mesh."""
        self.axes: dict[str, int] = {axis: sizes.get(axis, 1) for axis in AXES}
        """Size by axis."""
        shape = tuple(self.axes.values())
        self._grid = torch.arange(comm.world_size).view(shape) if grid is None else grid.view(shape)
        places = (self._grid == comm.rank).nonzero()
        if len(places) != 1:
            raise CommError(
                f"rank {comm.rank} has {len(places)} places on the mesh",
                where="mesh",
                fix="give each rank one place",
            )
        self._place = dict(zip(AXES, places[0].tolist()))
        self._connect = connect
        self._groups: dict[tuple[int, ...], Collectives] = {}
        self._forget_groups()

    @property
    def wide_axes(self) -> dict[str, int]:
        """The axes of more than one rank, and their sizes."""
        return {axis: size for axis, size in self.axes.items() if size > 1}

    def size(self, *axes: str) -> int:
        """How many ranks lie along ``axes`` together."""
        return math.prod(self.axes[axis] for axis in axes)

    def ranks(self, *axes: str) -> list[int]:
        """The ranks of ``comm`` that differ from this one on ``axes`` at most, in ascending order, as
        ``torch.distributed`` numbers the ranks of a group.
        """
        at = tuple(slice(None) if axis in axes else self._place[axis] for axis in AXES)
        return sorted(self._grid[at].reshape(-1).tolist())

    def index(self, *axes: str) -> int:
        """This rank's number among those."""
        return self.ranks(*axes).index(self.comm.rank)

    def along(self, *axes: str) -> Collectives:
        """The collectives of the ranks along ``axes``.

        Collective where they are asked for the first time: all ranks ask in the same order.
        """
        ranks = tuple(self.ranks(*axes))
        found = self._groups.get(ranks)
        if found is None:
            found = self._groups[ranks] = (self._connect or self._new_group)(ranks, axes)
        return found

    def _new_group(self, ranks: Sequence[int], axes: Sequence[str]) -> Collectives:
        if len(ranks) == 1:
            return self.comm.alone()
        group = _shared_group(tuple(self.comm.global_ranks[rank] for rank in ranks), self.comm.group)
        wide = [axis for axis in AXES if axis in axes and self.axes[axis] > 1]
        return self.comm.part(group, " x ".join(wide))

    def enter_phase(self, phase: str) -> None:
        """What the ledgers of all groups note beside the collectives that follow: "forward", "backward", "step" or "".
        """
        for part in self._groups.values():
            if part.world_size > 1:
                part.ledger.phase = phase

    def split_data(self, n_shards: int) -> Mesh:
        """The same ranks with ``n_shards`` neighbours along dp_shard, and the copies of what they hold along
        dp_replicate.

        Raises CommError where the data-parallel ranks cannot be cut so, or have been cut already.
        """
        n_data, is_cut = self.size(*DATA), self.size("dp_replicate") > 1
        if n_shards < 1 or n_data % n_shards or is_cut:
            raise CommError(
                f"{n_data} data-parallel ranks cannot be cut into groups of {n_shards}: the mesh has {self}",
                where="mesh",
                fix=f"use a divisor of {n_data}" + (", or leave it out: the mesh says it" if is_cut else ""),
            )
        sizes = {**self.axes, "dp_replicate": n_data // n_shards, "dp_shard": n_shards}
        return Mesh(self.comm, sizes, grid=self._grid.reshape(tuple(sizes.values())), connect=self._connect)

    def to_device_mesh(self, device_type: str = "cpu") -> Any:
        """The axes of more than one rank as a ``DeviceMesh`` (one of one dimension, dp_shard, where there is none).

        Collective: it makes groups of its own.
        """
        from torch.distributed.device_mesh import DeviceMesh

        names = list(self.wide_axes) or ["dp_shard"]
        ranks = torch.tensor(self.comm.global_ranks)[self._grid].view([self.axes[name] for name in names])
        return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names))

    def close(self) -> None:
        """Frees the buffers of all groups. A group ends when no sharded parameter needs it any more."""
        for part in self._groups.values():
            part.close()
        self._forget_groups()

    def _forget_groups(self) -> None:
        self._groups = {tuple(range(self.comm.world_size)): self.comm}

    def __str__(self) -> str:
        """``dp_replicate 2 x dp_shard 4``; axes of one rank are left out."""
        return " x ".join(f"{axis} {size}" for axis, size in self.wide_axes.items()) or "1 rank"


# Groups of some ranks of a world, as long as that world is there. An engine takes the groups of an earlier engine, as
# all engines take the world's. There is one for each set of ranks. Sharded parameters that outlive their engine still
# need theirs.
_groups: weakref.WeakKeyDictionary[Any, dict[tuple, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def _shared_group(ranks: tuple[int, ...], like: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group of these global ranks with the backend and the timeout of ``like``."""
    backend, timeout = dist.get_backend_config(like), timeout_of(like)
    known = _groups.setdefault(dist.group.WORLD, {})
    group = known.get((ranks, backend, timeout))
    if group is None:
        # Other ranks do not come here: each makes the one that it is in.
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
        known[ranks, backend, timeout] = group
    return group


def mesh_of_device_mesh(device_mesh: Any) -> Mesh:
    """The ranks of a ``torch.distributed.device_mesh.DeviceMesh`` on the axes that its dimensions are named for.

    Collective.

    Raises CommError where a dimension has no name, or one that is no axis.
    """
    names = [_ALIASES.get(name) for name in device_mesh.mesh_dim_names or ()]
    if not names or None in names or len(set(names)) < len(names):
        raise CommError(
            f"the dimensions of the device mesh are named {device_mesh.mesh_dim_names}",
            where="initialize(mesh_device=...)",
            fix=f"name each dimension for another axis: {', '.join(AXES)}",
        )
    grid = device_mesh.mesh.cpu()
    ranks = sorted(grid.reshape(-1).tolist())
    is_world = len(ranks) == dist.get_world_size()
    group = None if is_world else _shared_group(tuple(ranks), None)
    order = sorted(range(len(names)), key=lambda i: AXES.index(names[i]))
    places = torch.searchsorted(torch.tensor(ranks), grid.permute(order).contiguous())
    return Mesh(Collectives(group), {names[i]: grid.shape[i] for i in order}, grid=places)


def mesh_of_mpu(mpu: Any) -> Mesh:
    """The data-parallel ranks of an object with ``get_data_parallel_group()``.

    Raises FeatureError where it has ranks of another kind.
    """
    sizes: dict[str, int] = {}
    for getter, axis in _MPU_GETTERS.items():
        sizes[axis] = max(sizes.get(axis, 1), getattr(mpu, getter, lambda: 1)())
    refuse_later_axes(sizes, "initialize(mpu=...)")
    return Mesh(Collectives(mpu.get_data_parallel_group()))


def refuse_later_axes(sizes: Mapping[str, int], where: str) -> None:
    """The one place that says which axes may have more than one rank. Raises FeatureError, which names the axis."""
    for axis, what in _LATER.items():
        if sizes.get(axis, 1) != 1:
            raise FeatureError(
                f"axis {axis!r} has {sizes[axis]} ranks: {what} is not part of this version",
                where=where,
                fix="use data parallelism only (dp_shard, dp_replicate)",
            )
