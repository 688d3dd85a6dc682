"""Compare the defaults of the schema with those of an installed DeepSpeed: ``python compare_defaults.py PYTHON``.

PYTHON is an interpreter whose environment has DeepSpeed. The program prints one line for each difference, and its exit
code is 1 if there is any. It is run by hand and not as a test, because development does not need DeepSpeed.
"""

from __future__ import annotations

import json
import subprocess
import sys

_PEER = r'''
import inspect, json, sys
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime import lr_schedules
from deepspeed.elasticity.config import ElasticityConfig
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
import torch

c = DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "Adam"}})
def model(m): return json.loads(json.dumps(m.model_dump(by_alias=True), default=str))
def plain(o): return {k: v for k, v in vars(o).items() if not k.startswith("_")}
def signature(f):
    parameters = inspect.signature(f).parameters.items()
    return {n: p.default for n, p in parameters if p.default is not inspect.Parameter.empty}
compression = c.compression_config
top = """managed_gradient_accumulation gradient_clipping communication_data_type gradient_allreduce_op
    prescale_gradients gradient_predivide_factor disable_allgather zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown dump_state memory_breakdown log_level
    dataloader_drop_last graph_harvesting"""
shared = {k: v["shared_parameters"] for k, v in compression.items() if "shared_parameters" in v}
out = {
    "": {k: getattr(c, k) for k in top.split()},
    "zero_optimization": model(c.zero_config),
    "zero_optimization.offload_param": model(DeepSpeedZeroOffloadParamConfig()),
    "zero_optimization.offload_optimizer": model(DeepSpeedZeroOffloadOptimizerConfig()),
    "zero_optimization.zenflow": model(ZenFlowConfig()),
    "fp16": model(c.float16_config), "bf16": model(c.bfloat16_config),
    "tensor_parallel": model(c.tensor_parallel_config), "compile": model(c.compile_config),
    "hybrid_engine": model(c.hybrid_engine), "timers.throughput": model(c.timers_config),
    "tensorboard": model(c.monitor_config.tensorboard), "wandb": model(c.monitor_config.wandb),
    "comet": model(c.monitor_config.comet), "csv_monitor": model(c.monitor_config.csv_monitor),
    "comms_logger": model(CommsLoggerConfig()), "weight_quantization": model(WeightQuantConfig()),
    "aio": c.aio_config, "pipeline": c.pipeline, "activation_checkpointing": plain(c.activation_checkpointing_config),
    "flops_profiler": plain(c.flops_profiler_config), "autotuning": plain(c.autotuning_config),
    "nebula": plain(c.nebula_config),
    "elasticity": plain(ElasticityConfig({})), "expert_parallel": plain(c.expert_parallel_config),
    "data_efficiency": {"enabled": c.data_efficiency_config["enabled"], "seed": c.data_efficiency_config["seed"]},
    "data_efficiency.data_sampling": c.data_efficiency_config["data_sampling"],
    "data_efficiency.data_sampling.dynamic_batching": c.data_efficiency_config["data_sampling"]["dynamic_batching"],
    **{f"compression_training.{k}.shared_parameters": v for k, v in shared.items()},
    "compression_training.layer_reduction": compression["layer_reduction"],
    **{f"scheduler:{n}": signature(getattr(lr_schedules, n)) for n in lr_schedules.VALID_LR_SCHEDULES},
    "optimizer:Adam": signature(FusedAdam), "optimizer:Lamb": signature(FusedLamb),
    "optimizer:Lion": signature(FusedLion),
    "optimizer:Adagrad": signature(torch.optim.Adagrad), "optimizer:SGD": signature(torch.optim.SGD),
}
print("JSON" + json.dumps(out, default=str))
'''

# Attributes of DeepSpeed's objects that are not keys of the configuration.
_NOT_KEYS = {
    "pipeline", "mpu", "tp_group", "injection_policy_tuple", "max_acceptable_batch_size", "micro_batches",
    "prefer_larger_batch_size",
    "load_path", "start_step", "end_step", "max_grad_norm", "params", "leaf_module", "offload_param",
    "offload_optimizer",
    "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "stage3_gather_fp16_weights_on_model_save",
    "kernel_inject",
    "differentiable", "tp", "expert_w3", "curriculum_learning", "dynamic_batching",
    "fp16_mixed_quantize", "quantize_change_ratio",  # a section, which DeepSpeed flattens
}  # fmt: skip


def main(python: str) -> int:
    """Prints the differences. Returns 1 if there are any."""
    from deepspeed_c.config import load_config

    run = subprocess.run([python, "-c", _PEER], capture_output=True, text=True, check=False, timeout=300)
    line = next((line for line in run.stdout.splitlines() if line.startswith("JSON")), None)
    if line is None:
        print(run.stdout, run.stderr, file=sys.stderr)
        return 2
    n_same = n_different = 0
    for section, theirs in json.loads(line[4:]).items():
        ours = _ours(load_config, section)
        for name, value in theirs.items():
            if name in _NOT_KEYS or name.startswith("_"):
                continue
            mine = ours.get(name, "(no such key)")
            if json.loads(json.dumps(mine)) == value or (mine == "fp16" and value == "torch.float16"):
                n_same += 1
            else:
                n_different += 1
                print(f"{section}.{name}: DeepSpeed {value!r}, here {mine!r}")
    print(f"{n_same} defaults are equal, {n_different} differ")
    return 1 if n_different else 0


def _ours(load_config, section: str) -> dict:
    if ":" in section:
        key, kind = section.split(":")
        needed = {"total_num_steps": 1, "cycle_min_lr": 0, "cycle_max_lr": 1} if key == "scheduler" else {}
        from deepspeed_c.config.schedule import SCHEDULES
        from deepspeed_c.config.schema import fields_of

        if key == "scheduler":
            needed = {
                name: value for name, value in needed.items() if name in fields_of(SCHEDULES[kind.lower()].params)
            }
        tree = load_config({key: {"type": kind, "params": needed}}, world_size=1, batch="skip").resolved_dict()
        return tree[key]["params"]
    if section in ("zero_optimization.zenflow", "weight_quantization"):
        from deepspeed_c.config.model import WeightQuantization
        from deepspeed_c.config.offload import ZenFlow

        struct = (ZenFlow if "zenflow" in section else WeightQuantization)()
        return {name: getattr(struct, name) for name in struct.__struct_fields__}
    tree = load_config({}, world_size=1, batch="skip").resolved_dict()
    for part in filter(None, section.split(".")):
        tree = tree[part]
    return tree


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python compare_defaults.py PYTHON_WITH_DEEPSPEED")
    sys.exit(main(sys.argv[1]))
