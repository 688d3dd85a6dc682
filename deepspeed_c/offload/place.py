"""Decides from the configuration which states lie in host memory or in a file, and makes the file."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config import Config
from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.logging import log_dist
from deepspeed_c.offload.swap import Swapper, SwapSettings, reserve, whole_pages
from deepspeed_c.ops.muon import Muon
from deepspeed_c.ops.optim import FusedOptimizer
from deepspeed_c.zero.unit import Placement, Unit

__all__ = ["is_apart", "make_store", "place", "swapped_bytes"]

WHERE = "zero_optimization.offload_optimizer"
MAX_QUEUE_DEPTH = 1024


def is_apart(device: torch.device) -> bool:
    """Whether the device that computes has memory of its own: otherwise the host's is where everything lies already."""
    return device.type != "cpu"


def place(config: Config, base: torch.optim.Optimizer, device: torch.device) -> Placement:
    """Where the units of a model that is trained by ``base`` on ``device`` have their states. Raises FeatureError for what cannot be offloaded."""
    states, params = config.zero.offload_optimizer, config.zero.offload_param
    if states.device == "nvme" and not isinstance(base, FusedOptimizer):
        raise FeatureError(
            f"{type(base).__name__} updates all parameters at once, so that its states cannot lie on NVMe",
            where=f"{WHERE}.device",
            fix='use an optimizer of this package (such as "AdamW" in the optimizer section), or "device": "cpu"',
        )
    forced = config.zero_force_ds_cpu_optimizer and config.source_of("zero_force_ds_cpu_optimizer") != "default"
    if forced and states.device != "none" and not isinstance(base, FusedOptimizer):
        raise FeatureError(
            f"the optimizer is a {type(base).__name__}, and the configuration demands one of this package with offload",
            where="zero_force_ds_cpu_optimizer",
            fix="set it to false, or name the optimizer in the optimizer section",
        )
    if params.device == "nvme":
        raise FeatureError(
            "parameters on NVMe are not part of this version",
            where="zero_optimization.offload_param.device",
            fix='use "cpu": the states, which are most of the bytes, can lie on NVMe (offload_optimizer)',
        )
    apart = is_apart(device)
    if apart and states.device != "none" and isinstance(base, Muon):
        raise FeatureError(
            "Muon orthogonalises matrices on the device",
            where=f"{WHERE}.device",
            fix='set "device": "none", or use AdamW',
        )
    return Placement(
        states=apart and states.device != "none",
        params=apart and params.device != "none",
        is_pinned=apart and (states.pin_memory if states.device != "none" else params.pin_memory),
        is_swapped=states.device == "nvme",
    )


def _group_bytes(unit: Unit, bucket: int, base: FusedOptimizer) -> list[int]:
    """Of the tensors of one bucket that are brought and sent together."""
    n_elems = unit.slice_elems[bucket]
    masters = [] if unit.master_is_param else [n_elems * unit.master_dtype.itemsize]
    layout = base.layout_of_state(unit.group, unit.master[bucket])
    return masters + [numel * dtype.itemsize for dtype, numel in layout.values()]


def _largest_group(units: Sequence[Unit], base: FusedOptimizer) -> int:
    return max((sum(_group_bytes(unit, b, base)) for unit in units for b in range(unit.n_buckets)), default=0)


def swapped_bytes(units: Sequence[Unit], base: FusedOptimizer) -> int:
    """What the masters and states of this rank take in the file."""
    sizes = [n for unit in units for bucket in range(unit.n_buckets) for n in _group_bytes(unit, bucket, base)]
    return sum(map(whole_pages, sizes))


def make_store(config: Config, units: Sequence[Unit], base: torch.optim.Optimizer, comm: Collectives) -> Swapper | None:
    """The file that this rank's masters and states live in; None where they live in memory. Collective.

    Raises ConfigError on all ranks where one cannot make its file: no folder, no room.
    """
    offload, aio = config.zero.offload_optimizer, config.aio
    if offload.device != "nvme":
        return None
    n_bytes, folder = swapped_bytes(units, base), offload.nvme_path or ""
    settings = SwapSettings(
        backend=aio.backend,
        block_size=aio.block_size,
        # The engine starts transfers only when it is called: while a bucket is updated, the next one's and the last one's must all be on their way.
        queue_depth=min(max(aio.queue_depth, 2 * _largest_group(units, base) // aio.block_size + 2), MAX_QUEUE_DEPTH),
        intra_op_parallelism=aio.intra_op_parallelism,
        single_submit=aio.single_submit,
        overlap_events=aio.overlap_events,
        checksum=aio.checksum,
        pipeline_read=offload.pipeline_read,
        pipeline_write=offload.pipeline_write,
    )
    store, error = None, None
    try:
        file = reserve(folder, n_bytes, f"{WHERE}.nvme_path")
        store = Swapper(file, settings, n_buffers=offload.buffer_count, folder=folder)
    except ConfigError as raised:
        error = raised
    problems = comm.gather_objects(None if error is None else (socket.gethostname(), error.what), label="swap files")
    found = next(((rank, problem) for rank, problem in enumerate(problems) if problem), None)
    if found is not None:
        if store is not None:
            store.close()
        rank, (host, what) = found
        raise error or ConfigError(f"rank {rank} on {host}: {what}", where=f"{WHERE}.nvme_path", fix="see there")
    log_dist(f"masters and optimizer states live in {folder}: {n_bytes / 2**30:.2f} GiB a rank", ranks=[0])
    return store
