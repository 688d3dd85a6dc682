"""Configurations as users write them, with the expected outcome of each. They follow the patterns of trainers,
templates and examples, and are not copies.

``by="trainer"``: the Trainer or accelerate replaces each ``"auto"`` that it knows before DeepSpeed reads the
configuration. ``DIFFERS`` says why this package refuses a setting that DeepSpeed parses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["CONFIGURATIONS", "Configuration"]


class Configuration(NamedTuple):
    name: str
    """The project or habit that uses the pattern."""
    content: dict[str, Any]
    outcome: str = "runs"
    """"runs" (without a note), "note" or "error"."""
    words: tuple[str, ...] = ()
    """Words of the notes or errors: each occurs in exactly one message, and there are no other messages."""
    world: int = 1
    by: str = "hand"
    why: str = ""
    """The reason for an error where DeepSpeed accepts the configuration."""


MISSPELT = (
    "DeepSpeed passes by a key that it does not know, and trains with another setting than the one that was meant"
)
NOT_HERE = "DeepSpeed has the feature; here it is not silently left out"
UNFILLED = "DeepSpeed takes its default for an unfilled value, or fails in arithmetic later"
WRONG_TYPE = "DeepSpeed reads it as something else than was written"

ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
AUTO_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
AUTO_WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
AUTO_DECAY = {"type": "WarmupDecayLR", "params": {**AUTO_WARMUP["params"], "total_num_steps": "auto"}}
AUTO_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
AUTO_SIZES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
AUTO_STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
STAGE_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
PINNED = {"device": "cpu", "pin_memory": True}
BF16 = {"enabled": True}

CONFIGURATIONS = [
    # -- the Trainer's documentation, and copies of it -----------------------------------------------------------------
    Configuration("HF docs, stage 0", {**AUTO_SIZES, "zero_optimization": {"stage": 0}}, by="trainer"),
    Configuration(
        "HF docs, stage 1", {**AUTO_SIZES, "zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}, by="trainer"
    ),
    Configuration(
        "HF docs, stage 2",
        {
            "fp16": AUTO_FP16,
            "optimizer": AUTO_ADAMW,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": {**STAGE_2, "offload_optimizer": PINNED},
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "wall_clock_breakdown": False,
        },
        by="trainer",
    ),
    Configuration(
        "HF docs, stage 3 with offload",
        {
            **AUTO_SIZES,
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAMW,
            "scheduler": AUTO_DECAY,
            "gradient_clipping": "auto",
            "zero_optimization": {**AUTO_STAGE_3, "offload_optimizer": PINNED, "offload_param": PINNED},
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        by="trainer",
    ),
    Configuration(
        "HF docs, NVMe",
        {
            **AUTO_SIZES,
            "bf16": BF16,
            "optimizer": AUTO_ADAMW,
            "zero_optimization": {
                **AUTO_STAGE_3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "pin_memory": True,
                    "buffer_count": 4,
                    "fast_init": False,
                },
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "pin_memory": True,
                    "buffer_count": 5,
                    "buffer_size": 1e8,
                    "max_in_cpu": 1e9,
                },
            },
            "aio": {
                "block_size": 262144,
                "queue_depth": 32,
                "thread_count": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        },
        "note",
        ("aio.thread_count",),
        by="trainer",
    ),
    Configuration(
        "HF docs, communication dtype",
        {**AUTO_SIZES, "communication_data_type": "fp32", "zero_optimization": STAGE_2, "bf16": BF16},
        by="trainer",
    ),
    Configuration(
        "HF docs, round-robin gradients",
        {
            **AUTO_SIZES,
            "bf16": BF16,
            "zero_optimization": {**STAGE_2, "round_robin_gradients": True, "offload_optimizer": PINNED},
        },
        by="trainer",
    ),
    Configuration(
        "HF docs, universal checkpoint",
        {**AUTO_SIZES, "checkpoint": {"load_universal": True}, "zero_optimization": {"stage": 3}},
        by="trainer",
    ),
    Configuration(
        "HF docs, activation_checkpointing left at its defaults",
        {
            **AUTO_SIZES,
            "activation_checkpointing": {
                "partition_activations": False,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "number_checkpoints": None,
                "synchronize_checkpoint_boundary": False,
                "profile": False,
            },
            "zero_optimization": {"stage": 2},
        },
        by="trainer",
    ),
    Configuration(
        "an auto that nobody fills",
        {**AUTO_SIZES, "zero_optimization": {"stage": 2}},
        "error",
        ('"auto" stands in 3 keys',),
    ),
    Configuration(
        "an auto that nobody fills, stage",
        {"train_batch_size": 8, "zero_optimization": {"stage": "auto"}},
        "error",
        ("zero_optimization.stage",),
        why=UNFILLED,
    ),
    Configuration(
        "an auto that nobody fills, rate",
        {"train_batch_size": 8, "optimizer": AUTO_ADAMW},
        "error",
        ('"auto" stands in 4 keys',),
        why=UNFILLED,
    ),
    # -- accelerate's templates ----------------------------------------------------------------------------------------------
    Configuration(
        "accelerate, zero_stage2_config.json",
        {
            "fp16": {**AUTO_FP16, "enabled": True},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
            },
            "scheduler": AUTO_WARMUP,
            "zero_optimization": {**STAGE_2, "reduce_bucket_size": "auto"},
            "gradient_accumulation_steps": 1,
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "wall_clock_breakdown": False,
        },
        by="trainer",
    ),
    Configuration(
        "accelerate, zero_stage3_offload_config.json",
        {
            **AUTO_SIZES,
            "fp16": {**AUTO_FP16, "enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": AUTO_DECAY,
            "zero_optimization": {
                **AUTO_STAGE_3,
                "offload_optimizer": PINNED,
                "offload_param": PINNED,
                "sub_group_size": 1e9,
                "stage3_gather_16bit_weights_on_model_save": "auto",
            },
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
        },
        by="trainer",
    ),
    Configuration(
        "accelerate, from its own options",
        {
            **AUTO_SIZES,
            "gradient_clipping": 1.0,
            "steps_per_print": float("inf"),
            "bf16": {"enabled": True},
            "fp16": {"enabled": False},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": False,
            },
            "zero_allow_untested_optimizer": True,
        },
        by="trainer",
    ),
    Configuration(
        "accelerate, offload_param below stage 3",
        {
            **AUTO_SIZES,
            "bf16": BF16,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        },
        "note",
        ("offload_param",),
        by="trainer",
    ),
    Configuration(
        "accelerate, MS-AMP off",
        {**AUTO_SIZES, "msamp": {"enabled": False, "opt_level": "O1"}, "bf16": BF16},
        "note",
        ("msamp",),
        by="trainer",
    ),
    Configuration("accelerate, step count printed never", {"train_batch_size": 1, "steps_per_print": float("inf")}),
    # -- fine-tuning suites --------------------------------------------------------------------------------------------------
    Configuration(
        "LLaMA-Factory, ds_z2_config.json",
        {
            **AUTO_SIZES,
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "allgather_bucket_size": 5e8,
                "overlap_comm": False,
                "reduce_scatter": True,
                "reduce_bucket_size": 5e8,
                "contiguous_gradients": True,
                "round_robin_gradients": True,
            },
        },
        by="trainer",
    ),
    Configuration(
        "LLaMA-Factory, ds_z3_offload_config.json",
        {
            **AUTO_SIZES,
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                **AUTO_STAGE_3,
                "overlap_comm": False,
                "offload_optimizer": PINNED,
                "offload_param": PINNED,
            },
        },
        by="trainer",
    ),
    Configuration(
        "LLaMA-Factory, ds_z0_config.json",
        {
            **AUTO_SIZES,
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 0,
                "allgather_partitions": True,
                "allgather_bucket_size": 5e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 5e8,
                "contiguous_gradients": True,
                "round_robin_gradients": True,
            },
        },
        by="trainer",
    ),
    Configuration(
        "axolotl, zero1.json",
        {
            **AUTO_SIZES,
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "bf16": {"enabled": True},
            "fp16": {**AUTO_FP16, "auto_cast": False},
            "gradient_clipping": "auto",
            "wall_clock_breakdown": False,
        },
        by="trainer",
    ),
    Configuration(
        "axolotl, zero3_bf16_cpuoffload_all.json",
        {
            **AUTO_SIZES,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "gradient_clipping": "auto",
            "zero_optimization": {
                **AUTO_STAGE_3,
                "sub_group_size": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "offload_optimizer": PINNED,
                "offload_param": PINNED,
            },
            "wall_clock_breakdown": False,
        },
        by="trainer",
    ),
    Configuration(
        "axolotl, compile",
        {
            **AUTO_SIZES,
            "compile": {"disable": False, "backend": "inductor"},
            "bf16": BF16,
            "zero_optimization": {"stage": 1},
        },
        "error",
        ("compile.disable", "compile.backend"),
        by="trainer",
    ),
    Configuration(
        "ms-swift, zero3.json",
        {
            **AUTO_SIZES,
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
            "zero_optimization": {
                **AUTO_STAGE_3,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {"device": "none", "pin_memory": True},
                "overlap_comm": False,
                "zero_quantized_weights": False,
                "zero_quantized_gradients": False,
            },
        },
        by="trainer",
    ),
    Configuration(
        "ms-swift, zero3 with quantized gradients",
        {**AUTO_SIZES, "bf16": BF16, "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        "error",
        ("zero_quantized_gradients",),
        by="trainer",
        why=NOT_HERE,
    ),
    Configuration(
        "Stanford Alpaca, opt_offload.json",
        {
            **AUTO_SIZES,
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": AUTO_DECAY,
            "zero_optimization": {
                **AUTO_STAGE_3,
                "offload_optimizer": PINNED,
                "stage3_gather_16bit_weights_on_model_save": False,
            },
            "gradient_clipping": "auto",
            "steps_per_print": 5,
            "wall_clock_breakdown": False,
        },
        by="trainer",
    ),
    Configuration(
        "Alpaca-LoRA, stage 2",
        {**AUTO_SIZES, "fp16": {"enabled": "auto"}, "zero_optimization": {**STAGE_2, "cpu_offload": True}},
        "note",
        ("cpu_offload",),
        by="trainer",
    ),
    Configuration(
        "QLoRA",
        {
            **AUTO_SIZES,
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2, "overlap_comm": True},
        },
        by="trainer",
    ),
    Configuration(
        "LLaVA, zero2.json",
        {
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
            },
        },
        by="trainer",
    ),
    Configuration(
        "LLaVA, zero3.json",
        {**AUTO_SIZES, "fp16": AUTO_FP16, "bf16": {"enabled": "auto"}, "zero_optimization": AUTO_STAGE_3},
        by="trainer",
    ),
    Configuration(
        "FastChat, stage 2",
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
            "fp16": {"enabled": "auto"},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
        },
        by="trainer",
    ),
    Configuration(
        "BELLE, comments in keys",
        {
            **AUTO_SIZES,
            "_comment": "8 x A100",
            "comment_2": "see README",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2},
        },
        "note",
        ("_comment", "comment_2"),
        by="trainer",
    ),
    Configuration(
        "ChatGLM, P-tuning",
        {
            "train_micro_batch_size_per_gpu": "auto",
            "zero_allow_untested_optimizer": True,
            "fp16": {
                "enabled": "auto",
                "loss_scale": 0,
                "initial_scale_power": 16,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "allgather_bucket_size": 5e8,
                "overlap_comm": False,
                "reduce_scatter": True,
                "reduce_bucket_size": 5e8,
                "contiguous_gradients": True,
            },
        },
        by="trainer",
    ),
    Configuration(
        "Qwen, finetune",
        {
            **AUTO_SIZES,
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAMW,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": {
                **AUTO_STAGE_3,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {"device": "none", "pin_memory": True},
            },
            "gradient_clipping": "auto",
            "steps_per_print": 100,
            "wall_clock_breakdown": False,
        },
        by="trainer",
    ),
    Configuration(
        "InternVL, stage 1",
        {
            "zero_optimization": {
                "stage": 1,
                "allgather_partitions": True,
                "allgather_bucket_size": 1e9,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 1e9,
                "contiguous_gradients": True,
            },
            "fp16": {**AUTO_FP16, "auto_cast": True},
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAMW,
            **AUTO_SIZES,
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "wall_clock_breakdown": True,
        },
        by="trainer",
    ),
    Configuration(
        "trl, deepspeed_zero3.yaml",
        {
            **AUTO_SIZES,
            "bf16": BF16,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none"},
                "offload_param": {"device": "none"},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "steps_per_print": float("inf"),
            "zero_allow_untested_optimizer": True,
        },
        by="trainer",
    ),
    Configuration(
        "open-instruct, stage 3",
        {
            **AUTO_SIZES,
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAMW,
            "scheduler": AUTO_DECAY,
            "gradient_clipping": "auto",
            "zero_optimization": AUTO_STAGE_3,
            "steps_per_print": 1e5,
            "wall_clock_breakdown": False,
        },
        by="trainer",
    ),
    # -- training loops of their own -----------------------------------------------------------------------------------------
    Configuration(
        "OpenRLHF, training",
        {
            "steps_per_print": 100,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "sub_group_size": "auto",
                "stage3_max_live_parameters": "auto",
                "stage3_max_reuse_distance": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "reduce_bucket_size": "auto",
                "zero_hpz_partition_size": 1,
                "zero_quantized_weights": False,
                "zero_quantized_gradients": False,
                "overlap_comm": False,
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "data_types": {"grad_accum_dtype": "fp32"},
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": 16,
        },
        "note",
        ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
        world=2,
    ),
    Configuration(
        "OpenRLHF, evaluation",
        {
            "steps_per_print": 100,
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": "auto",
                "stage3_max_reuse_distance": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "offload_param": {"device": "cpu", "pin_memory": True},
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "train_micro_batch_size_per_gpu": 2,
        },
        "note",
        ("stage3_max_live_parameters", "stage3_max_reuse_distance"),
    ),
    Configuration(
        "OpenRLHF, tensor parallel of one", {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 1}, "bf16": BF16}
    ),
    Configuration(
        "OpenRLHF, tensor parallel of two",
        {"train_batch_size": 2, "tensor_parallel": {"autotp_size": 2}, "bf16": BF16},
        world=2,
    ),
    Configuration(
        "DeepSpeed-Chat, get_train_ds_config",
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none"},
                "stage3_param_persistence_threshold": 1e4,
                "stage3_max_live_parameters": 3e7,
                "stage3_prefetch_bucket_size": 3e7,
                "memory_efficient_linear": False,
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "hybrid_engine": {
                "enabled": False,
                "max_out_tokens": 512,
                "inference_tp_size": 1,
                "release_inference_cache": False,
                "pin_parameters": True,
                "tp_gather_partition_size": 8,
            },
            "tensorboard": {
                "enabled": False,
                "output_path": "step1_tensorboard/ds_tensorboard_logs/",
                "job_name": "step1_model_tensorboard",
            },
        },
        world=4,
    ),
    Configuration(
        "DeepSpeed-Chat, with mixed precision LoRA",
        {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True},
            "fp16": {"enabled": True, "loss_scale_window": 100},
        },
        "error",
        ("zero_quantized_nontrainable_weights",),
        why=NOT_HERE,
    ),
    Configuration(
        "DeepSpeed-Chat, with the hybrid engine",
        {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3},
            "hybrid_engine": {"enabled": True, "max_out_tokens": 256},
        },
    ),
    Configuration(
        "DeepSpeed-Chat, the hybrid engine over two ranks",
        {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3},
            "hybrid_engine": {"enabled": True, "inference_tp_size": 2},
        },
        world=2,
    ),
    Configuration(
        "DeepSpeedExamples, CIFAR-10",
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": False},
            "fp16": {
                "enabled": True,
                "fp16_master_weights_and_grads": False,
                "loss_scale": 0,
                "loss_scale_window": 500,
                "hysteresis": 2,
                "min_loss_scale": 1,
                "initial_scale_power": 15,
            },
            "wall_clock_breakdown": False,
            "zero_optimization": {
                "stage": 0,
                "allgather_partitions": True,
                "reduce_scatter": True,
                "allgather_bucket_size": 50000000,
                "reduce_bucket_size": 50000000,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "cpu_offload": False,
            },
        },
        "note",
        ("cpu_offload",),
        world=2,
    ),
    Configuration(
        "DeepSpeedExamples, BERT pre-training with Lamb",
        {
            "train_batch_size": 4096,
            "train_micro_batch_size_per_gpu": 64,
            "steps_per_print": 1000,
            "prescale_gradients": False,
            "optimizer": {
                "type": "Lamb",
                "params": {
                    "lr": 11e-3,
                    "weight_decay": 0.01,
                    "bias_correction": False,
                    "max_coeff": 0.3,
                    "min_coeff": 0.01,
                },
            },
            "gradient_clipping": 1.0,
            "wall_clock_breakdown": False,
            "fp16": {"enabled": True, "loss_scale": 0},
        },
        world=8,
    ),
    Configuration(
        "DeepSpeedExamples, 1-bit Adam",
        {
            "train_batch_size": 96,
            "optimizer": {
                "type": "OneBitAdam",
                "params": {"lr": 3e-5, "freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"},
            },
            "fp16": {"enabled": True},
        },
        "error",
        ("OneBitAdam",),
        why=NOT_HERE,
    ),
    Configuration(
        "DeepSpeedExamples, BingBert SQuAD",
        {
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 3,
            "steps_per_print": 10,
            "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": False}},
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True},
        },
    ),
    Configuration(
        "DeepSpeedExamples, learning-rate range test",
        {
            "train_batch_size": 128,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "scheduler": {
                "type": "LRRangeTest",
                "params": {
                    "lr_range_test_min_lr": 1e-4,
                    "lr_range_test_step_size": 200,
                    "lr_range_test_step_rate": 5,
                    "lr_range_test_staircase": False,
                },
            },
        },
    ),
    Configuration(
        "DeepSpeed tutorial, one cycle",
        {
            "train_batch_size": 128,
            "optimizer": ADAMW,
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_first_step_size": 1000,
                    "cycle_first_stair_count": 500,
                    "cycle_second_step_size": 1000,
                    "cycle_second_stair_count": 500,
                    "decay_step_size": 1000,
                    "cycle_min_lr": 1e-4,
                    "cycle_max_lr": 1e-3,
                    "decay_lr_rate": 1e-3,
                    "cycle_min_mom": 0.85,
                    "cycle_max_mom": 0.99,
                    "decay_mom_rate": 0.0,
                },
            },
        },
    ),
    Configuration(
        "DeepSpeed tutorial, flops profiler",
        {
            "train_batch_size": 8,
            "flops_profiler": {
                "enabled": True,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 1,
                "detailed": True,
                "output_file": None,
            },
        },
        "runs",
    ),
    Configuration(
        "DeepSpeed tutorial, flops profiler off",
        {
            "train_batch_size": 8,
            "flops_profiler": {
                "enabled": False,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 3,
                "detailed": True,
            },
        },
        "runs",
    ),
    Configuration(
        "DeepSpeed tutorial, monitors off",
        {
            "train_batch_size": 8,
            "tensorboard": {"enabled": False},
            "wandb": {"enabled": False, "group": "g", "team": "t", "project": "p"},
            "csv_monitor": {"enabled": False, "output_path": "out", "job_name": "j"},
        },
        "runs",
    ),
    Configuration(
        "DeepSpeed tutorial, communication log",
        {"train_batch_size": 8, "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}},
    ),
    Configuration(
        "DeepSpeed tutorial, autotuning off",
        {"train_micro_batch_size_per_gpu": 1, "autotuning": {"enabled": False, "fast": False}},
    ),
    Configuration(
        "DeepSpeed tutorial, elasticity",
        {
            "elasticity": {
                "enabled": True,
                "max_train_batch_size": 2000,
                "micro_batch_sizes": [2, 4, 6],
                "min_gpus": 1,
                "max_gpus": 10000,
                "version": 0.1,
            }
        },
        "error",
        ("elasticity", "train_batch_size"),
        why=NOT_HERE,
    ),
    Configuration(
        "DeepSpeed tutorial, curriculum",
        {
            "train_batch_size": 8,
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
                "max_difficulty": 1024,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 15000, "difficulty_step": 8},
            },
        },
        "runs",
    ),
    Configuration(
        "DeepSpeed tutorial, progressive layer drop",
        {"train_batch_size": 8, "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}},
        "runs",
    ),
    Configuration(
        "DeepSpeed tutorial, compression off",
        {
            "train_batch_size": 8,
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}
            },
        },
        "runs",
    ),
    Configuration(
        "DeepSpeed tutorial, ZeRO++",
        {
            "train_batch_size": 8,
            "bf16": BF16,
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 8,
                "zero_quantized_gradients": True,
            },
        },
        "error",
        ("zero_quantized_weights", "zero_hpz_partition_size", "zero_quantized_gradients"),
        world=8,
        why=NOT_HERE,
    ),
    Configuration(
        "DeepSpeed tutorial, MiCS",
        {"train_batch_size": 8, "bf16": BF16, "zero_optimization": {"stage": 3, "mics_shard_size": 4}},
        world=8,
    ),
    Configuration(
        "DeepSpeed tutorial, MiCS with gathers in two steps",
        {
            "train_batch_size": 8,
            "bf16": BF16,
            "zero_optimization": {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True},
        },
        "error",
        ("mics_hierarchical_params_gather",),
        world=8,
        why=NOT_HERE,
    ),
    Configuration(
        "DeepSpeed tutorial, sparse attention",
        {"train_batch_size": 8, "sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4}},
        "error",
        ("sparse_attention",),
        why=NOT_HERE,
    ),
    Configuration(
        "DeepSpeed tutorial, SuperOffload",
        {
            "train_batch_size": 8,
            "bf16": BF16,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
        },
    ),
    Configuration(
        "DeepSpeed tutorial, Muon",
        {
            "train_batch_size": 8,
            "bf16": BF16,
            "optimizer": {"type": "Muon", "params": {"lr": 2e-4, "momentum": 0.9}},
            "zero_optimization": {"stage": 2},
        },
    ),
    Configuration(
        "Megatron-DeepSpeed, ZeRO",
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 8,
            "steps_per_print": 10,
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
            "prescale_gradients": True,
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 500,
                "hysteresis": 2,
                "min_loss_scale": 1,
                "initial_scale_power": 11,
            },
            "wall_clock_breakdown": False,
        },
        world=8,
    ),
    Configuration(
        "Megatron-DeepSpeed, BLOOM",
        {
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": 2048,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0},
            "bf16": {"enabled": True},
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        world=8,
    ),
    Configuration(
        "Megatron-DeepSpeed, data efficiency off",
        {"train_batch_size": 8, "data_efficiency": {"enabled": False, "seed": 1234}},
        "runs",
    ),
    Configuration(
        "GPT-NeoX, as it passes it on",
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "min_loss_scale": 1,
                "fp16": True,
            },
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 1,
                "allgather_partitions": True,
                "allgather_bucket_size": 500000000,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 500000000,
                "contiguous_gradients": True,
            },
            "wall_clock_breakdown": True,
        },
        "error",
        ("fp16.fp16",),
        world=8,
    ),
    Configuration(
        "ColossalChat, Coati",
        {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
            "optimizer": ADAMW,
            "bf16": BF16,
            "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
            "zero_force_ds_cpu_optimizer": False,
        },
    ),
    Configuration(
        "Lightning, its stage 2",
        {
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {**STAGE_2, "sub_group_size": 1000000000000},
            "activation_checkpointing": {
                "partition_activations": False,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "synchronize_checkpoint_boundary": False,
            },
            "aio": {
                "block_size": 1048576,
                "queue_depth": 8,
                "single_submit": False,
                "overlap_events": True,
                "thread_count": 1,
            },
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
        },
        "note",
        ("aio.thread_count",),
    ),
    Configuration(
        "Lightning, its stage 3 with offload",
        {
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "allgather_partitions": True,
                "reduce_scatter": True,
                "allgather_bucket_size": 200000000,
                "reduce_bucket_size": 200000000,
                "sub_group_size": 1000000000000,
                "offload_optimizer": {
                    "device": "cpu",
                    "nvme_path": "/local_nvme",
                    "buffer_count": 4,
                    "pin_memory": False,
                },
                "offload_param": {
                    "device": "cpu",
                    "nvme_path": "/local_nvme",
                    "buffer_count": 5,
                    "buffer_size": 100000000,
                    "max_in_cpu": 1000000000,
                    "pin_memory": False,
                },
            },
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "initial_scale_power": 16,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
        },
    ),
    Configuration(
        "Diffusers, DreamBooth",
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "fp16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-6}},
            "zero_allow_untested_optimizer": True,
        },
        "note",
        ("offload_param",),
    ),
    Configuration(
        "TRLX, PPO",
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "fp16": {"enabled": True, "min_loss_scale": 0.5, "fp16_scale_tolerance": 0.25, "opt_level": "O2"},
            "zero_optimization": {
                "stage": 2,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "cpu"},
                "allgather_partitions": True,
                "allgather_bucket_size": 5e8,
                "contiguous_gradients": True,
            },
        },
        "error",
        ("fp16.min_loss_scale", "fp16.fp16_scale_tolerance", "fp16.opt_level"),
        by="trainer",
    ),
    # -- by hand, in papers' repositories and tutorials ------------------------------------------------------------------------
    Configuration("batch alone", {"train_batch_size": 8}, world=4),
    Configuration("micro-batch alone", {"train_micro_batch_size_per_gpu": 8}, world=4),
    Configuration(
        "micro-batch and accumulation", {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}, world=3
    ),
    Configuration(
        "the triangle that does not close",
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8},
        "error",
        ("train_batch_size",),
        world=4,
    ),
    Configuration("a batch that ranks cannot share", {"train_batch_size": 10}, "error", ("train_batch_size",), world=4),
    Configuration("no batch", {"zero_optimization": {"stage": 2}}, "error", ("train_batch_size",)),
    Configuration(
        "float sizes",
        {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8},
        },
    ),
    Configuration("a stage as a word", {"train_batch_size": 8, "zero_optimization": {"stage": "2"}}),
    Configuration(
        "the old switch of ZeRO", {"train_batch_size": 8, "zero_optimization": True}, "note", ("zero_optimization",)
    ),
    Configuration(
        "cpu_offload of stage 2",
        {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True},
        },
        "note",
        ("cpu_offload", "cpu_offload_use_pin_memory"),
    ),
    Configuration(
        "gathering fp16 weights",
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        "note",
        ("stage3_gather_fp16_weights_on_model_save",),
    ),
    Configuration(
        "the old bfloat16 section", {"train_batch_size": 8, "bfloat16": {"enabled": True}}, "note", ("bfloat16",)
    ),
    Configuration(
        "fp32_allreduce", {"train_batch_size": 8, "fp32_allreduce": True}, "error", ("fp32_allreduce",), why=MISSPELT
    ),
    Configuration(
        "both 16-bit formats",
        {"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "error",
        ("fp16",),
    ),
    Configuration(
        "apex", {"train_batch_size": 8, "amp": {"enabled": True, "opt_level": "O1"}}, "error", ("amp",), why=NOT_HERE
    ),
    Configuration("apex off", {"train_batch_size": 8, "amp": {"enabled": False, "opt_level": "O1"}}, "note", ("amp",)),
    Configuration("a fixed loss scale", {"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 1024}}),
    Configuration(
        "torch autocast",
        {
            "train_batch_size": 8,
            "torch_autocast": {
                "enabled": True,
                "dtype": "bfloat16",
                "lower_precision_safe_modules": ["torch.nn.Linear"],
            },
        },
    ),
    Configuration(
        "Adam by its old name", {"train_batch_size": 8, "optimizer": {"type": "adam", "params": {"lr": 1e-3}}}
    ),
    Configuration(
        "an optimizer of torch's", {"train_batch_size": 8, "optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}}
    ),
    Configuration("a rate as text", {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}),
    Configuration("a switch as text", {"train_batch_size": 8, "bf16": {"enabled": "true"}}),
    Configuration(
        "a size as text", {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}}
    ),
    Configuration(
        "misspelt at the top",
        {"train_batch_size": 8, "gradient_cliping": 1.0},
        "error",
        ("gradient_cliping",),
        why=MISSPELT,
    ),
    Configuration(
        "the other English",
        {"train_batch_size": 8, "zero_optimisation": {"stage": 2}},
        "error",
        ("zero_optimisation",),
        why=MISSPELT,
    ),
    Configuration(
        "misspelt in a section",
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_prefetch_buckets_size": 1e7}},
        "error",
        ("stage3_prefetch_buckets_size",),
    ),
    Configuration(
        "misplaced",
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "gradient_clipping": 1.0}},
        "error",
        ("zero_optimization.gradient_clipping",),
    ),
    Configuration("a stage at the top", {"train_batch_size": 8, "stage": 2}, "error", ("stage",), why=MISSPELT),
    Configuration(
        "what belongs to the script",
        {"train_batch_size": 8, "log": {"level": "info"}, "monitor_config": {"enabled": False}},
        "note",
        ("log", "monitor_config"),
    ),
    Configuration(
        "a comment at depth",
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "_why": "the 40 GB card"}},
        "note",
        ("_why",),
    ),
    Configuration(
        "parked by a prefix",
        {"train_batch_size": 8, "x-zero_optimization": {"stage": 3}},
        "note",
        ("x-zero_optimization",),
    ),
    Configuration(
        "nothing but a comment",
        {"comment": "take the defaults", "train_micro_batch_size_per_gpu": 1},
        "note",
        ("comment",),
    ),
]
