"""Section compression_training: quantization, pruning and layer reduction during training."""

from typing import Annotated, Any, Literal

import msgspec

from .keys import Fraction, FrozenDict, NonNeg, Positive, Section, asks, tunes

__all__ = ["Compression"]

_C = "compression"
Scale = Literal["symmetric", "asymmetric"]
OpenFraction = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class _Shared(Section, kw_only=True):
    """Keys that all techniques share."""

    enabled: Annotated[bool, asks("Switch of the technique.", _C)] = False
    schedule_offset: Annotated[NonNeg, tunes("Step at which it starts.", _C)] = 1000


class _GroupSection(Section, kw_only=True):
    """Modules that get the same treatment."""

    modules: Annotated[tuple[str, ...], tunes("Names of the modules; * for all.", _C, one_or_many=True)] = ("*",)
    related_modules: Annotated[tuple[Any, ...] | None, tunes("Modules that are cut along with them.", _C)] = None


class MixedQuantize(Section, kw_only=True):
    """A mix of fp16 and quantized weights that shifts over time."""

    enabled: Annotated[bool, tunes("Switch of the mix.", _C)] = False
    quantize_change_ratio: Annotated[Fraction, tunes("Shift per step.", _C)] = 0.001


class WeightShared(Section, kw_only=True):
    """Weight quantization: all groups."""

    enabled: Annotated[bool, asks("Switch of the technique.", _C)] = False
    schedule_offset: Annotated[NonNeg, tunes("Step at which it starts.", _C)] = 0
    quantizer_kernel: Annotated[bool, tunes("Use the kernel.", _C)] = False
    quantize_groups: Annotated[Positive, tunes("Blocks of a weight.", _C)] = 1
    quantize_verbose: Annotated[bool, tunes("Report.", _C)] = False
    quantization_type: Annotated[Scale, tunes("Kind of scale.", _C)] = "symmetric"
    rounding: Annotated[Literal["nearest", "stochastic"], tunes("Rounding.", _C)] = "nearest"
    quantize_weight_in_forward: Annotated[bool, tunes("Quantize in forward, not in the step.", _C)] = False
    fp16_mixed_quantize: Annotated[MixedQuantize, tunes("Mix with fp16.", _C)] = MixedQuantize()


class WeightGroupParams(Section, kw_only=True):
    """Bits of a group."""

    start_bits: Annotated[Positive | None, tunes("Bits at the start.", _C)] = None
    target_bits: Annotated[Positive | None, tunes("Bits at the end.", _C)] = None
    quantization_period: Annotated[NonNeg, tunes("Steps between bit widths; 0: none.", _C)] = 1


class WeightGroup(_GroupSection, kw_only=True):
    """One group of weight quantization."""

    params: Annotated[WeightGroupParams, tunes("Its numbers.", _C)] = WeightGroupParams()


class WeightTechnique(Section, kw_only=True):
    """Weight quantization."""

    shared_parameters: Annotated[WeightShared, tunes("What holds for all groups.", _C)] = WeightShared()
    different_groups: Annotated[dict[str, WeightGroup], tunes("The groups, by name.", _C)] = FrozenDict()


class ActivationShared(_Shared, kw_only=True):
    """Activation quantization: all groups."""

    quantization_type: Annotated[Scale, tunes("Kind of scale.", _C)] = "symmetric"
    range_calibration: Annotated[Literal["dynamic", "static"], tunes("How ranges are found.", _C)] = "dynamic"


class ActivationGroupParams(Section, kw_only=True):
    """Bits of a group."""

    bits: Annotated[Positive | None, tunes("Bits of an activation.", _C)] = None


class ActivationGroup(_GroupSection, kw_only=True):
    """One group of activation quantization."""

    params: Annotated[ActivationGroupParams, tunes("Its numbers.", _C)] = ActivationGroupParams()


class ActivationTechnique(Section, kw_only=True):
    """Activation quantization."""

    shared_parameters: Annotated[ActivationShared, tunes("What holds for all groups.", _C)] = ActivationShared()
    different_groups: Annotated[dict[str, ActivationGroup], tunes("The groups, by name.", _C)] = FrozenDict()


class PruneGroupParams(Section, kw_only=True):
    """Density of a group."""

    dense_ratio: Annotated[Fraction | None, tunes("Part of the weights that is kept.", _C)] = None


class PruneGroup(_GroupSection, kw_only=True):
    """One group of a pruning technique."""

    params: Annotated[PruneGroupParams, tunes("Its numbers.", _C)] = PruneGroupParams()


class SparseShared(_Shared, kw_only=True):
    """Sparse pruning: all groups."""

    schedule_offset_end: Annotated[NonNeg | None, tunes("Step at which it ends; null: where it starts.", _C)] = None
    schedule_offset_stride: Annotated[Positive, tunes("Steps between prunings.", _C)] = 1
    method: Annotated[Literal["l1", "topk", "snip_momentum"], tunes("What is pruned.", _C)] = "l1"
    block_pattern: Annotated[str, tunes("Shape that is pruned together.", _C)] = "4x1"
    dense_ratio: Annotated[OpenFraction, tunes("Part of the weights that is kept.", _C)] = 0.1
    excluded_modules: Annotated[tuple[str, ...], tunes("Modules that are left alone.", _C)] = ()


class SparseTechnique(Section, kw_only=True):
    """Sparse pruning."""

    shared_parameters: Annotated[SparseShared, tunes("What holds for all groups.", _C)] = SparseShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _C)] = FrozenDict()


class PruneShared(_Shared, kw_only=True):
    """Row and channel pruning: all groups."""

    method: Annotated[Literal["l1", "topk"], tunes("What is pruned.", _C)] = "l1"


class PruneTechnique(Section, kw_only=True):
    """Row or channel pruning."""

    shared_parameters: Annotated[PruneShared, tunes("What holds for all groups.", _C)] = PruneShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _C)] = FrozenDict()


class HeadShared(_Shared, kw_only=True):
    """Head pruning: all groups."""

    method: Annotated[Literal["l1", "topk"], tunes("What is pruned.", _C)] = "topk"
    num_heads: Annotated[Positive | None, tunes("Heads of the model.", _C)] = None


class HeadTechnique(Section, kw_only=True):
    """Head pruning."""

    shared_parameters: Annotated[HeadShared, tunes("What holds for all groups.", _C)] = HeadShared()
    different_groups: Annotated[dict[str, PruneGroup], tunes("The groups, by name.", _C)] = FrozenDict()


class LayerReduction(Section, kw_only=True):
    """A student made of some of the teacher's layers."""

    enabled: Annotated[bool, asks("Switch of the technique.", _C)] = False
    keep_number_layer: Annotated[Positive | None, tunes("Layers of the student.", _C)] = None
    module_name_prefix: Annotated[str | None, tunes("Name of the layers.", _C)] = None
    teacher_layer: Annotated[tuple[NonNeg, ...] | None, tunes("Which layers are taken.", _C)] = None
    other_module_name: Annotated[tuple[str, ...] | None, tunes("Other modules that are taken.", _C)] = None


class Compression(Section, kw_only=True):
    """Compression-aware training."""

    layer_reduction: Annotated[LayerReduction, tunes("Fewer layers.", _C)] = LayerReduction()
    weight_quantization: Annotated[WeightTechnique, tunes("Fewer bits for weights.", _C)] = WeightTechnique()
    activation_quantization: Annotated[ActivationTechnique, tunes("Fewer bits for activations.", _C)] = (
        ActivationTechnique()
    )
    sparse_pruning: Annotated[SparseTechnique, tunes("Single weights go.", _C)] = SparseTechnique()
    row_pruning: Annotated[PruneTechnique, tunes("Rows go.", _C)] = PruneTechnique()
    head_pruning: Annotated[HeadTechnique, tunes("Attention heads go.", _C)] = HeadTechnique()
    channel_pruning: Annotated[PruneTechnique, tunes("Channels go.", _C)] = PruneTechnique()
