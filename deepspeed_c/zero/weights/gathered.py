"""Contexts within which sharded parameters (stage 3) are whole and may be read and edited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_c.errors import StateError
from deepspeed_c.zero.weights.fingerprint import fingerprint_of
from deepspeed_c.zero.weights.gather_unit import PlacedShard, WholeShard
from deepspeed_c.zero.weights.hooks import external_parameters
from deepspeed_c.zero.weights.param import check_edit, point_at, state_of

__all__ = [
    "GatheredParameters",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]


class GatheredParameters:
    """Context within which sharded parameters are whole. Collective: enter it on all ranks, with the same parameters.

    Args:
        params: a parameter, or any iterable of tensors; unsharded tensors are left alone.
        modifier_rank: the global rank whose edits count. On exit its values are written to every rank's shard and
        master weights. None: parameters may only be read. A write then raises StateError on all ranks and is undone.
        fwd_module: a module that will read ``params`` in its forward although they belong to another module (see
        ``register_external_parameter``). enabled: False makes the context do nothing.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params: list[torch.nn.Parameter] = []
        self._modifier_rank = modifier_rank
        if not enabled:
            return
        given = [params] if torch.is_tensor(params) else list(params)
        seen: set[int] = set()
        for param in given:
            if state_of(param) is not None and id(param) not in seen:
                seen.add(id(param))
                self._params.append(param)
        # A set is iterated in a different order on each rank. ``ds_id`` gives the same order on all ranks.
        self._params.sort(key=lambda param: state_of(param).ds_id)
        if fwd_module is not None:
            for param in self._params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        for params in self._together():
            state_of(params[0]).acquire(params)
        # A parameter that stays whole has no shards to restore it from, so it is copied. Such parameters are small.
        self._copies = [p.data.clone() if isinstance(state_of(p), WholeShard) else None for p in self._params]
        if self._modifier_rank is None:
            self._before = [
                None if c is not None else fingerprint_of(p.data) for p, c in zip(self._params, self._copies)
            ]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if not self._params:
            return False
        try:
            if self._modifier_rank is None:
                self._forbid_edits(raises=kind is None)
            else:
                self._keep_edits(raises=kind is None)
        finally:
            for params in self._together():
                state_of(params[0]).give_back(params)
            self._copies = self._before = None
        return False

    def _together(self) -> list[list[torch.nn.Parameter]]:
        """Lists of parameters to gather together: one list for each engine, and one for parameters without an engine."""
        sets: dict[Any, list[torch.nn.Parameter]] = {}
        for param in self._params:
            state = state_of(param)
            sets.setdefault(state.fetcher if isinstance(state, PlacedShard) else type(state), []).append(param)
        return list(sets.values())

    def _keep_edits(self, raises: bool) -> None:
        # If one rank has raised, the other ranks must not wait for it in a broadcast.
        failed = state_of(self._params[0]).everyone.gather_numbers(int(not raises), label="edits of parameters")
        if any(failed):
            self._restore()
            if raises:
                raise StateError(
                    f"rank {failed.index(1)} raised within GatheredParameters; the edits were not kept",
                    where=state_of(self._params[0]).name,
                    fix="look at that rank's exception",
                )
            return
        try:
            for param in self._params:
                check_edit(state_of(param), param.data)
        except StateError:
            self._restore()
            raise
        for param in self._params:
            state = state_of(param)
            # The new data may have another dtype, other strides, or be a view of the old data.
            whole = param.data.to(device=state.device, dtype=state.dtype).contiguous()
            everyone = state.everyone
            everyone.broadcast(whole, everyone.global_ranks.index(self._modifier_rank), label=state.name)
            if isinstance(state, (PlacedShard, WholeShard)):
                if whole.data_ptr() != state.view.data_ptr():
                    state.view.copy_(whole)
                whole = state.view
            point_at(param, whole)
            state.store(param)
        # All ranks have come this far, so no rank reads the memory that was written.
        for fetcher in {state.fetcher: None for p in self._params if isinstance(state := state_of(p), PlacedShard)}:
            fetcher.end_writes()

    def _restore(self) -> None:
        """Restores the values that the parameters had on entry, so that contexts around this one see them as well.
        Collective."""
        fetchers: dict[int, Any] = {}
        for param, copy in zip(self._params, self._copies):
            state = state_of(param)
            if copy is not None:
                point_at(param, state.view)
                param.data.copy_(copy)
            elif isinstance(state, PlacedShard):
                point_at(param, state.view)
                fetchers[id(state.fetcher)] = state.fetcher
            elif state.is_shared:
                point_at(param, state.whole())
        for fetcher in fetchers.values():
            fetcher.weights_changed()

    def _is_written(self, param: torch.nn.Parameter, before: Any, copy: torch.Tensor | None) -> bool:
        if copy is not None:
            return param.data.shape != copy.shape or not torch.equal(_bits(param.data), _bits(copy))
        return fingerprint_of(param.data) != before

    def _forbid_edits(self, raises: bool) -> None:
        looked_at = enumerate(zip(self._params, self._before, self._copies))
        first = next((i for i, seen in looked_at if self._is_written(*seen)), -1)
        firsts = state_of(self._params[0]).everyone.gather_numbers(first, label="edits of parameters")
        if all(first < 0 for first in firsts):
            return
        self._restore()
        if raises:
            rank = next(r for r, first in enumerate(firsts) if first >= 0)
            raise StateError(
                f"rank {rank} wrote to the parameter within GatheredParameters without modifier_rank; the edit was not kept",
                where=state_of(self._params[firsts[rank]]).name,
                fix="pass modifier_rank=0 (the rank whose edits count) to GatheredParameters",
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Says that ``module`` reads a parameter of another module in its forward.

    Reads of an attribute (``other.weight``) are noticed without a call. Call it for other reads, such as a parameter
    that is kept in a list.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise StateError(
            f"a {type(parameter).__name__} is no parameter",
            where="register_external_parameter",
            fix="pass a torch.nn.Parameter",
        )
    external_parameters(module)[id(parameter)] = parameter
    state = state_of(parameter)
    if isinstance(state, PlacedShard) and state.fetcher.hooks is not None:
        state.fetcher.hooks.watch(module)


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undoes ``register_external_parameter``."""
    if external_parameters(module).pop(id(parameter), None) is None:
        raise StateError(
            "the parameter was not registered with the module",
            where="unregister_external_parameter",
            fix="call register_external_parameter first",
        )


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[torch.nn.Module]:
    """Yields the plain module of an engine with all parameters whole and no hooks, for a fast ``generate``.
    Collective; takes the memory of the whole model."""
    module = getattr(model, "module", model)
    fetchers = {state.fetcher for p in module.parameters() if isinstance(state := state_of(p), PlacedShard)}
    hooks = [f.hooks for f in fetchers if f.hooks is not None]
    with GatheredParameters(module.parameters()):
        for h in hooks:
            h.remove()
        try:
            yield module
        finally:
            for h in hooks:
                h.install()
