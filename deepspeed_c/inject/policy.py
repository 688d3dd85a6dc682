"""Policies: how the layers of a model family are cut, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["POLICIES", "Heads", "Policy", "Rule", "Stream", "find_policy", "policy"]

Style = Literal["column", "row", "experts", "heads", "latent", "shared", "slice", "skip"]
PartName = Literal["queries", "keys", "columns"]


@dataclass(frozen=True)
class Rule:
    """How one kind of module is cut."""

    pattern: str
    """A regular expression that the end of the module's dotted name matches, from a dot on."""
    style: Style
    """column, row: a linear layer (``Conv1D`` too). experts: the 3-d weights of ``gate_up_proj`` (or of two matrices)
    and ``down_proj``, along the experts' inner dimension. heads: parameters of an attention itself, one element a head.
    latent: whole, and its last columns are a key that all heads share. shared: whole, used on each rank's own heads.
    slice: a table [rows, heads] whose module needs no other change. skip: left whole."""
    parts: tuple[PartName, ...] = ("columns",)
    """Contents of the cut dimension, in order; columns share it equally."""
    is_interleaved: bool | str = False
    """Whether the parts repeat for each key head, instead of lying one behind the other. A string: true unless this
    entry of the model's configuration is."""
    gathers: bool = False
    """column: the output is put together on all ranks. row: the input is whole."""
    params: tuple[str, ...] = ()
    """heads: names of these parameters, in the module itself."""
    sizes: tuple[int, ...] | None = None
    """Sizes of the parts, if they do not follow from the heads."""


@dataclass(frozen=True)
class Heads:
    """Attributes of a family's attention that hold its counts; the counts become the rank's own."""

    pattern: str
    """The end of the attention's dotted name."""
    owner: str = ""
    """The module below it that has the attributes."""
    queries: tuple[str, ...] = ("num_heads", "num_attention_heads", "n_heads")
    keys: tuple[str, ...] = ("num_key_value_heads", "num_kv_heads")
    groups: tuple[str, ...] = ("num_key_value_groups",)
    """Query heads of one key head."""
    widths: tuple[str, ...] = ()
    """Columns of all query heads together."""
    has_own_config: bool = False
    """Whether the counts are read from ``config``; each attention then gets a copy of it."""
    per_head: tuple[str, ...] = ()
    """Keyword arguments [batch * heads, ...]; the rank gets the rows of its heads. ALiBi's biases are an example."""
    stripes: int = 1
    """Equal runs of heads; each rank gets the same share of every run; ``parts`` of rules are written stripe by
    stripe."""


@dataclass(frozen=True)
class Stream:
    """Layers that treat tokens one by one, except in regions that take ``hidden_states`` to column layers alone and end
    with a row layer."""

    layers: str
    """The end of the dotted name of their ``ModuleList``."""
    regions: tuple[str, ...]
    """Names below each layer: attention and network."""
    norm: str
    """Name of the norm after the last layer, beside the list."""


@dataclass(frozen=True)
class Policy:
    """A model family."""

    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    heads: tuple[Heads, ...] = field(default=())
    stream: Stream | None = None
    """Layers whose norms may see a rank's own tokens, and which may run on halves of a batch in turn; None: nowhere."""
    loss: Literal["causal", ""] = ""
    """causal: the model's ``loss_function`` is transformers' causal one, which is then computed on cut logits."""


POLICIES: dict[str, Policy] = {}
"""model_type of a transformers configuration -> its policy."""


def policy(*model_types: str) -> Callable[[type], Policy]:
    """Register the class below it, whose attributes are the fields of ``Policy``, for these model types."""

    def register(data: type) -> Policy:
        values = {name: value for name, value in vars(data).items() if not name.startswith("_")}
        made = Policy(model_types=model_types, **values)
        for model_type in model_types:
            if model_type in POLICIES:
                raise ValueError(f"two policies for {model_type!r}")
            POLICIES[model_type] = made
        return made

    return register


def find_policy(name: str) -> Policy | None:
    """The policy of a model type, or None."""
    from deepspeed_c.inject import policies  # noqa: F401  registers them

    return POLICIES.get(name)
