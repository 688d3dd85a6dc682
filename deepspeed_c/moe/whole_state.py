"""State dicts of modules with a part of the experts: they give all experts, and take all or this rank's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.zero.layout.experts import cuts_of_all

__all__ = ["keep_state_whole"]


def keep_state_whole(model: nn.Module, ep: Collectives) -> None:
    """Makes ``state_dict()`` of ``model`` and of its modules give the stacks of all experts, and ``load_state_dict``
    take them. ``ep``: the ranks that hold the experts together.

    ``state_dict()`` is then collective. ``state_dict(keep_vars=True)`` gives this rank's own parameters, and needs no
    other rank; weights that stage 3 has released stay empty, as they do in any model.
    """
    holders = _StackHolders(ep)
    for module in model.modules():
        if any(_cut_of(param) is not None for param in module._parameters.values()):
            module.register_state_dict_post_hook(holders)
            module.register_load_state_dict_pre_hook(_take_part)


def _cut_of(param: Any) -> Any:
    return getattr(param, "expert_cut", None)


class _StackHolders:
    """The ranks that hold experts together. A copy of a model has none of them: its state dict is that of its parts."""

    def __init__(self, ep: Collectives) -> None:
        self._ep: Collectives | None = ep

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ep": None}

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key, param in module._parameters.items():
            cut, value = _cut_of(param), state.get(f"{prefix}{key}")
            is_kept = isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor)
            if self._ep is None or cut is None or is_kept or value.shape != cut.local_shape:
                continue
            whole = value.new_empty(cut.logical_shape)
            parts = self._ep.all_gather_list(value.contiguous().view(-1), label=f"experts of {prefix}{key}")
            for of_rank, part in zip(cuts_of_all(cut), parts, strict=True):
                of_rank.put(part.view(cut.local_shape), whole)
            state[f"{prefix}{key}"] = whole


def _take_part(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key, param in module._parameters.items():
        cut, value = _cut_of(param), state.get(f"{prefix}{key}")
        if cut is not None and isinstance(value, torch.Tensor) and value.shape == cut.logical_shape:
            state[f"{prefix}{key}"] = cut.take(value)
