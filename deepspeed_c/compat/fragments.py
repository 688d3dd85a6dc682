"""Links 16-bit parameters to their parts of a rank's flat fp32 partition, for external optimizers that use
``deepspeed.utils``.

The engine does not use this module: ``zero/states/access.py`` reads and writes the states of the engine's parameters.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_c.compat import hp_access
from deepspeed_c.compat.hp_access import fragment_address
from deepspeed_c.errors import StateError

__all__ = [
    "get_hp_fragment_mapping",
    "lazy_init_hp_params_optimizer_state",
    "link_hp_params",
    "map_to_flat_opt_states",
    "tensor_fragment",
]


@dataclass
class tensor_fragment:
    """The part of a parameter that lies in a rank's flat partition."""

    lp_fragment: torch.Tensor
    """A flat view of this part of the parameter."""
    lp_fragment_address: fragment_address
    hp_fragment: torch.Tensor
    """A view of the corresponding elements of the partition."""
    hp_fragment_address: fragment_address
    gradient_dict: dict[int, Any]
    """For each group, the gradient pieces of the group's parameters."""
    offload_gradient_dict: dict[int, Any]
    use_offload: bool
    param_group_index: int
    optim_fragment: dict[str, torch.Tensor] | None = None

    def update_hp(self) -> None:
        """Copy the 16-bit parameter into the fp32 master weights."""
        self.hp_fragment.data.copy_(self.lp_fragment.data)

    def update_lp(self) -> None:
        """Copy the fp32 master weights into the 16-bit parameter."""
        self.lp_fragment.data.copy_(self.hp_fragment.data)

    def get_hp_fragment_address(self) -> fragment_address:
        return self.hp_fragment_address

    def set_optim_state_fragment(self, flat_hp_partition: torch.Tensor, optim_fragment: Mapping[str, Any]) -> None:
        """Keep views of those states that have the partition's shape."""
        at = self.hp_fragment_address
        self.optim_fragment = {
            key: value.narrow(0, at.start, at.numel)
            for key, value in optim_fragment.items()
            if torch.is_tensor(value) and value.shape == flat_hp_partition.shape
        }

    def get_optim_state_keys(self) -> list[str]:
        return list(self.optim_fragment or ())

    def get_optim_state_fragment(self, key: str) -> torch.Tensor:
        """Raises StateError: there is no state of that name."""
        if key not in (self.optim_fragment or ()):
            raise StateError(
                f"there is no state {key!r}", where="tensor_fragment", fix=f"those are {self.get_optim_state_keys()}"
            )
        return self.optim_fragment[key]

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor:
        return self.hp_fragment if optim_state_key is None else self.get_optim_state_fragment(optim_state_key)

    def get_lp_grad_fragment(self, index_in_param_group: int) -> torch.Tensor:
        """Raises StateError: the group has no gradients now."""
        pieces = (self.offload_gradient_dict if self.use_offload else self.gradient_dict).get(self.param_group_index)
        if pieces is None:
            raise StateError(
                "there are no gradients", where="tensor_fragment", fix="call it between backward and the step"
            )
        return pieces[index_in_param_group]


def get_hp_fragment_mapping(
    lp_param: torch.Tensor,
    lp_start: int,
    flat_hp_partition: torch.Tensor,
    gradient_dict: dict[int, Any],
    offload_gradient_dict: dict[int, Any],
    use_offload: bool,
    param_group_index: int,
    partition_start: int,
    partition_size: int,
) -> tensor_fragment:
    """Return the part of a parameter that lies in a partition. ``lp_start`` and ``partition_start`` are the offsets of
    the parameter and of the partition in the whole flat group.

    Raises:
        StateError: the partition contains no element of the parameter.
    """
    begin = max(lp_start, partition_start)
    numel = min(lp_start + lp_param.numel(), partition_start + partition_size) - begin
    if numel <= 0:
        raise StateError(
            "the partition has nothing of the parameter",
            where="get_hp_fragment_mapping",
            fix="leave out parameters that lie outside of it",
        )
    lp, hp = fragment_address(numel, begin - lp_start), fragment_address(numel, begin - partition_start)
    return tensor_fragment(
        lp_fragment=lp_param.flatten().narrow(0, lp.start, numel),
        lp_fragment_address=lp,
        hp_fragment=flat_hp_partition.narrow(0, hp.start, numel),
        hp_fragment_address=hp,
        gradient_dict=gradient_dict,
        offload_gradient_dict=offload_gradient_dict,
        use_offload=use_offload,
        param_group_index=param_group_index,
    )


def link_hp_params(
    lp_param_list: Sequence[torch.nn.Parameter],
    flat_hp_partition: torch.Tensor,
    gradient_dict: dict[int, Any],
    offload_gradient_dict: dict[int, Any],
    use_offload: bool,
    param_group_index: int,
    partition_start: int,
    partition_size: int,
    dp_group: Any,
) -> None:
    """Set attributes and methods on each parameter of a flat group: ``_hp_mapping`` (None outside of the partition),
    ``_dp_group``, ``_index_in_param_group`` (its index among the parameters that overlap the partition), and the
    functions of ``hp_access`` as methods, which work over the ranks of ``dp_group``.
    """
    at = index = 0
    for param in lp_param_list:
        param._hp_mapping, param._dp_group = None, dp_group
        for name in ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad"):
            setattr(param, name, types.MethodType(getattr(hp_access, name), param))
        if max(at, partition_start) < min(at + param.numel(), partition_start + partition_size):
            param._index_in_param_group = index
            index += 1
            dictionaries = gradient_dict, offload_gradient_dict, use_offload
            param._hp_mapping = get_hp_fragment_mapping(
                param, at, flat_hp_partition, *dictionaries, param_group_index, partition_start, partition_size
            )
        at += param.numel()


def lazy_init_hp_params_optimizer_state(
    lp_param_list: Iterable[torch.nn.Parameter], flat_hp_partition: torch.Tensor, optimizer_state: Mapping[Any, Any]
) -> None:
    """Link the parameters to the optimizer's states for the partition. Call this after the optimizer has made the
    states."""
    for param in lp_param_list:
        if param._hp_mapping is not None:
            param._hp_mapping.set_optim_state_fragment(flat_hp_partition, optimizer_state[flat_hp_partition])


def map_to_flat_opt_states(
    flat_hp_tensor: torch.Tensor,
    lp_tensors: Iterable[torch.nn.Parameter],
    optim_state: Mapping[Any, dict[str, Any]],
    opt_keys: Iterable[str],
) -> None:
    """Build flat states from the linked states of the parameters, and store them in the optimizer's state for the
    partition. Afterwards each parameter's ``hp_fragment`` is a view of the last flat state, as in DeepSpeed.
    """
    for key in opt_keys:
        flat = torch.zeros_like(flat_hp_tensor)
        for param in lp_tensors:
            if (mapping := param._hp_mapping) is not None:
                part = flat.narrow(0, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)
                part.copy_(mapping.get_hp_fragment(key).detach())
                mapping.hp_fragment = part
        optim_state[flat_hp_tensor][key] = flat
