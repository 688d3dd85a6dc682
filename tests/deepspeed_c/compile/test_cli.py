"""The command ``deepspeed_c compile show``: its report as text and as JSON, and scripts that end early, fail, or have no
engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from deepspeed_c.launcher.main import main
from tests import fresh

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys, torch, deepspeed_c

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(7, 5), torch.nn.Linear(5, 1)

    def forward(self, x):
        h = torch.relu(self.up(x))
        torch._dynamo.graph_break()  # line 11
        return self.down(h).mean()

what = sys.argv[1]
if what == "nothing":
    sys.exit(0)
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
config["zero_optimization"] = {"stage": 0 if what == "stage0" else 2}
if what == "early":
    raise KeyError("before the engine")
model = Net()
engine, *_ = deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)
if what == "own":
    engine.compile(backend="eager", compile_kwargs={"dynamic": False})
for i in range(1 if what == "short" else 1000):
    print("the script's own line")
    engine.backward(engine(torch.ones(3 + i, 7)))
    engine.step()
    if what == "fails":
        raise ValueError("in step 1")
    assert i < 3, "the script was not stopped"
"""


def show(folder: Path, *words: str) -> CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return fresh.run(["-m", "deepspeed_c", "compile", "show", *words], cwd=folder, env=environment)


def test_text(tmp_path: Path) -> None:
    done = show(tmp_path, "--steps", "3", "train.py", "own")
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "the script's own line" in out and "train.py: 3 steps of 3 as one rank\n" in out
    assert "zero2_compile" in out and "deepspeed_c.zero_reduce.default added" in out
    assert "graph break in forward (train.py:11)" in out and "expected 3, actual 4" in out


def test_json_and_a_script_that_does_not_compile(tmp_path: Path) -> None:
    done = show(tmp_path, "--json", "--backend", "eager", "train.py", "plain")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "the script's own line" in done.stderr
    assert report["steps"] == 2 and report["ended"] is None
    [part] = report["eager"]
    assert part["kind"] == "graph break" and part["place"]["line"] == 11
    backward = next(graph for graph in report["graphs"] if graph["phase"] == "backward")
    assert backward["passes"][0]["added"]["deepspeed_c.zero_reduce.default"] == 2
    assert backward["n_operators"] > 0 and len(report["frames"]) >= 2


@pytest.mark.parametrize(
    "what, code, out, error",
    [
        ("short", 0, "1 step of 2 as one rank; the script ended", ""),
        ("fails", 2, "1 step of 2 as one rank; the script failed with ValueError", "ValueError: in step 1"),
        ("stage0", 2, "", "without ZeRO nothing is put into compiled graphs"),
    ],
)
def test_scripts_that_end_early(tmp_path: Path, what: str, code: int, out: str, error: str) -> None:
    done = show(tmp_path, "--backend", "eager", "train.py", what)
    assert done.returncode == code, done.stderr
    assert out in done.stdout and error in done.stderr and (code == 0 or "Traceback" not in done.stderr), done.stderr


def test_a_configuration_replaces_that_of_the_script(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    (tmp_path / "ds.json").write_text(json.dumps({**config, "zero_optimization": {"stage": 1}}))
    done = show(tmp_path, "--config", "ds.json", "--steps", "1", "--backend", "eager", "train.py", "stage0")
    assert done.returncode == 0 and "zero1_compile" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "words, error",
    [
        (["show"], "no script was given"),
        (["show", "missing.py"], "there is no such script"),
        (["show", "--steps", "0", "train.py"], "not a number of steps"),
        (["draw", "train.py"], "invalid choice"),
        ([], "required: action"),
        (["show", "train.py", "nothing"], "exit code 0 and did not call deepspeed_c.initialize"),
        (["show", "train.py", "early"], "before it called deepspeed_c.initialize: KeyError"),
    ],
)
def test_wrong_calls(tmp_path: Path, monkeypatch, capsys, words: list[str], error: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert main(["compile", *words]) == 2
    assert error in capsys.readouterr().err
