"""The path of tokens through a cut model: the model's layers, and the regions in each layer that a policy names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

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


def plan_flow(
    model: torch.nn.Module,
    stream: Stream | None,
    planned: Sequence[Planned],
    attentions: Mapping[str, Attention],
    *,
    wants_tokens: bool,
) -> Flow:
    """Find layers and regions. Nothing is changed.

    wants_tokens: norms are to see a rank's own tokens (``sequence_parallel_norms``). Raises ModelError where that is
    impossible. If only halves of batches are wanted, the notes name the parts of the model that run without halves.
    """
    key = "tensor_parallel.sequence_parallel_norms"
    lists = [] if stream is None else list(_lists(model, stream))
    if len(lists) != 1:
        what = (
            f"no policy says where tokens flow through {type(model).__name__}"
            if stream is None
            else f"{type(model).__name__} has {len(lists)} lists of layers named {stream.layers!r} with a norm"
            f" {stream.norm!r} beside them, and one is needed"
        )
        if wants_tokens:
            raise ModelError(what, where=key, fix="set it to false, or add a stream to the model's policy")
        return Flow([], [], [f"tp_overlap_comm: in backward alone, {what}"])
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
                raise ModelError(found, where=where, fix=f"set {key} to false, or cut all of its layers")
            else:
                flow.notes.append(f"tp_overlap_comm: in backward alone in {where}, {found}")
    flow.layers.append(f"{prefix}.{stream.norm}" if prefix else stream.norm)
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
