"""The targets of the Makefile: all are listed, and each installs no more than it needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TARGETS = re.findall(r"^([a-z][\w-]*):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def commands_of(target: str, venv: Path) -> str:
    """The commands that ``make target`` would run with an environment that does not exist yet."""
    command = ["make", "--dry-run", f"VENV={venv}", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True).stdout


def test_make_alone_lists_all_targets() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True).stdout
    assert len(TARGETS) > 12
    assert re.findall(r"^make (\S+) ", listed, re.MULTILINE) == TARGETS


@pytest.mark.parametrize(
    "target, extras",
    [
        ("train", ["examples"]), ("build", ["examples"]), ("curriculum", ["examples"]), ("hf", ["examples", "hf"]),
        ("rl", ["examples", "hf"]), ("opd", ["examples", "hf"]), ("qlora", ["examples", "hf", "hf,qlora"]),
        ("serve", ["examples", "hf", "hf,serve"]), ("test", ["examples,hf,monitor,qlora,serve,structured,test,torchao,tuning"]),
        ("check", ["examples,hf,monitor,qlora,serve,structured,test,torchao,tuning"]), ("format", ["examples,hf,monitor,qlora,serve,structured,test,torchao,tuning"]),
    ],
)  # fmt: skip
def test_a_target_installs_what_it_needs(target: str, extras: list[str], tmp_path: Path) -> None:
    commands = commands_of(target, tmp_path / "venv")
    assert re.findall(r'install .*-e "\.\[(.*)\]"', commands) == extras
    assert len(re.findall(r"(?m)^echo .*\d min", commands)) == len(extras) + 1
