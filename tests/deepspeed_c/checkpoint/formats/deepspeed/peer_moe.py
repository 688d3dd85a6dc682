"""Runs in a Python that has DeepSpeed: trains a small model with experts, saves or loads a checkpoint, and reports every
tensor of every rank as DeepSpeed shows it. Started like peer.py, with the same kind of SPECS.
"""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from peer import main, show
from tiny_moe import TinyMoE, train


def whole_names(engine, named: dict) -> dict:
    """``named`` with experts numbered over all ranks."""
    firsts = {}
    for path, module in engine.module.named_modules():
        if isinstance(module, MoE):
            rank = deepspeed.comm.get_rank(group=module.deepspeed_moe.ep_group)
            firsts[f"{path}.deepspeed_moe.experts.deepspeed_experts."] = rank * module.num_local_experts
    found = {}
    for name, value in named.items():
        for prefix, first in firsts.items():
            if name.startswith(prefix):
                number, _, rest = name.removeprefix(prefix).partition(".")
                name = f"{prefix}{first + int(number)}.{rest}"
        found[name] = value
    return found


def shown(engine, states: list[str]) -> dict:
    report = show(engine, states)
    for kind in ("param", "master", "buffer"):
        report[kind] = whole_names(engine, report[kind])
    report["state"] = {state: whole_names(engine, found) for state, found in report["state"].items()}
    return report


def merged(report: dict) -> dict:
    """The tensors of all ranks. Collective."""
    everyone = [None] * deepspeed.comm.get_world_size()
    torch.distributed.all_gather_object(everyone, report)
    for other in everyone:
        for kind in ("param", "master"):
            report[kind] = {**other[kind], **report[kind]}
        for state in report["state"]:
            report["state"][state] = {**other["state"][state], **report["state"][state]}
    return report


def run(spec: dict) -> None:
    torch.manual_seed(7)
    config, states = spec["config"], spec["states"]
    deepspeed.utils.groups._EXPERT_PARALLEL_GROUP.clear()
    deepspeed.utils.groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    model = TinyMoE(MoE, spec["ep_sizes"])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)
    report: dict = {"losses": []}
    first, losses = 0, report["losses"]
    if load := spec.get("load"):
        path, _ = engine.load_checkpoint(load, tag=spec.get("load_tag"))
        if path is None:
            raise SystemExit("DeepSpeed found nothing to load")
        report["loaded"] = merged(shown(engine, states))
        first = engine.global_steps
    losses += train(engine, first, spec["steps"])
    if save := spec.get("save"):
        engine.save_checkpoint(save, tag=spec["tag"], client_state=spec.get("client_state", {}))
        report["saved"] = merged(shown(engine, states))
    losses += train(engine, first + spec["steps"], spec.get("more_steps", 0))
    report["end"] = merged(shown(engine, states))
    if engine.global_rank == 0:
        torch.save(report, spec["report"])
    deepspeed.comm.barrier()
    engine.destroy()


if __name__ == "__main__":
    main(run)
