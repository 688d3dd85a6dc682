"""One configuration key: its meaning, its status, and how "auto" and unusual values are read.

The rule for "auto". In DeepSpeed's JSON it marks a place that somebody fills before the file is read: the Hugging Face
Trainer and accelerate fill some twenty keys. We never guess values for the rest:

- "fill": keys that they fill, with a say in the training itself (stage, formats, devices, learning rate, decay,
  schedule, clipping). An "auto" left in such a key is an error, which names all of them. A caller that reads a
  configuration before it is filled (``load_config(batch="skip")``) gets their defaults, and ``Config.unfilled`` names
  them.
- "derive": keys whose value we find ourselves: a batch size from the others, where they determine it; the sizes of
  buckets from the model; the persistence threshold, whose default is right for any model. The last two change speed and
  memory, never a result.
- "value": keys that take "auto" as a value like any other; their feature reads it.
- "": every other key; nobody fills it. In some sections DeepSpeed takes it for a key that is not there
  (zero_optimization, fp16, bf16, the monitors and the like: load.py lists them). There the default holds, and a note
  says so. Elsewhere "auto" is as wrong as any other word.
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
"""A floating-point format under its short name; DTYPE_NAMES lists the other spellings that are read."""

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
    """The base of all sections: an immutable struct that refuses keys it does not have."""


class FrozenDict(dict):
    """A dict that cannot be changed; ``dict(frozen)`` gives a copy that can."""

    def _refuse(self, *args: Any, **kwargs: Any):
        raise TypeError("the configuration is read-only; copy it with dict(...) and load the copy")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self):
        # The default protocol fills an empty dict item by item, which is refused here.
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
    """The entry of FEATURES that the key belongs to; None for a key that always exists."""
    is_switch: bool = False
    """Whether a value other than the default or a value in ``off`` asks for the feature."""
    off: tuple = ()
    """Values, besides the default, that do not ask for the feature."""
    is_partial: bool = False
    """Whether the values that do not ask for the feature act by themselves (ZeRO stages 0 to 2)."""
    inherent: str = ""
    """Why the key is accepted and changes nothing: the engine always behaves one way."""
    auto: Literal["", "fill", "derive", "value"] = ""
    """The meaning of "auto" for this key; the head of this file has the rule."""
    allow_inf: bool = False
    """Whether an infinite number is accepted. NaN never is."""
    floor: bool = False
    """Whether a fractional number is rounded down (counts of elements that other tools compute as floats)."""
    one_or_many: bool = False
    """Whether a single string stands for a list of one."""

    @property
    def is_built(self) -> bool:
        """Whether the key has its effect in this version."""
        return self.feature is None or FEATURES[self.feature].is_built

    @property
    def status(self) -> str:
        """Acts, is inherent in the engine, or comes later."""
        if self.inherent:
            return "inherent"
        return "acts" if self.is_built or self.is_partial else "later"


def acts(doc: str, **options: Any) -> msgspec.Meta:
    """A key whose effect is as documented."""
    return _meta(KeyInfo(doc=doc, **options))


def inherent(doc: str, why: str, **options: Any) -> msgspec.Meta:
    """A key that is accepted at any value because the engine always behaves so; ``why`` goes into the docs."""
    return _meta(KeyInfo(doc=doc, inherent=why, **options))


def asks(doc: str, feature: str, *, off: tuple = (), **options: Any) -> msgspec.Meta:
    """A key that asks for ``feature`` unless its value is the default or in ``off``: an error while that is missing."""
    return _meta(KeyInfo(doc=doc, feature=feature, is_switch=True, off=off, **options))


def tunes(doc: str, feature: str, **options: Any) -> msgspec.Meta:
    """A key that only tunes ``feature``: accepted, and without effect while the feature is not in use."""
    return _meta(KeyInfo(doc=doc, feature=feature, **options))


def _meta(info: KeyInfo) -> msgspec.Meta:
    if info.feature is not None and info.feature not in FEATURES:
        raise KeyError(f"{info.feature!r} is not in FEATURES ({info.doc})")
    return msgspec.Meta(description=info.doc, extra={"key": info})
