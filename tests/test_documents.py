"""Documents are correct: lists that scripts generate are up to date, and transcripts match the interpreter's output."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from deepspeed_c.config.features import AREAS, FEATURES
from scripts import missing
from scripts.compatibility import UNBUILT, read_rows
from tests import fresh
from tests.waits import ran

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block of code that begins with the prompt of Python.
TRANSCRIPT = re.compile(r"^```\w*\n(>>> .*?)^```", re.MULTILINE | re.DOTALL)


def test_lists_of_what_is_missing_are_of_today() -> None:
    done = fresh.run(["-m", "scripts.missing"], cwd=ROOT, has_package=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("document", missing.DOCUMENTS, ids=lambda path: path.name)
def test_every_missing_feature_and_only_such_are_listed(document: Path) -> None:
    _, _, listed = document.read_text(encoding="utf-8").partition(missing.BEGIN)
    listed, _, _ = listed.partition(missing.END)
    titles = {
        title for row in listed.splitlines() if row.startswith("| ") for title in row.split(" | ")[1][:-2].split("; ")
    }
    absent = {feature.title for feature in FEATURES.values() if not feature.is_built}
    assert titles - {"not built", "---"} == absent, titles ^ absent
    assert f"{len(absent)} of {len(FEATURES)} features" in listed
    assert f"{sum(row.state in ('not yet', UNBUILT) for row in read_rows())} of DeepSpeed's" in listed


def test_an_old_list_is_found(monkeypatch, tmp_path, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{missing.BEGIN}\nOnly one thing is missing.\n{missing.END}\nafter\n")
    monkeypatch.setattr(missing, "DOCUMENTS", {page: "docs/"})
    assert missing.main([]) == 1 and "page.md does not list" in capsys.readouterr().out
    assert missing.main(["--write"]) == 0 and missing.main([]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and next(iter(AREAS)) in text
    with pytest.raises(ValueError, match="no <!-- missing"):
        missing.put_between_marks("a page without marks", "text")


def test_transcripts_are_what_the_interpreter_answers() -> None:
    found = [(page, block) for page in DOCUMENTS for block in TRANSCRIPT.findall(page.read_text(encoding="utf-8"))]
    assert found, "no transcript is left in the documents"
    for page, block in found:
        lines = block.splitlines()
        code = "\n".join(line[4:] for line in lines if line.startswith(">>> "))
        answer = [line for line in lines if not line.startswith(">>> ")]
        done = ran([sys.executable, "-m", "deepspeed_c", "run", "--force", sys.executable, "-c", code], cwd=ROOT)
        said = (done.stdout + done.stderr).splitlines()[-len(answer) :]
        assert said == answer, f"{page.name}: {said}"


CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def broken_rows(text: str) -> list[str]:
    """``LINE: ROW`` of each table row with more or fewer cells than its head, or that should be the rule below it."""
    # Code of several lines keeps them, so that the lines of the rest have their numbers.
    text = CODE.sub(lambda code: "code" + "\n" * code[0].count("\n"), text)
    found = []
    for table in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        first = text.count("\n", 0, table.start()) + 1
        rows = table[0].splitlines()
        counts = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        has_rule = len(rows) > 1 and re.fullmatch(r"\|( ?:?-+:? ?\|)+", rows[1])
        if not has_rule:
            found.append(f"{first}: {rows[0]}: no rule follows this head")
        found += [f"{first + i}: {row}" for i, row in enumerate(rows) if counts[i] != counts[0]]
    return found


def test_rows_of_a_table_have_as_many_cells_as_its_head() -> None:
    """Table rows that were joined into one line would be shown as text."""
    assert len(DOCUMENTS) > 50
    found = [
        f"{page.relative_to(ROOT)}:{row}" for page in DOCUMENTS for row in broken_rows(page.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_broken_rows_are_found() -> None:
    text = "```\n| a | b |\n```\n\n| a | `x|y` |\n| --- | --- |\n| c |\n| d | e \\| f |\n\n| a |\n| b |\n\n| alone |\n"
    found = ["7: | c |", "10: | a |: no rule follows this head", "13: | alone |: no rule follows this head"]
    assert broken_rows(text) == found
