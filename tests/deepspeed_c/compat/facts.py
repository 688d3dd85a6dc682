"""Print the behaviour of DeepSpeed's names as one JSON object.

With the argument "ours" the names lead to deepspeed_c, otherwise to the installed DeepSpeed.
"""

from __future__ import annotations

import importlib
import json
import sys

if sys.argv[1:] == ["ours"]:
    import deepspeed_c

    deepspeed_c.install_as_deepspeed(force=True)

import torch
from getter_facts import getters
from torch import nn

PLAIN = (str, int, float, list, tuple, type(None))


def constants(module: str) -> dict[str, object]:
    """All constants of a module, except texts of several lines."""
    loaded = importlib.import_module(module)
    names = [name for name in dir(loaded) if name.isupper() and not name.startswith("_")]
    values = {name: getattr(loaded, name) for name in names}
    return {k: v for k, v in values.items() if isinstance(v, PLAIN) and "\n" not in str(v) and k != "PSUTILS_INSTALLED"}


def outcome(function, *args, **kwargs) -> object:
    """The result of a call, or "error". Classes of errors are not compared."""
    try:
        found = function(*args, **kwargs)
    except (ValueError, TypeError, AssertionError, AttributeError, KeyError, RuntimeError):
        return "error"
    return _changed(found) if hasattr(found, "model_dump") else found


def _changed(model) -> dict[str, object]:
    """The values of a model that differ from the defaults of its class. A class without defaults for all fields, and a
    small class, give all values."""
    dump = model.model_dump(mode="json")
    if any(field.is_required() for field in type(model).model_fields.values()) or len(dump) < 9:
        return dump
    defaults = type(model)().model_dump(mode="json")
    return {k: v for k, v in dump.items() if k not in defaults or v != defaults[k]} | {"n": len(dump)}


def models() -> dict[str, object]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
        OffloadDeviceEnum,
    )

    cases = {
        DeepSpeedZeroConfig: [
            *({}, {"stage": 3}, {"stage": "2"}, {"stage": True}, {"stage": 4}, {"stage": 2.0}, {"stage": "two"}),
            *({"stage3_prefetch_bucket_size": 1e7}, {"prefetch_bucket_size": 5}, {"reduce_bucket_size": "500"}),
            *({"reduce_bucket_size": 0}, {"reduce_bucket_size": 1.5}, {"reduce_bucket_size": "auto"}, {"stge": 1}),
            *({"cpu_offload": True}, {"cpu_offload": False}, {"cpu_offload_param": True, "stage": 3}),
            *({"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}, {"cpu_offload_use_pin_memory": True}),
            *({"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp/x", "ratio": 0.5}},),
            *({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5, "pipeline_read": "true"}},),
            *({"stage": 3, "overlap_comm": None}, {"overlap_comm": "no"}, {"zeropp_loco_param": {"err_beta": 0.5}}),
            *({"stage3_gather_fp16_weights_on_model_save": True}, {"leaf_module": {"classes": "a.B"}}),
            *({"offload_param": {"device": "tpu"}}, {"offload_param": "cpu"}, {"offload_param": None}),
            *({"zenflow": {"topk_ratio": 0.2, "select_interval": 3}}, {"zenflow": {"topk_ratio": 1.0}}),
        ],
        DeepSpeedFP16Config: [
            *({}, {"enabled": "yes"}, {"enabled": 2}, {"loss_scale": "128"}, {"loss_scale": -1}, {"enabled": "auto"}),
            *({"enabled": True, "loss_scale_window": 0}, {"loss_scale_window": 0}, {"initial_scale_power": 8.0}),
        ],
        DeepSpeedBF16Config: [{}, {"enabled": "on", "check_grad_overflow": "off"}, {"check_overflow": True}],
        HybridEngineConfig: [{}, {"enabled": True, "max_out_tokens": "1024"}],
        CommsLoggerConfig: [{}, {"prof_ops": ["all_reduce"], "verbose": 1}],
        DeepSpeedZeroOffloadParamConfig: [
            {},
            {"device": OffloadDeviceEnum.nvme, "buffer_size": 1e8},
            {"max_in_cpu": -1},
        ],
        DeepSpeedZeroOffloadOptimizerConfig: [{}, {"device": "cpu", "fast_init": "true"}, {"nvme_path": 3}],
    }
    found = {f"{cls.__name__}{case}": outcome(cls, **case) for cls, several in cases.items() for case in several}
    found |= {f"defaults of {cls.__name__}": cls().model_dump(mode="json") for cls in cases}
    one = DeepSpeedZeroConfig(stage=3, stage3_max_live_parameters=7)
    found["by alias"] = one.model_dump(by_alias=True, exclude_unset=True)
    found["defaults left out"] = one.model_dump(exclude_defaults=True)
    found["without none"] = sorted(one.model_dump(exclude_none=True))
    found["text"] = json.loads(DeepSpeedFP16Config(loss_scale=2).model_dump_json())
    found["set"] = sorted(one.model_fields_set)
    found["equal"] = [
        one == DeepSpeedZeroConfig.model_validate(one.model_dump(exclude_unset=True)),
        one == DeepSpeedZeroConfig(stage=3),
    ]
    found["assignment"] = [outcome(setattr, one, "reduce_bucket_size", v) for v in ("5", -1)] + [one.reduce_bucket_size]
    found["copy"] = one.model_copy(update={"stage": 1}).stage
    found["defaults"] = [DeepSpeedZeroConfig.model_fields[n].get_default() for n in ("reduce_bucket_size", "stage")]
    found["old form"] = [
        get_zero_config({"zero_optimization": v, "allgather_size": 9}).allgather_bucket_size for v in (True, False)
    ]
    found["pipeline"] = DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline
    found["scaler"] = DeepSpeedFP16Config(hysteresis=4).dynamic_loss_scale_args()
    found["monitor"] = [get_monitor_config({k: {"enabled": True}}).enabled for k in ("wandb", "comet", "none")]
    return found


def subclass() -> dict[str, object]:
    from deepspeed.runtime.config_utils import (
        DeepSpeedConfigModel,
        ScientificNotationEncoder,
        get_config_default,
        pp_int,
    )

    class Inner(DeepSpeedConfigModel):
        dtype: torch.dtype = torch.float16
        names: list[str] = ["n"]  # noqa: RUF012

    class Outer(DeepSpeedConfigModel):
        width: int
        inner: Inner = Inner()
        ratio: float | None = None
        table: dict[str, int] = {"t": 1}  # noqa: RUF012

    cases = (
        {"width": "3"}, {}, {"width": 1, "inner": {"names": ["a"]}}, {"width": 1, "table": {"x": "2"}}, {"width": "x"},
    )  # fmt: skip
    cases += (
        {"width": 1, "inner": {"names": [1]}},
        {"width": 1, "ratio": "0.5"},
        {"width": None},
        {"width": 1, "other": 2},
    )
    return {
        **{f"Outer{case}": outcome(Outer, **case) for case in cases},
        "default": get_config_default(Outer, "ratio"),
        "no default": outcome(get_config_default, Outer, "width"),
        "pp_int": [repr(pp_int(1e5)), repr(pp_int(3, "three")), pp_int(4) + 1],
        "encoder": json.dumps({"a": 5e8, "b": [1, 2000.0], "c": {"d": True, "e": "x"}}, cls=ScientificNotationEncoder),
    }


ATTRIBUTES = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print"),
    *("gradient_clipping", "zero_optimization_stage", "zero_enabled", "optimizer_name", "optimizer_params"),
    *("scheduler_name", "scheduler_params", "communication_data_type", "prescale_gradients", "dump_state"),
    *("gradient_predivide_factor", "gradient_allreduce_op", "sparse_gradients_enabled", "disable_allgather"),
    *("wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last", "torch_autocast_enabled"),
    *("torch_autocast_dtype", "torch_autocast_lower_precision_safe_modules", "amp_enabled", "amp_params"),
    *("pld_enabled", "pld_params", "checkpoint_tag_validation_enabled", "checkpoint_tag_validation_fail"),
    *("load_universal_checkpoint", "use_node_local_storage", "grad_accum_dtype", "param_dtype", "buffer_dtype"),
    *("aio_config", "pipeline", "eigenvalue_enabled", "eigenvalue_max_iter", "eigenvalue_layer_name", "world_size"),
    *("global_rank", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "elasticity_enabled"),
    *("graph_harvesting", "seq_parallel_communication_data_type", "managed_gradient_accumulation", "log_level"),
    *("mics_shard_size", "checkpoint_parallel_write_pipeline", "optimizer_legacy_fusion", "data_efficiency_enabled"),
    *("curriculum_enabled_legacy", "use_data_before_expert_parallel_"),
)


def configs() -> dict[str, object]:
    from deepspeed import DeepSpeedConfig
    from deepspeed.runtime.config import DtypeEnum

    class Mpu:
        def get_data_parallel_world_size(self) -> int:
            return 4

    batch = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    triples = [(16, None, None), (None, 2, None), (None, 2, 3), (16, 2, None), (16, None, 2), (16, 2, 2), (24, 2, 2)]
    triples += [(None, None, None), (None, None, 2), (10, 3, None), (0, None, None), (-8, None, None)]
    found: dict[str, object] = {}
    for triple in triples:
        config = {key: value for key, value in zip(batch, triple) if value is not None}
        made = outcome(DeepSpeedConfig, config, mpu=Mpu())
        found[str(triple)] = made if made == "error" else [getattr(made, key) for key in batch]
    sections = [
        {},
        {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "communication_data_type": "fp16"},
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "scheduler": {"type": "WarmupLR", "params": {}}},
        {"optimizer": {"type": "RMSprop"}, "checkpoint": {"tag_validation": "Fail", "use_node_local_storage": True}},
        {"amp": {"enabled": True, "opt_level": "O2"}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        {"pipeline": {"stages": 4}, "aio": {"queue_depth": 32}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"progressive_layer_drop": {"enabled": True, "theta": 0.5}, "gradient_allreduce_op": "sum"},
        {"checkpoint": {"tag_validation": "Ignore", "load_universal": True}, "flops_profiler": {"enabled": True}},
    ]
    usual: dict[str, object] = {}
    for config in sections:
        made = DeepSpeedConfig({"train_batch_size": 4, **config})
        values = {name: getattr(made, name) for name in ATTRIBUTES}
        plain = {k: str(v) if isinstance(v, torch.dtype) else v for k, v in values.items()}
        usual = plain if config == {} else usual
        found[f"{config}"] = {k: v for k, v in plain.items() if config == {} or v != usual[k]}
        found[f"{config} models"] = [made.zero_config.stage, made.float16_config.enabled, made.bfloat16_config.enabled]
        found[f"{config} objects"] = [made.flops_profiler_config.enabled, made.activation_checkpointing_config.profile]
        found[f"{config} more"] = [made.comms_config.comms_logger_enabled, made.nebula_config.load_path]
    both = {"train_batch_size": 4, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    found["both"] = outcome(DeepSpeedConfig, both)
    found["dtypes"] = [str(DtypeEnum(name).value) for name in ("half", "torch.bfloat16", "float", "int8")]
    found["no dtype"] = outcome(DtypeEnum, "fp8")
    return found


def experts() -> dict[str, object]:
    from deepspeed.moe import utils

    params = [nn.Parameter(torch.zeros(n)) for n in (1, 2, 3, 4, 5, 6)]
    for i, param in enumerate(params[2:]):
        param.allreduce, param.group_name = False, f"ep_size_{2 + 2 * (i % 2)}"
    names = {id(param): i for i, param in enumerate(params)}

    def show(groups):
        # DeepSpeed has groups of experts in the random order of a set.
        shown = [{k: [names[id(p)] for p in v] if k == "params" else v for k, v in group.items()} for group in groups]
        return sorted(shown, key=lambda group: json.dumps(group, sort_keys=True))

    def make():
        return [{"params": params[:4], "name": "a", "lr": 1}, {"params": params[4:], "name": "b"}]

    split = utils.split_params_into_different_moe_groups_for_optimizer
    for param in params[1:3]:
        param.grad = torch.ones_like(param)
    grads = utils.split_params_grads_into_shared_and_expert_params(params)
    dense = [nn.Parameter(torch.zeros(2))]
    return {
        "split": show(split(make())),
        "small": show(split(make(), max_group_size=6)),
        "whole": show(split(tuple(make()), max_group_size=None)),
        "one": show(split({"params": params[:3], "name": "x"})),
        "no name": [len(group["params"]) for group in split({"params": dense})],
        "wrong": outcome(split, 3),
        "kinds": [utils.is_moe_param(param) for param in params],
        "shared": [len(part) for part in utils.split_params_into_shared_and_expert_params(params)],
        "grads": [[g.numel() for g in part] for part in grads],
        "group": [utils.is_moe_param_group({"moe": True}), utils.is_moe_param_group({})],
        "configure": show(utils.configure_moe_param_groups(list(params))),
        "configured": utils.configure_moe_param_groups([{"moe": True}]),
        "configure wrong": outcome(utils.configure_moe_param_groups, [1]),
        "has": list(utils.has_moe_layers(nn.Linear(2, 2))),
    }


def small() -> dict[str, object]:
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr
    from deepspeed.utils.torch import is_functorch_transforming, required_torch_version

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3)))
    recursive_setattr(model, "1.0.out_features", 7)
    transforming = []
    torch.func.grad(lambda x: transforming.append(is_functorch_transforming()) or x.sum())(torch.ones(2))
    versions = [("2.0", None), ("99", None), (None, "2.1"), (None, "99"), ("2.1", "99"), (2.1, None), (None, None)]
    return {
        "recursive": [recursive_getattr(model, "1.0").out_features, outcome(recursive_getattr, model, "1.x")],
        "versions": [outcome(required_torch_version, *each) for each in versions],
        "functorch": [*transforming, is_functorch_transforming()],
    }


def gradients() -> dict[str, object]:
    from deepspeed.runtime import utils
    from deepspeed.runtime.zero.stage_1_and_2 import get_alignment_padding

    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2))]
    for param in params[:2]:
        param.grad = (torch.arange(param.numel()).view_as(param) - 3.0) / 2
    flat = [nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(4))]
    for param in flat:
        param.grad = torch.arange(1.0, param.numel() + 1)
    mask = [torch.tensor([[1, 3], [5, 6]]), torch.empty(0, 2, dtype=torch.long)]
    norms = [utils.get_flattened_grad_norm(params, norm_type=p) for p in (1, 2, 3, float("inf"))]
    norms += [utils.get_flattened_grad_norm(params[0]), utils.get_flattened_grad_norm(flat, grad_norm_mask=mask)]
    bad = nn.Parameter(torch.zeros(2))
    bad.grad = torch.tensor([1.0, float("nan")])
    norms += [utils.get_flattened_grad_norm([bad]), utils.get_flattened_grad_norm([bad], norm_type=1)]

    called: list[object] = []
    x = torch.ones(3, requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    outputs = {"a": [x * 2], "b": (x * 3, "text", unused.detach())}
    manager = utils.register_output_backward_hooks(outputs, lambda: called.append("once"), lambda g: g * 10)

    def count(grad):
        called.append(utils.count_used_parameters_in_backward([x, unused, x.detach()]))

    outputs["a"][0].register_hook(count)
    (outputs["a"][0].sum() + outputs["b"][0].sum()).backward()
    again = (x * 2).sum()
    manager.register_hooks_on_outputs(again)
    again.backward()

    adam = torch.optim.Adam([nn.Parameter(torch.ones(4))])
    adam.param_groups[0]["params"][0].grad = torch.ones(4)
    adam.step()
    (state,) = adam.state.values()
    before = state["exp_avg"].tolist()
    utils.offload_adam_states(adam, "cpu")
    kept = sorted(state)
    utils.reload_adam_states(adam, "cpu")
    return {
        "norms": [round(norm, 5) for norm in norms],
        "zeros": [utils.get_grad_zeros(params), utils.get_grad_zeros(flat[0])],
        "called": called,
        "grad": x.grad.tolist(),
        "outside": outcome(utils.count_used_parameters_in_backward, [x]),
        "apis": utils.check_internal_apis_for_count_used_parameters(),
        "losses": [
            utils.maybe_loss_for_backward(v) for v in (x.sum(), x, x.sum().detach(), 1.0, (x * 1).sum().view(1, 1))
        ],
        "states": [kept, state["exp_avg"].tolist() == before],
        "cache": utils.is_transformers_cache(x),
        "padding": [get_alignment_padding([torch.zeros(n) for n in (3, 4)], a) for a in (1, 2, 7, 16)],
    }


def folders() -> dict[str, object]:
    import tempfile

    from deepspeed import checkpoint
    from deepspeed.checkpoint.ds_to_universal import dp_index_to_str, dump_param_fragment
    from deepspeed.checkpoint.reshape_utils import partition_data
    from deepspeed.utils.zero_to_fp32 import parse_model_states, parse_optim_states, zero3_partitioned_param_info

    def show(value):
        if torch.is_tensor(value):
            return value.tolist()
        if isinstance(value, dict):
            return {str(key): show(each) for key, each in value.items()}
        return [show(each) for each in value] if isinstance(value, (list, tuple)) else value

    big, half = checkpoint.model_3d_desc(4, 2, 2), checkpoint.model_3d_desc(2, 1, 2)
    a, b = (
        {"w": torch.ones(2), "n": 1, "l": [torch.zeros(1)], "only": 3},
        {"w": torch.zeros(3), "n": 2, "l": [torch.ones(1)], "x": 4},
    )
    found = {
        "reshape": [
            checkpoint.reshape_meg_2d_parallel(4, 4, *to).map for to in ((4, 4), (2, 4), (4, 2), (2, 2), (1, 1))
        ],
        "more": outcome(checkpoint.reshape_meg_2d_parallel, 1, 2, 2, 2),
        "uneven": outcome(checkpoint.reshape_meg_2d_parallel, 3, 2, 2, 2),
        "maps": [each.map for each in big.reshape(half)],
        "cannot": [list(half.can_reshape(big)), outcome(half.reshape, big)],
        "desc": [big.get_desc(), big.world_size(), list(big.is_valid(3, 1, 1)), list(big.is_valid(4, 2, 0))],
        "merged": show(checkpoint.merge_state(a, b)),
        "no merge": [
            outcome(checkpoint.merge_state, *each) for each in ((1, 1.0), ([1], [1, 2]), ({"a": 1}, {"a": []}))
        ],
        "parts": [partition_data([1, 2, 3, 4], 2), outcome(partition_data, [1, 2, 3], 2)],
        "dp": [dp_index_to_str(n) for n in (0, 7, 12, 345)],
        "zero3": [list(zero3_partitioned_param_info(n, 4)) for n in (8, 9, 3)],
        "subparam": checkpoint.SubparamShape(["a.*"], ((2, 3), 4), 0).partition_dim,
    }
    with tempfile.TemporaryDirectory() as folder:
        found["empty"] = [outcome(checkpoint.ZeROCheckpoint, folder), outcome(checkpoint.DeepSpeedCheckpoint, folder)]
        for mp in range(2):
            model = {
                "module": {"b": torch.ones(2, dtype=torch.float16), "w": torch.ones(mp + 1, 3)}, "buffer_names": ["b"],
                "param_shapes": [{"w": torch.Size([3, 1])}], "shared_params": {"v": "w"}, "ds_version": "0.19.6",
                "iteration": 5, "args": {"lr": 1},
            }  # fmt: skip
            torch.save(model, f"{folder}/mp_rank_{mp:02d}_model_states.pt")
            for dp in range(12):
                optimizer = {
                    "zero_stage": 2, "partition_count": [12], "group_paddings": [1 if dp == 11 else 0],
                    "single_partition_of_fp32_groups": [torch.full((4,), 10.0 * mp + dp)],
                    "base_optimizer_state": {"state": {0: {"exp_avg": torch.arange(4.0) + dp, "step": 3}}},
                }  # fmt: skip
                state = {"optimizer_state_dict": optimizer, "param_shapes": "dropped"}
                torch.save(state, f"{folder}/zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
        whole = checkpoint.DeepSpeedCheckpoint(folder)
        fewer = checkpoint.DeepSpeedCheckpoint(folder, tp_degree=1, dp_degree=4)
        optimizers = [f"{folder}/zero_pp_rank_{dp}_mp_rank_00_optim_states.pt" for dp in range(12)]
        names = (
            "tp_degree", "pp_degree", "dp_degree", "original_world_size", "world_size", "layer_count", "layer_keys",
        )  # fmt: skip
        found |= {
            "descriptor": checkpoint.get_model_3d_descriptor(folder).get_desc(),
            "degrees": [[getattr(each, name) for name in names] for each in (whole, fewer)],
            "changes": [
                [each.is_change_tp_degree(), each.is_change_pp_degree(), each.is_change_dp_degree()]
                for each in (whole, fewer)
            ],
            "files": [
                [name.split("/")[-1] for name in each.get_zero_files(0, 0, dp)]
                for each in (whole, fewer)
                for dp in (0, 3)
            ],
            "state": show(whole.get_zero_checkpoint_state(0, 1, 11)),
            "fewer": show(fewer.get_zero_checkpoint_state(0, 0, 3)),
            "padded": show(fewer.get_zero_checkpoint_state(0, 0, 3, strip_tensor_paddings=False)),
            "no rank": outcome(fewer.get_zero_files, 0, 0, 4),
            "info": [whole.get_iteration(), whole.get_args(), whole.get_checkpoint_info()],
            "model": show(fewer.get_2d_parallel_state(tp_index=0, pp_index=0)["module"]["b"]),
            "model files": [name.split("/")[-1] for name in fewer.get_2d_parallel_files(tp_index=0, pp_index=0)],
            "parsed": show(vars(parse_model_states([f"{folder}/mp_rank_00_model_states.pt"])[0])),
            "not a model": outcome(parse_model_states, [optimizers[0]]),
            "optimizers": show(parse_optim_states(optimizers, folder)),
            "too few": outcome(parse_optim_states, optimizers[:3], folder),
        }
        dump_param_fragment(folder, 1, 7, "fp32", torch.arange(6.0), "layer.w", 2, 3)
        dump_param_fragment(folder, 1, 7, "step", 9, "layer.w", 2, 3)
        found["fragment"] = [show(torch.load(f"{folder}/layer.w/1/{name}.07")) for name in ("fp32", "step")]
    return found


def cores() -> dict[str, object]:
    import os
    import tempfile

    from deepspeed.utils import get_numactl_cmd
    from deepspeed.utils.numa import get_numa_cores, parse_range_list

    hosts = {
        "two": ["0 1 2 3", "4 5 6 7"], "one": ["0 1 2 3 4 5 6 7"], "hbm": ["0 1 2 3", "4 5 6 7", "", ""],
        "fake": ["0 1 2 3", "0 1 2 3", "4 5 6 7", "4 5 6 7"],
    }  # fmt: skip
    calls = [
        ("0-7", 2, 0), ("0-7", 2, 1), ("0-7", 1, 0), ("0,2,4-7", 2, 1), ("1-3,6", 4, 3), ("0-1", 3, 0), ("3-1", 1, 0),
    ]  # fmt: skip
    found = {"lists": [outcome(parse_range_list, text) for text in ("0,2-4,6", "5", "2-4,3", "a", "1-2-3", "")]}
    with tempfile.TemporaryDirectory() as folder:
        path, os.environ["PATH"] = os.environ["PATH"], f"{folder}:/usr/bin:/bin"
        for name, nodes in hosts.items():
            lines = [f"available: {len(nodes)} nodes (0-{len(nodes) - 1})"]
            lines += [
                f"node {i} cpus:{' ' + text if text else ''}\nnode {i} size: 100 MB" for i, text in enumerate(nodes)
            ]
            with open(f"{folder}/numactl", "w", encoding="ascii") as file:
                file.write("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
            os.chmod(f"{folder}/numactl", 0o755)
            found[name] = [get_numa_cores(), *(outcome(get_numactl_cmd, *call) for call in calls)]
        os.environ["KMP_AFFINITY"] = "compact"
        found["affinity"] = outcome(get_numactl_cmd, "0-7", 1, 0)
        del os.environ["KMP_AFFINITY"]
        os.environ["PATH"] = path
    return found


def engines() -> dict[str, object]:
    import tempfile

    from deepspeed import DeepSpeedConfig
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

    info = CheckpointCommitInfo(tag="t", save_dir="d", save_latest=True)
    with tempfile.TemporaryDirectory() as folder:
        kinds = []
        config = DeepSpeedConfig({"train_batch_size": 1})
        for engine in (TorchCheckpointEngine(), TorchCheckpointEngine(config)):
            engine.makedirs(f"{folder}/a/b", exist_ok=True)
            engine.create(info)
            shared = torch.arange(3.0)
            engine.save({"w": shared, "v": shared, "n": [1, "x"]}, f"{folder}/a/b/file.pt")
            with open(f"{folder}/a/b/file.pt", "rb") as file:
                kinds.append(file.read(2) == b"PK")
            loaded = engine.load(f"{folder}/a/b/file.pt", map_location="cpu")
            kinds += [loaded["w"].tolist(), loaded["n"], loaded["w"].data_ptr() == loaded["v"].data_ptr()]
            kinds += [engine.commit(info), engine.name, engine.is_decoupled(), engine.is_data_parallel_writer(1)]
            kinds += [engine.get_commit_info(), engine.preserves_storage_sharing(), engine.set_commit_info(info)]
    return {"kinds": kinds, "abstract": outcome(CheckpointEngine), "config": config.checkpoint_config}


def devices() -> dict[str, object]:
    from deepspeed.utils import OnDevice, fragment_address

    context = OnDevice(dtype=torch.float16, device="meta")
    make = context.fp_tensor_constructor(torch.zeros, torch.bfloat16)
    tensors = [make(2), make(2, dtype=torch.int32), make(2, device="cpu")]
    tensors.append(context.get_new_tensor_fn_for_dtype(torch.float16)(torch.Tensor, 2, 3))
    return {
        "made": [[str(each.dtype), str(each.device), list(each.shape)] for each in tensors],
        "address": [fragment_address(numel=3, start=1) == fragment_address(3, 1), fragment_address(3, 1).start],
    }


CONSTANTS = (
    "deepspeed.runtime.constants", "deepspeed.runtime.lr_schedules", "deepspeed.checkpoint.constants",
    "deepspeed.runtime.swap_tensor.constants", "deepspeed.comm.constants", "deepspeed.utils.timer",
)  # fmt: skip


def main() -> None:
    import deepspeed

    facts = {f"constants of {module}": constants(module) for module in CONSTANTS}
    facts |= {"models": models(), "subclass": subclass(), "configs": configs(), "experts": experts(), "small": small()}
    facts |= {
        "gradients": gradients(),
        "folders": folders(),
        "cores": cores(),
        "engines": engines(),
        "devices": devices(),
        "getters": getters(),
    }
    facts["is_compile_supported"] = deepspeed.is_compile_supported()
    print("FACTS " + json.dumps(facts, default=str))


if __name__ == "__main__":
    main()
