"""Imports of ``deepspeed.x`` and ``mii.x``.

A module in the table of modules.py is one object under both names. A module of DeepSpeed that is not built here
imports, and its names raise when they are used. A module that DeepSpeed lacks is an error. The same holds for MII.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, NoReturn

from deepspeed_c.compat.alias.modules import MODULES, NAMES
from deepspeed_c.compat.alias.unbuilt import instead_of, unbuilt
from deepspeed_c.compat.alias.upstream import upstream
from deepspeed_c.errors import MissingModuleError, MissingNameError

__all__ = [
    "ROOTS",
    "AliasedModule",
    "adopt",
    "install_finders",
    "is_active",
    "is_listed",
    "our_path",
    "spec_of_listed",
    "spec_of_ours",
    "upstream_attribute",
]

OURS, UPSTREAM = "deepspeed_c", "deepspeed"
_PACKAGE = sys.modules[OURS]
# Package of others -> the package here that answers to its name. The longest of our paths comes first.
ROOTS = {"mii": f"{OURS}.mii", UPSTREAM: OURS}

# Every path of the tables, and the packages above them.
_KNOWN = {".".join(path.split(".")[:n]) for path in [*MODULES, *NAMES] for n in range(2, path.count(".") + 2)}


def is_active(path: str = UPSTREAM) -> bool:
    """Whether the top of ``path`` (``deepspeed`` or ``mii``) means this package in this process at this moment."""
    top = path.partition(".")[0]
    return top in ROOTS and top in sys.modules and sys.modules[top] is sys.modules.get(ROOTS[top])


def our_path(upstream_path: str) -> str:
    """The path of this package for a path of DeepSpeed or MII: ``deepspeed_c.mii.api`` for ``mii.api``."""
    top, dot, rest = upstream_path.partition(".")
    return f"{ROOTS[top]}{dot}{rest}"


def _has_module(path: str) -> bool:
    """Whether DeepSpeed, or a table in modules.py, has a module of that path."""
    return path in _KNOWN or path in upstream().modules


def _upstream_names(module: str) -> list[str]:
    """DeepSpeed's names for a module of this package, shortest first; ``module`` itself if it only gathers names."""
    names = sorted((path for path, ours in MODULES.items() if ours == module), key=len)
    return names or [_upstream_path(module)]


class AliasedModule(types.ModuleType):
    """A module that answers to DeepSpeed's names: attributes that it lacks are looked up in the tables."""

    # A module that is no package gets an empty path. For a missing name in `from module import name`, Python then asks
    # the finders, and MissingFinder can say what to use instead. Without a path, Python would raise its own message.
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        names = _upstream_names(self.__name__)
        is_asked_by_trial = name.startswith("__")  # by Python and by tools
        # Python asks for the attribute before it imports a submodule of this package. This must not read upstream.tsv.
        is_ours = any(_is_ours(module, name) for module in names)
        if not is_asked_by_trial and not is_ours and _PACKAGE.has_file(self, name):
            return importlib.import_module(f"{self.__name__}.{name}")
        for module in names:
            if is_listed(module, name):
                value = upstream_attribute(module, name)
                setattr(self, name, value)
                return value
        if is_asked_by_trial:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _refuse(MissingNameError, name, *names)

    @property
    def __all__(self) -> list[str]:
        """The names for ``from module import *``. This is a property because the module's own list lacks DeepSpeed's
        names."""
        own = self.__dict__.get("__all__", [name for name in self.__dict__ if not name.startswith("_")])
        names = {name for module in _upstream_names(self.__name__) for name in _names_of(module)}
        return [*own, *sorted(name for name in names.difference(own) if not name.startswith("_"))]

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType):
            value = _PACKAGE.named(self, name, value)
            adopt(value)  # the import system has bound a submodule
            if callable(self.__dict__.get(name)) or (not hasattr(self, "__file__") and _is_shadowed(self, name)):
                return  # a function with its submodule's name (z3_leaf_module) keeps the name, as in DeepSpeed
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        listed = [name for module in _upstream_names(self.__name__) for name in _listed(module)]
        return sorted({*super().__dir__(), *listed})


def _is_shadowed(module: AliasedModule, name: str) -> bool:
    """Whether DeepSpeed's package has another object under the name of its submodule."""
    paths = _upstream_names(module.__name__)
    if any(f"{path}.{name}" in _KNOWN for path in paths):
        return False
    found = (upstream().find(path, name) for path in paths)
    return any(each is not None and each.kind != "module" for each in found)


def adopt(module: types.ModuleType) -> None:
    """Make a module of this package, and its loaded submodules, answer to DeepSpeed's names too."""
    if type(module) in (types.ModuleType, _PACKAGE.SharedModule) and module.__name__.startswith(f"{OURS}."):
        module.__class__ = AliasedModule
        for value in [*vars(module).values()]:
            if isinstance(value, types.ModuleType) and value.__name__.startswith(f"{module.__name__}."):
                adopt(value)


def _submodules(module: str) -> set[str]:
    return {path.rpartition(".")[2] for path in _KNOWN.union(upstream().modules) if path.rpartition(".")[0] == module}


def _listed(module: str) -> set[str]:
    return _submodules(module) | _names_of(module)


def _names_of(module: str) -> set[str]:
    return set(NAMES.get(module, ())) | upstream().public_names(module)


def _is_ours(module: str, name: str) -> bool:
    """Whether the tables in modules.py have that name, or that submodule, of DeepSpeed's ``module``."""
    return name in NAMES.get(module, ()) or f"{module}.{name}" in _KNOWN


def is_listed(module: str, name: str) -> bool:
    """Whether DeepSpeed's ``module`` has that name, or that submodule."""
    if _is_ours(module, name):
        return True
    # Python and tools probe for such names. They must get the answer without a read of the table.
    if name.startswith("__"):
        return False
    return upstream().find(module, name) is not None or f"{module}.{name}" in upstream().modules


def upstream_attribute(module: str, name: str) -> Any:
    """Return the object that DeepSpeed calls ``name`` in its module ``module``, or a stand-in for it.

    Raises:
        MissingNameError: DeepSpeed has none.
    """
    if ours := NAMES.get(module, {}).get(name):
        path, _, attribute = ours.partition(":")
        found = importlib.import_module(path)
        return getattr(found, attribute) if attribute else found
    if not is_listed(module, name):
        _refuse(MissingNameError, name, module)
    if f"{module}.{name}" in _KNOWN:
        return _import_upstream(f"{module}.{name}")
    if listed := upstream().find(module, name):
        if not listed.name:
            return _import_upstream(listed.module)
        if (listed.module, listed.name) == (module, name):
            return unbuilt(module, name)
        if module in MODULES and MODULES[module] == MODULES.get(listed.module):
            return upstream_attribute(listed.module, listed.name)  # one module has both paths, and lacks the name
        # The module has the name from another module: use the object of this package if it is built
        there = _import_upstream(listed.module)
        if isinstance(there, AliasedModule) or hasattr(there, listed.name):
            return getattr(there, listed.name)
        return upstream_attribute(listed.module, listed.name)
    return _import_upstream(f"{module}.{name}")


def _import_upstream(path: str) -> types.ModuleType:
    own = path if is_active(path) else our_path(path)
    module = importlib.import_module(MODULES.get(path, own))
    adopt(module)
    return module


def _refuse(kind: type[MissingNameError | MissingModuleError], name: str, *modules: str) -> NoReturn:
    """Raises the error for a name in a module that DeepSpeed has under these paths."""
    paths = [f"{module}.{name}" for module in modules]
    raise kind("is not part of this version of deepspeed_c", where=paths[0], fix=instead_of(*paths))


class _Loader:
    """Returns a module that is loaded already, or a module that only gathers names."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        ours = MODULES.get(_upstream_path(spec.name)) if spec.name.startswith(f"{OURS}.") else _our_module(spec.name)
        if ours == spec.name:  # no other finder has found its file
            error = MissingModuleError(
                "is a module of this package, but its file is not there", where=ours, fix="install deepspeed_c again"
            )
            error.name = ours
            raise error
        module = importlib.import_module(ours) if ours else AliasedModule(spec.name)
        self._spec = module.__spec__ if ours else spec
        return module

    def get_code(self, name: str) -> types.CodeType:
        """The code for ``python -m name``: the file of this package's module, or the ``main`` of a module that only
        gathers names."""
        if ours := _our_module(name):
            spec = importlib.util.find_spec(ours)
            return spec.loader.get_code(spec.name)
        main = NAMES.get(name, {}).get("main", "")
        if not main:
            parent, _, last = name.rpartition(".")
            _refuse(MissingModuleError, last, parent)
        module, _, attribute = main.partition(":")
        source = f"import sys\nfrom {module} import {attribute} as main\nsys.exit(main())\n"
        return compile(source, f"<{name}>", "exec")

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the other name's spec
        adopt(module)


def _our_module(upstream_path: str) -> str | None:
    """The path of this package's module for that name; None if the module only gathers names.

    Raises:
        ModuleNotFoundError: there is none.
    """
    if upstream_path in MODULES:
        return MODULES[upstream_path]
    if upstream_path in _KNOWN:
        return None
    parent, _, name = upstream_path.rpartition(".")
    same = our_path(upstream_path)
    above = sys.modules[parent]  # a module is imported before its submodules
    if above.__name__ == same.rpartition(".")[0] and PathFinder.find_spec(same, list(above.__path__)):
        return same
    if _has_module(upstream_path):
        return None
    _refuse(MissingModuleError, name, parent)


def _upstream_path(name: str) -> str:
    """DeepSpeed's or MII's name for the path ``name`` under our own package; another path as it is."""
    for top, ours in ROOTS.items():
        if name == ours or name.startswith(f"{ours}."):
            return top + name.removeprefix(ours)
    return name


def spec_of_ours(name: str) -> ModuleSpec:
    """Return the spec for a path of DeepSpeed that is imported under the name of this package.

    Raises:
        MissingModuleError: DeepSpeed has no such module.
    """
    if spec := spec_of_listed(name):
        return spec
    parent, _, last = _upstream_path(name).rpartition(".")
    try:
        _refuse(MissingModuleError, last, parent)
    except MissingModuleError as error:
        error.name = name
        raise


def spec_of_listed(name: str) -> ModuleSpec | None:
    """Return the spec for a path of DeepSpeed that is imported under the name of this package; None if DeepSpeed has no
    such module."""
    return ModuleSpec(name, _Loader()) if _has_module(_upstream_path(name)) else None


class AliasFinder:
    """The first finder on ``sys.meta_path``, because another finder would load the files a second time, under the other
    name."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if "." not in name or not is_active(name):
            return None
        try:
            _our_module(name)
        except MissingModuleError as error:
            # In `from a import b` Python replaces an error whose name is exactly the missing one by its own message.
            error.name = our_path(name)
            raise
        return ModuleSpec(name, _Loader())


class MissingFinder:
    """The last finder on ``sys.meta_path``. It refuses ``from deepspeed.x import name`` if no table has the name and
    Python asks for it under the name of this package's module.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        parent, _, last = name.rpartition(".")
        ours = name.startswith(f"{OURS}.") and is_active(_upstream_path(name))
        if ours and isinstance(sys.modules.get(parent), _ADOPTED):
            try:
                _refuse(MissingModuleError, last, *_upstream_names(parent))
            except MissingModuleError as error:
                error.name = error.where  # the name in DeepSpeed, for the reason given in AliasFinder
                raise


_ADOPTED = (AliasedModule, type(_PACKAGE))


def install_finders() -> None:
    """Make ``deepspeed.x`` importable while ``deepspeed`` is this package, and ``mii.x`` while ``mii`` is.

    A second call does nothing.
    """
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
        sys.meta_path.append(MissingFinder())
    for module in [module for name, module in sys.modules.items() if name.startswith(f"{OURS}.")]:
        adopt(module)
