"""The command ``deepspeed_c sequence``: shows the distribution of a sequence over ranks, without starting any rank."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from deepspeed_c.command_line import command_parser
from deepspeed_c.errors import ConfigError
from deepspeed_c.quantity import parse_count
from deepspeed_c.sequence.picture import SequencePlan, as_json, as_svg, as_text
from deepspeed_c.sequence.plans import SequenceCut

__all__ = ["main"]

_DESCRIPTION = """\
Which rank has which tokens of a sequence and computes which part of its attention, and what it sends. Needs no rank.

  deepspeed_c sequence show --tokens 131072 --ranks 8                                    a ring, zigzag
  deepspeed_c sequence show --tokens 131072 --ranks 8 --attention ulysses --heads 32:8   32 heads, 8 key heads
  deepspeed_c sequence show --tokens 1M --ranks 16 --attention hybrid --inner 8          heads in rows of 8, a ring of 2
  deepspeed_c sequence show --tokens 4096 --ranks 4 --documents 1000,96,3000 --svg plan.svg
"""


def main(argv: Sequence[str]) -> int:
    """Run ``deepspeed_c sequence`` with the arguments ``argv``. Returns 0 when a plan was printed.

    Raises ConfigError, with the numbers, where no plan fits.
    """
    options = _parser().parse_args(argv)
    plan = _plan_of(options)
    print(json.dumps(as_json(plan)) if options.json else as_text(plan))
    if options.svg is not None:
        try:
            Path(options.svg).write_text(as_svg(plan), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the picture cannot be written: {error}", where="--svg", fix="name a file in a folder that is there"
            ) from error
    return 0


def _plan_of(options: argparse.Namespace) -> SequencePlan:
    n_tokens, n_ranks, attention = parse_count(options.tokens, "--tokens"), options.ranks, options.attention
    if n_ranks < 1:
        raise ConfigError(f"{n_ranks} is no number of ranks", where="--ranks", fix="write an integer >= 1")
    n_heads, n_key_heads = _heads(options.heads)
    if options.head_dim < 1:
        raise ConfigError(f"heads of {options.head_dim} elements", where="--head-dim", fix="write an integer >= 1")
    cut = SequenceCut(
        n_tokens,
        n_ranks,
        options.order or ("contiguous" if attention == "ulysses" else "zigzag"),
        _inner(attention, options.inner, n_ranks, n_heads),
        _ends(options.documents, n_tokens),
    )
    return SequencePlan(attention, cut, n_heads, n_key_heads, options.head_dim, not options.not_causal, options.window)


def _heads(text: str) -> tuple[int, int]:
    """(number of query heads, number of key heads) from ``32`` or ``32:8``."""
    query, _, key = text.partition(":")
    n_heads = parse_count(query, "--heads")
    n_key_heads = parse_count(key, "--heads") if key else n_heads
    if n_heads < 1 or n_key_heads < 1 or n_heads % n_key_heads:
        raise ConfigError(
            f"{n_heads} query heads do not divide among {n_key_heads} key heads",
            where="--heads",
            fix="write as many key heads as divide the query heads, say 32:8",
        )
    return n_heads, n_key_heads


def _inner(attention: str, inner: int | None, n_ranks: int, n_heads: int) -> int:
    """Number of ranks of a row. Ranks of a row exchange heads."""
    if attention == "ring":
        if inner not in (None, 1):
            raise ConfigError(
                f"a ring has rows of one rank, not of {inner}", where="--inner", fix="leave it out, or use hybrid"
            )
        return 1
    if attention == "ulysses":
        if inner not in (None, n_ranks):
            raise ConfigError(
                f"all {n_ranks} ranks exchange heads, not rows of {inner}",
                where="--inner",
                fix="leave it out, or use hybrid",
            )
        return n_ranks
    if inner is None:
        return max(n for n in range(1, n_ranks + 1) if n_ranks % n == 0 and n <= n_heads)
    if inner < 1 or n_ranks % inner:
        raise ConfigError(f"rows of {inner} ranks do not divide {n_ranks}", where="--inner", fix="write a divisor")
    return inner


def _ends(documents: str | None, n_tokens: int) -> tuple[int, ...]:
    if documents is None:
        return ()
    lengths = [parse_count(length, "--documents") for length in documents.split(",")]
    ends = tuple(itertools.accumulate(lengths))
    if min(lengths) < 1 or ends[-1] != n_tokens:
        raise ConfigError(
            f"documents of {documents} tokens are {ends[-1]} in all, the sequence has {n_tokens}",
            where="--documents",
            fix="write the length of each document, at least 1, so that they add up to --tokens",
        )
    return ends


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("sequence", _DESCRIPTION)
    parser.add_argument("action", choices=["show"], help="print the plan")
    parser.add_argument("--tokens", required=True, metavar="N", help="of the sequence: 131072, 128K, 1M")
    parser.add_argument("--ranks", type=int, required=True, metavar="R", help="ranks that share the sequence")
    parser.add_argument("--attention", choices=["ring", "ulysses", "hybrid"], default="ring", help="default: ring")
    parser.add_argument(
        "--order", choices=["zigzag", "contiguous", "documents"], help="default: zigzag, for ulysses contiguous"
    )
    parser.add_argument("--heads", default="32:8", metavar="H[:K]", help="query heads and key heads (default: 32:8)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="elements of a head (default: 128)")
    parser.add_argument(
        "--inner", type=int, metavar="U", help="hybrid: ranks that exchange heads; default: as many as heads allow"
    )
    parser.add_argument("--documents", metavar="A,B,...", help="lengths of packed documents")
    parser.add_argument(
        "--window", type=int, default=0, metavar="W", help="sliding window: keys fewer than W tokens away"
    )
    parser.add_argument("--not-causal", action="store_true", help="queries see keys after them")
    parser.add_argument("--svg", metavar="FILE", help="write the picture there too")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    return parser
