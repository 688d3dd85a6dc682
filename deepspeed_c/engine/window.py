"""The accumulation window: which micro-batch ends it, and the divisor of its losses."""

from __future__ import annotations

from deepspeed_c.config.batch import Batch
from deepspeed_c.errors import BackwardError

__all__ = ["Window"]


class Window:
    """Counts the micro-batches of one engine. ``is_managed`` (``managed_gradient_accumulation``): the engine decides
    where a window ends. ``divides_sums``: gradients are averaged when they have been summed, not on their way."""

    def __init__(self, batch: Batch, *, is_managed: bool, divides_sums: bool = False) -> None:
        self.batch, self.is_managed, self._divides_sums = batch, is_managed, divides_sums
        self.micro_steps = 0
        self._override: bool | None = None
        self._forwards = (-1, 0)  # number of the micro-batch, and of its forward, of the last call of note_forward

    def is_boundary(self) -> bool:
        """Whether the next ``step()`` updates the weights."""
        if self._override is not None:
            return self._override
        return not self.is_managed or (self.micro_steps + 1) % self.batch.accumulation_steps == 0

    def check_pass(self, n_backwards: int) -> None:
        """Raises BackwardError if sums are taken in a tree, and another backward pass would add a second node for a
        micro-batch. n_backwards: passes in the window so far."""
        if not self._divides_sums:
            return
        due = self.batch.accumulation_steps - 1 if self._is_steered else self.n_micro_steps
        if n_backwards > due:
            raise BackwardError(
                f"backward pass {n_backwards + 1} of this step came in micro-batch {due + 1}, and same_bits takes one pass"
                " for one grain: the order of a second one in the tree would depend on the number of ranks",
                where="backward",
                fix="add the losses of a micro-batch and call backward once, and step after each micro-batch; if you set"
                " the boundaries, let a window have gradient_accumulation_steps micro-batches",
            )

    def steer(self, is_boundary: bool) -> None:
        """Sets whether every ``step()`` until the next call is a boundary."""
        self._override = bool(is_boundary)

    def resize(self, **sizes: int) -> None:
        """Changes fields of ``batch``; called between two windows."""
        self.batch = self.batch._replace(**sizes)

    def place(self, micro_steps: int) -> None:
        """Sets the number of calls of ``step()`` so far to ``micro_steps``."""
        self.micro_steps, self._forwards = micro_steps, (-1, 0)

    def note_forward(self, n_backwards: int) -> tuple[int, int]:
        """Counts a training forward: (number of its micro-batch in the window, number of the forward in it).

        n_backwards: backward passes in the window so far, which count its micro-batches if the caller decides about
        boundaries.
        """
        micro_batch, n = n_backwards if self._is_steered else self.n_micro_steps, 0
        if self._forwards[0] == micro_batch:
            n = self._forwards[1] + 1
        self._forwards = micro_batch, n
        return self._forwards

    @property
    def n_micro_steps(self) -> int:
        """The number of calls of ``step()`` in the present window. 0 if the caller decides about boundaries: accelerate
        calls ``step()`` only at the boundary."""
        return 0 if self._is_steered else self.micro_steps % self.batch.accumulation_steps

    @property
    def _is_steered(self) -> bool:
        return self._override is not None or not self.is_managed

    @property
    def begin(self) -> int:
        """``micro_steps`` as it was when the present window began."""
        return self.micro_steps - self.n_micro_steps

    def share(self, scale_wrt_gas: bool = True) -> float:
        """The weight of a micro-batch in the window's average. ``scale_wrt_gas`` False: the caller has divided."""
        return 1.0 / self.batch.accumulation_steps if scale_wrt_gas else 1.0

    @property
    def reduces_each_pass(self) -> bool:
        """Whether no pass can be added to later ones before it is reduced."""
        return self._divides_sums

    def factor(self, scale_wrt_gas: bool = True) -> float:
        """The factor of a micro-batch's gradients on their way to the window's sum.

        If sums are divided at their end, all of them are divided by the number of micro-batches. A loss that the caller
        has divided is multiplied by it first. A division by the number of micro-batches, as by 3, would be rounded; but
        3 times 1/3 is 1 again, so gradients are those of the loss that was not divided.
        """
        if self._divides_sums:
            return 1.0 if scale_wrt_gas else float(self.batch.accumulation_steps)
        return self.share(scale_wrt_gas)

    def divisor(self) -> int:
        """The number of micro-batches that the window's sum is still to be divided by."""
        return self.batch.accumulation_steps if self._divides_sums else 1
