"""Write docs/config.md and a page for each section below docs/config: ``python -m deepspeed_c.config.docs docs``."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .aliases import OLD_KEYS, REMOVED_UPSTREAM
from .coerce import describe, show
from .features import FEATURES
from .inference_docs import PAGE, render_inference
from .keys import DTYPE_NAMES, Section
from .optim import OPTIMIZERS, Kind
from .schedule import SCHEDULES
from .schema import Root, SectionField, fields_of, kinds_of

__all__ = ["main", "render"]

_WRITTEN = "<!-- Written by `python -m deepspeed_c.config.docs docs` from deepspeed_c/config. Do not edit. -->"
# Folder of the sections' pages, below docs.
_FOLDER = "config"

_HEAD = """\
# Configuration

{written}

The configuration is DeepSpeed's JSON (with the names, types and defaults of DeepSpeed 0.19.6), given as a dict, as
the path of a file, or as base64 text. A file that is not plain JSON is read as Hjson, by DeepSpeed's package `hjson`:
comments after `#` and `//` and in `/* */`, a comma before a closing bracket or none at the end of a line, keys and texts
without quotes, texts of several lines in `'''`. A key that stands twice is an error in both. `deepspeed_c config check
FILE` lists the errors of a file and `deepspeed_c config show FILE` every value with its origin; neither needs a GPU or
torch.

## Rules

- **Unknown keys are errors** at every depth, and the error names the nearest known key, at any depth; shortened names
  (`grad_accum_steps`) and names of other tools (`max_grad_norm`) are found too. A top-level key that is like no known
  key belongs to another program: a note says that it has no effect. To park a key without deleting it, put `x-` in
  front of its name: such keys are ignored, with everything below them, and reported as parked. So are comments: names
  that begin with `_`, `//` or `#`, and `comment`, `comment_1` and the like.
- **Notes** name keys and values that have no effect, or are read as something else: one line each on rank 0 at the
  start, and below the table of `config show`. `"strict": true` makes an error of every note but those on sections that
  are off.
- **Keys that change nothing in DeepSpeed by themselves** are noted, not refused: `offload_param` below stage 3.
- **Dotted keys** at the top level mean the place they spell: `"zero_optimization.stage": 2` is
  `"zero_optimization": {"stage": 2}`. They win over the nested form, and a note says so when the two differ.
- **Known keys whose feature does not exist yet** are errors when their value asks for the feature, and accepted at
  the value that turns it off. Numbers that only tune such a feature are accepted and have no effect; `config show`
  marks them *unused*. A section of such a feature is accepted with a note while it is off: with `"enabled": false`,
  empty, or with nothing but defaults in it. Sections that are `null` by default (`zenflow`, `checkpoint.writer`, ...)
  ask for their feature with any key in them, or, where they have such a switch, with `"enabled": true`.
- **`"auto"`** is a place for another program to fill, and a value that nobody fills is never guessed. The keys marked
  *the Trainer or accelerate fills `auto`* get their values when the configuration goes through `TrainingArguments` or
  `DeepSpeedPlugin`; if some are left, `initialize` raises an error that names all of them with the values to write. The
  keys marked *may be `auto`* are resolved here: a batch size follows from the others (if it does not, it counts as
  left), and the sizes of buckets from the model. If `"auto"` is among a key's values it is read as that value. Some
  sections drop `"auto"` in DeepSpeed (`zero_optimization`, `fp16`, `bf16`, the monitors and their like): there the
  default holds, and a note says so; anywhere else it is an error. `config check` and `config show` without
  `--world-size` read a configuration before it is filled, and note each remaining `"auto"`; with it, they read as
  `initialize` does.
- **Types.** An integer may be written as a whole float or a string (`5e8`, `"8"`); counts of elements that other
  tools compute as floats are rounded down. A number may be a string (`"1e-3"`); NaN is never accepted, infinity
  only for `steps_per_print`. A boolean may be 0, 1, `"true"` or `"false"`. Words are read in any case. Formats may
  be spelt {dtypes}.
- **`null`** for a section is as if it were not there; a single key must have `null` among its values.
- **Conflicts** between keys that are each right (fp16 and bf16 both enabled, ...) are errors too. All errors of a
  configuration are reported together.
- **Keys of DeepSpeed 0.19.8** that 0.19.6 lacks are known too. Keys that 0.19.8 no longer reads are read as before; the column
  *removed upstream in 0.19.8* marks them.
- The dict that is passed in is never changed, and neither is the configuration after it was read.

## Batch sizes

`train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks`. Any two of
the three give the third, which must be a whole number; either size alone means one accumulation step; three that do
not multiply, or no size at all, are an error with all the numbers in it.

## Status of a key

| status | meaning |
| --- | --- |
| acts | does what it says |
| inherent | accepted at any value, and changes nothing: the reason is given |
| later | belongs to a feature that does not exist yet: *asks* marks a key that is an error when it asks for it |
"""


def render() -> dict[str, str]:
    """Return the pages: path below docs -> text. ``config.md`` has the rules, the top-level keys, and links to the
    other pages."""
    spellings: dict[str, list[str]] = {}
    for spelling, short in DTYPE_NAMES.items():
        spellings.setdefault(short, []).append(f"`{spelling}`")
    dtypes = "; ".join(", ".join(names) for names in spellings.values())
    sections = [field for field in fields_of(Root).values() if field.section is not None]
    parts = [_HEAD.replace("{written}", _WRITTEN).replace("{dtypes}", dtypes), "## Top level\n", *_table(Root, "")]
    parts += ["## Sections\n", "| section | |", "| --- | --- |"]
    parts += [
        f"| [`{field.name}`]({_FOLDER}/{field.name}.md) | {_first_sentence(field.section)} |" for field in sections
    ]
    parts += ["", "## Inference\n", f"[The keys of `init_inference`]({PAGE}) are a configuration of their own.\n"]
    parts += [*_old_keys(), *_features()]
    pages = {"config.md": "\n".join(parts), PAGE: render_inference(_WRITTEN)}
    for field in sections:
        lines = [f"# `{field.name}`\n", _WRITTEN + "\n", "[All sections, and the rules](../config.md)\n"]
        if field.name in REMOVED_UPSTREAM:
            lines.append("Removed upstream in 0.19.8. It is read here as before.\n")
        lines += _section(field.section, _path(field, "") + ".", _path(field, ""), is_page=True)
        if field.name == "optimizer":
            others = "Any other class of torch.optim may be named; its parameters are passed on."
            lines += _kinds("optimizer.params", OPTIMIZERS, others)
        if field.name == "scheduler":
            lines += _kinds("scheduler.params", SCHEDULES, "")
        pages[f"{_FOLDER}/{field.name}.md"] = "\n".join(lines)
    return pages


def _paragraphs(cls: type[Section]) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in inspect.getdoc(cls).split("\n\n")]


def _first_sentence(cls: type[Section]) -> str:
    return _paragraphs(cls)[0].split(". ")[0].rstrip(".").replace("|", "\\|") + "."


def _path(field: SectionField, above: str) -> str:
    return above + field.name + {"": "", "dict": ".NAME", "list": "[]"}[field.container]


def _section(cls: type[Section], path: str, title: str, *, is_page: bool = False) -> Iterator[str]:
    if not is_page:
        yield f"## `{title}`\n"
    yield "\n\n".join(_paragraphs(cls)) + "\n"
    yield from _table(cls, path)
    for field in fields_of(cls).values():
        if field.section is not None:
            below = _path(field, path)
            yield from _section(field.section, below + ".", below)


def _table(cls: type[Section], path: str, *, is_later: bool = False) -> Iterator[str]:
    # A column that would be empty is left out.
    has_removed = any(path + name in REMOVED_UPSTREAM for name in fields_of(cls))
    yield "| key | value | default | status | meaning |" + " removed upstream in 0.19.8 |" * has_removed
    yield "| --- | --- | --- | --- | --- |" + " --- |" * has_removed
    for field in fields_of(cls).values():
        removed = f" {'removed' if path + field.name in REMOVED_UPSTREAM else ''} |" * has_removed
        words = describe(field.hint, field.info).replace("|", "\\|")
        yield f"| `{field.name}` | {words} | {_default(field)} | {'later' if is_later else _status(field)} | {_meaning(field, cls)} |{removed}"
    yield ""


def _default(field: SectionField) -> str:
    if field.default is msgspec.NODEFAULT:
        return "*required*"
    if field.section is not None and isinstance(field.default, Section):
        return "*see below*"
    return f"`{show(field.default, 200)}`"


def _status(field: SectionField) -> str:
    info = field.info
    if info.status != "later":
        return info.status
    return "later (asks)" if info.is_switch else "later"


def _meaning(field: SectionField, cls: type[Section]) -> str:
    info = field.info
    text = info.doc
    if info.inherent:
        text += f" No effect: {info.inherent}."
    text += {"fill": " The Trainer or accelerate fills `auto`.", "derive": " May be `auto`."}.get(info.auto, "")
    if info.is_partial and not info.is_built:
        text += f" Other values ask for {FEATURES[info.feature].title}, which comes later."
    elif info.status == "later" and not (field.section is not None and not field.container):
        text += f" ({FEATURES[info.feature].title})"
    if kinds_of(cls) is not None and field.name == "params":
        text += " See below for each type."
    return text.replace("|", "\\|")


def _kinds(path: str, kinds: dict[str, Kind], closing: str) -> Iterator[str]:
    yield f"## `{path}`\n"
    shown: dict[type[Section] | None, list[Kind]] = {}
    for kind in kinds.values():
        shown.setdefault(kind.params, []).append(kind)
    for params, group in shown.items():
        if params is not None:
            is_later = group[0].feature is not None and not FEATURES[group[0].feature].is_built
            yield f"### {', '.join(kind.name for kind in group)}{' (later)' if is_later else ''}\n"
            yield from _table(params, path + ".", is_later=is_later)
    for feature in dict.fromkeys(kind.feature for kind in shown.get(None, ())):
        names = ", ".join(kind.name for kind in shown[None] if kind.feature == feature)
        if feature is None:
            yield f"Passed on to torch as they are: {names}. {closing}\n"
        else:
            yield f"Later ({FEATURES[feature].title}): {names}.\n"


def _old_keys() -> Iterator[str]:
    yield "## Old and second names\n"
    yield "These are read, with a note, as the key on the right; giving both with different values is an error.\n"
    yield "| name | read as |"
    yield "| --- | --- |"
    yield '| `zero_optimization: true` | `zero_optimization: {"stage": 1}` |'
    for key in OLD_KEYS:
        new = "*dropped: nothing depends on it*" if key.new is None else f"`{key.new}`"
        yield f"| `{key.old}` | {new} |"
    yield ""


def _features() -> Iterator[str]:
    yield "## Features that come later\n"
    yield "| feature | until then |"
    yield "| --- | --- |"
    for feature in FEATURES.values():
        if not feature.is_built:
            yield f"| {feature.title} | {feature.instead} |"
    yield ""


def main(argv: list[str]) -> int:
    """Write the pages below the folder that the command line names, and delete pages of removed sections."""
    if len(argv) != 1:
        print("usage: python -m deepspeed_c.config.docs FOLDER", file=sys.stderr)
        return 2
    folder, pages = Path(argv[0]), render()
    (folder / _FOLDER).mkdir(parents=True, exist_ok=True)
    for old in (folder / _FOLDER).glob("*.md"):
        if f"{_FOLDER}/{old.name}" not in pages:
            old.unlink()
    for path, text in pages.items():
        (folder / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
