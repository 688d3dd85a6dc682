"""Compare docs/compatibility.tsv, the public names of DeepSpeed and MII, with this package, and write docs/compatibility.md from it.

python -m scripts.compatibility FILE     writes the document
python -m scripts.compatibility          lists false rows, and reports an outdated document (exit code 1)

A row of the table describes a name of DeepSpeed 0.19.6 or MII 0.3.3. It has the place of the name (a module, ``module:Class``, or a
heading of ``_ELSEWHERE``), its kind, its parameters without annotations, and its state in this package. State "same":
the name exists and takes the same parameters. "different": the name exists, and the reason gives the difference.
"raises when called": the name can be imported, and its error or the reason names an alternative. "absent": access
raises, and the reason says why the name will not be added. "not yet": access raises an error that names an alternative.
The last column has the DeepSpeed version that removed the name. This script needs neither.
"""

from __future__ import annotations

import ast
import csv
import importlib
import inspect
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed_c
from deepspeed_c.compat.alias.unbuilt import ELSEWHERE, Unbuilt, instead_of
from deepspeed_c.engine.getters import ABSENT_METHODS
from deepspeed_c.env import VARIABLES as ENV_VARIABLES
from deepspeed_c.errors import FeatureError, LaunchError, MissingModuleError, MissingNameError

__all__ = ["Row", "check", "look_up", "main", "misfits", "read_rows", "render"]

TABLE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.tsv"
DOCUMENT = TABLE.with_suffix(".md")
UNBUILT = "raises when called"
STATES = ("same", "different", UNBUILT, "absent", "not yet")
MISSING = ("absent", "not yet")  # access to such a name raises

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PARAMETER, COMMAND, PROGRAMS, VARIABLES = "stage-3 parameter", "command deepspeed", "other commands", "environment"
# Places that are no module. The tests of this script check the names there as far as possible.
_ELSEWHERE = {
    PARAMETER: "Attributes of parameters that are sharded",
    COMMAND: "The command `deepspeed`, here `deepspeed_c`",
    PROGRAMS: "Other commands",
    VARIABLES: "Environment variables",
}


class Row(NamedTuple):
    where: str
    name: str
    kind: str
    parameters: str
    """The parameters as in a definition, "(a, b=1)", the value of a constant, or empty for other kinds."""
    state: str
    why: str
    removed: str = ""
    """The first version of DeepSpeed without the name; empty if all versions have it."""


def read_rows(file: Path = TABLE) -> list[Row]:
    with open(file, encoding="utf-8", newline="") as lines:
        return [Row(**line) for line in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]


# -- parameters ---------------------------------------------------------------------------------------------------------

_KIND = inspect.Parameter
_POSITIONAL = (_KIND.POSITIONAL_ONLY, _KIND.POSITIONAL_OR_KEYWORD)


def _signature(text: str) -> inspect.Signature:
    """Return the signature in a row's text, with its defaults as text."""
    arguments = ast.parse(f"def f{text}: ...").body[0].args

    def parameter(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
        return _KIND(argument.arg, kind, default=_KIND.empty if default is None else ast.unparse(default))

    first_default = len(arguments.args) - len(arguments.defaults)
    parameters = [
        parameter(
            each, _KIND.POSITIONAL_OR_KEYWORD, arguments.defaults[i - first_default] if i >= first_default else None
        )
        for i, each in enumerate(arguments.args)
    ]
    if arguments.vararg:
        parameters.append(parameter(arguments.vararg, _KIND.VAR_POSITIONAL))
    parameters += [
        parameter(each, _KIND.KEYWORD_ONLY, default)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults)
    ]
    if arguments.kwarg:
        parameters.append(parameter(arguments.kwarg, _KIND.VAR_KEYWORD))
    return inspect.Signature(parameters)


def misfits(theirs: str, ours: inspect.Signature) -> list[str]:
    """Return the differences that break calls: calls that only DeepSpeed's parameters allow, and other defaults."""
    own = list(ours.parameters.values())
    names = {each.name: (i, each) for i, each in enumerate(own)}
    kinds = {each.kind for each in own}
    found, known = [], set()
    for i, each in enumerate(_signature(theirs).parameters.values()):
        known.add(each.name)
        if each.kind in (_KIND.VAR_POSITIONAL, _KIND.VAR_KEYWORD):
            if each.kind not in kinds:
                found.append(f"takes no further {'keyword ' if each.kind is _KIND.VAR_KEYWORD else ''}arguments")
            continue
        position, match = names.get(each.name, (None, None))
        if match is None:
            if _KIND.VAR_KEYWORD not in kinds:
                found.append(f"has no {each.name}")
            continue
        if each.kind in _POSITIONAL and (match.kind not in _POSITIONAL or position != i):
            found.append(f"has {each.name} at another place")
        if each.default is not _KIND.empty:
            found += _other_default(each, match)
    required = [
        each.name
        for each in own
        if each.name not in known
        and each.default is _KIND.empty
        and each.kind not in (_KIND.VAR_POSITIONAL, _KIND.VAR_KEYWORD)
    ]
    return found + [f"needs {name}" for name in required]


def _other_default(theirs: inspect.Parameter, ours: inspect.Parameter) -> list[str]:
    if ours.default is _KIND.empty:
        return [f"needs {ours.name}"]
    try:
        want = ast.literal_eval(theirs.default)
    except ValueError:
        return []  # the default is an object of DeepSpeed
    # Our default may be an immutable object instead of an empty container.
    if want == ours.default or (want in ([], {}) and not ours.default):
        return []
    return [f"has {ours.name}={ours.default!r} instead of {want!r}"]


# -- names of this package ---------------------------------------------------------------------------------------------


def look_up(row: Row) -> Any:
    """Return the object that ``row`` names, by an import and then by attributes. ``deepspeed`` has to mean this
    package.

    Raises MissingNameError, MissingModuleError or AttributeError if the object does not exist.
    """
    module, _, cls = row.where.partition(":")
    holder = importlib.import_module(module)
    for part in [*cls.split("."), row.name] if cls else [row.name]:
        holder = getattr(holder, part)
    return holder


def _problem(row: Row) -> str | None:
    """Return the reason why the row is false, or None if it is true."""
    if row.state not in STATES or (row.state == "same" and row.why):
        return f"is of state {row.state!r} with the reason {row.why!r}"
    if row.where == COMMAND:
        return _problem_of_flag(row)
    if row.where == VARIABLES:
        read = {variable.name for variable in ENV_VARIABLES.values()}
        return None if (row.state == "same") == (row.name in read) else f"is read: {row.name in read}"
    if row.where in _ELSEWHERE:
        return None
    if row.where == ENGINE and row.kind == "attribute":
        return None  # an attribute of engines, which the class lacks
    try:
        ours = look_up(row)
    except (MissingNameError, MissingModuleError) as error:
        is_told = row.why or error.fix not in ("", ELSEWHERE)
        return None if row.state in MISSING and is_told else f"raises {error}"
    except AttributeError as error:
        # Only modules and engines have an error message for their missing names.
        is_told = row.name in ABSENT_METHODS if row.where == ENGINE else row.state == "absent" and row.why
        return None if is_told and row.state in MISSING else f"raises {error!r}"
    if isinstance(ours, Unbuilt):
        is_told = row.why or instead_of(f"{ours.__module__}.{ours.__name__}") != ELSEWHERE
        return None if row.state == UNBUILT and is_told else f"is not built: {ours!r}"
    if row.state in (*MISSING, UNBUILT):
        return f"is there: {ours!r}"
    if row.state == "different":
        return None if row.why else f"is there, for no reason: {ours!r}"
    if row.kind == "constant":
        want = ast.literal_eval(row.parameters)
        return None if ours == want else f"is {ours!r} instead of {want!r}"
    if row.kind in ("function", "method", "class"):
        if not callable(ours):
            return f"is {ours!r}, which cannot be called"
        found = misfits(row.parameters, inspect.signature(ours)) if row.parameters else []
        return "; ".join(found) or None
    return None


def _problem_of_flag(row: Row) -> str | None:
    from deepspeed_c.launcher.options import parse_options

    value = ast.literal_eval(row.parameters) if row.parameters else []
    try:
        parse_options([row.name, *value, "train.py"])
    except LaunchError as error:
        return None if row.state == "not yet" and error.fix else f"raises {error}"
    return None if row.state != "not yet" else "is accepted"


def check(rows: list[Row]) -> list[str]:
    """Return the errors of the table, one text a row. ``deepspeed`` has to mean this package."""
    found = [f"{row.where}.{row.name} {problem}" for row in rows if (problem := _problem(row)) is not None]
    keys = [(row.where, row.name) for row in rows]
    return found + [
        f"{where}.{name} has two rows" for where, name in sorted({key for key in keys if keys.count(key) > 1})
    ]


# -- the document -------------------------------------------------------------------------------------------------------

_HEAD = """\
# Compatibility with DeepSpeed

<!-- Written by `python -m scripts.compatibility docs/compatibility.md` from docs/compatibility.tsv. Do not edit. -->

The public names of DeepSpeed 0.19.6 and of MII 0.3.3 (`mii`), and their state here. A program reaches them under DeepSpeed's own paths
when it is started by `deepspeed_c run`, or calls `deepspeed_c.install_as_deepspeed()`
([how](migrating-from-deepspeed.md)); the same modules are there as `deepspeed_c...`, and those of MII as `deepspeed_c.mii...`.
[compatibility.tsv](compatibility.tsv) has every name with its parameters, for programs; a test compares each row with the code. Configuration keys:
[config.md](config.md).

- **same**: the name is there, takes the same parameters by the same names at the same places with the same defaults,
  and does the same. Where DeepSpeed returns a section of its configuration, a frozen section of ours is returned.
- **different**: the name is there, and the text beside it gives the difference.
- **raises when called**: the name imports, and can stand in annotations, in `isinstance` (which is `False`) and in
  comparisons; a call or a subclass raises a `FeatureError` with the text beside it. A class stands for its methods.
  Each name of DeepSpeed's or MII's that does not stand in this table is of this kind as well, unless it is built: imports
  never fail.
- **absent**: the attribute is not there and is not to come, as nothing is left for it to do here; the text beside it
  says why, or names a replacement.
- **not yet**: the attribute or option comes with a later version. Asking for it, or for an absent name, raises a
  `FeatureError` (an `AttributeError` too, as Python expects) with the text beside it.

A line "Removed upstream" lists the names of a place that a later DeepSpeed has no more. They stay here.
"""


def _reason(row: Row) -> str:
    """Return the row's reason; for a missing name, its error's advice."""
    if row.why or row.where in _ELSEWHERE:
        return row.why
    if row.where == ENGINE:
        return ABSENT_METHODS[row.name]
    try:
        ours = look_up(row)
    except FeatureError as error:
        return error.fix
    if isinstance(ours, Unbuilt):
        return instead_of(f"{ours.__module__}.{ours.__name__}")
    raise LookupError(f"{row.where}.{row.name} is there: run python -m scripts.compatibility")


def render(rows: list[Row]) -> str:
    """Return the text of docs/compatibility.md."""
    return "\n".join(
        [_HEAD, *_counts(rows), *(line for where, part in _by_place(rows) for line in _section(where, part))]
    )


def _by_place(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for where, part in groupby(rows, key=lambda row: row.where):
        yield where, list(part)


def _counts(rows: list[Row]) -> Iterator[str]:
    yield f"| where | {' | '.join(STATES)} |"
    yield f"| --- |{' --: |' * len(STATES)}"
    for where, part in _by_place(rows):
        yield f"| {_title(where)} | " + " | ".join(str(sum(row.state == s for row in part)) for s in STATES) + " |"
    yield "| all | " + " | ".join(str(sum(row.state == s for row in rows)) for s in STATES) + " |"
    yield ""


def _title(where: str) -> str:
    return _ELSEWHERE.get(where) or f"`{where.replace(':', '.')}`"


def _section(where: str, rows: list[Row]) -> Iterator[str]:
    yield f"## {_title(where)}\n"
    same = [f"`{row.name}`" for row in rows if row.state == "same"]
    if same:
        yield f"Same: {', '.join(same)}.\n"
    for version in sorted({row.removed for row in rows if row.removed}):
        removed = [f"`{row.name}`" for row in rows if row.removed == version]
        yield f"Removed upstream in {version}: {', '.join(removed)}.\n"
    rest = [row for row in rows if row.state != "same"]
    if rest:
        yield "| name | state | why, or what to use |"
        yield "| --- | --- | --- |"
        for row in rest:
            text = _reason(row).replace("|", "\\|")
            yield f"| `{row.name}` | {row.state} | {text} |"
        yield ""


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        print("usage: python -m scripts.compatibility [FILE]", file=sys.stderr)
        return 2
    deepspeed_c.install_as_deepspeed(force=True)
    rows = read_rows()
    if argv:
        Path(argv[0]).write_text(render(rows), encoding="utf-8")
        return 0
    problems = check(rows)
    if not problems and DOCUMENT.read_text(encoding="utf-8") != render(rows):
        problems = [f"{DOCUMENT.name} is not made from this table: run make docs"]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
