"""Contents of ``deepspeed.runtime.config_utils`` besides the model class: access to dictionaries, and the formatting of
numbers and objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import Self

from deepspeed_c.config.config_model import DeepSpeedConfigModel, get_config_default
from deepspeed_c.errors import ConfigError

__all__ = [
    "DeepSpeedConfigModel",
    "DeepSpeedConfigObject",
    "ScientificNotationEncoder",
    "dict_raise_error_on_duplicate_keys",
    "get_config_default",
    "get_dict_param",
    "get_list_param",
    "get_scalar_param",
    "pp_int",
]


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """The key's value, or the default if the key is missing."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary of the pairs, for ``json.load(object_pairs_hook=)``. Raises ConfigError: a key occurs twice."""
    pairs = list(ordered_pairs)
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        double = sorted({key for key in keys if keys.count(key) > 1})
        raise ConfigError(f"these keys stand twice: {', '.join(double)}", where="configuration", fix="keep one of each")
    return found


class pp_int(int):
    """An integer that prints with commas between thousands, or as ``custom_print_str``."""

    def __new__(cls, val: float, custom_print_str: str | None = None) -> Self:
        number = super().__new__(cls, val)
        number.custom_print_str = custom_print_str
        return number

    def __repr__(self) -> str:
        return self.custom_print_str or f"{int(self):,}"


class ScientificNotationEncoder(json.JSONEncoder):
    """JSON with numbers above 1000 in the form 1.5e+09."""

    def iterencode(self, o: Any, _one_shot: bool = False, level: int = 0) -> str:
        step = 4 if self.indent is None else self.indent
        if isinstance(o, bool):
            return "true" if o else "false"
        if isinstance(o, (int, float)):
            return f"{o:e}" if o > 1e3 else f"{o}"
        if isinstance(o, Mapping):
            inner, outer = " " * ((level + 1) * step), " " * (level * step)
            entries = (f'\n{inner}"{key}": {self.iterencode(value, level=level + 1)}' for key, value in o.items())
            return "{" + ", ".join(entries) + f"\n{outer}}}"
        if isinstance(o, Sequence) and not isinstance(o, str):
            return "[" + ", ".join(map(self.iterencode, o)) + "]"
        return "".join(super().iterencode(o, _one_shot))


class DeepSpeedConfigObject:
    """An object that prints its attributes as JSON."""

    def repr(self) -> dict[str, Any]:
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4, cls=ScientificNotationEncoder)
