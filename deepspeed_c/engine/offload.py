"""Moving model states out of the accelerator's memory for a while, and back (``offload_states``, ``reload_states``)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import Enum

import torch

from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.zero.layout import Layout
from deepspeed_c.zero.optimizer import ZeroOptimizer

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum", "OffloadedStates"]


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state (DeepSpeed's names)."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadDeviceEnum(str, Enum):
    """Where states can go (DeepSpeed's names)."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadedStates:
    """What has been moved out. The tensors stay the same objects, so that every view of them is whole again after ``reload``; their storage is
    empty meanwhile."""

    def __init__(self, layout: Layout, optimizer: ZeroOptimizer | None) -> None:
        self._layout, self._optimizer = layout, optimizer
        self._away: dict[OffloadStateTypeEnum, list[tuple[torch.UntypedStorage, torch.Tensor]]] = {}

    @property
    def kinds(self) -> set[OffloadStateTypeEnum]:
        return set(self._away)

    def offload(
        self, include: Container[OffloadStateTypeEnum] | None, device: str, pin_memory: bool, non_blocking: bool
    ) -> None:
        """Moves the states of the kinds in ``include`` (None: all) to host memory."""
        device = getattr(device, "value", device)
        if device == "nvme":
            raise FeatureError("states on NVMe are not part of this version", where="offload_states", fix='use "cpu"')
        if device not in ("cpu", "none"):
            raise ConfigError(f"{device!r} is no place for states", where="offload_states", fix='use "cpu"')
        if device == "none":
            return
        wanted = [
            kind
            for kind in OffloadStateTypeEnum
            if kind not in self._away and (include is None or kind in include or kind.value in include)
        ]
        if OffloadStateTypeEnum.contiguous_grad_buffer in wanted and self._optimizer is not None:
            self._optimizer.reducer.drop_spare_buffers()
        for kind in wanted:
            moved = self._away[kind] = []
            seen: set[int] = {storage._cdata for gone in self._away.values() for storage, _ in gone}
            for tensor in self._tensors(kind):
                storage = tensor.untyped_storage()
                if storage.nbytes() == 0 or storage._cdata in seen:
                    continue
                seen.add(storage._cdata)
                host = torch.empty(
                    storage.nbytes(),
                    dtype=torch.uint8,
                    pin_memory=pin_memory and tensor.device.type != "cpu",
                )
                host.copy_(_bytes_of(storage, tensor.device), non_blocking=non_blocking)
                moved.append((storage, host))
        if non_blocking and torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the storage is given up next
        for kind in wanted:
            for storage, _ in self._away[kind]:
                storage.resize_(0)

    def reload(self, non_blocking: bool) -> None:
        """Brings everything back."""
        while self._away:
            for storage, host in self._away.popitem()[1]:
                storage.resize_(host.numel())
                _bytes_of(storage, storage.device).copy_(host, non_blocking=non_blocking)

    def _tensors(self, kind: OffloadStateTypeEnum) -> Iterator[torch.Tensor]:
        optimizer = self._optimizer
        units = (*self._layout.trained, *self._layout.frozen)
        if kind is OffloadStateTypeEnum.hp_params:
            yield from (unit.master_flat for unit in units if unit.master_flat is not None)
        elif kind is OffloadStateTypeEnum.lp_params:
            # Weights that are whole are read by everybody at any time: they stay.
            yield from (unit.param_shard for unit in units if unit.param_shard is not None)
        elif kind is OffloadStateTypeEnum.optim_states and optimizer is not None and optimizer.store is None:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value) and value.dim() > 0)
        elif kind is OffloadStateTypeEnum.lp_grads and optimizer is not None:
            for results in optimizer.reducer.results.values():
                yield from results


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),))
