"""Who this rank works with, under the names of ``deepspeed.utils.groups``.

Ranks are data-parallel in this version: there is one group of them, or that of the ``mpu`` which ``deepspeed_c.initialize`` was given. A tensor, sequence or
model-parallel size is 1 wherever it is asked for, and a group of such ranks is an error.
"""

from __future__ import annotations

from typing import Any

from deepspeed_c import comm
from deepspeed_c.errors import FeatureError

__all__ = [
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

# What the process was told last; other code (Megatron's, accelerate's) asks for it without an engine at hand.
mpu: Any = None


def _later(what: str, where: str) -> FeatureError:
    return FeatureError(
        f"{what} parallelism is not part of this version", where=f"groups.{where}", fix="use data parallelism"
    )


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Tells what to answer from: ``mpu`` is an object with ``get_data_parallel_group()`` and its kin, None for all ranks.

    Raises FeatureError unless ``ep_size`` is 1.
    """
    if ep_size != 1:
        raise _later("expert", "initialize(ep_size=...)")
    globals()["mpu"] = mpu


# -- data parallelism -------------------------------------------------------------------------------------------------


def get_data_parallel_group() -> Any:
    """The ranks that hold copies, or shards, of the same model."""
    return comm.get_world_group() if mpu is None else mpu.get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    return comm.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    return comm.get_rank(get_data_parallel_group())


def _get_data_parallel_group_ranks() -> list[int]:
    return comm.get_all_ranks_from_group(get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    """The global rank of the data-parallel rank 0."""
    return comm.get_global_rank(get_data_parallel_group(), 0)


# Without sequence parallelism these are the same ranks.
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank


# -- parallelism of other kinds: one rank each ------------------------------------------------------------------------


def get_tensor_model_parallel_world_size() -> int:
    return 1


def get_tensor_model_parallel_rank() -> int:
    return 0


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first of them: this one."""
    return comm.get_rank()


def get_tensor_model_parallel_group() -> Any:
    """Raises FeatureError: there is no group of one rank."""
    raise _later("tensor", "get_tensor_model_parallel_group")


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Raises FeatureError unless it is 1."""
    if world_size != 1:
        raise _later("tensor", "set_tensor_model_parallel_world_size")


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Raises FeatureError unless it is 0."""
    if rank != 0:
        raise _later("tensor", "set_tensor_model_parallel_rank")


def get_model_parallel_group() -> Any:
    """Raises FeatureError."""
    raise _later("model", "get_model_parallel_group")


def _get_sequence_parallel_group() -> Any:
    """Raises FeatureError."""
    raise _later("sequence", "_get_sequence_parallel_group")


get_model_parallel_world_size = _get_model_parallel_world_size = get_tensor_model_parallel_world_size
_get_sequence_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = _get_sequence_parallel_rank = get_tensor_model_parallel_rank
