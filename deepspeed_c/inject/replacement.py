"""The modules that take the places of a model's own in a cut."""

from __future__ import annotations

import torch

from deepspeed_c.inject.draws import DropoutRegion
from deepspeed_c.inject.experts import EmptyExperts, ExpertsBorder
from deepspeed_c.inject.layers import LinearAllreduce, LinearLayer, RowPicker, WordsEmbedding
from deepspeed_c.inject.own_heads import SharedKey
from deepspeed_c.inject.parts import RankParts
from deepspeed_c.inject.plan import Planned
from deepspeed_c.inject.ranks import TensorRanks

__all__ = ["replace_layers"]

# Attributes of a module that hold its forward hooks. One such hook, of peft, makes the embedding's outputs require a
# gradient.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def replace_layers(parts: RankParts, ranks: TensorRanks, regions: dict[str, DropoutRegion]) -> LinearLayer | None:
    """Put layers in the places of the modules that the list names; parameters are cut already. Returns the first output
    head that is cut. regions: those in which ranks draw separate random numbers.
    """
    listed = parts.listed
    made: dict[str, torch.nn.Module] = {}
    for step in listed.planned:
        if step.rule.style in ("column", "row"):
            made[step.name] = _linear(step, parts, ranks, regions.get(step.region))
        elif step.rule.style == "experts" and step.module.down_proj.numel() == 0:
            made[step.name] = EmptyExperts(step.module)  # torch's grouped products do not accept empty matrices
    for name, table in listed.words.embeddings:
        (box,) = parts.cuts[table.weight][0].boxes
        made[name] = WordsEmbedding(table, ranks, name, box.logical_offset[0], box.logical_offset[0] + box.size[0])
    heads = []
    for name, module in listed.words.heads:
        head = made[name] = LinearLayer(module, ranks, skip_partition=True, name=name)
        head.gather_columns(parts.columns[head.weight])
        heads.append(head)
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        holder = listed.model.get_submodule(parent)
        # The same dictionaries are kept, so that the hooks' handles can still remove the hooks.
        for hooks in _HOOKS:
            module.__dict__[hooks] = getattr(holder, last).__dict__[hooks]
        setattr(holder, last, module)
    beside: dict[str, list[LinearLayer]] = {}  # column layers that may take the same input
    for step in listed.planned:
        if step.rule.style == "experts":
            ExpertsBorder(ranks, step.name).surround(made.get(step.name, step.module))
        elif step.rule.style == "latent":
            rope = step.attention.owner.qk_rope_head_dim if step.attention is not None else 0
            step.module.register_forward_hook(SharedKey(ranks, rope, step.name))
        elif step.rule.style == "column":
            takes_own_input = step.adapted and not step.name.endswith(".base_layer")
            beside.setdefault(step.name if takes_own_input else step.block, []).append(made[step.name])
    for layers in (*beside.values(), *([head] for head in heads)):
        for layer in layers:
            layer.overlap(layers)
    return heads[0] if heads else None


def _linear(step: Planned, parts: RankParts, ranks: TensorRanks, region: DropoutRegion | None) -> torch.nn.Module:
    kind = LinearLayer if step.rule.style == "column" else LinearAllreduce
    layer = kind(step.module, ranks, skip_partition=True, name=step.name)
    if region is not None and not step.rule.gathers:
        layer.draw_apart(region)
    if isinstance(layer, LinearLayer):
        if layer.weight in parts.runs:
            layer.pick(RowPicker(parts.runs[layer.weight]))
        if step.rule.gathers:
            layer.gather_columns(parts.columns[layer.weight])
    elif step.rule.gathers:
        cut, dim = parts.cuts[layer.weight]
        (box,) = cut.boxes
        layer.split_input(box.logical_offset[dim], box.logical_offset[dim] + box.size[dim])
    return layer
