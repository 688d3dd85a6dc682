"""Running statistics of norms: the second run of a layer leaves them unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["statistics_stay"]

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def statistics_stay() -> Iterator[None]:
    """Within this context, batch and instance norms that this thread runs work on copies of their statistics.

    Saving the statistics and writing them back would be wrong: autograd may have kept them, and counts writes.
    """
    thread = threading.get_ident()
    own: list[tuple[torch.nn.Module, dict[str, torch.Tensor]]] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, _NormBase) and module.training and threading.get_ident() == thread:
            kept = {name: module._buffers[name] for name in _NAMES if module._buffers.get(name) is not None}
            own.append((module, kept))
            module._buffers.update({name: buffer.clone() for name, buffer in kept.items()})

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if own and own[-1][0] is module and threading.get_ident() == thread:
            module._buffers.update(own.pop()[1])

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        while own:
            module, kept = own.pop()
            module._buffers.update(kept)
