"""The configuration of ``init_inference``: DeepSpeed's keys, their old names, and one object from a file, a dictionary
and keywords.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from typing_extensions import Self

from deepspeed_c.config.coerce import show
from deepspeed_c.config.config_model import DeepSpeedConfigModel, Field
from deepspeed_c.config.keys import DTYPE_NAMES
from deepspeed_c.config.load import read_config
from deepspeed_c.config.source import is_parked, read_source
from deepspeed_c.errors import ConfigError, FeatureError

__all__ = [
    "WITHOUT_EFFECT",
    "ActivationQuantConfig",
    "BaseQuantConfig",
    "DeepSpeedInferenceConfig",
    "DeepSpeedMoEConfig",
    "DeepSpeedTPConfig",
    "InferenceCheckpointConfig",
    "InferenceSection",
    "MoETypeEnum",
    "QKVQuantConfig",
    "QuantTypeEnum",
    "QuantizationConfig",
    "WeightQuantConfig",
    "default_inference_config",
    "dtype_of",
    "load_inference_config",
]

# Short name of a format -> the attribute of torch.
_FORMATS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "int8": "int8"}
_FORMAT_NAMES = {**DTYPE_NAMES, "bfloat": "bf16", "int8": "int8", "torch.int8": "int8"}

# Keys of other programs that mean the same as a key here under another name.
_NAMES_ELSEWHERE = {
    "zero_optimization": "zero",
    "torch_dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel.tp_size",
    "world_size": "tensor_parallel.tp_size",
    "max_length": "max_out_tokens",
    "max_new_tokens": "max_out_tokens",
    "min_length": "min_out_tokens",
    "min_new_tokens": "min_out_tokens",
    "num_experts": "moe.moe_experts",
}

# A key -> why a value other than the default has no effect.
WITHOUT_EFFECT = {
    "enable_cuda_graph": "this version captures no CUDA graphs",
    "use_triton": "no kernel of this version is written in Triton",
    "triton_autotune": "no kernel of this version is written in Triton",
    "triangular_masking": "each layer masks as its own model does",
    "transposed_mode": "weights keep the layout of the model",
    "config": "no part of the engine reads it",
    "injection_policy_tuple": "injection_policy has the names for each class of layers",
    "training_mp_size": "the files of a checkpoint say how they are cut",
    "replace_method": "layers are found by the model's family, or by injection_policy",
    "quant": "int8 weights have one scale for each row",
    "moe.moe_experts": "experts run as the modules of the model",
    "moe.type": "experts run as the modules of the model",
    "moe.ep_group": "experts are not cut over ranks",
    "moe.ep_mp_group": "experts are not cut over ranks",
}


class InferenceSection(DeepSpeedConfigModel):
    """The base of the sections. Two spellings of a key may be given together if they have the same value. Keys that are
    parked are left out; ``null`` in place of a section means its defaults.
    """

    place: ClassVar[str] = ""
    """The path of the section in the configuration; empty for the top level."""
    _remarks: tuple[str, ...] = ()
    """Facts about keys that were given and are not among the values."""

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(strict, **self._without_spellings(data, strict=strict))
        self._remark(self._left_out(data, strict))

    def _remark(self, remarks: Iterable[str]) -> None:
        object.__setattr__(self, "_remarks", tuple(remarks))

    @classmethod
    def _left_out(cls, data: Mapping[str, Any], strict: bool) -> Iterator[str]:
        for key, value in data.items():
            path = f"{cls.place}.{key}" if cls.place else key
            if is_parked(key):
                yield f"{path} is parked"
            elif not strict and _is_auto(value) and key != "replace_method" and key in cls._names_by_key():
                default = cls.model_fields[cls._names_by_key()[key]].get_default()
                yield f'{path} is "auto", and no other program fills it: its default {show(default)} holds'

    @classmethod
    def _without_spellings(cls, *sources: Mapping[str, Any], strict: bool = False) -> dict[str, Any]:
        """The values of all ``sources`` by the names of the attributes. An old key with its default is left out:
        ``default_inference_config`` has all old keys.

        Raises:
            ConfigError: a key has two different values.
        """
        names = cls._names_by_key()
        # Name of an attribute -> (the key as it was given, its value, the value as it is read).
        found: dict[str, tuple[str, Any, Any]] = {}
        unknown: dict[str, Any] = {}
        for source in sources:
            for key, value in source.items():
                if is_parked(key) or (not strict and _is_auto(value) and key != "replace_method"):
                    continue
                if key not in names:
                    unknown[key] = value
                    continue
                name = names[key]
                read = cls._read(name, value, key)
                if name in found and found[name][2] != read:
                    other, before, _ = found[name]
                    spelt = f"{key} = {show(value)}" if key != other else show(value)
                    raise ConfigError(
                        f"has two values: {other} = {show(before)}, and {spelt}",
                        where=cls._where(name),
                        fix=f"give one value, as {name}",
                    )
                found.setdefault(name, (key, value, read))
        fields = cls.model_fields
        return unknown | {
            name: read
            for name, (_, _, read) in found.items()
            if not (
                fields[name].json_schema_extra.get("new_param") and read == cls._read(name, fields[name].get_default())
            )
        }

    @classmethod
    def _read(cls, name: str, value: Any, key: str = "") -> Any:
        try:
            return cls._checked(name, value)
        except ConfigError as error:
            if key in ("", name) or not error.where.startswith(cls._where(name)):
                raise
            where = f"{error.where} (given as {key})"
            raise type(error)(error.what, where=where, fix=error.fix) from None

    @classmethod
    def _checked(cls, name: str, value: Any) -> Any:
        if name in cls.sections():
            value = {} if value is None else value
            if isinstance(value, Mapping):
                _refuse_other_keys(value, cls._where(name))
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        new = super()._checked(name, value)
        # An old key is written into its section, and a section may be the caller's object.
        return new.model_copy() if new is value and isinstance(new, DeepSpeedConfigModel) else new

    @classmethod
    def sections(cls) -> dict[str, type[InferenceSection]]:
        """The sections within this section by their names."""
        return {
            name: field.annotation
            for name, field in cls.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, InferenceSection)
        }

    @classmethod
    def _title(cls) -> str:
        return cls.place or cls.__name__

    @classmethod
    def _where(cls, name: str) -> str:
        return f"{cls.place}.{name}" if cls.place else name

    @classmethod
    def _advice(cls, unknown: str, known: Iterable[str]) -> str:
        if not cls.place and unknown in _NAMES_ELSEWHERE:
            return f"did you mean {_NAMES_ELSEWHERE[unknown]}?"
        below = [f"{name}.{unknown}" for name, section in cls.sections().items() if unknown in section.model_fields]
        return f"did you mean {' or '.join(below)}?" if below else super()._advice(unknown, known)

    def _report_old_key(self, name: str, new: str, message: str) -> None:
        """``notes`` has a sentence about each old key, and the engine logs it from one rank."""

    def _all_remarks(self) -> Iterator[str]:
        yield from self._remarks
        for name in self.sections():
            yield from getattr(self, name)._all_remarks()


class DeepSpeedTPConfig(InferenceSection):
    """The section ``tensor_parallel``: how layers are cut over ranks."""

    place = "tensor_parallel"

    enabled: bool = True
    """false: the model stays whole."""
    tp_size: int = Field(1, ge=1)
    """Ranks that hold one model together."""
    tp_grain_size: int = Field(64, ge=1)
    """Parts of a network's width are multiples of this number of elements."""
    mpu: object = None
    """An object with Megatron's methods; its model-parallel ranks hold the model."""
    tp_group: object = None
    """The process group of the ranks that hold the model."""


class MoETypeEnum(str, enum.Enum):
    """The kinds of a layer with experts."""

    residual = "residual"
    standard = "standard"


class DeepSpeedMoEConfig(InferenceSection):
    """The section ``moe``: layers with experts. ``true`` and ``false`` in its place set ``enabled``."""

    place = "moe"

    enabled: bool = True
    """Whether the model may have experts."""
    ep_size: int = Field(1, ge=1)
    """Ranks that share the experts of a layer."""
    moe_experts: list[int] = Field([1], alias="num_experts")
    """Experts of each layer."""
    type: MoETypeEnum = MoETypeEnum.standard.value
    """The kind of the layers."""
    ep_mp_group: object = None
    """The process group of the ranks that hold one expert together."""
    ep_group: object = Field(None, alias="expert_group")
    """The process group of the ranks that share the experts."""


class QuantTypeEnum(str, enum.Enum):
    """Whether the codes of a quantized tensor are symmetric about zero."""

    asym = "asymmetric"
    sym = "symmetric"


class BaseQuantConfig(InferenceSection):
    """Quantization of one kind of tensors."""

    enabled: bool = True
    """Whether these tensors are quantized."""
    num_bits: int = Field(8, ge=1)
    """Bits of one element."""
    q_type: QuantTypeEnum = QuantTypeEnum.sym.value
    """The kind of scale."""
    q_groups: int = Field(1, ge=1)
    """Blocks of a tensor, each with its own scale."""


class WeightQuantConfig(BaseQuantConfig):
    """Quantization of weights: the section ``quant.weight`` of inference, and the section ``weight_quantization`` of a
    training configuration."""

    place = "quant.weight"

    quantized_initialization: dict[str, Any] = {}  # noqa: RUF012  (copied for each object)
    """How weights are quantized while a model is made."""
    post_init_quant: dict[str, Any] = {}  # noqa: RUF012
    """How weights of a finished model are quantized, by module."""


class ActivationQuantConfig(BaseQuantConfig):
    """The section ``quant.activation``."""

    place = "quant.activation"


class QKVQuantConfig(InferenceSection):
    """The section ``quant.qkv``: the projections of attention."""

    place = "quant.qkv"

    enabled: bool = True
    """Whether these projections are quantized."""


class QuantizationConfig(InferenceSection):
    """The section ``quant``."""

    place = "quant"

    enabled: bool = True
    """Switch of the section."""
    activation: ActivationQuantConfig = Field(default_factory=ActivationQuantConfig)
    """Quantization of activations."""
    weight: WeightQuantConfig = Field(default_factory=WeightQuantConfig)
    """Quantization of weights."""
    qkv: QKVQuantConfig = Field(default_factory=QKVQuantConfig)
    """Quantization of the projections of attention."""


class InferenceCheckpointConfig(InferenceSection):
    """The section ``checkpoint_config``. Its keys are second places for keys of the top level."""

    place = "checkpoint_config"

    checkpoint_dir: str | None = None
    """As ``checkpoint``."""
    save_mp_checkpoint_path: str | None = None
    """As the key of the top level."""
    base_dir: str | None = None
    """As the key of the top level."""


def _old(default: Any, new: str, **options: Any) -> Field:
    return Field(default, json_schema_extra={"deprecated": True, "new_param": new}, **options)


class DeepSpeedInferenceConfig(InferenceSection):
    """The configuration of ``init_inference``. An old key that was given is no attribute: its value is in the new key.

    Raises ConfigError for unknown keys, and for values of a wrong type, out of range, or at odds with one another;
    FeatureError for experts over ranks.
    """

    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")
    """Layers of a known family run the operators of ``deepspeed_c.ops.nn``."""
    dtype: object = "torch.float16"
    """Format of the weights: torch.float16, torch.bfloat16, torch.float32 or torch.int8, or one of their names."""
    tensor_parallel: DeepSpeedTPConfig = Field(default_factory=DeepSpeedTPConfig, alias="tp")
    """How layers are cut over ranks; an integer is ``tp_size``."""
    enable_cuda_graph: bool = False
    """Capture generation in CUDA graphs."""
    use_triton: bool = False
    """Run kernels of Triton."""
    triton_autotune: bool = False
    """Tune kernels of Triton at the first call."""
    zero: dict[str, Any] = {}  # noqa: RUF012  (copied for each object)
    """Keys of a training configuration's ``zero_optimization``: at stage 3, weights stay sharded or offloaded."""
    triangular_masking: bool = Field(True, alias="tm")
    """Whether attention is causal."""
    moe: DeepSpeedMoEConfig = Field(default_factory=DeepSpeedMoEConfig)
    """Layers with experts."""
    keep_module_on_host: bool = False
    """Leave the weights in host memory, and run there."""
    quant: QuantizationConfig = Field(default_factory=QuantizationConfig)
    """How int8 weights are made."""
    checkpoint: str | dict[str, Any] | None = None
    """Folder or file of the weights, or DeepSpeed's list of files as a JSON file or a dictionary."""
    base_dir: str = ""
    """Folder that paths in a list of files start from."""
    set_empty_params: bool = False
    """Whether the model was made without memory for its weights."""
    save_mp_checkpoint_path: str | None = None
    """Folder to which the weights are written, for a later start on any number of ranks."""
    checkpoint_config: InferenceCheckpointConfig = Field(default_factory=InferenceCheckpointConfig, alias="ckpt_config")
    """Second places for the keys of checkpoints."""
    return_tuple: bool = True
    """Whether a replaced layer returns a tuple, or the tensor alone."""
    training_mp_size: int = Field(1, ge=1)
    """Tensor-parallel ranks that wrote the checkpoint."""
    replace_method: str = "auto"
    """How layers to replace are found."""
    injection_policy: dict[Any, Any] | None = Field(None, alias="injection_dict")
    """Class of layers -> names of the projections after which partial sums are added over ranks, or a policy."""
    injection_policy_tuple: tuple | None = None
    """The names of ``injection_policy`` without a class."""
    config: dict[str, Any] | None = Field(None, alias="args")
    """Arguments of the caller's own program."""
    max_out_tokens: int = Field(1024, alias="max_tokens", ge=1)
    """Most tokens of a sequence, the prompt included."""
    min_out_tokens: int = Field(1, alias="min_tokens", ge=0)
    """Tokens of a sequence for which memory has to suffice."""
    transposed_mode: bool = False
    """Whether weights are stored transposed."""
    mp_size: int = _old(1, "tensor_parallel.tp_size", ge=1)
    """Old name."""
    mpu: object = _old(None, "tensor_parallel.mpu")
    """Old name."""
    ep_size: int = _old(1, "moe.ep_size", ge=1)
    """Old name."""
    ep_group: object = _old(None, "moe.ep_group", alias="expert_group")
    """Old name."""
    ep_mp_group: object = _old(None, "moe.ep_mp_group", alias="expert_mp_group")
    """Old name."""
    moe_experts: list[int] = _old([1], "moe.moe_experts")
    """Old name."""
    moe_type: MoETypeEnum = _old(MoETypeEnum.standard.value, "moe.type")
    """Old name."""

    @classmethod
    def _checked(cls, name: str, value: Any) -> Any:
        if name == "dtype":
            return dtype_of(value)
        if name == "tensor_parallel" and _is_int(value):
            value = {"tp_size": value}
        elif name == "moe" and isinstance(value, bool):
            value = {"enabled": value}
        elif name == "zero":
            value = _as_zero(value)
        return super()._checked(name, value)

    def _check(self) -> None:
        tp, moe = self.tensor_parallel, self.moe
        if self.max_out_tokens < self.min_out_tokens:
            raise ConfigError(
                f"is {self.max_out_tokens}, and min_out_tokens is {self.min_out_tokens}",
                where="max_out_tokens",
                fix=f"write a number >= {self.min_out_tokens}, or lower min_out_tokens",
            )
        if not tp.enabled and tp.tp_size > 1:
            raise ConfigError(
                f"is false, and tp_size is {tp.tp_size}",
                where="tensor_parallel.enabled",
                fix="write true, or a tp_size of 1",
            )
        if moe.enabled and moe.ep_size > 1:
            raise FeatureError(
                f"{moe.ep_size} asks for experts that are cut over ranks, which this version does not have",
                where="moe.ep_size",
                fix="write 1: each rank then holds all experts, or its part of each with tensor_parallel.tp_size",
            )
        self._check_policy()
        self._take_checkpoint_config()

    def _check_policy(self) -> None:
        for layer, policy in (self.injection_policy or {}).items():
            where = f"injection_policy[{getattr(layer, '__name__', layer)!r}]"
            if not isinstance(layer, (type, str)):
                raise ConfigError(
                    f"has the type {type(layer).__name__} and is no class of layers",
                    where=where,
                    fix="write the class of the model's layers, such as T5Block",
                )
            names = (policy,) if isinstance(policy, str) else policy
            is_names = isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)
            if not isinstance(policy, type) and not (is_names and names):
                raise ConfigError(
                    f"is {policy!r}, neither names of projections nor a policy",
                    where=where,
                    fix='write a tuple of names, such as ("SelfAttention.o", "DenseReluDense.wo"), or a class of policies',
                )

    def _take_checkpoint_config(self) -> None:
        """Read the keys of ``checkpoint_config`` as the keys of the top level."""
        section = self.checkpoint_config
        for name, place in (
            ("checkpoint_dir", "checkpoint"),
            ("save_mp_checkpoint_path", "save_mp_checkpoint_path"),
            ("base_dir", "base_dir"),
        ):
            value, top = getattr(section, name), getattr(self, place)
            if not value or value == top:
                continue
            if top:
                raise ConfigError(
                    f"has two values: {place} = {show(top)}, and checkpoint_config.{name} = {show(value)}",
                    where=place,
                    fix=f"give one value, as {place}",
                )
            setattr(self, place, value)

    @classmethod
    def merged(cls, *sources: Mapping[str, Any]) -> Self:
        """An object from the keys of all ``sources``. Raises ConfigError also if a key has two values."""
        values = cls._without_spellings(*sources)
        if "strict" in values:  # an argument of the constructor
            raise ConfigError("strict: no such key", where=cls.__name__, fix="remove it; notes are never errors here")
        made = cls(**values)
        made._remark(remark for source in sources for remark in cls._left_out(source, False))
        return made

    def given(self) -> dict[str, Any]:
        """The keys that were given or set, and sections that differ from their defaults. An old key is in its new
        place."""
        return {
            name: value
            for name, value in self
            if name in self.model_fields_set or value != self._checked(name, self.model_fields[name].get_default())
        }

    def keep_notes(self, source: DeepSpeedInferenceConfig) -> None:
        """Take over the notes about names in ``source``, an object that this configuration was made from."""
        known = self.notes
        self._remark([*(note for note in source.notes if note not in known), *self._remarks])

    @property
    def notes(self) -> list[str]:
        """Sentences for the user: keys that are parked or have no effect, and old names."""
        found = list(self._all_remarks())
        for name, field in self.model_fields.items():
            new = field.json_schema_extra.get("new_param")
            if new and name not in self.__dict__:
                found.append(f"{name} is read as {new}")
        for path, why in WITHOUT_EFFECT.items():
            owner: DeepSpeedConfigModel = self
            *sections, name = path.split(".")
            for section in sections:
                owner = getattr(owner, section)
            value = getattr(owner, name)
            if value != owner._checked(name, owner.model_fields[name].get_default()):
                shown = "" if isinstance(value, DeepSpeedConfigModel) else f" = {show(value)}"
                found.append(f"{path}{shown} has no effect: {why}")
        if self.zero:
            found += [note.replace("zero_optimization", "zero") for note in _read_zero(self.zero)[0]]
        return found


def load_inference_config(config: Any, kwargs: Mapping[str, Any]) -> DeepSpeedInferenceConfig:
    """The configuration of ``init_inference``: ``config`` together with its keywords.

    Args:
        config: None, the path of a JSON file, a dictionary, or an object of the class; never changed.
        kwargs: keys by any of their names. A key that is in ``config`` too must have the same value.

    Raises:
        ConfigError: the file cannot be read, a key has two values, a key is unknown or has a wrong value.
        FeatureError: experts over ranks are asked for.
    """
    if config is None:
        given: Mapping[str, Any] = {}
    elif isinstance(config, DeepSpeedInferenceConfig):
        given = config.given()
    elif isinstance(config, Mapping):
        # Keys of sections need no check here: the classes of layers in injection_policy are keys too.
        _refuse_other_keys(config, "config")
        given = config
    else:
        given, _ = read_source(config)
    merged = DeepSpeedInferenceConfig.merged(given, kwargs)
    if isinstance(config, DeepSpeedInferenceConfig):
        merged.keep_notes(config)
    return merged


def default_inference_config() -> dict[str, Any]:
    """Every key of ``init_inference`` with its default, as a new dictionary of plain values."""
    return DeepSpeedInferenceConfig().model_dump()


def _refuse_other_keys(section: Mapping[Any, Any], where: str) -> None:
    for key in section:
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r} is not a string", where=where, fix="write it as a string")


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def dtype_of(value: Any) -> Any:
    """The dtype of torch for a dtype, a name of one, or a member of ``DtypeEnum``."""
    import torch  # imported here because configuration files are checked without torch

    if isinstance(value, enum.Enum):
        value = value.value[0] if isinstance(value.value, tuple) else value.value
    name = str(value) if isinstance(value, (str, torch.dtype)) else ""
    short = _FORMAT_NAMES.get(name.lower())
    if short is None:
        raise ConfigError(
            f"is {value!r}", where="dtype", fix="write torch.float16, torch.bfloat16, torch.float32 or torch.int8"
        )
    return getattr(torch, _FORMATS[short])


def _as_zero(value: Any) -> Any:
    """The section ``zero`` as a dictionary, after the checks of a training configuration's ``zero_optimization``."""
    if value is None:
        return {}
    if isinstance(value, DeepSpeedConfigModel):
        value = value.model_dump(exclude_unset=True, by_alias=True)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{show(value)} is not a section", where="zero", fix="write an object {...}")
    _, problems = _read_zero(value)
    if problems:
        first = problems[0]
        where = first.where.replace("zero_optimization", "zero")
        raise type(first)(first.what, where=where, fix=first.fix.replace("zero_optimization.", "zero."))
    return value


def _read_zero(section: Mapping[str, Any]) -> tuple[tuple[str, ...], list[ConfigError]]:
    """(notes, problems) of the section."""
    source = read_source({"zero_optimization": dict(section)})
    read, problems = read_config(source).resolve_with_problems(world_size=1, batch="skip")
    return read.notes, problems
