"""The command ``deepspeed_c plan``: sizes and scripts as input, text and JSON as output, and every kind of wrong
call."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from deepspeed_c.launcher.main import main
from tests import fresh
from tests.training import config

ROOT = Path(__file__).resolve().parents[3]
CONFIG = config(3, "AdamW", bf16={"enabled": True}, lr=1e-3)
SCRIPT = """
import sys, torch, deepspeed_c
assert sys.argv[1:] == ["--ranks", "5", "--config", "x", "-h"], sys.argv
deepspeed_c.initialize(model=torch.nn.Linear(1 << 18, 1 << 18), config={})
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_sizes(folder, capsys):
    assert (
        main(["plan", "--params", "7e9", "--config", str(folder / "ds.json"), "--ranks", "64", "--layers", "32"]) == 0
    )
    out = capsys.readouterr().out
    assert "7B parameters in 128 tensors (all trained), 64 ranks, bf16" in out
    assert "  * 3" in out and "gather unit" in out and "stack of 32 equal layers" in out


def test_budgets_are_of_a_rank_or_of_a_node(folder, capsys):
    words = [
        "plan", "--params", "1e9", "--config", str(folder / "ds.json"), "--ranks", "16", "--json", "--device", "cuda",
    ]  # fmt: skip
    words += ["--device-memory", "1GB", "--host-memory", "64GiB", "--nvme", "1TB"]
    for more, n_local in (([], 8), (["--ranks-per-node", "4"], 4)):
        assert main([*words, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["budgets"] == {"device": 10**9, "host": (64 << 30) // n_local, "nvme": 10**12 // n_local}
        assert found["placements"][3]["config"]["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
        assert found["rates"] == {"device": 2e12, "host": 25e9, "link": 25e9}
    assert main([*words, "--rates", "1e3,20,0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["rates"] == {"device": 1e12, "host": 20e9, "link": 5e8}


def test_memory_without_end(folder, capsys):
    words = ["plan", "--params", "1e6", "--config", str(folder / "ds.json"), "--ranks", "2", "--device", "cuda"]
    assert main([*words, "--device-memory", "1e30", "--host-memory", "1e30", "--nvme", "1e30"]) == 0
    assert "does not fit" not in capsys.readouterr().out


def test_a_script_whose_arguments_are_its_own(folder, capsys):
    words = ["plan", "--config", str(folder / "ds.json"), "--ranks", "3", "--json", str(folder / "train.py")]
    assert main([*words, "--ranks", "5", "--config", "x", "-h"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["params"] == (1 << 36) + (1 << 18) and found["ranks"] == 3  # 256 GiB in fp32, which are not allocated
    assert [row["stage"] for row in found["rows"] if row["is_chosen"]] == [3]


def test_the_example_in_a_process_of_its_own():
    """Runs the command as a user types it, with the configuration file of the script."""
    command = ["-m", "deepspeed_c", "plan", "--ranks", "2", "--json", "examples/train_gpt.py"]
    command += ["--deepspeed_config", "examples/ds_config.json", "--stage", "3", "--layers", "2"]
    done = fresh.run(command, cwd=ROOT, check=True)
    found = json.loads(done.stdout)
    chosen = next(row for row in found["rows"] if row["is_chosen"])
    assert chosen["stage"] == 3 and found["optimizer"] == "FusedAdam"
    gpt = runpy.run_path(str(ROOT / "examples" / "gpt.py"))
    with torch.device("meta"):
        model = gpt["GPT"](2, 448, 7, 128)
    assert found["params"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "2", "--params", "7e9"], "no configuration was given"),
        (["--ranks", "2", "--config", "{ds}"], "neither a script nor --params"),
        (["--ranks", "2", "--config", "{ds}", "--params", "1e6", "train.py"], "both a script and --params"),
        (["--ranks", "0", "--config", "{ds}", "--params", "1e6"], "0 is not a number of ranks"),
        (["--ranks", "2", "--config", "{ds}", "--params", "lots"], "'lots' is not understood"),
        (["--ranks", "2", "--config", "{ds}", "--params", "10", "--layers", "9"], "cannot be cut into 9 layers"),
        (["--ranks", "2", "--config", "{ds}", "--params", "1e6", "--activations", "x"], "'x' is not understood"),
        (["--ranks", "2", "--config", "{ds}", "--params", "1e6", "--nvme", "1TB"], "--device-memory"),
        (["--ranks", "2", "--config", "{ds}", "--params", "1e6", "--device-memory", "many"], "'many' is not"),
        (["--ranks", "2", "--config", "{ds}", "--params", "1e6", "--ranks-per-node", "0"], "0 is not a number of"),
        (
            ["--ranks", "2", "--config", "{ds}", "--params", "1e6", "--device", "cpu", "--device-memory", "1GB"]
            + ["--host-memory", "1GB"],
            "host memory as their device's",
        ),
        (["--ranks", "2", "--config", "{ds}", "--params", "1e6", "--rates", "2000,25"], "'2000,25' is not understood"),
        (["--ranks", "2", "--config", "{ds}", "--params", "1e6", "--rates", "1,nan,1"], "'1,nan,1' is not understood"),
        (["--ranks", "2", "--config", "{ds}", "--params", "1e6", "--rates", "1,0,1"], "'1,0,1' is not understood"),
        (["--ranks", "2", "--config", "nothing.json", "--params", "1e6"], "nothing.json"),
        (["--ranks", "2", "nothing.py"], "no such script"),
        (["--config", "{ds}", "--params", "1e6", "--batch", "8"], "a script with it"),
        (["--config", "{ds}", "--seq", "8", "train.py"], "give --batch N"),
        (["--config", "{ds}", "--svg", "a.svg", "train.py"], "give --batch N"),
        (["--config", "{ds}", "--batch", "8", "--activations", "1e9", "train.py"], "no --activations"),
        (["--config", "{ds}", "--batch", "0", "{train}"], "'0' is no number > 0"),
        (["--config", "{ds}", "--batch", "2", "--sample", "3xx4", "{train}"], "'' is no number > 0"),
        (
            ["--config", "{ds}", "--params", "1e6", "--ranks", "6", "--tp", "4"],
            "6 ranks cannot be cut into groups of 4",
        ),
        (["--config", "{ds}", "--params", "1e6", "--ranks", "6", "--tp", "3"], "sizes alone do not say"),
    ],
)
def test_wrong_calls(folder, capsys, words, message):
    assert main(["plan", *(word.format(ds=folder / "ds.json", train=folder / "train.py") for word in words)]) == 2
    assert message in capsys.readouterr().err


STACK = """
import torch, deepspeed_c
class Block(torch.nn.Linear):
    def forward(self, x):
        return x + super().forward(x).sigmoid()
class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(32, 32) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()
deepspeed_c.initialize(model=Stack(), config={})
"""


def test_activations_of_a_script_and_their_picture(folder, capsys):
    (folder / "stack.py").write_text(STACK)
    picture = folder / "steps.svg"
    words = ["plan", "--config", str(folder / "ds.json"), "--batch", "16", "--sample", "32", "--svg", str(picture)]
    assert main([*words, str(folder / "stack.py")]) == 0
    out = capsys.readouterr().out
    assert "activations of 16 samples of 32" in out and "  * none" in out and "nvme" in out
    assert main([*words, "--json", str(folder / "stack.py")]) == 0
    found = json.loads(capsys.readouterr().out)
    of = {option["option"]: option for option in found["activations"]}
    # The input of a layer and the output of the sigmoid, in 16 bits.
    assert of["none"]["backward_bytes"] == found["activation_bytes"] == 4 * 2 * 16 * 32 * 2
    assert of["recomputed"]["backward_bytes"] == 4 * 16 * 32 * 2 + 16 * 32 * 2
    chosen = next(row for row in found["rows"] if row["is_chosen"])
    assert chosen["phases"]["backward"]["kinds"]["activations"] == of["none"]["backward_bytes"]
    root = ElementTree.parse(picture).getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == len([option for option in of.values() if not option["refused"]])
    assert main([*words[:-1], str(folder / "no" / "a.svg"), str(folder / "stack.py")]) == 2
    assert "--svg" in capsys.readouterr().err


def test_help(capsys):
    assert main(["plan", "--help"]) == 0
    assert "--activations" in capsys.readouterr().out
