"""Access to the fp32 master weights, optimizer states and gradients of a parameter, by functions that DeepSpeed binds
to parameters. ``zero/states/access.py`` implements the access.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_c import comm
from deepspeed_c.errors import StateError
from deepspeed_c.zero.states import access

__all__ = ["fragment_address", "get_full_hp_grad", "get_full_hp_param", "set_full_hp_grad", "set_full_hp_param"]


@dataclass
class fragment_address:
    """A part of a flat tensor: ``numel`` elements from ``start``."""

    numel: int
    start: int


def _found(value: torch.Tensor | None, fix: str) -> torch.Tensor:
    if value is None:
        raise StateError("the parameter has none", where="get_full_hp", fix=fix)
    return value


def _is_linked(param: torch.nn.Parameter) -> bool:
    """Whether ``link_hp_params`` has linked the parameter to an external optimizer rather than the engine's."""
    return hasattr(param, "_hp_mapping")


def _summed(param: torch.nn.Parameter, part: torch.Tensor | None) -> torch.Tensor:
    """Sum the parts of all ranks to the whole tensor."""
    whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    if part is not None:
        at = param._hp_mapping.lp_fragment_address
        whole.narrow(0, at.start, at.numel).copy_(part.detach().flatten())
    comm.all_reduce(whole, group=param._dp_group)
    return whole.view(param.shape)


def _write(param: torch.nn.Parameter, part: torch.Tensor, value: torch.Tensor) -> None:
    at = param._hp_mapping.lp_fragment_address
    part.data.copy_(value.flatten().narrow(0, at.start, at.numel).view(part.shape))


def _linked_gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    mapping = param._hp_mapping
    return None if mapping is None else mapping.get_lp_grad_fragment(param._index_in_param_group)


def get_full_hp_param(self: torch.nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor:
    """The whole fp32 master weights of the parameter, or its optimizer state ``optim_state_key``. Call this on all
    ranks.

    Raises StateError if no optimizer has the parameter or the state.
    """
    if _is_linked(self):
        return _summed(self, None if self._hp_mapping is None else self._hp_mapping.get_hp_fragment(optim_state_key))
    fix = "call it on a parameter that an engine trains"
    if optim_state_key is None:
        return _found(access.safe_get_full_fp32_param(self), fix)
    return _found(access.safe_get_full_optimizer_state(self, optim_state_key), fix)


def set_full_hp_param(self: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    """Overwrite the fp32 master weights of the parameter, or its optimizer state ``optim_state_key``. With the engine's
    optimizer, new master weights are also copied to the weights that forward uses. Call this on all ranks.
    """
    if _is_linked(self):
        if self._hp_mapping is not None:
            _write(self, self._hp_mapping.get_hp_fragment(optim_state_key), value)
    elif optim_state_key is None:
        access.safe_set_full_fp32_param(self, value)
    else:
        access.safe_set_full_optimizer_state(self, value, optim_state_key)


def get_full_hp_grad(self: torch.nn.Parameter) -> torch.Tensor:
    """The whole gradient in fp32. Call this on all ranks.

    Raises StateError unless it is called between the last backward of a step and ``engine.step()``.
    """
    if _is_linked(self):
        return _summed(self, _linked_gradient(self))
    return _found(access.safe_get_full_grad(self), "call it after the last backward of a step, before engine.step()")


def set_full_hp_grad(self: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite the gradient that the next step uses. Call this on all ranks."""
    if not _is_linked(self):
        access.safe_set_full_grad(self, value)
    elif self._hp_mapping is not None:
        _write(self, _linked_gradient(self), value)
