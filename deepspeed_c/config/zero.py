"""Section zero_optimization: sharding over the data-parallel ranks, and the transfer of shards."""

import sys
from typing import Annotated, Literal

import msgspec

from .keys import NonNeg, Positive, Section, acts, asks, inherent, tunes
from .offload import OffloadOptimizer, OffloadParam, ZenFlow
from .stages import STAGES, Sharding

__all__ = ["LeafModule", "LoCo", "Zero"]

ShardGroup = Annotated[int, msgspec.Meta(ge=-1)]


class LeafModule(Section, kw_only=True):
    """Modules that stage 3 gathers as one piece."""

    classes: Annotated[tuple[str, ...], tunes("Class names, dotted.", "stage3", one_or_many=True)] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    names: Annotated[tuple[str, ...], tunes("Module names.", "stage3", one_or_many=True)] = ()
    name_suffixes: Annotated[tuple[str, ...], tunes("Ends of module names.", "stage3", one_or_many=True)] = ()


class LoCo(Section, kw_only=True):
    """Error feedback of quantized gradients (LoCo-ZeRO++, arXiv 2407.04480)."""

    err_beta: Annotated[float, tunes("Factor of the moving average of the error.", "quantized_collectives")] = 0.8
    reset_T: Annotated[Positive, tunes("Steps between resets of the error.", "quantized_collectives")] = 1024


class Zero(Section, kw_only=True):
    """ZeRO. Stage 0 shards nothing, stage 1 optimizer state, stage 2 also gradients, stage 3 also parameters."""

    stage: Annotated[
        Literal[0, 1, 2, 3],
        asks(
            "What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.",
            "stage3",
            off=(0, 1, 2),
            is_partial=True,
            auto="fill",
        ),
    ] = 0

    # Gradients
    reduce_scatter: Annotated[bool, acts("Reduce each gradient to the rank that owns it, rather than to all.")] = True
    reduce_bucket_size: Annotated[Positive, acts("Elements that one reduction carries.", floor=True, auto="derive")] = (
        500_000_000
    )
    overlap_comm: Annotated[
        bool | None, acts("Reduce while backward runs; null means true for stage 3 and false for the others.")
    ] = None
    contiguous_gradients: Annotated[
        bool, inherent("Copy gradients into one buffer as they appear.", "gradients always travel in flat buckets")
    ] = True
    round_robin_gradients: Annotated[
        bool,
        inherent(
            "Spread the copying of gradients evenly over ranks.", "the layout already gives every rank an equal part"
        ),
    ] = False
    use_multi_rank_bucket_allreduce: Annotated[
        bool,
        inherent(
            "Reduce the buckets of several ranks together.", "a bucket may always span the shards of several ranks"
        ),
    ] = True
    grad_hooks: Annotated[
        bool, inherent("Reduce from backward hooks (stage 1).", "stages share one implementation, driven by hooks")
    ] = True
    compute_grad_norm: Annotated[
        bool, asks("Compute the gradient norm of each step at stages 1 and 2.", "no_grad_norm")
    ] = True
    ignore_unused_parameters: Annotated[
        bool, acts("Accept parameters that get no gradient; false makes them an error that names them.")
    ] = True

    parameter_alignment: Annotated[
        bool, asks("Pad flat buffers so that each parameter begins at a multiple of 16 bytes.", "parameter_alignment")
    ] = False

    # Parameters after the step
    allgather_partitions: Annotated[bool, acts("Gather updated weights with all-gather; false uses broadcasts.")] = True
    allgather_bucket_size: Annotated[NonNeg, acts("Elements that one all-gather carries.", floor=True)] = 500_000_000

    # Checkpoints
    load_from_fp32_weights: Annotated[
        bool, acts("Restore master weights from the checkpoint's; false takes them from its 16-bit weights.")
    ] = True
    elastic_checkpoint: Annotated[
        bool, inherent("Save so that another world size can load.", "every checkpoint loads on any world size")
    ] = False
    pipeline_loading_checkpoint: Annotated[
        bool, inherent("Read shards one rank after the other.", "ranks read at once, each within a fixed buffer")
    ] = False
    legacy_stage1: Annotated[bool, asks("Use the old stage 1.", "legacy_stage1")] = False

    # Where shards live
    offload_param: Annotated[OffloadParam, acts("Where parameters live (stage 3).")] = OffloadParam()
    offload_optimizer: Annotated[OffloadOptimizer, acts("Where optimizer state lives.")] = OffloadOptimizer()
    zenflow: Annotated[ZenFlow | None, asks("Selective updates with offload.", "zenflow")] = None
    save_muon_momentum_buffer_in_memory: Annotated[bool, asks("Keep Muon's momentum off NVMe.", "muon_in_memory")] = (
        False
    )

    # Stage 3
    sub_group_size: Annotated[
        NonNeg,
        tunes(
            "Most elements of a bucket, and so of what is gathered, reduced and updated at a time.",
            "stage3",
            floor=True,
        ),
    ] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[
        NonNeg,
        tunes(
            "Elements gathered ahead of use; where it is not given, the largest bucket.",
            "stage3",
            floor=True,
            auto="derive",
        ),
    ] = 50_000_000
    stage3_param_persistence_threshold: Annotated[
        NonNeg, tunes("Parameters with fewer elements stay whole.", "stage3", floor=True, auto="derive")
    ] = 100_000
    stage3_model_persistence_threshold: Annotated[
        NonNeg, tunes("Most elements that stay whole.", "stage3", floor=True)
    ] = sys.maxsize
    stage3_max_live_parameters: Annotated[NonNeg, tunes("Most elements gathered at once.", "stage3", floor=True)] = (
        1_000_000_000
    )
    stage3_max_reuse_distance: Annotated[
        NonNeg, tunes("Keep what is used again within this many elements.", "stage3", floor=True)
    ] = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: Annotated[
        bool,
        tunes(
            "Whether callers (Hugging Face) put a whole 16-bit state dict together when they save; engine.save_16bit_model always works.",
            "stage3",
            auto="fill",
        ),
    ] = False
    stage3_module_granularity_threshold: Annotated[
        NonNeg, tunes("Gather modules finer than this (parameters per submodule) as one.", "stage3", floor=True)
    ] = 0
    stage3_use_all_reduce_for_fetch_params: Annotated[
        bool, inherent("Gather by all-reduce.", "buckets are gathered in place, which no reduction could better")
    ] = False
    stage3_allgather_sequential: Annotated[
        bool, inherent("Gather parameters one after another.", "neighbours share one gather")
    ] = False
    memory_efficient_linear: Annotated[
        bool,
        inherent(
            "A linear layer that does not keep its weight for backward.",
            "no gathered weight is kept, whatever the layer",
        ),
    ] = True
    override_module_apply: Annotated[
        bool,
        inherent(
            "Make Module.apply see whole parameters within zero.Init.",
            "parameters are whole until the outermost module has been built",
        ),
    ] = True
    log_trace_cache_warnings: Annotated[
        bool, inherent("Say when the order of use changes.", "it is counted, and planned anew")
    ] = False
    enable_sanity_checks: Annotated[bool, inherent("Extra checks.", "checks are always on")] = False
    leaf_module: Annotated[LeafModule, tunes("Modules that are gathered as one piece.", "stage3")] = LeafModule()

    # ZeRO++ and MiCS
    zero_hpz_partition_size: Annotated[
        NonNeg,
        asks(
            "Ranks that keep a second shard of the weights together, a divisor of those of a host. Between two changes of"
            " the weights all gathers but the first stay among them. 1 for none.",
            "hpz",
            off=(0, 1),
        ),
    ] = 1
    zero_quantized_weights: Annotated[bool, asks("Gather weights as int8.", "quantized_collectives")] = False
    zero_quantized_nontrainable_weights: Annotated[
        bool, asks("Keep frozen weights quantized.", "quantized_collectives")
    ] = False
    zero_quantized_gradients: Annotated[bool, asks("Reduce gradients quantized.", "quantized_collectives")] = False
    zeropp_loco_param: Annotated[
        LoCo | None, asks("Error feedback of quantized gradients.", "quantized_collectives")
    ] = None
    mics_shard_size: Annotated[
        ShardGroup, asks("Ranks that hold one copy of the shards; -1 for all.", "mics", off=(0,))
    ] = -1
    mics_hierarchical_params_gather: Annotated[
        bool,
        inherent(
            "Gather within a node, then between nodes.", "ranks on several hosts always exchange tensors in two levels"
        ),
    ] = False

    @property
    def sharding(self) -> Sharding:
        """The model states that the stage shards. Nothing else asks for its number."""
        return STAGES[self.stage]
