"""Choose the rules that cut a model: first the rules of the configuration, then those of its family, then transformers'
plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_c.config.parallel import CutLayers, TensorParallel
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.inject.blocks import block_rules
from deepspeed_c.inject.plan import RuleSet, ends_with, part_sizes
from deepspeed_c.inject.policy import POLICIES, Heads, Policy, Rule, Stream, find_policy

__all__ = ["FoundRules", "rule_sets"]

_WHERE = "tensor_parallel"
# Styles of transformers' plans that need no rule: modules that stay whole, and embeddings, which are cut in any case.
_ELSEWHERE = (
    "replicate",
    "embedding_rowwise",
    "embedding_colwise",
    "local_params",
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
)


@dataclass
class FoundRules:
    """Sets of rules. The first set takes precedence."""

    sets: list[RuleSet]
    loss: str = ""
    stream: Stream | None = None
    unmatched: list[str] = field(default_factory=list)
    """Patterns of the configuration that match no parameter."""


def rule_sets(
    model: torch.nn.Module,
    section: TensorParallel,
    blocks: Mapping[type, Sequence[str]] | None = None,
    known: Sequence[str] = (),
) -> FoundRules:
    """The rules for ``model``. Nothing is changed. blocks: an ``injection_policy``, which comes second. known: names of
    parameters of the whole model, of which ``model`` is a stage; a pattern has to match one of them.

    Raises ConfigError for a preset that does not exist, a pattern that is no regular expression, or contradicting
    sizes. Raises ModelError where no rules are known: not in the configuration, nor in a policy, nor in transformers.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    partition = section.partition_config
    found = FoundRules([])
    if partition is not None:
        if partition.tp_size > 1 and section.autotp_size > 1 and partition.tp_size != section.autotp_size:
            raise ConfigError(
                f"partition_config.tp_size is {partition.tp_size}, autotp_size {section.autotp_size}",
                where=_WHERE,
                fix="write the size once, as autotp_size",
            )
        family = find_policy(section.preset_model or model_type)
        _add_specs(model, partition.layer_specs, model_type, family, found, known)
    if blocks:
        found.sets.append(block_rules(model, blocks))
        family = find_policy(model_type)
        found.loss = "" if family is None else family.loss
    elif partition is None or partition.use_default_specs:
        _add_default(model, section.preset_model, model_type, found)
    if not found.sets:
        raise ModelError(
            f"no rule for model type {model_type!r} ({type(model).__name__})",
            where=_WHERE,
            fix="name layers in tensor_parallel.partition_config, or add a policy (docs/adding/inject-policy.md)",
        )
    return found


def _add_default(model: torch.nn.Module, preset: str | None, model_type: str, found: FoundRules) -> None:
    chosen: Policy | None = find_policy(preset or model_type)
    if preset is not None and chosen is None:
        raise ConfigError(
            f"there is no preset {preset!r}",
            where=f"{_WHERE}.preset_model",
            fix=f"name one of: {', '.join(sorted(POLICIES))}",
        )
    if chosen is not None:
        source = f"preset {preset}" if preset else f"policy {model_type}"
        found.sets.append(RuleSet(source, chosen.rules, chosen.heads))
        found.loss, found.stream = chosen.loss, chosen.stream
        return
    plan = getattr(model, "tp_plan", None)
    rules = tuple(_rules_of_plan(plan or {}))
    if rules:  # without rules the plan has embeddings alone, as for GPT-OSS, and says nothing about layers
        found.sets.append(RuleSet("tp_plan", rules, (Heads(r"self_attn|attention|attn"),)))


def _add_specs(
    model: torch.nn.Module,
    specs: Iterable[CutLayers],
    model_type: str,
    family: Policy | None,
    found: FoundRules,
    known: Sequence[str],
) -> None:
    rules: list[Rule] = []
    is_elsewhere = False
    taken: set[str] = set()
    for number, spec in enumerate(specs):
        if spec.model_types is not None and model_type not in spec.model_types:
            continue
        for pattern in spec.patterns:
            try:
                matcher = re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"{pattern!r} is no regular expression: {error}",
                    where=f"{_WHERE}.partition_config.layer_specs[{number}].patterns",
                    fix="correct it; a dot that is meant as a dot is written \\.",
                ) from error
            matched = [(name, param) for name, param in model.named_parameters() if matcher.fullmatch(name)]
            if not matched and any(map(matcher.fullmatch, known)):
                is_elsewhere = True
            elif not matched:
                found.unmatched.append(pattern)
            for name, param in matched:
                module, _, last = name.rpartition(".")
                if last == "weight" and module not in taken:
                    taken.add(module)
                    rules.append(_rule_of_spec(spec, module, param, family, number))
    if rules or is_elsewhere:
        found.sets.append(RuleSet("partition_config", tuple(rules), () if family is None else family.heads))


def _rule_of_spec(spec: CutLayers, module: str, param: torch.nn.Parameter, family: Policy | None, number: int) -> Rule:
    where = f"{_WHERE}.partition_config.layer_specs[{number}]"
    pattern = re.escape(module)
    if spec.partition_type == "skip":
        return Rule(pattern, "shared" if spec.grad_allreduce else "skip")
    usual = 0 if spec.partition_type == "column" else 1
    dim = usual if spec.partition_dim is None else spec.partition_dim
    if dim != usual:
        raise ConfigError(
            f"a {spec.partition_type} layer's weight [out, in] is cut along dimension {usual}, not {dim}",
            where=f"{where}.partition_dim",
            fix=f"write {usual}, or the other partition_type",
        )
    sizes = (param.shape[dim],)
    known = None if family is None else next((rule for rule in family.rules if ends_with(rule.pattern, module)), None)
    if spec.shape is None and known is not None and known.style == spec.partition_type and not spec.gather_output:
        # The family's policy knows the contents of the dimension. So heads stay whole, for any number of heads.
        return Rule(pattern, spec.partition_type, known.parts, known.is_interleaved)
    if spec.shape is not None:
        sizes = part_sizes(spec.shape, param.shape, dim, f"{module}.weight", f"{where}.shape")
    return Rule(pattern, spec.partition_type, ("columns",) * len(sizes), gathers=spec.gather_output, sizes=sizes)


def _rules_of_plan(plan: dict[str, str]) -> Iterable[Rule]:
    """Rules from transformers' plan, which maps patterns of module names (with * for a number) to styles.

    The names show which layers belong to attention. Heads stay whole there; the plan itself does not ensure that.
    """
    for name, style in plan.items():
        pattern = re.escape(name).replace(r"\*", r"\d+")
        last = name.rpartition(".")[2]
        parts = ("queries",) if last in ("q_proj", "q_b_proj", "kv_b_proj") else ("columns",)
        parts = ("keys",) if last in ("k_proj", "v_proj") else parts
        if style == "colwise" and last == "sinks":
            # One number for each head, in the attention itself. The attention's own style is local_params.
            pattern = re.escape(name.rpartition(".")[0]).replace(r"\*", r"\d+")
            yield Rule(pattern, "heads", ("queries",), params=(last,))
        elif style in ("colwise", "colwise_gather_output") and "lm_head" not in name:
            gathers = style.endswith("gather_output")
            yield Rule(pattern, "column", ("columns",) if gathers else parts, gathers=gathers)
        elif style in ("rowwise", "rowwise_split_input") and "experts" not in name.split("."):
            splits = style.endswith("split_input")
            is_attention = last == "o_proj" and not splits
            yield Rule(pattern, "row", ("queries",) if is_attention else ("columns",), gathers=splits)
        elif style in ("moe_tp_experts", "all_reduce"):
            # all_reduce: shared experts whose matrices are parameters. The plan lists these parameters one by one.
            yield Rule(pattern, "experts")
        elif style == "replicated_with_grad_allreduce":
            yield Rule(pattern, "shared", ("queries",))
        elif style == "mla_kv_a_proj":
            yield Rule(pattern, "latent", ("queries",))
        elif style not in _ELSEWHERE and "experts" not in name.split("."):
            raise ModelError(
                f"the model's tp_plan has the style {style!r} for {name}, which is not known here",
                where=_WHERE,
                fix="name layers in tensor_parallel.partition_config, or add a policy (docs/adding/inject-policy.md)",
            )
