"""Memory of a transport as a tensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from deepspeed_c import _C

__all__ = ["as_tensor", "discard"]

# The memory of all transports by its address.
_blocks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def as_tensor(block: _C.ShmBuffer | _C.ShmPart) -> torch.Tensor:
    """The bytes of an object of the binding, uint8. The tensor keeps the object alive. The memory is returned when
    nobody holds the object.
    """
    tensor = torch.frombuffer(block, dtype=torch.uint8)
    _blocks[tensor.data_ptr()] = block
    return tensor


def discard(storage: torch.UntypedStorage) -> None:
    """Returns to the system the memory of a storage that a transport has allocated.

    Storages that torch can resize then have length 0. Others keep their length: they hold zeros, and take memory again
    when they are written to.
    """
    if storage.resizable():
        storage.resize_(0)
    else:
        _blocks[storage.data_ptr()].discard()
