"""The ranks that this rank works with, under the names of ``deepspeed.utils.groups``.

The answers come from the newest mesh (``comm/mesh.py``) of the process: ``deepspeed_c.initialize`` sets it, or
``initialize`` here. An engine never asks: it has its own. Without one all ranks are data-parallel. A group of ranks
that this version does not make is an error.
"""

from __future__ import annotations

from typing import Any

from deepspeed_c import comm
from deepspeed_c.comm.axes import DATA, EP, SP, TOKENS, TP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh, mesh_of_mpu
from deepspeed_c.errors import StateError
from deepspeed_c.zero.layout.experts import connect_holders, holders_of

__all__ = [
    "create_expert_groups",
    "expert_ranks",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
]

# Other code (Megatron's, accelerate's) asks without an engine at hand.
_told: list[Mesh] = []
# Name of the groups of experts -> the number of ranks that these experts are spread over.
_expert_sizes: dict[str, int] = {}


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Tells what to answer from: ``mpu`` is an object with ``get_data_parallel_group()`` and its kin, None for all
    ranks. With more than one rank in ``ep_size``, also makes the groups of experts that are spread over so many ranks.

    Raises CommError where ``ep_size`` does not divide the ranks.
    """
    set_mesh(None if mpu is None else mesh_of_mpu(mpu))
    if ep_size != 1:
        create_expert_groups(ep_size)


def set_mesh(mesh: Mesh | None) -> None:
    """From now on answers come from ``mesh``; None: all ranks are data-parallel. No groups of experts are known yet."""
    _told[:] = [] if mesh is None else [mesh]
    _expert_sizes.clear()


def _size(axis: str) -> int:
    return _told[0].size(axis) if _told else 1


def _rank(axis: str) -> int:
    return _told[0].index(axis) if _told else 0


def get_data_parallel_group() -> Any:
    """The ranks that hold copies, or shards, of the same model."""
    return _told[0].process_group(*DATA) if _told else comm.get_world_group()


def get_data_parallel_world_size() -> int:
    return comm.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    return comm.get_rank(get_data_parallel_group())


def _get_data_parallel_group_ranks() -> list[int]:
    return comm.get_all_ranks_from_group(get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    """The global rank of the data-parallel rank 0."""
    return comm.get_global_rank(get_data_parallel_group(), 0)


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank


def _get_sequence_data_parallel_group() -> Any:
    """The ranks that train the same parameters on other samples, or on other parts of the same."""
    return _told[0].process_group(*TOKENS) if _told else comm.get_world_group()


def _get_sequence_data_parallel_world_size() -> int:
    return comm.get_world_size(_get_sequence_data_parallel_group())


def _get_sequence_data_parallel_rank() -> int:
    return comm.get_rank(_get_sequence_data_parallel_group())


def _get_zero_param_intra_parallel_group() -> Any:
    """The ranks that keep second shards of weights together (hpZ); None without them."""
    near = _told[0].near if _told else None
    return None if near is None else near.group


def _get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    """This rank's number in that group; without second shards, among all ranks."""
    return comm.get_rank(_get_zero_param_intra_parallel_group())


def _get_zero_param_intra_parallel_group_world_size() -> int:
    return comm.get_world_size(_get_zero_param_intra_parallel_group())


def _get_zero_param_intra_parallel_group_ranks() -> list[int]:
    return comm.get_all_ranks_from_group(_get_zero_param_intra_parallel_group())


def get_tensor_model_parallel_world_size() -> int:
    return _size(TP)


def get_tensor_model_parallel_rank() -> int:
    return _rank(TP)


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first of them."""
    return _told[0].tensors.global_ranks[0] if _told else comm.get_rank()


def get_tensor_model_parallel_group() -> Any:
    """The ranks that hold a model together. Raises StateError where it is one rank: there is no group of it."""
    if _size(TP) == 1:
        raise StateError(
            "models are not cut over ranks, and there is no group of one rank",
            where="groups.get_tensor_model_parallel_group",
            fix='make an engine with "tensor_parallel": {"autotp_size": ...}, or with an mpu, before',
        )
    return _told[0].process_group(TP)


def _require_same(what: str, given: int, actual: int) -> None:
    if given != actual:
        raise StateError(
            f"{given} is not the {what}, which is {actual}",
            where=f"groups.set_tensor_model_parallel_{what.replace(' ', '_')}",
            fix='say it to deepspeed_c.initialize: "tensor_parallel": {"autotp_size": ...}, or an mpu',
        )


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Raises StateError unless it is the mesh's present value, which nobody may change."""
    _require_same("world size", world_size, _size(TP))


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Raises StateError unless it is the mesh's present value."""
    _require_same("rank", rank, _rank(TP))


get_model_parallel_group = get_tensor_model_parallel_group


def _get_sequence_parallel_group() -> Any:
    """The ranks that hold parts of the same sequences. Raises StateError where it is one rank: there is no group of it."""
    if _size(SP) == 1:
        raise StateError(
            "sequences are not cut over ranks, and there is no group of one rank",
            where="groups._get_sequence_parallel_group",
            fix='make an engine with "sequence_parallel_size", or with an mpu that has sequence-parallel ranks, before',
        )
    return _told[0].process_group(SP)


get_model_parallel_world_size = _get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank


def _get_sequence_parallel_world_size() -> int:
    return _size(SP)


def _get_sequence_parallel_rank() -> int:
    return _rank(SP)


def create_expert_groups(n_ranks: int, *, data_first: bool = False) -> None:
    """Makes the groups of experts that are spread over ``n_ranks`` ranks, if they have not been made. ``data_first``
    (``use_data_before_expert_parallelism``) counts where no engine and no earlier call has said it.

    Collective. Raises CommError where the number does not divide the ranks.
    """
    if not _told:
        comm = Collectives()
        comm.use_shared_memory("auto")
        mesh = Mesh(comm)
        mesh.place_experts(data_first=data_first)
        _told.append(mesh)
    connect_holders(_told[0], n_ranks)
    _expert_sizes[f"ep_size_{n_ranks}"] = n_ranks


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    create_expert_groups(expert_parallel_size_, data_first=use_data_before_expert_parallel_)


def expert_ranks(group_name: str) -> Collectives:
    """The ranks that together hold the experts of the groups ``group_name``. Raises StateError where there are none of
    that name."""
    return _experts(group_name).along(EP)


def _expert_data_ranks(group_name: str) -> Collectives:
    """The ranks that hold the same experts as this rank."""
    _experts(group_name)
    return holders_of(_told[0], _expert_sizes[group_name])


def _experts(group_name: str) -> Mesh:
    if group_name not in _expert_sizes:
        raise StateError(
            f"there are no groups of experts named {group_name!r}; there are {sorted(_expert_sizes)}",
            where="groups._get_expert_parallel_group",
            fix="make an engine of the model with experts before, or call layer.set_deepspeed_parallelism()",
        )
    return _told[0].with_experts(_expert_sizes[group_name])


def _get_expert_parallel_group(group_name: str) -> Any:
    """The ranks that together hold the experts. ``group_name``: "ep_size_N" for experts spread over N ranks."""
    return _experts(group_name).process_group(EP)


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    return list(expert_ranks(group_name).global_ranks)


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {name: _get_expert_parallel_group(name) for name in _expert_sizes}


def _get_expert_parallel_world_size(group_name: str) -> int:
    return expert_ranks(group_name).world_size


def _get_expert_parallel_rank(group_name: str) -> int:
    return expert_ranks(group_name).rank


def _get_expert_parallel_src_rank(group_name: str) -> int:
    """The global rank of the first of the ranks that together hold the experts."""
    return expert_ranks(group_name).global_ranks[0]


def _get_expert_data_parallel_group(group_name: str) -> Any:
    """The ranks that hold the same experts."""
    axes = (axis for axis in TOKENS if axis != EP)
    return _experts(group_name).process_group(*axes)


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    return list(_expert_data_ranks(group_name).global_ranks)


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    return {name: _get_expert_data_parallel_group(name) for name in _expert_sizes}


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _expert_data_ranks(group_name).world_size


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _expert_data_ranks(group_name).rank


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """The global rank of the first of the ranks that hold the same experts."""
    return _expert_data_ranks(group_name).global_ranks[0]


def _get_max_expert_size() -> int | None:
    """The largest number of ranks that experts are spread over; None where there are no groups of experts."""
    return max(_expert_sizes.values(), default=None)


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    """1: no expert is cut over tensor-parallel ranks."""
    return 1
