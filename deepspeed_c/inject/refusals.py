"""Refusals of a list of cuts before any trial: each has the name of its reason."""

from __future__ import annotations

import torch

from deepspeed_c.errors import ConfigError, FeatureError, ModelError
from deepspeed_c.inject.linear import is_transposed
from deepspeed_c.inject.listing import CutList
from deepspeed_c.inject.parts import RankParts

__all__ = ["refuse_misfits"]


def refuse_misfits(parts: RankParts) -> None:
    """Raises ConfigError, FeatureError or ModelError where a cut does not fit the model or the configuration."""
    listed = parts.listed
    _refuse_prompts(listed.model)
    _refuse_halves(listed)
    _refuse_whole_output_layer(parts)
    _refuse_unmatched(listed)
    if listed.flow.refusal is not None:
        raise listed.flow.refusal
    _refuse_uncovered(parts)
    _refuse_shared_copies(parts)


def _refuse_prompts(model: torch.nn.Module) -> None:
    """Refuse a configuration of peft that puts whole tensors between cut layers."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ModelError(
                f"{config.peft_type} learns tokens or keys of whole width, which cut attention does not take",
                where=f"adapter {name!r}",
                fix="use LoRA, or train this adapter without tensor_parallel",
            )


def _refuse_halves(listed: CutList) -> None:
    """Refuse to cut only some layers of an attention or MLP, because each layer's output is the next layer's input."""
    siblings = {step.block: step for step in listed.planned}
    for step in listed.uncut:
        other = siblings.get(step.block)
        if other is not None:
            raise ModelError(
                f"{type(step.module).__name__} cannot be cut, and {other.name} beside it is",
                where=step.name,
                fix="cut the model before adapters, parametrizations or quantization change its layers, or merge"
                ' these into plain ones; or leave both whole: "partition_type": "skip" in'
                " tensor_parallel.partition_config",
            )


def _refuse_whole_output_layer(parts: RankParts) -> None:
    """Refuse an output layer that stays whole where the configuration asks for a cut one."""
    listed = parts.listed
    if listed.request.section.vocab_parallel_lm_head is not True or listed.words.heads:
        return
    try:
        head = listed.model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    weight = getattr(head, "weight", None)
    if weight is None:
        problem = f"{type(listed.model).__name__}.get_output_embeddings() names no output layer with a weight"
    elif weight not in parts.cuts:
        reason = parts.reasons.get(weight, "no rule cuts it")
        problem = f"the output layer {listed.names.get(weight, type(head).__name__)} stays whole ({reason})"
    elif parts.cuts[weight][1] != (1 if is_transposed(head) else 0):
        problem = f"a rule cuts the output layer {listed.names[weight]} along its inputs ({parts.reasons[weight]})"
    else:
        return
    raise ModelError(
        problem,
        where="tensor_parallel.vocab_parallel_lm_head",
        fix="leave the key out: output layers are cut over the vocabulary wherever they can be",
    )


def _refuse_unmatched(listed: CutList) -> None:
    """Refuse a pattern of the configuration that matches no parameter of the whole model."""
    if listed.unmatched:
        names = ", ".join(sorted(listed.known)[:4])
        raise ConfigError(
            f"{listed.unmatched[0]!r} matches none of the model's parameters ({names}, ...)",
            where="tensor_parallel.partition_config.layer_specs",
            fix="write a regular expression that matches the parameter's whole dotted name",
        )


def _refuse_uncovered(parts: RankParts) -> None:
    """Refuse matrices that no rule speaks of, in strict mode."""
    partition = parts.listed.request.section.partition_config
    if partition is None or not partition.strict_mode:
        return
    uncovered = [
        name
        for param, name in parts.listed.names.items()
        if param.dim() > 1
        and param not in parts.cuts
        and param not in parts.used_on_parts
        and not parts.reasons.get(param, "").endswith("leaves it whole")
    ]
    if uncovered:
        raise ModelError(
            f"no rule cuts {len(uncovered)} matrices: {', '.join(uncovered[:8])}",
            where="tensor_parallel.partition_config.strict_mode",
            fix='add rules for them, with "partition_type": "skip" for what is to stay whole',
        )


def _refuse_shared_copies(parts: RankParts) -> None:
    """Refuse copies of a key head on some ranks in a layer that several stages of a pipeline have."""
    for param, (cut, _) in parts.cuts.items():
        if cut.n_copies > 1 and getattr(param, "pipe_tied_ranks", ()):
            raise FeatureError(
                f"it is tied over pipeline stages, and {cut.n_copies} tensor-parallel ranks share its heads",
                where=parts.listed.names[param],
                fix='leave it whole: "partition_type": "skip" in tensor_parallel.partition_config',
            )
