"""Counts sentences that hang on a relative clause without a noun ("what calls copy", "those of which", "one that ...").

python -m scripts.prose [PATH...]     lists them, then the shares by top folder; default: the whole tree

A reader has to read such a sentence twice. A clear sentence names the thing first and then says something about it. The
script reads docstrings and comments of Python, comments of C, C++ and CUDA, and paragraphs of Markdown, and skips code
in them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["FOLDERS", "Shares", "main", "sentences_of", "shares_of"]

ROOT = Path(__file__).resolve().parents[1]
# Folders and files with our own text, relative to the root.
FOLDERS = (
    *("deepspeed_c", "ops", "csrc", "tests", "benchmarks", "examples", "scripts", "docs", "setup.py"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
)
_NOT_OURS = {"build", "__pycache__", "node_modules"}

_PREPOSITIONS = (
    *("of", "in", "on", "over", "from", "by", "to", "for", "with", "after", "before", "at", "behind", "between"),
    *("under", "through", "along", "among", "above", "beside", "without", "against"),
)
_BEGINS = re.compile(
    r"(?:what|whatever|whoever|whom?|whose|which|those|that (?:of|which)|ones? (?:that|of|who|which|whose)"
    r"|of (?:which|what|whom|one|those|these|a|an|the|all|each)|with (?:which|what|whom)|as (?:what|those))\b",
    re.IGNORECASE,
)
_HAS = re.compile(
    r"\b(?:what(?:ever)? (?!(?:to|if|happens|is wrong|kind)\b)"
    r"|those (?:that|of|which|who|whose|in|on|at|with|it)\b|that of\b"
    r"|(?<!at least )(?<!than )(?:the )?ones? (?:that|of|who|which|whose)\b|whoever\b"
    rf"|(?:{'|'.join(_PREPOSITIONS)}) (?:which|whom|what|whose)\b)",
    re.IGNORECASE,
)
# Lines that are no prose: transcripts, tables, horizontal rules, directives to tools.
_SKIPPED = re.compile(r"\s*(?:>>>|\.\.\.|\||[-=~*#]{3,}|SPDX|Copyright|type: ignore|noqa|fmt:|ruff:|clang-format)")
_MIN_WORDS = 4


class Shares(NamedTuple):
    """Numbers of sentences: all sentences, sentences with such a clause, and sentences that begin with such a clause."""

    n: int = 0
    n_with: int = 0
    n_beginning: int = 0

    def plus(self, other: Shares) -> Shares:
        return Shares(*(a + b for a, b in zip(self, other, strict=True)))


class Sentence(NamedTuple):
    """A sentence, and the line of its file at which its text begins."""

    line: int
    text: str

    @property
    def begins_with_clause(self) -> bool:
        return _BEGINS.match(self.text) is not None

    @property
    def has_clause(self) -> bool:
        return self.begins_with_clause or _HAS.search(self.text) is not None


def _python_texts(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else []:
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, value.value
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#! ")
        if block and line != block[-1][0] + 1:
            yield block[0][0], "\n".join(text for _, text in block)
            block = []
        block.append((line, text))
    if block:
        yield block[0][0], "\n".join(text for _, text in block)


def _c_texts(source: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"/\*(.*?)\*/|((?:[ \t]*//[^\n]*\n)+)|//([^\n]*)", source, re.DOTALL):
        text = next(group for group in (*match.groups(), "") if group is not None)
        yield source.count("\n", 0, match.start()) + 1, re.sub(r"(?m)^\s*(?:\*|//+[<!]?)\s?", "", text)


def _markdown_texts(source: str) -> Iterator[tuple[int, str]]:
    text = re.sub(r"```.*?```", "", source, flags=re.DOTALL)
    for match in re.finditer(r"(?:^(?!\s*[|#<]).*\S.*\n?)+", text, re.MULTILINE):
        yield text.count("\n", 0, match.start()) + 1, match.group()


_READERS: dict[str, Callable[[str], Iterable[tuple[int, str]]]] = {
    ".py": _python_texts,
    ".md": _markdown_texts,
    **dict.fromkeys((".c", ".h", ".cpp", ".cu", ".cuh"), _c_texts),
}


def sentences_of(path: Path) -> Iterator[Sentence]:
    """The sentences of a file; none where its kind is unknown."""
    read = _READERS.get(path.suffix)
    if read is None:
        return
    for line, text in read(path.read_text(encoding="utf-8")):
        prose = "\n".join(part for part in text.splitlines() if not _SKIPPED.match(part))
        for paragraph in re.split(r"\n\s*\n|\n\s*[-*] ", prose):
            joined = re.sub(r"``[^`]*``|`[^`]*`", "X", " ".join(paragraph.split()))
            for part in re.split(r"(?<=[.!?;])\s+(?=[A-Z`(\"'])", joined):
                if len(part.split()) >= _MIN_WORDS:
                    yield Sentence(line, part)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for child in sorted(path.rglob("*")) if path.is_dir() else []:
        if child.is_file() and not _NOT_OURS.intersection(child.relative_to(path).parts):
            yield child


def shares_of(path: Path, found: Callable[[Path, Sentence], None] = lambda file, sentence: None) -> Shares:
    """The counts of a file or folder. ``found`` is called with each sentence that has such a clause."""
    total = Shares()
    for file in _files(path):
        for sentence in sentences_of(file):
            total = total.plus(Shares(1, sentence.has_clause, sentence.begins_with_clause))
            if sentence.has_clause:
                found(file, sentence)
    return total


def main(argv: list[str]) -> int:
    """Prints sentences and shares. Returns 0."""
    rows = {}
    for path in [Path(word) for word in argv] or [ROOT / folder for folder in FOLDERS]:
        rows[path] = shares_of(path, lambda file, sentence: print(f"{file}:{sentence.line}: {sentence.text}"))
    for path, shares in rows.items():
        if shares.n:
            with_, beginning = 100 * shares.n_with / shares.n, 100 * shares.n_beginning / shares.n
            print(
                f"{path.name:16} {shares.n:6} sentences  {with_:5.1f} % with a clause  {beginning:5.1f} % begin with one"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
