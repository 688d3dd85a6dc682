"""Text of tokens that come one by one: no half characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

__all__ = ["StopStrings", "TextStream", "decode_shown"]

_HALF = "\N{REPLACEMENT CHARACTER}"  # how tokenizers write bytes that are no whole character
# Tokens of a context that the decoder of a tokenizer looks at: spaces depend on the neighbour.
_SEEN_TOKENS = 8


class TextStream:
    """The text of a sequence, piece by piece.

    A token is decoded behind those before it, because its text can depend on them: a space, bytes of one character. So
    the joined pieces are the text of all tokens.

    Args:
        decode: of a tokenizer: from a list of tokens to text.
        context: tokens before the first one, whose text is not written.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-_SEEN_TOKENS:])
        self._n_written = len(self._tokens)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` complete; "" for a character that is not whole yet."""
        self._tokens += tokens
        before, text = self._texts()
        if text.endswith(_HALF):
            return ""
        # The next text begins with tokens that are whole characters, so their text does not change any more.
        self._tokens = self._tokens[self._n_written :] or self._tokens
        self._n_written = len(self._tokens)
        return text[len(before) :]

    def finish(self) -> str:
        """The rest: bytes that no further token completes."""
        before, text = self._texts()
        self._n_written = len(self._tokens)
        return text[len(before) :]

    def _texts(self) -> tuple[str, str]:
        """(the text that is written, all text), of the last tokens."""
        if self._n_written == len(self._tokens):
            return "", ""
        before = self._tokens[: self._n_written]
        return self._decode(before) if before else "", self._decode(self._tokens)


def decode_shown(decode: Callable[[list[int]], str], shown: Mapping[int, str], tokens: Sequence[int]) -> str:
    """The text of tokens, where ``decode`` hides some of them that are to be seen. shown: their texts."""
    parts, begin = [], 0
    for i, token in enumerate(tokens):
        if token in shown:
            parts += [decode([*tokens[begin:i]]) if begin < i else "", shown[token]]
            begin = i + 1
    return "".join(parts) + (decode([*tokens[begin:]]) if begin < len(tokens) else "")


class StopStrings:
    """Text up to the first of some strings. It holds back text that may become the begin of one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [each for each in strings if each]
        self._held = ""
        self.is_found = False
        """Whether one has come. No text comes behind it."""

    def add(self, text: str) -> str:
        """The text that is free to be written."""
        if self.is_found or not self._strings:
            return "" if self.is_found else text
        text = self._held + text
        places = [place for each in self._strings if (place := text.find(each)) >= 0]
        if places:
            self.is_found, self._held = True, ""
            return text[: min(places)]
        n_held = max(_overlap(text, each) for each in self._strings)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def finish(self) -> str:
        """The text that was held back, where no string has come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """The characters at the end of a text that begin a string, without the whole string."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
