"""Notices ``param.grad = None``, and reads of it, on a parameter whose gradients are stored elsewhere than in
``param.grad``."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any, Protocol

import torch

__all__ = ["GRAD", "HANDLE", "GradFace", "notice_cleared", "stop_noticing"]

# Torch's own descriptor. It reads and writes ``param.grad`` without the property of ``GradFace``.
GRAD = torch.Tensor.grad

# Name of the attribute that connects a parameter to its engine.
HANDLE = "_dsc_handle"


class _GradientHandle(Protocol):
    def drop_gradient(self) -> None: ...

    def note_read(self, reader: CodeType, module: str) -> None: ...


class GradFace:
    """Base class of a parameter that calls its handle whenever somebody sets ``param.grad`` to None, or finds None in
    it."""

    @property
    def grad(self) -> torch.Tensor | None:
        found = GRAD.__get__(self)
        handle: _GradientHandle | None = self.__dict__.get(HANDLE) if found is None else None
        if handle is not None:
            frame = sys._getframe(1)
            handle.note_read(frame.f_code, frame.f_globals.get("__name__", ""))
        return found

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
    """The class of an unsharded parameter that notices this. Its copies are ordinary parameters; it prints as one."""

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
    """From now on the parameter's handle is called whenever ``param.grad`` is set to None or deleted, even if it was
    None before.

    The parameter stays the same object. Its class becomes a subclass of the same name."""
    if not isinstance(param, GradFace):
        param.__class__ = _face_of(type(param))


def stop_noticing(param: torch.nn.Parameter) -> None:
    """Undoes ``notice_cleared``: gives the parameter its own class back."""
    if isinstance(param, _UnshardedFace):
        param.__class__ = param._dsc_plain
