"""scripts/reference.py: the modules of the API reference exist, are documented, and contain every public name."""

from __future__ import annotations

import importlib

import pytest

import deepspeed_c
from scripts.reference import MODULES, main


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_there_and_documented(name):
    assert importlib.import_module(name).__doc__, f"{name} has no docstring"


def test_every_public_name_is_in_one_of_them():
    missing = [name for name, module in deepspeed_c.PUBLIC_NAMES.items() if module not in MODULES]
    assert missing == [], missing


def test_words_that_mean_nothing_are_refused(capsys):
    assert main([]) == 2 and "usage" in capsys.readouterr().err
