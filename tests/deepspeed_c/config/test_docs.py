"""docs/config.md matches the current schema, and holds every key."""

from pathlib import Path

from deepspeed_c.config.docs import main, render
from deepspeed_c.config.features import FEATURES
from deepspeed_c.config.schema import walk

FILE = Path(__file__).resolve().parents[3] / "docs" / "config.md"


def test_file_is_up_to_date():
    assert FILE.read_text(encoding="utf-8") == render(), "run: python -m deepspeed_c.config.docs docs/config.md"


def test_every_key_and_feature_is_there():
    text = render()
    for path, field in walk():
        assert f"| `{field.name}` |" in text, path
    for feature in FEATURES.values():
        assert feature.is_built or feature.title in text


def test_every_table_row_has_its_columns():
    columns = None
    for line in render().splitlines():
        if not line.startswith("|"):
            columns = None
            continue
        n = line.replace("\\|", "").count("|")
        columns = columns or n
        assert n == columns, line


def test_main_writes_the_file(tmp_path):
    assert main([str(tmp_path / "c.md")]) == 0
    assert (tmp_path / "c.md").read_text(encoding="utf-8") == render()
    assert main([]) == 2
