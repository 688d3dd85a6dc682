"""Saving of autograd's tensors in a forward for the backward, by a chain of packers. Each packer may store a tensor in
its own form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.utils.checkpoint

__all__ = ["Packer", "SavedTensors", "counts_all", "give_back", "hooks_around", "keep", "overwritten"]


_Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""The methods ``pack`` and ``unpack`` of a packer."""


class Packer(Protocol):
    """Stores some saved tensors in its own form, such as a reference, a copy in other memory, or fewer bits."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the object to keep in place of ``tensor``, or None to leave ``tensor`` to the next packer.

        If ``tensor`` is an operator's output, a packer must keep ``tensor.detach()`` instead. The tensor itself would
        keep the graph alive, and the graph would keep the tensor alive.
        """

    def unpack(self, packed: Any) -> torch.Tensor:
        """Returns the tensor when a backward needs it, with the same shape and dtype, on the same device."""


def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Keeps a tensor that no packer took, in the same way as autograd without hooks."""
    # An operator's output would keep the operator alive, and the operator its output: the graph would never be freed.
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def give_back(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Raises RuntimeError if the tensor was overwritten. Autograd checks this only without hooks."""
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
    """(pack, unpack) of the ``saved_tensors_hooks`` around the caller. Without hooks, (keep, give_back), which keep
    tensors in the same way as autograd.
    """
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (keep, give_back) if around is None else around


def counts_all(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Whether ``pack`` belongs to a checkpoint. A checkpoint identifies saved tensors by their number, so it must get
    all tensors again when it recomputes the forward. Packers of this package declare this by an attribute of the object
    that ``pack`` is a method of.
    """
    is_of_torch = getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__
    return is_of_torch or getattr(getattr(pack, "__self__", None), "counts_all", False)


class SavedTensors:
    """Packers, in the order in which they are asked. The packer that took a tensor also returns it.

    A tensor that no packer takes goes to the ``saved_tensors_hooks`` around the forward. Without hooks it is kept
    unchanged.
    """

    def __init__(self) -> None:
        self._packers: tuple[_Pair, ...] = ()

    def add(self, packer: Packer) -> None:
        """Adds ``packer`` at the end of the chain. Must not be called while a forward runs."""
        self._packers = (*self._packers, (packer.pack, packer.unpack))

    def hooks_of(self, owner: object, on_unpack: Callable[[Any], None]) -> torch.autograd.graph.saved_tensors_hooks:
        """The context of one forward. Inside it autograd saves tensors through the chain.

        owner: an object that lives at least as long as all tensors that the forward has saved.
        on_unpack: called with ``owner`` whenever a backward asks for a saved tensor.
        """
        chain = _Chain(self._packers, owner, on_unpack)
        return torch.autograd.graph.saved_tensors_hooks(chain.pack, chain.unpack)


class _Chain:
    """The packers of one forward, and the hooks around it."""

    def __init__(self, packers: tuple[_Pair, ...], owner: object, on_unpack: Callable[[Any], None]) -> None:
        self._packers, self._owner, self._on_unpack = packers, owner, on_unpack
        # Autograd calls only the innermost hooks, which are this chain's. So the chain calls outer hooks (such as
        # save_on_cpu) itself.
        self._pack_rest, self._unpack_rest = hooks_around()
        self.counts_all = counts_all(self._pack_rest)

    def pack(self, tensor: torch.Tensor) -> tuple[Callable[[Any], torch.Tensor], Any]:
        for pack, unpack in self._packers:
            packed = pack(tensor)
            if packed is not None:
                if self.counts_all:
                    self._pack_rest(tensor)
                return unpack, packed
        return self._unpack_rest, self._pack_rest(tensor)

    def unpack(self, kept: tuple[Callable[[Any], torch.Tensor], Any]) -> torch.Tensor:
        give_back, packed = kept
        self._on_unpack(self._owner)
        return give_back(packed)
