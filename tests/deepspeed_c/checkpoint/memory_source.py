"""A checkpoint in memory, independent of every format, as the source for tests of export and conversion."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, ParamInfo, Read, Source, Topology


class MemorySource(Source):
    """``values``: (kind, name) -> tensor."""

    format = "memory"

    def __init__(self, values: dict[tuple[str, str], torch.Tensor], **attributes) -> None:
        self.where = "memory"
        self.values = values
        self.tensors = {
            (kind, name): LogicalTensor(name=name, kind=kind, shape=tuple(t.shape), dtype=t.dtype)
            for (kind, name), t in values.items()
        }
        self.aliases, self.params, self.groups, self.topology, self.state = {}, {}, [], Topology(), {}
        self.n_reads = 0
        self.largest_read_bytes = 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def read(self, reads: Sequence[Read]) -> None:
        self.n_reads += 1
        self.largest_read_bytes = max(self.largest_read_bytes, sum(r.into.nbytes for r in reads))
        for read in reads:
            whole = self.values[read.tensor.key]
            if read.box is not None:
                for d, (start, size) in enumerate(zip(read.box.start, read.box.size, strict=True)):
                    whole = whole.narrow(d, start, size)
            read.into.copy_(whole.reshape(-1)[read.begin : read.begin + read.into.numel()])


def adam_checkpoint(dtype: torch.dtype = torch.bfloat16) -> MemorySource:
    """A small trained model. It has masters and moments, a frozen weight, a tied weight, buffers of several dtypes, and
    a tensor without elements."""
    generator = torch.Generator().manual_seed(7)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shapes = {"embed.weight": (13, 7), "scale": (), "none": (0, 3), "layer.weight": (5, 7), "layer.bias": (5,)}
    values: dict[tuple[str, str], torch.Tensor] = {}
    for name, shape in shapes.items():
        master = some(*shape)
        values[PARAM, name] = master.to(dtype)
        values[MASTER, name] = master
        values["exp_avg", name] = some(*shape)
        values["exp_avg_sq", name] = some(*shape).square()
    values[PARAM, "frozen.weight"] = some(3, 2).to(dtype)
    values[BUFFER, "mean"] = some(4).half()
    values[BUFFER, "count"] = torch.tensor(12345678901)
    counts = {"step": torch.tensor(10.0)}
    return MemorySource(
        values,
        aliases={"head.weight": "embed.weight"},
        params={**{name: ParamInfo(group=0, counts=counts) for name in shapes}, "frozen.weight": ParamInfo()},
        groups=[{"lr": 0.1, "betas": (0.9, 0.999)}],
        topology=Topology(world_size=2, stage=1),
        state={"counters": {"global_steps": 10}, "client_state": {"epoch": 3}},
    )


def read_all(source: Source) -> dict[tuple[str, str], torch.Tensor]:
    into = {k: torch.empty(torch.Size(t.shape).numel(), dtype=t.dtype) for k, t in source.tensors.items()}
    source.read([Read(t, 0, into[k]) for k, t in source.tensors.items()])
    return {k: into[k].view(t.shape) for k, t in source.tensors.items()}
