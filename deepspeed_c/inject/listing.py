"""First step of a cut: the rules of a model's family give a list of cuts, as data. Nothing is changed. Only rules that
cannot be read are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.inject.adapters import with_adapters
from deepspeed_c.inject.flow import Flow, plan_flow
from deepspeed_c.inject.plan import Attention, ParamCut, Planned, RankPlace, find_attentions, match_rules
from deepspeed_c.inject.rules import rule_sets
from deepspeed_c.inject.styles import cuts_of_module
from deepspeed_c.inject.words import Vocabulary, find_words

__all__ = ["CutList", "CutRequest", "list_cuts"]


@dataclass(frozen=True)
class CutRequest:
    """The caller's wishes for a cut."""

    section: TensorParallel
    blocks: Mapping[type, Sequence[str]] | None = None
    """An ``injection_policy``."""
    known: Sequence[str] = ()
    """Names of parameters in the whole model, if the model that is cut has only some of its layers."""


@dataclass(frozen=True)
class CutList:
    """All cuts of one model for the rank at ``place``. ``attentions`` change their counts of heads; modules of
    ``planned`` and ``words`` are replaced.
    """

    model: torch.nn.Module
    request: CutRequest
    place: RankPlace
    names: dict[torch.nn.Parameter, str]
    params: list[ParamCut]
    """In the order of the rules. Of two lines for one parameter the last says why it is whole."""
    planned: list[Planned]
    """Modules whose rules can be followed."""
    uncut: list[Planned]
    """Modules whose rules cannot be followed."""
    words: Vocabulary
    attentions: dict[str, Attention]
    flow: Flow
    loss: str
    unmatched: list[str]
    """Patterns of the configuration that match no parameter."""

    @property
    def known(self) -> Sequence[str]:
        """Names of parameters in the whole model."""
        return self.request.known or list(self.names.values())


def list_cuts(model: torch.nn.Module, place: RankPlace, request: CutRequest) -> CutList:
    """The cuts of ``model`` for the rank at ``place``.

    Raises ConfigError or ModelError for rules that cannot be read, and where no rules are known.
    """
    section = request.section
    names = {param: name for name, param in model.named_parameters()}
    found = rule_sets(model, section, request.blocks, request.known or list(names.values()))
    attentions = find_attentions(model, found.sets, place)
    matched, whole = match_rules(model, found.sets, attentions)
    params = [
        ParamCut(param, reason=reason)
        for name, reason in whole.items()
        for param in model.get_submodule(name).parameters(recurse=False)
    ]
    planned: list[Planned] = []
    uncut: list[Planned] = []
    for step in with_adapters(matched):
        if any(step.name.startswith(f"{other.name}.") for other in uncut):
            continue  # a norm inside experts that stay whole is used in the same way on all ranks
        cuts, can_be_cut = cuts_of_module(step, section.tp.tp_grain_size)
        params += cuts
        (planned if can_be_cut else uncut).append(step)
    words = find_words(model, {cut.param for cut in params}, section.tp.tp_grain_size)
    flow = plan_flow(model, found.stream, planned, attentions, section)
    return CutList(
        model=model,
        request=request,
        place=place,
        names=names,
        params=params + words.cuts,
        planned=planned,
        uncut=uncut,
        words=words,
        attentions=attentions,
        flow=flow,
        loss=found.loss,
        unmatched=found.unmatched,
    )
