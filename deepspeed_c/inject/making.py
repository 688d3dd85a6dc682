"""Third step of a cut: the list is carried out. Parameters keep their names and stay the same objects."""

from __future__ import annotations

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.inject.borders import open_borders
from deepspeed_c.inject.cut import keep_part
from deepspeed_c.inject.dropout import cut_dropouts
from deepspeed_c.inject.generation import generate_alike
from deepspeed_c.inject.loss import cut_loss
from deepspeed_c.inject.own_heads import count_own_heads, refuse_attentions
from deepspeed_c.inject.parts import RankParts
from deepspeed_c.inject.ranks import TensorRanks
from deepspeed_c.inject.replacement import replace_layers
from deepspeed_c.inject.saving import save_whole

__all__ = ["make_cuts"]


def make_cuts(parts: RankParts, comm: Collectives) -> None:
    """Cut the model of ``parts`` over the ranks of ``comm``, in place. Collective if some ranks share a key head."""
    listed = parts.listed
    model, section = listed.model, listed.request.section
    for param in listed.names:
        keep_part(param, *parts.cuts.get(param, (None,)))
    ranks = TensorRanks(comm, overlaps=section.tp_overlap_comm)
    for param, name in listed.names.items():
        if param in parts.sums:
            ranks.sum_gradient(param, parts.sums[param], name)
    regions = cut_dropouts(model, listed.planned, ranks)
    head = replace_layers(parts, ranks, regions)
    open_borders(model, listed.flow, section, ranks)
    attentions = {step.attention.name for step in listed.planned if step.attention is not None}
    for name in attentions:
        count_own_heads(model.get_submodule(name), listed.attentions[name])
    generate_alike(model, comm)
    save_whole(model, comm)
    if attentions:
        refuse_attentions(model)
    if listed.loss == "causal" and head is not None:
        cut_loss(model, head, ranks, parts.columns[head.weight])
