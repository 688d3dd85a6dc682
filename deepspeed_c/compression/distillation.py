"""Losses by which a student learns from the outputs of its teacher, beside the loss of its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_c.errors import ConfigError, ModelError

__all__ = ["Distillation", "attention_loss", "hidden_states_loss", "logits_loss"]


def logits_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """KL divergence of the student's distribution from the teacher's, times temperature^2: a scalar in fp32.

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv 1503.02531.

    Args:
        student, teacher: logits [..., classes] of one shape. The teacher's get no gradient.
        temperature: above 0; both logits are divided by it.
        mask: [...], bool; positions that count. None: all. The loss is the mean over those, and 0 without any.

    Raises ModelError if the shapes differ, ConfigError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ConfigError(f"is {temperature}", where="temperature", fix="write a number above 0")
    _check_shapes("logits", student, teacher)
    own = F.log_softmax(student.float() / temperature, -1)
    wanted = F.log_softmax(teacher.detach().float() / temperature, -1)
    each = F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)
    if mask is None:
        return each.sum() / max(each.numel(), 1) * temperature**2
    return torch.where(mask, each, 0).sum() / mask.sum().clamp(min=1) * temperature**2


def hidden_states_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Mean squared error between hidden states: a scalar in fp32.

    Source: Jiao et al., "TinyBERT", arXiv 1909.10351, equations 8 and 9, for layers of one width.

    Args:
        student, teacher: the embeddings' output and that of each layer, as ``hidden_states`` of transformers.
        layers: number of the teacher's layer for each of the student's layers: the configuration's ``teacher_layer``.

    Raises ModelError if a layer is missing or if shapes differ.
    """
    wanted = [0, *(layer + 1 for layer in layers)]
    return _mean_squared("hidden_states", student, teacher, wanted)


def attention_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Mean squared error between attention probabilities [batch, heads, queries, keys] of each layer: a scalar in fp32.

    Source: Jiao et al., arXiv 1909.10351, equation 7. Arguments and errors: as ``hidden_states_loss``.
    """
    return _mean_squared("attentions", student, teacher, list(layers))


def _mean_squared(what: str, student: Sequence[Tensor], teacher: Sequence[Tensor], wanted: list[int]) -> Tensor:
    if len(student) != len(wanted) or max(wanted, default=-1) >= len(teacher):
        raise ModelError(
            f"the student gives {len(student)} and the teacher {len(teacher)}, and teacher_layer asks for number {max(wanted, default=0)} "
            f"of {len(wanted)}",
            where=what,
            fix=f"run both models with output_{what}=True, and name a layer of the teacher for each of the student's",
        )
    losses = []
    for own, number in zip(student, wanted, strict=True):
        _check_shapes(what, own, teacher[number])
        losses.append(F.mse_loss(own.float(), teacher[number].detach().float()))
    return torch.stack(losses).mean()


def _check_shapes(what: str, student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ModelError(
            f"the student's are {list(student.shape)}, the teacher's {list(teacher.shape)}",
            where=what,
            fix="give both models the same batch, and the student the teacher's width",
        )


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """A weighted sum of the losses above.

        distil = Distillation(layers=(1, 3, 5), logits=0.5, hidden_states=1.0, temperature=2.0)
        with torch.no_grad():
            wanted = teacher(ids, output_hidden_states=True)
        out = engine(ids, labels=ids, output_hidden_states=True)
        engine.backward(out.loss + distil(out, wanted))

    A teacher that does not fit one device is an engine of its own, at ZeRO stage 3 without an optimizer.
    """

    layers: Sequence[int] = ()
    """The teacher's layer for each of the student's layers; needed for hidden states and attention."""
    logits: float = 1.0
    hidden_states: float = 0.0
    attentions: float = 0.0
    temperature: float = 1.0

    def __call__(self, student: Any, teacher: Any, mask: Tensor | None = None) -> Tensor:
        """The loss of one batch, a scalar in fp32.

        Args:
            student, teacher: outputs with ``logits``, ``hidden_states`` and ``attentions``, as those of transformers.
                What has weight 0 may be missing.
            mask: see ``logits_loss``.
        """
        losses = []
        if self.logits:
            own, wanted = (_output(out, "logits", whose) for out, whose in ((student, "student"), (teacher, "teacher")))
            losses.append(self.logits * logits_loss(own, wanted, self.temperature, mask))
        for what, loss in (("hidden_states", hidden_states_loss), ("attentions", attention_loss)):
            weight = getattr(self, what)
            if weight:
                own, wanted = (_output(out, what, whose) for out, whose in ((student, "student"), (teacher, "teacher")))
                losses.append(weight * loss(own, wanted, self.layers))
        if not losses:
            raise ConfigError("all are 0", where="weights of Distillation", fix="give logits a weight above 0")
        return torch.stack(losses).sum()


def _output(out: Any, what: str, whose: str) -> Any:
    value = getattr(out, what, None)
    if value is None or (isinstance(value, tuple) and any(item is None for item in value)):
        fix = (
            "return them"
            if what == "logits"
            else f'run it with output_{what}=True (attention needs attn_implementation="eager")'
        )
        raise ModelError(f"the {whose}'s output has none", where=what, fix=fix)
    return value
