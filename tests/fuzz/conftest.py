"""Collects the C programs of this folder (see tests/run_c.py)."""

from tests.run_c import pytest_collect_file

__all__ = ["pytest_collect_file"]
