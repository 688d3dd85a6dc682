"""Measures the memory that stages keep of a micro-batch, in one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from deepspeed_c.pipe.split import bytes_between_halves
from deepspeed_c.pipe.writable import needs_gradient

__all__ = ["Scale"]


class Scale:
    """Weighs what autograd saves in a forward of each stage of this rank.

    Each storage counts once per stage, with its whole size. The storages of ``weights`` do not count, nor do tensors
    for which ``is_gathered`` returns True: parts of sharded weights. Memory that layers keep without autograd is not
    seen.
    """

    def __init__(
        self, weights: Iterable[torch.Tensor], is_gathered: Callable[[torch.Tensor], bool] = lambda tensor: False
    ) -> None:
        self._is_gathered = is_gathered
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self._seen: dict[int, dict[int, int]] = {}
        self._inputs: dict[int, list[torch.Tensor]] = {}
        self.bytes_of: dict[int, tuple[int, int]] = {}
        """stage -> (bytes held from the forward to the backward, bytes held between the halves of a split backward).
        The second number is 0 if the first half does the whole backward."""

    def stage(self, s: int, run: Callable[[Any], Any], *, splits: bool, is_last: bool) -> Callable[[Any], Any]:
        """``run`` of a stage, weighed. If it is the last stage, ``result`` belongs to it as well."""

        def weighed(value: Any) -> Any:
            self._seen[s], self._inputs[s] = {}, _differentiable(value)
            outputs = self._watch(s, lambda: run(value))
            if not is_last:
                self._end(s, outputs, splits)
            return outputs

        return weighed

    def result(self, s: int, run: Callable[[Any, int], Any], *, splits: bool) -> Callable[[Any, int], Any]:
        """``run`` makes the loss of the output of the last stage ``s``; it is weighed with the stage."""

        def weighed(outputs: Any, k: int) -> Any:
            loss = self._watch(s, lambda: run(outputs, k))
            self._end(s, loss, splits)
            return loss

        return weighed

    def _watch(self, s: int, run: Callable[[], Any]) -> Any:
        def save(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._ignored and not self._is_gathered(tensor):
                self._seen[s][storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(save, lambda tensor: tensor):
            return run()

    def _end(self, s: int, outputs: Any, splits: bool) -> None:
        kept = sum(self._seen.pop(s).values())
        inputs = self._inputs.pop(s)
        between = None
        if splits:
            roots = [get_gradient_edge(leaf) for leaf in _differentiable(outputs)]
            between = bytes_between_halves(roots, inputs)
        # The first half of a split backward frees nothing of the graph.
        self.bytes_of[s] = kept, 0 if between is None else kept + between


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if needs_gradient(leaf)]
