"""Gives parameters and buffers on the meta device memory: values of parameters and persistent buffers come from files,
other buffers are computed as the model's constructor does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.errors import ModelError

__all__ = ["TensorHolders", "check_buffers", "compute_buffers", "device_of"]

NAMES_SHOWN = 5


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's tensors; the accelerator's, if all of them are on the meta device."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device(get_accelerator().current_device_name())


class TensorHolders:
    """Every place of each tensor of a model: the dictionary of a module, and the name there."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._of: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        self._of.setdefault(id(tensor), []).append((tensors, key))

    def replace(self, old: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Put ``values`` in the place of ``old`` in all modules, so that tied tensors stay tied. A parameter keeps its
        attributes. Returns the tensor that the modules hold now."""
        new = values
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(values, old.requires_grad)
            new.__dict__.update(old.__dict__)
        for tensors, key in self._of.pop(id(old)):
            tensors[key] = new
        return new

    def finish(self) -> None:
        """Let modules with a list of their own weights make it anew."""
        for module in self._model.modules():
            if isinstance(module, torch.nn.RNNBase):
                module._init_flat_weights()


def check_buffers(model: torch.nn.Module) -> None:
    """Raise ModelError if a buffer on the meta device is in no file and no method can compute it."""
    lost = [
        f"{name}.{key}".lstrip(".")
        for name, module, keys in _unsaved(model)
        if _computer(model, name, module) is None
        for key in keys
    ]
    if lost:
        raise _lost(model, lost)


def compute_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Compute the buffers on the meta device that a state dict leaves out, such as rotary frequencies, on ``device``.

    They are computed by the ``_init_weights`` of the model of transformers that they belong to, or the module's
    ``reset_parameters``. Raises ModelError if such a method leaves one as it was.
    """
    lost: list[str] = []
    made: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
    known: dict[int, torch.Tensor] = {}
    for name, module, keys in _unsaved(model):
        compute = _computer(model, name, module)
        if compute is None:
            lost += [f"{name}.{key}".lstrip(".") for key in keys]
            continue
        # Each is computed twice, from different contents. A buffer whose two results differ was left as it was.
        first, second = (
            {key: torch.full_like(module._buffers[key], at, device=device) for key in keys} for at in (0, 1)
        )
        for values in (first, second):
            with _alone(module, values), torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                compute(module)
                values.update((key, module._buffers[key]) for key in keys)
        for key in keys:
            if not torch.equal(first[key], second[key]):
                lost.append(f"{name}.{key}".lstrip("."))
            old = module._buffers[key]
            made.append((module, key, known.setdefault(id(old), second[key])))
    if lost:
        raise _lost(model, lost)
    for module, key, values in made:
        module._buffers[key] = values


def _unsaved(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, list[str]]]:
    """(name, module, buffers) of the modules with buffers on the meta device that are in no state dict."""
    found = []
    for name, module in model.named_modules():
        keys = [
            key
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta and key in module._non_persistent_buffers_set
        ]
        if keys:
            found.append((name, module, keys))
    return found


def _computer(model: torch.nn.Module, name: str, module: torch.nn.Module) -> Callable[[torch.nn.Module], None] | None:
    """The function that gives the tensors of ``module`` their first values."""
    path = name.split(".") if name else []
    for n in range(len(path), -1, -1):
        owner = model.get_submodule(".".join(path[:n]))
        init = getattr(owner, "_init_weights", None)
        if callable(init):
            return init
    reset = getattr(module, "reset_parameters", None)
    return None if reset is None else lambda module: module.reset_parameters()


@contextlib.contextmanager
def _alone(module: torch.nn.Module, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let ``module`` hold ``values``, and have all other tensors of it and of its children on the meta device: these
    methods would overwrite weights."""
    before = [(each, dict(each._parameters), dict(each._buffers)) for each in module.modules()]
    try:
        for each, params, buffers in before:
            each._parameters.update(
                (key, torch.nn.Parameter(p.detach().to("meta"), p.requires_grad))
                for key, p in params.items()
                if p is not None
            )
            each._buffers.update((key, b.detach().to("meta")) for key, b in buffers.items() if b is not None)
        module._buffers.update(values)
        yield
    finally:
        for each, params, buffers in before:
            each._parameters.update(params)
            each._buffers.update(buffers)


def _lost(model: torch.nn.Module, names: list[str]) -> ModelError:
    return ModelError(
        f"{len(names)} buffers on the meta device are in no checkpoint, and no method computes them:"
        f" {', '.join(names[:NAMES_SHOWN])}",
        where=type(model).__name__,
        fix="construct the model outside OnDevice, or let the module's reset_parameters compute them",
    )
