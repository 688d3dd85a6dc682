"""Plans of a sequence as text and as pictures: the tokens of each rank, the hop at which each part of the attention is
computed, and the work and traffic of each rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from deepspeed_c.quantity import as_binary
from deepspeed_c.sequence.plans import HeadPlan, SequenceCut, plan_exchange, plan_heads
from deepspeed_c.sequence.ring_plan import CAUSAL, WHOLE, RingPlan, plan_ring

__all__ = ["SequencePlan", "as_json", "as_svg", "as_text"]

_COLOURS = ("#1b6ca8", "#c8553d", "#4a7c59", "#8e5ea2", "#b8860b", "#4f9d9d", "#a05195", "#7a7a3a")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_WIRE_BYTES = 2  # bytes of an element in bfloat16, the dtype of most models
_GRAD_BYTES = 4

# Sizes of pictures, in characters and in pixels.
_CELLS = 32
_BAR = 64
_SIDE, _MARGIN, _BAR_HEIGHT = 320, 60, 22


@dataclass(frozen=True)
class SequencePlan:
    """The attention of one sequence over ranks, in a form that can be shown."""

    attention: str
    """``ring``, ``ulysses`` or ``hybrid``."""
    cut: SequenceCut
    n_heads: int
    n_key_heads: int
    width: int
    """Number of elements of a head."""
    is_causal: bool = True
    window: int = 0

    @cached_property
    def ring(self) -> RingPlan:
        """The plan of the ring, in which each row of ranks holds one part."""
        return plan_ring(self.cut.parts(), is_causal=self.is_causal, window=self.window)

    def heads(self, rank: int) -> HeadPlan:
        """The heads of ``rank`` within its row."""
        return plan_heads(self.n_heads, self.n_key_heads, self.cut.n_inner, rank % self.cut.n_inner)

    def pairs(self, rank: int) -> int:
        """Number of pairs of a query and a key that ``rank`` computes for each of its heads."""
        return self.ring.work[rank // self.cut.n_inner]

    def work(self, rank: int) -> int:
        """Number of products of one query with one key, over all heads of ``rank``."""
        return self.pairs(rank) * self.heads(rank).n_queries

    def sent_bytes(self, rank: int) -> tuple[int, int]:
        """Bytes that ``rank`` sends to others, (forward, backward), for one layer and one sequence in bfloat16."""
        around = self.ring.wire_elems(rank // self.cut.n_inner, self.heads(rank).n_keys, self.width)
        forward, backward = around.keys * _WIRE_BYTES, around.keys * _WIRE_BYTES + around.grads * _GRAD_BYTES
        inner = rank % self.cut.n_inner
        row = rank - inner
        tokens = self.cut.tokens[row : row + self.cut.n_inner]
        plan = plan_exchange(
            self.n_heads, self.n_key_heads, tokens, inner, query_width=self.width, value_width=self.width
        )
        there, back = (sum(elems) - elems[inner] for elems in (plan.sent, plan.returned))
        of_others, outputs = (sum(elems) - elems[inner] for elems in (plan.received, plan.got))
        return forward + (there + back) * _WIRE_BYTES, backward + (of_others + outputs) * _WIRE_BYTES


def as_text(plan: SequencePlan) -> str:
    """The plan as text for a terminal."""
    cut = plan.cut
    lines = [
        _title(plan),
        "",
        f"tokens by rank (0 to {cut.n_tokens - 1}, {_per(cut.n_tokens, _BAR)}):" if cut.n_tokens else "no tokens",
        "  " + "".join(_digit(_owner(cut, place)) for place in _samples(cut.n_tokens, _BAR)),
        "",
        _picture_title(plan),
        *("  " + "".join("." if hop is None else _digit(hop) for hop in row) for row in _grid(plan)),
        "",
        *_table(plan),
    ]
    return "\n".join(lines)


def as_json(plan: SequencePlan) -> dict[str, object]:
    """The plan as plain data, with one entry for each rank."""
    return {
        "attention": plan.attention,
        "order": plan.cut.order,
        "tokens": plan.cut.n_tokens,
        "ranks": [
            {
                "rank": rank,
                "runs": [list(run) for run in plan.cut.runs(rank)],
                "heads": [plan.heads(rank).query_begin, plan.heads(rank).query_end],
                "key_heads": [plan.heads(rank).key_begin, plan.heads(rank).key_end],
                "work": plan.work(rank),
                "hops": _hops(plan, rank),
                "forward_bytes": plan.sent_bytes(rank)[0],
                "backward_bytes": plan.sent_bytes(rank)[1],
            }
            for rank in range(plan.cut.n_ranks)
        ],
    }


def as_svg(plan: SequencePlan) -> str:
    """The plan as a picture: bars with the tokens of each rank, and a grid of queries (down) and keys (across) by hop."""
    cut, n_hops = plan.cut, plan.cut.n_parts
    below = _MARGIN + _BAR_HEIGHT + 40
    width, height = _SIDE + 2 * _MARGIN + 140, below + _SIDE + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
        "<style>text { font-family: sans-serif; font-size: 12px }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="24">{escape(_title(plan))}</text>',
        f'<text x="{_MARGIN}" y="{_MARGIN - 8}">tokens by rank</text>',
    ]
    for rank in range(cut.n_ranks):
        for run in cut.runs(rank):
            left, right = (_MARGIN + _SIDE * place / cut.n_tokens for place in (run.begin, run.begin + run.n_tokens))
            parts.append(_rect(left, _MARGIN, right - left, _BAR_HEIGHT, rank))
            if right - left > 14:
                parts.append(
                    f'<text x="{(left + right) / 2:.1f}" y="{_MARGIN + 16}" text-anchor="middle">{rank}</text>'
                )
    parts.append(f'<text x="{_MARGIN}" y="{below - 8}">{escape(_picture_title(plan))}</text>')
    grid = _grid(plan, 2 * _CELLS)
    side = _SIDE / max(len(grid), 1)
    for i, row in enumerate(grid):
        for begin, end, hop in _stretches(row):
            parts.append(_rect(_MARGIN + begin * side, below + i * side, (end - begin) * side, side, hop, line=False))
    parts.append(f'<rect x="{_MARGIN}" y="{below}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#888"/>')
    for hop in range(n_hops):
        y = below + 20 * hop
        parts.append(_rect(_MARGIN + _SIDE + 20, y, 14, 14, hop))
        parts.append(f'<text x="{_MARGIN + _SIDE + 40}" y="{y + 12}">{"own keys" if hop == 0 else f"hop {hop}"}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _title(plan: SequencePlan) -> str:
    cut = plan.cut
    rows = f" in rows of {cut.n_inner}" if cut.n_inner > 1 else ""
    packed = f", {len(cut.document_ends)} documents" if cut.document_ends else ""
    mask = "causal" if plan.is_causal else "not causal"
    window = f", window {plan.window}" if plan.window else ""
    return (
        f"{cut.n_tokens} tokens over {cut.n_ranks} ranks{rows}: {plan.attention}, {cut.order}, {mask}{window}{packed}"
    )


def _picture_title(plan: SequencePlan) -> str:
    if plan.cut.n_parts == 1:
        return "attention, queries down, keys across; each rank computes all of it for its heads"
    who = "ranks" if plan.cut.n_inner == 1 else "rows of ranks"
    return f"attention, queries down, keys across, by hop of the keys between {who}"


def _per(n_tokens: int, n_cells: int) -> str:
    return f"{n_tokens / n_cells:.4g} a character" if n_tokens > n_cells else "one a character"


def _digit(number: int) -> str:
    return _DIGITS[number % len(_DIGITS)]


def _samples(n_tokens: int, n_cells: int) -> list[int]:
    """The token in the middle of each cell. All tokens, if there are fewer tokens than cells."""
    n = min(n_tokens, n_cells)
    return [(2 * i + 1) * n_tokens // (2 * n) for i in range(n)]


def _owner(cut: SequenceCut, place: int) -> int:
    return next(rank for rank in range(cut.n_ranks) if _local(cut, rank, place) is not None)


def _local(cut: SequenceCut, rank: int, place: int) -> int | None:
    runs = cut.runs(rank)
    i = bisect_right([run.begin for run in runs], place) - 1
    if i < 0 or place >= runs[i].begin + runs[i].n_tokens:
        return None
    return runs[i].local_begin + place - runs[i].begin


def _grid(plan: SequencePlan, n_cells: int = _CELLS) -> list[list[int | None]]:
    """The hop that computes the token pair in the middle of each cell; None if no hop computes it."""
    cut = plan.ring.cut
    places = [(place, _owner(cut, place)) for place in _samples(cut.n_tokens, n_cells)]
    spots = [(owner, _local(cut, owner, place)) for place, owner in places]
    return [
        [
            (owner - source) % cut.n_ranks if _is_computed(plan.ring, owner, i, source, j) else None
            for source, j in spots
        ]
        for owner, i in spots
    ]


def _is_computed(ring: RingPlan, rank: int, i: int | None, source: int, j: int | None) -> bool:
    """Whether a block of the plan contains query i of ``rank`` and key j of ``source``."""
    if i is None or j is None:
        return False
    for block in ring.blocks(rank, source):
        if not (block.query_begin <= i < block.query_end and block.key_begin <= j < block.key_end):
            continue
        distance = (i - block.query_begin) - (j - block.key_begin)
        if block.kind == WHOLE:
            return True
        if block.kind == CAUSAL:
            return distance >= 0
        distance += block.shift
        is_seen = distance >= 0 or not ring.is_causal
        return is_seen and (ring.window == 0 or abs(distance) < ring.window)
    return False


def _stretches(row: Sequence[int | None]) -> list[tuple[int, int, int]]:
    """Return (begin, end, hop) for runs of cells with the same hop. Cells that are not computed are left out."""
    found: list[tuple[int, int, int]] = []
    for i, hop in enumerate(row):
        if hop is None:
            continue
        if found and found[-1][1] == i and found[-1][2] == hop:
            found[-1] = found[-1][0], i + 1, hop
        else:
            found.append((i, i + 1, hop))
    return found


def _rect(x: float, y: float, width: float, height: float, colour: int, *, line: bool = True) -> str:
    stroke = ' stroke="white"' if line else ""
    fill = _COLOURS[colour % len(_COLOURS)]
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{fill}" fill-opacity="0.75"{stroke}/>'


def _hops(plan: SequencePlan, rank: int) -> list[str]:
    """The work of ``rank`` on the keys of each hop: ``skip``, or its blocks (``2 whole, 1 masked``)."""
    row, n = rank // plan.cut.n_inner, plan.cut.n_parts
    said = []
    for hop in range(n):
        kinds = [block.kind for block in plan.ring.blocks(row, (row - hop) % n)]
        n_whole = kinds.count(WHOLE)
        counts = [f"{n_of} {name}" for n_of, name in ((n_whole, "whole"), (len(kinds) - n_whole, "masked")) if n_of]
        said.append(", ".join(counts) or "skip")
    return said


def _table(plan: SequencePlan) -> list[str]:
    cut = plan.cut
    work = [plan.work(rank) for rank in range(cut.n_ranks)]
    mean = sum(work) / cut.n_ranks
    has_heads, has_hops = cut.n_inner > 1, cut.n_parts > 1
    header = [
        "rank",
        "tokens",
        *(["heads", "key heads"] if has_heads else []),
        *([f"hop {hop}" if hop else "own keys" for hop in range(cut.n_parts)] if has_hops else []),
        "work / mean",
        "sent forward",
        "backward",
    ]
    rows = [header]
    for rank in range(cut.n_ranks):
        heads = plan.heads(rank)
        forward, backward = plan.sent_bytes(rank)
        rows.append(
            [
                str(rank),
                str(cut.tokens[rank]),
                *(
                    [_range(heads.query_begin, heads.query_end), _range(heads.key_begin, heads.key_end)]
                    if has_heads
                    else []
                ),
                *(_hops(plan, rank) if has_hops else []),
                f"{work[rank] / mean:.3f}" if mean else "-",
                as_binary(forward),
                as_binary(backward),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [*lines, "", "Bytes are those of one sequence and one layer in bfloat16; gradients travel in float32."]


def _range(begin: int, end: int) -> str:
    return str(begin) if end - begin == 1 else f"{begin}-{end - 1}"
