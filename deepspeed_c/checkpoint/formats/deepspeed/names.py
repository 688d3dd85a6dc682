"""Names for the parameters of an optimizer that was saved with numbers only: found from shapes, order and values, and
only if there is a single answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from deepspeed_c.checkpoint.formats.torch_file import StoredTensor, fill

__all__ = ["Comparison", "match_flat", "match_names"]

# Limit on the ways through the groups that are followed at the same time. Two groups of n parameters have at most n + 1
# ways.
WAYS_LIMIT = 1 << 14
# Elements of a weight that are compared with its master weight.
COMPARED_ELEMS = 4096

Candidate = tuple[str, StoredTensor]


def match_names(
    candidates: Sequence[Candidate],
    shapes: Sequence[Sequence[tuple[int, ...] | None]],
    masters: Sequence[Sequence[StoredTensor | None]],
    may_be_in: Callable[[int, str], bool] = lambda group, name: True,
) -> list[list[str]] | str:
    """Returns the name for each number of each group if exactly one assignment fits; otherwise the reason.

    candidates: weights in the module's order; any number of them may be frozen. shapes, masters: by group, in the
    group's order; None where unknown. may_be_in: whether a group may have the
    parameter of a name. Assumes that a group lists its parameters in the module's order, as groups built
    from ``named_parameters()`` do, and that a master weight, rounded, is the weight.
    """
    if sum(map(len, shapes)) > len(candidates):
        return f"its optimizer has {sum(map(len, shapes))} parameters, and the module {len(candidates)}"
    by_shape = _match(
        candidates,
        list(map(len, shapes)),
        lambda g, i, c: (
            may_be_in(g, candidates[c][0]) and (shapes[g][i] is None or shapes[g][i] == tuple(candidates[c][1].shape))
        ),
    )
    if isinstance(by_shape, list) or not any(master is not None for of_group in masters for master in of_group):
        return by_shape
    compare = Comparison(candidates)
    return _match(
        candidates,
        list(map(len, shapes)),
        lambda g, i, c: (
            may_be_in(g, candidates[c][0])
            and shapes[g][i] == tuple(candidates[c][1].shape)
            and compare(c, masters[g][i], 0)
        ),
    )


def match_flat(
    candidates: Sequence[Candidate],
    flats: Sequence[StoredTensor],
    may_be_in: Callable[[int, str], bool] = lambda group, name: True,
) -> list[list[str]] | str:
    """The same for groups whose master weights are laid end to end in one flat tensor each."""
    compare = Comparison(candidates)
    ways: dict[tuple[int, ...], tuple[int, tuple | None]] = {(0,) * len(flats): (1, None)}
    layers = []
    for c, (name, stored) in enumerate(candidates):
        n = stored.n_elems
        following: dict[tuple[int, ...], tuple[int, tuple | None]] = {}
        for place, (count, _) in ways.items():
            _step(following, place, count, (place, None))
            for g, flat in enumerate(flats):
                if may_be_in(g, name) and place[g] + n <= flat.n_elems and compare(c, flat, place[g]):
                    _step(following, (*place[:g], place[g] + n, *place[g + 1 :]), count, (place, g))
        if len(following) > WAYS_LIMIT:
            return "its optimizer's states have no names, and too many parameters look alike to find them"
        layers.append(following)
        ways = following
    return _answer(candidates, layers, tuple(flat.n_elems for flat in flats), len(flats))


def _match(
    candidates: Sequence[Candidate], lengths: Sequence[int], fits: Callable[[int, int, int], bool]
) -> list[list[str]] | str:
    """Goes through the candidates. At each candidate, a way is how far each group has been filled; the number of
    assignments that lead to a way is counted up to two.
    """
    ways: dict[tuple[int, ...], tuple[int, tuple | None]] = {(0,) * len(lengths): (1, None)}
    layers = []
    spare = len(candidates) - sum(lengths)
    for c in range(len(candidates)):
        following: dict[tuple[int, ...], tuple[int, tuple | None]] = {}
        for place, (count, _) in ways.items():
            if c - sum(place) < spare:
                _step(following, place, count, (place, None))
            for g, length in enumerate(lengths):
                if place[g] < length and fits(g, place[g], c):
                    _step(following, (*place[:g], place[g] + 1, *place[g + 1 :]), count, (place, g))
        if len(following) > WAYS_LIMIT:
            return "its optimizer's states have no names, and too many parameters look alike to find them"
        layers.append(following)
        ways = following
    return _answer(candidates, layers, tuple(lengths), len(lengths))


def _step(ways: dict, place: tuple[int, ...], count: int, came_from: tuple) -> None:
    known = ways.get(place)
    ways[place] = (count, came_from) if known is None else (2, known[1])


def _answer(
    candidates: Sequence[Candidate], layers: Sequence[dict], end: tuple[int, ...], n_groups: int
) -> list[list[str]] | str:
    count = layers[-1].get(end, (0, None))[0] if layers else int(not any(end))
    if count == 0:
        return "its optimizer's states have no names, and their shapes fit no parameters of the module in its order"
    if count > 1:
        return "its optimizer's states have no names, and more than one way to give them the module's fits"
    names: list[list[str]] = [[] for _ in range(n_groups)]
    place = end
    for c in reversed(range(len(layers))):
        place, group = layers[c][place][1]
        if group is not None:
            names[group].append(candidates[c][0])
    return [of_group[::-1] for of_group in names]


class Comparison:
    """Compares the beginning of a weight with a master weight, rounded. Each is read once."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates
        self._weights: dict[int, torch.Tensor] = {}
        self._known: dict[tuple[int, tuple, int], bool] = {}

    def __call__(self, candidate: int, master: StoredTensor | None, begin: int) -> bool:
        if master is None:
            return True
        key = candidate, master.identity, begin
        if key not in self._known:
            stored = self._candidates[candidate][1]
            n = min(COMPARED_ELEMS, stored.n_elems)
            if candidate not in self._weights:
                self._weights[candidate] = torch.empty(n, dtype=stored.dtype, device="cpu")
                fill([(stored, 0, self._weights[candidate])])
            rounded = torch.empty(n, dtype=stored.dtype, device="cpu")
            fill([(master, begin, rounded)])
            self._known[key] = torch.equal(
                rounded.view(torch.uint8) if math.prod(rounded.shape) else rounded,
                self._weights[candidate].view(torch.uint8) if n else self._weights[candidate],
            )
        return self._known[key]
