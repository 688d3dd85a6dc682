"""The rules of ``tensor_parallel.partition_config`` as DeepSpeed's objects, with ready rules for model families.

``config={"tensor_parallel": {"autotp_size": 4, "partition_config": AutoTPPresets.llama().as_dict()}}``;
``tp_model_init`` also takes the objects themselves.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_c.errors import ConfigError

__all__ = ["AutoTPConfig", "AutoTPPresets", "PartitionType", "TPLayerSpec", "merge_autotp_configs"]

_WHERE = "TPLayerSpec"


class PartitionType(enum.Enum):
    """How a linear layer's weight [out, in] is cut."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """One rule: the parameters that it is for, and how they are cut (``layer_specs`` in the configuration).

    shape: the shape of a weight that consists of parts, with one entry for each dimension: a number of equal parts, a
    tuple of the parts' sizes, or -1. Without ``shape``, heads stay whole if the family's policy knows the layer. Raises
    ConfigError for a shape with parts in a dimension that is not cut, or with sizes below 1.
    """

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: tuple[int | tuple[int, ...], ...] | None = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.partition_type, PartitionType):
            names = [kind.value for kind in PartitionType]
            if str(self.partition_type).lower() not in names:
                raise ConfigError(
                    f"partition_type is {self.partition_type!r}", where=_WHERE, fix=f"write one of {', '.join(names)}"
                )
            self.partition_type = PartitionType(str(self.partition_type).lower())
        if self.shape is not None:
            self.shape = tuple(tuple(entry) if isinstance(entry, (list, tuple)) else entry for entry in self.shape)
            self._check_shape(self.shape)

    def _check_shape(self, shape: tuple[Any, ...]) -> None:
        dim = self.get_partition_dim()
        if not 0 <= dim < len(shape):
            raise ConfigError(
                f"partition_dim is {dim}, shape has {len(shape)} entries",
                where=_WHERE,
                fix="write one entry a dimension of the weight",
            )
        for number, entry in enumerate(shape):
            if isinstance(entry, tuple):
                if number != dim:
                    raise ConfigError(
                        f"shape has parts in dimension {number}, and dimension {dim} is cut",
                        where=_WHERE,
                        fix="list parts in the dimension that is cut",
                    )
                is_right = bool(entry) and all(isinstance(size, int) and size > 0 for size in entry)
            else:
                is_right = isinstance(entry, int) and (entry > 0 or entry == -1)
            if not is_right:
                raise ConfigError(
                    f"entry {number} of shape is {entry!r}",
                    where=_WHERE,
                    fix="write a number of parts, a list of sizes above 0, or -1",
                )

    def get_partition_dim(self) -> int:
        """The dimension that is cut. By default it follows from ``partition_type``, for a weight [out, in]."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 0 if self.partition_type is PartitionType.COLUMN else 1

    def has_unequal_sub_params(self) -> bool:
        """Whether ``shape`` lists the sizes of the parts."""
        return self.get_sub_param_sizes() is not None

    def get_sub_param_sizes(self) -> tuple[int, ...] | None:
        """The sizes of the parts if ``shape`` lists them, otherwise None."""
        entry = None if self.shape is None else self.shape[self.get_partition_dim()]
        return entry if isinstance(entry, tuple) else None

    def get_num_sub_params(self) -> int | None:
        """The number of parts if ``shape`` gives it, otherwise None."""
        entry = None if self.shape is None else self.shape[self.get_partition_dim()]
        if isinstance(entry, tuple):
            return len(entry)
        return entry if entry is not None and entry > 0 else None

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Whether the rule is for ``param_name`` in a model of ``model_type``. A pattern has to match the whole name."""
        if self.model_types and (model_type or "").lower() not in [name.lower() for name in self.model_types]:
            return False
        return any(re.fullmatch(pattern, param_name) for pattern in self.patterns)

    def as_dict(self) -> dict[str, Any]:
        """An entry of ``layer_specs`` in the configuration."""
        values = {
            item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "partition_type"
        }
        values["partition_type"] = self.partition_type.value
        if self.shape is not None:
            values["shape"] = [list(entry) if isinstance(entry, tuple) else entry for entry in self.shape]
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class AutoTPConfig:
    """Rules for a model (``PartitionConfig`` in the configuration); the first that matches wins."""

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> TPLayerSpec | None:
        """The rule for a parameter, or None."""
        return next((spec for spec in self.layer_specs if spec.matches(param_name, model_type)), None)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """Make the rules from the section ``partition_config``. Raises ConfigError for a key that the section does not
        have.
        """
        values = dict(config_dict)
        specs = [
            spec if isinstance(spec, TPLayerSpec) else TPLayerSpec(**{"patterns": [], **_known(TPLayerSpec, spec)})
            for spec in values.pop("layer_specs", ())
        ]
        return cls(layer_specs=specs, **_known(cls, values))

    def as_dict(self) -> dict[str, Any]:
        """The section ``partition_config`` of a configuration."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {**values, "layer_specs": [spec.as_dict() for spec in self.layer_specs]}


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = [item.name for item in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            raise ConfigError(f"{name!r} is no key of it", where=kind.__name__, fix=f"there are {', '.join(names)}")
    return dict(values)


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """Merge two configurations. Rules of ``override`` come first. Its ``tp_size`` and ``lm_head_patterns`` are taken if
    they are set, and its other settings in any case.
    """
    return AutoTPConfig(
        tp_size=override.tp_size if override.tp_size > 1 else base.tp_size,
        layer_specs=[*override.layer_specs, *base.layer_specs],
        embedding_partition_dim=override.embedding_partition_dim,
        lm_head_patterns=override.lm_head_patterns or base.lm_head_patterns,
        use_default_specs=override.use_default_specs,
        strict_mode=override.strict_mode,
    )


def _rules(columns: Sequence[str], rows: Sequence[str], skips: Sequence[str] = ()) -> AutoTPConfig:
    """Rules for modules whose names have these ends."""

    def specs(names: Sequence[str], kind: PartitionType) -> list[TPLayerSpec]:
        return [TPLayerSpec([rf".*\.{name}\.weight"], kind) for name in names]

    made = [*specs(skips, PartitionType.SKIP), *specs(rows, PartitionType.ROW), *specs(columns, PartitionType.COLUMN)]
    return AutoTPConfig(layer_specs=made)


class AutoTPPresets:
    """Rules of model families. The places of heads and of fused parts come from the family's policy, for any number of
    heads.
    """

    @staticmethod
    def llama() -> AutoTPConfig:
        """Separate projections and a gated network."""
        return _rules((r"self_attn\.[qkv]_proj", r"mlp\.(up|gate)_proj"), (r"self_attn\.o_proj", r"mlp\.down_proj"))

    @staticmethod
    def llama_gqa(num_heads: int, num_kv_heads: int, head_dim: int) -> AutoTPConfig:
        """Query, key and value one behind the other in one matrix ``qkv_proj``, with these numbers of heads."""
        made = _rules((r"mlp\.(up|gate)_proj",), (r"self_attn\.o_proj", r"mlp\.down_proj"))
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        qkv = TPLayerSpec([r".*\.self_attn\.qkv_proj\.weight"], PartitionType.COLUMN, shape=(sizes, -1))
        made.layer_specs.append(qkv)
        return made

    @staticmethod
    def bloom() -> AutoTPConfig:
        """A fused projection in which query, key and value of each head lie together."""
        return _rules(
            (r"self_attention\.query_key_value", r"mlp\.dense_h_to_4h"),
            (r"self_attention\.dense", r"mlp\.dense_4h_to_h"),
        )

    @staticmethod
    def chatglm() -> AutoTPConfig:
        """Query, key and value as thirds of one matrix, gate and up as halves of another."""
        made = _rules((), (r"self_attention\.dense", r"mlp\.dense_4h_to_h"))
        for name, n_parts in ((r"self_attention\.query_key_value", 3), (r"mlp\.dense_h_to_4h", 2)):
            made.layer_specs.append(TPLayerSpec([rf".*\.{name}\.weight"], PartitionType.COLUMN, shape=(n_parts, -1)))
        return made

    @staticmethod
    def mixtral() -> AutoTPConfig:
        """Llama's attention. The router is whole, and experts are cut by the family's policy."""
        return _rules((r"self_attn\.[qkv]_proj",), (r"self_attn\.o_proj",), (r"mlp\.gate",))

    @staticmethod
    def deepseek_v2() -> AutoTPConfig:
        """Plain MLPs and shared experts by these rules; latent attention, router and experts by the family's policy."""
        shared = r"mlp(\.shared_experts)?\."
        return _rules((rf"{shared}(up|gate)_proj",), (rf"{shared}down_proj",))

    @staticmethod
    def qwen2() -> AutoTPConfig:
        """The same rules as for ``llama``."""
        return AutoTPPresets.llama()

    @staticmethod
    def phi3() -> AutoTPConfig:
        """Query, key and value fused in one matrix, and gate and up in another."""
        return _rules((r"self_attn\.qkv_proj", r"mlp\.gate_up_proj"), (r"self_attn\.o_proj", r"mlp\.down_proj"))

    @staticmethod
    def get_preset(model_type: str) -> AutoTPConfig | None:
        """The rules of a model type, or None."""
        names = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")
        return getattr(AutoTPPresets, model_type.lower())() if model_type.lower() in names else None
