"""The page of the keys of ``init_inference``: ``config/docs.py`` writes it below docs/config."""

from __future__ import annotations

import ast
import enum
import inspect
import types
import typing
from collections.abc import Iterator

from . import inference
from .coerce import show
from .config_model import Field
from .convert import kind_of
from .inference import DeepSpeedInferenceConfig, DeepSpeedMoEConfig, InferenceSection

__all__ = ["PAGE", "render_inference"]

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
    docs = _docs()
    lines = [_HEAD.replace("{written}", written), "## Top level\n", *_table(DeepSpeedInferenceConfig, docs)]
    lines += _sections(DeepSpeedInferenceConfig, docs)
    return "\n".join(lines)


def _sections(cls: type[InferenceSection], docs: dict[str, dict[str, str]]) -> Iterator[str]:
    for section in cls.sections().values():
        yield f"## `{section.place}`\n"
        yield _as_markdown(inspect.getdoc(section)) + "\n"
        yield from _table(section, docs)
        yield from _sections(section, docs)


def _table(cls: type[InferenceSection], docs: dict[str, dict[str, str]]) -> Iterator[str]:
    yield "| key | other names | value | default | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    told = {name: text for base in reversed(cls.__mro__) for name, text in docs.get(base.__name__, {}).items()}
    for name, field in cls.model_fields.items():
        path = f"{cls.place}.{name}" if cls.place else name
        meaning = told[name]
        if new := field.json_schema_extra.get("new_param"):
            meaning = f"Old name of `{new}`."
        if why := inference.WITHOUT_EFFECT.get(path):
            meaning += f" No effect: {why}."
        if name == "ep_size":
            meaning += " Above 1: a `FeatureError`, experts over ranks come later."
        cells = (f"`{name}`", f"`{field.alias}`" if field.alias else "", _value(cls, name, field), _default(cls, name))
        yield f"| {' | '.join(cells)} | {meaning} |"
    yield ""


def _value(cls: type[InferenceSection], name: str, field: Field) -> str:
    if name == "dtype":
        return "a dtype"
    words = " or ".join(_words(arm) for arm in _arms(field.annotation))
    if field.annotation is DeepSpeedMoEConfig:
        words += ", true or false"
    elif name == "tensor_parallel":
        words += " or an integer"
    return words + (f" >= {field.bounds['ge']}" if field.bounds["ge"] is not None else "")


def _arms(kind: typing.Any) -> tuple[typing.Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _words(kind: typing.Any) -> str:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(f'"{member.value}"' for member in kind)
    if isinstance(kind, type) and issubclass(kind, InferenceSection) or typing.get_origin(kind) is dict:
        return "an object {...}"
    if typing.get_origin(kind) is list:
        return f"a list, each {_words(typing.get_args(kind)[0])}"
    known = {bool: "true or false", int: "an integer", str: "a string", tuple: "a list", type(None): "null"}
    return known.get(kind, "an object of Python" if kind is object else kind_of(kind))


def _default(cls: type[InferenceSection], name: str) -> str:
    return "*see below*" if name in cls.sections() else f"`{show(cls.model_fields[name].get_default())}`"


def _docs() -> dict[str, dict[str, str]]:
    """The docstring under each key by class and name. Python itself does not keep these texts."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(inference)).body:
        if isinstance(node, ast.ClassDef):
            texts = found.setdefault(node.name, {})
            for key, text in zip(node.body, node.body[1:]):
                if (
                    isinstance(key, ast.AnnAssign)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                ):
                    texts[key.target.id] = _as_markdown(str(text.value.value))
    return found


def _as_markdown(docstring: str) -> str:
    return " ".join(docstring.split()).replace("``", "`")
