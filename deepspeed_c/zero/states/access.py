"""Reading and writing a parameter's fp32 master, optimizer states and gradient at every stage: the whole tensor, or
this rank's piece of it.

The ``full`` functions are collective when states are sharded: call them on all ranks. The ``local`` functions use only
this rank's piece, a flat tensor (empty on ranks that own nothing of the parameter).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import TYPE_CHECKING

import torch

from deepspeed_c.errors import StateError
from deepspeed_c.logging import log_dist
from deepspeed_c.zero.weights.grad_face import HANDLE, notice_cleared, stop_noticing

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot
    from deepspeed_c.zero.states.optimizer import ZeroOptimizer

__all__ = [
    "attach",
    "detach",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


# The module of torch.nn.utils.clip_grad_norm_, clip_grad_value_ and their kin.
_CLIPPING = "torch.nn.utils.clip_grad"
# Packages that ask for param.grad in passing: optimizers, copies of modules.
_QUIET = frozenset({"torch", "deepspeed_c", "accelerate", "transformers"})
_READ_NORM = (
    "engine.get_global_grad_norm() returns the norm of the last step before clipping, and"
    " deepspeed_c.utils.safe_get_full_grad(param) a gradient between backward and step"
)


class ParamHandle:
    """Ties a parameter to its place in an engine. Copies and pickles of the parameter do not carry it along."""

    def __init__(self, optimizer: ZeroOptimizer, slot: Slot) -> None:
        self.optimizer, self.slot = optimizer, slot

    def drop_gradient(self) -> None:
        """Called when a caller has set ``param.grad`` to None: drops the engine's gradient of the parameter."""
        self.optimizer.drop_gradients([self.slot.param])

    def note_read(self, reader: CodeType, module: str) -> None:
        """Called when the function ``reader`` of ``module`` has found None in ``param.grad``. While the engine holds a
        gradient, ``zero_grad`` of any module or optimizer drops it, and torch's clipping would do nothing, so it is an
        error. Another reader may only ask, so the first one causes a warning.
        """
        reducer = self.optimizer.reducer
        if not reducer.has_window or reducer.is_in_backward:
            return
        where = f"param.grad of {self.slot.name}"
        if reader.co_name == "zero_grad":
            self.drop_gradient()
            return
        if module == _CLIPPING:
            raise StateError(
                "it is None, because the engine holds the gradient, so torch's function would clip nothing and return 0",
                where=where,
                fix=f'set "gradient_clipping" in the configuration, and delete the call: engine.step() clips. {_READ_NORM}',
            )
        if module.partition(".")[0] in _QUIET or not self.optimizer.is_first_reader():
            return
        log_dist(
            f"{where} is None for {module}: the engine holds the gradients of this step, and what a script does to"
            ' param.grad has no effect. To clip, set "gradient_clipping"; to change a gradient, call'
            f" deepspeed_c.utils.safe_set_full_grad; to drop all, call engine.zero_grad(). {_READ_NORM}",
            ranks=[0],
            level=logging.WARNING,
        )

    def __reduce__(self):
        return type(None), ()

    def __deepcopy__(self, memo: dict) -> None:
        return None


def attach(optimizer: ZeroOptimizer, slot: Slot) -> None:
    if getattr(slot.param, HANDLE, None) is not None:
        raise StateError(
            "the parameter is trained by another engine already",
            where=slot.name,
            fix="close that engine first, or leave shared parameters to one of the engines",
        )
    setattr(slot.param, HANDLE, ParamHandle(optimizer, slot))
    if slot not in optimizer.reducer.shown:
        notice_cleared(slot.param)


def detach(slot: Slot) -> None:
    """Undoes ``attach``. Does nothing if the parameter is attached to another engine's slot, or to no slot."""
    handle = _find(slot.param)
    if handle is not None and handle.slot is slot:
        stop_noticing(slot.param)
        delattr(slot.param, HANDLE)


def _find(param: torch.nn.Parameter) -> ParamHandle | None:
    return getattr(param, HANDLE, None)


def _resident(handle: ParamHandle, *, writes: bool = True) -> AbstractContextManager:
    """Context within which the parameter's master and states are in memory, also with offload. The master has taken
    over earlier edits of the weights."""
    handle.optimizer.keep_edits(handle.slot)
    return handle.slot.unit.states.open(handle.slot.bucket, writes=writes)


def _whole(handle: ParamHandle, piece: torch.Tensor | None) -> torch.Tensor:
    """Puts the pieces of all ranks together: fp32, in the parameter's shape. The result is exact, because bits are
    summed and not values."""
    slot = handle.slot
    whole = torch.zeros(slot.numel, dtype=torch.float32, device=slot.unit.device)
    if piece is not None:
        fragment = slot.unit.fragment_of[slot]
        whole.narrow(0, fragment.begin, fragment.numel).copy_(piece)
    slot.unit.comm.sum_disjoint_bits(whole)
    return whole.view(slot.shape)


def _write(handle: ParamHandle, piece: torch.Tensor | None, value: torch.Tensor, name: str) -> None:
    slot = handle.slot
    if value.shape != slot.shape:
        raise StateError(
            f"{name} of shape {tuple(value.shape)} does not fit a parameter of shape {tuple(slot.shape)}",
            where=slot.name,
            fix="pass the whole tensor, on every rank",
        )
    if piece is not None:
        fragment = slot.unit.fragment_of[slot]
        with torch.no_grad():
            piece.copy_(value.detach().reshape(-1).narrow(0, fragment.begin, fragment.numel))


def _write_local(handle: ParamHandle, piece: torch.Tensor | None, value: torch.Tensor, name: str) -> None:
    n = 0 if piece is None else piece.numel()
    if value.numel() != n:
        raise StateError(
            f"local {name} of {value.numel()} elements does not fit this rank's piece of {n}",
            where=handle.slot.name,
            fix="pass the edited result of the matching safe_get_local function",
        )
    if piece is not None:
        with torch.no_grad():
            piece.copy_(value.detach().reshape(-1))


def _local(handle: ParamHandle, piece: torch.Tensor | None) -> torch.Tensor:
    if piece is None:
        return torch.empty(0, dtype=torch.float32, device=handle.slot.unit.device)
    return piece.detach().float().clone()


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """A copy of the whole fp32 master weight in the parameter's shape; None for a parameter that no engine trains."""
    if (handle := _find(param)) is None:
        return None
    with _resident(handle, writes=False):
        return _whole(handle, handle.optimizer.pieces.local(handle.slot, None))


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrites the master weight and the weights that forward uses. ``value`` has the parameter's shape, on every
    rank."""
    if (handle := _find(param)) is not None:
        with _resident(handle):
            handle.optimizer.begin_writes()
            _write(handle, handle.optimizer.pieces.local(handle.slot, None), value, "a weight")
            handle.optimizer.write_back(handle.slot)


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """A copy of this rank's piece of the master weight, flat fp32."""
    if (handle := _find(param)) is None:
        return None
    with _resident(handle, writes=False):
        return _local(handle, handle.optimizer.pieces.local(handle.slot, None))


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrites this rank's piece of the master weight. Call it on all ranks, because the weights are gathered
    afterwards."""
    if (handle := _find(param)) is not None:
        with _resident(handle):
            handle.optimizer.begin_writes()
            _write_local(handle, handle.optimizer.pieces.local(handle.slot, None), value, "weight")
            handle.optimizer.write_back(handle.slot)


def _state_piece(handle: ParamHandle, key: str) -> torch.Tensor | None:
    """This rank's piece of a named state. Collective.

    If any rank has no state of that name, all ranks raise. A rank that owns nothing of the parameter cannot see by
    itself that the name is wrong, and would otherwise wait for the others."""
    optimizer = handle.optimizer
    error: StateError | None = None
    piece: torch.Tensor | None = None
    try:
        piece = optimizer.pieces.local(handle.slot, key)
    except StateError as raised:
        error = raised
    if any(handle.slot.unit.comm.gather_numbers(int(error is not None))):
        raise error or StateError(
            f"the optimizer keeps no state {key!r}",
            where=handle.slot.name,
            fix="look at the ranks that own the parameter",
        )
    return piece


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The whole optimizer state of that name ("exp_avg", "exp_avg_sq", "momentum_buffer", ...), fp32 in the
    parameter's shape."""
    if (handle := _find(param)) is None:
        return None
    with _resident(handle, writes=False):
        return _whole(handle, _state_piece(handle, optim_state_key))


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Overwrites the optimizer state of that name."""
    if (handle := _find(param)) is not None:
        with _resident(handle):
            piece = _state_piece(handle, optim_state_key)
            _write(handle, piece, value, optim_state_key)
            if piece is not None:
                handle.optimizer.pieces.keep(handle.slot, optim_state_key, piece)


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy of this rank's piece of the optimizer state of that name, flat fp32."""
    if (handle := _find(param)) is None:
        return None
    with _resident(handle, writes=False):
        return _local(handle, handle.optimizer.pieces.local(handle.slot, optim_state_key))


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Overwrites this rank's piece of the optimizer state of that name."""
    if (handle := _find(param)) is not None:
        with _resident(handle):
            piece = handle.optimizer.pieces.local(handle.slot, optim_state_key)
            _write_local(handle, piece, value, optim_state_key)
            if piece is not None:
                handle.optimizer.pieces.keep(handle.slot, optim_state_key, piece)


def _gradient(handle: ParamHandle) -> tuple[torch.Tensor | None, float]:
    optimizer = handle.optimizer
    optimizer.complete_gradients()
    return optimizer.local_gradient(handle.slot), optimizer.gradient_factor


def _is_unused(handle: ParamHandle) -> bool:
    return handle.slot in handle.optimizer.complete_gradients().unused


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The whole gradient as the optimizer will see it before clipping: averaged over ranks and micro-batches, loss
    scale removed, fp32.

    Valid between the backward pass of the last micro-batch and ``engine.step()``; None at other times. Zeros for a
    parameter that no backward has reached.
    """
    handle = _find(param)
    if handle is None or not handle.optimizer.can_read_gradients:
        return None
    piece, factor = _gradient(handle)
    return _whole(handle, piece).mul_(factor)


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrites the gradient that the next ``engine.step()`` uses. It is valid at the same times as
    ``safe_get_full_grad``, and the value has the same scale.

    Call it on all ranks. The step then updates this parameter even if no backward has reached it, as plain torch does
    if ``param.grad`` is a tensor.
    """
    _set_gradient(param, value, _write, "a gradient")


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """A copy of this rank's piece of the gradient, flat fp32; otherwise as ``safe_get_full_grad``."""
    handle = _find(param)
    if handle is None or not handle.optimizer.can_read_gradients:
        return None
    piece, factor = _gradient(handle)
    return _local(handle, piece).mul_(factor)


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrites this rank's piece of the gradient; call it on all ranks."""
    _set_gradient(param, value, _write_local, "gradient")


def safe_update_full_grad_vectorized(
    param_list: Sequence[torch.nn.Parameter],
    update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor],
) -> None:
    """Replaces each gradient by ``update_func(gradient, parameter)``. Leaves out parameters that no backward of the
    window has reached on any rank."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None and not _is_unused(_find(param)):
            safe_set_full_grad(param, update_func(grad, param))


def _set_gradient(param: torch.nn.Parameter, value: torch.Tensor, write: Callable[..., None], name: str) -> None:
    """Writes a gradient with ``write``, in the scale of the stored sums. The norm is computed again afterwards, and the
    parameter counts as used."""
    handle = _find(param)
    if handle is None:
        return
    if not handle.optimizer.can_read_gradients:
        raise StateError(
            "there is no gradient to overwrite",
            where=handle.slot.name,
            fix="call it between the backward pass of the last micro-batch and engine.step()",
        )
    piece, factor = _gradient(handle)
    write(handle, piece, value.detach().float() / factor, name)
    handle.optimizer.reducer.note_edit(handle.slot)
