"""What every test may ask for: `run_ranks`, which runs a function on several ranks (see ranks.py)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The repository root, so that `tests.ranks` is importable under every import mode of pytest and in the ranks.
_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from tests import ranks


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """``run_ranks(world, fn, *args, timeout=60, fresh=False, grace=5)``: see ``tests.ranks.run_ranks``."""
    yield ranks.run_ranks
    ranks.stop_ranks()


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Test processes run side by side, as many as there are cores: torch's own threads would be in one another's way."""
    import torch

    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is there now (torch, the tests) lives as long as the session: tests that collect garbage need not look through it, 0.3 s each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Ranks end with the session, also when a test imported ``run_ranks`` and did not ask for the fixture."""
    ranks.stop_ranks()
