"""``tp_model_init``: a model cut over tensor-parallel ranks for any training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.groups import new_group, require_initialized
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import CommError, ConfigError
from deepspeed_c.inject.autotp_config import AutoTPConfig
from deepspeed_c.inject.cutting import cut_model
from deepspeed_c.inject.kernels import kernels_as_asked

__all__ = ["tp_model_init"]


def tp_model_init(
    model: torch.nn.Module,
    tp_size: int,
    dtype: torch.dtype | None,
    config: dict[str, Any] | None = None,
    *,
    tp_group: dist.ProcessGroup | None = None,
    injection_policy: Mapping[type, Sequence[str]] | None = None,
) -> torch.nn.Module:
    """Cut ``model`` in place over ``tp_size`` ranks and return it. Every rank of the job calls it.

    Neighbouring ranks make a group: 0 to tp_size - 1, and so on. tp_group: this rank's group instead. dtype: new dtype
    of floating-point weights; None keeps their dtype. config: the section ``tensor_parallel``, or a mapping that
    contains it; its ``partition_config`` may be an ``AutoTPConfig``. injection_policy: {class of blocks: ends of the
    names of the linear layers in such a block that are cut by rows}, for models without a policy. All other linear
    layers of the block are cut by columns.

    Raises ConfigError where sizes contradict one another or the world is no multiple of ``tp_size``, and ModelError
    where no rule fits. The model is then unchanged.
    """
    require_initialized("tp_model_init")
    values = dict((config or {}).get("tensor_parallel", config or {}))
    if isinstance(values.get("partition_config"), AutoTPConfig):
        values["partition_config"] = values["partition_config"].as_dict()
    try:
        section = msgspec.convert(values, TensorParallel)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where="tp_model_init(config=...)", fix="see docs/config.md") from error
    if section.autotp_size not in (0, tp_size):
        raise ConfigError(
            f"tp_size is {tp_size}, autotp_size {section.autotp_size}",
            where="tp_model_init",
            fix="pass one size",
        )
    if tp_group is not None:
        group = tp_group
    else:
        world, rank = dist.get_world_size(), dist.get_rank()
        if tp_size < 1 or world % tp_size:
            raise ConfigError(
                f"{world} ranks are no multiple of tp_size {tp_size}",
                where="tp_model_init",
                fix="start a multiple of tp_size ranks",
            )
        groups = [new_group(list(range(first, first + tp_size))) for first in range(0, world, tp_size)]
        group = groups[rank // tp_size]
    comm = Collectives(group)
    if comm.world_size != tp_size:
        raise CommError(
            f"tp_group has {comm.world_size} ranks, tp_size is {tp_size}",
            where="tp_model_init",
            fix="pass the group of this rank, of tp_size ranks",
        )
    with kernels_as_asked(model, section):
        cut_model(model, section, comm, injection_policy)
    return model if dtype is None else model.to(dtype)
