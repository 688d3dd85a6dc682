"""Messages on skipped and refused steps, with the rank and the parameter that caused them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import LossScaleError, NonFiniteLossError, OptimizerError, StateError
from deepspeed_c.logging import logger
from deepspeed_c.zero.gradients.sums import GradientSums
from deepspeed_c.zero.layout.unit import Slot

__all__ = ["WindowLosses", "broken_error", "lowest_scale_error", "unused_error", "warn_of_overflow"]


class WindowLosses:
    """The losses of this window on this rank, and whether one was inf or NaN."""

    def __init__(self) -> None:
        self._terms: list[tuple[torch.Tensor | float, float]] = []
        self.share = 1.0
        """The weight of the last loss in its window's mean."""

    def note(self, loss: torch.Tensor, share: float) -> None:
        """Adds a loss whose weight in the window's mean is ``share``. Does not wait for a device."""
        loss, self.share = loss.detach(), share
        self._terms.append((loss.item() if loss.device.type == "cpu" else loss.clone(), share))

    def forget(self) -> None:
        self._terms.clear()

    @property
    def terms(self) -> list[tuple[float, float]]:
        """(loss, weight) of each loss. The first read of this or of ``has_bad`` waits for the device."""
        self._terms = [(float(loss), share) for loss, share in self._terms]
        return list(self._terms)

    @property
    def has_bad(self) -> bool:
        return not all(math.isfinite(loss) for loss, _ in self.terms)

    def error(self, comm: Collectives) -> NonFiniteLossError:
        """The error for bad losses. It names the ranks of ``comm`` that had one. Collective."""
        bad = [float(r) for r in comm.gather_numbers(int(self.has_bad))]
        ranks = ", ".join(str(r) for r, is_bad in enumerate(bad) if is_bad)
        return NonFiniteLossError(
            "the loss is inf or NaN; the step was skipped and weights and optimizer state are unchanged",
            where=f"rank {ranks}",
            fix="look at the batch and the forward pass of that rank (torch.autograd.detect_anomaly helps);"
            " no loss scale mends this",
        )


def warn_of_overflow(sums: GradientSums, rank: int, n_nonfinite: int, scaler: _C.LossScaler | None) -> None:
    """Logs the first parameter of this rank's shard whose gradient is not finite."""
    found = sums.first_nonfinite()
    if found is not None:
        name, n_inf, n_nan = found
        logger.warning(
            "rank %d: step skipped, the sum of gradients over ranks is not finite: %d elements in all;"
            " the first in this rank's shard is in %s (%d inf, %d NaN)%s",
            rank,
            n_nonfinite,
            name,
            n_inf,
            n_nan,
            f"; loss scale {scaler.scale:g}" if scaler is not None else "",
        )


def unused_error(unused: Sequence[Slot]) -> OptimizerError:
    return OptimizerError(
        f"{len(unused)} parameters got no gradient on any rank, the first is {unused[0].name}",
        where="engine.step",
        fix='freeze them, or set "zero_optimization.ignore_unused_parameters": true',
    )


def broken_error(why: str) -> StateError:
    return StateError(
        f"an earlier step failed in its middle: {why}",
        where="engine.step",
        fix="load a checkpoint; masters and moments of some buckets have been updated and others not",
    )


def lowest_scale_error(scaler: _C.LossScaler) -> LossScaleError:
    return LossScaleError(
        f"gradients overflow at the lowest loss scale ({scaler.scale:g})",
        where=f"step {scaler.step}",
        fix="train in bf16, lower the learning rate, or look at the parameter named in the log;"
        ' "min_loss_scale" is the floor',
    )
