"""Old and second names of keys that DeepSpeed 0.19.6 still reads, and the key that each one means."""

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["NAMES_ELSEWHERE", "OLD_KEYS", "REMOVED_UPSTREAM", "OldKey", "stage_from_switch"]


class OldKey(NamedTuple):
    """An old path of a key, and the path that is read in its place."""

    old: str
    new: str | None
    """None: the key is read and dropped, because nothing depends on it."""
    convert: Callable[[Any], Any] | None = None
    """Turns the old value into the new one; None keeps it."""


def _device(value: Any) -> Any:
    # Other values stay as they are: the check of the new key accepts or refuses them.
    if value in (True, "true", "True", 1):
        return {"device": "cpu"}
    return {"device": "none"} if value in (False, "false", "False", 0, None) else value


_ZERO = "zero_optimization."

# The order matters: an entry may add to a value that an earlier entry fills.
OLD_KEYS: tuple[OldKey, ...] = (
    OldKey("bfloat16", "bf16"),
    OldKey("pld", "progressive_layer_drop"),
    OldKey("use_node_local_storage", "checkpoint.use_node_local_storage"),
    OldKey("allgather_size", _ZERO + "allgather_bucket_size"),
    OldKey(_ZERO + "cpu_offload", _ZERO + "offload_optimizer", _device),
    OldKey(_ZERO + "cpu_offload_param", _ZERO + "offload_param", _device),
    OldKey(_ZERO + "cpu_offload_use_pin_memory", None),
    OldKey(_ZERO + "stage3_gather_fp16_weights_on_model_save", _ZERO + "stage3_gather_16bit_weights_on_model_save"),
    *(
        OldKey(_ZERO + name, _ZERO + "stage3_" + name)
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    ),
    OldKey("aio.thread_count", "aio.intra_op_parallelism"),
    OldKey("tensor_parallel.tensor_parallel", "tensor_parallel.tp"),
    OldKey("tensor_parallel.kernel_inject", "tensor_parallel.replace_with_kernel_inject"),
    OldKey("elasticity.prefer_large_batch", "elasticity.prefer_larger_batch"),
    OldKey("nebula.load_path", "nebula.nebula_load_path"),
)


# Keys of DeepSpeed 0.19.6 that 0.19.8 refuses or no longer reads. They are read here as before.
REMOVED_UPSTREAM: frozenset[str] = frozenset(
    {
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
        _ZERO + "mics_hierarchical_params_gather",
        _ZERO + "mics_shard_size",
        _ZERO + "zeropp_loco_param",
    }
)

# Keys of other tools that mean the same as a key here under another name.
NAMES_ELSEWHERE: dict[str, str] = {
    "max_grad_norm": "gradient_clipping",
    "max_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "zero_stage": "zero_optimization.stage",
    "zero1": "zero_optimization.stage",
    "zero2": "zero_optimization.stage",
    "zero3": "zero_optimization.stage",
    "mixed_precision": "fp16 or bf16",
    "precision": "fp16 or bf16",
    "float16": "fp16",
    "half": "fp16",
}


def stage_from_switch(value: Any) -> Any:
    """Turn a boolean, the oldest form of zero_optimization, into the section that it means."""
    return {"stage": int(value)} if isinstance(value, bool) else value
