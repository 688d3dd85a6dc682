"""The dtypes of a run and the casts that they need. Weights and inputs are cast; buffers keep their dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed_c import _C
from deepspeed_c.config import Config
from deepspeed_c.config.precision import Bf16, Fp16, TorchAutocast
from deepspeed_c.zero.layout.autocast import note_autocast
from deepspeed_c.zero.layout.unit import Dtypes
from deepspeed_c.zero.weights.fp32_buffers import buffers_in_fp32
from deepspeed_c.zero.weights.kinds import is_codes

__all__ = ["DTYPES", "Precision", "dtype_of_weights"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of_weights(fp16: Fp16, bf16: Bf16) -> torch.dtype | None:
    """The dtype that weights are cast to; None: they stay as they are."""
    if fp16.enabled:
        return torch.float16
    return torch.bfloat16 if bf16.enabled else None


class Precision:
    """The precision policy of one engine, from its configuration.

    ``dtype``: the dtype that weights are cast to (None: they stay as they are). ``scaler``: the loss scale of fp16.
    ``n_sequence``: sequence-parallel ranks.
    """

    def __init__(self, config: Config, model: torch.nn.Module, n_sequence: int = 1) -> None:
        self.dtype = dtype_of_weights(config.fp16, config.bf16)
        self.scaler: _C.LossScaler | None = None
        self.checks_overflow = True
        self._keeps_16bit_master = False
        self._casts_inputs = False
        if config.fp16.enabled:
            self._casts_inputs = config.fp16.auto_cast
        elif config.bf16.enabled:
            self.checks_overflow = config.bf16.check_grad_overflow
            self._keeps_16bit_master = config.bf16.bf16_master_weights_and_grads
        self.autocast_dtype = DTYPES[config.torch_autocast.dtype] if config.torch_autocast.enabled else None
        if torch.float16 in (self.dtype, self.autocast_dtype):
            self.scaler = _C.LossScaler(
                is_dynamic=config.fp16.is_dynamic,
                initial_scale=config.fp16.initial_scale,
                min_scale=float(max(config.fp16.min_loss_scale, 2.0**-24)),
                window_steps=max(config.fp16.loss_scale_window, 1),
                hysteresis=config.fp16.hysteresis,
                consecutive_hysteresis=config.fp16.consecutive_hysteresis,
            )
        comm = config.communication_data_type
        if n_sequence > 1:
            comm = config.seq_parallel_communication_data_type or comm
        self._comm_dtype = DTYPES[comm] if comm else None
        accum = config.data_types.grad_accum_dtype
        if accum is None and config.bf16.enabled and config.bf16.immediate_grad_update:
            accum = "fp32"
        self.accum_dtype = DTYPES[accum] if accum else None
        buffers = config.data_types.buffer_dtype
        self._buffer_dtype = DTYPES[buffers] if buffers else None
        self._keep_in_fp32 = config.data_types.keep_in_fp32_modules
        self._low_precision = self._low_precision_params(model, config.torch_autocast)
        self._sparse = self._sparse_params(model) if config.sparse_gradients else set()

    def _low_precision_params(self, model: torch.nn.Module, autocast: TorchAutocast) -> set[int]:
        """Parameters whose gradients may be reduced in the autocast dtype. These are the parameters of the modules that
        the configuration lists as safe."""
        if self.autocast_dtype is None:
            return set()
        safe = set(autocast.lower_precision_safe_modules)
        params = [
            p
            for module in model.modules()
            if f"{type(module).__module__}.{type(module).__qualname__}" in safe
            for p in module.parameters(recurse=False)
        ]
        note_autocast(self.autocast_dtype, params)
        return {id(p) for p in params}

    @staticmethod
    def _sparse_params(model: torch.nn.Module) -> set[int]:
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        return {id(m.weight) for m in model.modules() if isinstance(m, kinds)}

    def _is_cast(self, param: torch.nn.Parameter) -> bool:
        return self.dtype is not None and param.is_floating_point() and not is_codes(param)

    def dtypes_of(self, name: str, param: torch.nn.Parameter) -> Dtypes:
        """The dtypes for storing, reducing and updating a trainable parameter."""
        dtype = self.dtype if self._is_cast(param) else param.dtype
        is_mixed = self.dtype is not None and not self._keeps_16bit_master
        comm = self._comm_dtype or (self.autocast_dtype if id(param) in self._low_precision else dtype)
        return Dtypes(dtype, comm, torch.float32 if is_mixed else dtype, id(param) in self._sparse)

    def cast_frozen(self, model: torch.nn.Module, trained: set[int]) -> None:
        """Cast the parameters that no unit holds. ``buffer_dtype`` and ``keep_in_fp32_modules`` also change buffers.

        Other buffers keep their dtype, because a rotary table or a running mean is useless if it is rounded to 16 bits.
        """
        with torch.no_grad():
            for p in model.parameters():
                if id(p) not in trained and self._is_cast(p):
                    p.data = p.data.to(self.dtype)
            kept = buffers_in_fp32(model, self._keep_in_fp32, self.dtype)
            for module in model.modules():
                for buffer in module._buffers.values():
                    if buffer is None or not buffer.is_floating_point():
                        continue
                    dtype = torch.float32 if id(buffer) in kept else self._buffer_dtype
                    if dtype is not None and dtype != buffer.dtype:
                        buffer.data = buffer.data.to(dtype)

    def cast_inputs(self, value: Any) -> Any:
        """Casts floating-point tensors in args and kwargs to the weights' dtype if ``fp16.auto_cast`` asks for it."""
        if not self._casts_inputs:
            return value
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, value
        )

    def autocast(self, device: torch.device) -> AbstractContextManager:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)
