"""A parameter whose values are still in a file. The unit that takes it over reads this rank's part by ranges."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import StateError
from deepspeed_c.zero.weights.param import ShardState, ZeroParamStatus, make_sharded, point_at_nothing

__all__ = ["ReadRange", "UnreadShard", "leave_unread"]

ReadRange = Callable[[int, torch.Tensor], None]
"""(first element, into): fills the flat tensor ``into`` with the parameter's elements from the first on."""


class UnreadShard(ShardState):
    """The state of a parameter from the time its source is known until a unit reads it. No rank holds any of it."""

    def __init__(
        self, param: torch.nn.Parameter, name: str, comm: Collectives, shape: torch.Size, read: ReadRange
    ) -> None:
        super().__init__(param, name, comm, shape, persists=False)
        self.read = read
        self.piece = self.empty
        self.begins = self.numels = [0] * comm.world_size

    @property
    def status(self) -> ZeroParamStatus:
        return ZeroParamStatus.NOT_AVAILABLE

    def acquire(self, params: object) -> None:
        raise self.describe_released()

    def describe_released(self) -> StateError:
        return StateError(
            f"the parameter of shape {tuple(self.shape)} has no values: the call that was to read them has failed",
            where=self.name,
            fix="make the model anew, and call init_inference with it",
        )


def leave_unread(param: torch.nn.Parameter, name: str, comm: Collectives, shape: torch.Size, read: ReadRange) -> None:
    """Make ``param``, which has no elements yet, a sharded parameter of ``shape`` whose values ``read`` provides."""
    make_sharded(param, UnreadShard(param, name, comm, shape, read))
    point_at_nothing(param)
