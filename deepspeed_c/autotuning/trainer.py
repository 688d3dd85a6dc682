"""Options of the Trainer of transformers that have to say the same as the configuration file.

The Trainer refuses a micro-batch in the file that differs from its own option. Other scripts refuse an option that they
do not know. So an option is changed only where the command line has it already, or where the script's own sources show
that the parser of transformers reads the command line.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Collection, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from deepspeed_c.autotuning.experiment import Launch, config_index
from deepspeed_c.autotuning.space import ACCUMULATION, MICRO_BATCH

__all__ = ["trainer_mappings"]

_OPTIONS = {
    MICRO_BATCH: "--per_device_train_batch_size",
    ACCUMULATION: "--gradient_accumulation_steps",
}
# How the Trainer's own arguments name the configuration file.
_FILE_OPTION = "--deepspeed"
_PARSERS = frozenset({"HfArgumentParser", "TrlParser"})
# Packages that define or mention these parsers for others. A copy beside the script says nothing of the script.
_LIBRARIES = frozenset({"transformers", "trl"})


def trainer_mappings(keys: Collection[str], launch: Launch) -> dict[str, str]:
    """Configuration key -> the Trainer's option that takes its value too, for those of ``keys`` whose option the script
    takes for sure."""
    among = {word.partition("=")[0] for word in launch.arguments}
    has_all = _reads_trainer_options(launch)
    return {key: option for key, option in _OPTIONS.items() if key in keys and (has_all or option in among)}


def _reads_trainer_options(launch: Launch) -> bool:
    """Whether the script reads its command line with the parser of transformers, and finds the configuration file by
    the Trainer's option."""
    i, prefix = config_index(launch.arguments)
    if (prefix.rstrip("=") or launch.arguments[i - 1]) != _FILE_OPTION:
        return False
    return any(_names_parser(tree) for tree in _own_sources(launch))


def _names_parser(tree: ast.AST) -> bool:
    return any(
        name in _PARSERS
        for node in ast.walk(tree)
        for name in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
    )


def _own_sources(launch: Launch) -> Iterator[ast.AST]:
    """The script, and all modules that it imports from its own folder (a module: from its own package)."""
    if launch.is_file:
        root, package, left = Path(launch.script).absolute().parent, "", [Path(launch.script).absolute()]
    else:
        package = launch.script.partition(".")[0]
        found = _folder_with(package)
        if found is None:
            return
        root, left = found, _files_of(found, f"{launch.script}.__main__")
    seen: set[Path] = set()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # the experiment shows what is wrong with it
        yield tree
        for name in _imported(tree, path, root):
            top = name.partition(".")[0]
            if top == package or not (package or top in _LIBRARIES):
                left += _files_of(root, name)


def _folder_with(package: str) -> Path | None:
    """The folder in which ``python -m`` finds the package; nothing is imported for it."""
    spec = PathFinder.find_spec(package, [os.getcwd(), *sys.path]) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).absolute()
    return path.parents[1] if path.name == "__init__.py" else path.parent


def _imported(tree: ast.AST, path: Path, root: Path) -> Iterator[str]:
    """Dotted names of what the file may import: a name of ``from a import b`` may be a module or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level and path.is_relative_to(root):
                parents = path.relative_to(root).parts[: -node.level]
                base = ".".join(filter(None, (*parents, base)))
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _files_of(root: Path, name: str) -> list[Path]:
    """The files below ``root`` that an import of the dotted name runs."""
    found, folder = [], root
    for part in name.split("."):
        found += [each for each in (folder / f"{part}.py", folder / part / "__init__.py") if each.is_file()]
        folder = folder / part
    return found
