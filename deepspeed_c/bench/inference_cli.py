"""The action ``inference`` of ``deepspeed_c bench``."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from deepspeed_c.bench.http_stream import Address, parse_url
from deepspeed_c.bench.inference import Asked, ModelCard, ServerTarget, ask_all, check_target, read_card
from deepspeed_c.bench.load import Load, parse_lengths
from deepspeed_c.bench.server import served
from deepspeed_c.bench.summary import LATE_S, LoadSummary, as_table, notes_of, summary_of
from deepspeed_c.command_line import Actions
from deepspeed_c.errors import ConfigError

__all__ = ["add"]

_WHERE = "deepspeed_c bench inference"
# For servers that do not say how many words they have: the vocabularies of published models are larger.
_FEWEST_WORDS = 1000


def add(actions: Actions) -> None:
    """Adds the action to the command."""
    text = "how fast a server answers: requests at random times, whether or not earlier ones have been answered"
    parser = actions.add("inference", _run, text)
    parser.add_argument("model_dir", nargs="?", metavar="MODEL_DIR", help="start `deepspeed_c serve` for this folder")
    parser.add_argument("--url", help="ask this server; http://HOST:PORT, with or without /v1")
    parser.add_argument("--api-key", metavar="KEY", help="the key of the server; other users of the host can see it")
    parser.add_argument("--api-key-file", metavar="FILE", help="the key is the first line of a file")
    parser.add_argument("--model", default="", metavar="NAME", help="default: the first one of /v1/models")
    parser.add_argument("--rate", type=float, default=2.0, metavar="R", help="requests a second; inf: all at once")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="default %(default)s")
    lengths = "tokens of prompts, uniform in a range or all the same; default %(default)s"
    parser.add_argument("--prompt-tokens", default="32:512", metavar="LEAST:MOST", help=lengths)
    parser.add_argument(
        "--new-tokens", default="16:128", metavar="LEAST:MOST", help="tokens of answers; default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of times, lengths and words")
    parser.add_argument("--concurrency", type=int, metavar="N", help="most requests at one time; others are late")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="most seconds of a request; default %(default)s"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"ids of prompts are below it; default: as /v1/models says, or {_FEWEST_WORDS}",
    )
    parser.add_argument("--text", action="store_true", help="prompts are words, for servers that take no ids")
    parser.add_argument("--allow-eos", action="store_true", help="do not send ignore_eos; answers may be shorter")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default %(default)s")
    parser.add_argument("--serve-options", default="", metavar="WORDS", help="with MODEL_DIR: options of the server")
    parser.add_argument("--json", metavar="FILE", help="write all numbers, and a row for each request")


def _run(options: argparse.Namespace) -> int:
    _check(options)
    load = Load(
        rate=options.rate,
        n_requests=options.requests,
        prompt_tokens=parse_lengths(options.prompt_tokens, "--prompt-tokens"),
        new_tokens=parse_lengths(options.new_tokens, "--new-tokens"),
        seed=options.seed,
        n_words=options.vocab_size or _FEWEST_WORDS,
        is_text=options.text,
    )
    key = _key(options)
    if options.model_dir:
        server: Any = served(options.model_dir, shlex.split(options.serve_options))
    else:
        server = nullcontext(parse_url(options.url, "--url"))
    with server as address:
        measured = asyncio.run(_measure(options, load, address, key))
    found = summary_of(measured.asked.outcomes, measured.asked.processor_share, is_text=load.is_text)
    print(f"{measured.target.address}/v1, model {measured.target.model}")
    print(as_table(load, found, concurrency=options.concurrency))
    if options.json:
        _write(Path(options.json), options, measured, found)
    return 0 if found.n_answered == found.n_requests else 1


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if bool(options.model_dir) == bool(options.url):
        raise ConfigError(
            "there are a folder and a URL" if options.url else "there is no server to ask",
            where=_WHERE,
            fix="write MODEL_DIR, for which a server is started, or --url URL of one that runs",
        )
    for name, is_right, fix in (
        ("rate", options.rate > 0, "write a number above 0; inf sends all requests at once"),
        ("requests", options.requests >= 1, "write 1 or more"),
        ("seed", options.seed >= 0, "write 0 or more"),
        ("concurrency", options.concurrency is None or options.concurrency >= 1, "write 1 or more, or leave it out"),
        ("timeout", 0 < options.timeout < math.inf, "write seconds above 0"),
        ("vocab_size", options.vocab_size is None or options.vocab_size >= 1, "write 1 or more"),
        ("temperature", 0 <= options.temperature < math.inf, "write 0 or more"),
        ("serve_options", options.model_dir or not options.serve_options, "leave it out with --url"),
        ("json", options.json is None or Path(options.json).parent.is_dir(), "name a file in a folder that is there"),
    ):
        if not is_right:
            value = getattr(options, name)
            raise ConfigError(f"{value!r} cannot be used", where=f"--{name.replace('_', '-')}", fix=fix)


def _key(options: argparse.Namespace) -> str:
    """The key; "" if there is none. Raises ConfigError."""
    if options.api_key and options.api_key_file:
        raise ConfigError("there are two keys", where=_WHERE, fix="leave --api-key or --api-key-file out")
    if options.model_dir and (options.api_key or options.api_key_file):
        raise ConfigError(
            "a server that is started for a folder has no keys",
            where=_WHERE,
            fix="leave the key out, or start the server by hand and use --url",
        )
    key = options.api_key or ""
    if options.api_key_file:
        try:
            key = next(iter(Path(options.api_key_file).read_text(encoding="utf-8").split()), "")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"no key can be read: {error}", where="--api-key-file", fix="write a file of text"
            ) from error
    if not key.isascii() or not key.isprintable():
        # Such a character would end the header that has the key.
        raise ConfigError("the key has characters that no header has", where="--api-key", fix="write ASCII letters")
    return key


class _MeasuredLoad(NamedTuple):
    load: Load
    target: ServerTarget
    card: ModelCard
    asked: Asked


async def _measure(options: argparse.Namespace, load: Load, address: Address, key: str) -> _MeasuredLoad:
    card = await read_card(address, key, options.model, _WHERE)
    if options.vocab_size is None and card.vocab_size is not None:
        load = msgspec.structs.replace(load, n_words=card.vocab_size)
    target = ServerTarget(address, card.id, key, options.timeout, options.temperature, not options.allow_eos)
    await check_target(load, target, card, _WHERE)
    asked = await ask_all(load, target, concurrency=options.concurrency, report=_progress(load.n_requests))
    return _MeasuredLoad(load, target, card, asked)


def _progress(n_requests: int) -> Any:
    """Shows on a terminal how many requests have ended."""
    if not sys.stderr.isatty():
        return lambda _: None

    def show(n_ended: int) -> None:
        end = "\r" if n_ended < n_requests else "\n"
        print(f"  {n_ended} of {n_requests} requests have ended", end=end, file=sys.stderr, flush=True)

    return show


def _write(path: Path, options: argparse.Namespace, measured: _MeasuredLoad, found: LoadSummary) -> None:
    """Raises ConfigError where the file cannot be written. The key is not in it."""
    load, target = measured.load, measured.target
    result = {
        "url": f"{target.address}/v1",
        "model": target.model,
        "max_model_len": measured.card.max_model_len,
        "load": {
            **msgspec.to_builtins(load),
            "rate": load.rate if math.isfinite(load.rate) else "inf",
            "concurrency": options.concurrency,
            "timeout_s": target.timeout_s,
            "temperature": target.temperature,
            "ignore_eos": target.ignores_eos,
        },
        "definitions": {
            "percentile": "nearest rank: the least value with at least p % of all values at or below it",
            "first_token_s": "begin of the request, before its connection, to its first piece with a token",
            "between_tokens_s": "each gap between two pieces of an answer, of all answers together",
            "per_token_s": "of each answer: first to last piece, over the tokens after the first",
            "whole_s": "begin of the request to [DONE]",
            "late_s": f"schedule to begin of the request; n_late counts those above {LATE_S:g} s",
            "busy": "over the time in which at least one request was open",
        },
        "summary": msgspec.to_builtins(found),
        "notes": notes_of(found, concurrency=options.concurrency),
        "requests": [msgspec.to_builtins(each) for each in measured.asked.outcomes],
    }
    try:
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error}", where=f"--json {path}", fix="name a file that can be"
        ) from error
