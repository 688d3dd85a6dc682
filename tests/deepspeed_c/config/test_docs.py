"""docs/config.md and the pages in docs/config match the current schema and have every key."""

import re
from pathlib import Path

from deepspeed_c.config.docs import main, render
from deepspeed_c.config.features import FEATURES
from deepspeed_c.config.inference import DeepSpeedInferenceConfig
from deepspeed_c.config.inference_docs import PAGE
from deepspeed_c.config.schema import walk

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_pages_are_up_to_date():
    pages = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in DOCS.glob("config/*.md")}
    pages["config.md"] = (DOCS / "config.md").read_text(encoding="utf-8")
    assert pages == render(), "run: python -m deepspeed_c.config.docs docs"


def test_every_key_is_on_the_page_of_its_section():
    pages = render()
    for path, field in walk():
        section, _, below = path.partition(".")
        page = pages[f"config/{section}.md"] if below else pages["config.md"]
        assert f"| `{field.name}` |" in page, path
    for feature in FEATURES.values():
        assert feature.is_built or feature.title in pages["config.md"]


def test_every_key_of_init_inference_is_on_its_page():
    page = render()[PAGE]

    def keys_of(section):
        for name, field in section.model_fields.items():
            yield name, field.alias
        for below in section.sections().values():
            yield from keys_of(below)

    for name, alias in keys_of(DeepSpeedInferenceConfig):
        assert f"| `{name}` | {f'`{alias}`' if alias else ''} |" in page, name
    assert page.count(" No effect: ") == 14


def test_every_section_is_linked():
    pages = render()
    links = re.findall(r"\]\((config/\w+\.md)\)", pages["config.md"])
    assert sorted(links) == sorted(pages.keys() - {"config.md"})


def test_every_table_row_has_its_columns():
    for page in render().values():
        columns = None
        for line in page.splitlines():
            if not line.startswith("|"):
                columns = None
                continue
            n = line.replace("\\|", "").count("|")
            columns = columns or n
            assert n == columns, line


def test_main_writes_the_pages(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gone.md").write_text("a section of an older version")
    assert main([str(tmp_path)]) == 0
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md")} == render().keys()
    assert (tmp_path / "config.md").read_text(encoding="utf-8") == render()["config.md"]
    assert main([]) == 2
