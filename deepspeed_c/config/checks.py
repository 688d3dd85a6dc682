"""Conflicts between values that are each valid alone."""

import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from ..errors import ConfigError
from .compression import compression_conflicts
from .same_bits import same_bits_conflicts
from .schema import Root, fields_of

__all__ = ["conflicts"]


# Possible values of keys that the checks below read and that other programs may fill in later.
_FILLINGS: dict[str, tuple] = {
    "fp16.enabled": (False, True),
    "bf16.enabled": (False, True),
    "zero_optimization.stage": (0, 1, 2, 3),
    "zero_optimization.offload_optimizer.device": ("none", "cpu"),
    "zero_optimization.offload_optimizer.nvme_path": ("/",),
    "zero_optimization.offload_param.device": ("none", "cpu"),
    "zero_optimization.offload_param.nvme_path": ("/",),
}


def conflicts(root: Root, unfilled: Collection[str] = ()) -> list[ConfigError]:
    """The conflicts that remain whatever values the keys ``unfilled`` get later."""
    keys = [key for key in _FILLINGS if key in unfilled]
    found: dict[str, tuple[str, str, str]] | None = None
    for filling in itertools.product(*(_FILLINGS[key] for key in keys)):
        filled = root
        for key, value in zip(keys, filling, strict=True):
            filled = _with(filled, key.split("."), value)
        here = {conflict[0]: conflict for conflict in _find(filled)}
        found = here if found is None else {where: found[where] for where in found if where in here}
    return [ConfigError(what, where=where, fix=fix) for where, what, fix in (found or {}).values()]


def _with(section: Any, path: list[str], value: Any) -> Any:
    """A copy of the section with one key, at any depth, changed."""
    attribute = fields_of(type(section))[path[0]].attribute
    if len(path) > 1:
        value = _with(getattr(section, attribute), path[1:], value)
    return msgspec.structs.replace(section, **{attribute: value})


def _find(root: Root) -> Iterator[tuple[str, str, str]]:
    """(where, what, fix) of each conflict."""
    fp16, bf16, zero = root.fp16, root.bf16, root.zero
    if fp16.enabled and bf16.enabled:
        yield "fp16.enabled, bf16.enabled", "both are true", "enable one of them"
    if root.amp.enabled and (fp16.enabled or bf16.enabled):
        yield "amp.enabled", "is true together with fp16 or bf16", "enable one of them"
    if fp16.enabled and fp16.is_dynamic:
        for name in ("loss_scale_window", "min_loss_scale"):
            if getattr(fp16, name) == 0:
                yield f"fp16.{name}", "is 0 with a dynamic loss scale", "write an integer > 0, or a static loss_scale"
        if fp16.initial_scale < fp16.min_loss_scale:
            yield (
                "fp16.initial_scale_power, fp16.min_loss_scale",
                f"the scale starts at {fp16.initial_scale:g}, below its floor {fp16.min_loss_scale}",
                "raise initial_scale_power or lower min_loss_scale",
            )
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield (
            "bf16.bf16_optimizer_states",
            "is true while bf16_master_weights_and_grads is false",
            "set both to true: moments are kept in bf16 only along with master weights",
        )
    if bf16.bf16_master_weights_and_grads and not zero.sharding.optimizer:
        yield "bf16.bf16_master_weights_and_grads", "is true at ZeRO stage 0", 'set "stage" to 1 or more'
    if root.data_types.param_dtype is not None:
        mode = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
        if root.data_types.param_dtype != mode:
            yield (
                "data_types.param_dtype",
                f"is {root.data_types.param_dtype} while the enabled sections make weights {mode}",
                "remove it: it follows from fp16.enabled and bf16.enabled",
            )
    if zero.zero_hpz_partition_size > 1:
        where = "zero_optimization.zero_hpz_partition_size"
        if not zero.sharding.parameters:
            yield (
                where,
                f"is {zero.zero_hpz_partition_size} at ZeRO stage {zero.stage}, which keeps weights whole on each rank",
                'set "stage" to 3, or the size to 1',
            )
        if zero.mics_shard_size > 0:
            yield (
                where,
                f"is {zero.zero_hpz_partition_size} beside mics_shard_size {zero.mics_shard_size}, whose gathers stay together",
                "set the size to 1, or mics_shard_size to -1",
            )
    offload = zero.offload_optimizer
    if offload.device != "none" and not zero.sharding.optimizer:
        yield (
            "zero_optimization.offload_optimizer.device",
            f"is {offload.device} at ZeRO stage 0, which shards no states",
            'set "stage" to 1, 2 or 3',
        )
    if offload.super_offload and offload.device != "cpu":
        yield (
            "zero_optimization.offload_optimizer.super_offload",
            f"is true with device {offload.device}: what is updated ahead of the step lies in host memory",
            'set "device" to "cpu"',
        )
    for name, section in (("offload_optimizer", offload), ("offload_param", zero.offload_param)):
        if section.device == "nvme" and not section.nvme_path:
            yield (
                f"zero_optimization.{name}.nvme_path",
                "is missing while device is nvme",
                "name a folder on the NVMe device",
            )
    if root.activation_checkpointing.offload.device == "nvme" and not root.activation_checkpointing.offload.nvme_path:
        yield (
            "activation_checkpointing.offload.nvme_path",
            "is missing while device is nvme",
            "name a folder on the NVMe device",
        )
    yield from _automatic_saves(root)
    yield from same_bits_conflicts(root)
    tuning = root.autotuning
    if tuning.end_profile_step < tuning.start_profile_step:
        yield (
            "autotuning.end_profile_step",
            f"is {tuning.end_profile_step}, before start_profile_step {tuning.start_profile_step}",
            "set it to start_profile_step or more",
        )
    if tuning.max_train_micro_batch_size_per_gpu < tuning.min_train_micro_batch_size_per_gpu:
        yield (
            "autotuning.max_train_micro_batch_size_per_gpu",
            f"is {tuning.max_train_micro_batch_size_per_gpu}, less than {tuning.min_train_micro_batch_size_per_gpu}",
            "set it to min_train_micro_batch_size_per_gpu or more",
        )
    yield from _state_dtype(root)
    yield from compression_conflicts(root.compression_training)
    if root.gradient_allreduce_op == "sum" and zero.sharding.parameters:
        yield "gradient_allreduce_op", "is sum at ZeRO stage 3", 'use "mean", or a stage below 3'
    if not root.managed_gradient_accumulation and zero.overlap_comm and not zero.sharding.gradients:
        yield (
            "managed_gradient_accumulation",
            f"is false with overlap_comm at ZeRO stage {zero.stage}",
            "set zero_optimization.overlap_comm to false, or use stage 2 or 3",
        )
    optimizer = root.optimizer
    if optimizer is not None and optimizer.type in ("Adam", "AdamW"):
        params = optimizer.params
        is_torch = params.get("torch_adam", False)
        for name, is_torchs in (("amsgrad", True), ("foreach", True), ("bias_correction", False)):
            if name in params and is_torchs != is_torch and (name == "foreach" or params[name] == is_torchs):
                yield (
                    f"optimizer.params.{name}",
                    f"is {'only' if is_torchs else 'not'} known to torch's Adam",
                    f"remove it, or set optimizer.params.torch_adam to {'true' if is_torchs else 'false'}",
                )


def _automatic_saves(root: Root) -> Iterator[tuple[str, str, str]]:
    section = root.checkpoint
    try:
        seconds = section.every_seconds
    except ConfigError as error:
        yield error.where, error.what, error.fix
        return
    if seconds is not None and not 0 < seconds < math.inf:
        yield "checkpoint.every", f"is {section.every!r}", "write a time above 0, or null for no saves"
    if seconds is not None and section.auto_resume is None:
        yield (
            "checkpoint.every",
            f"is {section.every!r}, and there is no folder to save to",
            "set checkpoint.auto_resume to a folder",
        )
    if section.auto_resume == "":
        yield "checkpoint.auto_resume", "is empty", "name a folder, or write null"


# Why an optimizer has no 8-bit states; the classes in ops/ give the same reasons.
_NO_INT8 = {
    "Lamb": "makes its update from the states as they are stored",
    "Adagrad": "has a sum that only grows, by less than a step of 8 bits soon",
    "Muon": "orthogonalises its momentum",
}


def _state_dtype(root: Root) -> Iterator[tuple[str, str, str]]:
    optimizer = root.optimizer
    if optimizer is None or optimizer.params.get("state_dtype") is None:
        return
    dtype, where = optimizer.params["state_dtype"], "optimizer.params.state_dtype"
    if dtype == "int8" and optimizer.type in _NO_INT8:
        yield (
            where,
            f"is int8, and {optimizer.type} {_NO_INT8[optimizer.type]}",
            'use "bf16" or "fp32"; Adam, AdamW, Lion and SGD have states of 8 bits',
        )
    if optimizer.params.get("torch_adam", False):
        yield where, "is not known to torch's Adam", "remove it, or set optimizer.params.torch_adam to false"
    if root.bf16.bf16_optimizer_states and dtype != "bf16":
        yield (
            f"{where}, bf16.bf16_optimizer_states",
            f"are {dtype} and true, which says bf16",
            "remove bf16_optimizer_states: state_dtype says what states are kept in",
        )
