"""The page of the keys of ``init_inference``: ``config/docs.py`` writes it below docs/config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from .coerce import describe, show
from .inference import DeepSpeedInferenceConfig, DeepSpeedMoEConfig, DeepSpeedTPConfig, InferenceSection
from .schema import bare, info_of

__all__ = ["PAGE", "render_inference"]

# A section -> what may stand in place of its object.
_SHORT_FORMS = {DeepSpeedMoEConfig: " or true or false", DeepSpeedTPConfig: " or an integer"}

PAGE = "config/init_inference.md"

_HEAD = """\
# `init_inference`

{written}

[Training has a configuration of its own](../config.md)

`init_inference(model, config=None, **keys)` reads DeepSpeed's keys from a dictionary, from the path of a JSON file or
from a `DeepSpeedInferenceConfig`, and from keywords. The names, old names and defaults are those of DeepSpeed 0.19.6;
`deepspeed_c.default_inference_config()` returns all of them.

- **A key that is given twice**, in the configuration and as a keyword or under two of its names, must have one value:
  `"half"` and `torch.float16` are the same. Two values are a `ConfigError`, which is a `ValueError` as in DeepSpeed. An
  old key at its default gives way to its new name.
- **`dtype`** is a dtype of torch, a member of `DtypeEnum`, or one of the names `fp16`, `float16`, `half`; `bf16`,
  `bfloat16`, `bfloat`; `fp32`, `float32`, `float`; `int8`; each also as `torch.float16` and the like.
- **Unknown keys** are errors that name the nearest key. Keys that begin with `x-`, and comments, are parked as in a
  training configuration, and `"auto"` means the default.
- **Notes** name, once at the start and from rank 0, keys that have no effect, old names and parked keys.
- **`zero`** has the keys of [`zero_optimization`](zero_optimization.md), with the same checks.
"""


def render_inference(written: str) -> str:
    """The text of the page. ``written``: the comment that says which command writes it."""
    lines = [_HEAD.replace("{written}", written), "## Top level\n", *_table(DeepSpeedInferenceConfig)]
    return "\n".join([*lines, *_sections(DeepSpeedInferenceConfig)])


def _sections(cls: type[InferenceSection]) -> Iterator[str]:
    for section in cls.sections().values():
        yield f"## `{section.place}`\n"
        yield " ".join(inspect.getdoc(section).split()).replace("``", "`") + "\n"
        yield from _table(section)
        yield from _sections(section)


def _table(cls: type[InferenceSection]) -> Iterator[str]:
    yield "| key | other names | value | default | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for name, field in cls.model_fields.items():
        info = info_of(field.annotation)
        meaning = info.doc + (f" No effect: {info.inherent}." if info.inherent else "")
        words = describe(field.annotation, info) + _SHORT_FORMS.get(bare(field.annotation), "")
        default = "*see below*" if name in cls.sections() else f"`{show(field.get_default())}`"
        yield f"| `{name}` | {f'`{field.alias}`' if field.alias else ''} | {words} | {default} | {meaning} |"
    yield ""
