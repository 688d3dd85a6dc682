"""``tp_model_init``: a model cut over tensor-parallel ranks for any training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.groups import new_group, require_initialized
from deepspeed_c.config import read_config
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.config.schema import Root, fields_of
from deepspeed_c.config.source import GivenConfig, read_source
from deepspeed_c.errors import CommError, ConfigError
from deepspeed_c.inject.autotp_config import AutoTPConfig
from deepspeed_c.inject.cutting import cut_model
from deepspeed_c.inject.kernels import kernels_as_asked
from deepspeed_c.logging import log_dist

__all__ = ["tp_model_init"]


def tp_model_init(
    model: torch.nn.Module,
    tp_size: int,
    dtype: torch.dtype | None,
    config: Mapping[str, Any] | str | None = None,
    *,
    tp_group: dist.ProcessGroup | None = None,
    injection_policy: Mapping[type, Sequence[str]] | None = None,
) -> torch.nn.Module:
    """Cut ``model`` in place over ``tp_size`` ranks and return it. Every rank of the job calls it.

    Neighbouring ranks make a group: 0 to tp_size - 1, and so on. tp_group: this rank's group instead. dtype: new dtype
    of floating-point weights; None keeps their dtype. config: the section ``tensor_parallel``, or a configuration that
    contains it, of which nothing else is read; a mapping or the path of a JSON file. ``partition_config`` of the
    section may be an ``AutoTPConfig``. injection_policy: {class of blocks: ends of the names of the linear layers in
    such a block that are cut by rows}, for models without a policy. All other linear layers of the block are cut by
    columns.

    Raises ConfigError for keys that ``initialize`` refuses, where sizes contradict one another, or where the world is
    no multiple of ``tp_size``, and ModelError where no rule fits. The model is then unchanged.
    """
    require_initialized("tp_model_init")
    section = _read_section({} if config is None else config)
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


def _read_section(config: Any) -> TensorParallel:
    keys = read_source(config).keys
    is_whole = not keys.keys().isdisjoint(fields_of(Root).keys() - fields_of(TensorParallel).keys())
    section = keys.get("tensor_parallel", {} if is_whole else keys)
    if isinstance(section, dict) and isinstance(section.get("partition_config"), AutoTPConfig):
        section = {**section, "partition_config": section["partition_config"].as_dict()}
    read = read_config(GivenConfig({"tensor_parallel": section}, "dict")).resolve(world_size=1, batch="skip")
    for note in read.notes:
        log_dist(note, ranks=[0])
    return read.tensor_parallel
