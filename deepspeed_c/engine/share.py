"""How much a rank's loss counts if its sequences are cut over ranks. Gradients are summed over the ranks of a sequence,
so each rank's loss must be its term of that sum.

[Note: a guess is not silent] If the configuration does not name the kind of a loss, it is guessed from the loss's graph
and the forward's labels. A guess may be wrong: the user may have an own gather function that is not recognised, and a
mean over a rank's own tokens looks like a term of a sum. So the guess "term of a sum" causes a warning with the
possible error factor, and at the first step ranks compare their losses. They compare at the step, and not in a
backward, because ranks may call backward different numbers of times.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from deepspeed_c.comm.axes import SP
from deepspeed_c.comm.ledger import ranks_in_words
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.passes import nodes_between, nodes_of
from deepspeed_c.errors import RankMismatchError, StateError
from deepspeed_c.logging import log_dist
from deepspeed_c.sequence.loss import ranks_of_gathered_losses

__all__ = ["LossKind", "LossShare"]

LossKind = Literal["auto", "mean", "part", "whole"]
"""mean: a rank's loss is the mean over its own valid tokens. part: a rank's loss is a term of the sum over ranks
already. whole: a rank's loss is the loss of whole sequences. It was computed with a collective whose backward adds up
the gradients of all ranks."""

IGNORED = -100
"""Label of tokens that do not count in the loss. It is the default of torch and transformers."""

# Graph nodes of those collectives in torch.distributed.nn.functional that give all ranks the same result. Their
# backward adds up the gradients of all ranks, so a loss behind them counts once for each rank.
_WHOLE = {"_AllGatherBackward", "_AllReduceBackward", "_AllGatherBaseBackward"}
_AUTOGRAD = "torch.distributed.nn.functional"
# The same nodes for torch's functional collectives. Torch derives the names of the nodes' classes from the operators'
# names.
_WHOLE_OPS = tuple(f"GeneratedBackwardFor__c10d_functional_{op}_" for op in ("all_gather_into_tensor", "all_reduce"))

_LABELS = ("shift_labels", "labels")
_KEY = '"sequence_parallel": {"loss": ...}'
# Most steps in which losses are compared, if all of them are zero, inf or NaN and so cannot be compared.
_MAX_COMPARED = 8
# Losses of ranks that add up the same numbers in a different order differ by less than this.
_ROUNDING = 1e-3


class _Guess(NamedTuple):
    """A loss whose kind was guessed, in the form that is sent to other ranks."""

    way: LossKind
    loss: float
    is_wide: bool
    """Whether the loss has at least 32 bits. Losses of 16 bits may be equal by chance."""
    has_collective: bool
    """Whether the loss's graph contains a known collective over the ranks of a sequence."""
    n_valid: int
    """Number of this rank's valid tokens; -1 if the forward had no labels."""
    n_items: float
    """``num_items_in_batch`` as given to the forward; -1 if it was not given."""
    is_known: bool
    """Whether the loss comes from a loss function of this package, so that its kind is no guess."""


class _Noted(NamedTuple):
    """A guess whose numbers may still lie on the device."""

    way: LossKind
    loss: torch.Tensor
    has_collective: bool
    labels: torch.Tensor | None
    n_items: Any
    is_known: bool


class LossShare:
    """Weights the losses of one engine's micro-batches. ``way``: the value of ``sequence_parallel.loss``."""

    def __init__(self, mesh: Mesh, way: LossKind) -> None:
        self._mesh, self._way = mesh, way
        self.is_needed = mesh.size(SP) > 1
        """Whether sequences are cut over ranks."""
        self._labels: torch.Tensor | None = None
        self._n_items: Any = None
        self._ends: frozenset[Any] = frozenset()
        self._loss_node: Any = None
        # What the graph of the model's own loss shows; None: it has not been read yet.
        self._inside: LossKind | None = None
        self._told: set[LossKind] = set()
        self._noted: list[_Noted] = []
        self._n_compared = 0
        self._compares = self.is_needed and way == "auto"

    def note(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Remembers a training forward: its labels, and the graph nodes of its outputs."""
        labels = _labels_of(module, args, kwargs)
        self._labels = labels if torch.is_tensor(labels) else None
        # Models of transformers divide by this number instead of counting tokens themselves.
        self._n_items = kwargs.get("num_items_in_batch")
        self._ends = nodes_of(tree_flatten(outputs)[0])
        self._loss_node = _own_loss_node(outputs)

    def forget(self) -> None:
        """Drops the references to the forward's graph. The labels stay, because a second backward of the forward needs
        them for its weight."""
        self._ends, self._loss_node = frozenset(), None

    def weight(self, loss: torch.Tensor) -> float:
        """The factor of ``loss``. Collective over the ranks of a sequence.

        Raises StateError if ``sequence_parallel.loss`` is "mean" and the forward was given no labels.
        """
        return self._weight(self._way if self._way != "auto" else self._find_way(loss))

    def weight_of(self, labels: Any) -> float:
        """The factor of a loss that a pipeline's ``loss_fn`` has computed from this rank's ``labels``. "auto" takes it
        for the mean over the labels that count. Collective over the ranks of a sequence.

        Raises StateError if the loss is such a mean and ``labels`` is no tensor.
        """
        self._labels = labels if torch.is_tensor(labels) else None
        return self._weight("mean" if self._way == "auto" else self._way)

    def _weight(self, way: LossKind) -> float:
        if way == "part":
            return 1.0
        if way == "whole":
            return 1.0 / self._mesh.size(SP)
        if self._labels is None:
            raise StateError(
                "the weight of the loss depends on the rank's number of valid tokens, and the forward was given no"
                " labels",
                where="engine.backward",
                fix="pass shift_labels=... (or labels=...) to engine(...), or a tensor of labels to train_batch; or weight"
                ' the losses yourself and set "sequence_parallel": {"loss": "part"}',
            )
        mine = int((self._labels != IGNORED).sum())
        total = sum(self._mesh.sequence.gather_numbers(mine, label="valid tokens"))
        # Without a label on any rank the mean is NaN, as it is of a sequence that is not cut.
        return mine / total if total else 1.0

    def _find_way(self, loss: torch.Tensor) -> LossKind:
        if loss.grad_fn is None:
            return "part"
        is_own = loss.grad_fn is self._loss_node
        if is_own:
            if self._inside is None:
                self._inside = self._kind_of(nodes_between([loss.grad_fn]))
            seen = self._inside
        else:
            seen = self._kind_of(nodes_between([loss.grad_fn], self._ends))
        is_known, has_collective = seen == "part", seen == "whole"
        way: LossKind = "whole" if has_collective else "part"
        if is_own and self._labels is not None and self._n_items is None and not is_known:
            # Weights by tokens add up to 1 over ranks, so they are right even for a loss that the model itself has
            # gathered. Therefore it does not matter whether a collective in the graph belongs to the loss or to a
            # layer.
            way = "mean"
        if not is_known:
            self._tell(way)
        if self._compares:
            noted = _Noted(way, loss.detach().clone(), has_collective, self._labels, self._n_items, is_known)
            self._noted.append(noted)
        return way

    def _kind_of(self, nodes: Iterable[Any]) -> LossKind:
        """The kind of a loss that a node of its graph shows. "part": its losses were gathered by a function of this
        package. "whole": by another collective whose backward adds up. "auto": no node shows it."""
        found: LossKind = "auto"
        mine = set(self._mesh.sequence.global_ranks)
        for node in nodes:
            if mine <= set(ranks_of_gathered_losses(node)):
                return "part"
            group = _group_of(node)
            if group is not None and mine <= set(dist.get_process_group_ranks(group)):
                found = "whole"
        return found

    def _tell(self, way: LossKind) -> None:
        """Logs once how losses of this kind are treated. With Adam, a wrong scale of gradients would go unnoticed."""
        if way in self._told:
            return
        self._told.add(way)
        n = self._mesh.size(SP)
        if way != "part":
            meaning = {
                "mean": "the model's mean over this rank's tokens; it is weighted by their number",
                "whole": "that of whole sequences, gathered from all ranks; it is counted once",
            }[way]
            log_dist(f"sequence parallelism: a rank's loss is taken as {meaning} ({_KEY} says it)", ranks=[0])
            return
        if self._n_items is not None:
            log_dist(
                "sequence parallelism: a rank's loss is taken as its term of a sum over the ranks of a sequence, because"
                f" the model was given num_items_in_batch to divide by ({_KEY} says it)",
                ranks=[0],
            )
            return
        mean = (
            'set "sequence_parallel": {"loss": "mean"}, which weights it by its valid tokens'
            if self._labels is not None
            else 'pass shift_labels=... (or labels=...) to engine(...) and set "sequence_parallel": {"loss": "mean"}, or'
            " multiply it by this rank's valid tokens / those of all ranks of the sequence"
        )
        log_dist(
            f"sequence parallelism: a rank's loss is taken as its term of a sum over the {n} ranks of a sequence, and"
            f" nobody has said that it is one. If it is a mean over the rank's own tokens, gradients are about {n} times"
            f" too large, and tokens count unequally where ranks have other numbers of them: {mean}. If it is the loss of"
            f" whole sequences, by a gather whose backward adds up what all ranks ask for, they are {n} times too large:"
            ' set "sequence_parallel": {"loss": "whole"}. If it is a term of the sum, say so: "sequence_parallel":'
            ' {"loss": "part"}',
            ranks=[0],
            level=logging.WARNING,
        )

    @property
    def compares(self) -> bool:
        """Whether ``compare`` must be called before the next update. It must in the first step, and in a few more if
        losses could not be compared. The same on all ranks."""
        return self._compares

    def compare(self) -> None:
        """Compare the losses of the window that is about to end. Collective over all ranks of the engine.

        See [Note: a guess is not silent]. Raises StateError on all ranks if losses were treated as terms of a sum but
        are equal on all ranks of a sequence. Raises RankMismatchError on all ranks if the ranks guessed different kinds
        of losses.
        """
        mine = [_guess_of(noted) for noted in self._noted]
        self._noted = []
        ranks = tuple(self._mesh.sequence.global_ranks)
        everyone = self._mesh.comm.gather_objects((ranks, mine), label="losses of the ranks of a sequence")
        sequences: dict[tuple[int, ...], list[list[_Guess]]] = {}
        for of, guesses in everyone:
            sequences.setdefault(of, []).append(guesses)
        warnings: list[str] = []
        # All ranks check the losses of all sequences, so that all of them raise.
        outcomes = [_judge(of, by_rank, warnings) for of, by_rank in sorted(sequences.items())]
        is_done = all(outcomes)
        self._n_compared += 1
        if not is_done and self._n_compared == _MAX_COMPARED:
            warnings.append(
                f"losses of the first {_MAX_COMPARED} steps were zero or not finite, and could not be compared; {_KEY}"
                " says what they are"
            )
        self._compares = not is_done and self._n_compared < _MAX_COMPARED
        for text in warnings:
            log_dist(f"sequence parallelism: {text}", ranks=[0], level=logging.WARNING)


def _labels_of(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The labels that a forward was given, as a keyword argument or as the positional argument with that name."""
    found = next((kwargs[name] for name in _LABELS if kwargs.get(name) is not None), None)
    if found is not None or not args:
        return found
    try:
        names = list(inspect.signature(module.forward).parameters.values())[: len(args)]
    except (TypeError, ValueError):  # forward is no Python function (torch.jit)
        return None
    placed = {
        each.name: value
        for each, value in zip(names, args)
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    }
    return next((placed[name] for name in _LABELS if placed.get(name) is not None), None)


def _own_loss_node(outputs: Any) -> Any:
    """The graph node of the loss that a model has computed itself: ``outputs.loss``, ``outputs["loss"]``, or a single
    number that the model returned. None if there is no such loss."""
    if torch.is_tensor(outputs):
        loss: Any = outputs if outputs.numel() == 1 else None
    else:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss.grad_fn if torch.is_tensor(loss) else None


def _guess_of(noted: _Noted) -> _Guess:
    labels, n_items = noted.labels, noted.n_items
    return _Guess(
        noted.way,
        float(noted.loss),
        noted.loss.dtype.itemsize >= 4,
        noted.has_collective,
        -1 if labels is None else int((labels != IGNORED).sum()),
        -1.0 if n_items is None else float(n_items),
        noted.is_known,
    )


def _judge(ranks: Sequence[int], by_rank: Sequence[Sequence[_Guess]], warnings: list[str]) -> bool:
    """Check the guesses of the ranks of one sequence; each rank's guesses are in the order of its backwards. Return
    whether at least one loss could be compared. Doubts that are not errors are added to ``warnings``."""
    is_done = False
    # Ranks may have called backward different numbers of times. Then the n-th losses of two ranks may be different
    # losses.
    is_aligned = len({len(guesses) for guesses in by_rank}) == 1
    for row in zip(*by_rank):
        is_one_kind = len({guess.way for guess in row}) == 1
        if all(guess.is_known for guess in row):
            is_done = True
        elif any(map(_says_something, row)) and (is_aligned or is_one_kind):
            is_done = True
            _judge_one(ranks, row, warnings)
    _check_items(ranks, by_rank, warnings)
    return is_done


def _says_something(guess: _Guess) -> bool:
    """Whether a loss can be compared. A rank without valid tokens has a loss of zero or NaN, which cannot."""
    return guess.loss != 0.0 and math.isfinite(guess.loss)


def _judge_one(ranks: Sequence[int], row: Sequence[_Guess], warnings: list[str]) -> None:
    who, n = ranks_in_words(ranks), len(ranks)
    speaking = [(rank, guess) for rank, guess in zip(ranks, row) if _says_something(guess)]
    first_rank, first = speaking[0]
    other = next(((rank, guess) for rank, guess in speaking if guess.way != first.way), None)
    if other is not None:
        raise RankMismatchError(
            f"rank {first_rank} treats its loss as {first.way!r} and rank {other[0]} as {other[1].way!r}, but they hold"
            " parts of the same sequences",
            where="engine.step",
            fix='compute the loss in the same way on all ranks, or declare it: "sequence_parallel": {"loss": "whole"},'
            ' "part" or "mean"',
        )
    losses = [guess.loss for guess in row if math.isfinite(guess.loss)]
    is_equal = len(speaking) == n and min(losses) == max(losses)
    if first.way == "whole":
        spread = (max(losses) - min(losses)) / max(map(abs, losses))
        if spread > (_ROUNDING if first.is_wide else 10 * _ROUNDING):
            warnings.append(
                "a collective lies between the model and the loss, so the loss counts as the loss of whole sequences,"
                f" times 1/{n}; but {who}, which hold parts of the same sequences, have losses from {min(losses):g} to"
                f" {max(losses):g}. If each is a term of a sum, gradients are {n} times too small: set"
                ' "sequence_parallel": {"loss": "part"}. If each is the loss of whole sequences, set'
                ' "sequence_parallel": {"loss": "whole"}'
            )
    elif is_equal and first.way == "part" and first.is_wide and first.n_items < 0:
        raise StateError(
            f"{who}, which hold parts of the same sequences, have exactly the same loss, {losses[0]:.9g}, and its"
            f" meaning is not configured: as a term of a sum it counts {n} times",
            where="engine.step",
            fix='set "sequence_parallel": {"loss": "whole"} if it is the loss of whole sequences, from a gather whose'
            ' backward sums the gradients of all ranks; {"loss": "part"} if that backward gives each rank only its own'
            ' share, or if terms of a sum are equal by chance; {"loss": "mean"}, and pass labels to engine(...), if'
            " it is a mean over a rank's own tokens. Ranks with the same tokens have equal losses too: each rank needs"
            " its own part of the sequences",
        )
    elif is_equal and not first.has_collective:
        taken = "weighted by this rank's valid tokens" if first.way == "mean" else f"counted {n} times, once a rank"
        warnings.append(
            f"{who}, which hold parts of the same sequences, have the same loss, {losses[0]:.9g}; it is {taken}. If it is"
            " the loss of whole sequences, from a gather whose backward sums the gradients of all ranks, set"
            ' "sequence_parallel": {"loss": "whole"}; if that backward gives each rank only its own share, set "part"'
        )


def _check_items(ranks: Sequence[int], by_rank: Sequence[Sequence[_Guess]], warnings: list[str]) -> None:
    """Check ``num_items_in_batch``: a loss that was divided by it is a term of the sum only if it counts the tokens of
    all ranks."""
    given = [guess for guesses in by_rank for guess in guesses if guess.way == "part" and guess.n_items > 0]
    if not given or any(guess.n_valid < 0 for guess in given):
        return
    n_items, n_valid = min(guess.n_items for guess in given), sum(guess.n_valid for guess in given)
    # A larger number is no mistake: transformers counts labels before they are shifted, and labels of other sequences
    # too.
    if n_items < 0.99 * n_valid:
        warnings.append(
            f"num_items_in_batch is {n_items:g}, and {ranks_in_words(ranks)} have {n_valid} valid tokens of the same"
            f" sequences in this step: gradients are {n_valid / n_items:.3g} times too large. Count the labels of all"
            ' ranks of a sequence; or leave it out, or say what the losses are: "sequence_parallel": {"loss": "part"}'
        )


def _group_of(node: Any) -> dist.ProcessGroup | None:
    """The process group of ``node``, if it is a collective that gives all ranks the same result; otherwise None."""
    name = type(node).__name__
    if name.startswith(_WHOLE_OPS):
        group = node.group_name
        return group if isinstance(group, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(group)
    function: Callable[..., Any] | None = getattr(type(node), "_forward_cls", None)
    if name not in _WHOLE or getattr(function, "__module__", "") != _AUTOGRAD:
        return None
    return node.group or dist.group.WORLD
