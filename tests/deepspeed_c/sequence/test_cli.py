"""``deepspeed_c sequence show``: it prints the plan that runs, draws pictures, and refuses wrong arguments."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from deepspeed_c.launcher.main import main
from deepspeed_c.sequence import SequenceCut, plan_ring
from tests.deepspeed_c.sequence.attention_oracle import visible


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The output of ``deepspeed_c sequence show``."""
    assert main(["sequence", "show", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--order", "contiguous"], [], ["--window", "7"], ["--not-causal"], ["--documents", "5,20,7"]]
)
def test_the_picture_is_who_sees_whom(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Each of 32 tokens is one character. A dot is hidden by the mask; a digit is the number of steps between the two
    ranks."""
    printed = show(capsys, "--tokens", "32", "--ranks", "4", *words)
    grid = [line.strip() for line in printed.splitlines() if re.fullmatch(r"  [0-3.]{32}", line)]
    owners, *rows = grid
    ends = [5, 25, 32] if "--documents" in words else []
    seen = visible(32, ends, "--not-causal" not in words, 7 if "--window" in words else 0)
    cut = SequenceCut(32, 4, "contiguous" if "--order" in words else "zigzag")
    assert owners == "".join(str(next(r for r in range(4) if i in cut.positions(r).tolist())) for i in range(32))
    for i, row in enumerate(rows):
        expected = [str((int(owners[i]) - int(owners[j])) % 4) if seen[i, j] else "." for j in range(32)]
        assert row == "".join(expected)


def test_the_table_has_work_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(show(capsys, "--tokens", "4096", "--ranks", "4", "--heads", "8:2", "--head-dim", "64", "--json"))
    plan = plan_ring(SequenceCut(4096, 4))
    for rank, entry in enumerate(found["ranks"]):
        assert entry["work"] == plan.work[rank] * 8
        assert entry["hops"] == ["1 masked", "1 whole", "1 whole", "1 whole"]
        assert entry["forward_bytes"] == 3 * 1024 * 2 * 2 * 64 * 2
        assert entry["backward_bytes"] == 3 * 1024 * 2 * 2 * 64 * (2 + 4)
    contiguous = show(capsys, "--tokens", "4096", "--ranks", "4", "--order", "contiguous")
    assert re.search(r"^ +3 +1024 .* 1\.750 ", contiguous, re.MULTILINE)


def test_heads_of_ulysses_and_of_a_hybrid(capsys: pytest.CaptureFixture[str]) -> None:
    ulysses = json.loads(
        show(capsys, "--tokens", "100", "--ranks", "3", "--attention", "ulysses", "--heads", "8:4", "--json")
    )
    assert [entry["heads"] for entry in ulysses["ranks"]] == [[0, 3], [3, 6], [6, 8]]
    assert ulysses["ranks"][2]["key_heads"] == [3, 4]
    hybrid = json.loads(
        show(capsys, "--tokens", "100", "--ranks", "12", "--attention", "hybrid", "--heads", "4", "--json")
    )
    assert [entry["heads"] for entry in hybrid["ranks"]] == [[0, 1], [1, 2], [2, 3], [3, 4]] * 3
    assert "heads" in show(capsys, "--tokens", "100", "--ranks", "12", "--attention", "hybrid", "--inner", "3")


@pytest.mark.parametrize("n_tokens", ["0", "1", "4096"])
def test_the_svg_is_xml(capsys: pytest.CaptureFixture[str], tmp_path: Path, n_tokens: str) -> None:
    file = tmp_path / "plan.svg"
    show(capsys, "--tokens", n_tokens, "--ranks", "4", "--svg", str(file))
    root = xml.etree.ElementTree.parse(file).getroot()
    assert root.tag.endswith("svg")
    assert len(root) > (100 if n_tokens == "4096" else 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0"], "0 is no number of ranks"),
        (["--ranks", "4", "--tokens", "many"], "--tokens"),
        (["--ranks", "4", "--tokens", "-4"], "--tokens"),
        (["--ranks", "4", "--attention", "ulysses", "--heads", "2"], "2 query heads for 4 ranks"),
        (["--ranks", "4", "--heads", "8:3"], "8 query heads do not divide among 3"),
        (["--ranks", "4", "--head-dim", "0"], "heads of 0"),
        (["--ranks", "4", "--inner", "2"], "rows of one rank, not of 2"),
        (["--ranks", "4", "--attention", "ulysses", "--inner", "2"], "all 4 ranks exchange heads"),
        (["--ranks", "4", "--attention", "hybrid", "--inner", "3"], "rows of 3 ranks do not divide 4"),
        (["--ranks", "4", "--documents", "3,4"], "are 7 in all, the sequence has 64"),
        (["--ranks", "4", "--documents", "64,0"], "at least 1"),
        (["--ranks", "4", "--order", "documents"], "no document"),
        (["--ranks", "4", "--window", "-2"], "window of -2"),
        (["--ranks", "4", "--svg", "/no/such/folder/plan.svg"], "cannot be written"),
    ],
)
def test_words_that_no_plan_fits(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["sequence", "show", *([] if "--tokens" in words else ["--tokens", "64"]), *words]) == 2
    assert said in capsys.readouterr().err


PICTURES = {
    "zigzag": ["--tokens", "4096", "--ranks", "4"],
    "contiguous": ["--tokens", "4096", "--ranks", "4", "--order", "contiguous"],
    "hybrid": ["--tokens", "4096", "--ranks", "4", "--attention", "hybrid", "--inner", "2", "--documents",
     "1000,1500,1596", "--window", "600"],
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_in_the_documents_are_what_the_command_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    show(capsys, *PICTURES[name], "--svg", str(tmp_path / "plan.svg"))
    kept = Path(__file__).resolve().parents[3] / "docs" / "images" / f"sequence-{name}.svg"
    assert kept.read_text() == (tmp_path / "plan.svg").read_text(), (
        f"deepspeed_c sequence show {' '.join(PICTURES[name])} --svg {kept.name}"
    )
