"""The numbers of ``deepspeed_c bench inference``: their definitions, a table, notes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from deepspeed_c.bench.inference import RequestOutcome
from deepspeed_c.bench.load import Load

__all__ = ["LATE_S", "LoadSummary", "TimeSpread", "as_table", "percentile", "spread_of", "summary_of"]

LATE_S = 0.01
"""A request that begins so long after its time is a late one. The clock of an event loop is right to 1 ms."""


class TimeSpread(msgspec.Struct, frozen=True):
    """A distribution of times in seconds."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a load. Times count whole answers alone; None without such an answer."""

    n_requests: int
    n_answered: int
    errors: dict[str, int]
    """Number of failures of each kind."""
    examples: dict[str, str]
    """The first message of each kind."""
    first_token_s: TimeSpread | None
    """From the begin of a request, before its connection, to the first piece with a token."""
    between_tokens_s: TimeSpread | None
    """All gaps between a piece with a token and the next one, of all answers together."""
    per_token_s: TimeSpread | None
    """Time from the first to the last token of an answer, over the number of tokens after the first one; one value
    for each answer with two tokens or more."""
    whole_s: TimeSpread | None
    """From the begin of a request to the end of its stream."""
    late_s: TimeSpread | None
    """From the time of the schedule to the begin of a request, of all requests."""
    n_late: int
    """Requests that began more than ``LATE_S`` after their time."""
    seconds: float
    """From the begin of the first request to the end of the last one."""
    busy_s: float
    """The length of all times with an open request, within ``seconds``."""
    n_prompt_tokens: int
    """Of whole answers: the server's number, or else the plan's."""
    n_new_tokens: int
    tokens_per_s: float
    """New tokens of whole answers over ``seconds``."""
    requests_per_s: float
    """Whole answers over ``seconds``."""
    busy_tokens_per_s: float
    """New tokens of whole answers over ``busy_s``: a server that waits for the next request loses nothing."""
    busy_requests_per_s: float
    n_without_usage: int
    """Whole answers whose tokens were counted by pieces, for the server gave no number."""
    n_other_prompt: int
    """Whole answers to ids where the server says another number of prompt tokens than were sent."""
    n_other_pieces: int
    """Whole answers with another number of pieces than the server says tokens."""
    n_short: int
    """Whole answers with fewer tokens than were asked for."""
    processor_share: float
    """Processor time of the client over the time of the load."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest rank: the least of the values that has at least ``percent`` % of all at or below it.

    ordered: at least one value, ascending. It is always a value that was measured.
    """
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def spread_of(values: Iterable[float]) -> TimeSpread | None:
    """None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return TimeSpread(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def summary_of(outcomes: Sequence[RequestOutcome], processor_share: float, *, is_text: bool) -> LoadSummary:
    """outcomes: of all requests, at least one. is_text: prompts were words, whose tokens the server alone knows."""
    answered = [each for each in outcomes if not each.error]
    failed = [each for each in outcomes if each.error]
    seconds = max(each.end_s for each in outcomes) - min(each.sent_s for each in outcomes)
    busy_s = _covered((each.sent_s, each.end_s) for each in outcomes)
    n_new = sum(each.n_new for each in answered)
    with_usage = [each for each in answered if each.usage_new is not None]
    return LoadSummary(
        n_requests=len(outcomes),
        n_answered=len(answered),
        errors=dict(Counter(each.error for each in failed)),
        examples={each.error: each.message for each in reversed(failed)},
        first_token_s=spread_of(each.piece_s[0] - each.sent_s for each in answered),
        between_tokens_s=spread_of(
            after - before for each in answered for before, after in zip(each.piece_s, each.piece_s[1:])
        ),
        per_token_s=spread_of(
            (each.piece_s[-1] - each.piece_s[0]) / (each.n_new - 1) for each in answered if each.n_new > 1
        ),
        whole_s=spread_of(each.end_s - each.sent_s for each in answered),
        late_s=spread_of(each.late_s for each in outcomes),
        n_late=sum(each.late_s > LATE_S for each in outcomes),
        seconds=seconds,
        busy_s=busy_s,
        n_prompt_tokens=sum(each.n_prompt if each.usage_prompt is None else each.usage_prompt for each in answered),
        n_new_tokens=n_new,
        tokens_per_s=_ratio(n_new, seconds),
        requests_per_s=_ratio(len(answered), seconds),
        busy_tokens_per_s=_ratio(n_new, busy_s),
        busy_requests_per_s=_ratio(len(answered), busy_s),
        n_without_usage=len(answered) - len(with_usage),
        n_other_prompt=sum(not is_text and each.usage_prompt not in (None, each.n_prompt) for each in answered),
        n_other_pieces=sum(each.usage_new != len(each.piece_s) for each in with_usage),
        n_short=sum(each.n_new < each.n_wanted for each in answered),
        processor_share=processor_share,
    )


def _ratio(number: float, seconds: float) -> float:
    return number / seconds if seconds > 0 else 0.0


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


def as_table(load: Load, found: LoadSummary, *, concurrency: int | None) -> str:
    """The summary for people."""
    unit = "words" if load.is_text else "tokens"
    cells = [["", "p50", "p90", "p99", "mean", "max"]]
    for name, spread in (
        ("time to first token, ms", found.first_token_s),
        ("between tokens, each gap, ms", found.between_tokens_s),
        ("per token after the first, each request, ms", found.per_token_s),
        ("whole request, ms", found.whole_s),
        ("sent behind schedule, ms", found.late_s),
    ):
        values = [spread.p50, spread.p90, spread.p99, spread.mean, spread.max] if spread else []
        cells.append([name, *(f"{value * 1e3:.2f}" for value in values)])
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(len(cells[0]))]
    rows = [
        "  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]).rstrip()
        for row in cells
    ]
    head = (
        f"{load.n_requests} requests, {load.rate:g} a second (Poisson, seed {load.seed}), prompts of"
        f" {load.prompt_tokens} {unit}, answers of {load.new_tokens} tokens"
    )
    errors = ", ".join(f"{kind}: {n}" for kind, n in sorted(found.errors.items()))
    return "\n".join(
        [
            head,
            "",
            *rows,
            "",
            f"  answered {found.n_answered} of {found.n_requests}" + (f"; failed: {errors}" if errors else ""),
            f"  {found.tokens_per_s:.2f} tokens/s and {found.requests_per_s:.3f} requests/s over {found.seconds:.2f} s",
            f"  {found.busy_tokens_per_s:.2f} and {found.busy_requests_per_s:.3f} over the {found.busy_s:.2f} s with a request open",
            *(f"note: {note}" for note in notes_of(found, concurrency=concurrency)),
        ]
    )


def notes_of(found: LoadSummary, *, concurrency: int | None) -> list[str]:
    """Doubts about the numbers, as sentences."""
    notes = [f"{kind}, for example: {message}" for kind, message in sorted(found.examples.items())]
    if found.n_late and found.late_s is not None:
        reason = (
            "the client fell behind its schedule, and the load was less than asked for"
            if concurrency is None
            else f"the client fell behind its schedule, or waited for one of {concurrency} places; that time is in no"
            " latency"
        )
        notes.append(
            f"{found.n_late} of {found.n_requests} requests were sent more than {LATE_S * 1e3:g} ms late, at most"
            f" {found.late_s.max * 1e3:.1f} ms: {reason}"
        )
    if found.n_without_usage:
        notes.append(f"{found.n_without_usage} answers came without usage; a piece of a stream counts as a token there")
    if found.n_other_pieces:
        notes.append(
            f"{found.n_other_pieces} answers had another number of pieces than tokens by the server's usage; the"
            " gaps are those of pieces, and tokens are the server's"
        )
    if found.n_other_prompt:
        notes.append(f"the server counts other tokens in {found.n_other_prompt} prompts than were sent")
    if found.n_short:
        notes.append(f"{found.n_short} answers have fewer tokens than were asked for")
    return notes
