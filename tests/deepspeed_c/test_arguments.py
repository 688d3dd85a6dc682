"""add_config_arguments has DeepSpeed's names, defaults and types."""

from __future__ import annotations

import argparse

import pytest

from deepspeed_c.arguments import add_config_arguments

DEFAULTS = {"deepspeed": False, "deepspeed_config": None, "deepscale": False, "deepscale_config": None}


def test_returns_the_parser_and_keeps_its_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.5)
    assert add_config_arguments(parser) is parser
    assert vars(parser.parse_args([])) == {"lr": 0.5, **DEFAULTS}


@pytest.mark.parametrize("name", ["deepspeed", "deepscale"])
def test_values(name):
    parser = add_config_arguments(argparse.ArgumentParser())
    values = vars(parser.parse_args([f"--{name}", f"--{name}_config", "a b.json"]))
    assert values == {**DEFAULTS, name: True, f"{name}_config": "a b.json"}


def test_help_has_a_group_of_its_own():
    text = add_config_arguments(argparse.ArgumentParser()).format_help()
    assert "DeepSpeed:" in text and "deprecated" in text, text


def test_same_as_deepspeed():
    deepspeed = pytest.importorskip("deepspeed")
    ours, theirs = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_config_arguments(ours)
    deepspeed.add_config_arguments(theirs)

    def table(parser):
        return {(tuple(a.option_strings), a.dest, a.default, a.type, a.nargs, a.const) for a in parser._actions}

    assert table(ours) == table(theirs)
