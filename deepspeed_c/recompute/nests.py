"""Splits the arguments of a layer into tensors and the rest: any nest of containers, keywords, numbers, None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Arguments", "detach_variable", "extract_tensors", "is_activation", "merge_tensors", "tensors_of"]

_PLAIN = frozenset((torch.Tensor, type(None), bool, int, float, str))


def is_activation(item: Any, n_ranks: int = 1) -> bool:
    """Whether ``item`` is a tensor that may be kept in another form. It must be of floating point, have at least one
    element for each rank, and lack the mark ``no_checkpointing``.
    """
    return (
        torch.is_tensor(item)
        and item.is_floating_point()
        and item.numel() >= max(n_ranks, 1)
        and not getattr(item, "no_checkpointing", False)
    )


def tensors_of(args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call, each once. It equals ``Arguments.tensors``, for a call that is not
    repeated.
    """
    leaves = (*args, *kwargs.values()) if kwargs else args
    for leaf in leaves:
        if type(leaf) not in _PLAIN:
            leaves = tree_leaves((args, kwargs))
            break
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors if len(tensors) < 2 else list({id(tensor): tensor for tensor in tensors}.values())


class Arguments:
    """The arguments of one call without its tensors. The tensors are given again for each repetition of the call.

    A tensor that was passed twice is passed as one tensor in repetitions, too.
    """

    __slots__ = ("_leaves", "_places", "_tree", "tensors")

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._tree: TreeSpec | None = None
        leaves = args
        if kwargs or any(type(arg) not in _PLAIN for arg in args):
            leaves, self._tree = tree_flatten((args, kwargs))
        self.tensors: list[torch.Tensor] = []
        """The tensors, each once. A holder that stores this object removes the tensors from it by ``forget``."""
        self._leaves = list(leaves)
        self._places: list[tuple[int, int]] = []
        known: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                place = known.setdefault(id(leaf), len(known))
                if place == len(self.tensors):
                    self.tensors.append(leaf)
                self._places.append((i, place))
                self._leaves[i] = None

    def forget(self) -> None:
        self.tensors = []

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """(args, kwargs) of the call, with the given tensors in place of the original ones."""
        leaves = list(self._leaves)
        for i, place in self._places:
            leaves[i] = tensors[place]
        return (leaves, {}) if self._tree is None else tree_unflatten(leaves, self._tree)


def extract_tensors(all_objects: Sequence[Any]) -> tuple[Sequence[torch.Tensor], Sequence[Any], Sequence[bool]]:
    """(tensors, other objects, flags) of a list or tuple, each as a sequence of the same type. For each place the flag
    says whether a tensor was there.
    """
    make = type(all_objects) if type(all_objects) in (list, tuple) else tuple
    flags = [torch.is_tensor(each) for each in all_objects]
    tensors = [each for each, is_tensor in zip(all_objects, flags) if is_tensor]
    others = [each for each, is_tensor in zip(all_objects, flags) if not is_tensor]
    return make(tensors), make(others), make(flags)


def merge_tensors(
    tensor_objects: Sequence[torch.Tensor], non_tensor_objects: Sequence[Any], tensor_flags: Sequence[bool]
) -> tuple:
    """The inverse of ``extract_tensors``, as a tuple. Raises ValueError where the counts do not fit the flags."""
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    n_tensors = sum(map(bool, tensor_flags))
    if (len(tensor_objects), len(non_tensor_objects)) != (n_tensors, len(tensor_flags) - n_tensors):
        raise ValueError(
            f"{len(tensor_objects)} tensors and {len(non_tensor_objects)} other objects; the flags want"
            f" {n_tensors} and {len(tensor_flags) - n_tensors}"
        )
    return tuple(next(tensors) if is_tensor else next(others) for is_tensor in tensor_flags)


def detach_variable(inputs: Sequence[Any], device: Any = None) -> tuple:
    """``inputs`` with tensors that share no graph with the caller's; on ``device``, if one is given.

    A tensor requires a gradient if the caller's tensor does. Raises TypeError unless ``inputs`` is a tuple or list.
    """
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(f"a tuple of tensors is needed, not {type(inputs).__name__}")
    return tuple(_detach(each, device) if torch.is_tensor(each) else each for each in inputs)


def _detach(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    there = tensor if device is None else tensor.to(device=device)
    return there.detach().requires_grad_(tensor.requires_grad)
