"""Write the lists of missing features and names, from the table of features and the table of DeepSpeed's names.

python -m scripts.missing --write     writes them into README.md and docs/migrating-from-deepspeed.md
python -m scripts.missing             reports an outdated document (exit code 1)

A list stands between two marks in its document; the rest of the document is written by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from deepspeed_c.config.features import AREAS, FEATURES, Feature
from scripts.compatibility import UNBUILT, Row, read_rows

__all__ = ["DOCUMENTS", "area_table", "main", "put_between_marks"]

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- missing: written by scripts/missing.py -->", "<!-- /missing -->"


def _missing_by_area() -> dict[str, list[Feature]]:
    found = {area: [feature for feature in of_area.values() if not feature.is_built] for area, of_area in AREAS.items()}
    return {area: features for area, features in found.items() if features}


def _intro(rows: list[Row]) -> str:
    n_missing = sum(not feature.is_built for feature in FEATURES.values())
    n_names = sum(row.state in ("not yet", UNBUILT) for row in rows)
    return (
        f"Not in this version: {n_missing} of {len(FEATURES)} features that configuration keys ask for, and {n_names} of"
        f" DeepSpeed's and MII's {len(rows)} public names. Using one is an error that names it"
        " and says what to do instead; nothing is silently ignored."
    )


def area_table(rows: list[Row], documents: str) -> str:
    """Return the features by area; ``documents`` is the path to the folder with the document of names."""
    return "\n".join(
        [
            _intro(rows),
            "",
            "| area | not built |",
            "| --- | --- |",
            *(f"| {area} | {'; '.join(f.title for f in features)} |" for area, features in _missing_by_area().items()),
            "",
            (
                f"[compatibility.md]({documents}compatibility.md) has the names, [config.md]({documents}config.md) the status"
                " of each key and, at its end, what to do without each feature."
            ),
        ]
    )


# Document -> the relative path from the document to the folder of documents.
DOCUMENTS = {ROOT / "README.md": "docs/", ROOT / "docs" / "migrating-from-deepspeed.md": ""}


def put_between_marks(document: str, text: str, first: str = BEGIN, last: str = END) -> str:
    """Return ``document`` with ``text`` between two marks. Raises ValueError where a mark is missing."""
    before, begin, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the document has no {first} with a {last} behind it")
    return f"{before}{first}\n{text}\n{last}{after}"


def main(argv: list[str]) -> int:
    """Return exit code 1 if a document is outdated, 2 for unknown arguments."""
    if argv not in ([], ["--write"]):
        print("usage: python -m scripts.missing [--write]", file=sys.stderr)
        return 2
    rows, code = read_rows(), 0
    for path, documents in DOCUMENTS.items():
        present = path.read_text(encoding="utf-8")
        wanted = put_between_marks(present, area_table(rows, documents))
        if argv:
            path.write_text(wanted, encoding="utf-8")
        elif present != wanted:
            print(f"{path.name} does not list what is missing now: run make docs")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
