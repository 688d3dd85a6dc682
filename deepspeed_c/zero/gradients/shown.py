"""Gradients in ``param.grad``, as in plain torch. Used at stage 0, where every rank has the whole sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from deepspeed_c import _C
from deepspeed_c.errors import BackwardError

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot

__all__ = ["ShownGradients"]


class ShownGradients:
    """Show ``param.grad`` between backward passes, as a view of the gradient buffer.

    Every edit counts: writes in place, assignments, and None. ``take`` reads the edits back. During a pass
    ``param.grad`` is None (``hide``), because autograd would otherwise add a rank's own gradient to the sum over all
    ranks.

    views: for each parameter a view of its gradient, in its shape and dtype, with a version counter of its own. place:
    called with a parameter's slot before a gradient that a caller has assigned is written to the buffer. are_sums: the
    gradients are summed over several ranks.
    """

    def __init__(
        self,
        path: _C.GradientPath,
        views: Mapping[Slot, torch.Tensor],
        place: Callable[[Slot], None],
        *,
        are_sums: bool,
    ) -> None:
        self._path, self._place, self._are_sums, self._slots = path, place, are_sums, views.keys()
        self._views = [(slot, slot.tracker_index, view) for slot, view in views.items()]
        # The version of each view when it was shown; -1 if it is not shown.
        self._versions = [-1] * len(self._views)

    def __bool__(self) -> bool:
        return bool(self._views)

    def __contains__(self, slot: Slot) -> bool:
        """Whether callers find the gradient of ``slot`` in ``param.grad``."""
        return slot in self._slots

    def show(self, *, is_reduced: bool) -> None:
        """Sets ``param.grad``. is_reduced: whether the gradients have been reduced. Then parameters without a gradient
        on this rank may have one of another rank."""
        seen, everything = self._path.seen(), is_reduced and self._are_sums
        for k, (slot, i, view) in enumerate(self._views):
            if (everything or seen[i]) and slot.param.requires_grad:
                slot.param.grad = view
                self._versions[k] = view._version

    def take(self) -> None:
        """Read back the callers' edits of ``param.grad``. Raises BackwardError for an edit of an incomplete sum."""
        seen = self._path.seen()
        for k, (slot, i, view) in enumerate(self._views):
            grad, version = slot.param.grad, self._versions[k]
            if grad is (None if version < 0 else view) and (grad is None or view._version == version):
                continue
            if seen[i] & _C.GradientPath.SEEN_LATE:
                raise BackwardError(
                    f"param.grad of {slot.name} was changed before it was complete: a further gradient arrived after its bucket had been reduced",
                    where="param.grad",
                    fix="do not change gradients in this step, or drop them with engine.zero_grad(): from the next step on the sums are complete",
                )
            if grad is None:
                view.zero_()
                self._path.forget(i)
                self._versions[k] = -1
                continue
            if grad is not view:
                self._place(slot)
                view.copy_(grad.detach().to_dense() if grad.layout != torch.strided else grad.detach())
                self._path.see(i)
                slot.param.grad = view
            # Clipping also writes to the gradients of unused parameters, which are zero. A gradient that is still zero
            # leaves its parameter unused.
            elif not seen[i] and view.any():
                self._path.see(i)
            self._versions[k] = view._version

    def hide(self) -> None:
        """Sets ``param.grad`` back to None."""
        for k, (slot, _, _) in enumerate(self._views):
            if self._versions[k] >= 0:
                slot.param.grad = None
                self._versions[k] = -1
