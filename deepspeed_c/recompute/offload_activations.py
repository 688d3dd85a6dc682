"""Moves every tensor that autograd saves within a context to host memory or a file, without recomputation."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from deepspeed_c.config.offload import Aio
from deepspeed_c.errors import ConfigError
from deepspeed_c.offload.swap import SwapSettings
from deepspeed_c.recompute.counters import LayerCalls
from deepspeed_c.recompute.nests import is_activation
from deepspeed_c.recompute.packers import StashPacker
from deepspeed_c.recompute.stash import Stash, StashFile
from deepspeed_c.saved_tensors import give_back, keep

__all__ = ["offload_activations"]

# Bytes of a group of tensors. A group is moved out together, and read ahead together.
_GROUP_BYTES = 32 << 20


class offload_activations(saved_tensors_hooks):
    """The context of a forward. The activations that it saves are moved out of memory until the backward needs them. On
    a machine without an accelerator ``"cpu"`` moves nothing, and the log says so once. Results are the same to the bit.

    Floating-point tensors of at least ``min_bytes`` are moved, except parameters and views of parameters.

    Args:
        device: "cpu" (page-locked host memory) or "nvme" (a file without a name in ``nvme_path``).
        max_in_cpu: with "nvme": bytes that stay in host memory.
        min_bytes: size of the smallest tensor that is worth moving.

    Raises ConfigError for an unknown device, or a folder that cannot be used. The forward or the backward raises
    OffloadError where the device fails or is full.
    """

    def __init__(
        self,
        device: str = "cpu",
        nvme_path: str | None = None,
        *,
        max_in_cpu: int = 0,
        min_bytes: int = 4096,
    ) -> None:
        if device not in ("cpu", "nvme") or (device == "nvme") != (nvme_path is not None):
            raise ConfigError(
                f"device is {device!r} and nvme_path {nvme_path!r}",
                where="checkpointing.offload_activations",
                fix='write device="cpu", or device="nvme" with the nvme_path of a folder',
            )
        self._min_bytes, self._calls, self._n_bytes = min_bytes, LayerCalls(), 0
        file = None if nvme_path is None else StashFile(nvme_path, SwapSettings.of(Aio()))
        self._stash = Stash(self._calls, file, max_in_cpu)
        self._packer = StashPacker(self._stash)
        self._calls.begin("a forward within offload_activations")
        super().__init__(self.put, self.get)

    def put(self, tensor: torch.Tensor) -> Any:
        """Returns the object to keep in place of ``tensor``. ``get`` turns it back into the tensor."""
        base = tensor if tensor._base is None else tensor._base
        if tensor.nbytes >= self._min_bytes and is_activation(tensor) and not isinstance(base, torch.nn.Parameter):
            self._n_bytes += tensor.nbytes
            if self._n_bytes > _GROUP_BYTES:
                self._n_bytes = tensor.nbytes
                self._calls.begin("a forward within offload_activations")
            packed = self._packer.pack(tensor)
            if packed is not None:
                return self._packer.unpack, packed
        return give_back, keep(tensor)

    @staticmethod
    def get(kept: Any) -> torch.Tensor:
        """The tensor again, on its original device."""
        unpack, packed = kept
        return unpack(packed)

    @property
    def stash(self) -> Stash:
        return self._stash
