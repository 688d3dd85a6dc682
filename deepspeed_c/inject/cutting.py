"""Cuts a model over tensor-parallel ranks, in place: parameters keep their names and stay the same objects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import FeatureError, ModelError, StateError
from deepspeed_c.inject.adapters import check_adapters, cut_dropout, with_adapters
from deepspeed_c.inject.alike import raised_on_all
from deepspeed_c.inject.cut import Cut, keep_part
from deepspeed_c.inject.experts import EmptyExperts, ExpertsBorder, expert_cuts
from deepspeed_c.inject.flow import Flow, plan_flow
from deepspeed_c.inject.generation import generate_alike
from deepspeed_c.inject.layers import LinearAllreduce, LinearLayer, RowPicker, WordsEmbedding, is_transposed, product_of
from deepspeed_c.inject.loss import cut_loss
from deepspeed_c.inject.overlap import Border, TokenStream
from deepspeed_c.inject.own_heads import SharedKey, count_own_heads
from deepspeed_c.inject.plan import (
    Attention,
    Planned,
    RankPlace,
    column_sizes,
    cut_along,
    find_attentions,
    match_rules,
    parts_of,
)
from deepspeed_c.inject.policy import Rule
from deepspeed_c.inject.ranks import DropoutRegion, TensorRanks
from deepspeed_c.inject.rules import rule_sets
from deepspeed_c.inject.saving import save_whole
from deepspeed_c.inject.trial import TrialFindings, try_cut
from deepspeed_c.logging import logger

__all__ = ["CutReport", "ReportRow", "cut_model", "preview_cut"]

_VOCABULARY = Rule("", "column")
_HARDLY = 0.75  # if a rank holds a larger share of the model's elements, the cut saves little
# Attributes of a module that hold its forward hooks. One such hook, of peft, makes the embedding's outputs require a
# gradient.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass(frozen=True)
class ReportRow:
    """How one parameter is cut."""

    name: str
    logical_shape: torch.Size
    local_shape: torch.Size
    rule: str
    """The place and text of the rule, or the reason why the parameter is whole."""
    n_copies: int = 1

    @property
    def is_cut(self) -> bool:
        return self.logical_shape != self.local_shape


@dataclass
class CutReport:
    """How a model is cut: one row per parameter."""

    n_ranks: int
    rank: int
    rows: list[ReportRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Settings of the configuration that this model can follow only in part."""

    @property
    def logical_elems(self) -> int:
        """Elements of the whole model."""
        return sum(math.prod(row.logical_shape) for row in self.rows)

    @property
    def local_elems(self) -> int:
        """Elements that this rank holds."""
        return sum(math.prod(row.local_shape) for row in self.rows)

    @property
    def whole(self) -> list[str]:
        """The parameters that every rank holds whole."""
        return [row.name for row in self.rows if not row.is_cut]

    @property
    def summary(self) -> str:
        """One line that says how much of the model the rank holds."""
        share = self.local_elems / max(self.logical_elems, 1)
        held = f"{self.local_elems} of {self.logical_elems} elements"
        return f"rank {self.rank} of {self.n_ranks} holds {held} ({share:.1%})"

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [
            f"{row.name:<{width}}  {list(row.logical_shape)} -> {list(row.local_shape)}"
            f"{f' x {row.n_copies} copies' if row.n_copies > 1 else ''}  {row.rule}"
            for row in self.rows
        ]
        return "\n".join([*lines, *self.notes, self.summary])


def cut_model(
    model: torch.nn.Module,
    section: TensorParallel,
    comm: Collectives,
    blocks: Mapping[type, Sequence[str]] | None = None,
    stages: Collectives | None = None,
) -> CutReport:
    """Cut ``model`` over the ranks of ``comm``, in place, according to ``section`` and the model's policy.

    blocks: an ``injection_policy``, {class of blocks: ends of the names of their row layers}, used instead of the
    model's policy.

    stages: the ranks that have other layers of the model, if it is a pipeline. A rule fits if it fits on one of them.

    Collective: weights and buffers are first broadcast from rank 0. Raises ConfigError or ModelError where a rule does
    not fit, on all ranks alike; the model is then unchanged.
    """
    if comm.world_size == 1:
        rows = [
            ReportRow(name, param.shape, param.shape, "one rank: whole") for name, param in model.named_parameters()
        ]
        return CutReport(1, 0, rows)
    stages = comm.alone() if stages is None else stages
    names = stages.gather_objects([name for name, _ in model.named_parameters()], label="names of parameters")
    place = RankPlace(comm.rank, comm.world_size)
    surgeon = _Surgeon(model, section, place, blocks, known=[name for found in names for name in found])
    with raised_on_all(stages, "plans of the cut"):
        surgeon.plan()
        surgeon.try_out()
        surgeon.refuse_shared_copies()
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            comm.broadcast(tensor.detach().contiguous() if not tensor.is_contiguous() else tensor.detach(), 0)
    return surgeon.apply(TensorRanks(comm, overlaps=section.tp_overlap_comm))


def preview_cut(model: torch.nn.Module, section: TensorParallel, rank: int, n_ranks: int) -> CutReport:
    """Return the report that ``cut_model`` would give on ``rank`` of ``n_ranks``. Nothing is changed, and no other rank
    is needed.

    The model's tensors may be on the meta device. Raises the errors of ``cut_model`` for a rule that does not fit.
    """
    surgeon = _Surgeon(model, section, RankPlace(rank, n_ranks))
    surgeon.plan()
    surgeon.try_out()
    return surgeon.report()


class _Surgeon:
    """One call of ``cut_model``: the whole plan is made and checked before anything is changed."""

    def __init__(
        self,
        model: torch.nn.Module,
        section: TensorParallel,
        place: RankPlace,
        blocks: Mapping[type, Sequence[str]] | None = None,
        known: Sequence[str] = (),
    ) -> None:
        """known: names of parameters in the whole model, if ``model`` has only some of its layers."""
        self.model, self.section, self.place, self.blocks = model, section, place, blocks
        self.names = {param: name for name, param in model.named_parameters()}
        self.known = known or list(self.names.values())
        self.cuts: dict[torch.nn.Parameter, tuple[Cut, int]] = {}
        self.pickers: dict[torch.nn.Parameter, RowPicker] = {}
        self.shared: set[torch.nn.Parameter] = set()
        self.reasons: dict[torch.nn.Parameter, str] = {}
        self.planned: list[Planned] = []
        self.embeddings: list[tuple[str, torch.nn.Embedding]] = []
        self.heads: list[tuple[str, torch.nn.Linear]] = []
        self.attentions: dict[str, Attention] = {}
        self.summed: set[torch.nn.Parameter] = set()
        self.causal_loss = False
        self.flow = Flow([], [], [])

    def plan(self) -> None:
        check_adapters(self.model)
        found = rule_sets(self.model, self.section, self.blocks, self.known)
        self.causal_loss = found.loss == "causal"
        self.attentions = find_attentions(self.model, found.sets, self.place)
        planned, whole = match_rules(self.model, found.sets, self.attentions)
        for name, reason in whole.items():
            for param in self.model.get_submodule(name).parameters(recurse=False):
                self.reasons[param] = reason
        uncut: list[Planned] = []
        for step in with_adapters(planned):
            if any(step.name.startswith(f"{other.name}.") for other in uncut):
                continue  # a norm inside experts that stay whole is used in the same way on all ranks
            if self._plan_one(step):
                self.planned.append(step)
            else:
                uncut.append(step)
        self._refuse_halves(uncut)
        self._plan_words()
        self._check_output_layer()
        found.check(self.known)
        adapted = next((step.adapted for step in self.planned if step.adapted), "")
        if adapted and self.section.sequence_parallel_norms:
            raise ModelError(
                "an adapter takes whole tokens, and each rank has its own here",
                where=f"{adapted} with tensor_parallel.sequence_parallel_norms",
                fix="set sequence_parallel_norms to false",
            )
        if adapted and self.section.tp_overlap_comm:
            self.flow = Flow([], [], [f"{adapted} is adapted: sums travel in backward alone"])
        elif self.section.tp_overlap_comm or self.section.sequence_parallel_norms:
            wants_tokens = self.section.sequence_parallel_norms
            self.flow = plan_flow(self.model, found.stream, self.planned, self.attentions, wants_tokens=wants_tokens)
        partition = self.section.partition_config
        uncovered = [name for param, name in self.names.items() if param.dim() > 1 and param not in self.cuts]
        uncovered = [name for name in uncovered if not self._is_meant(name)]
        if partition is not None and partition.strict_mode and uncovered:
            raise ModelError(
                f"no rule cuts {len(uncovered)} matrices: {', '.join(uncovered[:8])}",
                where="tensor_parallel.partition_config.strict_mode",
                fix='add rules for them, with "partition_type": "skip" for what is to stay whole',
            )

    def try_out(self) -> None:
        """Run the cut on a small copy of the model (trial.py, [Note: trial]). Raises ModelError where the results
        differ.
        """

        def plan(model: torch.nn.Module, place: RankPlace) -> _Surgeon:
            known = self.known if model is self.model else ()
            surgeon = _Surgeon(model, self.section, place, self.blocks, known)
            surgeon.plan()
            return surgeon

        findings = try_cut(self.model, self.place.n_ranks, plan, self.planned)
        for name in findings.sums:
            param = self.model.get_parameter(name)
            if param not in self.cuts and param not in self.pickers and param not in self.shared:
                self.summed.add(param)
                self.reasons[param] = "whole, used on each rank's part: its gradient is summed"
        self._refuse_unknown(findings)
        if findings.is_unfinished and self.place.rank == 0:
            logger.warning(
                f"{findings.obstacle}: the cut is by its rules alone. Fix: compare a loss with one process' before a long run"
            )
        self._refuse_hardly_cut(self if self.place.rank == 0 else plan(self.model, RankPlace(0, self.place.n_ranks)))

    def refuse_shared_copies(self) -> None:
        """Refuse copies of a key head on some ranks in a layer that several stages of a pipeline have."""
        for param, (cut, _) in self.cuts.items():
            if cut.n_copies > 1 and getattr(param, "pipe_tied_ranks", ()):
                raise FeatureError(
                    f"it is tied over pipeline stages, and {cut.n_copies} tensor-parallel ranks share its heads",
                    where=self.names[param],
                    fix='leave it whole: "partition_type": "skip" in tensor_parallel.partition_config',
                )

    def _refuse_hardly_cut(self, first: _Surgeon) -> None:
        """Warn that a cut saves little; raise ModelError in strict mode. first: the plan of rank 0, which holds the
        most. All ranks use it, so all ranks say the same.
        """
        report = first.report()
        if report.local_elems <= _HARDLY * report.logical_elems:
            return
        rows = sorted((row for row in report.rows if not row.is_cut), key=lambda row: -math.prod(row.logical_shape))
        listed = "; ".join(f"{row.name} {list(row.logical_shape)}: {row.rule}" for row in rows[:8])
        what = f"{report.summary}; whole on every rank are {len(rows)} parameters, the largest: {listed}"
        fix = "name layers in tensor_parallel.partition_config, or add a policy (docs/adding/inject-policy.md)"
        partition = self.section.partition_config
        if partition is not None and partition.strict_mode:
            raise ModelError(what, where="tensor_parallel.partition_config.strict_mode", fix=fix)
        if self.place.rank == 0:
            logger.warning(f"tensor parallelism saves little: {what}. Fix: {fix}")

    def _refuse_unknown(self, findings: TrialFindings) -> None:
        """Require a rule for each parameter of a block that took part in no trial: names alone tell what such
        parameters hold.
        """
        # The whole factor of a cut adapter is known too: see adapters.py.
        modules = [self.model.get_submodule(step.adapted) if step.adapted else step.module for step in self.planned]
        known = {param for module in modules for param in module.parameters()}
        styles: dict[str, dict[str, str]] = {}
        for step in self.planned:
            if step.source.startswith(("policy", "preset", "tp_plan")) and step.name not in findings.ran:
                styles.setdefault(self._region_name(step), {})[step.rule.style] = step.source
        for region, found in styles.items():
            if not region or not {"column", "row"} <= set(found):
                continue
            for name, param in self.model.get_submodule(region).named_parameters():
                if param not in known and param not in self.reasons:
                    raise ModelError(
                        f"no rule says whether it lies between layers that are cut ({found['column']}), and there was no"
                        f" trial: {findings.obstacle or 'nothing that is known reaches it'}",
                        where=f"{region}.{name}",
                        fix='name its module in tensor_parallel.partition_config, "skip" for one that every rank uses'
                        " alike",
                    )

    def _refuse_halves(self, uncut: list[Planned]) -> None:
        """Refuse to cut only some layers of an attention or MLP, because each layer's output is the next layer's input.
        """
        siblings = {step.block: step for step in self.planned}
        for step in uncut:
            other = siblings.get(step.block)
            if other is not None:
                raise ModelError(
                    f"{type(step.module).__name__} cannot be cut, and {other.name} beside it is",
                    where=step.name,
                    fix="cut the model before adapters, parametrizations or quantization change its layers, or merge"
                    ' these into plain ones; or leave both whole: "partition_type": "skip" in'
                    " tensor_parallel.partition_config",
                )

    def _is_meant(self, name: str) -> bool:
        param = self.model.get_parameter(name)
        is_used_on_parts = param in self.pickers or param in self.shared or param in self.summed
        return is_used_on_parts or self.reasons.get(param, "").endswith("leaves it whole")

    def _plan_one(self, step: Planned) -> bool:
        """Plan ``step``. Returns whether it can be done; if it cannot, ``reasons`` says why."""
        style, module = step.rule.style, step.module
        if style in ("latent", "shared"):
            for param in module.parameters():
                self.reasons[param] = f"{step.source}: whole, used on each rank's heads"
            return True
        if style == "experts":
            cuts = expert_cuts(module)
            if isinstance(cuts, str):
                self.reasons.update(dict.fromkeys(module.parameters(), cuts))
                return False
            for name, found in cuts.items():
                param = module.get_parameter(name)
                if found is None:
                    self.summed.add(param)
                    self.reasons[param] = f"{step.source}: whole, used on the first rank"
                    continue
                rule = Rule(step.rule.pattern, "experts", ("columns",) * found.n_parts)
                whole = Planned(step.name, module, rule, step.source)
                self._cut(param, found.dim, whole, f"{step.name}.{name}", n_mixed=found.n_mixed)
            return True
        if style == "slice":
            self._cut(module.weight, 1, step, f"{step.name}.weight")
            return True
        if style == "heads":
            for name, param in module.named_parameters(recurse=False):
                if name in step.rule.params:
                    self._cut(param, 0, step, f"{step.name}.{name}")
            return True
        if not _is_linear(module):
            for param in module.parameters(recurse=False):
                self.reasons[param] = f"{type(module).__name__} is no linear layer that can be cut"
            return False
        transposed = is_transposed(module)
        dim = 0 if (style == "column") != transposed else 1
        self._cut(module.weight, dim, step, f"{step.name}.weight")
        if module.bias is not None:
            if style == "column":
                self._cut(module.bias, 0, step, f"{step.name}.bias")
            else:
                self.reasons[module.bias] = f"{step.source}: added once, to the sum"
        return True

    def _cut(self, param: torch.nn.Parameter, dim: int, step: Planned, where: str, *, n_mixed: int = 1) -> None:
        """Plan the cut of ``param`` along ``dim``. n_mixed: number of elements along ``dim`` that belong to one column.
        """
        parts, n_blocks = parts_of(step, param.shape[dim], self._grain(step) * n_mixed, where)
        attention = step.attention
        heads = (attention.n_heads, attention.n_key_heads) if attention is not None else (0, 0)
        cut = cut_along(param.shape, dim, parts, n_blocks, heads, self.place)
        if isinstance(cut, list):
            self.pickers[param] = RowPicker(cut)
            self.reasons[param] = f"{step.source}: whole, each rank uses its heads' part"
            return
        if cut.n_copies == self.place.n_ranks:
            self.shared.add(param)
            self.reasons[param] = f"{step.source}: whole, its heads are every rank's"
            return
        if param in self.cuts and self.cuts[param] != (cut, dim):
            raise ModelError(
                f"two rules cut it in two ways; the second is {step.source}",
                where=where,
                fix="parameters that are tied must be cut alike: write one rule in tensor_parallel.partition_config",
            )
        self.cuts[param] = (cut, dim)
        self.reasons[param] = f"{step.source}: {step.rule.style} {' '.join(step.rule.parts)}"

    def _grain(self, step: Planned) -> int:
        """Number of columns that stay together."""
        # torch's grouped products take rows of multiples of 16 bytes, that is, of 8 half-precision numbers.
        return max(self.section.tp.tp_grain_size, 8 if step.rule.style == "experts" else 1)

    def _plan_words(self) -> None:
        """Plan the embedding table and the output head. They are cut if all modules with their weights can be cut."""
        get_in = getattr(self.model, "get_input_embeddings", None)
        get_out = getattr(self.model, "get_output_embeddings", None)
        if get_in is None:
            return
        try:
            table, head = get_in(), get_out() if get_out is not None else None
        except NotImplementedError:
            return
        for module in (table, head):
            weight = getattr(module, "weight", None)
            if weight is None or weight in self.cuts or weight in self.reasons:
                continue
            holders = [(name, m) for name, m in self.model.named_modules() if getattr(m, "weight", None) is weight]
            if not all(_has_words(m) or type(m) is torch.nn.Linear for _, m in holders):
                kinds = ", ".join(type(m).__name__ for _, m in holders)
                self.reasons[weight] = f"token ids are looked up in another way than in a table ({kinds})"
                continue
            for name, m in holders:
                step = Planned(name, m, _VOCABULARY, "vocabulary")
                self._cut(weight, 0, step, f"{name}.weight")
                if isinstance(m, torch.nn.Embedding):
                    self.embeddings.append((name, m))
                else:
                    if m.bias is not None:
                        self._cut(m.bias, 0, step, f"{name}.bias")
                    self.heads.append((name, m))

    def _check_output_layer(self) -> None:
        """Raises ModelError where the configuration asks for a cut output layer, and the model's output layer cannot be
        cut.
        """
        if self.section.vocab_parallel_lm_head is not True or self.heads:
            return
        try:
            head = self.model.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            head = None
        weight = getattr(head, "weight", None)
        if weight is None:
            problem = f"{type(self.model).__name__}.get_output_embeddings() names no output layer with a weight"
        elif weight not in self.cuts:
            reason = self.reasons.get(weight, "no rule cuts it")
            problem = f"the output layer {self.names.get(weight, type(head).__name__)} stays whole ({reason})"
        elif self.cuts[weight][1] != (1 if is_transposed(head) else 0):
            problem = f"a rule cuts the output layer {self.names[weight]} along its inputs ({self.reasons[weight]})"
        else:
            return
        raise ModelError(
            problem,
            where="tensor_parallel.vocab_parallel_lm_head",
            fix="leave the key out: output layers are cut over the vocabulary wherever they can be",
        )

    def report(self) -> CutReport:
        """The report of the plan. Call it before the plan is carried out."""
        rows = []
        for param, name in self.names.items():
            cut = self.cuts[param][0] if param in self.cuts else None
            local = param.shape if cut is None else cut.local_shape
            rule = self.reasons.get(param, "no rule: whole")
            rows.append(ReportRow(name, param.shape, local, rule, 1 if cut is None else cut.n_copies))
        return CutReport(self.place.n_ranks, self.place.rank, rows, self.flow.notes)

    # The methods from here on change the model.

    def apply(self, ranks: TensorRanks) -> CutReport:
        report = self.report()
        for param, name in self.names.items():
            cut = self.cuts.get(param)
            keep_part(param, *(cut or (None,)))
            if cut is not None:
                ranks.sum_gradient(param, cut[0].copies, name)
            elif param in self.pickers or param in self.shared or param in self.summed:
                ranks.sum_gradient(param, tuple(range(ranks.n_ranks)), name)
        regions = self._regions(ranks)
        for step in self.planned:
            self._replace(step, ranks, regions)
        for step in self.planned:
            if step.adapted:
                is_part = step.rule.style == "row" and not step.rule.gathers
                layer = self.model.get_submodule(step.adapted)
                cut_dropout(layer, ranks, regions.get(self._region_name(step)), is_part=is_part)
        for name, table in self.embeddings:
            begin, size = _only_run(table.weight.tp_cut)
            _put(self.model, name, WordsEmbedding(table, ranks, name, begin, begin + size))
        heads = []
        for name, head in self.heads:
            layer = LinearLayer(head, ranks, skip_partition=True, name=name)
            layer.gather_columns(self._sizes(layer.weight.tp_cut.logical_shape[0]))
            _put(self.model, name, layer)
            heads.append(layer)
        self._tell_neighbours(heads)
        self._open_regions(ranks)
        for name in {step.attention.name for step in self.planned if step.attention is not None}:
            count_own_heads(self.model.get_submodule(name), self.attentions[name])
        generate_alike(self.model, ranks.comm)
        save_whole(self.model, ranks.comm)
        if any(step.attention is not None for step in self.planned):
            _refuse_attentions(self.model)
        if self.causal_loss and heads:
            cut_loss(self.model, heads[0], ranks, self._sizes(heads[0].weight.tp_cut.logical_shape[0]))
        return report

    def _tell_neighbours(self, heads: list[LinearLayer]) -> None:
        """Tell each column layer which other column layers may take the same input."""
        columns: dict[str, list[LinearLayer]] = {}
        for step in self.planned:
            if step.rule.style == "column":
                takes_own_input = step.adapted and not step.name.endswith(".base_layer")
                beside = columns.setdefault(step.name if takes_own_input else step.block, [])
                beside.append(self.model.get_submodule(step.name))
        for layers in (*columns.values(), *([head] for head in heads)):
            for layer in layers:
                layer.overlap(layers)

    def _open_regions(self, ranks: TensorRanks) -> None:
        """Put a ``Border`` around each region, and divide the tokens outside the regions over ranks."""
        stream = self._divide_tokens(ranks) if self.section.sequence_parallel_norms else None
        for region in self.flow.regions:
            columns = [self.model.get_submodule(name) for name in region.columns]
            row = self.model.get_submodule(region.row)
            border = Border(
                self.model.get_submodule(region.name),
                columns,
                ranks.comm,
                region.name,
                overlaps=self.section.tp_overlap_comm,
                stream=stream,
                is_attention=region.is_attention,
            )
            for layer in (*columns, row):
                layer.stay_in(border)
            if stream is not None and row.bias is not None:
                ranks.sum_gradient(row.bias, tuple(range(ranks.n_ranks)), f"{region.row}.bias")

    def _divide_tokens(self, ranks: TensorRanks) -> TokenStream:
        modules = [self.model.get_submodule(name) for name in self.flow.layers]
        draws = any(_drops_out(module) for module in modules)
        stream = TokenStream(ranks.comm, DropoutRegion(ranks) if draws else None)
        modules[0].register_forward_pre_hook(stream.begin, with_kwargs=True)
        modules[-1].register_forward_hook(stream.end)
        self.model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
        inside = {param for region in self.flow.regions for param in self.model.get_submodule(region.name).parameters()}
        everyone = tuple(range(ranks.n_ranks))
        for module in modules:
            for param in module.parameters():
                if param not in inside:
                    ranks.sum_gradient(param, everyone, self.names[param])
        return stream

    def _sizes(self, n_elems: int) -> list[int]:
        """Number of columns of each rank, if only the total number decides."""
        return column_sizes(n_elems, self.place.n_ranks, self.section.tp.tp_grain_size)

    def _regions(self, ranks: TensorRanks) -> dict[str, DropoutRegion]:
        """Regions in which each rank draws separate random numbers. The key is the name of the attention, or of the
        module that holds both linear layers.
        """
        styles: dict[str, set[str]] = {}
        for step in self.planned:
            styles.setdefault(self._region_name(step), set()).add(step.rule.style)
        return {
            name: DropoutRegion(ranks)
            for name, found in styles.items()
            if name and {"column", "row"} <= found and _drops_out(self.model.get_submodule(name))
        }

    @staticmethod
    def _region_name(step: Planned) -> str:
        return step.attention.name if step.attention is not None else step.block

    def _replace(self, step: Planned, ranks: TensorRanks, regions: dict[str, DropoutRegion]) -> None:
        style, module, name = step.rule.style, step.module, step.name
        if style in ("shared", "latent"):
            if style == "shared":
                for param in module.parameters():
                    ranks.sum_gradient(param, tuple(range(ranks.n_ranks)), self.names[param])
            else:
                attention = step.attention
                rope = attention.owner.qk_rope_head_dim if attention is not None else 0
                module.register_forward_hook(SharedKey(ranks, rope, name))
            return
        if style == "experts":
            if module.down_proj.numel() == 0:  # torch's grouped products do not accept empty matrices
                module = EmptyExperts(module)
                _put(self.model, name, module)
            ExpertsBorder(ranks, name).surround(module)
            return
        if style in ("slice", "heads"):
            return
        region = regions.get(self._region_name(step))
        kind = LinearLayer if style == "column" else LinearAllreduce
        layer = kind(module, ranks, skip_partition=True, name=name)
        if region is not None and not step.rule.gathers:
            layer.draw_apart(region)
        if isinstance(layer, LinearLayer):
            if layer.weight in self.pickers:
                layer.pick(self.pickers[layer.weight])
            if step.rule.gathers:
                layer.gather_columns(self._sizes(layer.weight.tp_cut.logical_shape[layer.weight.partition_dim]))
        elif step.rule.gathers:
            begin, size = _only_run(layer.weight.tp_cut, layer.weight.partition_dim)
            layer.split_input(begin, begin + size)
        _put(self.model, name, layer)


def _refuse_hidden_states(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("output_hidden_states")
    if module.training and (getattr(module.config, "output_hidden_states", False) if wanted is None else wanted):
        raise StateError(
            "each rank has its own tokens of hidden states",
            where="output_hidden_states with tensor_parallel.sequence_parallel_norms",
            fix="ask for them in evaluation, or set one of the two to false",
        )


def _refuse_attentions(model: torch.nn.Module) -> None:
    """Let ``model``, and models inside it, refuse to return attention weights, because a rank has only the weights of
    its heads.
    """
    for module in model.modules():
        if hasattr(module, "config") and hasattr(type(module), "get_input_embeddings"):
            module.register_forward_pre_hook(_ask_for_no_attentions, with_kwargs=True)


def _ask_for_no_attentions(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("output_attentions")
    if getattr(module.config, "output_attentions", False) if wanted is None else wanted:
        raise StateError(
            "each rank has the attention weights of its own heads",
            where="output_attentions of a model that is cut over tensor-parallel ranks",
            fix="set it to false; look at attention weights in one process",
        )


def _has_words(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Embedding and module.max_norm is None and not module.sparse


def _is_linear(module: torch.nn.Module) -> bool:
    # Other classes (quantised, adapted) hold weights of other shapes, and a parametrized layer computes its weight.
    return product_of(module) is not None and "weight" in dict(module.named_parameters(recurse=False))


def _only_run(cut: Cut, dim: int = 0) -> tuple[int, int]:
    (box,) = cut.boxes
    return box.logical_offset[dim], box.size[dim]


def _drops_out(module: torch.nn.Module) -> bool:
    """Whether ``module``, or a direct child, may apply dropout."""
    for holder in (module, *module.children()):
        if isinstance(holder, torch.nn.Dropout) and holder.p > 0:
            return True
        for name, value in vars(holder).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
        if any(isinstance(child, torch.nn.Dropout) and child.p > 0 for child in holder.children()):
            return True
    return False


def _put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    holder = model.get_submodule(parent)
    # The same dictionaries are kept, so that the hooks' handles can still remove the hooks.
    for hooks in _HOOKS:
        module.__dict__[hooks] = getattr(holder, last).__dict__[hooks]
    setattr(model.get_submodule(parent), last, module)
