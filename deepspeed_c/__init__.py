"""The public names. Each is imported at its first use, so that ``import deepspeed_c`` is fast and needs no torch."""

from __future__ import annotations

import importlib
import sys
import types

from deepspeed_c._version import __version__

TYPE_CHECKING = False  # instead of typing.TYPE_CHECKING: importing typing would take most of this module's import time
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Name -> the module that defines it. A test compares this table, because a new public name is a deliberate decision.
PUBLIC_NAMES: dict[str, str] = {
    "initialize": "deepspeed_c.initialize",
    "init_inference": "deepspeed_c.inference.engine",
    "InferenceEngine": "deepspeed_c.inference.engine",
    "DeepSpeedEngine": "deepspeed_c.engine.engine",
    "DeepSpeedOptimizer": "deepspeed_c.zero.states.optimizer",
    "init_distributed": "deepspeed_c.comm",
    "add_config_arguments": "deepspeed_c.arguments",
    "get_accelerator": "deepspeed_c.accelerator",
    "DeepSpeedTransformerConfig": "deepspeed_c.ops.transformer",
    "DeepSpeedTransformerLayer": "deepspeed_c.ops.transformer",
    "tp_model_init": "deepspeed_c.inject.model_init",
    "default_inference_config": "deepspeed_c.config.inference",
    "install_as_deepspeed": "deepspeed_c.compat.alias.install",
    "AioError": "deepspeed_c.errors",
    "AliasError": "deepspeed_c.errors",
    "DeepSpeedCError": "deepspeed_c.errors",
    "ConfigError": "deepspeed_c.errors",
    "UnsupportedConfigError": "deepspeed_c.errors",
    "BatchSizeError": "deepspeed_c.errors",
    "ElasticityConfigError": "deepspeed_c.errors",
    "ElasticityError": "deepspeed_c.errors",
    "ElasticityIncompatibleWorldSize": "deepspeed_c.errors",
    "ModelError": "deepspeed_c.errors",
    "OptimizerError": "deepspeed_c.errors",
    "RankMismatchError": "deepspeed_c.errors",
    "BackwardError": "deepspeed_c.errors",
    "RecomputeError": "deepspeed_c.errors",
    "RoutingError": "deepspeed_c.errors",
    "StageError": "deepspeed_c.errors",
    "NonFiniteLossError": "deepspeed_c.errors",
    "OffloadError": "deepspeed_c.errors",
    "LossScaleError": "deepspeed_c.errors",
    "StateError": "deepspeed_c.errors",
    "CheckpointError": "deepspeed_c.errors",
    "DataFileError": "deepspeed_c.errors",
    "CommError": "deepspeed_c.errors",
    "LaunchError": "deepspeed_c.errors",
    "BuildError": "deepspeed_c.errors",
    "FeatureError": "deepspeed_c.errors",
    "MissingModuleError": "deepspeed_c.errors",
    "MissingNameError": "deepspeed_c.errors",
    "MissingPackageError": "deepspeed_c.errors",
    "EventError": "deepspeed_c.errors",
}

# Submodules that are available as attributes without an explicit import.
PUBLIC_MODULES: tuple[str, ...] = (
    *("accelerator", "checkpointing", "comm", "config", "errors", "lr_schedules", "ops", "utils", "zero"),
)

# DeepSpeed's modules and packages whose paths have no file here. They are found by DeepSpeed's paths.
_UPSTREAM_PACKAGES = ("checkpointing", "module_inject", "monitor.config", "runtime")
_UPSTREAM_PATHS = tuple(f"{__name__}.{name}" for name in _UPSTREAM_PACKAGES)

# Modules of this package whose path is also a path of DeepSpeed. A name that they lack may be a name of DeepSpeed.
_SHARED_PATHS = frozenset(
    f"{__name__}.{path}"
    for path in (
        *("accelerator", "autotuning", "checkpoint", "comm", "comm.comm", "compat"),
        *("compression", "compression.basic_layer", "compression.compress", "compression.scheduler"),
        *("compile", "compile.backend", "compile.passes", "compile.passes.contract"),
        *("io", "launcher", "launcher.launch", "ops"),
        *("inference", "inference.engine", "inference.v2", "monitor", "monitor.comet", "monitor.csv_monitor"),
        "monitor.monitor",
        *("monitor.tensorboard", "monitor.utils", "monitor.wandb"),
        *("mii", "mii.config", "mii.constants", "mii.errors"),
        *("moe", "moe.experts", "moe.layer", "moe.mappings", "moe.utils"),
        *("ops.adagrad", "ops.adam", "ops.aio", "ops.lamb", "ops.lion", "ops.op_builder", "ops.quantizer"),
        *("ops.transformer", "pipe"),
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
    """The number of threads. The compiled module calls this at its first operator on host tensors."""
    from deepspeed_c.threads import decide

    return decide()


def _tables() -> types.ModuleType:
    """The module with DeepSpeed's paths and names, which is loaded when it is first needed."""
    from deepspeed_c.compat.alias import finder

    return finder


class SharedModule(types.ModuleType):
    """A module at a path of ``_SHARED_PATHS``. At the first request for a name that it lacks, it becomes an
    ``AliasedModule``, so that the tables of ``AliasedModule`` are loaded only then.
    """

    # For `import module.name` and `from module import name`, as in AliasedModule.
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        # Python and tools probe for dunder names. Python itself imports submodules with a file.
        if name.startswith("__") or has_file(self, name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._aliased(), name)

    @property
    def __all__(self) -> list[str]:
        return self._aliased().__all__

    def __setattr__(self, name: str, value: Any) -> None:
        value = named(self, name, value)
        super().__setattr__(name, value)
        share(value)  # the import system is binding a submodule

    def _aliased(self) -> Any:
        _tables().adopt(self)
        return self


def named(package: types.ModuleType, name: str, value: Any) -> Any:
    """The object that ``package`` gets as ``name`` when the import system binds the submodule ``value``: the object of
    that name if the table PUBLIC_NAMES of the package finds it there, and else the submodule."""
    table = package.__dict__.get("PUBLIC_NAMES", {})
    if isinstance(value, types.ModuleType) and table.get(name) == value.__name__:
        return getattr(value, name)
    return value


def share(value: object) -> None:
    """Make a module and its loaded submodules answer to DeepSpeed's names, if DeepSpeed has the same paths."""
    if type(value) is types.ModuleType and value.__name__ in _SHARED_PATHS:
        value.__class__ = SharedModule
        for each in [*vars(value).values()]:
            share(each)


def has_file(module: types.ModuleType, name: str) -> bool:
    """Whether ``name`` is a submodule with a file."""
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(f"{module.__name__}.{name}", module.__path__) is not None


class _Package(types.ModuleType):
    """A package with a function that has the name of its own submodule (``initialize``, as in DeepSpeed)."""

    def __setattr__(self, name: str, value: Any) -> None:
        value = named(self, name, value)
        if name == "_C":
            value.pool_decided_by(_decide_threads)
        super().__setattr__(name, value)
        if isinstance(value, types.ModuleType) and sys.modules.get("deepspeed") is self:
            _tables().adopt(value)
        else:
            share(value)


class _UpstreamPaths:
    """The first finder on ``sys.meta_path``. It finds DeepSpeed's module paths under this package's name
    (``deepspeed_c.runtime.zero``), for programs whose imports were rewritten from ``deepspeed`` to ``deepspeed_c``.
    Another finder would load the files a second time under these paths."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith(_UPSTREAM_PATHS):
            return None
        return _tables().spec_of_ours(name)


class _OtherPaths:
    """The last finder on ``sys.meta_path``. It finds DeepSpeed's paths that have no file here
    (``deepspeed_c.moe.layer``)."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith(f"{__name__}."):
            return None
        return _tables().spec_of_listed(name)


def __getattr__(name: str) -> Any:
    if name == "_C":
        value: Any = _load_compiled()
    elif name in PUBLIC_NAMES:
        value = getattr(importlib.import_module(PUBLIC_NAMES[name]), name)
    elif name in PUBLIC_MODULES or name in _UPSTREAM_PACKAGES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif has_file(sys.modules[__name__], name):
        # Python asks for the attribute before it imports a submodule. This must not load the tables.
        if sys.modules.get("deepspeed") is not sys.modules[__name__]:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        tables = _tables()
        if not tables.is_listed("deepspeed", name) and not tables.is_active():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = tables.upstream_attribute("deepspeed", name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
sys.meta_path.insert(0, _UpstreamPaths())
sys.meta_path.append(_OtherPaths())
