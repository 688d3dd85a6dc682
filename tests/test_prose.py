"""Comments and docstrings end at column 120, no file has banners, and sentences name their subject first."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from scripts.prose import FOLDERS as TEXTS
from scripts.prose import Shares, sentences_of, shares_of

ROOT = Path(__file__).parents[1]
LIMIT = 120

FOLDERS = ("deepspeed_c", "ops", "csrc")
# Largest shares of sentences that hang on a relative clause without a noun, and that begin with one. In torch's FSDP
# they are 2.4 % and 0, in asyncio 1.4 % and 0.
MAX_WITH, MAX_BEGINNING = 0.05, 0.005
# A text of a few sentences may have this many.
MAX_ANYWHERE = 2
C_SUFFIXES = (".c", ".h", ".inc", ".cpp", ".cu", ".cuh")

# A line of drawing characters, or a title between dashes.
BANNER = re.compile(r"# ?([-=#*~]{2,}|[-=#*~] .* [-=#*~]$)")


def files(suffixes: tuple[str, ...]) -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]
    return [path for path in found if "build" not in path.relative_to(ROOT).parts]


def prose_lines(source: str) -> set[int]:
    """Numbers of the lines of a Python file that have a comment or are in a docstring."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return lines | {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


def too_long(source: str) -> list[int]:
    """The numbers of too long lines of prose. The formatter lets the quotes that end a docstring stand out."""
    lines = source.splitlines()
    return [number for number in sorted(prose_lines(source)) if len(lines[number - 1].removesuffix('"""')) > LIMIT]


def banners(source: str) -> list[tuple[int, str]]:
    """(line, text) of each banner."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        (token.start[0], token.string)
        for token in tokens
        if token.type == tokenize.COMMENT and BANNER.match(token.string)
    ]


def too_long_in_c(source: str) -> list[int]:
    """The numbers of too long lines that begin or continue a comment."""
    lines = enumerate(source.splitlines(), 1)
    return [number for number, line in lines if len(line) > LIMIT and re.match(r"\s*(//|/?\*)", line)]


def wrong_in_python(source: str) -> list[tuple[int, str]]:
    """(line, complaint) of each line of a Python file that breaks a rule."""
    found = [(line, f"longer than {LIMIT}") for line in too_long(source)]
    return found + [
        (line, f"{text!r}: a file that needs a table of contents is two files") for line, text in banners(source)
    ]


def test_prose_in_python() -> None:
    paths = files((".py",))
    assert len(paths) > 400
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}" for path in paths for line, text in wrong_in_python(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_comments_in_c() -> None:
    found = {str(path.relative_to(ROOT)): too_long_in_c(path.read_text()) for path in files(C_SUFFIXES)}
    assert len(found) > 50
    assert not {path: lines for path, lines in found.items() if lines}


def test_what_is_too_long_is_found() -> None:
    long = "x" * LIMIT
    source = f'"""{long}"""\nx = "{long}"\ny = 1  # {long}\n# {long[:-2]}\n# ---- title\n# -- x --\n'
    assert too_long(source) == [1, 3]
    assert banners(source) == [(5, "# ---- title"), (6, "# -- x --")]
    assert [line for line, _ in wrong_in_python(source)] == [1, 3, 5, 6]
    assert too_long_in_c(f'/* {long} */\nchar *x = "{long}";\n * {long}\n   // {long}') == [1, 3, 4]


@pytest.mark.parametrize("name", TEXTS)
def test_sentences_name_their_subject_first(name: str) -> None:
    listed: list[str] = []
    shares = shares_of(ROOT / name, lambda file, sentence: listed.append(f"{file}:{sentence.line}: {sentence.text}"))
    assert shares.n > 0, f"no text in {name}"
    told = f"{shares}; name the thing first, then say something about it:\n" + "\n".join(listed[-20:])
    assert shares.n_with <= max(MAX_WITH * shares.n, MAX_ANYWHERE), told
    assert shares.n_beginning <= MAX_BEGINNING * shares.n, told


@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        (".py", '"""What calls copy and what is hashed."""', (1, 1, 1)),
        (
            ".py",
            '"""The bytes that a call copies."""\n# Those of which nobody knows.\nx = "what is not counted here"',
            (2, 1, 1),
        ),
        (".py", "x = 1  # the list of those that wait\ny = 2\n# It closes the file of its owner.", (2, 1, 0)),
        (".py", '"""Returns ``what that is`` at once, what a pity. Too short, this."""', (1, 1, 0)),
        (
            ".py",
            '"""The rank that waits for the data.\n\n    >>> those that are code are not counted\n    """',
            (1, 0, 0),
        ),
        (".c", "/* Of what a caller gives nothing is kept. */\nint x; // The loop ends with its list.", (2, 1, 1)),
        (
            ".md",
            "Text, of which a part is bad.\n\n| what is in a table | is not counted |\n\n```\nwhat is code is not\n```",
            (1, 1, 0),
        ),
        (".txt", "What is in a file of another kind is nobody's.", (0, 0, 0)),
    ],
)
def test_the_count_finds_what_it_should(tmp_path, suffix, text, expected) -> None:
    path = tmp_path / f"page{suffix}"
    path.write_text(text)
    assert shares_of(path) == Shares(*expected), [*sentences_of(path)]
