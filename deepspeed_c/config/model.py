"""Sections sparse_attention, progressive_layer_drop, eigenvalue, quantize_training and weight_quantization."""

from typing import Annotated, Literal

from .keys import FrozenDict, NonNeg, NonNegFloat, Positive, Section, asks, tunes

__all__ = ["Eigenvalue", "LayerDrop", "QuantizeTraining", "SparseAttention", "WeightQuantization"]

_SA = "sparse_attention"
_EV = "eigenvalue"
_WQ = "inference_quantization"


class SparseAttention(Section, kw_only=True):
    """Block-sparse attention patterns."""

    mode: Annotated[Literal["dense", "fixed", "variable", "bigbird", "bslongformer"], tunes("The pattern.", _SA)] = (
        "fixed"
    )
    block: Annotated[Positive, tunes("Edge of a block, in tokens.", _SA)] = 16
    different_layout_per_head: Annotated[bool, tunes("A layout of its own for each head.", _SA)] = False
    num_local_blocks: Annotated[NonNeg, tunes("Blocks of the local window.", _SA)] = 4
    num_global_blocks: Annotated[NonNeg, tunes("Blocks that all attend to.", _SA)] = 1
    attention: Annotated[Literal["unidirectional", "bidirectional"], tunes("Direction.", _SA)] = "bidirectional"
    horizontal_global_attention: Annotated[bool, tunes("Global blocks attend to all.", _SA)] = False
    num_different_global_patterns: Annotated[Positive, tunes("Different global patterns.", _SA)] = 1
    num_random_blocks: Annotated[NonNeg, tunes("Random blocks per row.", _SA)] = 0
    local_window_blocks: Annotated[tuple[NonNeg, ...], tunes("Blocks of each window.", _SA)] = (4,)
    global_block_indices: Annotated[tuple[NonNeg, ...], tunes("Global blocks: first.", _SA)] = (0,)
    global_block_end_indices: Annotated[tuple[NonNeg, ...] | None, tunes("Global blocks: past the last.", _SA)] = None
    num_sliding_window_blocks: Annotated[NonNeg, tunes("Blocks of the sliding window.", _SA)] = 3


class LayerDrop(Section, kw_only=True):
    """Drop layers more and more often during training (arXiv 2010.13369)."""

    enabled: Annotated[bool, asks("Switch of the section.", "progressive_layer_drop")] = False
    theta: Annotated[NonNegFloat, tunes("Limit of the keep probability.", "progressive_layer_drop")] = 1.0
    gamma: Annotated[NonNegFloat, tunes("Speed of the schedule.", "progressive_layer_drop")] = 0.001


class Eigenvalue(Section, kw_only=True):
    """Power iteration that estimates the curvature of the loss for each block."""

    enabled: Annotated[bool, asks("Switch of the section.", _EV)] = False
    verbose: Annotated[bool, tunes("Report.", _EV)] = False
    max_iter: Annotated[Positive, tunes("Most iterations.", _EV)] = 100
    tol: Annotated[NonNegFloat, tunes("Relative change that stops them.", _EV)] = 1e-2
    stability: Annotated[NonNegFloat, tunes("Added to denominators.", _EV)] = 1e-6
    gas_boundary_resolution: Annotated[Positive, tunes("Optimizer steps between estimates.", _EV)] = 1
    layer_name: Annotated[str, tunes("Name of the blocks.", _EV)] = "bert.encoder.layer"
    layer_num: Annotated[NonNeg, tunes("Number of blocks.", _EV)] = 0


class QuantizeTraining(Section, kw_only=True):
    """The old section of quantization during training; only its eigenvalue part is read."""

    eigenvalue: Annotated[Eigenvalue, tunes("As the section of that name.", _EV)] = Eigenvalue()


class WeightQuantization(Section, kw_only=True):
    """Quantized weights for inference with sharded parameters."""

    enabled: Annotated[bool, tunes("Switch of the section.", _WQ)] = True
    quantized_initialization: Annotated[FrozenDict, tunes("Quantize while parameters are made.", _WQ)] = FrozenDict()
    post_init_quant: Annotated[FrozenDict, tunes("Quantize after parameters are made, by module.", _WQ)] = FrozenDict()
    num_bits: Annotated[Positive, tunes("Bits of a weight.", _WQ)] = 8
    q_type: Annotated[Literal["symmetric", "asymmetric"], tunes("Kind of scale.", _WQ)] = "symmetric"
    q_groups: Annotated[Positive, tunes("Blocks of a weight.", _WQ)] = 1
