"""Keeps sharded weights whole while a piece of code uses them repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from deepspeed_c.zero.weights.gather_unit import PlacedShard
from deepspeed_c.zero.weights.param import ShardState, state_of

__all__ = ["held_whole"]


@contextmanager
def held_whole(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context within which the sharded ``params`` stay whole. Each is gathered once for any number of reads.

    During a forward or backward of an engine the gathers follow the engine's plan. Collective for sharded parameters:
    enter it on all ranks, with the same parameters.
    """
    states: dict[int, tuple[ShardState, torch.Tensor]] = {}
    for param in params:
        state = state_of(param)
        if state is not None and not state.persists:
            states.setdefault(state.ds_id, (state, param))
    with ExitStack() as stack:
        # A set is iterated in a different order on each rank. Sorting gives the same order on all ranks.
        for _, (state, param) in sorted(states.items()):
            stack.callback(_hold(state, param))
        yield


def _hold(state: ShardState, param: torch.Tensor) -> Callable[[], None]:
    if type(state) is PlacedShard and state.fetcher.phase.is_active:
        state.fetcher.use(state.group)
        return state.hold()
    state.acquire([param])
    return partial(state.give_back, [param])
