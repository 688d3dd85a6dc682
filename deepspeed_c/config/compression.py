"""Section compression_training: quantization, pruning and layer reduction during training."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from .keys import Fraction, FrozenDict, NonNeg, Positive, Section, acts, asks, inherent, tunes

__all__ = ["Compression", "Levels", "compression_conflicts", "n_of_m"]

_C, _P, _CHANNELS, _LAYERS = "compression", "pruning", "channel_pruning", "layer_reduction"
_MOQ = (
    "bits that shrink over the steps (MoQ) are not built; quantize_weight_in_forward quantizes to target_bits at once"
)
Scale = Literal["symmetric", "asymmetric"]
Levels = Literal["deepspeed", "compressed-tensors"]
_LEVELS = "Scale of b bits: the range over 2^b as in DeepSpeed, or over 2^b - 1 as in compressed-tensors."
OpenFraction = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class _GroupSection(Section, kw_only=True):
    """Modules that get the same treatment."""

    modules: Annotated[
        tuple[str, ...],
        acts("Regular expressions that are searched in the modules' names; * for all.", one_or_many=True),
    ] = ("*",)
    related_modules: Annotated[
        tuple[Any, ...] | None,
        tunes("For each of the patterns, a list of patterns of modules that are cut along with them.", _P),
    ] = None


class MixedQuantize(Section, kw_only=True):
    """A mix of fp16 and quantized weights that shifts over time."""

    enabled: Annotated[bool, tunes("Switch of the mix; not built.", _C)] = False
    quantize_change_ratio: Annotated[Fraction, inherent("Shift per step.", _MOQ)] = 0.001


class WeightShared(Section, kw_only=True):
    """Weight quantization: all groups."""

    enabled: Annotated[bool, asks("Switch of the technique.", _C)] = False
    schedule_offset: Annotated[NonNeg, tunes("Number of applied steps before it starts.", _C)] = 0
    quantizer_kernel: Annotated[bool, inherent("Use the kernel.", "there is one way to quantize")] = False
    quantize_groups: Annotated[
        Positive, tunes("Groups of a weight, equal parts with one scale each; an embedding has one per row.", _C)
    ] = 1
    quantize_verbose: Annotated[bool, inherent("Report the bits at each change.", _MOQ)] = False
    quantization_type: Annotated[Scale, tunes("Kind of scale.", _C)] = "symmetric"
    levels: Annotated[Levels, tunes(_LEVELS, _C)] = "deepspeed"
    rounding: Annotated[Literal["nearest", "stochastic"], tunes("Rounding.", _C)] = "nearest"
    quantize_weight_in_forward: Annotated[bool, tunes("Quantize in forward; must be true.", _C)] = False
    fp16_mixed_quantize: Annotated[MixedQuantize, tunes("Mix with fp16.", _C)] = MixedQuantize()


class WeightGroupParams(Section, kw_only=True):
    """Bits of a group."""

    start_bits: Annotated[Positive | None, inherent("Bits at the start.", _MOQ)] = None
    target_bits: Annotated[Positive | None, tunes("Bits of a weight: 8 or 4.", _C)] = None
    quantization_period: Annotated[NonNeg, inherent("Steps between bit widths; 0: none.", _MOQ)] = 1


class WeightGroup(_GroupSection, kw_only=True):
    """One group of weight quantization."""

    params: Annotated[WeightGroupParams, tunes("Its numbers.", _C)] = WeightGroupParams()


class WeightTechnique(Section, kw_only=True):
    """Weight quantization."""

    shared_parameters: Annotated[WeightShared, tunes("What holds for all groups.", _C)] = WeightShared()
    different_groups: Annotated[dict[str, WeightGroup], tunes("The groups, by name.", _C)] = FrozenDict()


class ActivationShared(Section, kw_only=True):
    """Activation quantization: all groups."""

    enabled: Annotated[bool, asks("Switch of the technique.", _C)] = False
    schedule_offset: Annotated[NonNeg, tunes("Number of applied steps before it starts.", _C)] = 1000
    quantization_type: Annotated[Scale, tunes("Kind of scale.", _C)] = "symmetric"
    levels: Annotated[Levels, tunes(_LEVELS, _C)] = "deepspeed"
    range_calibration: Annotated[
        Literal["dynamic", "static"], tunes("Range of each row, or a running range of all rows.", _C)
    ] = "dynamic"


class ActivationGroupParams(Section, kw_only=True):
    """Bits of a group."""

    bits: Annotated[Positive | None, tunes("Bits of an activation: 8 or 4.", _C)] = None


class ActivationGroup(_GroupSection, kw_only=True):
    """One group of activation quantization."""

    params: Annotated[ActivationGroupParams, tunes("Its numbers.", _C)] = ActivationGroupParams()


class ActivationTechnique(Section, kw_only=True):
    """Activation quantization."""

    shared_parameters: Annotated[ActivationShared, tunes("What holds for all groups.", _C)] = ActivationShared()
    different_groups: Annotated[dict[str, ActivationGroup], tunes("The groups, by name.", _C)] = FrozenDict()


class _Shared(Section, kw_only=True):
    """Keys that the pruning techniques share."""

    enabled: Annotated[bool, asks("Switch of the technique.", _P)] = False
    schedule_offset: Annotated[NonNeg, tunes("Number of applied steps before it starts.", _P)] = 1000


class PruneGroupParams(Section, kw_only=True):
    """Density of a group."""

    dense_ratio: Annotated[Fraction | None, tunes("Part of the weights, rows or heads that is kept.", _P)] = None


class PruneGroup(_GroupSection, kw_only=True):
    """One group of a pruning technique."""

    params: Annotated[PruneGroupParams, tunes("Its numbers.", _P)] = PruneGroupParams()


class SparseShared(_Shared, kw_only=True):
    """Sparse pruning: all groups."""

    gradual: Annotated[
        bool,
        tunes("Prune more and more up to schedule_offset_end, not to dense_ratio at once at schedule_offset.", _P),
    ] = False
    schedule_offset_end: Annotated[
        NonNeg | None, tunes("With gradual: applied steps after which dense_ratio is reached.", _P)
    ] = None
    schedule_offset_stride: Annotated[Positive, tunes("With gradual: applied steps between prunings.", _P)] = 1
    method: Annotated[
        Literal["l1", "topk", "snip_momentum"],
        tunes("Measure of a weight: its magnitude, or a learned score; snip_momentum is not built.", _P),
    ] = "l1"
    block_pattern: Annotated[
        str, tunes('"4x1": single weights; "2:4": 2 of each 4 neighbours in a row are kept.', _P)
    ] = "4x1"
    dense_ratio: Annotated[OpenFraction, inherent("Density for snip_momentum.", "each group has its own")] = 0.1
    excluded_modules: Annotated[tuple[str, ...], tunes("Modules that are left alone.", _P)] = ()


class SparseTechnique(Section, kw_only=True):
    """Sparse pruning."""

    shared_parameters: Annotated[SparseShared, tunes("What holds for all groups.", _P)] = SparseShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _P)] = FrozenDict()


class RowShared(_Shared, kw_only=True):
    """Row pruning: all groups."""

    method: Annotated[
        Literal["l1", "topk"], tunes("Measure of a row: the sum of its magnitudes, or a learned score.", _P)
    ] = "l1"


class RowTechnique(Section, kw_only=True):
    """Row pruning."""

    shared_parameters: Annotated[RowShared, tunes("What holds for all groups.", _P)] = RowShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _P)] = FrozenDict()


class HeadShared(_Shared, kw_only=True):
    """Head pruning: all groups."""

    method: Annotated[
        Literal["l1", "topk"], tunes("Measure of a head: the sum of its columns' magnitudes, or a learned score.", _P)
    ] = "topk"
    num_heads: Annotated[
        Positive | None, tunes("Heads of each attention; where several share keys, the number of key heads.", _P)
    ] = None


class HeadTechnique(Section, kw_only=True):
    """Head pruning."""

    shared_parameters: Annotated[HeadShared, tunes("What holds for all groups.", _P)] = HeadShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _P)] = FrozenDict()


class ChannelShared(Section, kw_only=True):
    """Channel pruning: all groups."""

    enabled: Annotated[bool, asks("Switch of the technique.", _CHANNELS)] = False
    schedule_offset: Annotated[NonNeg, tunes("Number of applied steps before it starts.", _CHANNELS)] = 1000
    method: Annotated[Literal["l1", "topk"], tunes("Measure of a channel.", _CHANNELS)] = "l1"


class ChannelTechnique(Section, kw_only=True):
    """Channel pruning."""

    shared_parameters: Annotated[ChannelShared, tunes("What holds for all groups.", _CHANNELS)] = ChannelShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _CHANNELS)] = FrozenDict()


class LayerReduction(Section, kw_only=True):
    """A student made of some of the teacher's layers."""

    enabled: Annotated[bool, asks("Switch of the technique.", _LAYERS)] = False
    keep_number_layer: Annotated[Positive | None, tunes("Number of the student's layers.", _LAYERS)] = None
    module_name_prefix: Annotated[str | None, tunes("Name of the list of layers in both models.", _LAYERS)] = None
    teacher_layer: Annotated[
        tuple[NonNeg, ...] | None, tunes("Number of the teacher's layer, from 0, for each of the student's.", _LAYERS)
    ] = None
    other_module_name: Annotated[tuple[str, ...] | None, tunes("Names of other modules that are copied.", _LAYERS)] = (
        None
    )


class Compression(Section, kw_only=True):
    """Compression-aware training."""

    layer_reduction: Annotated[LayerReduction, tunes("Fewer layers.", _LAYERS)] = LayerReduction()
    weight_quantization: Annotated[WeightTechnique, tunes("Fewer bits for weights.", _C)] = WeightTechnique()
    activation_quantization: Annotated[ActivationTechnique, tunes("Fewer bits for activations.", _C)] = (
        ActivationTechnique()
    )
    sparse_pruning: Annotated[SparseTechnique, tunes("Single weights go.", _P)] = SparseTechnique()
    row_pruning: Annotated[RowTechnique, tunes("Rows go.", _P)] = RowTechnique()
    head_pruning: Annotated[HeadTechnique, tunes("Attention heads go.", _P)] = HeadTechnique()
    channel_pruning: Annotated[ChannelTechnique, tunes("Channels go.", _CHANNELS)] = ChannelTechnique()

    @property
    def quantizes(self) -> bool:
        """Whether weights or activations are quantized."""
        techniques = (self.weight_quantization, self.activation_quantization)
        return any(technique.shared_parameters.enabled for technique in techniques)

    @property
    def is_enabled(self) -> bool:
        """Whether a technique that changes layers is enabled."""
        return self.quantizes or self.prunes

    @property
    def prunes(self) -> bool:
        """Whether single weights, rows or heads are pruned."""
        techniques = (self.sparse_pruning, self.row_pruning, self.head_pruning)
        return any(technique.shared_parameters.enabled for technique in techniques)


def n_of_m(block_pattern: str) -> tuple[int, int] | None:
    """(n, m) of a pattern "n:m" with 0 < n < m; None for any other pattern."""
    found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", block_pattern)
    pair = (int(found[1]), int(found[2])) if found else (0, 0)
    return pair if 0 < pair[0] < pair[1] else None


def compression_conflicts(section: Compression) -> Iterator[tuple[str, str, str]]:
    """(where, what, fix) of each value of an enabled technique that is not built."""
    path = "compression_training.weight_quantization"
    weights, activations = section.weight_quantization, section.activation_quantization
    if weights.shared_parameters.enabled:
        if not weights.shared_parameters.quantize_weight_in_forward:
            yield (
                f"{path}.shared_parameters.quantize_weight_in_forward",
                "is false: the optimizer's step would quantize the weights (MoQ), which is not built",
                "set it to true",
            )
        if weights.shared_parameters.fp16_mixed_quantize.enabled:
            yield (
                f"{path}.shared_parameters.fp16_mixed_quantize.enabled",
                "is true: MoQ is not built",
                "set it to false",
            )
        bits = {name: group.params.target_bits for name, group in weights.different_groups.items()}
        yield from _group_conflicts(f"{path}.different_groups", bits, "target_bits")
    if activations.shared_parameters.enabled:
        bits = {name: group.params.bits for name, group in activations.different_groups.items()}
        yield from _group_conflicts("compression_training.activation_quantization.different_groups", bits, "bits")
    for key in ("sparse_pruning", "row_pruning", "head_pruning"):
        technique = getattr(section, key)
        if technique.shared_parameters.enabled:
            yield from _pruning_conflicts(f"compression_training.{key}", technique)


def _group_conflicts(path: str, bits_of: dict[str, int | None], key: str) -> Iterator[tuple[str, str, str]]:
    if not bits_of:
        yield _no_group(path, key, 8)
    for name, bits in bits_of.items():
        if bits not in (4, 8):
            what = "is missing" if bits is None else f"is {bits}: these bits are not built"
            yield f"{path}.{name}.params.{key}", what, "write 8 or 4"


def _no_group(path: str, key: str, value: float) -> tuple[str, str, str]:
    example = f'{{"all": {{"params": {{"{key}": {value}}}, "modules": ["*"]}}}}'
    return path, "is empty, and the technique is enabled", f"name the modules: {example}"


def _pruning_conflicts(path: str, technique: Any) -> Iterator[tuple[str, str, str]]:
    shared, pattern = technique.shared_parameters, None
    if isinstance(shared, SparseShared):
        pattern = n_of_m(shared.block_pattern)
        yield from _sparse_conflicts(f"{path}.shared_parameters", shared)
    elif isinstance(shared, HeadShared) and shared.num_heads is None:
        yield f"{path}.shared_parameters.num_heads", "is missing", "write the number of heads of each attention"
    if not technique.different_groups:
        yield _no_group(f"{path}.different_groups", "dense_ratio", 0.5)
    for name, group in technique.different_groups.items():
        where, ratio = f"{path}.different_groups.{name}", group.params.dense_ratio
        if pattern is not None:
            density = pattern[0] / pattern[1]
            if ratio not in (None, density):
                what = f"is {ratio}, and block_pattern {shared.block_pattern} keeps {density}"
                yield f"{where}.params.dense_ratio", what, f"write {density}, or leave it out"
        elif ratio is None or not 0 < ratio < 1:
            what = "is missing" if ratio is None else f"is {ratio}: nothing would be left, or nothing pruned"
            yield f"{where}.params.dense_ratio", what, "write a number between 0 and 1, the part that is kept"
        yield from _related_conflicts(f"{where}.related_modules", group, isinstance(shared, SparseShared))


def _sparse_conflicts(path: str, shared: SparseShared) -> Iterator[tuple[str, str, str]]:
    if shared.method == "snip_momentum":
        yield f"{path}.method", "is snip_momentum, which is not built", "write l1 or topk"
    # DeepSpeed's default, which it ignores for l1 and topk.
    if shared.block_pattern != "4x1" and n_of_m(shared.block_pattern) is None:
        what = f"is {shared.block_pattern}: this pattern is not built"
        yield f"{path}.block_pattern", what, 'write "2:4", or leave it out to prune single weights'
    end = shared.schedule_offset_end
    if shared.gradual and end is None:
        yield f"{path}.schedule_offset_end", "is missing, and gradual is true", "write the step of the last pruning"
    if shared.gradual and end is not None and end < shared.schedule_offset:
        what = f"is {end}, before schedule_offset {shared.schedule_offset}"
        yield f"{path}.schedule_offset_end", what, "set it to schedule_offset or more"


def _related_conflicts(path: str, group: _GroupSection, is_sparse: bool) -> Iterator[tuple[str, str, str]]:
    related = group.related_modules
    if related is None:
        return
    if is_sparse:
        yield path, "is given, and single weights have no related modules", "remove it"
    elif not all(isinstance(words, (list, tuple)) and all(isinstance(w, str) for w in words) for words in related):
        yield path, "is no list of lists of patterns", 'write one list for each pattern of modules: [["query", "key"]]'
    elif len(related) != len(group.modules):
        what = f"has {len(related)} lists, and modules has {len(group.modules)} patterns"
        yield path, what, "write one list for each pattern of modules"
