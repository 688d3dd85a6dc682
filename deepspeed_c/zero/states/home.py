"""The interface of homes: the places of a unit's states or weights between their uses.

``Home`` keeps tensors in memory, and ``offload/file.py`` in a file. ``offload/place.py`` chooses the home of each unit.
A further home (another device, a peer's memory) is a new subclass of ``Home``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from deepspeed_c.ops import flat

__all__ = ["ON_DEVICE", "Home", "MakeZeros", "Place", "Placement", "Tagged"]


class Tagged(NamedTuple):
    """A tensor, and its name in messages."""

    tensor: torch.Tensor
    name: str
    piece_elems: int = 0
    """How many elements of it may be moved by themselves (``Home.stream``); 0: none but all."""
    is_master: bool = False
    """Whether it holds masters; else states, or weights."""


MakeZeros = Callable[[torch.Size, torch.dtype, str, int], torch.Tensor]
"""(shape, dtype, name, elements of a piece) -> zeros that live in a home."""


class Home:
    """Memory: the device's own, or (``is_apart``) the host's beside it. Its tensors may be used at any time."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.is_apart, self._is_pinned, self._device = place.is_apart, place.is_pinned, device
        self.settle: Callable[[], None] = lambda: None

    @property
    def memory(self) -> str:
        """The memory of its tensors while they are used: "device" or "host"."""
        return "host" if self.is_apart else "device"

    @property
    def label(self) -> str:
        """Where its tensors live, for messages and the planner: "device", "host" or "file"."""
        return self.memory

    has_slices = False
    """Whether each bucket's tensors have memory of their own, so that they can come and go by themselves."""

    def new_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in the memory of its tensors."""
        if self._device.type == "meta" or not (self.is_apart or self._device.type == "cpu"):
            return torch.zeros(numel, dtype=dtype, device=self._device)
        # Zeroed by the threads that will update it: a page lies in the NUMA node of the thread that touches it first.
        memory = torch.empty(numel, dtype=dtype, pin_memory=self._is_pinned and self._device.type != "cpu")
        flat.zero_([memory])
        return memory

    def keep(
        self,
        tensors_of: Callable[[int], list[Tagged]],
        on_move: Callable[[int], None] = lambda bucket: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Learns of its tensors: ``tensors_of(bucket)`` gives the tensors of a bucket.

        It calls ``on_move(bucket)`` when they have come or gone. Code that gives them out calls ``settle()`` first: an
        update may have gone ahead of the step."""
        self.settle, self._tensors_of, self._on_move = settle, tensors_of, on_move

    def move_in(self, bucket: int, make: Callable[[MakeZeros], None] = lambda make_zeros: None) -> None:
        """From now on the tensors of a bucket live here. Memory has them already; elsewhere ``make`` makes missing
        tensors."""

    def needs_open(self, bucket: int) -> bool:
        """Whether the tensors of a bucket are there within ``open`` only."""
        return False

    def open(self, bucket: int, *, reads: bool = True, writes: bool = True) -> AbstractContextManager[None]:
        """Within it the tensors of a bucket are in memory; it may be nested.

        Without ``reads`` they hold anything, for the caller to overwrite. Without ``writes`` changes may be lost."""
        return nullcontext()

    def in_memory(self, bucket: int) -> list[Tagged]:
        """The tensors of a bucket that take memory while nobody uses them."""
        return self._tensors_of(bucket)

    def read_ahead(self, bucket: int) -> None:
        """Starts to read the tensors that ``open`` will give."""

    def piece_elems(self, numel: int) -> int:
        """How many elements of a bucket of ``numel`` are moved at once (``stream``); 0: all."""
        return 0

    def stream(self, tensors: Sequence[Tagged]) -> Generator[list[torch.Tensor], None, None]:
        """Gives the pieces of tensors: all first ones, then all second ones, and so on.

        They are flat and in memory. Changes to them are kept when the caller asks for the next pieces."""
        yield [tagged.tensor.view(-1) for tagged in tensors]

    def wait(self) -> None:
        """Returns when everything that moved is where it lives."""

    def end(self) -> None:
        """Gives up the place: tensors that are away are lost."""


class Place(NamedTuple):
    """The home of one kind of state; units whose places differ are different units."""

    make: type[Home] = Home
    is_apart: bool = False
    """Its tensors are used in the host's memory, and the device has another (on a host that computes there is no such
    memory)."""
    is_pinned: bool = False
    most_elems: int = 0
    """Elements of a rank's slice of a bucket; 0: any number."""


class Placement(NamedTuple):
    """Where the units of a model live."""

    states: Place = Place()  # masters, moments, and the sums of gradients
    weights: Place = Place()  # the weights' shard (stage 3)


ON_DEVICE = Placement()
