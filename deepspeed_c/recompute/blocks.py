"""Recomputes layers of a model that does not call ``checkpoint`` itself: its repeated blocks, or blocks with certain
names.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.config.offload import Aio
from deepspeed_c.errors import ConfigError
from deepspeed_c.inject.swap import swap_class
from deepspeed_c.offload.place import raise_together
from deepspeed_c.recompute import report
from deepspeed_c.recompute.budget import Budget, BudgetRole
from deepspeed_c.recompute.recomputer import Recomputer, check_section
from deepspeed_c.recompute.stash import NVME_PATH

__all__ = ["Blocks", "find_blocks"]

_KEY = "activation_checkpointing.layers"
# Attributes of the model and of each layer, read by transformers.
_SWITCH, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
_MIN_BLOCKS = 2
# Attribute of a class made here. Its value is the user's class.
_PLAIN = "_dsc_recomputes"
# Accelerate fills in every "auto" of a configuration, and refuses an unknown "auto".
_REPEATED = ("auto", "repeated")


def _layers_of_transformers(model: torch.nn.Module) -> list[str]:
    """Names of the layers that recompute themselves if their switch is set."""
    library = sys.modules.get("transformers.modeling_layers")
    base = getattr(library, "GradientCheckpointingLayer", None)
    return [] if base is None else [name for name, module in model.named_modules() if isinstance(module, base)]


def find_blocks(model: torch.nn.Module, layers: str) -> list[str]:
    """Names of the modules that ``layers`` selects. Raises ConfigError where it selects none."""
    if layers in _REPEATED:
        return _find_repeated(model)
    try:
        pattern = re.compile(layers)
    except re.error as error:
        raise ConfigError(
            f"{layers!r} is no regular expression: {error}", where=_KEY, fix='write one, or "auto"'
        ) from error
    names = [name for name, _ in model.named_modules() if name and pattern.fullmatch(name)]
    if not names:
        known = [name for name, _ in model.named_modules() if name]
        raise ConfigError(
            f"{layers!r} fits the whole name of none of the model's {len(known)} modules"
            f" ({', '.join(known[:4])}{', ...' if len(known) > 4 else ''})",
            where=_KEY,
            fix=r'write a regular expression such as "layers\.\d+", or "auto"',
        )
    return names


@runtime_checkable
class OfLayers(Protocol):
    """A model that is a list of layers; a rank may hold a part of the list."""

    def repeated_layers(self) -> list[str]:
        """Names of this rank's layers whose class occurs several times in the whole list. Raises ConfigError, on all
        ranks, if no class occurs several times.
        """


def _find_repeated(model: torch.nn.Module) -> list[str]:
    names = model.repeated_layers() if isinstance(model, OfLayers) else _layers_of_transformers(model)
    if names or isinstance(model, OfLayers):
        return names
    lists = list(_repeated_lists("", model))
    # A layer without child modules (a head, an expert) keeps little but its input: recomputing it gains nothing.
    deep = [found for found in lists if any(_is_deep(block) for block in found.values())]
    names = [name for found in deep or lists for name in found]
    if not names:
        raise ConfigError(
            '"auto" finds no repeated blocks: neither a layer of transformers that can be recomputed, nor a ModuleList'
            " with several modules of one class",
            where=_KEY,
            fix=r'name the layers by a regular expression, such as "encoder\.block_\d+"',
        )
    return names


def _repeated_lists(name: str, module: torch.nn.Module) -> Iterator[dict[str, torch.nn.Module]]:
    """The outermost lists of repeated blocks at or below ``module``, by name. Everything that a layer does is in its
    block.
    """
    below = [(f"{name}.{part}" if name else part, child) for part, child in module.named_children()]
    if isinstance(module, torch.nn.ModuleList) and _are_repeated(list(module)):
        inner = [found for each in below for found in _repeated_lists(*each) if _are_blocks(list(found.values()))]
        # Blocks that all differ are stages, if they consist of blocks. Recomputed one at a time, a stage would be held
        # whole.
        if inner and len({_form(block) for block in module}) == len(module):
            yield from inner
        else:
            # A block that is in the list twice has both names.
            yield {f"{name}.{i}" if name else str(i): block for i, block in enumerate(module)}
        return
    for each in below:
        yield from _repeated_lists(*each)


def _are_blocks(modules: list[torch.nn.Module]) -> bool:
    """Whether repeated modules can be the blocks of a stage. Experts of one layer cannot: layers that differ in their
    numbers of experts are blocks, and no stages.
    """
    is_shared = all(getattr(param, "allreduce", True) for module in modules for param in module.parameters())
    return is_shared and any(map(_is_deep, modules))


def _are_repeated(blocks: list[torch.nn.Module]) -> bool:
    return len(blocks) >= _MIN_BLOCKS and len({type(block) for block in blocks}) == 1


def _is_deep(block: torch.nn.Module) -> bool:
    return next(block.children(), None) is not None


def _form(block: torch.nn.Module) -> tuple:
    # Weights that stage 3 has sharded are empty, but have an attribute with their shape.
    return tuple((name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in block.named_parameters())


def _make(cls: type) -> Any:
    return cls.__new__(cls)


def _recomputed(cls: type, recomputer: Recomputer, names: dict[int, str]) -> type:
    """A subclass of ``cls`` whose calls are recomputed, together with their hooks, because some hooks gather weights.
    ``names``: names of modules, by id.
    """

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recomputer.run(super(made, self).__call__, args, kwargs, label=names.get(id(self), ""))

    def reduce(self: torch.nn.Module, protocol: int) -> Any:
        # Copies and pickles get the user's class, and no part of the engine.
        return _make, (cls,), *super(made, self).__reduce_ex__(protocol)[2:]

    body = {
        "__call__": call,
        "__reduce_ex__": reduce,
        _PLAIN: cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    made: Any = type(cls.__name__, (cls,), body)
    return made


class Blocks:
    """The layers of a model that are recomputed according to an engine's section, until ``close``.

    tensor_parallel: the ranks that hold the model together, and share its activations.
    has_sharded: weights are released after use. Torch's own checkpoint would keep frozen weights in memory.
    aio: settings of reading and writing files.
    ranks: all ranks with such a section. Where one rank cannot make its file, all of them raise.
    role: this rank's role in the budget.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        section: ActivationCheckpointing,
        tensor_parallel: Collectives | None = None,
        *,
        has_sharded: bool = False,
        aio: Aio | None = None,
        ranks: Collectives | None = None,
        role: BudgetRole = BudgetRole(),  # noqa: B008  (immutable)
    ) -> None:
        # A section without layers does nothing by itself, as in DeepSpeed, so its other keys are not checked.
        if section.layers is not None:
            check_section(section, None, "activation_checkpointing")
        comm = tensor_parallel if section.partition_activations else None
        budget = None if section.budget is None else Budget(section, ranks, role)
        names = {id(module): name for name, module in model.named_modules()}
        problem: ConfigError | None = None
        try:
            self.recomputer = Recomputer(section, comm, aio, names, budget)
        except ConfigError as error:
            problem = error
        if ranks is not None and section.offload.device == "nvme":
            raise_together(problem, ConfigError, NVME_PATH, ranks)
        if problem is not None:
            raise problem
        self._undo: list[Callable[[], None]] = []
        if section.layers is not None:
            self._wrap(model, find_blocks(model, section.layers))
        elif self._asks or has_sharded:
            self._take_over(model)

    @property
    def _asks(self) -> bool:
        return self.recomputer.section != ActivationCheckpointing()

    def active(self, inputs: Any = (), name: str = "") -> AbstractContextManager[None]:
        """Calls of ``checkpoint`` within follow the section, if it differs from the default. inputs: the arguments of
        the model, or of the pipeline stage ``name``.
        """
        return self.recomputer.active(inputs, name) if self._asks else nullcontext()

    def expect(self, n_in_flight: int) -> None:
        """Announces the largest number of forwards that will wait for their backwards at once."""
        if self.recomputer.budget is not None:
            self.recomputer.budget.expect(n_in_flight)

    def _wrap(self, model: torch.nn.Module, names: list[str]) -> None:
        modules = {name: model.get_submodule(name) for name in names}
        if set(names) == set(_layers_of_transformers(model)):
            # These layers know the work that must not be done twice, such as filling caches.
            for module in model.modules():
                if hasattr(module, _SWITCH):
                    self._set(module, {_SWITCH: True, _FUNCTION: self._function(None)})
            return
        labels = {id(module): name for name, module in modules.items()}
        classes: dict[type, type] = {}
        # Layers that another engine has wrapped belong to this engine from now on.
        for cls in {_plain(module) for module in modules.values()}:
            classes[cls] = _recomputed(cls, self.recomputer, labels)
        # Each module is wrapped once, however many names it has.
        for module in {id(module): module for module in modules.values()}.values():
            made = classes[_plain(module)]
            self._undo.append(functools.partial(_unwrap, module, made))
            swap_class(module, made)

    def _take_over(self, model: torch.nn.Module) -> None:
        """Makes layers of transformers that recompute themselves already follow the section."""
        for module in model.modules():
            if getattr(module, _SWITCH, False) and hasattr(module, _FUNCTION):
                self._set(module, {_FUNCTION: self._function(getattr(module, _FUNCTION))})

    def _function(self, theirs: Any) -> Callable:
        """The function that a layer of transformers calls in place of ``theirs``. It is reentrant if ``theirs`` is."""
        keywords = theirs.keywords if isinstance(theirs, functools.partial) else {}
        is_reentrant = True if keywords.get("use_reentrant") else None

        def function(forward: Callable, *args: Any, **kwargs: Any) -> Any:
            return self.recomputer.run(forward, args, kwargs, is_reentrant=is_reentrant)

        return function

    def _set(self, module: torch.nn.Module, values: dict[str, Any]) -> None:
        before = {name: vars(module)[name] for name in values if name in vars(module)}
        vars(module).update(values)
        self._undo.append(functools.partial(_put_back, module, tuple(values), before))

    def profile(self, step: int, rank: int) -> str:
        """A table of the layers' costs since the last call; empty if nothing is counted. Rank 0 also writes it to
        ``profile_path``.
        """
        counters, folder = self.recomputer.counters, self.recomputer.section.profile_path
        if counters is None:
            return ""
        figures = counters.as_dict()
        counters.clear()
        if folder is not None and rank == 0:
            report.write(folder, figures, step)
        return report.describe(figures)

    def close(self) -> None:
        """Restores the model to its state before this object."""
        while self._undo:
            self._undo.pop()()
        self.recomputer.close()


def _plain(module: torch.nn.Module) -> type:
    return getattr(type(module), _PLAIN, type(module))


def _unwrap(module: torch.nn.Module, made: type) -> None:
    if type(module) is made:
        swap_class(module, _plain(module))


def _put_back(module: torch.nn.Module, names: tuple[str, ...], before: dict[str, Any]) -> None:
    for name in names:
        vars(module).pop(name, None)
    vars(module).update(before)
