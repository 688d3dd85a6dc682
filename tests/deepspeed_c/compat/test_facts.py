"""Names that programs import from DeepSpeed behave the same here. facts.py runs on both packages, and the results of
DeepSpeed 0.19.6 are recorded.

``DSC_PEER_PYTHON=... python -m tests.deepspeed_c.compat.test_facts`` records them again.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import fresh

SCRIPT = Path(__file__).with_name("facts.py")
RECORD = Path(__file__).with_name("facts_of_deepspeed_0_19_6.json")
PEER = os.environ.get("DSC_PEER_PYTHON", "")


def facts_of(python: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run([python, str(SCRIPT), *arguments], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return facts_in(done.stdout)


def facts_in(printed: str) -> dict[str, Any]:
    (line,) = [line for line in printed.splitlines() if line.startswith("FACTS ")]
    return json.loads(line.removeprefix("FACTS "))


def differences(theirs: Any, ours: Any, where: str = "") -> list[str]:
    """The places where two trees of facts differ, with both values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = sorted(theirs.keys() | ours.keys())
        return [
            text for key in keys for text in differences(theirs.get(key, "-"), ours.get(key, "-"), f"{where}/{key}")
        ]
    is_same = theirs == ours and type(theirs) is type(ours)
    return [] if is_same else [f"{where}: {theirs!r} in DeepSpeed, {ours!r} here"]


def test_facts_are_those_of_deepspeed() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert sum(len(part) if isinstance(part, dict) else 1 for part in recorded.values()) > 400
    ours = fresh.run([SCRIPT, "ours"], check=True, has_package=False)
    found = differences(recorded, facts_in(ours.stdout))
    assert found == [], "\n".join(found)


@pytest.mark.skipif(not PEER, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")
def test_the_record_is_what_deepspeed_says() -> None:
    found = differences(json.loads(RECORD.read_text(encoding="utf-8")), facts_of(PEER))
    assert found == [], "\n".join(found)


def test_a_difference_is_found() -> None:
    theirs = {"a": {"b": 1, "c": [1, 2]}, "d": True}
    assert differences(theirs, {"a": {"b": 1, "c": [1, 2]}, "d": True}) == []
    ours = {"a": {"b": 2, "c": [1]}, "d": 1}
    assert [text.split(":")[0] for text in differences(theirs, ours)] == ["/a/b", "/a/c", "/d"]
    assert differences({"a": 1}, {}) == ["/a: 1 in DeepSpeed, '-' here"]


if __name__ == "__main__":
    record = json.dumps(facts_of(PEER), indent=0, sort_keys=True)
    RECORD.write_text(f"{record}\n", encoding="utf-8")
