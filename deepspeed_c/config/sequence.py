"""Section sequence_parallel: the work of ranks that hold parts of one sequence."""

from typing import Annotated, Literal

from .keys import Section, acts

__all__ = ["SequenceParallel"]


class SequenceParallel(Section, kw_only=True):
    """Sequences that are cut over ranks. ``sequence_parallel_size``, an mpu or a mesh gives the number of ranks."""

    attention: Annotated[
        Literal["auto", "ulysses", "ring", "hybrid"],
        acts(
            "How attention in models of transformers sees whole sequences. ulysses: ranks exchange tokens for heads, and"
            " each computes some heads over all tokens. ring: keys and values travel from rank to rank. hybrid: ranks of a"
            " host exchange heads, and keys travel between such rows. auto: ulysses where there are as many heads as"
            " ranks, else hybrid.",
            auto="value",
        ),
    ] = "auto"
    order: Annotated[
        Literal["auto", "contiguous", "zigzag"],
        acts(
            "Which tokens a rank holds: a run of them, or one from each end, which gives all ranks of a ring the same work."
            " auto: zigzag in a ring, else contiguous.",
            auto="value",
        ),
    ] = "auto"
    loss: Annotated[
        Literal["auto", "mean", "part", "whole"],
        acts(
            "What a rank's loss is of that of its sequences; gradients are summed over their ranks. mean: the mean over"
            " its own valid tokens (labels other than -100), to be weighted by their number. part: its term of the sum"
            " already. whole: that of whole sequences, by a gather whose backward adds up what all ranks ask for, to be"
            " counted once. auto: mean where it is the model's own loss, of shift_labels or labels; whole where a"
            " collective of torch.distributed.nn or of torch's functional ones lies between the loss and the model; part,"
            " without a doubt, behind vocab_sequence_parallel_cross_entropy and FPDT_LogitsLoss; else part, with a"
            " warning. In the first step ranks compare losses that auto has judged.",
            auto="value",
        ),
    ] = "auto"
    tiles: Annotated[
        Literal["auto", "off"],
        acts(
            "auto: MLPs, and the causal loss of transformers' models, run over some tokens at a time, so that"
            " neither their activations nor the logits of a whole sequence exist.",
            auto="value",
        ),
    ] = "off"
    offload_activations: Annotated[
        bool,
        acts(
            "Inputs of recomputed layers wait for the backward in host memory, or in a file where"
            " activation_checkpointing.offload has the device nvme."
        ),
    ] = False
