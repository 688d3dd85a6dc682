"""Devices and ports of the replicas of a deployment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from deepspeed_c.env import read_env
from deepspeed_c.errors import LaunchError
from deepspeed_c.mii.config import ModelConfig

__all__ = ["ReplicaPlace", "places_of"]


class ReplicaPlace(NamedTuple):
    """Environment and port of one replica."""

    environment: dict[str, str]
    """Variables of this replica. All others are inherited from the deployment's process."""
    master_port: int | None
    """The port at which its ranks meet; None: any free port."""


def places_of(model: ModelConfig) -> list[ReplicaPlace]:
    """The place of each replica. Without a device map, replicas take the devices in order; on a host without devices
    they share the processors.

    Raises LaunchError if there are fewer devices.
    """
    devices = _devices()
    n_ranks = model.tensor_parallel
    wanted = [list(range(i * n_ranks, (i + 1) * n_ranks)) for i in range(model.replica_num)]
    if model.device_map != "auto":
        wanted = [ranks for replicas in model.device_map.values() for ranks in replicas]
    for i, replica in enumerate(model.replica_configs):
        wanted[i] = replica.gpu_indices or wanted[i]
    return [
        ReplicaPlace(_visible(ranks, devices, i) if devices else {}, _port(model, i)) for i, ranks in enumerate(wanted)
    ]


def _visible(ranks: list[int], devices: list[str], index: int) -> dict[str, str]:
    missing = [rank for rank in ranks if rank >= len(devices)]
    if missing:
        raise LaunchError(
            f"needs device {missing[0]}, and there are {len(devices)}",
            where=f"replica {index}",
            fix="ask for fewer replicas or a smaller tensor_parallel, or write a device_map in which they share devices",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[rank] for rank in ranks)}


def _port(model: ModelConfig, index: int) -> int | None:
    if model.replica_configs:
        return model.replica_configs[index].torch_dist_port
    # The default would be taken as soon as there are two deployments.
    return model.torch_dist_port + 100 * index if "torch_dist_port" in model.model_fields_set else None


def _devices() -> list[str]:
    """The names of the GPUs in CUDA_VISIBLE_DEVICES. They are counted without torch, which would take a second."""
    visible = read_env().visible_devices
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [str(i) for i in range(sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").iterdir()))]
