"""Stand-ins for names of DeepSpeed that are not built, so that a program can import such a name without using it.

A use that needs the feature raises: a call, a subclass, a read of an attribute that is not a constant.
"""

from __future__ import annotations

import ast
import builtins
import functools
from typing import Any, NoReturn, Union

from deepspeed_c.compat.alias.modules import ABSENT
from deepspeed_c.compat.alias.upstream import upstream
from deepspeed_c.errors import FeatureError, MissingNameError

__all__ = ["ELSEWHERE", "Unbuilt", "instead_of", "unbuilt"]

# The advice of an error that has no more specific advice.
ELSEWHERE = "docs/compatibility.md of deepspeed_c's source lists what is here, what differs and what is not yet"


def instead_of(*paths: str) -> str:
    """Return the advice for a name that DeepSpeed has under these paths: the text for the longest prefix in
    ``ABSENT``."""
    prefixes = [".".join(path.split(".")[:n]) for path in paths for n in range(path.count(".") + 1, 1, -1)]
    return next((ABSENT[prefix] for prefix in sorted(prefixes, key=len, reverse=True) if prefix in ABSENT), ELSEWHERE)


class Unbuilt:
    """A stand-in for a class, function or object of DeepSpeed. It can only be imported, compared and named in
    annotations."""

    def __init__(self, kind: str, module: str, name: str) -> None:
        self._kind, self._path = kind, f"{module}.{name}"
        self._constants = upstream().class_constants(module, name)
        # Programs and tools read these attributes of any class or function.
        self.__module__, self.__name__, self.__qualname__ = module, name, name

    def __repr__(self) -> str:
        package = "MII" if self._path.startswith("mii.") else "DeepSpeed"
        return f"<{self._kind} {self._path} of {package}, not part of this version of deepspeed_c>"

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return unbuilt, (self.__module__, self.__name__)

    def _refuse(self, use: str) -> NoReturn:
        raise FeatureError(
            f"{use}, and is not part of this version of deepspeed_c",
            where=self._path,
            fix=instead_of(self._path),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("was called")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        self._refuse("was subclassed")

    def __getitem__(self, key: Any) -> NoReturn:
        # Iteration and `in` come here as well.
        self._refuse(f"was asked for [{key!r}]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and tools probe for such names
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        if name in self._constants:
            return ast.literal_eval(self._constants[name])
        raise MissingNameError(
            "is not part of this version of deepspeed_c", where=f"{self._path}.{name}", fix=instead_of(self._path)
        )

    # No object is an instance of a class that is not built.
    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007  (this method is what | would call)

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007


@functools.cache
def unbuilt(module: str, name: str) -> Any:
    """Return the object for a name that DeepSpeed's ``module`` defines. A plain constant gives its value, an exception
    gives a class of exceptions (``except`` requires a class), and any other name gives an ``Unbuilt``.

    Raises:
        MissingNameError: DeepSpeed has no such name.
    """
    found = upstream().find(module, name)
    if found is None:
        raise MissingNameError(
            "is not a name of DeepSpeed's", where=f"{module}.{name}", fix=instead_of(f"{module}.{name}")
        )
    if found.kind == "exception":
        bases = tuple(_base(each) for each in found.value.split())
        return type(
            name, bases, {"__module__": module, "__doc__": f"DeepSpeed's {module}.{name}; nothing here raises it."}
        )
    if found.kind == "constant" and found.value:
        return ast.literal_eval(found.value)
    return Unbuilt(found.kind, module, name)


def _base(place: str) -> type[BaseException]:
    module, colon, name = place.partition(":")
    return unbuilt(module, name) if colon else getattr(builtins, module)
