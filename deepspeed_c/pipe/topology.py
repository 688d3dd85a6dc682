"""Ranks as a grid with named axes, under DeepSpeed's names. The classes are views of the engine's mesh
(``comm/mesh.py``).
"""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c.comm.axes import AXES, DATA, DP_SHARD, PP, TP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import CommError

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "cut_over_tensors",
    "mesh_of_topology",
]

_WHERE = "ProcessTopology"
# DeepSpeed's axes -> axes of a mesh.
_AXES = {"pipe": PP, "data": DP_SHARD, "model": TP}


class ProcessTopology:
    """Ranks on a grid. ``axes`` are named from the outermost to the innermost, and ``dims`` are their sizes. Ranks
    along the last axis are neighbours.

    Raises CommError (a RuntimeError) for invalid axes.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        if len(self.axes) != len(self.dims) or len(set(self.axes)) < len(self.axes) or min(self.dims, default=1) < 1:
            raise CommError(
                f"axes {self.axes} with sizes {self.dims}",
                where=_WHERE,
                fix="give each axis a name of its own and a size >= 1",
            )
        self.ProcessCoord = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        places = itertools.product(*(range(dim) for dim in self.dims))
        self.mapping = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}
        """Rank by coordinate."""
        self._coords = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a coordinate. The coordinate has to name every axis."""
        if sorted(coord_kwargs) != sorted(self.axes):
            raise ValueError(f"get_rank() needs every axis of {self.axes}, not {sorted(coord_kwargs)}")
        key = self.ProcessCoord(**coord_kwargs)
        if key not in self.mapping:
            raise ValueError(f"there is no rank at {key}; the sizes are {self.dims}")
        return self.mapping[key]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """``model_00``: each axis that is not in ``omit_axes``, with the rank's place on it."""
        axes = [axis for axis in self.axes if axis not in frozenset(omit_axes)]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(self.get_coord(rank), axis):02d}" for axis in axes)

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 if it does not exist."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinate of a rank, as a named tuple."""
        if not 0 <= rank < len(self._coords):
            raise ValueError(f"there is no rank {rank} in a topology of {len(self._coords)}")
        return self._coords[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The lists of ranks that differ only on ``axis``; an empty list if there is no such axis."""
        if axis not in self.axes:
            return []
        others = [other for other in self.axes if other != axis]
        lists: dict[tuple[int, ...], list[int]] = {}
        for coord, rank in self.mapping.items():
            lists.setdefault(tuple(getattr(coord, other) for other in others), []).append(rank)
        return list(lists.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks whose places on the given axes are the given ones."""
        wanted = filter_kwargs.items()
        return [rank for coord, rank in self.mapping.items() if all(getattr(coord, axis) == at for axis, at in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at place ``idx`` of ``axis``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Several pipelines beside one another. Ranks that hold the same stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipelines and data parallelism as in ``PipeDataParallelTopology``, with tensor-parallel ranks innermost."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def mesh_of_topology(topology: ProcessTopology, comm: Collectives) -> Mesh:
    """The mesh with the axes of a topology. Raises CommError where the topology does not have all ranks, or has an axis
    that a mesh does not have."""
    unknown = [axis for axis in topology.axes if axis not in _AXES]
    if unknown or topology.world_size() != comm.world_size:
        raise CommError(
            f"the topology has an axis {unknown[0]!r}"
            if unknown
            else f"the topology has {topology.world_size()} ranks, the job {comm.world_size}",
            where="PipelineModule(topology=...)",
            fix=f"name axes of {', '.join(_AXES)} whose sizes multiply to {comm.world_size}",
        )
    sizes = {_AXES[axis]: topology.get_dim(axis) for axis in topology.axes}
    # A topology may name its axes in another order than the mesh, which moves ranks to other places.
    order = sorted(range(len(sizes)), key=lambda i: AXES.index(_AXES[topology.axes[i]]))
    grid = torch.arange(comm.world_size).view(topology.dims).permute(order).contiguous()
    return Mesh(comm, sizes, grid=grid)


def cut_over_tensors(topology: ProcessTopology, n_ranks: int) -> ProcessTopology:
    """The topology in which ``n_ranks`` neighbours along "data" lie along "model" instead, as in
    ``Mesh.split_tensors``."""
    axes, dims = list(topology.axes), list(topology.dims)
    if "data" not in axes:
        axes, dims = [*axes, "data"], [*dims, 1]
    if "model" in axes:  # of size 1
        del dims[axes.index("model")], axes[axes.index("model")]
    at = axes.index("data")
    axes.insert(at + 1, "model")
    dims[at : at + 1] = [dims[at] // n_ranks, n_ranks]
    return ProcessTopology(axes, dims)


class PipelineParallelGrid:
    """This rank's place among stages, copies of the model, and parts of a layer, with Megatron's methods (an ``mpu``).

    ``mesh``: the engine's mesh; by default the mesh of ``topology``, or without it a mesh over ``process_group`` with
    one stage.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: Any = None, *, mesh: Mesh | None = None
    ) -> None:
        comm = Collectives(process_group) if mesh is None else mesh.comm
        self._topo = PipeDataParallelTopology(1, comm.world_size) if topology is None else topology
        self._mesh = mesh_of_topology(self._topo, comm) if mesh is None else mesh
        self.global_rank, self.world_size = comm.global_rank, comm.world_size
        self.pipe_parallel_size = self._mesh.size(PP)
        self.data_parallel_size = self._mesh.size(*DATA)
        self.model_parallel_size = self.slice_parallel_size = self._mesh.size(TP)
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_stage_id(self) -> int:
        """This rank's position along the pipeline."""
        return self._mesh.index(PP)

    get_pipe_parallel_rank = get_stage_id

    def get_data_parallel_id(self) -> int:
        """The number of the copy of the model to which this rank belongs."""
        return self._mesh.index(*DATA)

    get_data_parallel_rank = get_data_parallel_id

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The global rank with ``stage_id``. Its other coordinates are in ``kwargs``, or are this rank's."""
        me = self._topo.get_coord(self._mesh.comm.rank)
        rank = self._topo.get_rank(**{**me._replace(pipe=stage_id)._asdict(), **kwargs})
        return self._mesh.comm.global_ranks[rank]

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the stages of one model. Collective at the first call."""
        return self._mesh.pipeline.group

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold copies of this rank's part of the model. Collective at the first call."""
        return self._mesh.data.group

    def get_model_parallel_rank(self) -> int:
        """This rank's number among the ranks that cut this stage's layers."""
        return self._mesh.index(TP)

    get_slice_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        return self.model_parallel_size

    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that cut this stage's layers. Collective at the first call."""
        return self._mesh.tensors.group

    get_slice_parallel_group = get_tensor_model_parallel_group = get_model_parallel_group
