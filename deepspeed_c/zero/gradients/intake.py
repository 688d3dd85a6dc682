"""The ways of a gradient to its bucket: from hooks of autograd, from compiled graphs, and from callers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_c import _C
from deepspeed_c.zero.gradients.bucket import Bucket
from deepspeed_c.zero.gradients.scaling import PassScaling
from deepspeed_c.zero.gradients.slots import SlotTable
from deepspeed_c.zero.weights.grad_face import GRAD

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot

__all__ = ["GradientIntake"]

Hook = Callable[[torch.Tensor], None]


class GradientIntake:
    """Moves each gradient from ``param.grad`` into its bucket. Most gradients pass through C hooks (``path``) without
    a call of Python.

    begin_inside: called at a gradient that arrives while no pass is running. start: launches the bucket of a number;
    hooks call it where they launch buckets. lock: hooks of several threads take turns.
    """

    def __init__(
        self,
        slots: SlotTable,
        buckets: Sequence[Bucket],
        path: _C.GradientPath,
        scaling: PassScaling,
        *,
        begin_inside: Callable[[], None],
        start: Callable[[int], None],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._slots, self._buckets, self._path, self._scaling = slots, buckets, path, scaling
        self._begin_inside = begin_inside
        self._is_in_pass = self._will_reduce = False
        self._parts: set[int] = set()  # parameters of which ``param.grad`` holds a part of this pass's gradient
        self.clear()  # the engine's first window begins without gradients
        path.connect(lock=lock, add=self._add, open=self._open, start=start)
        self._path_hooks = [self._hook(slot) for slot in slots]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.wrap_hooks(lambda i, hook: hook)

    def _hook(self, slot: Slot) -> Hook:
        """The hook that autograd calls with a gradient. It handles all gradients in C, except for the cases that it
        passes to ``_add``.
        """
        return self._path.hook(slot.tracker_index)

    def wrap_hooks(self, wrap: Callable[[int, Hook], Hook]) -> None:
        """From now on autograd calls ``wrap(i, hook)`` in place of the hook of each parameter ``i``."""
        for handle in self._handles:
            handle.remove()
        self._handles = [
            slot.param.register_post_accumulate_grad_hook(wrap(slot.tracker_index, hook))
            for slot, hook in zip(self._slots, self._path_hooks)
        ]

    def set_mode(self, *, is_in_pass: bool, will_reduce: bool, launches: bool) -> None:
        """Called whenever one of these may have changed. is_in_pass: whether a pass is running. will_reduce: whether
        its gradients will be reduced when it ends. launches: whether hooks launch buckets that are complete."""
        self._is_in_pass, self._will_reduce = is_in_pass, will_reduce
        self._path.set_mode(takes=is_in_pass and self._scaling.is_plain, launches=launches)

    def _open(self, i: int) -> None:
        self._buckets[i].open(self._will_reduce)

    def _add(self, i: int, param: torch.Tensor) -> None:
        """Takes a gradient that the C hook does not handle. Such gradients are the first one of an unannounced pass,
        gradients that must be scaled, sparse gradients, gradients that are not contiguous, and gradients on a device.
        """
        grad = GRAD.__get__(param)
        GRAD.__set__(param, None)
        if not self._is_in_pass:
            self._begin_inside()
        slot = self._slots[i]
        bucket = self._buckets[self._slots.bucket_of(slot)]
        bucket.add(slot, grad, self._scaling.ratio_of(slot), will_reduce=self._will_reduce)
        self._path.mark(i)

    def open_for_caller(self, slot: Slot) -> None:
        """Makes a place for a gradient that a caller has assigned."""
        bucket = self._buckets[self._slots.bucket_of(slot)]
        if not bucket.has_result:
            bucket.open(self._will_reduce)
            self._path.note(slot.tracker_index)

    def number_of(self, tensor: Any) -> int | None:
        """The number of a parameter whose gradients a graph may hand to ``take``. None for another tensor, and for a
        parameter whose gradients are shown to callers or to their hooks."""
        slot = self._slots.find(tensor)
        # The gradients that callers find in ``param.grad`` are scaled early.
        if slot is None or tensor._backward_hooks or self._scaling.is_early(slot):
            return None
        return slot.tracker_index

    def take(self, i: int, gradient: torch.Tensor) -> None:
        """Takes the gradient of parameter ``i`` from a compiled backward, in place of autograd's hook."""
        param = self._slots[i].param
        GRAD.__set__(param, gradient)
        self._path_hooks[i](param)

    def take_part(self, i: int, gradient: torch.Tensor) -> None:
        """Takes a part of the gradient of parameter ``i`` from a compiled backward. Autograd adds the other parts, if
        there are any, and calls its hook with the sum."""
        param = self._slots[i].param
        before = GRAD.__get__(param)
        # Other parameters may have the same tensor as their gradient, and autograd adds in place.
        GRAD.__set__(param, gradient.clone() if before is None else before + gradient)
        self._parts.add(i)

    def end_pass(self) -> None:
        """Takes the sums of parts to which autograd has added nothing more."""
        for i in sorted(self._parts):
            self._path_hooks[i](self._slots[i].param)
        self._parts.clear()

    def clear(self) -> None:
        """Drops gradients that have not come to their buckets."""
        with torch._C.DisableTorchFunctionSubclass():  # as in ``HiddenGradients.check``
            for slot in self._slots:
                GRAD.__set__(slot.param, None)
        self._parts.clear()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
