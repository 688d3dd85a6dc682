"""``param.grad = None`` of a parameter whose gradients lie elsewhere than in ``param.grad``."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["GRAD", "HANDLE", "GradFace", "notice_cleared", "stop_noticing"]

# The descriptor of torch: it reads and writes ``param.grad`` past the face below.
GRAD = torch.Tensor.grad

# Where a parameter holds its tie to an engine.
HANDLE = "_dsc_handle"


class _GradientHandle(Protocol):
    def drop_gradient(self) -> None: ...


class GradFace:
    """A parameter that tells its handle whenever somebody sets ``param.grad`` to None."""

    @property
    def grad(self) -> torch.Tensor | None:
        return GRAD.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        GRAD.__set__(self, value)
        if value is None:
            _tell(self)

    @grad.deleter
    def grad(self) -> None:
        GRAD.__delete__(self)
        _tell(self)


class _UnshardedFace(GradFace):
    """The face of a parameter that is not sharded: copies of it are plain, and it prints as a plain one."""

    _dsc_plain: type  # the parameter's own class

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        if isinstance(copied, _UnshardedFace):
            copied.__class__ = copied._dsc_plain
        return copied

    def __repr__(self, **kwargs: Any) -> str:
        if self._dsc_plain is not torch.nn.Parameter:
            return super().__repr__(**kwargs)
        return repr(torch.nn.Parameter(self.data, self.requires_grad))


_faces: dict[type, type] = {}


def _face_of(plain: type) -> type:
    if plain not in _faces:
        _faces[plain] = type(
            plain.__name__, (_UnshardedFace, plain), {"__module__": plain.__module__, "_dsc_plain": plain}
        )
    return _faces[plain]


def _tell(param: torch.nn.Parameter) -> None:
    handle: _GradientHandle | None = param.__dict__.get(HANDLE)
    if handle is not None:
        handle.drop_gradient()


def notice_cleared(param: torch.nn.Parameter) -> None:
    """From now on the parameter's handle is told whenever ``param.grad`` is set to None or deleted, also where it was
    None.

    The object stays the same; its class becomes a subclass of the same name."""
    if not isinstance(param, GradFace):
        param.__class__ = _face_of(type(param))


def stop_noticing(param: torch.nn.Parameter) -> None:
    """Gives the parameter its own class back."""
    if isinstance(param, _UnshardedFace):
        param.__class__ = param._dsc_plain
