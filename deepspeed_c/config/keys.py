"""One configuration key: its meaning, its status, and how "auto" and unusual values are read.

The rule for "auto". In DeepSpeed's JSON, "auto" marks a value that another program fills in before DeepSpeed reads the
file: the Hugging Face Trainer and accelerate fill some twenty keys. We never guess values for the rest:

- "fill": keys that these programs fill and that influence the training itself (stage, formats, devices, learning rate,
  decay, schedule, clipping). An "auto" left in such keys is an error, which names all of them. A caller may read a
  configuration before it is filled (``load_config(batch="skip")``). The caller then gets the defaults of these keys,
  and ``Config.unfilled`` names the keys.
- "derive": keys whose value this package computes: a batch size from the other sizes, where these determine it; the
  bucket sizes from the model; the persistence threshold, whose default suits any model. Bucket sizes and threshold
  change speed and memory, never a result.
- "value": keys for which "auto" is an ordinary value; the feature interprets it.
- "": every other key; no program fills it. In some sections DeepSpeed ignores a key with the value "auto"
  (zero_optimization, fp16, bf16, the monitors and others: load.py lists them). In these sections the default holds, and
  a note says so. In all other sections "auto" is an error.
"""

import sys
from typing import Annotated, Any, Literal

import msgspec

from .features import FEATURES

__all__ = [
    "DTYPE_NAMES",
    "DType",
    "Fraction",
    "FrozenDict",
    "Infinity",
    "KeyInfo",
    "NonNeg",
    "NonNegFloat",
    "Positive",
    "PositiveFloat",
    "Section",
    "acts",
    "asks",
    "inherent",
    "tunes",
]

Positive = Annotated[int, msgspec.Meta(gt=0)]
NonNeg = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegFloat = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Infinity = Annotated[float, msgspec.Meta(gt=sys.float_info.max)]

DType = Literal["fp32", "fp16", "bf16"]
"""A floating-point format under its short name; DTYPE_NAMES lists the other accepted spellings."""

DTYPE_NAMES: dict[str, str] = {
    spelling: short
    for short, spellings in {
        "fp32": ("fp32", "float32", "float", "torch.float32", "torch.float"),
        "fp16": ("fp16", "float16", "half", "torch.float16", "torch.half"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    }.items()
    for spelling in spellings
}


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all sections: an immutable struct that refuses unknown keys."""


class FrozenDict(dict):
    """An immutable dict; ``dict(frozen)`` gives a copy that can be changed."""

    def _refuse(self, *args: Any, **kwargs: Any):
        raise TypeError("the configuration is read-only; copy it with dict(...) and load the copy")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self):
        # The default protocol of pickle fills an empty dict item by item, and this class refuses assignments.
        return FrozenDict, (dict(self),)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a key besides its type and default."""

    doc: str
    """The meaning, with the unit."""
    feature: str | None = None
    """The entry of FEATURES that the key belongs to; None for a key that belongs to no feature."""
    is_switch: bool = False
    """Whether the key requests the feature by any value except the default and the values in ``off``."""
    off: tuple = ()
    """Values, besides the default, that do not request the feature."""
    is_partial: bool = False
    """Whether values that do not request the feature have effects of their own (ZeRO stages 0 to 2)."""
    inherent: str = ""
    """Why the key is accepted and changes nothing: the engine always behaves one way."""
    auto: Literal["", "fill", "derive", "value"] = ""
    """The meaning of "auto" for this key; the docstring of this module has the rule."""
    allow_inf: bool = False
    """Whether an infinite number is accepted. NaN never is."""
    floor: bool = False
    """Whether a fractional number is rounded down (counts of elements that other tools compute as floats)."""
    is_lax: bool = False
    """Whether a boolean may also be a word such as "yes" or "off" or the number 1.0, and an integer a boolean."""
    one_or_many: bool = False
    """Whether a single string stands for a list of one."""

    @property
    def is_built(self) -> bool:
        """Whether the key has its effect in this version."""
        return self.feature is None or FEATURES[self.feature].is_built

    @property
    def status(self) -> str:
        """One of: acts, is inherent in the engine, comes later."""
        if self.inherent:
            return "inherent"
        return "acts" if self.is_built or self.is_partial else "later"


def acts(doc: str, **options: Any) -> msgspec.Meta:
    """A key whose effect is as documented."""
    return _meta(KeyInfo(doc=doc, **options))


def inherent(doc: str, why: str, **options: Any) -> msgspec.Meta:
    """A key that has no effect because the engine always behaves in one way. Any value is accepted; ``why`` goes into
    the docs."""
    return _meta(KeyInfo(doc=doc, inherent=why, **options))


def asks(doc: str, feature: str, *, off: tuple = (), **options: Any) -> msgspec.Meta:
    """A key that requests ``feature`` by any value except the default and the values in ``off``. The request is an
    error while the feature is missing."""
    return _meta(KeyInfo(doc=doc, feature=feature, is_switch=True, off=off, **options))


def tunes(doc: str, feature: str, **options: Any) -> msgspec.Meta:
    """A key that only tunes ``feature``. The key is accepted, and has no effect while the feature is not in use."""
    return _meta(KeyInfo(doc=doc, feature=feature, **options))


def _meta(info: KeyInfo) -> msgspec.Meta:
    if info.feature is not None and info.feature not in FEATURES:
        raise KeyError(f"{info.feature!r} is not in FEATURES ({info.doc})")
    return msgspec.Meta(description=info.doc, extra={"key": info})
