"""Runs in a Python that has DeepSpeed: trains a tiny model, saves or loads a checkpoint, and reports every tensor as
DeepSpeed itself shows it.

    RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python peer.py SPECS.json

SPECS is a list of objects. ``run`` below documents their keys. Rank 0 writes a report of each object with torch.save.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tiny import Tiny, groups_of, train
from torch import nn


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer | None:
    groups = groups_of(model)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if kind == "fused":
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(groups, lr=0.01, betas=(0.9, 0.95))
    if kind == "one_group":
        return torch.optim.AdamW([p for group in groups for p in group["params"]], lr=0.01, betas=(0.9, 0.95))
    if kind == "cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=0.01, betas=(0.9, 0.95))
    raise ValueError(kind)


def is_handled(p: nn.Parameter) -> bool:
    # The mapping is None on a rank that holds nothing of the parameter, but this rank too takes part in the collective.
    return hasattr(p, "_hp_mapping") or hasattr(p, "ds_id")


def show(engine, states: list[str]) -> dict:
    """Return every tensor by name. They come from DeepSpeed's accessors, or from its optimizer at stage 0, where the
    accessors do not work."""
    report: dict = {"param": {}, "master": {}, "buffer": {}, "state": {name: {} for name in states}, "step": {}}
    wrapped = engine.optimizer
    inner = getattr(wrapped, "optimizer", wrapped)
    if hasattr(wrapped, "_lazy_init_hp_params_optimizer_state") and engine.global_steps:
        # With several groups DeepSpeed links the states after the first step of the first group. The states of the
        # other groups do not exist then.
        wrapped._hp_optimizer_states_linked = False
        wrapped._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        if hasattr(p, "ds_id"):
            with deepspeed.zero.GatheredParameters([p]):
                report["param"][name] = p.detach().clone()
        else:
            report["param"][name] = p.detach().clone()
        if not p.requires_grad:
            continue
        if is_handled(p):
            report["master"][name] = safe_get_full_fp32_param(p).clone()
            for state in states:
                report["state"][state][name] = safe_get_full_optimizer_state(p, state).clone()
        elif p in inner.state:
            for state in states:
                report["state"][state][name] = inner.state[p][state].clone()
    names = engine.param_names
    if not report["master"] and hasattr(wrapped, "fp32_groups_flat"):
        for low, flat in zip(wrapped.fp16_groups, wrapped.fp32_groups_flat):
            at = 0
            for p in low:
                cut = slice(at, at + p.numel())
                report["master"][names[p]] = flat[cut].view(p.shape).clone()
                for state in states:
                    report["state"][state][names[p]] = inner.state[flat][state][cut].view(p.shape).clone()
                at += p.numel()
    elif not report["master"] and hasattr(wrapped, "fp32_groups"):
        for low, masters in zip(wrapped.fp16_groups, wrapped.fp32_groups):
            for p, master in zip(low, masters):
                report["master"][names[p]] = master.clone()
                for state in states:
                    report["state"][state][names[p]] = inner.state[master][state].clone()
    report["buffer"] = {name: b.clone() for name, b in engine.module.named_buffers()}
    report["lr"] = [group["lr"] for group in inner.param_groups]
    report["counters"] = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
    }
    report["scheduler"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    scaler = getattr(wrapped, "loss_scaler", None)
    report["scale"] = getattr(scaler, "cur_scale", getattr(wrapped, "cur_scale", None))
    return report


def run(spec: dict) -> None:
    torch.manual_seed(7)
    config = spec["config"]
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage == 3 and spec.get("zero_init"):
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Tiny()
    else:
        model = Tiny()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(spec["optimizer"], model), config=config)
    states = spec["states"]
    report: dict = {"version": deepspeed.__version__, "losses": []}
    first = 0
    losses = report["losses"]
    if load := spec.get("load"):
        path, client = engine.load_checkpoint(load, tag=spec.get("load_tag"), **spec.get("load_arguments", {}))
        if path is None:
            raise SystemExit("DeepSpeed found nothing to load")
        report["client_state"] = {key: client.get(key) for key in spec.get("client_keys", [])}
        report["loaded"] = show(engine, states)
        first = engine.global_steps
    losses += train(engine, first, spec["steps"])
    if save := spec.get("save"):
        engine.save_checkpoint(save, tag=spec["tag"], client_state=spec.get("client_state", {}))
        report["saved"] = show(engine, states)
    if more := spec.get("more_steps"):
        losses += train(engine, first + spec["steps"], more)
    report["end"] = show(engine, states)
    if engine.global_rank == 0:
        torch.save(report, spec["report"])
    deepspeed.comm.barrier()
    engine.destroy()


def main(run: Callable[[dict], None]) -> None:
    """Calls ``run`` with each object of SPECS, on the ranks of this job."""
    with open(sys.argv[1]) as file:
        specs = json.load(file)
    torch.set_num_threads(1)
    # DeepSpeed refuses fp16 on a CPU without fp16 instructions; torch computes fp16 on it nevertheless.
    get_accelerator().is_fp16_supported = lambda: True
    # Otherwise DeepSpeed would first compile an all-reduce over shared memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    for spec in specs:
        run(spec)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(run)
