"""Text in pieces: joined pieces are the text of all tokens, and a stop string is found across them."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest

from deepspeed_c.serving.text import StopStrings, TextStream, decode_shown
from tests.deepspeed_c.serving.folders import byte_tokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "",
    "a",
    "def f(x):\n    return x",
    "größer 日本語 🙂👩‍👩‍👧 fin",
    "🙂" * 7,
    "\ud7ff é \u0301x",
    "  two  spaces ",
]


def metaspace() -> Any:
    """Words with the mark of a space, and bytes for what has no word, as in Llama 2."""
    words = ["▁the", "▁cat", "s", "▁", "at", "x", "▁x"]
    vocab = {word: i for i, word in enumerate(["<unk>", *words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    decoders = tokenizers.decoders
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return found


def pieces_of(decode: Any, tokens: list[int], n_at_once: int = 1) -> list[str]:
    stream = TextStream(decode)
    pieces = [stream.add(tokens[i : i + n_at_once]) for i in range(0, len(tokens), n_at_once)]
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("n_at_once", [1, 2, 5])
def test_the_pieces_are_the_text(text: str, n_at_once: int) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text)
    pieces = pieces_of(tokenizer.decode, tokens, n_at_once)
    assert "".join(pieces) == tokenizer.decode(tokens) == text, pieces
    assert not any("\ufffd" in piece for piece in pieces), pieces


def test_a_character_comes_whole() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("本🙂")
    assert len(tokens) > 4, tokens
    assert [piece for piece in pieces_of(tokenizer.decode, tokens) if piece] == ["本", "🙂"]


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_are_the_text_of_all_tokens(seed: int) -> None:
    """Bytes in random order are mostly no characters."""
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    tokens = [rng.randrange(1, len(tokenizer)) for _ in range(rng.randrange(1, 60))]
    assert "".join(pieces_of(tokenizer.decode, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("words", ["▁the ▁cat s", "▁cat <0xE6> <0x9C> <0xAC> s", "▁ ▁the", "<0xC3> <0xA9> ▁x", "s"])
def test_spaces_are_those_of_the_whole_text(words: str) -> None:
    """The decoder takes a space away at the begin of a text, and at no other place."""
    tokenizer = metaspace()
    tokens = [tokenizer.token_to_id(word) for word in words.split()]
    assert "".join(pieces_of(tokenizer.decode, tokens)) == tokenizer.decode(tokens)


def test_a_text_that_continues_another_one_keeps_its_space() -> None:
    tokenizer = metaspace()
    the, cat = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("▁cat")
    stream = TextStream(tokenizer.decode, [the])
    assert (stream.add([cat]), TextStream(tokenizer.decode).add([cat])) == (" cat", "cat")


@pytest.mark.parametrize("seed", range(30))
def test_a_special_token_that_is_shown_is_a_part_of_the_text(seed: int) -> None:
    """At any place, also within a character, and wherever the tokens are cut."""
    tokenizer, rng = byte_tokenizer("[TAG]", "[OTHER]"), random.Random(seed)
    tag, other = tokenizer.convert_tokens_to_ids(["[TAG]", "[OTHER]"])
    tokens = [rng.choice((tag, other, *tokenizer.encode("ö 🙂x"))) for _ in range(rng.randrange(25))]

    def hide(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    runs = [[*run] for is_tag, run in itertools.groupby(tokens, lambda token: token == tag)]
    expected = "".join("[TAG]" * len(run) if run[0] == tag else hide(run) for run in runs)
    decode = functools.partial(decode_shown, hide, {tag: "[TAG]"})
    for n_at_once in (1, 3):
        assert "".join(pieces_of(decode, tokens, n_at_once)) == decode(tokens) == expected
    assert "[OTHER]" not in expected and expected.count("[TAG]") == tokens.count(tag)
    assert decode_shown(hide, {}, tokens) == hide(tokens)


def up_to_stop(pieces: list[str], strings: list[str]) -> tuple[str, bool]:
    stop = StopStrings(strings)
    text = ""
    for piece in pieces:
        text += stop.add(piece)
        if stop.is_found:
            break
    return text + stop.finish(), stop.is_found


@pytest.mark.parametrize("seed", range(200))
def test_a_stop_string_is_found_in_any_pieces(seed: int) -> None:
    """Compared with a search in the whole text. Few letters, so that strings overlap themselves and each other."""
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(rng.randrange(0, 30)))
    strings = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(0, 4))]
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(0, 10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, is_found = up_to_stop(pieces, strings)
    ends = [place + len(each) for each in strings if (place := text.find(each)) >= 0]
    assert is_found == bool(ends)
    if not ends:
        assert found == text
        return
    # The string that is complete first counts, and of several in one piece the one that begins first.
    at = min(ends)
    piece_end = next(end for end in [*cuts, len(text)] if end >= at)
    seen = text[:piece_end]
    places = [seen.find(each) for each in strings if each in seen]
    assert found == seen[: min(places)], (pieces, strings)


def test_only_the_begin_of_a_stop_string_is_held_back() -> None:
    stop = StopStrings(["END."])
    assert [stop.add(piece) for piece in ("a E", "N", "X", "EN", "D")] == ["a ", "", "ENX", "", ""]
    assert stop.finish() == "END"
