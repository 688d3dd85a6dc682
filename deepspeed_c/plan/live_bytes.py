"""Measure allocated memory: the bytes of live tensor storages, sampled after every operator, at the peak of each phase."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Tracks every storage that an operator has returned since entry, by weak references, and their live bytes.

    Exact and repeatable, unlike the resident set. Memory that a kernel allocates and frees within one call is not seen.
    ``without``: tensors whose storages are not counted.
    The memory events of torch's profiler are no alternative: they miss releases in gloo's threads, which often drop the
    last reference to a sent tensor.
    """

    def __init__(self, *, without: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in without:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage), 0
        self._phase: str | None = None
        self.peaks: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = False
        for value in tree_leaves(result):
            if torch.is_tensor(value) and value.layout == torch.strided and not value.is_meta:
                storage = value.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None or known[0].expired():
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    is_new = True
        if is_new:
            self._note()
        return result

    def nbytes(self) -> int:
        """Return the bytes of all live storages."""
        for key in [key for key, (reference, _) in self._known.items() if reference.expired()]:
            del self._known[key]
        return sum(nbytes for _, nbytes in self._known.values())

    def _note(self) -> None:
        if self._phase is not None:
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.nbytes())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the code within the context as a phase. ``peaks[name]`` is the largest number of live bytes in any run
        of the phase.
        """
        gc.collect()
        self._phase = name
        self._note()
        try:
            yield
        finally:
            self._note()
            self._phase = None
