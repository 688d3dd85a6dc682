"""Chooses the homes of states and weights by the configuration, and makes the homes' files."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.offload import Aio, OffloadOptimizer, OffloadParam
from deepspeed_c.config.zero import Zero
from deepspeed_c.errors import AioError, ConfigError, DeepSpeedCError, FeatureError
from deepspeed_c.logging import log_dist
from deepspeed_c.offload.file import SWAP_ELEMS, FileHome
from deepspeed_c.offload.swap import SwapFile, Swapper, SwapSettings, reserve, whole_pages
from deepspeed_c.ops.scope import declaration
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.states.home import Home, Place, Placement
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.gather_unit import GatherUnit

__all__ = [
    "StateLayout",
    "groups_in_file",
    "is_apart",
    "make_swapper",
    "place",
    "placement_of",
    "raise_together",
    "store_states",
    "store_weights",
    "swapped_bytes",
]

STATES, PARAMS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
MAX_QUEUE_DEPTH = 1024


class StateLayout(Protocol):
    """An optimizer that can describe its states before it makes them."""

    def layout_of_state(self, group: int, param: torch.Tensor) -> dict[str, tuple[torch.dtype, int]]: ...


MakeSwapper = Callable[..., Swapper]
"""The type of ``make_swapper``."""


def is_apart(device: torch.device) -> bool:
    """Whether the device that computes has memory of its own. If not, everything is in the host's memory already."""
    return device.type != "cpu"


def place(zero: Zero, base: torch.optim.Optimizer | None, device: torch.device, *, forces_own: bool) -> Placement:
    """The placement of the states and weights of a model's units. ``base`` trains the model (None: it is not trained)
    on ``device``; ``forces_own``: the configuration demands an optimizer of this package. Raises FeatureError for an
    offload that is not possible.
    """
    states, params = zero.offload_optimizer, zero.offload_param
    apart = is_apart(device)
    if base is not None:
        _check_states(states, base, apart=apart, forced=forces_own)
    has_states = base is not None and states.device != "none"
    return placement_of(
        states.device if has_states else "none",
        params.device,
        is_apart=apart,
        is_pinned=states.pin_memory if has_states else params.pin_memory,
        buffer_elems=params.buffer_size,
    )


def placement_of(states: str, weights: str, *, is_apart: bool, is_pinned: bool, buffer_elems: int) -> Placement:
    """The placement for the configuration's devices ``states`` and ``weights``. ``is_apart``: the result of the
    function of that name. At most ``buffer_elems`` elements of a unit's weights are read at once."""

    def place_on(device: str, most_elems: int) -> Place:
        if device == "nvme":
            return Place(FileHome, is_apart, is_apart and is_pinned, most_elems)
        return Place(Home, is_apart, is_pinned) if device == "cpu" and is_apart else Place()

    return Placement(place_on(states, SWAP_ELEMS), place_on(weights, max(buffer_elems, 1)))


def _check_states(states: OffloadOptimizer, base: torch.optim.Optimizer, *, apart: bool, forced: bool) -> None:
    """``apart``: the device has memory of its own. ``forced``: the configuration demands an optimizer of this package."""
    declared = declaration(base)
    if states.device == "nvme" and not declared.updates_buckets:
        raise FeatureError(
            f"{type(base).__name__} updates all parameters at once, so that its states cannot lie on NVMe",
            where=f"{STATES}.device",
            fix='use an optimizer of this package (such as "AdamW" in the optimizer section), or "device": "cpu"',
        )
    if states.super_offload and not (declared.updates_buckets and declared.scope == "element"):
        raise FeatureError(
            f"{type(base).__name__} cannot update a bucket before it knows of the others, and so not ahead of the step",
            where=f"{STATES}.super_offload",
            fix="use Adam, AdamW, Lion, Adagrad or SGD of the optimizer section, or set it to false",
        )
    if forced and states.device != "none" and not declared.updates_buckets:
        raise FeatureError(
            f"the optimizer is a {type(base).__name__}, and the configuration demands one of this package with offload",
            where="zero_force_ds_cpu_optimizer",
            fix="set it to false, or name the optimizer in the optimizer section",
        )
    if apart and states.device != "none" and declared.scope == "matrix":
        raise FeatureError(
            f"{type(base).__name__} works on whole matrices, which are put together on the device",
            where=f"{STATES}.device",
            fix='set "device": "none", or use AdamW',
        )


def _group_bytes(unit: Unit, bucket: int, base: StateLayout) -> list[int]:
    """Bytes of each tensor of a bucket. The tensors of a bucket are read and written together, as one group."""
    masters = [tagged.tensor.nbytes for tagged in unit.masters(bucket)]
    layout = base.layout_of_state(unit.group, unit.master[bucket])
    return masters + [numel * dtype.itemsize for dtype, numel in layout.values()]


def _groups(units: Sequence[Unit], base: StateLayout) -> Iterator[list[int]]:
    for unit in units:
        if unit.states.has_slices:
            yield from (_group_bytes(unit, bucket, base) for bucket in range(unit.n_buckets))


def _largest_group(units: Sequence[Unit], base: StateLayout) -> int:
    return max(map(sum, _groups(units, base)), default=0)


def swapped_bytes(units: Sequence[Unit], base: StateLayout) -> int:
    """Bytes that this rank's masters and states take in the file."""
    return sum(whole_pages(n) for group in _groups(units, base) for n in group)


def store_states(
    offload: OffloadOptimizer,
    aio: Aio,
    units: Sequence[Unit],
    base: StateLayout,
    comm: Collectives,
    make: MakeSwapper | None = None,
) -> bool:
    """Moves the masters of new units to a file if ``offload`` asks for it, and returns whether it does. Call it before
    an optimizer uses the units. ``make``: used instead of ``make_swapper``. Collective.

    Raises ConfigError on all ranks if any rank cannot make its file, because it has no folder or no space there.
    """
    if offload.device != "nvme":
        return False
    # While a bucket is updated, all tensors of the next bucket are being read and all tensors of the previous bucket
    # are being written.
    settings = _settings(aio, 2 * _largest_group(units, base))._replace(
        pipeline_read=offload.pipeline_read, pipeline_write=offload.pipeline_write
    )
    n_bytes, folder = swapped_bytes(units, base), offload.nvme_path or ""
    store = (make or make_swapper)(
        folder,
        n_bytes,
        settings,
        f"{STATES}.nvme_path",
        comm,
        n_buffers=offload.buffer_count,
        what="masters and optimizer states",
    )
    for unit in (unit for unit in units if unit.states.has_slices):
        unit.states.attach(store)
        for bucket in range(unit.n_buckets):
            unit.states.move_in(bucket)
    store.wait()
    return True


def groups_in_file(offload: OffloadParam, fetcher: Fetcher) -> list[GatherUnit]:
    """The gather units whose shards live in a file. If ``offload`` asks for files, these are all units except the first
    ``max_in_cpu`` elements in the order of the model."""
    if offload.device != "nvme":
        return []
    elems = (group.unit.slice_elems[group.bucket] for group in fetcher.groups)
    n_kept = sum(1 for total in itertools.accumulate(elems) if total <= offload.max_in_cpu)
    return fetcher.groups[n_kept:]


def store_weights(
    offload: OffloadParam, aio: Aio, fetcher: Fetcher, comm: Collectives, make: MakeSwapper | None = None
) -> None:
    """Moves the weights' shards of ``groups_in_file`` to a file. ``make``: used instead of ``make_swapper``.
    Collective.

    Raises ConfigError on all ranks if any rank cannot make its file.
    """
    groups = groups_in_file(offload, fetcher)
    for group in fetcher.groups[: len(fetcher.groups) - len(groups)]:
        group.unit.read_bucket(group.bucket)  # does nothing for weights that have been read
    if not groups:
        return
    sizes = [group.unit.slice_elems[group.bucket] * group.unit.dtype.itemsize for group in groups]
    n_bytes, folder = sum(map(whole_pages, sizes)), offload.nvme_path or ""
    settings = _settings(aio, (1 + fetcher.limits.read_ahead) * max(sizes))
    store = (make or make_swapper)(
        folder, n_bytes, settings, f"{PARAMS}.nvme_path", comm, n_buffers=offload.buffer_count, what="weights"
    )
    for group in groups:
        group.unit.weights.attach(store)
    for group in groups:
        group.unit.read_bucket(group.bucket)
        group.source.move_in()
    for group in groups:
        group.unit.weights.wait()


def _settings(aio: Aio, n_bytes: int) -> SwapSettings:
    """The settings for at most ``n_bytes`` in transfer at a time. The I/O engine starts transfers only when it is
    called, so its queue must hold all of them."""
    depth = min(max(aio.queue_depth, n_bytes // aio.block_size + 2), MAX_QUEUE_DEPTH)
    return SwapSettings.of(aio)._replace(queue_depth=depth)


def make_swapper(
    folder: str,
    n_bytes: int,
    settings: SwapSettings,
    where: str,
    comm: Collectives,
    *,
    n_buffers: int = 4,
    what: str = "",
) -> Swapper:
    """Makes a file without a name in ``folder`` with space for ``n_bytes``, one file on each rank. Collective. Raises
    on all ranks if any rank cannot make its file. what: the name of the file's content, for the log."""
    with ExitStack() as undo:
        problem = None
        try:
            store = Swapper(SwapFile(reserve(folder, n_bytes, where), settings, folder), n_buffers=n_buffers)
            undo.callback(store.close)
        except (ConfigError, AioError) as error:
            problem = error
        raise_together(problem, ConfigError, where, comm)
        undo.pop_all()
    if what:
        log_dist(f"{what} live in {folder}: {n_bytes / 2**30:.2f} GiB a rank", ranks=[0])
    return store


def raise_together(problem: DeepSpeedCError | None, kind: type[DeepSpeedCError], where: str, comm: Collectives) -> None:
    """Raises on all ranks if any rank has a ``problem``. A rank with a problem raises its own; other ranks raise an
    error of ``kind`` that quotes the first problem. Collective. ``where`` may differ from rank to rank."""
    problems = comm.gather_objects(problem and (socket.gethostname(), problem.what), label="problems of all ranks")
    for rank, found in enumerate(problems):
        if found is not None:
            host, what = found
            raise problem or kind(f"rank {rank} on {host}: {what}", where=where, fix="see there")
