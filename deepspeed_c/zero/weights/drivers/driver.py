"""The interface of a driver: who says when a fetcher's units are gathered and released.

*Where* the elements come from is decided by a unit's source (``zero/weights/sources``), which knows no driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from deepspeed_c.zero.weights.drivers.forwards import Forward
from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["Driver", "Drivers"]


class Driver:
    """Decides when the units of ``fetcher`` are gathered and released.

    Drivers lie on one another (``Drivers``), and the one on top is asked. It answers what it decides, and leaves the
    rest to the driver under it. The one at the bottom answers everything.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher
        self.under: Driver | None = None

    def begin_forward(self, name: str, root: int = 0, units: Callable[[], list[int]] | None = None) -> Forward | None:
        """Called when a forward of a root module begins. Returns an object that must live as long as the forward's
        graph, or None for a forward without gradients.

        name: train or eval. root: number of the root module; each root has plans of its own. units: returns
        the units that hold parameters of the root; default: all units.
        """
        return self.under.begin_forward(name, root, units)

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Called when a forward of a root module has ended. ``outputs``: the tensors that it returns and that require a
        gradient."""
        self.under.end_forward(outputs)

    def begin_backward(self, starts: Sequence[Any] | None = None) -> None:
        """Called when a backward pass begins. Released parameters get their whole shape, because gradients may arrive
        for them.

        starts: the first nodes of the graph; None if the pass is running already. Collective if several forwards are in
        flight.
        """
        self.under.begin_backward(starts)

    def begin_reading(self) -> None:
        """Called from within a pass that reads weights as a backward does but adds to no gradient. The real backward of
        the same forwards may still come.

        Does nothing during a forward or backward pass: the reading belongs to that pass.
        """
        self.under.begin_reading()

    def end_backward(self) -> None:
        self.under.end_backward()

    def abort(self) -> None:
        """Called on all ranks alike when a pass has raised. Releases all units and leaves the plans unchanged."""
        self.under.abort()

    def use(self, group: GatherUnit) -> None:
        """Starts the gathers that are due now that ``group`` is used, that of ``group`` among them, and releases units.
        Collective, unless the plan has gathered it already."""
        self.under.use(group)

    @property
    def live(self) -> list[int]:
        """The units that the running pass has gathered and not released."""
        return self.under.live

    def rest(self) -> None:
        """Called when units have been gathered or let go by others while no pass runs."""
        self.under.rest()

    def begin_writes(self) -> None:
        """Called before weights are written."""
        self.under.begin_writes()

    def end_writes(self) -> None:
        """Called when weights have been written."""
        self.under.end_writes()

    def drop(self) -> None:
        """Called when the fetcher is closed. Lets go of all that the driver holds, and leaves the others."""
        self.fetcher.drivers.take(self)


D = TypeVar("D", bound=Driver)


class Drivers:
    """The drivers of one fetcher: the one that decides on top, and at the bottom one of kind ``bottom``."""

    def __init__(self, fetcher: Fetcher, bottom: type[Driver]) -> None:
        self._fetcher = fetcher
        self._made: dict[type[Driver], Driver] = {}
        self.top: Driver = self.of(bottom)

    def of(self, kind: type[D]) -> D:
        """The driver of one kind, which is made when it is first asked for."""
        if kind not in self._made:
            self._made[kind] = kind(self._fetcher)
        return self._made[kind]

    def put(self, driver: Driver) -> None:
        """Lays ``driver`` on top of the others."""
        driver.under, self.top = self.top, driver

    def take(self, driver: Driver) -> None:
        """Takes ``driver`` away from wherever it lies."""
        above: Driver | None = None
        found = self.top
        while found is not driver:
            above, found = found, found.under
        if above is None:
            self.top = driver.under
        else:
            above.under = driver.under
        driver.under = None

    def has_only_bottom(self) -> bool:
        return self.top.under is None

    def drop(self) -> None:
        while not self.has_only_bottom():
            self.top.drop()
        self.top.drop()
