"""The interface of a home: the place where a unit's states or weights are kept while they are not in use.

``Home`` keeps tensors in memory, and ``offload/file.py`` keeps them in a file.``offload/place.py`` chooses the home of
each unit. A further home (another device, a peer's memory) is a new subclass of ``Home``.
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
    """The number of elements that may be moved at a time (``Home.stream``); 0: only the whole tensor."""
    is_master: bool = False
    """Whether the tensor holds masters; otherwise it holds states or weights."""


MakeZeros = Callable[[torch.Size, torch.dtype, str, int], torch.Tensor]
"""(shape, dtype, name, elements of a piece) -> a tensor of zeros in the home."""


class Home:
    """A home in memory: the device's own memory or, with ``is_apart``, the host's. Tensors may be used at any time."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.is_apart, self._is_pinned, self._device = place.is_apart, place.is_pinned, device
        self.settle: Callable[[], None] = lambda: None

    @property
    def memory(self) -> str:
        """The memory in which its tensors are used: "device" or "host"."""
        return "host" if self.is_apart else "device"

    @property
    def label(self) -> str:
        """The place of its tensors, for messages and the planner: "device", "host" or "file"."""
        return self.memory

    has_slices = False
    """Whether each bucket's tensors have memory of their own, so that one bucket can be moved without the others."""

    def new_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor of zeros in the memory of the home's tensors."""
        if self._device.type == "meta" or not (self.is_apart or self._device.type == "cpu"):
            return torch.zeros(numel, dtype=dtype, device=self._device)
        # The threads that will update the memory zero it, because a page is placed in the NUMA node of the thread that
        # touches it first.
        memory = torch.empty(numel, dtype=dtype, pin_memory=self._is_pinned and self._device.type != "cpu")
        flat.zero_([memory])
        return memory

    def keep(
        self,
        tensors_of: Callable[[int], list[Tagged]],
        on_move: Callable[[int], None] = lambda bucket: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Sets the tensors to keep: ``tensors_of(bucket)`` returns the tensors of a bucket.

        The home calls ``on_move(bucket)`` when it has moved a bucket's tensors. Code that hands out tensors calls
        ``settle()`` first, because an update may have run ahead of the step."""
        self.settle, self._tensors_of, self._on_move = settle, tensors_of, on_move

    def move_in(self, bucket: int, make: Callable[[MakeZeros], None] = lambda make_zeros: None) -> None:
        """Moves the tensors of a bucket into the home. If they live in memory there is nothing to move. Other homes
        call ``make`` for tensors that do not exist yet."""

    def needs_open(self, bucket: int) -> bool:
        """Whether the tensors of a bucket may be used only within ``open``."""
        return False

    def open(self, bucket: int, *, reads: bool = True, writes: bool = True) -> AbstractContextManager[None]:
        """Context within which the tensors of a bucket are in memory. Contexts may be nested.

        Without ``reads`` the tensors have undefined values, which the caller overwrites. Without ``writes`` changes may
        be lost."""
        return nullcontext()

    def in_memory(self, bucket: int) -> list[Tagged]:
        """The tensors of a bucket that take memory even while they are not in use."""
        return self._tensors_of(bucket)

    def read_ahead(self, bucket: int) -> None:
        """Starts to read the tensors of a bucket that will be opened next."""

    def piece_elems(self, numel: int) -> int:
        """The number of elements that ``stream`` moves at once in a bucket of ``numel`` elements; 0: all."""
        return 0

    def stream(self, tensors: Sequence[Tagged]) -> Generator[list[torch.Tensor], None, None]:
        """Yields the tensors piece by piece: a list of the first piece of each tensor, then a list of the second
        pieces, and so on.

        Pieces are flat and in memory. Changes to a piece are kept when the caller asks for the next pieces."""
        yield [tagged.tensor.view(-1) for tagged in tensors]

    def wait(self) -> None:
        """Waits until all tensors that are being moved have arrived."""

    def end(self) -> None:
        """Closes the home. Tensors that are not in memory are lost."""


class Place(NamedTuple):
    """The kind of home for states or for weights. Parameters with different places are in different units."""

    make: type[Home] = Home
    is_apart: bool = False
    """Whether tensors are used in the host's memory while the device has a memory of its own. Always False if the host
    is the device that computes."""
    is_pinned: bool = False
    most_elems: int = 0
    """The most elements in a rank's slice of a bucket; 0: any number."""


class Placement(NamedTuple):
    """Where the states and the weights of a model's units live."""

    states: Place = Place()  # masters, moments, and the sums of gradients
    weights: Place = Place()  # the weights' shard (stage 3)


ON_DEVICE = Placement()
