"""What DeepSpeed's functions ``get_*`` say about a configuration that is a dictionary. A part of facts.py."""

from __future__ import annotations

import importlib
import inspect
import json

import torch

MODULES = (
    *("deepspeed.runtime.config", "deepspeed.compression.config", "deepspeed.runtime.data_pipeline.config"),
    *("deepspeed.runtime.swap_tensor.aio_config", "deepspeed.runtime.model_checkpointing.config"),
    "deepspeed.autotuning.config",
)
# Functions over other arguments, and classes of sections, which facts.py compares.
LEFT_OUT = {
    *("get_scalar_param", "get_dict_param", "get_list_param", "get_accelerator", "get_bfloat16_config"),
    *("get_float16_config", "get_monitor_config", "get_timers_config", "get_zero_config"),
    *("get_expert_parallel_config", "get_tensor_parallel_config"),
}

GROUP = {"params": {"start_bits": 8, "target_bits": 4, "bits": 8, "dense_ratio": 0.5}, "modules": ["a", "b.c"]}
GROUPS = {"g1": GROUP, "g2": {"params": {**GROUP["params"], "quantization_period": 7}, "related_modules": [["d"]]}}
PRUNING = {"shared_parameters": {"enabled": True, "method": "topk", "schedule_offset": 3}, "different_groups": GROUPS}
COMPRESSION = {
    "weight_quantization": {
        "shared_parameters": {
            "enabled": True, "quantizer_kernel": True, "quantize_groups": 4, "quantization_type": "asymmetric",
            "rounding": "stochastic", "quantize_weight_in_forward": True, "quantize_verbose": True,
            "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.25},
        },
        "different_groups": GROUPS,
    },
    "activation_quantization": {
        "shared_parameters": {"enabled": True, "range_calibration": "static", "schedule_offset": 5},
        "different_groups": GROUPS,
    },
    "sparse_pruning": {
        "shared_parameters": {
            "enabled": True, "method": "snip_momentum", "schedule_offset": 2, "dense_ratio": 0.3,
            "excluded_modules": ["x"],
        },
        "different_groups": GROUPS,
    },
    "row_pruning": PRUNING,
    "head_pruning": {**PRUNING, "shared_parameters": {**PRUNING["shared_parameters"], "num_heads": 12}},
    "channel_pruning": PRUNING, "layer_reduction": {"enabled": True, "keep_number_layer": 5, "teacher_layer": [1, 3]},
    "shared_parameters": {"enabled": True}, "different_groups": GROUPS,
}  # fmt: skip
CURRICULUM = {"enabled": True, "curriculum_metrics": {"seqlen": {"difficulty_type": "value"}}}
BATCHING = {"enabled": True, "max_tokens": "900", "max_batch_size": 4.0, "lr_scaling_method": "sqrt", "verbose": 1}
SAMPLING = {"enabled": True, "num_epochs": 7, "num_workers": 2, "pin_memory": True, "curriculum_learning": CURRICULUM}
LTD = {"enabled": True, "total_layer_num": 24, "layer_token_lr_schedule": {"enabled": True}}
EFFICIENCY = {
    "enabled": True, "seed": 5, "data_sampling": {**SAMPLING, "dynamic_batching": BATCHING},
    "data_routing": {"enabled": True, "random_ltd": LTD},
}  # fmt: skip
WRITER = {"type": "python", "io_buffer_size": 100, "data_parallel": "socket", "decoupled": True}
CHECKPOINT = {"tag_validation": "fail", "parallel_write": {"pipeline_stage": True}, "writer": WRITER}
EIGENVALUE = {
    "enabled": True, "verbose": True, "max_iter": 5, "tol": 0.5, "stability": 0.1, "layer_num": 3,
    "gas_boundary_resolution": 2, "layer_name": "h",
}  # fmt: skip
SPARSE = {
    "mode": "bigbird", "block": 32, "different_layout_per_head": True, "num_random_blocks": 2, "num_local_blocks": 8,
    "num_global_blocks": 3, "attention": "unidirectional", "local_window_blocks": [2],
    "horizontal_global_attention": True, "num_different_global_patterns": 4, "num_sliding_window_blocks": 5,
    "global_block_indices": [1], "global_block_end_indices": [2],
}  # fmt: skip
FULL = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "managed_gradient_accumulation": False, "gradient_clipping": 0.5, "gradient_predivide_factor": 2.0,
    "prescale_gradients": True, "sparse_gradients": True, "steps_per_print": 3, "disable_allgather": True,
    "dump_state": True, "graph_harvesting": True, "wall_clock_breakdown": True, "memory_breakdown": True,
    "dataloader_drop_last": True, "log_level": "info", "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False, "use_data_before_expert_parallelism": True, "communication_data_type": "BF16",
    "gradient_allreduce_op": "SUM", "amp": {"enabled": True, "opt_level": "O1"},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5},
    "torch_autocast": {"enabled": True, "dtype": "half", "lower_precision_safe_modules": ["torch.nn.Linear"]},
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "max_grad_norm": 2.0}, "legacy_fusion": True},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "hybrid_engine": {"enabled": True, "max_out_tokens": 100}, "pipeline": {"stages": 4, "more": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
    "aio": {"queue_depth": 32, "single_submit": True, "intra_op_parallelism": 4, "other": 1},
    "model_info": {"num_params": 10, "hidden_size": 4, "other": 1}, "eigenvalue": EIGENVALUE,
    "quantize_training": {"eigenvalue": {**EIGENVALUE, "enabled": False}}, "checkpoint": CHECKPOINT,
    "compression_training": COMPRESSION, "data_efficiency": EFFICIENCY, "curriculum_learning": CURRICULUM,
    "sparse_attention": SPARSE,
}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "empty": {},
    "full": FULL,
    # Functions for one section take the section.
    "compression": COMPRESSION,
    "efficiency": EFFICIENCY,
    "sampling": EFFICIENCY["data_sampling"],
    "sparse": SPARSE,
    "routing": EFFICIENCY["data_routing"],
    "checkpoint": CHECKPOINT,
    **{f"technique {name}": COMPRESSION[name] for name in COMPRESSION if name not in ("layer_reduction", *PRUNING)},
    **{
        f"sparse {mode}": {"sparse_attention": {"mode": mode}}
        for mode in ("dense", "fixed", "variable", "bslongformer")
    },
    "no parts": {"shared_parameters": {}, "different_groups": {}},
    "off": {
        "amp": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "data_efficiency": {"data_sampling": {}},
        "optimizer": {},
        "scheduler": {},
        "checkpoint": {"writer": {}},
        "aio": {},
        "model_info": {},
        "sparse_attention": {},
        "compression_training": {"layer_reduction": {"enabled": False, "x": 1}},
        "curriculum_learning": {"enabled": False},
        "progressive_layer_drop": {"enabled": False},
    },
    "wrong": {
        "communication_data_type": "fp8",
        "gradient_allreduce_op": "max",
        "torch_autocast": {"dtype": "x"},
        "checkpoint": {"tag_validation": "no", "parallel_write": {"pipeline_stage": 3}, "writer": {"type": "x"}},
        "compression_training": {"weight_quantization": {"shared_parameters": {"quantization_type": "x"}}},
        "sparse_attention": {"mode": "x"},
        "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": 1}}},
        "tag_validation": "no",
        "shared_parameters": {"quantization_type": "x", "method": "x"},
        "parallel_write": {"pipeline_stage": 3},
        "dynamic_batching": {"enabled": True},
        "curriculum_learning": {"enabled": True},
        "different_groups": {"g": {"params": {}}},
    },
    "wrong modules": {"torch_autocast": {"lower_precision_safe_modules": [1]}},
    "snip of wrong order": {
        "shared_parameters": {"method": "snip_momentum", "schedule_offset": 5, "schedule_offset_end": 4},
    },
    "snip that keeps all": {"shared_parameters": {"method": "snip_momentum", "dense_ratio": 1}},
    "no heads": {"head_pruning": {"shared_parameters": {"enabled": True}}, "shared_parameters": {"enabled": True}},
}


def _plain(value: object) -> object:
    if isinstance(value, torch.dtype):
        return str(value)
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _answer(function, given: dict[str, object]) -> object:
    try:
        takes_one = len(inspect.signature(function).parameters) > 0
        # A configuration from a file has no dictionary twice. DeepSpeed's functions write into what they get.
        return _plain(function(json.loads(json.dumps(given))) if takes_one else function())
    except (ValueError, AssertionError, KeyError, TypeError, AttributeError, NotImplementedError):
        return "error"
    except Exception as error:
        if type(error).__name__ == "DeepSpeedConfigError":
            return "error"
        raise


def getters() -> dict[str, object]:
    """Answers that differ from those for an empty dictionary, by function and case."""
    found: dict[str, object] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for function in sorted(each for each in dir(module) if each.startswith("get_") and each not in LEFT_OUT):
            called = getattr(module, function)
            cases = CASES
            if function.endswith("_different_groups"):  # a section without groups is a KeyError there, and {} here
                cases = {"empty": CASES["no parts"], **{k: v for k, v in CASES.items() if "different_groups" in v}}
            answers = {case: _answer(called, given) for case, given in cases.items()}
            parameters = list(inspect.signature(called).parameters)
            changed = {case: answer for case, answer in answers.items() if answer != answers["empty"]}
            found[f"{name}.{function}"] = {"empty": answers["empty"], "parameters": parameters, **changed}
    return found
