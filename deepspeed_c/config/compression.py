"""Section compression_training: quantization, pruning and layer reduction during training."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from .keys import Fraction, FrozenDict, NonNeg, Positive, Section, asks, inherent, tunes

__all__ = ["Compression", "compression_conflicts"]

_C, _P = "compression", "pruning"
_MOQ = "bits that shrink over the steps (MoQ) are not built; quantize_weight_in_forward quantizes to target_bits at once"
Scale = Literal["symmetric", "asymmetric"]
OpenFraction = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class _GroupSection(Section, kw_only=True):
    """Modules that get the same treatment."""

    modules: Annotated[
        tuple[str, ...],
        tunes("Regular expressions that are searched in the modules' names; * for all.", _C, one_or_many=True),
    ] = ("*",)
    related_modules: Annotated[tuple[Any, ...] | None, tunes("Modules that are pruned along with them.", _P)] = None


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
    range_calibration: Annotated[Literal["dynamic", "static"], tunes("Range of each row, or a running range of all rows.", _C)] = "dynamic"


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
    schedule_offset: Annotated[NonNeg, tunes("Step at which it starts.", _P)] = 1000


class PruneGroupParams(Section, kw_only=True):
    """Density of a group."""

    dense_ratio: Annotated[Fraction | None, tunes("Part of the weights that is kept.", _P)] = None


class PruneGroup(_GroupSection, kw_only=True):
    """One group of a pruning technique."""

    params: Annotated[PruneGroupParams, tunes("Its numbers.", _P)] = PruneGroupParams()


class SparseShared(_Shared, kw_only=True):
    """Sparse pruning: all groups."""

    schedule_offset_end: Annotated[NonNeg | None, tunes("Step at which it ends; null: where it starts.", _P)] = None
    schedule_offset_stride: Annotated[Positive, tunes("Steps between prunings.", _P)] = 1
    method: Annotated[Literal["l1", "topk", "snip_momentum"], tunes("What is pruned.", _P)] = "l1"
    block_pattern: Annotated[str, tunes("Shape that is pruned together.", _P)] = "4x1"
    dense_ratio: Annotated[OpenFraction, tunes("Part of the weights that is kept.", _P)] = 0.1
    excluded_modules: Annotated[tuple[str, ...], tunes("Modules that are left alone.", _P)] = ()


class SparseTechnique(Section, kw_only=True):
    """Sparse pruning."""

    shared_parameters: Annotated[SparseShared, tunes("What holds for all groups.", _P)] = SparseShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _P)] = FrozenDict()


class PruneShared(_Shared, kw_only=True):
    """Row and channel pruning: all groups."""

    method: Annotated[Literal["l1", "topk"], tunes("What is pruned.", _P)] = "l1"


class PruneTechnique(Section, kw_only=True):
    """Row or channel pruning."""

    shared_parameters: Annotated[PruneShared, tunes("What holds for all groups.", _P)] = PruneShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _P)] = FrozenDict()


class HeadShared(_Shared, kw_only=True):
    """Head pruning: all groups."""

    method: Annotated[Literal["l1", "topk"], tunes("What is pruned.", _P)] = "topk"
    num_heads: Annotated[Positive | None, tunes("Heads of the model.", _P)] = None


class HeadTechnique(Section, kw_only=True):
    """Head pruning."""

    shared_parameters: Annotated[HeadShared, tunes("What holds for all groups.", _P)] = HeadShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _P)] = FrozenDict()


class LayerReduction(Section, kw_only=True):
    """A student made of some of the teacher's layers."""

    enabled: Annotated[bool, asks("Switch of the technique.", _P)] = False
    keep_number_layer: Annotated[Positive | None, tunes("Layers of the student.", _P)] = None
    module_name_prefix: Annotated[str | None, tunes("Name of the layers.", _P)] = None
    teacher_layer: Annotated[tuple[NonNeg, ...] | None, tunes("Which layers are taken.", _P)] = None
    other_module_name: Annotated[tuple[str, ...] | None, tunes("Other modules that are taken.", _P)] = None


class Compression(Section, kw_only=True):
    """Compression-aware training."""

    layer_reduction: Annotated[LayerReduction, tunes("Fewer layers.", _P)] = LayerReduction()
    weight_quantization: Annotated[WeightTechnique, tunes("Fewer bits for weights.", _C)] = WeightTechnique()
    activation_quantization: Annotated[ActivationTechnique, tunes("Fewer bits for activations.", _C)] = (
        ActivationTechnique()
    )
    sparse_pruning: Annotated[SparseTechnique, tunes("Single weights go.", _P)] = SparseTechnique()
    row_pruning: Annotated[PruneTechnique, tunes("Rows go.", _P)] = PruneTechnique()
    head_pruning: Annotated[HeadTechnique, tunes("Attention heads go.", _P)] = HeadTechnique()
    channel_pruning: Annotated[PruneTechnique, tunes("Channels go.", _P)] = PruneTechnique()

    @property
    def quantizes(self) -> bool:
        """Whether weights or activations are quantized."""
        techniques = (self.weight_quantization, self.activation_quantization)
        return any(technique.shared_parameters.enabled for technique in techniques)


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
            yield f"{path}.shared_parameters.fp16_mixed_quantize.enabled", "is true: MoQ is not built", "set it to false"
        bits = {name: group.params.target_bits for name, group in weights.different_groups.items()}
        yield from _group_conflicts(f"{path}.different_groups", bits, "target_bits")
    if activations.shared_parameters.enabled:
        bits = {name: group.params.bits for name, group in activations.different_groups.items()}
        yield from _group_conflicts("compression_training.activation_quantization.different_groups", bits, "bits")


def _group_conflicts(path: str, bits_of: dict[str, int | None], key: str) -> Iterator[tuple[str, str, str]]:
    if not bits_of:
        example = f'{{"all": {{"params": {{"{key}": 8}}, "modules": ["*"]}}}}'
        yield path, "is empty, and the technique is enabled", f"name the modules: {example}"
    for name, bits in bits_of.items():
        if bits not in (4, 8):
            what = "is missing" if bits is None else f"is {bits}: these bits are not built"
            yield f"{path}.{name}.params.{key}", what, "write 8 or 4"
