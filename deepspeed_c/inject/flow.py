"""The path of tokens through a cut model: the model's layers, and the regions in each layer that a policy names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ModelError
from deepspeed_c.inject.plan import Attention, Planned
from deepspeed_c.inject.policy import Stream

__all__ = ["Flow", "Region", "plan_flow"]


@dataclass(frozen=True)
class Region:
    """One module between ``hidden_states`` and its output: it begins with column layers and ends with a row layer."""

    name: str
    columns: list[str]
    row: str
    is_attention: bool


@dataclass
class Flow:
    """The layers and regions of a model that the policy's ``Stream`` names."""

    layers: list[str]
    """Dotted names of the layers, in order. The last entry is the norm after the layers."""
    regions: list[Region]
    notes: list[str]
    """Texts about requests that can be met only in part."""
    summed: list[torch.nn.Parameter] = field(default_factory=list)
    """Parameters that every rank uses on its own tokens."""
    refusal: ModelError | None = None
    """The reason why ranks cannot have their own tokens although the configuration asks for it."""


def plan_flow(
    model: torch.nn.Module,
    stream: Stream | None,
    planned: Sequence[Planned],
    attentions: Mapping[str, Attention],
    section: TensorParallel,
) -> Flow:
    """Find layers and regions, if norms are to see a rank's own tokens (``sequence_parallel_norms``) or halves of
    batches are to run in turn (``tp_overlap_comm``). Nothing is changed.

    If only halves are wanted, the notes name the parts of the model that run without halves.
    """
    key = "tensor_parallel.sequence_parallel_norms"
    wants_tokens = section.sequence_parallel_norms
    if not wants_tokens and not section.tp_overlap_comm:
        return Flow([], [], [])
    adapted = next((step.adapted for step in planned if step.adapted), "")
    if adapted:
        refusal = ModelError(
            "an adapter takes whole tokens, and each rank has its own here",
            where=f"{adapted} with {key}",
            fix="set sequence_parallel_norms to false",
        )
        notes = [f"{adapted} is adapted: sums travel in backward alone"]
        return Flow([], [], notes, refusal=refusal if wants_tokens else None)
    lists = [] if stream is None else list(_lists(model, stream))
    if len(lists) != 1:
        what = (
            f"no policy says where tokens flow through {type(model).__name__}"
            if stream is None
            else f"{type(model).__name__} has {len(lists)} lists of layers named {stream.layers!r} with a norm"
            f" {stream.norm!r} beside them, and one is needed"
        )
        refusal = ModelError(what, where=key, fix="set it to false, or add a stream to the model's policy")
        notes = [f"tp_overlap_comm: in backward alone, {what}"]
        return Flow([], [], notes, refusal=refusal if wants_tokens else None)
    (name,) = lists
    prefix = name.rpartition(".")[0]
    flow = Flow([], [], [])
    for number, layer in model.get_submodule(name).named_children():
        flow.layers.append(f"{name}.{number}")
        for part in stream.regions:
            where = f"{name}.{number}.{part}"
            found = _region(where, layer, part, planned, is_attention=where in attentions)
            if isinstance(found, Region):
                flow.regions.append(found)
            elif wants_tokens:
                refusal = ModelError(found, where=where, fix=f"set {key} to false, or cut all of its layers")
                flow.refusal = flow.refusal or refusal
            else:
                flow.notes.append(f"tp_overlap_comm: in backward alone in {where}, {found}")
    flow.layers.append(f"{prefix}.{stream.norm}" if prefix else stream.norm)
    if wants_tokens:
        inside = {param for region in flow.regions for param in model.get_submodule(region.name).parameters()}
        biases = [model.get_submodule(region.row).bias for region in flow.regions]
        outside = [param for name in flow.layers for param in model.get_submodule(name).parameters()]
        flow.summed = [param for param in outside if param not in inside]
        flow.summed += [bias for bias in biases if bias is not None]
    return flow


def _lists(model: torch.nn.Module, stream: Stream) -> Iterator[str]:
    for name, module in model.named_modules():
        prefix, _, last = name.rpartition(".")
        is_list = last == stream.layers and isinstance(module, torch.nn.ModuleList) and len(module) > 0
        if is_list and hasattr(model.get_submodule(prefix), stream.norm):
            yield name


def _region(
    name: str, layer: torch.nn.Module, part: str, planned: Sequence[Planned], *, is_attention: bool
) -> Region | str:
    """The region ``part`` of a layer, or the reason why ``part`` is not a region."""
    if not hasattr(layer, part):
        return "there is no such module"
    inside = [step for step in planned if step.name.startswith(f"{name}.")]
    columns = [step.name for step in inside if step.rule.style == "column"]
    rows = [step.name for step in inside if step.rule.style == "row"]
    known = {param for step in inside for param in step.module.parameters()}
    others = [other for other, param in layer.get_submodule(part).named_parameters() if param not in known]
    if others or any(step.rule.style not in ("column", "row", "shared") or step.rule.gathers for step in inside):
        return f"it has layers of another kind ({', '.join(others[:3]) or 'latent, experts or gathered ones'})"
    if not columns or len(rows) != 1:
        return f"it has {len(columns)} column layers and {len(rows)} row layers that are cut"
    return Region(name, columns, rows[0], is_attention)
