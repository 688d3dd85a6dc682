"""``deepspeed_c plan --simulate`` with a script of its own: what it prints, its variants, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import textwrap
import xml.etree.ElementTree as ET

import pytest

from deepspeed_c.errors import ConfigError, FeatureError, ModelError
from deepspeed_c.plan.cli import main
from deepspeed_c.plan.machine import read_machine
from deepspeed_c.plan.variants import parse_variants

SCRIPT = """
import sys
import torch
import deepspeed_c

layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 7)]
model = torch.nn.Sequential(*layers)
deepspeed_c.initialize(model=model, model_parameters=model.parameters())
"""
WIDTHS = ((32, 64), (64, 7))
N_SAMPLES, N_MICRO = 5, 3


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on 16 ranks of two hosts, and returns what it prints. zero: more keys of the section."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))

    def run(*options: str, zero: dict | None = None, **keys: object) -> str:
        config = {
            "train_micro_batch_size_per_gpu": N_SAMPLES,
            "gradient_accumulation_steps": N_MICRO,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **(zero or {})},
            **keys,
        }
        (tmp_path / "ds.json").write_text(json.dumps(config))
        usual = ["--simulate", "--config", str(tmp_path / "ds.json"), "--sample", "32"]
        assert main([*usual, *options, str(tmp_path / "train.py")]) == 0
        return capsys.readouterr().out

    return run


HOSTS = ("--machine", "h100", "--hosts", "2")


def test_json_has_flops_and_bytes_that_follow_from_the_shapes(run):
    found = json.loads(run(*HOSTS, "--json"))
    # Forward, and the two products of backward; nothing needs the gradient of the input.
    n_products = [2, 3]
    flops = sum(2 * N_SAMPLES * a * b * n for (a, b), n in zip(WIDTHS, n_products, strict=True)) * N_MICRO
    assert found["flops"] == flops, (found["flops"], flops)
    assert (found["ranks"], found["hosts"]) == (16, 2)
    assert len(found["busy_seconds"]) == len(found["peak_bytes"]) == 16
    # Each of 16 ranks holds an equal slice of each bucket, with padding.
    n_bytes = 4 * sum(a * b + b for a, b in WIDTHS)
    scattered = sum(each["bytes"] for each in found["collectives"] if each["op"] == "reduce-scatter")
    assert N_MICRO * n_bytes <= scattered <= N_MICRO * (n_bytes + 4 * 4 * 16 * 16), (scattered, n_bytes)
    assert {each["link"] for each in found["collectives"]} == {"infiniband"}
    assert math.isclose(found["step_seconds"], found["busy_seconds"][0] + found["waited_seconds"][0], rel_tol=0.01), (
        found
    )


def test_variants_are_compared_with_the_step(run):
    found = json.loads(run(*HOSTS, "--json", "--what-if", "link=1x,link=2x,stage=3,stage=1,stage=7,hpz=3"))
    rows = {row["change"]: row for row in found["what_if"]}
    assert rows["link=1x"]["step_seconds"] == rows["stage=3"]["step_seconds"] == found["step_seconds"]
    assert rows["link=2x"]["step_seconds"] < found["step_seconds"]
    assert rows["stage=1"]["step_seconds"] not in (None, found["step_seconds"])
    for name in ("stage=7", "hpz=3"):
        assert rows[name]["step_seconds"] is None, rows[name]
        assert rows[name]["refusal"], rows[name]


def test_text_names_what_matters(run):
    text = run(*HOSTS, "--slow", "3:2,5:1.5", "--mtbf", "1h", "--save-every", "6m", "--what-if", "link=2x")
    lost = 1 - 0.1 / math.expm1(0.1)
    for words in (
        "16 ranks on 2 hosts, h100; stage 3",
        "rank 3 computes longest",
        f"failures cost {lost:.2%}",
        "link=2x",
    ):
        assert words in text, text


def test_lanes_are_drawn(run, tmp_path):
    run(*HOSTS, "--svg", str(tmp_path / "lanes.svg"))
    texts = [each.text for each in ET.parse(tmp_path / "lanes.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert "compute" in texts and "infiniband" in texts, texts


def test_the_rates_of_a_machine_decide(run, tmp_path):
    written = json.loads(run(*HOSTS, "--json"))
    slower = json.loads(_file_of("h100").read_text())
    slower["links"][1]["bytes_per_s"] //= 1000
    (tmp_path / "slow.json").write_text(json.dumps(slower))
    found = json.loads(run("--machine", str(tmp_path / "slow.json"), "--hosts", "2", "--json"))
    assert found["step_seconds"] > written["step_seconds"], (found["step_seconds"], written["step_seconds"])
    slower["links"][0]["n_below"] = 0
    (tmp_path / "slow.json").write_text(json.dumps(slower))
    with pytest.raises(ConfigError, match="nothing says how many ranks a host has"):
        run("--machine", str(tmp_path / "slow.json"), "--hosts", "2")


def _file_of(name: str):
    from deepspeed_c.plan import machine

    assert read_machine(name).name == name
    return machine._SHIPPED / f"{name}.json"


@pytest.mark.parametrize(
    ("options", "where", "what"),
    [
        ((), "--machine", "no machine was given"),
        (("--machine", "nothing"), "machine", "neither a file nor one of"),
        ((*HOSTS, "--ranks", "3"), "--ranks", "2 hosts of 8 ranks are 16 ranks, not 3"),
        (("--machine", "h100", "--hosts", "0"), "--hosts", "0 is not a number"),
        ((*HOSTS, "--per-host", "0"), "--per-host", "0 is not a number"),
        ((*HOSTS, "--slow", "16:2"), "--slow", "'16:2' is not understood"),
        ((*HOSTS, "--slow", "1:x"), "--slow", "'1:x' is not understood"),
        ((*HOSTS, "--slow", "1:0"), "--slow", "'1:0' is not understood"),
        ((*HOSTS, "--mtbf", "4h"), "--mtbf", "go together"),
        ((*HOSTS, "--mtbf", "1s", "--save-every", "1h"), "--save-every", "do not fit"),
        ((*HOSTS, "--what-if", "link=2"), "--what-if", "'link=2' is not understood"),
        ((*HOSTS, "--what-if", "pp=4"), "--what-if", "'pp=4' is not understood"),
        (("--calibrate",), "--calibrate", "cannot measure"),
    ],
)
def test_options_that_do_not_fit_are_refused(run, options, where, what):
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        run(*options)
    assert caught.value.where == where, caught.value


def test_what_is_not_simulated_yet_is_named(run):
    with pytest.raises(FeatureError, match="an engine without an optimizer is not simulated"):
        run(*HOSTS, optimizer=None)


def test_sizes_alone_are_refused():
    with pytest.raises(ConfigError, match="do not say what a model computes"):
        main(["--simulate", "--machine", "h100", "--params", "7e9"])


def test_a_model_that_reads_values_is_refused(run, tmp_path):
    reading = SCRIPT.replace("torch.nn.ReLU()", "Reads()").replace(
        "layers =",
        "class Reads(torch.nn.Module):\n    def forward(self, x):\n        return x * float(x.detach().sum())\n\nlayers =",
    )
    (tmp_path / "train.py").write_text(reading)
    with pytest.raises(ModelError, match="fails on tensors without data"):
        run(*HOSTS)


def test_variants_are_read():
    link, stage = parse_variants("link=1.5x,stage=2")
    assert (link.name, link.link, link.keys) == ("link=1.5x", 1.5, {})
    assert (stage.link, stage.keys) == (1.0, {"stage": 2})
