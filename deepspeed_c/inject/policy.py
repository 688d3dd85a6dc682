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
    """A regular expression for the end of the module's dotted name, from a dot on."""
    style: Style
    """column, row: a linear layer (``Conv1D`` too). experts: the 3-d weights of ``gate_up_proj`` (or of two matrices)
    and ``down_proj``, along the experts' inner dimension. heads: parameters of an attention itself, with one element
    for each head. latent: stays whole; the last columns of its output are a key that all heads share. shared: stays
    whole, and is used on each rank's own heads. slice: a table [rows, heads] whose module needs no other change. skip:
    stays whole."""
    parts: tuple[PartName, ...] = ("columns",)
    """Contents of the cut dimension, in order. Parts that are not heads share the columns equally."""
    is_interleaved: bool | str = False
    """Whether the parts repeat for each key head, instead of lying one behind the other. If it is a string: True unless
    this entry of the model's configuration is true.
    """
    gathers: bool = False
    """column: the outputs of all ranks are gathered. row: the input is whole."""
    params: tuple[str, ...] = ()
    """heads: names of the cut parameters, in the module itself."""
    sizes: tuple[int, ...] | None = None
    """Sizes of the parts, if they do not follow from the numbers of heads."""


@dataclass(frozen=True)
class Heads:
    """Attributes in which the attention of a family stores its counts. The counts are set to the rank's own."""

    pattern: str
    """The end of the attention's dotted name."""
    owner: str = ""
    """Name of the child module with these attributes; "" for the attention itself."""
    queries: tuple[str, ...] = ("num_heads", "num_attention_heads", "n_heads")
    keys: tuple[str, ...] = ("num_key_value_heads", "num_kv_heads")
    groups: tuple[str, ...] = ("num_key_value_groups",)
    """Attributes for the number of query heads of one key head."""
    widths: tuple[str, ...] = ()
    """Attributes for the number of columns of all query heads together."""
    has_own_config: bool = False
    """Whether the counts are read from ``config``. Each attention then gets a copy of ``config``."""
    per_head: tuple[str, ...] = ()
    """Names of keyword arguments [batch * heads, ...] such as ALiBi's biases. The rank gets the rows of its heads."""
    stripes: int = 1
    """Number of equal runs of heads. Each rank gets the same share of every run. ``parts`` of rules describe one
    stripe.
    """


@dataclass(frozen=True)
class Stream:
    """Layers that treat tokens one by one, except in regions. A region begins with column layers, which alone take
    ``hidden_states``, and ends with a row layer.
    """

    layers: str
    """The end of the dotted name of the layers' ``ModuleList``."""
    regions: tuple[str, ...]
    """Names below each layer: attention and MLP."""
    norm: str
    """Name of the norm after the last layer. The norm lies beside the list of layers."""


@dataclass(frozen=True)
class Policy:
    """A model family."""

    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    heads: tuple[Heads, ...] = field(default=())
    stream: Stream | None = None
    """Layers whose norms may see a rank's own tokens only, and which may run on halves of a batch in turn. None: no
    such layers.
    """
    loss: Literal["causal", ""] = ""
    """causal: the model's ``loss_function`` is transformers' causal loss, which is then computed on cut logits."""


POLICIES: dict[str, Policy] = {}
"""model_type of a transformers configuration -> its policy."""


def policy(*model_types: str) -> Callable[[type], Policy]:
    """Register the decorated class for these model types. Its attributes are the fields of ``Policy``."""

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
    """The policy of the model type ``name``; None if there is none."""
    from deepspeed_c.inject import policies  # noqa: F401  registers them

    return POLICIES.get(name)
