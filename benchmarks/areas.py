"""The areas of the benchmarks. The figures of each area have a page in docs/performance."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["AREAS", "Area"]


class Area(NamedTuple):
    """A subject of several benchmarks."""

    name: str  # of its page
    title: str
    against: str  # what its figures are compared with


AREAS = (
    Area(
        "cores",
        "Cores and operators in C",
        "Loops of C are compared with one pass over the same memory, operators with torch's own: one fused operator where "
        "torch has one, else their composition.",
    ),
    Area(
        "training",
        "The training step",
        "A step of ZeRO stages 0 to 2 is compared with DDP and torch's fused AdamW, with DeepSpeed, with replicas that send "
        "nothing, and with a pass over the memory of the optimizer. A step with monitors and profilers on is compared with "
        "a plain one.",
    ),
    Area(
        "memory",
        "Stage 3 and memory",
        "A step with sharded parameters is compared with FSDP2 and DDP, memory with the bytes that are needed, and recomputed "
        "layers with `torch.utils.checkpoint`.",
    ),
    Area(
        "offload",
        "Offload to the host and to NVMe",
        "Steps with offloaded states are compared with a pass over the memory and with the best of several fio jobs on the "
        "same disk, memory with the limit of a cgroup.",
    ),
    Area(
        "parallel",
        "Collectives, pipelines, cut tensors and sequences",
        "Collectives are compared with gloo and DeepSpeed, parallel models with DeepSpeed's and torch's own, and with the "
        "time of ranks that compute and send nothing.",
    ),
    Area(
        "experts",
        "Mixtures of experts",
        "A layer of experts is compared with a dense MLP on as many rows, with DeepSpeed's layer, and with transformers' "
        "`grouped_mm`.",
    ),
    Area(
        "compiled",
        "Compiled graphs",
        "A compiled step is compared with the same engine without a compiler, with FSDP2 and DDP around compiled models, and "
        "the first step with the bare model under `torch.compile`.",
    ),
    Area(
        "files",
        "Checkpoints and files",
        "Speeds are compared with the best of several fio jobs on the same disk, with `torch.distributed.checkpoint` and with "
        "DeepSpeed's `aio_handle`.",
    ),
    Area(
        "inference",
        "Inference and generation",
        "Prompts and tokens are compared with transformers on the same model, generation between training steps with "
        "DeepSpeed, and loading with a read of the file.",
    ),
    Area(
        "data",
        "Compression and data",
        "Quantized and pruned models are compared with the fp32 model, quantization with a copy of the weights, and loaders "
        "with torch's, DeepSpeed's and grain's.",
    ),
    Area(
        "starting",
        "Importing, starting, launching",
        "Times are compared with `import torch`, with a script that uses bare DDP, and with `torch.distributed.run`.",
    ),
)
