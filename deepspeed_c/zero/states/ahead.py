"""Updates in host memory that begin while backward still runs on the device. If the step is skipped or clipped, the
updates are undone to the bit.

Speculation, then validation (SuperOffload, arXiv 2509.21271): a bucket whose gradients have arrived is updated as if no
step were ever skipped or clipped. Its masters and states are copied first, and an undo restores this copy; it does not
reverse the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch

from deepspeed_c.logging import logger
from deepspeed_c.ops import flat
from deepspeed_c.ops.optim import FusedOptimizer
from deepspeed_c.zero.layout.unit import Unit

__all__ = ["StepAhead"]

Key = tuple[Unit, int]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies ``source`` to ``target``. If the flat kernels support the dtype, the threads that update the tensor do it."""
    if source.is_floating_point():
        flat.cast(source, target)
    else:
        target.copy_(source)


class StepAhead:
    """Updates buckets on a separate thread, from the first ``submit`` of a step to ``keep`` or ``take_back``.

    Args:
        base: an optimizer that updates any piece by itself; ``begin_step`` and ``take_back_step`` count its steps.
        states: the tensors of a bucket that an update changes.
        update: updates a bucket with gradients times a factor. It writes only the tensors that ``states`` gives,
        because backward still reads the weights.
        before_first: is called before the first update of a step.

    Copies of masters and states are made before an update. They take as much host memory as the tensors that are
    updated ahead. The class is not thread-safe, so callers take turns: autograd's hooks hold the reducer's lock, and a
    step begins when backward has ended.
    """

    def __init__(
        self,
        base: FusedOptimizer,
        states: Callable[[Unit, int], Sequence[torch.Tensor]],
        update: Callable[[Unit, int, float], None],
        before_first: Callable[[], None],
    ) -> None:
        self._base, self._states, self._update, self._before_first = base, states, update, before_first
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: dict[Key, Future[None]] = {}
        self._before: dict[Key, list[torch.Tensor]] = {}  # copies; their memory is used again in later steps
        self._is_open = False
        self._terms: tuple[float, Any] = 0.0, None
        self._is_promising = True

    def expect(self, is_kept: bool) -> None:
        """Sets whether updates ahead of the next step are worth while. ``is_kept``: whether the present step keeps such
        updates, or would keep them. So a series of clipped steps does not begin updates in vain."""
        self._is_promising = is_kept

    def _terms_now(self, grad_scale: float) -> tuple[float, Any]:
        """The inputs of an update in addition to gradients and states."""
        groups = self._base.param_groups
        # Values are copied, because a caller may write to them in place (betas may be a list).
        return grad_scale, [
            {k: float(v) if torch.is_tensor(v) else deepcopy(v) for k, v in g.items() if k != "params"} for g in groups
        ]

    def submit(self, unit: Unit, bucket: int, grad_scale: float) -> None:
        """Queues the update of a bucket whose gradients are complete. If the same bucket comes a second time, its
        gradients were not complete, and all updates ahead are taken back."""
        if not self._is_promising:
            return
        if (unit, bucket) in self._jobs:
            self.take_back()  # the bucket's gradients were not complete
            return
        if not self._is_open:
            self._before_first()
            self._terms = self._terms_now(grad_scale)
            self._base.begin_step()
            self._is_open = True
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="deepspeed_c step ahead")
        self._jobs[unit, bucket] = self._thread.submit(self._run, unit, bucket, grad_scale)

    def _run(self, unit: Unit, bucket: int, grad_scale: float) -> None:
        tensors = self._states(unit, bucket)
        before = self._before.pop((unit, bucket), [])
        if [(t.shape, t.dtype) for t in before] != [(t.shape, t.dtype) for t in tensors]:
            before = [torch.empty_like(tensor) for tensor in tensors]
        with torch.no_grad():
            for tensor, copy in zip(tensors, before):
                _copy(tensor, copy)
        self._before[unit, bucket] = before  # from now on ``take_back`` can restore the bucket
        self._update(unit, bucket, grad_scale)

    def _settle(self) -> set[Key]:
        """Waits for the running update and cancels the updates that have not begun. Returns the buckets that have been
        updated."""
        begun = {key for key, job in reversed(list(self._jobs.items())) if not job.cancel()}
        for key in begun:
            self._jobs[key].exception()  # waits
        return begun

    def keep(self, grad_scale: float) -> set[Key]:
        """Keeps the updates if they were made with the factor and settings of the step; otherwise undoes all of them.
        Returns the buckets that have been updated: the step has to update all others. The set is empty if no bucket was
        updated or all updates were taken back."""
        begun = self._settle() if self._is_open and self._terms == self._terms_now(grad_scale) else set()
        if not begun or any(self._jobs[key].exception() is not None for key in begun):
            self.take_back()
            return set()
        self._jobs.clear()
        self._is_open = False
        return begun

    def take_back(self) -> None:
        """Restores masters, states and step counts as they were before the first ``submit``. Does nothing if no update
        was begun."""
        if not self._is_open:
            return
        with torch.no_grad():
            for key in self._settle():
                error = self._jobs[key].exception()
                if error is not None:
                    # The step makes this update again and raises if it fails there, so a warning is enough here.
                    logger.warning("an update ahead of the step failed and is done in the step: %s", error)
                for tensor, copy in zip(self._states(*key), self._before.get(key, [])):
                    _copy(copy, tensor)
        self._jobs.clear()
        self._base.take_back_step()
        self._is_open = False

    def free_copies(self) -> None:
        """Frees the memory of the copies. Call it between two steps; later updates make new copies."""
        self._before.clear()

    def close(self) -> None:
        self.take_back()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self.free_copies()
