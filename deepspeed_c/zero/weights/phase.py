"""The state of a fetcher that its gather units and the users of weights have to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.gather_unit import GatherUnit

__all__ = ["FetchPhase"]


class FetchPhase:
    """The kind of the running pass, and the form of released parameters in it. Drivers set it."""

    def __init__(self) -> None:
        self.is_active = False
        """Whether a forward of a root module or a backward pass is running."""
        self.is_in_backward = False
        """Whether a backward pass is running, or a pass that only reads weights."""
        self.expects_grads = False
        """Whether gradients may arrive at released parameters."""
        self.is_trained = False
        """Whether a reducer takes the gradients. Also True for a closed engine, which gets no gradients."""
        self.used_last: GatherUnit | None = None
        """The last unit that the running pass has used."""
        # Modules ask at each read of a parameter, so this is no property.
        self.hollows = False
        """Whether a pass of a compiled model is running. Released parameters are hollow then (``hollow_out``)."""
        self._has_graphs = False

    def begin(self, *, is_backward: bool, expects_grads: bool) -> None:
        self.is_active, self.is_in_backward, self.expects_grads = True, is_backward, expects_grads
        self.hollows, self.used_last = self._has_graphs, None

    def expect_no_more(self) -> None:
        """All gradients of the running pass have arrived."""
        self.expects_grads = False

    def rest(self) -> None:
        self.is_active = self.is_in_backward = self.expects_grads = self.hollows = False
        self.used_last = None

    def note_use(self, group: GatherUnit) -> None:
        self.used_last = group

    def train(self) -> None:
        """From now on backward passes are announced."""
        self.is_trained = True

    def compile(self, has_graphs: bool) -> None:
        """Sets whether graphs of the model read parameters as they are. Call it between passes."""
        self._has_graphs = has_graphs
