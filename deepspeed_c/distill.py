"""On-policy distillation: a student learns from its teacher's distributions over text that the student wrote."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.ops import divergence

__all__ = ["generalized_jsd_loss"]

IGNORED = -100
_REDUCTIONS = ("batchmean", "sum", "mean", "none")
_WHERE = "generalized_jsd_loss"


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: Literal["batchmean", "sum", "mean", "none"] = "batchmean",
    top_k: int | None = None,
    *,
    teacher_indices: Tensor | None = None,
    chunk: int = 1024,
) -> Tensor:
    """Generalized Jensen-Shannon divergence of a student's next-token distributions from its teacher's.

    Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, equation 1. With p =
    softmax(teacher / temperature), q = softmax(student / temperature) and m = beta p + (1 - beta) q, a token's loss is
    beta KL(p || m) + (1 - beta) KL(q || m). beta 0 is the forward KL(p || q), beta 1 the reverse KL(q || p). The
    arguments and reductions have the meaning that ``GKDTrainer.generalized_jsd_loss`` of trl gives them.

    Args:
        student_logits: [..., vocabulary] of float32, bfloat16, float16 or float64, at the positions that predict
            ``labels``.
        teacher_logits: the same shape, of any of these dtypes, on the same device; they get no gradient. With
            ``teacher_indices``: [..., k].
        labels: integers [...]; the losses of tokens whose label is -100 are 0, and their logits are not read. None: all
            tokens count.
        beta: 0 to 1.
        temperature: above 0; both logits are divided by it.
        reduction: "batchmean" divides the sum of losses by the number of tokens that count (at least 1), without
            ``labels`` by the first dimension; "sum"; "mean" divides the sum by that number of tokens and the length of
            a distribution; "none": [...], a loss a token.
        top_k: the distributions are those over the teacher's k most probable tokens alone. Both teacher and student are
            renormalized over them, so the loss does not see how much the student puts on other tokens. A number
            above the vocabulary's size takes all.
        teacher_indices: integers [..., k], different token ids, where a teacher has sent only its k largest logits. As
            with ``top_k``, both distributions are renormalized over these ids.
        chunk: rows that torch computes at a time, in float64 and on devices without a kernel.

    Returns a scalar (or [...] for "none") in float32, float64 for a student of float64. On the host nothing of the
    logits' size is made but the student's gradient, which has its dtype. A NaN or +inf among the logits makes the loss
    NaN, as a loss scaler needs it. The gradient is right once; a second derivative raises BackwardError.

    Raises:
        ModelError: shapes, devices or dtypes that do not fit; token ids outside the vocabulary or twice in a row; a
            token that counts whose logits are all -inf.
        ConfigError: a beta, temperature, reduction, top_k or chunk that is not allowed.
    """
    _check_settings(beta, temperature, reduction, top_k, chunk)
    _check_tensors(student_logits, teacher_logits, labels, teacher_indices)
    shape = student_logits.shape[:-1]
    student = student_logits.reshape(shape.numel(), student_logits.shape[-1])
    teacher = teacher_logits.detach().reshape(shape.numel(), teacher_logits.shape[-1])
    is_counted = None if labels is None else labels.reshape(-1) != IGNORED
    columns = None if teacher_indices is None else teacher_indices.reshape(teacher.shape).long()
    if columns is not None:
        _check_columns(columns, student.shape[-1], is_counted)
    if top_k is not None and top_k < teacher.shape[-1]:
        teacher, places = teacher.topk(top_k, dim=-1)
        columns = places if columns is None else columns.gather(1, places)
    if columns is not None:
        student = student.gather(1, columns)
    losses, is_empty = divergence.rows(student, teacher, is_counted, float(beta), 1.0 / temperature, chunk)
    _check_logits(is_empty)
    if reduction == "none":
        return losses.view(shape)
    total = losses.sum()
    if reduction == "sum":
        return total
    if is_counted is not None:
        n_counted: Tensor | int = is_counted.sum().clamp(min=1)
    else:
        n_counted = max(shape[0] if reduction == "batchmean" and shape else shape.numel(), 1)
    return total / (n_counted if reduction == "batchmean" else n_counted * student.shape[-1])


def _check_settings(beta: float, temperature: float, reduction: str, top_k: int | None, chunk: int) -> None:
    if not 0 <= beta <= 1:
        raise ConfigError(
            f"is {beta}",
            where=f"beta of {_WHERE}",
            fix="write a number from 0 (forward KL) to 1 (reverse KL)",
        )
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"is {temperature}", where=f"temperature of {_WHERE}", fix="write a number above 0")
    if reduction not in _REDUCTIONS:
        raise ConfigError(
            f'is "{reduction}"', where=f"reduction of {_WHERE}", fix=f"write one of {', '.join(_REDUCTIONS)}"
        )
    for name, value in (("top_k", top_k), ("chunk", chunk)):
        if value is not None and value < 1:
            raise ConfigError(f"is {value}", where=f"{name} of {_WHERE}", fix="write a number of at least 1")


def _check_tensors(student: Tensor, teacher: Tensor, labels: Tensor | None, indices: Tensor | None) -> None:
    def refuse(what: str, fix: str) -> None:
        raise ModelError(what, where=_WHERE, fix=fix)

    for whose, logits in (("student", student), ("teacher", teacher)):
        if not logits.is_floating_point() or logits.element_size() == 1:
            refuse(f"the {whose}'s logits are {logits.dtype}", "give logits of float32, bfloat16, float16 or float64")
        if not logits.dim() or logits.shape[-1] == 0:
            refuse(
                f"the {whose}'s logits have the shape {list(logits.shape)}, without a vocabulary",
                "give logits [..., vocabulary]",
            )
    if indices is None and student.shape != teacher.shape:
        refuse(
            f"the student's logits are {list(student.shape)}, the teacher's {list(teacher.shape)}",
            "give both models the same text and one vocabulary, or teacher_indices with the teacher's largest logits",
        )
    if indices is not None and (
        indices.is_floating_point() or indices.shape != teacher.shape or teacher.shape[:-1] != student.shape[:-1]
    ):
        refuse(
            f"teacher_indices are {indices.dtype} {list(indices.shape)} for a teacher's logits {list(teacher.shape)} and "
            f"a student's {list(student.shape)}",
            "give an integer for each of the teacher's logits, and logits for each of the student's tokens",
        )
    if labels is not None and (labels.is_floating_point() or labels.shape != student.shape[:-1]):
        refuse(
            f"labels are {labels.dtype} {list(labels.shape)} for logits {list(student.shape)}",
            "give an integer for each token",
        )
    for name, tensor in (("teacher_logits", teacher), ("labels", labels), ("teacher_indices", indices)):
        if tensor is not None and tensor.device != student.device:
            refuse(f"{name} are on {tensor.device}, the student's logits on {student.device}", "move them there")


def _check_columns(columns: Tensor, vocab_size: int, is_counted: Tensor | None) -> None:
    wrong = (columns < 0) | (columns >= vocab_size)
    if wrong.any():
        raise ModelError(
            f"token id {int(columns[wrong][0])} is not in the student's vocabulary of {vocab_size}",
            where=f"teacher_indices of {_WHERE}",
            fix="give ids of the student's tokens, also where labels are -100",
        )
    in_order = columns.sort(dim=-1).values
    is_twice = (in_order[:, 1:] == in_order[:, :-1]).any(1)
    if is_counted is not None:
        is_twice &= is_counted
    if is_twice.any():
        raise ModelError(
            f"row {int(is_twice.nonzero()[0])} has a token id twice",
            where=f"teacher_indices of {_WHERE}",
            fix="give each id of a row once, as torch.topk does",
        )


def _check_logits(is_empty: Tensor) -> None:
    if is_empty.device.type != "meta" and not torch.compiler.is_compiling() and bool(is_empty.any()):
        raise ModelError(
            f"all logits of row {int(is_empty.nonzero()[0])} are -inf, which is no distribution",
            where=_WHERE,
            fix="keep a token of each row, or give the row's token the label -100",
        )
