"""Tests of touched.py: how far changes reach, and which changes count."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.touched import changed, reached, touched

ROOT = Path(__file__).resolve().parent.parent
TEXTS = {
    "deepspeed_c/__init__.py": "",
    "deepspeed_c/a/__init__.py": "from deepspeed_c.a.deep import (  # why\n    one,\n    two as three,\n)\n",
    "deepspeed_c/a/deep.py": "def f():\n    import deepspeed_c.b as b, os\n", "deepspeed_c/b.py": "from . import c\n",
    "deepspeed_c/c.py": "", "deepspeed_c/alone.py": "# import deepspeed_c.c\n", "tests/deepspeed_c/test_c.py": "",
    "tests/deepspeed_c/a/test_deep.py": "from deepspeed_c.a import deep\n",
    "tests/test_all.py": "from deepspeed_c import a\n", "csrc/aio/file.c": '#include "aio/file.h"\n',
    "csrc/aio/file.h": "", "csrc/base/error.h": "", "csrc/aio/ring.c": '# include "base/error.h"\n',
    "tests/csrc/aio/test_file.c": '#include "folder.h"\n', "tests/csrc/aio/folder.h": "",
}  # fmt: skip


def test_changes_reach_importers_the_nearest_first() -> None:
    found = reached(["README.md", "deepspeed_c/c.py"], TEXTS)
    print(found)
    ways = ["deepspeed_c/c.py", "deepspeed_c/b.py", "tests/deepspeed_c/test_c.py", "deepspeed_c/a/deep.py"]
    assert found[:1] == ways[:1] and set(found[1:3]) == set(ways[1:3]) and found[3] == ways[3]
    assert set(found[4:6]) == {"deepspeed_c/a/__init__.py", "tests/deepspeed_c/a/test_deep.py"}
    assert found[6:] == ["tests/test_all.py"]


def test_the_first_of_the_changes_comes_first_at_equal_distance() -> None:
    changes = ["csrc/base/error.h", "deepspeed_c/c.py", "csrc/aio/file.h"]
    found = reached(changes, TEXTS)
    print(found)
    assert found[:4] == [*changes, "csrc/aio/ring.c"]
    assert reached(changes[::-1], TEXTS)[:3] == changes[::-1]
    assert reached([], TEXTS) == reached(["gone.py"], TEXTS) == []


def test_c_code_reaches_the_tests_of_its_folder() -> None:
    for change in ("csrc/aio/file.c", "csrc/aio/file.h", "csrc/base/error.h", "tests/csrc/aio/folder.h"):
        found = reached([change], TEXTS)
        print(change, found)
        assert "tests/csrc/aio/test_file.c" in found, change


def test_changes_of_two_days_count_newest_first(tmp_path: Path) -> None:
    now = 1_700_000_000

    def git(*words: str, at: int = now) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path), *words]
        dates = {"GIT_AUTHOR_DATE": f"{at} +0000", "GIT_COMMITTER_DATE": f"{at} +0000"}
        subprocess.run(command, env={**os.environ, **dates}, check=True, timeout=300, capture_output=True)

    def write(name: str, text: str = "") -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert changed(tmp_path) == []  # no repository
    git("init", "-q")
    for days, name in ((9, "first.py"), (3, "old.py"), (1, "new.py"), (0, "newest.py")):
        write(name)
        git("add", ".", at=now - days * 86400)
        git("commit", "-q", "-m", name, at=now - days * 86400)
    assert changed(tmp_path) == ["newest.py", "new.py"]
    write("old.py", "1")
    write("tests/test_own.py")
    found = changed(tmp_path)
    print(found)
    assert found == ["old.py", "tests/test_own.py", "newest.py", "new.py"]
    assert touched(tmp_path) == ["tests/test_own.py"]


def test_imports_of_this_tree_are_understood() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "deepspeed_c/comm").rglob("*.py")}
    found = reached(["deepspeed_c/comm/work.py"], texts)
    print(len(found), found[:9])
    assert {"deepspeed_c/comm/collectives.py", "deepspeed_c/comm/transports/gloo.py"} <= set(found)
