"""The public names, each imported when it is first used: ``import deepspeed_c`` itself costs nothing and needs no
torch.
"""

from __future__ import annotations

import importlib
import sys
import types

from deepspeed_c._version import __version__

TYPE_CHECKING = False  # typing's own; its import would be most of this module's time
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Name -> the module that defines it. A test holds this table still: growing it is a decision.
PUBLIC_NAMES: dict[str, str] = {
    "initialize": "deepspeed_c.initialize",
    "DeepSpeedEngine": "deepspeed_c.engine.engine",
    "DeepSpeedOptimizer": "deepspeed_c.zero.states.optimizer",
    "init_distributed": "deepspeed_c.comm",
    "add_config_arguments": "deepspeed_c.arguments",
    "get_accelerator": "deepspeed_c.accelerator",
    "DeepSpeedTransformerConfig": "deepspeed_c.ops.transformer",
    "DeepSpeedTransformerLayer": "deepspeed_c.ops.transformer",
    "tp_model_init": "deepspeed_c.inject.model_init",
    "install_as_deepspeed": "deepspeed_c.compat.alias.install",
    "AioError": "deepspeed_c.errors",
    "AliasError": "deepspeed_c.errors",
    "DeepSpeedCError": "deepspeed_c.errors",
    "ConfigError": "deepspeed_c.errors",
    "UnsupportedConfigError": "deepspeed_c.errors",
    "BatchSizeError": "deepspeed_c.errors",
    "ModelError": "deepspeed_c.errors",
    "OptimizerError": "deepspeed_c.errors",
    "RankMismatchError": "deepspeed_c.errors",
    "BackwardError": "deepspeed_c.errors",
    "RecomputeError": "deepspeed_c.errors",
    "NonFiniteLossError": "deepspeed_c.errors",
    "OffloadError": "deepspeed_c.errors",
    "LossScaleError": "deepspeed_c.errors",
    "StateError": "deepspeed_c.errors",
    "CheckpointError": "deepspeed_c.errors",
    "CommError": "deepspeed_c.errors",
    "LaunchError": "deepspeed_c.errors",
    "BuildError": "deepspeed_c.errors",
    "FeatureError": "deepspeed_c.errors",
    "MissingModuleError": "deepspeed_c.errors",
    "MissingNameError": "deepspeed_c.errors",
    "MissingPackageError": "deepspeed_c.errors",
    "EventError": "deepspeed_c.errors",
}

# Submodules that are reached as attributes without an import of their own.
PUBLIC_MODULES: tuple[str, ...] = (
    *("accelerator", "checkpointing", "comm", "config", "errors", "lr_schedules", "ops", "utils", "zero"),
)

# DeepSpeed's modules and packages that have no place of that name here: they are found by DeepSpeed's paths.
_UPSTREAM_PACKAGES = ("checkpointing", "module_inject", "monitor.config", "runtime")
_UPSTREAM_PATHS = tuple(f"{__name__}.{name}" for name in _UPSTREAM_PACKAGES)

# Modules of ours at paths of DeepSpeed's: a name that they lack may be one of DeepSpeed's.
_SHARED_PATHS = frozenset(
    f"{__name__}.{path}"
    for path in (
        *("accelerator", "checkpoint", "comm", "comm.comm", "compat", "io", "launcher", "launcher.launch", "ops"),
        *("monitor", "monitor.comet", "monitor.csv_monitor", "monitor.monitor"),
        *("monitor.tensorboard", "monitor.utils", "monitor.wandb"),
        *("ops.adagrad", "ops.adam", "ops.aio", "ops.lamb", "ops.lion", "ops.op_builder", "ops.transformer", "pipe"),
        *("sequence", "sequence.layer", "utils", "utils.groups", "utils.init_on_device", "utils.numa", "utils.nvtx"),
        *("utils.zero_to_fp32", "zero"),
    )
)

__all__ = ["__version__", *PUBLIC_NAMES, *PUBLIC_MODULES]  # noqa: PLE0604  (they are strings)


def _load_compiled() -> types.ModuleType:
    """The extension module; torch comes first, because the extension is linked against torch's libraries."""
    import torch

    try:
        return importlib.import_module("deepspeed_c._C")
    except ImportError as error:
        from deepspeed_c.errors import BuildError

        raise BuildError(
            f"the compiled part cannot be loaded: {error}",
            where="deepspeed_c._C",
            fix=f"build it against the installed torch ({torch.__version__}): pip install --no-build-isolation . (or -e .) in the source tree",
        ) from error


def _decide_threads() -> int:
    """For the compiled module, at its first operator on host tensors."""
    from deepspeed_c.threads import decide

    return decide()


class SharedModule(types.ModuleType):
    """A module at a path of ``_SHARED_PATHS``, until somebody asks for a name that it lacks: then it becomes an
    ``AliasedModule``, whose tables nobody has to load before.
    """

    # For `import module.name` and `from module import name`, as in AliasedModule.
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        # Python and tools ask for the former by way of trial, and Python itself imports the latter.
        if name.startswith("__") or has_file(self, name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._aliased(), name)

    @property
    def __all__(self) -> list[str]:
        return self._aliased().__all__

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        share(value)  # the import system has bound a submodule

    def _aliased(self) -> Any:
        from deepspeed_c.compat.alias.finder import adopt

        adopt(self)
        return self


def share(value: object) -> None:
    """Make a module answer to DeepSpeed's names, and its loaded submodules, if DeepSpeed has their paths."""
    if type(value) is types.ModuleType and value.__name__ in _SHARED_PATHS:
        value.__class__ = SharedModule
        for each in [*vars(value).values()]:
            share(each)


def has_file(module: types.ModuleType, name: str) -> bool:
    """Whether ``name`` is a submodule with a file."""
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(f"{module.__name__}.{name}", module.__path__) is not None


class _Package(types.ModuleType):
    """A package with a function that has the name of its own submodule (``initialize``, as in DeepSpeed).

    The import system binds a submodule to its parent's attribute; under a name of the table the object of that name is
    kept instead.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and PUBLIC_NAMES.get(name) == value.__name__:
            value = getattr(value, name)
        if name == "_C":
            value.pool_decided_by(_decide_threads)
        super().__setattr__(name, value)
        if isinstance(value, types.ModuleType) and sys.modules.get("deepspeed") is self:
            from deepspeed_c.compat.alias.finder import adopt

            adopt(value)
        else:
            share(value)


class _UpstreamPaths:
    """First on ``sys.meta_path``: DeepSpeed's module paths under our own name (``deepspeed_c.runtime.zero``), for
    programs whose imports were rewritten from the one name to the other. Another finder would load our files a second
    time under these paths."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith(_UPSTREAM_PATHS):
            return None
        from deepspeed_c.compat.alias.finder import spec_of_ours

        return spec_of_ours(name)


class _OtherPaths:
    """Last on ``sys.meta_path``: DeepSpeed's paths that are no files of ours (``deepspeed_c.moe.layer``)."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith(f"{__name__}."):
            return None
        from deepspeed_c.compat.alias.finder import spec_of_listed

        return spec_of_listed(name)


def __getattr__(name: str) -> Any:
    if name == "_C":
        value: Any = _load_compiled()
    elif name in PUBLIC_NAMES:
        value = getattr(importlib.import_module(PUBLIC_NAMES[name]), name)
    elif name in PUBLIC_MODULES or name in _UPSTREAM_PACKAGES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif has_file(sys.modules[__name__], name):
        # Python asks for the attribute before it imports a submodule, and is not to wait for the tables.
        if sys.modules.get("deepspeed") is not sys.modules[__name__]:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        from deepspeed_c.compat.alias.finder import is_active, is_listed, upstream_attribute

        if not is_listed("deepspeed", name) and not is_active():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = upstream_attribute("deepspeed", name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
sys.meta_path.insert(0, _UpstreamPaths())
sys.meta_path.append(_OtherPaths())
