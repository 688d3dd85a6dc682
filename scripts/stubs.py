"""Write deepspeed_c/_C.pyi, the types of the compiled module, from the signatures that it carries.

python -m scripts.stubs deepspeed_c/_C.pyi
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch  # noqa: F401  the extension needs its libraries to be loaded

from deepspeed_c import _C

__all__ = ["stubs"]

_HEAD = '''# ruff: noqa: N999
"""The compiled module: handles of the C cores and functions about the build. Written by scripts/stubs.py; `make docs` writes it anew."""

from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import Buffer

'''

# pybind11 writes every accepted type; a type checker gets the intended one.
_TYPES = (
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"\(anonymous namespace\)::|deepspeed_c\._C\.|collections\.abc\.|typing_extensions\.", ""),
    (r"\bobject\b", "Any"),
    (r"\bdict\b(?!\[)", "dict[str, Any]"),
)


def stubs(module: Any = _C) -> str:
    """Return the whole file."""
    names = [name for name in sorted(vars(module)) if not name.startswith("__")]
    values = {name: getattr(module, name) for name in names}
    parts = [_HEAD]
    parts += [f"{name}: int\n" for name, value in values.items() if isinstance(value, int)]
    # Tables of the binding have names and numbers.
    tables = (name for name, value in values.items() if isinstance(value, dict))
    parts += [f"{name}: dict[str, int]\n" for name in tables if not name.startswith("_")]
    parts += ["\n" + _class(name, value) for name, value in values.items() if isinstance(value, type)]
    parts += [
        f"def {_signature(value.__doc__)}: ...\n"
        for name, value in values.items()
        if callable(value) and not isinstance(value, type)
    ]
    return "".join(parts)


def _class(name: str, kind: type) -> str:
    if issubclass(kind, Exception):
        return f"class {name}({kind.__base__.__name__}): ...\n"
    lines = [f"class {name}:"]
    for member, value in sorted(vars(kind).items()):
        if isinstance(value, property):
            signature = _signature("f" + value.fget.__doc__.lstrip())
            lines += ["    @property", f"    def {member}(self) -> {signature.partition(' -> ')[2]}: ..."]
        elif isinstance(value, int):
            lines.append(f"    {member}: ClassVar[int]")
        elif (member == "__init__" or not member.startswith("_")) and "->" in (value.__doc__ or ""):
            # A class that Python code cannot construct has no signature of __init__.
            lines.append(f"    def {_signature(value.__doc__)}: ...")
    return "\n".join(lines) + "\n"


def _signature(doc: str) -> str:
    """Return ``name(parameters) -> result`` from the first line of pybind11's docstring."""
    text = doc.splitlines()[0]
    for pattern, by in _TYPES:
        text = re.sub(pattern, by, text)
    while "typing.Annotated[" in text:
        # Innermost annotations first: an annotation holds its type and a note on its size.
        text = re.sub(r'typing\.Annotated\[((?:(?!typing\.Annotated\[).)*?), "[^"]*"\]', r"\1", text)
    text = re.sub(r"\(self: \w+", "(self", text)
    return re.sub(r"= (\[\]|'[^']*'|[^,)\]]+)(?=[,)])", "= ...", text)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(stubs())
