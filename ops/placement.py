"""The devices that have kernels for the operators of transformer layers and of cross-entropy."""

from __future__ import annotations

from torch import Tensor

from deepspeed_c import _C

__all__ = ["has_kernels"]

_DEVICES = frozenset(("cpu", "meta", *(["cuda"] if _C.build_info()["cuda"] else [])))


def has_kernels(x: Tensor) -> bool:
    """Whether the device of ``x`` has kernels. The host has them, and CUDA if its library was built with the package.
    On other devices PyTorch computes the formulas of ``deepspeed_c.ops.reference``.
    """
    return x.device.type in _DEVICES
