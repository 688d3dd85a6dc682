"""The computations of a rank in a recorded step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deepspeed_c.plan.recorded import Recorder

__all__ = ["Computing", "ModuleWork"]


class ModuleWork(NamedTuple):
    """Times of a rank's computations, in ns."""

    forward: Mapping[str, int]  # by the module whose own operators these are, for one micro-batch
    backward: Mapping[str, int]
    ns_per_byte: float = 0.0  # of memory that is read or written
    update_ns_per_byte: float = 0.0  # of states that an update reads or writes
    again: Sequence[str] = ()  # layers whose forward runs again in the backward


NO_WORK = ModuleWork({}, {})


class Computing:
    """Records the computations of the modules of an outline.

    Work of modules that the outline does not have (those without parameters) is their nearest ancestor's.
    """

    def __init__(self, recorder: Recorder, work: ModuleWork, paths: Iterable[str]) -> None:
        """paths: of the outline's modules, with "" for the outline itself."""
        known = set(paths)
        self._recorder, self._work = recorder, work
        self._forward, self._backward = (_by_known(half, known) for half in (work.forward, work.backward))
        self._layer_of = {path: layer for path in known for layer in work.again if _is_within(path, layer)}
        self._again = Counter[str]()
        for path, ns in self._forward.items():
            if path in self._layer_of:
                self._again[self._layer_of[path]] += ns
        self._reached: set[str] = set()  # modules that the backward of the last micro-batch has come to
        self._layers_done: set[str] = set()

    def on_work(self, path: str, is_backward: bool) -> None:
        """The module at ``path`` computes, as ``Outline`` calls it."""
        if not is_backward:
            self._recorder.run(self._forward.get(path, 0), path)
            return
        self._reached.add(path)
        layer = self._layer_of.get(path)
        if layer is not None and layer not in self._layers_done:
            self._layers_done.add(layer)
            self._recorder.run(self._again[layer], f"{layer} again")
        self._recorder.run(self._backward.get(path, 0), path)

    def begin_backward(self) -> None:
        """The backward of a micro-batch begins: first that of the loss, and of other modules that an outline's backward
        does not reach."""
        if self._reached:
            for path, ns in self._backward.items():
                if path not in self._reached:
                    self._recorder.run(ns, path)
        self._layers_done.clear()

    def move_bytes(self, n_bytes: int, label: str) -> None:
        """This many bytes of memory are read or written."""
        self._recorder.run(round(n_bytes * self._work.ns_per_byte), label)

    def update(self, n_bytes: int, label: str) -> None:
        """An optimizer reads or writes this many bytes."""
        self._recorder.run(round(n_bytes * self._work.update_ns_per_byte), label)


def _by_known(ns_of: Mapping[str, int], known: set[str]) -> Counter[str]:
    found = Counter[str]()
    for path, ns in ns_of.items():
        while path and path not in known:
            path = path.rpartition(".")[0]
        found[path] += ns
    return found


def _is_within(path: str, layer: str) -> bool:
    return path == layer or path.startswith(f"{layer}.")
