"""The facts of a window that all ranks agree on: norm, non-finite elements, bad losses, requests, tokens. They travel
in one small collective, together with a flag for each parameter and the hashes of the check for drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from deepspeed_c.comm.axes import SP
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.ops.sums import N_LIMBS, limbs_of, value_of_limbs
from deepspeed_c.zero.gradients.drift import DriftCheck
from deepspeed_c.zero.gradients.sums import GradientSums

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot

__all__ = ["FactsExchange", "StageFacts", "StepRequests", "WindowFacts", "WindowNotes"]


class StepRequests(NamedTuple):
    """Requests of ranks at the end of a step."""

    stop: bool = False  # end the run
    save: bool = False  # save a checkpoint
    is_saving: bool = False  # an earlier save is still being written: no new one yet


class WindowNotes(NamedTuple):
    """A rank's own part of the facts of a window, beside its gradients."""

    has_bad_loss: bool
    requests: StepRequests
    losses: Sequence[tuple[float, float]]  # of this rank's micro-batches, with their weights in the window's mean
    share: float  # the weight of a micro-batch in the mean: 1 / accumulation steps
    n_tokens: int  # in the batches of this rank


class WindowFacts(NamedTuple):
    """The facts that all ranks agree on at the end of a window."""

    norm: float  # global L2 norm of the summed gradients as stored; padding and unused parameters are zero
    n_nonfinite: int  # inf or NaN elements over all ranks
    n_bad_losses: int  # ranks whose loss was inf or NaN
    unused: list[Slot]  # parameters that no rank gave a gradient
    requests: StepRequests = StepRequests()  # of all ranks: a request of any rank counts
    loss: float | None = None  # mean over ranks and micro-batches; None where no rank's loss is known
    n_tokens: int = 0  # of all ranks; tokens that several ranks were given count once


class StageFacts(NamedTuple):
    """Facts summed over the ranks that hold the same layers."""

    numbers: list[float]
    """[sum of squares, non-finite elements, bad losses, losses, ranks with a loss, tokens, ranks that request a stop,
    a save, no save]."""
    flags: list[float]
    hashes: list[float]
    limbs: list[float]
    """With sums in a tree: the limbs (``ops.sums``) of the sum of squares, and those of the sum of losses. The two
    numbers above are zero then."""


# The length of ``StageFacts.numbers``.
_N_NUMBERS = 9


class FactsExchange:
    """Exchanges the facts about the gradients in ``sums``. ``sum_over_stage`` sums over the ranks with the same layers.
    ``sum_over_stages`` sums the result over the stages of a pipeline."""

    def __init__(self, sums: GradientSums, mesh: Mesh) -> None:
        self._sums, self._stage, self._pipeline = sums, mesh.stage, mesh.pipeline
        self._drift = DriftCheck(sums.units, mesh)
        self._n_parts = mesh.size(SP)
        self._is_first_twin = mesh.tensors.rank == 0
        self._is_exact = sums.summing.is_in_tree

    def sizes(self, n_flags: int) -> tuple[int, int]:
        """(numbers that are summed over the ranks with the same layers, numbers that are summed over the stages)."""
        more = 2 * N_LIMBS if self._is_exact else self._drift.n_numbers
        return _N_NUMBERS + n_flags + more, _N_NUMBERS + 1

    def sum_over_stage(
        self, notes: WindowNotes, flags: Sequence[float], hash_of_inputs: Callable[[], int]
    ) -> StageFacts:
        """flags: this rank's numbers to be added up beside the facts."""
        # If several ranks hold the same sums, only one of them counts them. The sums of twins stand apart, because the
        # exchange also checks that twins agree.
        units = self._sums.units
        with_twins = [unit for unit in units if unit.twins.world_size > 1]
        facts = [0.0, 0.0, float(notes.has_bad_loss)]
        loss = 0.0 if self._is_exact else sum(loss * share for loss, share in notes.losses)
        facts += [loss, float(bool(notes.losses)), float(notes.n_tokens * self._is_first_twin)]
        facts += map(float, notes.requests)
        if self._is_exact:
            return self._sum_exactly(facts, [loss for loss, _ in notes.losses], flags)
        squares = self._sums.squares(unit for unit in units if unit not in with_twins and unit.speaks)
        of_twins = self._sums.squares(unit for unit in with_twins if unit.replicas.rank == 0)
        for both in (squares, of_twins) if self._is_first_twin else (squares,):
            facts[0], facts[1] = facts[0] + both[0], facts[1] + both[1]
        facts += flags
        facts += self._drift.numbers(float(of_twins[1]) if of_twins[1] else of_twins[0], hash_of_inputs)
        summed, end = self._stage.sum_numbers(facts), _N_NUMBERS + len(flags)
        return StageFacts(summed[:_N_NUMBERS], summed[_N_NUMBERS:end], summed[end:], [])

    def _sum_exactly(self, facts: list[float], losses: Sequence[float], flags: Sequence[float]) -> StageFacts:
        """As ``sum_over_stage``. Limbs are integers below 2**53, so their sums over ranks are exact. There are no
        twins: same_bits refuses tensor-parallel ranks."""
        *squares, facts[1] = self._sums.exact_squares(unit for unit in self._sums.units if unit.speaks)
        of_losses = [sum(column) for column in zip(*map(limbs_of, losses or [0.0]))]
        summed = self._stage.sum_numbers([*facts, *flags, *squares, *of_losses])
        end = _N_NUMBERS + len(flags)
        return StageFacts(summed[:_N_NUMBERS], summed[_N_NUMBERS:end], [], summed[end:])

    def sum_over_stages(self, facts: StageFacts, unused: list[Slot], share: float) -> WindowFacts:
        """Raises DriftFound on all ranks if twins of any stage differ. unused: the parameters of this stage that no
        rank gave a gradient. share: of a micro-batch in the window's mean."""
        mine = [*facts.numbers, float(self._drift.differs(facts.hashes))]
        *numbers, n_drifting = self._pipeline.sum_numbers(mine, label="facts of all stages")
        loss = None
        if facts.limbs:
            numbers[0] = value_of_limbs(facts.limbs[:N_LIMBS])
            # Ranks and accumulation steps must not divide one after the other: that would round by their numbers.
            n_losses = round(numbers[4] / share)
            loss = value_of_limbs(facts.limbs[N_LIMBS:]) / n_losses if n_losses else None
        elif numbers[4]:
            # Ranks of a sequence have terms of its loss, and each counts as a rank with a loss.
            loss = numbers[3] / numbers[4] * self._n_parts
        if n_drifting:
            self._drift.report(facts.hashes, self._sums.results)
        return WindowFacts(
            norm=math.sqrt(numbers[0]),
            n_nonfinite=int(numbers[1]),
            n_bad_losses=int(numbers[2]),
            unused=unused,
            loss=loss,
            n_tokens=int(numbers[5]),
            requests=StepRequests(*map(bool, numbers[6:])),
        )
