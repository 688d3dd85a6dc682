"""The tensors that autograd saves in a forward for the backward: a chain of packers, each free to keep a tensor in a
form of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.utils.checkpoint

__all__ = ["Packer", "SavedTensors", "counts_all", "give_back", "hooks_around", "keep", "overwritten"]


class Packer(Protocol):
    """Keeps saved tensors of some kind in a form of its own: as a place, a copy elsewhere, fewer bits."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the object to keep in place of ``tensor``, or None: the next packer is asked.

        A packer must not keep ``tensor`` itself where it is an operator's output: it would keep the graph that keeps
        it. ``tensor.detach()`` will do.
        """

    def unpack(self, packed: Any) -> torch.Tensor:
        """Returns the tensor again, when a backward asks for it: same shape and dtype, and on the device where it was.
        """


def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Keeps a tensor that no packer took, as autograd does where nobody else does the saving."""
    # An operator's own output, kept as it is, would keep the operator that keeps it: the graph would never die.
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def give_back(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Raises RuntimeError where the tensor was overwritten: autograd looks only where nobody else does the saving."""
    tensor, version = packed
    if tensor._version != version:
        raise overwritten(f"{tensor.type()} {list(tensor.shape)}", tensor._version, version)
    return tensor


def overwritten(what: str, found: int, expected: int) -> RuntimeError:
    """The error that autograd raises for a saved tensor with another version."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what}] is at version {found}; expected version {expected} instead"
    )


def hooks_around() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """(pack, unpack) of the ``saved_tensors_hooks`` around the caller; without any, (keep, give_back), which keep
    tensors as autograd does.
    """
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (keep, give_back) if around is None else around


def counts_all(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Whether ``pack`` belongs to a checkpoint, which knows tensors by their number and meets all of them again when it
    runs the forward once more. Our packers say so by an attribute of the method's object.
    """
    is_of_torch = getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__
    return is_of_torch or getattr(getattr(pack, "__self__", None), "counts_all", False)


class SavedTensors:
    """Packers in the order of asking them. The packer that took a tensor gives it back.

    A tensor that no packer takes goes to the ``saved_tensors_hooks`` around the forward, or is kept as it is.
    """

    def __init__(self) -> None:
        self._packers: tuple[Packer, ...] = ()

    def add(self, packer: Packer) -> None:
        """Adds ``packer`` at the end of the chain. Not while a forward runs."""
        self._packers = (*self._packers, packer)

    def hooks_of(self, owner: object, on_unpack: Callable[[Any], None]) -> torch.autograd.graph.saved_tensors_hooks:
        """The context of one forward; within it autograd saves through the chain.

        owner: lives at least as long as anything that the forward has saved.
        on_unpack: called with it whenever a backward asks for some of that.
        """
        chain = _Chain(self._packers, owner, on_unpack)
        return torch.autograd.graph.saved_tensors_hooks(chain.pack, chain.unpack)


class _Chain:
    """The packers of one forward, and the hooks around it."""

    def __init__(self, packers: tuple[Packer, ...], owner: object, on_unpack: Callable[[Any], None]) -> None:
        self._packers, self._owner, self._on_unpack = packers, owner, on_unpack
        # Autograd asks the innermost hooks alone, which will be ours: a caller's (save_on_cpu, say) are asked by us.
        self._pack_rest, self._unpack_rest = hooks_around()
        self.counts_all = counts_all(self._pack_rest)

    def pack(self, tensor: torch.Tensor) -> tuple[Callable[[Any], torch.Tensor], Any]:
        for packer in self._packers:
            packed = packer.pack(tensor)
            if packed is not None:
                if self.counts_all:
                    self._pack_rest(tensor)
                return packer.unpack, packed
        return self._unpack_rest, self._pack_rest(tensor)

    def unpack(self, kept: tuple[Callable[[Any], torch.Tensor], Any]) -> torch.Tensor:
        give_back, packed = kept
        self._on_unpack(self._owner)
        return give_back(packed)
