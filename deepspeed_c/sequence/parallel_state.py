"""Groups of ranks that share a sequence, with the names of ``deepspeed.runtime.sequence_parallel.parallel_state_sp``.
The module can be used as an mpu.

Ranks that share a sequence are neighbours. Each default process group has one division into such groups, which ends
with the default group.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from deepspeed_c.comm.axes import DP_SHARD, SP, TOKENS
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.groups import require_initialized
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import ConfigError, StateError

__all__ = [
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]

_arranged: weakref.WeakKeyDictionary[dist.ProcessGroup, Mesh] = weakref.WeakKeyDictionary()


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Let ``sequence_parallel_size`` neighbouring ranks share each sequence. The call may be repeated for another
    model.

    Collective. Raises ConfigError for a number that does not divide the ranks, and StateError if an earlier call gave
    another number."""
    require_initialized("initialize_sequence_parallel")
    n_ranks, world = sequence_parallel_size, dist.get_world_size()
    if n_ranks < 2 or world % n_ranks:
        divisors = [n for n in range(2, world + 1) if world % n == 0]
        raise ConfigError(
            f"{n_ranks} does not divide the {world} ranks of the job into groups that share a sequence",
            where="sequence_parallel_size",
            fix=f"use one of {', '.join(map(str, divisors))}" if divisors else "start more ranks",
        )
    known = _arranged.get(dist.group.WORLD)
    if known is not None and known.size(SP) != n_ranks:
        raise StateError(
            f"{known.size(SP)} ranks share a sequence already, and cannot be {n_ranks}",
            where="initialize_sequence_parallel",
            fix="use the same size for all models of the process",
        )
    if known is None:
        mesh = Mesh(Collectives(), {DP_SHARD: world // n_ranks, SP: n_ranks})
        _arranged[dist.group.WORLD] = mesh


def _mesh() -> Mesh:
    known = _arranged.get(dist.group.WORLD) if dist.is_initialized() else None
    if known is None:
        raise StateError(
            "nobody has said how many ranks share a sequence",
            where="parallel_state_sp",
            fix="call initialize_sequence_parallel(n), or UlyssesSPAttentionHF.register_with_transformers(...)",
        )
    return known


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """The ranks that share this rank's sequences, in the order of their parts."""
    return _mesh().process_group(SP)


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that train the same parameters: all ranks of the job."""
    return _mesh().process_group(*TOKENS)


def get_sequence_parallel_world_size() -> int:
    return _mesh().size(SP)


def get_sequence_data_parallel_world_size() -> int:
    return _mesh().size(*TOKENS)


def get_sequence_parallel_rank() -> int:
    return _mesh().index(SP)


def get_sequence_data_parallel_rank() -> int:
    return _mesh().index(*TOKENS)


# Programs use the rank among "model parallel" ranks to write or log only once.
get_model_parallel_rank = get_sequence_parallel_rank
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_group = get_sequence_parallel_group
