"""The configuration of ``init_inference``: DeepSpeed's keys, their old names, and one object from a file, a dictionary
and keywords.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from typing_extensions import Self

from deepspeed_c.config.coerce import BadValue, coerce, refusal, show
from deepspeed_c.config.config_model import DeepSpeedConfigModel, Field
from deepspeed_c.config.keys import DTYPE_NAMES, NonNeg, Positive, acts, inherent
from deepspeed_c.config.load import read_config
from deepspeed_c.config.nearest import nearest
from deepspeed_c.config.schema import bare, info_of
from deepspeed_c.config.source import PARKED, copy_plain, is_parked, read_source
from deepspeed_c.errors import ConfigError, FeatureError

__all__ = [
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
            elif not strict and cls._is_unfilled(key, value) and key in cls._names_by_key():
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
                if is_parked(key) or (not strict and cls._is_unfilled(key, value)):
                    continue
                if key not in names:
                    unknown[key] = value
                    continue
                name = names[key]
                read = cls._read(name, value, key)
                if name in found and _are_two(found[name][2], read):
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
        field, section = cls.model_fields[name], cls.sections().get(name)
        hint, info = field.annotation, msgspec.structs.replace(info_of(field.annotation), is_lax=True)
        if section is not None:
            value = {} if value is None else value
            if isinstance(value, Mapping):
                _refuse_other_keys(value, cls._where(name))
                return section(**value)
            if isinstance(value, section):
                # An old key is written into its section, and a section may be the caller's object.
                return value.model_copy()
            default, reason = msgspec.NODEFAULT, ""
        elif bare(hint) is Any:
            return value
        else:
            try:
                return coerce(value, hint, info)
            except BadValue as error:
                default, reason = field.get_default(), str(error)
        what, fix = refusal(value, hint, info, default, reason)
        raise ConfigError(what, where=cls._where(name), fix=fix)

    @classmethod
    def sections(cls) -> dict[str, type[InferenceSection]]:
        """The sections within this section by their names."""
        kinds = {name: bare(field.annotation) for name, field in cls.model_fields.items()}
        return {
            name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, InferenceSection)
        }

    @classmethod
    def _where(cls, name: str) -> str:
        return f"{cls.place}.{name}" if cls.place else name

    @classmethod
    def _unknown(cls, names: list[str], known: Iterable[str]) -> ConfigError:
        below = [f"{name}.{names[0]}" for name, section in cls.sections().items() if names[0] in section.model_fields]
        if not cls.place and names[0] in _NAMES_ELSEWHERE:
            below = [_NAMES_ELSEWHERE[names[0]]]
        near = below or [cls._where(name) for name in nearest(names[0], known)]
        fix = f"did you mean {' or '.join(near)}?" if near else f"the keys here are {', '.join(known)}"
        return ConfigError(
            "is not a known key" if len(names) == 1 else "are not known keys",
            where=", ".join(map(cls._where, names)),
            fix=f"{fix} To park a key, put {PARKED} in front of it.",
        )

    def _report_old_key(self, name: str, new: str, message: str) -> None:
        """``notes`` has a sentence about each old key, and the engine logs it from one rank."""

    def _without_effect(self) -> Iterator[str]:
        """A sentence about each value that is not the default and changes nothing."""
        for name, value in self:
            field = self.model_fields[name]
            why = info_of(field.annotation).inherent
            if why and value != self._checked(name, field.get_default()):
                shown = "" if name in self.sections() else f" = {show(value)}"
                yield f"{self._where(name)}{shown} has no effect: {why}"
            elif name in self.sections():
                yield from value._without_effect()

    def _all_remarks(self) -> Iterator[str]:
        yield from self._remarks
        for name in self.sections():
            yield from getattr(self, name)._all_remarks()


class DeepSpeedTPConfig(InferenceSection):
    """The section ``tensor_parallel``: how layers are cut over ranks."""

    place = "tensor_parallel"

    enabled: Annotated[bool, acts("false: the model stays whole.")] = True
    tp_size: Annotated[Positive, acts("Ranks that hold one model together.")] = 1
    tp_grain_size: Annotated[Positive, acts("Parts of a network's width are multiples of this number of elements.")] = (
        64
    )
    mpu: Annotated[Any, acts("An object with Megatron's methods; its model-parallel ranks hold the model.")] = None
    tp_group: Annotated[Any, acts("The process group of the ranks that hold the model.")] = None


class MoETypeEnum(str, enum.Enum):
    """The kinds of a layer with experts."""

    residual = "residual"
    standard = "standard"


class DeepSpeedMoEConfig(InferenceSection):
    """The section ``moe``: layers with experts. ``true`` and ``false`` in its place set ``enabled``."""

    place = "moe"

    enabled: Annotated[bool, acts("Whether the model may have experts.")] = True
    ep_size: Annotated[
        Positive,
        acts("Ranks that share the experts of a layer. Above 1: a `FeatureError`, experts over ranks come later."),
    ] = 1
    moe_experts: Annotated[list[int], inherent("Experts of each layer.", "experts run as the modules of the model")] = (
        Field([1], alias="num_experts")
    )
    type: Annotated[
        Literal["residual", "standard"], inherent("The kind of the layers.", "experts run as the modules of the model")
    ] = "standard"
    ep_mp_group: Annotated[
        Any, inherent("The process group of the ranks that hold one expert together.", "experts are not cut over ranks")
    ] = None
    ep_group: Annotated[
        Any, inherent("The process group of the ranks that share the experts.", "experts are not cut over ranks")
    ] = Field(None, alias="expert_group")


class QuantTypeEnum(str, enum.Enum):
    """Whether the codes of a quantized tensor are symmetric about zero."""

    asym = "asymmetric"
    sym = "symmetric"


class BaseQuantConfig(InferenceSection):
    """Quantization of one kind of tensors."""

    enabled: Annotated[bool, acts("Whether these tensors are quantized.")] = True
    num_bits: Annotated[Positive, acts("Bits of one element.")] = 8
    q_type: Annotated[Literal["asymmetric", "symmetric"], acts("The kind of scale.")] = "symmetric"
    q_groups: Annotated[Positive, acts("Blocks of a tensor, each with its own scale.")] = 1


class WeightQuantConfig(BaseQuantConfig):
    """Quantization of weights: the section ``quant.weight`` of inference, and the section ``weight_quantization`` of a
    training configuration."""

    place = "quant.weight"

    quantized_initialization: Annotated[dict, acts("How weights are quantized while a model is made.")] = Field({})
    post_init_quant: Annotated[dict, acts("How weights of a finished model are quantized, by module.")] = Field({})


class ActivationQuantConfig(BaseQuantConfig):
    """The section ``quant.activation``."""

    place = "quant.activation"


class QKVQuantConfig(InferenceSection):
    """The section ``quant.qkv``: the projections of attention."""

    place = "quant.qkv"

    enabled: Annotated[bool, acts("Whether these projections are quantized.")] = True


class QuantizationConfig(InferenceSection):
    """The section ``quant``."""

    place = "quant"

    enabled: Annotated[bool, acts("Switch of the section.")] = True
    activation: Annotated[ActivationQuantConfig, acts("Quantization of activations.")] = Field(
        default_factory=ActivationQuantConfig
    )
    weight: Annotated[WeightQuantConfig, acts("Quantization of weights.")] = Field(default_factory=WeightQuantConfig)
    qkv: Annotated[QKVQuantConfig, acts("Quantization of the projections of attention.")] = Field(
        default_factory=QKVQuantConfig
    )


class InferenceCheckpointConfig(InferenceSection):
    """The section ``checkpoint_config``. Its keys are second places for keys of the top level."""

    place = "checkpoint_config"

    checkpoint_dir: Annotated[str | None, acts("As `checkpoint`.")] = None
    save_mp_checkpoint_path: Annotated[str | None, acts("As the key of the top level.")] = None
    base_dir: Annotated[str | None, acts("As the key of the top level.")] = None


def _old(default: Any, new: str, **options: Any) -> Field:
    return Field(default, json_schema_extra={"deprecated": True, "new_param": new}, **options)


class DeepSpeedInferenceConfig(InferenceSection):
    """The configuration of ``init_inference``. An old key that was given is no attribute: its value is in the new key.

    Raises ConfigError for unknown keys, and for values of a wrong type, out of range, or at odds with one another;
    FeatureError for experts over ranks.
    """

    replace_with_kernel_inject: Annotated[
        bool, acts("Layers of a known family run the operators of `deepspeed_c.ops.nn`.")
    ] = Field(False, alias="kernel_inject")
    dtype: Annotated[
        Any,
        acts(
            "Format of the weights: torch.float16, torch.bfloat16, torch.float32 or torch.int8, or one of their names."
        ),
    ] = "torch.float16"
    tensor_parallel: Annotated[DeepSpeedTPConfig, acts("How layers are cut over ranks; an integer is `tp_size`.")] = (
        Field(default_factory=DeepSpeedTPConfig, alias="tp")
    )
    enable_cuda_graph: Annotated[
        bool, inherent("Capture generation in CUDA graphs.", "this version captures no CUDA graphs")
    ] = False
    use_triton: Annotated[
        bool, inherent("Run kernels of Triton.", "no kernel of this version is written in Triton")
    ] = False
    triton_autotune: Annotated[
        bool, inherent("Tune kernels of Triton at the first call.", "no kernel of this version is written in Triton")
    ] = False
    zero: Annotated[
        dict,
        acts("Keys of a training configuration's `zero_optimization`: at stage 3, weights stay sharded or offloaded."),
    ] = Field({})
    triangular_masking: Annotated[
        bool, inherent("Whether attention is causal.", "each layer masks as its own model does")
    ] = Field(True, alias="tm")
    moe: Annotated[DeepSpeedMoEConfig, acts("Layers with experts.")] = Field(default_factory=DeepSpeedMoEConfig)
    keep_module_on_host: Annotated[bool, acts("Leave the weights in host memory, and run there.")] = False
    quant: Annotated[
        QuantizationConfig, inherent("How int8 weights are made.", "int8 weights have one scale for each row")
    ] = Field(default_factory=QuantizationConfig)
    checkpoint: Annotated[
        str | dict | None,
        acts("Folder or file of the weights, or DeepSpeed's list of files as a JSON file or a dictionary."),
    ] = None
    base_dir: Annotated[str, acts("Folder that paths in a list of files start from.")] = ""
    set_empty_params: Annotated[bool, acts("Whether the model was made without memory for its weights.")] = False
    save_mp_checkpoint_path: Annotated[
        str | None, acts("Folder to which the weights are written, for a later start on any number of ranks.")
    ] = None
    checkpoint_config: Annotated[InferenceCheckpointConfig, acts("Second places for the keys of checkpoints.")] = Field(
        default_factory=InferenceCheckpointConfig, alias="ckpt_config"
    )
    return_tuple: Annotated[bool, acts("Whether a replaced layer returns a tuple, or the tensor alone.")] = True
    training_mp_size: Annotated[
        Positive,
        inherent("Tensor-parallel ranks that wrote the checkpoint.", "the files of a checkpoint say how they are cut"),
    ] = 1
    replace_method: Annotated[
        str,
        inherent(
            "How layers to replace are found.",
            "layers are found by the model's family, or by injection_policy",
            auto="value",
        ),
    ] = "auto"
    injection_policy: Annotated[
        dict | None,
        acts("Class of layers -> names of the projections after which partial sums are added over ranks, or a policy."),
    ] = Field(None, alias="injection_dict")
    injection_policy_tuple: Annotated[
        tuple[Any, ...] | None,
        inherent(
            "The names of `injection_policy` without a class.",
            "injection_policy has the names for each class of layers",
        ),
    ] = None
    config: Annotated[
        dict | None, inherent("Arguments of the caller's own program.", "no part of the engine reads it")
    ] = Field(None, alias="args")
    max_out_tokens: Annotated[Positive, acts("Most tokens of a sequence, the prompt included.")] = Field(
        1024, alias="max_tokens"
    )
    min_out_tokens: Annotated[NonNeg, acts("Tokens of a sequence for which memory has to suffice.")] = Field(
        1, alias="min_tokens"
    )
    transposed_mode: Annotated[
        bool, inherent("Whether weights are stored transposed.", "weights keep the layout of the model")
    ] = False
    cpu_products: Annotated[
        Literal["auto", "torch"],
        acts(
            "Who multiplies 16-bit elements on a CPU. auto: until the last engine with this value is closed, kernels"
            " that compute in fp32, if torch takes longer by half or more (processors below AVX-512). torch: torch.",
            auto="value",
        ),
    ] = "auto"
    mp_size: Annotated[Positive, acts("Old name of `tensor_parallel.tp_size`.")] = _old(1, "tensor_parallel.tp_size")
    mpu: Annotated[Any, acts("Old name of `tensor_parallel.mpu`.")] = _old(None, "tensor_parallel.mpu")
    ep_size: Annotated[Positive, acts("Old name of `moe.ep_size`.")] = _old(1, "moe.ep_size")
    ep_group: Annotated[Any, acts("Old name of `moe.ep_group`.")] = _old(None, "moe.ep_group", alias="expert_group")
    ep_mp_group: Annotated[Any, acts("Old name of `moe.ep_mp_group`.")] = _old(
        None, "moe.ep_mp_group", alias="expert_mp_group"
    )
    moe_experts: Annotated[list[int], acts("Old name of `moe.moe_experts`.")] = _old([1], "moe.moe_experts")
    moe_type: Annotated[Literal["residual", "standard"], acts("Old name of `moe.type`.")] = _old("standard", "moe.type")

    @classmethod
    def _checked(cls, name: str, value: Any) -> Any:
        if name == "dtype":
            return dtype_of(value)
        if name == "tensor_parallel" and _is_int(value):
            value = {"tp_size": value}
        elif name == "moe" and isinstance(value, bool):
            value = {"enabled": value}
        elif name == "zero":
            return _as_zero(value)
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
            raise ConfigError("is not a known key", where="strict", fix="remove it; notes are never errors here")
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
        found += self._without_effect()
        if self.zero:
            found += _notes_of_zero(self.zero)
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


def _are_two(a: Any, b: Any) -> bool:
    """Whether two values of a key differ. Objects that can't be compared, such as tensors, are the same only if they
    are one."""
    try:
        return bool(a != b)
    except (TypeError, ValueError, RuntimeError):
        return a is not b


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


class _CheckedZero(dict):
    """The section ``zero``, and what its check found. A caller may change it: it is checked again then."""

    def __init__(self, keys: Mapping[str, Any], notes: tuple[str, ...]) -> None:
        super().__init__(keys)
        self.notes, self._checked_text = notes, repr(keys)

    @property
    def is_checked(self) -> bool:
        # Text tells 1 from True, which are equal.
        return repr(dict(self)) == self._checked_text

    def __copy__(self) -> Self:
        return type(self)(copy_plain(self, "zero"), self.notes)


def _as_zero(value: Any) -> Any:
    """The section ``zero`` as a dictionary of its own, after the checks of a training configuration's
    ``zero_optimization``. Nothing is checked twice."""
    if value is None:
        return {}
    if isinstance(value, _CheckedZero) and value.is_checked:
        return copy.copy(value)
    if isinstance(value, DeepSpeedConfigModel):
        value = value.model_dump(exclude_unset=True, by_alias=True)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{show(value)} is not a section", where="zero", fix="write an object {...}")
    if not value:
        return {}
    checked, problems = _read_zero(value)
    if problems:
        first = problems[0]
        where = first.where.replace("zero_optimization", "zero")
        raise type(first)(first.what, where=where, fix=first.fix.replace("zero_optimization.", "zero."))
    return checked


def _read_zero(section: Mapping[str, Any]) -> tuple[_CheckedZero, list[ConfigError]]:
    """(the section with its notes, its problems)."""
    source = read_source({"zero_optimization": dict(section)})
    read, problems = read_config(source).resolve_with_problems(world_size=1, batch="skip")
    notes = tuple(note.replace("zero_optimization", "zero") for note in read.notes)
    return _CheckedZero(source.keys["zero_optimization"], notes), problems


def _notes_of_zero(section: Mapping[str, Any]) -> tuple[str, ...]:
    is_known = isinstance(section, _CheckedZero) and section.is_checked
    return section.notes if is_known else _read_zero(section)[0].notes
