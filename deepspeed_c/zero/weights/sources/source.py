"""The interface of a source: where the elements of one gather unit come from.

A gather unit (``gather_unit.py``) asks its source for a buffer with the whole bucket and points parameters into it. A
source decides the sender of each element. A driver (``zero/weights/drivers``) decides the time, and knows no kind of
source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.transports.joint_memory import JointMemory
from deepspeed_c.config.zero import Zero
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.weights.sources.stream import GatherStream

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.sources.second import NearRanks

__all__ = ["GatherCost", "Means", "WeightSource", "lasting"]

_AS_IT_IS = nullcontext()


def lasting() -> AbstractContextManager:
    """Context for tensors that must outlive inference mode. Outside of that mode, where passes of training are, nothing
    is entered: weights require no gradient in their buffers, and a context of torch takes as long as a view.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


class Means(NamedTuple):
    """Things that the sources of one fetcher share."""

    pool: BufferPool
    """Provides the buffers of gathered units."""
    stream: GatherStream
    zero: Zero
    """The configuration's section, for a source that a key asks for."""
    near_of: Callable[[Unit], NearRanks | None]
    """Returns the ranks that keep second shards of a unit; None if there are none."""
    use_broadcast: bool = False
    """Whether a gather is made of one broadcast for each rank."""


class GatherCost(NamedTuple):
    """The cost of one gather of a unit for this rank, in bytes."""

    received: int
    """Bytes that come from other ranks."""
    memory: int
    """Bytes of memory that the gathered unit takes until it is let go."""


class WeightSource(ABC):
    """Where the elements of one gather unit come from: bucket ``bucket`` of ``unit``. ``label`` names it in messages.

    A buffer is flat, [numel of the bucket] in the unit's dtype, on the unit's device.
    """

    is_collective = True
    """Whether a gather needs the other ranks. If so, all ranks must start it, in the same order."""
    shared: JointMemory | None = None
    """Memory of several ranks: the others see this rank's shard there without a copy. Writes to it are fenced."""

    near: Collectives | None = None
    """The ranks that keep second shards of the bucket together."""
    read_in: JointMemory | None = None
    """Memory of several ranks that parameters may point into. This rank's own writes there are forgotten with
    ``Fetcher.forget_writes``."""

    def __init__(self, unit: Unit, bucket: int, label: str, means: Means) -> None:
        self.unit, self.bucket, self.label, self.means = unit, bucket, label, means

    @classmethod
    def serves(cls, unit: Unit, bucket: int, means: Means) -> bool:
        """Whether the elements of this bucket come from a source of this kind. The same on all ranks."""
        return False

    @property
    def second(self) -> torch.Tensor | None:
        """This rank's slice of the second shards, [numel of the bucket // near ranks]; None while it is out of date."""
        return None

    @property
    @abstractmethod
    def cost(self) -> GatherCost: ...

    @abstractmethod
    def start(self, buffer: torch.Tensor | None) -> torch.Tensor:
        """Starts to bring the elements, and returns their buffer. ``buffer``: the buffer of an earlier gather that was
        not let go, to be filled again; None: another one is taken."""

    def finish(self, buffer: torch.Tensor) -> None:
        """Waits until all elements have come. Does nothing if they have."""

    def views(self, buffer: torch.Tensor, make: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Returns ``make(buffer)``, the parameters as views of the buffer. A source may keep them for the next gather
        into the same memory: hundreds of views take longer than a gather of small weights."""
        return make(buffer)

    def let_go(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back that nothing points into any more."""

    def stale(self) -> None:
        """Called on all ranks when the weights of any rank have been written to. Drops copies of them that the source
        keeps between gathers. The fetcher gathers the buffers of gathered units again."""

    def move_in(self) -> None:
        """Called once, when the homes of weights have been made: moves this rank's shard there."""

    def read_ahead(self) -> None:
        """Called some steps before ``start``. Begins work without other ranks, such as a read of a file."""

    @property
    def _comm(self) -> Collectives:
        """The ranks that hold the shards."""
        return self.unit.comm

    @property
    def _n_bytes(self) -> int:
        return self.unit.bucket_bytes(self.bucket)
