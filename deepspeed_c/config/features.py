"""The features that configuration keys request or tune: whether each is built, and advice where it is not."""

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["AREAS", "FEATURES", "Feature"]


class Feature(NamedTuple):
    """One capability of the engine that configuration keys refer to."""

    title: str
    is_built: bool
    """Set this to True in the change that builds the feature. Its keys then have effect without other edits here."""
    instead: str
    """Advice to a user while the feature is missing."""
    is_on: Callable[[Any], bool] = lambda root: True
    """Whether a configuration uses the feature, once it is built. Keys that only tune an unused feature have no
    effect."""


def _later(title: str, instead: str) -> Feature:
    return Feature(title, False, instead)


_REMOVE = "remove the key, or set it to its default"

# Area of the package -> its features by key.
AREAS: dict[str, dict[str, Feature]] = {
    "ZeRO and offload": {
        "stage3": Feature(
            "ZeRO stage 3",
            True,
            'use "stage": 2 (or 0, 1): optimizer state and gradients are sharded there',
            is_on=lambda root: root.zero.sharding.parameters,
        ),
        "offload_optimizer": Feature(
            "optimizer offload",
            True,
            'set "device": "none"; stages 1 and 2 shard the state over ranks',
            is_on=lambda root: root.zero.offload_optimizer.device != "none",
        ),
        "offload_param": Feature(
            "parameter offload",
            True,
            'set "device": "none"',
            is_on=lambda root: root.zero.offload_param.device != "none",
        ),
        "nvme": Feature(
            "NVMe offload",
            True,
            _REMOVE,
            is_on=lambda root: (
                "nvme"
                in (
                    root.zero.offload_optimizer.device,
                    root.zero.offload_param.device,
                    root.activation_checkpointing.offload.device,
                )
            ),
        ),
        "partial_offload": Feature(
            "partial offload (Twin-Flow)",
            True,
            "set the ratio to 1.0",
            is_on=lambda root: root.zero.offload_optimizer.device != "none" and root.zero.offload_optimizer.ratio < 1,
        ),
        "super_offload": Feature(
            "updates ahead of the step (SuperOffload)",
            True,
            _REMOVE,
            is_on=lambda root: root.zero.offload_optimizer.super_offload,
        ),
        "gds": _later("GPUDirect Storage", "set it to false: transfers go through page-locked host memory"),
        "muon_in_memory": _later(
            "Muon's momentum in memory beside states on NVMe",
            'set it to false, or keep a part of the states in memory with "ratio"',
        ),
        "zenflow": _later("ZenFlow", "remove the section"),
        "hpz": Feature(
            "second shards for gathers within hosts (hpZ of ZeRO++)",
            True,
            "set the size to 1",
            is_on=lambda root: root.zero.zero_hpz_partition_size > 1,
        ),
        "quantized_collectives": _later("ZeRO++ quantized collectives", "set it to false"),
        "mics": Feature(
            "MiCS (shards within groups of ranks, copies between them)",
            True,
            "set mics_shard_size to -1",
            is_on=lambda root: root.zero.mics_shard_size > 0,
        ),
        "no_grad_norm": _later(
            "steps without a gradient norm", "set it to true: the norm comes with the check for inf and NaN"
        ),
        "parameter_alignment": _later(
            "parameters padded to 16 bytes in flat buffers", "set it to false: the layout has no padding"
        ),
        "legacy_stage1": _later("the old stage 1", "set it to false: stage 1 has one implementation"),
    },
    "precision": {
        "fp16_master": _later(
            "fp16 master weights (they need CPU offload)", "set it to false: master weights stay fp32"
        ),
        "amp": _later("Apex AMP", 'use "bf16", "fp16" or "torch_autocast"'),
        "msamp": _later(
            "MS-AMP, which patches classes of DeepSpeed",
            "remove the section, and convert layers by torchao (accelerate: AORecipeKwargs)",
        ),
    },
    "optimizers and schedules": {
        "onebit": _later("1-bit optimizers", 'use "Adam" or "Lamb"'),
        "mup": _later(
            "muP optimizers", "build the optimizer with the mup package and pass it to initialize(optimizer=...)"
        ),
        "closure_optimizer": _later(
            "optimizers that call the model themselves", "use one that takes gradients, such as AdamW"
        ),
        "optimizer_states_by_params": _later(
            "16-bit moments by fp32_optimizer_states", 'set it to true, and use "state_dtype": "bf16"'
        ),
        "adagrad_variants": _later(
            "Adagrad's lr_decay, initial_accumulator_value and maximize",
            "set it to its default, or pass initialize(optimizer=torch.optim.Adagrad(...))",
        ),
        "muon_variants": _later("another rule for Muon's non-matrices", "set it to its default: they take AdamW"),
        "lamb_variants": _later("LAMB's eps_inside_sqrt and amsgrad", "set it to false"),
        "torch_schedules": _later(
            "schedules of torch.optim.lr_scheduler named in the configuration",
            "pass initialize(lr_scheduler=lambda optimizer: ...) and remove the section",
        ),
    },
    "parallelism and inference": {
        "tensor_parallel": Feature(
            "tensor parallelism",
            True,
            "set the size to 0 (autotp_size) or 1 (tp_size)",
            is_on=lambda root: max(root.tensor_parallel.autotp_size, root.tensor_parallel.tp.tp_size) > 1,
        ),
        "tensor_parallel_variants": _later(
            "cuts of embeddings by dimension, whole output layers, Liger's loss, models loaded to host memory", _REMOVE
        ),
        "expert_parallel": Feature(
            "expert parallelism of a model's own mixtures (AutoEP)",
            True,
            'set "enabled": false',
            is_on=lambda root: root.expert_parallel.enabled,
        ),
        "hybrid_engine": Feature(
            "the hybrid (train and generate) engine",
            True,
            'set "enabled": false',
            is_on=lambda root: root.hybrid_engine.enabled,
        ),
        "inference": _later("the section inference of a training configuration", "pass its keys to init_inference"),
        "inference_quantization": _later("weight quantization for inference", "remove the section"),
    },
    "memory and compilation": {
        "activation_offload": Feature(
            "inputs of recomputed layers in host memory or a file",
            True,
            'set "device" to "none"',
            is_on=lambda root: root.activation_checkpointing.offload.device != "none",
        ),
        "deepcompile": Feature(
            "operators of ZeRO inside compiled graphs",
            True,
            "set deepcompile to false; torch.compile works on the model itself",
            is_on=lambda root: root.compile.deepcompile,
        ),
        "graph_activation_offload": _later(
            "activations that compiled graphs move to the host",
            'set it to false; "activation_checkpointing": {"offload": {"device": "cpu"}} moves inputs of recomputed layers',
        ),
        "graph_state_offload": _later(
            "optimizer states that compiled graphs move to the host and back",
            'set it to false; "zero_optimization": {"offload_optimizer": {"device": "cpu"}} keeps them there',
        ),
        "graph_parameter_offload": _later(
            "parameters that compiled graphs move to the host and back",
            'set it to false; "zero_optimization": {"offload_param": {"device": "cpu"}} keeps them there',
        ),
        "symmetric_memory": _later("gathers through symmetric memory", "set it to false"),
        "graph_parallelism": _later(
            "parallelism that passes add to compiled graphs (autosp, autotp)",
            "remove the key; sequence_parallel and tensor_parallel cut a model that is then compiled",
        ),
        "graph_harvesting": _later("CUDA graph capture", "set it to false"),
    },
    "checkpoints and elasticity": {
        "checkpoint_writer": _later("the configurable checkpoint writer", _REMOVE),
        "nebula": _later("Nebula checkpoints", 'set "enabled": false'),
        "datastates": _later("DataStates checkpoints", "remove the section"),
        "elasticity": Feature(
            "elasticity",
            True,
            'set "enabled": false and give the batch sizes',
            is_on=lambda root: root.elasticity.enabled,
        ),
        "autotuning": Feature("autotuning", True, 'set "enabled": false', is_on=lambda root: root.autotuning.enabled),
    },
    "monitoring": {
        **{
            key: Feature(
                f"the monitor {key}",
                True,
                'set "enabled": false',
                is_on=lambda root, key=key: getattr(root, key).enabled,
            )
            for key in ("tensorboard", "wandb", "comet", "csv_monitor", "jsonl", "prometheus")
        },
        "comms_logger": Feature(
            "the communication logger", True, 'set "enabled": false', is_on=lambda root: root.comms_logger.enabled
        ),
        "flops_profiler": Feature(
            "the flops profiler", True, 'set "enabled": false', is_on=lambda root: root.flops_profiler.enabled
        ),
    },
    "model and data": {
        "sparse_attention": _later("sparse attention", "remove the section"),
        "progressive_layer_drop": Feature(
            "progressive layer drop",
            True,
            'set "enabled": false',
            is_on=lambda root: root.progressive_layer_drop.enabled,
        ),
        "eigenvalue": _later("eigenvalue estimation", 'set "enabled": false'),
        "curriculum": Feature(
            "curriculum learning, the old section",
            True,
            'set "enabled": false',
            is_on=lambda root: root.curriculum_learning.enabled,
        ),
        "data_efficiency": Feature(
            "the choice of samples by a curriculum",
            True,
            'set "enabled": false',
            is_on=lambda root: root.data_efficiency.chooses_samples,
        ),
        "dynamic_batching": _later("batches of a number of tokens", 'set "enabled": false'),
        "random_ltd": _later("random layer token drop", 'set "enabled": false'),
        "compression": Feature(
            "quantized weights and activations during training",
            True,
            'set "enabled": false',
            is_on=lambda root: root.compression_training.quantizes,
        ),
        "pruning": Feature(
            "pruning of weights, rows and heads during training",
            True,
            'set "enabled": false',
            is_on=lambda root: root.compression_training.prunes,
        ),
        "channel_pruning": _later("channel pruning of convolutions", 'set "enabled": false'),
        "layer_reduction": Feature(
            "a student made of a teacher's layers",
            True,
            'set "enabled": false',
            is_on=lambda root: root.compression_training.layer_reduction.enabled,
        ),
    },
}

FEATURES: dict[str, Feature] = {key: feature for area in AREAS.values() for key, feature in area.items()}
