"""The embedding table and the output head: a list of cuts over the vocabulary, as data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from deepspeed_c.inject.plan import ParamCut, Planned
from deepspeed_c.inject.policy import Rule

__all__ = ["Vocabulary", "find_words"]

_VOCABULARY = Rule("", "column", gathers=True)


@dataclass
class Vocabulary:
    """The modules that look tokens up, and those that give the logits, each with its dotted name."""

    cuts: list[ParamCut] = field(default_factory=list)
    embeddings: list[tuple[str, torch.nn.Embedding]] = field(default_factory=list)
    heads: list[tuple[str, torch.nn.Linear]] = field(default_factory=list)


def find_words(model: torch.nn.Module, taken: Collection[torch.nn.Parameter], grain: int) -> Vocabulary:
    """The embedding table and the output head of ``model``. A weight is cut if all modules with it can be cut.

    taken: parameters that rules speak of. grain: number of rows that stay together.
    """
    words = Vocabulary()
    get_in = getattr(model, "get_input_embeddings", None)
    get_out = getattr(model, "get_output_embeddings", None)
    if get_in is None:
        return words
    try:
        table, head = get_in(), get_out() if get_out is not None else None
    except NotImplementedError:
        return words
    for module in (table, head):
        weight = getattr(module, "weight", None)
        if weight is None or weight in taken or any(cut.param is weight for cut in words.cuts):
            continue
        holders = [(name, m) for name, m in model.named_modules() if getattr(m, "weight", None) is weight]
        if not all(_has_words(m) or type(m) is torch.nn.Linear for _, m in holders):
            kinds = ", ".join(type(m).__name__ for _, m in holders)
            reason = f"token ids are looked up in another way than in a table ({kinds})"
            words.cuts.append(ParamCut(weight, reason=reason))
            continue
        for name, m in holders:
            step = Planned(name, m, _VOCABULARY, "vocabulary")
            words.cuts.append(ParamCut(weight, f"{name}.weight", 0, step, grain))
            if isinstance(m, torch.nn.Embedding):
                words.embeddings.append((name, m))
            else:
                if m.bias is not None:
                    words.cuts.append(ParamCut(m.bias, f"{name}.bias", 0, step, grain))
                words.heads.append((name, m))
    return words


def _has_words(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Embedding and module.max_norm is None and not module.sparse
