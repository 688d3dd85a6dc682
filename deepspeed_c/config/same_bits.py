"""Section same_bits: training whose bits do not depend on the number of ranks."""

from collections.abc import Iterator
from typing import Annotated, Any

from .keys import Positive, Section, acts

__all__ = ["SameBits", "same_bits_conflicts"]

_WHERE = "same_bits.enabled"


class SameBits(Section, kw_only=True):
    """The same losses, norms, weights and states on any number of data-parallel ranks, at every ZeRO stage."""

    enabled: Annotated[
        bool,
        acts(
            "Add gradients of grains in one binary tree, norms and losses exactly, and draw a grain's random numbers by"
            " its position in the global batch."
        ),
    ] = False
    grain: Annotated[
        Positive | None,
        acts("Samples of one forward and backward, on whatever rank; null: train_micro_batch_size_per_gpu."),
    ] = None
    threads: Annotated[
        Positive | None,
        acts("Threads of torch's operators on each rank, of which bits of products may depend; null: leave them."),
    ] = None


def same_bits_conflicts(root: Any) -> Iterator[tuple[str, str, str]]:
    """(where, what, fix) of each key of the whole configuration that same_bits excludes."""
    section = root.same_bits
    if not section.enabled:
        return
    micro = root.train_micro_batch_size_per_gpu
    if section.grain is not None and micro is not None and micro != section.grain:
        yield (
            "same_bits.grain, train_micro_batch_size_per_gpu",
            f"are {section.grain} and {micro}, and one forward sees one grain",
            "remove train_micro_batch_size_per_gpu",
        )
    # (where, whether it excludes the mode, what the key does, fix)
    excluded = (
        ("gradient_allreduce_op", root.gradient_allreduce_op != "mean", "a sum depends on the ranks", 'use "mean"'),
        ("prescale_gradients", root.prescale_gradients, "it rounds by the number of ranks", "set it to false"),
        (
            "gradient_predivide_factor",
            root.gradient_predivide_factor != 1.0,
            "the mean is taken once, after the sum",
            "set it to 1.0",
        ),
        ("sparse_gradients", root.sparse_gradients, "rows are added in the order of ranks", "set it to false"),
        (
            "dataloader_drop_last",
            root.dataloader_drop_last,
            "the samples that are left out depend on the number of ranks",
            "set it to false",
        ),
        (
            "sequence_parallel_size",
            root.sequence_parallel_size > 1,
            "ranks along it cut products and their sums",
            "set it to 1",
        ),
        (
            "tensor_parallel.autotp_size",
            root.tensor_parallel.autotp_size > 1,
            "ranks along it cut products and their sums",
            "set it to 1",
        ),
    )
    for where, is_excluded, why, fix in excluded:
        if is_excluded:
            yield where, f"does not go with {_WHERE}: {why}", f"{fix}, or set {_WHERE} to false"
    if root.data_types.grad_accum_dtype not in (None, "fp32"):
        yield (
            "data_types.grad_accum_dtype",
            f"is {root.data_types.grad_accum_dtype} with {_WHERE}, which adds gradients in fp32",
            "remove it",
        )
    params = None if root.optimizer is None else root.optimizer.params
    if params is not None and params.get("state_dtype") == "int8":
        yield (
            "optimizer.params.state_dtype",
            f"is int8 with {_WHERE}: scales belong to the blocks of a shard",
            'use "fp32" or "bf16"',
        )
