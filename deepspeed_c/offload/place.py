"""Decides from the configuration which states and weights lie in host memory or in a file, and makes the files."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config import Config
from deepspeed_c.errors import AioError, ConfigError, DeepSpeedCError, FeatureError
from deepspeed_c.logging import log_dist
from deepspeed_c.offload.swap import Swapper, SwapSettings, reserve, whole_pages
from deepspeed_c.ops.muon import Muon
from deepspeed_c.ops.optim import FusedOptimizer
from deepspeed_c.zero.fetch import Fetcher
from deepspeed_c.zero.unit import Placement, Unit

__all__ = ["is_apart", "make_store", "make_swapper", "place", "raise_together", "store_weights", "swapped_bytes"]

STATES, PARAMS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
MAX_QUEUE_DEPTH = 1024


def is_apart(device: torch.device) -> bool:
    """Whether the device that computes has memory of its own: otherwise the host's is where everything lies already."""
    return device.type != "cpu"


def place(config: Config, base: torch.optim.Optimizer | None, device: torch.device) -> Placement:
    """Where the units of a model that is trained by ``base`` (None: not trained) on ``device`` have their states and weights.

    Raises FeatureError for what cannot be offloaded.
    """
    states, params = config.zero.offload_optimizer, config.zero.offload_param
    apart = is_apart(device)
    if base is not None:
        _check_states(config, base, apart)
    has_states = base is not None and states.device != "none"
    return Placement(
        states=apart and has_states,
        params=apart and params.device != "none",
        is_pinned=apart and (states.pin_memory if has_states else params.pin_memory),
        swaps_states=has_states and states.device == "nvme",
        swaps_params=params.device == "nvme",
    )


def _check_states(config: Config, base: torch.optim.Optimizer, apart: bool) -> None:
    states = config.zero.offload_optimizer
    if states.device == "nvme" and not isinstance(base, FusedOptimizer):
        raise FeatureError(
            f"{type(base).__name__} updates all parameters at once, so that its states cannot lie on NVMe",
            where=f"{STATES}.device",
            fix='use an optimizer of this package (such as "AdamW" in the optimizer section), or "device": "cpu"',
        )
    if states.super_offload and not (isinstance(base, FusedOptimizer) and base.is_elementwise):
        raise FeatureError(
            f"{type(base).__name__} cannot update a bucket before it knows of the others, and so not ahead of the step",
            where=f"{STATES}.super_offload",
            fix="use Adam, AdamW, Lion, Adagrad or SGD of the optimizer section, or set it to false",
        )
    forced = config.zero_force_ds_cpu_optimizer and config.source_of("zero_force_ds_cpu_optimizer") != "default"
    if forced and states.device != "none" and not isinstance(base, FusedOptimizer):
        raise FeatureError(
            f"the optimizer is a {type(base).__name__}, and the configuration demands one of this package with offload",
            where="zero_force_ds_cpu_optimizer",
            fix="set it to false, or name the optimizer in the optimizer section",
        )
    if apart and states.device != "none" and isinstance(base, Muon):
        raise FeatureError(
            "Muon orthogonalises matrices on the device",
            where=f"{STATES}.device",
            fix='set "device": "none", or use AdamW',
        )


def _group_bytes(unit: Unit, bucket: int, base: FusedOptimizer) -> list[int]:
    """Of the tensors of one bucket that are brought and sent together."""
    n_elems = unit.slice_elems[bucket]
    masters = [] if unit.master_is_param else [n_elems * unit.master_dtype.itemsize]
    layout = base.layout_of_state(unit.group, unit.master[bucket])
    return masters + [numel * dtype.itemsize for dtype, numel in layout.values()]


def _groups(units: Sequence[Unit], base: FusedOptimizer) -> Iterator[list[int]]:
    for unit in units:
        if unit.placement.swaps_states:
            yield from (_group_bytes(unit, bucket, base) for bucket in range(unit.n_buckets))


def _largest_group(units: Sequence[Unit], base: FusedOptimizer) -> int:
    return max(map(sum, _groups(units, base)), default=0)


def swapped_bytes(units: Sequence[Unit], base: FusedOptimizer) -> int:
    """What the masters and states of this rank take in the file."""
    return sum(whole_pages(n) for group in _groups(units, base) for n in group)


def make_store(config: Config, units: Sequence[Unit], base: torch.optim.Optimizer, comm: Collectives) -> Swapper | None:
    """The file that this rank's masters and states live in; None where they live in memory. Collective.

    Raises ConfigError on all ranks where one cannot make its file: no folder, no room.
    """
    offload = config.zero.offload_optimizer
    if offload.device != "nvme":
        return None
    # While a bucket is updated, the next one's and the last one's must all be on their way.
    settings = _settings(config, 2 * _largest_group(units, base))._replace(
        pipeline_read=offload.pipeline_read, pipeline_write=offload.pipeline_write
    )
    n_bytes, folder = swapped_bytes(units, base), offload.nvme_path or ""
    store = make_swapper(folder, n_bytes, settings, f"{STATES}.nvme_path", comm, n_buffers=offload.buffer_count)
    log_dist(f"masters and optimizer states live in {folder}: {n_bytes / 2**30:.2f} GiB a rank", ranks=[0])
    return store


def store_weights(config: Config, fetcher: Fetcher, comm: Collectives) -> None:
    """Moves the weights' shards to a file where the configuration says so: all but the first ``max_in_cpu`` elements in the order of the model. Collective.

    Raises ConfigError on all ranks where one cannot make its file.
    """
    offload = config.zero.offload_param
    if offload.device != "nvme":
        return
    elems = [group.unit.slice_elems[group.bucket] for group in fetcher.groups]
    n_kept = sum(1 for total in itertools.accumulate(elems) if total <= offload.max_in_cpu)
    groups = fetcher.groups[n_kept:]
    if not groups:
        return
    sizes = [n * group.unit.dtype.itemsize for n, group in zip(elems[n_kept:], groups)]
    # One that is put together, one that is being written, the others on their way in.
    n_ahead = max(offload.buffer_count - 2, 0)
    n_bytes, folder = sum(map(whole_pages, sizes)), offload.nvme_path or ""
    settings = _settings(config, (1 + n_ahead) * max(sizes))
    store = make_swapper(folder, n_bytes, settings, f"{PARAMS}.nvme_path", comm, n_buffers=offload.buffer_count)
    fetcher.store_weights(store, groups, n_ahead)
    log_dist(f"weights live in {folder}: {n_bytes / 2**30:.2f} GiB a rank", ranks=[0])


def _settings(config: Config, n_bytes: int) -> SwapSettings:
    """``n_bytes`` are on their way at a time: the I/O engine starts transfers only when it is called, so its queue must hold all of them."""
    aio = config.aio
    depth = min(max(aio.queue_depth, n_bytes // aio.block_size + 2), MAX_QUEUE_DEPTH)
    return SwapSettings.of(aio)._replace(queue_depth=depth)


def make_swapper(
    folder: str, n_bytes: int, settings: SwapSettings, where: str, comm: Collectives, *, n_buffers: int = 4
) -> Swapper:
    """A file without a name in ``folder`` that has room for ``n_bytes``, one on each rank. Collective; raises on all ranks where one cannot make its file."""
    with ExitStack() as undo:
        problem = None
        try:
            store = Swapper(reserve(folder, n_bytes, where), settings, n_buffers=n_buffers, folder=folder)
            undo.callback(store.close)
        except (ConfigError, AioError) as error:
            problem = error
        raise_together(problem, ConfigError, where, comm)
        undo.pop_all()
    return store


def raise_together(problem: DeepSpeedCError | None, kind: type[DeepSpeedCError], where: str, comm: Collectives) -> None:
    """Raises on all ranks where one has a ``problem``: its own, or an error of ``kind`` that quotes the first. Collective."""
    problems = comm.gather_objects(problem and (socket.gethostname(), problem.what), label=where)
    for rank, found in enumerate(problems):
        if found is not None:
            host, what = found
            raise problem or kind(f"rank {rank} on {host}: {what}", where=where, fix="see there")
