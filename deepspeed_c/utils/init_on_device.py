"""A model constructed in a given dtype on a given device, the meta device above all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import Self

from deepspeed_c.errors import StateError

__all__ = ["OnDevice"]


class OnDevice:
    """Context that makes modules and tensors on ``device``, and in ``dtype`` if they are of floating point.

    An explicit device or dtype wins. ``enabled=False`` makes the context do nothing. Raises StateError when it is
    entered while it is open.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._outer: tuple[torch.device, torch.dtype] | None = None

    def fp_tensor_constructor(
        self, fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype
    ) -> Callable[..., torch.Tensor]:
        """``fn`` with this context's device as the default, and with floating-point results cast to
        ``target_fp_dtype``.
        """

        def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is None:
                kwargs["device"] = self.device
            tensor = fn(*args, **kwargs)
            return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

        return construct

    def get_new_tensor_fn_for_dtype(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        """A function (class, *sizes) that makes an empty tensor of ``dtype`` on this context's device."""

        def construct(cls: type, *sizes: Any) -> torch.Tensor:
            return torch.empty(0, dtype=dtype, device=self.device).new_empty(*sizes)

        return construct

    def __enter__(self) -> Self:
        if self.enabled:
            if self._outer is not None:
                raise StateError("the context is open already", where="OnDevice", fix="make another one to nest them")
            place = torch.device(self.device)
            place.__enter__()
            self._outer = place, torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._outer is not None:
            (place, dtype), self._outer = self._outer, None
            torch.set_default_dtype(dtype)
            place.__exit__(*exception)
