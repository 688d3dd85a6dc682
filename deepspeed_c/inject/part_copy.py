"""A copy of a model that is cut over tensor-parallel ranks, and whose weights are parts of the model's own weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.inject.cut import view_part
from deepspeed_c.inject.cutting import cut_model
from deepspeed_c.inject.report import CutReport
from deepspeed_c.inject.stand_ins import shared_handles

__all__ = ["PartCopy"]

_SETTINGS = ("config", "generation_config")


class PartCopy:
    """The copy has no weights until ``take``, and again after ``drop``. The model itself is not changed.

    Buffers and the objects that hold settings (``config``, ``generation_config``) are the model's own. ``follow`` takes
    over what has changed in the model's modules since, but for new layers and hooks.
    """

    def __init__(self, model: torch.nn.Module, comm: Collectives) -> None:
        """comm: the tensor-parallel ranks. Parameters of ``model`` may be released shards; they must know their whole
        shape (``ds_shape``).

        Collective. Raises ModelError for a model that cannot be cut.
        """
        self._model = model
        memo: dict[int, Any] = shared_handles(model)
        for param in model.parameters():
            shape = getattr(param, "ds_shape", param.shape)
            empty = torch.empty(shape, dtype=param.dtype, device="meta")
            memo[id(param)] = torch.nn.Parameter(empty, requires_grad=False)
        for buffer in model.buffers():
            memo[id(buffer)] = buffer
        for module in model.modules():
            for name in _SETTINGS:
                if (setting := vars(module).get(name)) is not None:
                    memo[id(setting)] = setting
        self.module: torch.nn.Module = copy.deepcopy(model, memo)
        """The cut copy. Its modules have the names that they have in the model."""
        self.report: CutReport = cut_model(self.module, TensorParallel(autotp_size=comm.world_size), comm)
        copied = dict(self.module.named_modules())
        self._copied = [(module, copied[name]) for name, module in model.named_modules() if name in copied]
        self._pairs: list[tuple[torch.nn.Module, torch.nn.Module, dict[str, Any]]] = [
            (module, other, _plain_values(module)) for module, other in self._copied if type(other) is type(module)
        ]
        self._empty: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # by the model's parameter
        self._places: dict[torch.nn.Parameter, list[tuple[torch.nn.Module, str]]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            holder, last = self._find(name)
            self._empty[param] = holder.get_parameter(last)
            self._places.setdefault(param, []).append((holder, last))

    def take(self, params: Iterable[torch.nn.Parameter], *, copies: bool) -> None:
        """Gives the copy its parts of some of the model's parameters, which are whole now.

        copies: the parts stay when the model's weights are released. Otherwise they are views of the model's memory,
        but for parts that lie in several places of the whole, such as query, key and value in one matrix: those are
        copied anyway.
        """
        for param in params:
            part = view_part(self._empty[param], param.detach(), copies=copies)
            for holder, name in self._places[param]:
                holder.register_parameter(name, part)

    def follow(self) -> None:
        """Takes over buffers, training or evaluation, and attributes of modules that are plain values and have changed:
        peft's active adapters."""
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            holder, last = self._find(name)
            if holder._buffers[last] is not None and holder._buffers[last].shape == buffer.shape:
                holder._buffers[last] = buffer
        for module, other in self._copied:  # cut layers, too, whose class is another
            vars(other)["training"] = module.training
        for module, other, seen in self._pairs:
            for name, value in _plain_values(module).items():
                if name not in seen or seen[name] != value:
                    seen[name] = value
                    vars(other)[name] = copy.deepcopy(value)

    def drop(self) -> None:
        """Lets go of all weights."""
        for param, empty in self._empty.items():
            for holder, name in self._places[param]:
                holder.register_parameter(name, empty)

    def _find(self, name: str) -> tuple[torch.nn.Module, str]:
        parent, _, last = name.rpartition(".")
        return self.module.get_submodule(parent), last


def _plain_values(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers, texts, or collections of such."""
    return {name: copy.copy(value) for name, value in vars(module).items() if name[:2] != "__" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)
