"""Sections tensor_parallel, expert_parallel, pipeline, inference and hybrid_engine: how the model is cut.

Also the section comm: the transport between ranks.
"""

from typing import Annotated, Any, Literal

from .keys import DType, NonNeg, NonNegFloat, Positive, Section, acts, asks, inherent, tunes

__all__ = ["Comm", "ExpertParallel", "HybridEngine", "Inference", "LocalTransport", "Pipeline", "TensorParallel"]

LocalTransport = Literal["auto", "shm", "off"]
"""The key ``comm.local``: whether ranks of one host share memory."""

_TP = "tensor_parallel"
_TP_VARIANTS = "tensor_parallel_variants"
_EP = "expert_parallel"


class Comm(Section, kw_only=True):
    """Transport between ranks."""

    local: Annotated[
        LocalTransport,
        acts(
            "CPU tensors among the ranks of a group that share a host. auto: through shared memory where the group's"
            " backend for the CPU is gloo and all its ranks can map one another's memory; where they are on several"
            " hosts, through shared memory inside each and over gloo between; else over gloo. shm: an error where not"
            " all share memory; off: never.",
            auto="value",
        ),
    ] = "auto"
    zero_copy_gather: Annotated[
        bool,
        acts(
            "At stage 3, ranks that share memory keep one copy of the sharded weights there, each rank its own slices,"
            " and read them where they lie: a gather neither copies nor sends, and ranks wait for one another before"
            " and after weights are written. Where weights lie on an accelerator or are offloaded, or ranks share no"
            " memory, gathers stay as they are, and the log says why."
        ),
    ] = False


class CutLayers(Section, kw_only=True):
    """One rule that says how matching parameters are cut."""

    patterns: Annotated[tuple[str, ...], tunes("Regular expressions of parameter names.", _TP)] = ()
    partition_type: Annotated[Literal["row", "column", "skip"], tunes("How the matrix is cut.", _TP)] = "column"
    gather_output: Annotated[bool, tunes("Replicate the output.", _TP)] = False
    grad_allreduce: Annotated[bool, tunes("Sum the gradient over the group.", _TP)] = False
    shape: Annotated[tuple[Any, ...] | None, tunes("Shape in terms of sub-parameters.", _TP)] = None
    partition_dim: Annotated[int | None, tunes("Dimension that is cut.", _TP)] = None
    model_types: Annotated[tuple[str, ...] | None, tunes("Model types the rule is for.", _TP)] = None


class PartitionConfig(Section, kw_only=True):
    """Custom rules for tensor parallelism."""

    use_default_specs: Annotated[bool, tunes("Add the built-in rules.", _TP)] = True
    layer_specs: Annotated[tuple[CutLayers, ...], tunes("The rules, first match wins.", _TP)] = ()
    tp_size: Annotated[Positive, tunes("Ranks of the group.", _TP)] = 1
    embedding_partition_dim: Annotated[int, asks("Dimension that embeddings are cut in.", _TP_VARIANTS)] = 1
    lm_head_patterns: Annotated[tuple[str, ...], tunes("Names of output layers.", _TP_VARIANTS)] = (
        "lm_head",
        "embed_out",
    )
    strict_mode: Annotated[bool, tunes("A parameter without a rule is an error.", _TP)] = False


class TpGroup(Section, kw_only=True):
    """The tensor-parallel group."""

    tp_size: Annotated[Positive, asks("Ranks of the group.", _TP)] = 1
    tp_grain_size: Annotated[
        Positive, tunes("Columns that stay together where a matrix is cut, such as those of a head.", _TP)
    ] = 1


class TensorParallel(Section, kw_only=True):
    """Tensor parallelism without changes to the model."""

    autotp_size: Annotated[NonNeg, asks("Ranks of the group; 0 for none.", _TP, off=(1,))] = 0
    preset_model: Annotated[str | None, tunes("Built-in rules of a model family.", _TP)] = None
    tp_overlap_comm: Annotated[
        bool,
        tunes(
            "Collectives travel while something is computed: sums of input gradients under the weights' products, and"
            " where the policy says how, halves of a batch in turn.",
            _TP,
        ),
    ] = False
    sequence_parallel_norms: Annotated[
        bool,
        tunes("Norms, dropout and residuals see 1/tp of the tokens; for families whose policy says where.", _TP),
    ] = False
    vocab_parallel_lm_head: Annotated[
        bool | None,
        asks(
            "Cut the output layer over the vocabulary. The policies of model families always do where labels are given;"
            " true: a model whose layer cannot be cut is an error; false asks for a whole one.",
            _TP_VARIANTS,
            off=(True,),
        ),
    ] = None
    vocab_parallel_ce_backend: Annotated[
        Literal["torch", "liger"], asks("Cross-entropy over a cut vocabulary; torch: ours.", _TP_VARIANTS)
    ] = "torch"
    partition_config: Annotated[PartitionConfig | None, tunes("Custom rules.", _TP)] = None
    tp: Annotated[TpGroup, tunes("The group.", _TP)] = TpGroup()
    dtype: Annotated[DType | Literal["int8"], tunes("Format of the model.", _TP)] = "fp16"
    keep_module_on_host: Annotated[bool, asks("Keep the loaded module in host memory.", _TP_VARIANTS)] = False
    replace_with_kernel_inject: Annotated[
        bool,
        acts(
            "Norms, activations, gated networks and rotary positions run the operators of deepspeed_c.ops.nn, at any"
            " size of the group. What keeps its own forward is listed, with strict_mode it is an error."
        ),
    ] = False


class InferenceTp(Section, kw_only=True):
    """The tensor-parallel group of generation."""

    tp_size: Annotated[Positive, asks("Ranks of the group.", "inference")] = 1


class Inference(Section, kw_only=True):
    """The keys of an inference section that Hugging Face reads."""

    enable_cuda_graph: Annotated[bool, asks("Capture generation in CUDA graphs.", "inference")] = False
    tensor_parallel: Annotated[InferenceTp, tunes("The group.", "inference")] = InferenceTp()


class HybridEngine(Section, kw_only=True):
    """One engine that trains and generates."""

    enabled: Annotated[bool, asks("Switch of the section.", "hybrid_engine")] = False
    max_out_tokens: Annotated[
        Positive,
        tunes(
            "Most tokens of a prompt and its new tokens together; more is an error. The cache grows as they are made.",
            "hybrid_engine",
        ),
    ] = 512
    inference_tp_size: Annotated[
        Positive,
        tunes(
            "Neighbouring ranks that generate together: each computes a part of the layers, for the prompts of all.",
            "hybrid_engine",
        ),
    ] = 1
    release_inference_cache: Annotated[
        bool, inherent("Free the cache after generation.", "a cache is one generate's own, and is freed with it")
    ] = False
    pin_parameters: Annotated[
        bool,
        inherent(
            "Gather all weights once for all tokens.",
            "they are, at stage 3 if stage3_max_live_parameters has room for them",
        ),
    ] = True
    tp_gather_partition_size: Annotated[
        Positive,
        tunes("Gather units that are whole together while inference_tp_size reads parts of shards.", "hybrid_engine"),
    ] = 8
    enable_cuda_graph: Annotated[bool, asks("Capture generation in CUDA graphs.", "graph_harvesting")] = False


class Pipeline(Section, kw_only=True):
    """Pipeline parallelism: how a PipelineModule runs. The section has no effect on other models."""

    schedule: Annotated[
        str | None,
        acts(
            "Schedule of a PipelineModule; by default the one that it was built with. auto: the fastest in a simulation"
            " of those that fit the module's stages. `deepspeed_c pipe show` draws a schedule.",
            auto="value",
        ),
    ] = None
    activation_bytes_limit: Annotated[
        Positive | None,
        acts(
            "Bytes of activations that a rank may hold, as one forward of the first micro-batch measures them. A schedule"
            " that holds more is an error before training, and schedule auto takes the fastest that fits."
        ),
    ] = None
    virtual_stages: Annotated[Positive | None, acts("Stages a rank; has to be what the PipelineModule has.")] = None
    stages: Annotated[
        Literal["auto"] | Positive,
        acts("Ranks along the pipeline; has to be what the PipelineModule has.", auto="value"),
    ] = "auto"
    partition: Annotated[str, inherent("How layers are dealt out.", "PipelineModule(partition_method=...) says it")] = (
        "best"
    )
    seed_layers: Annotated[
        bool, inherent("Seed each layer by its number.", "PipelineModule(seed_layers=...) says it")
    ] = False
    activation_checkpoint_interval: Annotated[
        NonNeg, acts("Layers that are recomputed together; 0: as the PipelineModule.")
    ] = 0
    pipe_partitioned: Annotated[
        bool, inherent("Cut activations over model-parallel ranks.", "they go whole from stage to stage")
    ] = True
    grad_partitioned: Annotated[
        bool, inherent("Cut gradients over model-parallel ranks.", "they go whole from stage to stage")
    ] = True
    use_reentrant: Annotated[
        bool,
        inherent("Reentrant activation checkpointing.", "recomputation is of the other kind, with the same results"),
    ] = True


_MODELS_ROUTER = "the model's own router decides, by the rules of its family"
_ROWS = "exactly the rows of each expert are sent, multiplied and added up"


class ExpertParallel(Section, kw_only=True):
    """Experts of a model's own mixtures over ranks, without changes to the model."""

    enabled: Annotated[bool, asks("Spread the experts of the model's mixtures over ranks.", _EP)] = False
    autoep_size: Annotated[Positive, tunes("Ranks that hold the experts of a layer together.", _EP)] = 1
    expert_tensor_parallel_size: Annotated[
        Positive, tunes("Ranks that share one expert; other values than 1 are refused.", _EP)
    ] = 1
    validate_folding_routing: Annotated[
        bool, tunes("Compare the choices of tensor-parallel ranks in each forward.", _EP)
    ] = False
    preset_model: Annotated[
        str | None, tunes("The model's family (`model_type`); another one than the model's is an error.", _EP)
    ] = None
    use_grouped_mm: Annotated[bool, inherent("Grouped matrix product.", _ROWS)] = True
    disable_triton_grouped_mm: Annotated[bool, inherent("Never use the Triton kernel.", "there is none")] = False
    combine_impl: Annotated[
        Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"],
        inherent("How outputs are combined.", "a kernel adds a token's rows up in fp32", auto="value"),
    ] = "auto"
    async_split_plan: Annotated[
        bool, inherent("Exchange sizes while something is computed.", "rows are gathered by size first")
    ] = False
    row_weighting_impl: Annotated[
        Literal["auto", "eager", "fused"],
        inherent("How rows are weighted.", "in the pass that adds them up", auto="value"),
    ] = "auto"
    gate_up_impl: Annotated[
        Literal["separate", "fused"],
        inherent("Gate and up products: two, or one.", "as the model stores them: one for a joined stack"),
    ] = "separate"
    comm_backend: Annotated[
        Literal["comm", "deepep"], inherent("Transport of tokens.", "the transport of the ranks' group is used")
    ] = "comm"
    comm_num_sm: Annotated[Positive, inherent("Multiprocessors for DeepEP.", "DeepEP is not used")] = 12
    comm_qp_margin: Annotated[NonNeg, inherent("Spare queue pairs of DeepEP.", "DeepEP is not used")] = 4
    comm_max_tokens_per_rank: Annotated[
        NonNeg, inherent("Most tokens a rank sends by DeepEP.", "buffers have the size of the rows")
    ] = 0
    expert_activation: Annotated[
        str | None, tunes("Function of torch.nn.functional, for experts without an `act_fn`.", _EP)
    ] = None
    moe_layer_pattern: Annotated[
        str | None, tunes("Regular expression of whole names of MoE modules that no rule knows.", _EP)
    ] = None
    router_pattern: Annotated[str | None, tunes("Name of the router in a MoE module.", _EP)] = None
    expert_pattern: Annotated[
        str | None, tunes("Name of the experts in a module that moe_layer_pattern names (`experts`).", _EP)
    ] = None
    score_func: Annotated[
        Literal["auto", "softmax", "sigmoid"], inherent("Router scores.", _MODELS_ROUTER, auto="value")
    ] = "auto"
    score_apply: Annotated[
        Literal["auto", "pre", "post"],
        inherent("Scores applied before or after the experts.", "after them, as the families do", auto="value"),
    ] = "auto"
    route_norm: Annotated[bool | None, inherent("Normalise the chosen scores.", _MODELS_ROUTER)] = None
    route_scale: Annotated[float, inherent("Factor on the scores.", _MODELS_ROUTER)] = 1.0
    top_k: Annotated[Literal["auto"] | Positive, inherent("Experts per token.", _MODELS_ROUTER, auto="value")] = "auto"
    routed_scaling_factor: Annotated[
        float | Literal["auto"], inherent("Factor on the output.", _MODELS_ROUTER, auto="value")
    ] = "auto"
    num_expert_groups: Annotated[Positive | None, inherent("Groups of experts.", _MODELS_ROUTER)] = None
    num_limited_groups: Annotated[Positive | None, inherent("Groups a token may use.", _MODELS_ROUTER)] = None
    load_balance_coeff: Annotated[
        NonNegFloat | None,
        tunes("Step of the routers' correction biases towards an even load, after each optimizer step.", _EP),
    ] = None
    expert_w1: Annotated[str | None, tunes("Name of the gate's stack; of gate and up without expert_w3.", _EP)] = None
    expert_w2: Annotated[str | None, tunes("Name of the down stack.", _EP)] = None
    expert_w3: Annotated[str | None, tunes("Name of the up stack.", _EP)] = None
    num_experts_attr: Annotated[
        str | None, tunes("Attribute of the module of experts: their number (`num_experts`).", _EP)
    ] = None
    top_k_attr: Annotated[str | None, inherent("Model attribute: experts per token.", _MODELS_ROUTER)] = None
    has_shared_experts: Annotated[
        bool | None, inherent("Shared experts exist.", "they run where the model has them")
    ] = None
    shared_experts_pattern: Annotated[
        str | None, inherent("Name of the shared child.", "shared experts run where the model has them")
    ] = None
    shared_experts_gate_pattern: Annotated[
        str | None, inherent("Name of the shared gate.", "shared experts run where the model has them")
    ] = None
