"""Sections zero_optimization.offload_param, .offload_optimizer, .zenflow and aio: where idle state lives."""

from typing import Annotated, Literal

import msgspec

from .keys import Fraction, NonNeg, Positive, Section, asks, inherent, tunes

__all__ = ["Aio", "OffloadOptimizer", "OffloadParam", "ZenFlow"]

Device = Literal["none", "cpu", "nvme"]
OpenFraction = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class OffloadParam(Section, kw_only=True):
    """Where parameters lie while no module uses them (stage 3)."""

    device: Annotated[Device, asks("Where idle parameters live.", "offload_param", auto="fill")] = "none"
    nvme_path: Annotated[str | None, tunes("Directory on the NVMe device.", "offload_param", auto="fill")] = None
    buffer_count: Annotated[NonNeg, tunes("Buffers that parameters are read into.", "offload_param")] = 5
    buffer_size: Annotated[NonNeg, tunes("Elements of one buffer.", "offload_param", floor=True)] = 100_000_000
    max_in_cpu: Annotated[
        NonNeg, tunes("Elements kept in host memory when the device is nvme.", "offload_param", floor=True)
    ] = 1_000_000_000
    pin_memory: Annotated[bool, tunes("Use page-locked host memory.", "offload_param")] = True


class OffloadOptimizer(Section, kw_only=True):
    """Where the optimizer's state lies and where its update runs."""

    device: Annotated[Device, asks("Where optimizer state lives.", "offload_optimizer", auto="fill")] = "none"
    nvme_path: Annotated[str | None, tunes("Directory on the NVMe device.", "offload_optimizer", auto="fill")] = None
    buffer_count: Annotated[NonNeg, tunes("Buffers that state is read into.", "offload_optimizer")] = 4
    pin_memory: Annotated[bool, tunes("Use page-locked host memory.", "offload_optimizer")] = True
    pipeline_read: Annotated[bool, tunes("Read the next piece during the update of this one.", "offload_optimizer")] = (
        False
    )
    pipeline_write: Annotated[
        bool, tunes("Write the last piece during the update of this one.", "offload_optimizer")
    ] = False
    fast_init: Annotated[
        bool, inherent("Quick start of state on NVMe.", "states are made where they live, piece by piece")
    ] = False
    ratio: Annotated[Fraction, asks("Part of the state that is offloaded.", "partial_offload")] = 1.0
    super_offload: Annotated[bool, asks("Update in host memory while backward runs.", "super_offload")] = False
    cpuadam_cores_perc: Annotated[Fraction, tunes("Part of the cores that updates use.", "super_offload")] = 0.8


class ZenFlow(Section, kw_only=True):
    """Update the important gradient columns at once and the others on the host, now and then."""

    topk_ratio: Annotated[OpenFraction, tunes("Part of the columns that counts as important.", "zenflow")] = 0.1
    select_strategy: Annotated[
        Literal["auto", "step", "epoch"], tunes("When columns are selected again.", "zenflow", auto="value")
    ] = "auto"
    select_interval: Annotated[
        Literal["auto"] | Positive, tunes("Steps or epochs between selections.", "zenflow", auto="value")
    ] = "auto"
    update_interval: Annotated[
        Literal["auto"] | Positive, tunes("Steps between updates of the other columns.", "zenflow", auto="value")
    ] = "auto"
    overlap_step: Annotated[bool, tunes("Overlap the host's update with forward and backward.", "zenflow")] = False
    offload: Annotated[bool, tunes("Keep the state of the selected columns on the host too.", "zenflow")] = False
    auto_ratio: Annotated[Fraction, tunes('Threshold of the "auto" intervals.', "zenflow")] = 0.99
    full_warm_up_rounds: Annotated[NonNeg, tunes("First rounds that update everything.", "zenflow")] = 0
    pt_reserved_cores_perc: Annotated[Fraction, tunes("Part of the cores left to torch.", "zenflow")] = 0.5
    steps_per_epoch: Annotated[Positive | None, tunes("Steps of an epoch; set by the engine.", "zenflow")] = None


class Aio(Section, kw_only=True):
    """Requests of the asynchronous I/O engine."""

    block_size: Annotated[Positive, tunes("Bytes of one request.", "nvme", floor=True)] = 1 << 20
    queue_depth: Annotated[Positive, tunes("Requests in flight.", "nvme")] = 8
    intra_op_parallelism: Annotated[Positive, tunes("Threads that share one read or write.", "nvme")] = 1
    single_submit: Annotated[bool, tunes("Submit requests one by one.", "nvme")] = False
    overlap_events: Annotated[bool, tunes("Submit and reap at the same time.", "nvme")] = True
    backend: Annotated[
        Literal["auto", "uring", "libaio", "threads", "sync"],
        tunes("How requests reach the kernel; auto: the first of these that it allows.", "nvme", auto="value"),
    ] = "auto"
    checksum: Annotated[bool, tunes("CRC32C of swapped tensors, verified when they are read back.", "nvme")] = False
    use_gds: Annotated[bool, asks("Read and write device memory directly (GPUDirect Storage).", "gds")] = False
