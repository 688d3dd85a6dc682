"""The Hugging Face stack is an optional dependency. Without it the tests of this folder are skipped."""

from __future__ import annotations

import importlib.util

import pytest

MISSING = [name for name in ("transformers", "accelerate", "peft", "trl") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        mark = pytest.mark.skip(reason=f"the extra [hf] is not installed: no {', '.join(MISSING)}")
        for item in items:
            if "hf" in item.path.parts:
                item.add_marker(mark)
