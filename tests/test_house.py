"""The parts that new capabilities would add to stay as small as ``scripts/house.py`` says."""

from __future__ import annotations

import ast

import pytest

from scripts import house

ROWS = house.rows()


@pytest.mark.parametrize("row", ROWS, ids=[row.what for row in ROWS])
def test_no_part_outgrows_its_limit(row: house.Row) -> None:
    assert row.count <= row.most, "\n".join([f"{row.what}: {row.count}, at most {row.most}", *row.found])


def test_a_class_is_measured_as_it_is_written(tmp_path, monkeypatch) -> None:
    text = [
        "class Other:", "    def one(self): self.other = 1", "class Thing:", "    def __init__(self, a):",
        "        self.a, (self.b, *self.c) = a", "        self.a.d = self.e", "    @property",
        "    def f(self) -> int:", "        self.g: int = 1", "        for self.h in (): pass",
        "        def inner(): self.a += 1", "    async def i(self): ...",
    ]  # fmt: skip
    (tmp_path / "thing.py").write_text("\n".join(text))
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    assert house.size_of("thing.py", "Thing") == house.Size(lines=10, methods=3, attributes=5)
    assert house.size_of("thing.py", "Other") == house.Size(2, 1, 1)


def test_late_imports_and_takers_are_found(tmp_path, monkeypatch) -> None:
    package = tmp_path / "package"
    (package / "config").mkdir(parents=True)
    text = """
import package.a
def f(config: "Config | None", *rest: Other):
    import torch, package.b
    def g(settings: Sequence[Config]): from package.c import d
class H(NamedTuple):
    config: Config
class I:
    config: Config
    def j(self, config: ZeroConfig) -> Config: return config.is_apart and config.zero.joint
"""
    ast.parse(text)
    for name in ("module.py", "config/module.py"):
        (package / name).write_text(text)
    monkeypatch.setattr(house, "PACKAGE", package)
    assert [line.partition(":")[0] for line in house.late_imports()] == ["config/module.py"] * 2 + ["module.py"] * 2
    assert [line.rpartition(" ")[2] for line in house.takers_of_config()] == ["f", "H", "g"]
    assert sorted(line.rpartition(" ")[2] for line in house.placement_tests()) == ["is_apart"] * 2 + ["joint"] * 2
