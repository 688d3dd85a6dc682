"""examples/train_gpt.py as a user starts it, through the launcher, and on other numbers of ranks: it learns, draws, reports
and stops."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train_gpt import load_chart

from tests import fresh
from tests.waits import ended

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [
    str(ROOT / "examples" / "train_gpt.py"),
    "--deepspeed",
    "--deepspeed_config",
    str(ROOT / "examples" / "ds_config.json"),
]
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--sample-bytes", "20"]
LAUNCH = [sys.executable, "-m", "deepspeed_c", "--num_procs", "2"]


def train(command: list[str], folder: Path) -> str:
    """The output and the errors of a command. A script without the launcher runs in a child of the zygote."""
    if command[0] == sys.executable:
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=300)
    else:
        done = fresh.run(command, cwd=folder)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def train_ranks(world: int, arguments: list[str], folder: Path) -> str:
    """The output and the errors of all ranks, which no launcher starts."""
    done = fresh.run_ranks_of(world, arguments, cwd=folder)
    said = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), said
    return said


def number(pattern: str, text: str) -> float:
    found = re.findall(pattern, text)
    assert len(found) == 1, f"{pattern!r} stands {len(found)} times in:\n{text}"
    return float(found[0])


def check_report(text: str, steps: int, picture: Path) -> None:
    held_out = number(r"held-out loss +([\d.]+) nats/byte", text)
    entropy = number(r"unigram entropy +([\d.]+) nats/byte", text)
    assert 2.5 < entropy < 3.5, entropy
    # Between nothing learned (uniform over 256 bytes) and more than so few steps can teach.
    assert entropy / 2 < held_out < math.log(256) - 0.3, held_out
    assert number(r"the loss is ([\d.]+) of it", text) == pytest.approx(held_out / entropy, abs=0.01)
    assert text.count("sample: def ") == 1
    assert 100 < number(r"summary: peak memory (\d+) MiB per rank", text) < 4000
    for phase in ("data", "forward", "backward", "step"):
        assert number(rf"{phase} (\d+) ms", text) < 10_000
    assert number(r"([\d.]+) tokens/s over", text) > 0
    assert f"over {steps} steps" in text
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and picture.stat().st_size > 10_000


@pytest.mark.always
def test_two_processes_with_the_configuration_as_it_is(tmp_path):
    text = train([*LAUNCH, *SCRIPT, *TINY, "--steps", "25"], tmp_path)
    check_report(text, steps=25, picture=tmp_path / "out" / "loss.png")
    assert "loss=" in text and "grad_norm=" in text and "lr=" in text and "tokens_per_s=" in text


def test_one_process_without_the_launcher_at_another_stage(tmp_path):
    more = ["--stage", "0", "--out", "here", "--layers", "2", "--budget", "1MiB"]
    text = train([*SCRIPT, *TINY, "--steps", "25", *more], tmp_path)
    assert number(r"activation budget: [\d.]+ KiB of ([\d.]+) MiB at the peak", text) == 1
    check_report(text, steps=25, picture=tmp_path / "here" / "loss.png")


def test_without_a_configuration_it_says_which_file_to_give(tmp_path):
    done = fresh.run([SCRIPT[0]], cwd=tmp_path)
    assert done.returncode == 2
    assert "--deepspeed_config FILE is needed" in done.stderr and "Traceback" not in done.stderr


def has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_ends_it_quietly_and_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        [*LAUNCH, *SCRIPT, *TINY, "--steps", "100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        seen = ""
        while "loss=" not in seen:
            piece = process.stdout.read(1)
            assert piece, f"ended before the first step:\n{seen}"
            seen += piece
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: launcher and ranks alike
        rest, _ = process.communicate(timeout=300)
        assert process.returncode == 130, f"exit code {process.returncode}\n{seen + rest}"
        assert "Traceback" not in seen + rest, seen + rest
        limit = time.monotonic() + 200
        while has_processes(process.pid):
            assert time.monotonic() < limit, "processes of the launcher's group are still there"
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            ended(process)


def test_the_configuration_shows_what_the_example_is_about():
    config = json.loads((ROOT / "examples" / "ds_config.json").read_text())
    assert config["bf16"]["enabled"] and config["zero_optimization"]["stage"] == 2
    assert config["gradient_accumulation_steps"] > 1 and config["gradient_clipping"] > 0
    assert config["optimizer"]["type"] == "AdamW" and "warmup_num_steps" in config["scheduler"]["params"]


def test_two_tensor_parallel_processes_have_the_losses_of_one(tmp_path):
    """As `make train TP=2`, in fp32: only the order of sums differs."""
    config = json.loads((ROOT / "examples" / "ds_config.json").read_text())
    config["bf16"]["enabled"] = False
    (tmp_path / "fp32.json").write_text(json.dumps(config))
    # 3 heads do not divide by 2.
    sizes = ["--layers", "2", "--width", "48", "--heads", "3", "--context", "32", "--sample-bytes", "20"]
    given = [SCRIPT[0], "--deepspeed", "--deepspeed_config", "fp32.json", *sizes, "--steps", "6"]
    one = train([*given, "--out", "one"], tmp_path)
    two = train_ranks(2, [*given, "--tp", "2", "--out", "two"], tmp_path)
    losses = [json.loads((tmp_path / folder / "loss.json").read_text()) for folder in ("one", "two")]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], abs=1e-5)
    held_out = [number(r"held-out loss +([\d.]+) nats/byte", text) for text in (one, two)]
    assert held_out[1] == pytest.approx(held_out[0], abs=1.1e-3), held_out  # printed with three digits
    assert "rank 0 of 2 holds" in two


@pytest.mark.parametrize("n_tp", [1, 2])
def test_two_pipeline_stages_have_the_losses_of_one_process(tmp_path, n_tp: int):
    """As `make train PP=2` and `make train PP=2 TP=2 NPROC=4`, in fp32: only the order of sums differs."""
    config = json.loads((ROOT / "examples" / "ds_config.json").read_text())
    config["bf16"]["enabled"] = False
    (tmp_path / "fp32.json").write_text(json.dumps(config))
    sizes = ["--layers", "3", "--width", "32", "--heads", "2", "--context", "32", "--sample-bytes", "20"]
    given = [SCRIPT[0], "--deepspeed", "--deepspeed_config", "fp32.json", *sizes, "--steps", "6"]
    one = train([*given, "--out", "one"], tmp_path)
    two = train_ranks(2 * n_tp, [*given, "--pp", "2", "--tp", str(n_tp), "--out", "two"], tmp_path)
    losses = [json.loads((tmp_path / folder / "loss.json").read_text()) for folder in ("one", "two")]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], abs=1e-5)
    held_out = [number(r"held-out loss +([\d.]+) nats/byte", text) for text in (one, two)]
    assert held_out[1] == pytest.approx(held_out[0], abs=1.1e-3), held_out


LOAD = r"step (\d+), (\S+): tokens ([\d ]+), dropped ([\d ]+)"


def test_experts_on_two_ranks_learn_as_experts_that_each_rank_has(tmp_path):
    """As `make train EXPERTS=4 EP=2`, in fp32: only the order of sums differs."""
    config = json.loads((ROOT / "examples" / "ds_config.json").read_text())
    config["bf16"]["enabled"] = False
    (tmp_path / "fp32.json").write_text(json.dumps(config))
    sizes = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--sample-bytes", "20"]
    given = [SCRIPT[0], "--deepspeed", "--deepspeed_config", "fp32.json", *sizes, "--steps", "6", "--experts", "4"]
    together = train_ranks(2, [*given, "--ep-size", "2", "--out", "together"], tmp_path)
    apart = train_ranks(2, [*given, "--out", "apart"], tmp_path)
    losses = [json.loads((tmp_path / folder / "loss.json").read_text()) for folder in ("apart", "together")]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.05, losses[0]
    assert number(r"([\d.]+)M parameters", together) == number(r"([\d.]+)M parameters", apart)
    loads = [re.findall(LOAD, text) for text in (apart, together)]
    assert loads[0] == loads[1] and [int(step) for step, *_ in loads[0]] == [*range(1, 7)], loads
    for _, name, tokens, dropped in loads[0]:
        tokens, dropped = ([int(word) for word in words.split()] for words in (tokens, dropped))
        # 2 ranks with 2 windows of 32 tokens each; a rank's expert has places for ceil(1.25 * 64 / 4) of them.
        assert name == "blocks.1.mlp.deepspeed_moe" and sum(tokens) == 128, (name, tokens)
        assert all(max(0, n - 40) <= lost <= max(0, n - 20) for n, lost in zip(tokens, dropped)), (tokens, dropped)


def test_experts_and_recomputation_of_their_blocks_in_one_process(tmp_path):
    more = ["--layers", "4", "--stage", "3", "--budget", "200KiB", "--experts", "3", "--k", "2"]
    text = train([*SCRIPT, *TINY, *more, "--steps", "4"], tmp_path)
    loads = re.findall(LOAD, text)
    assert [(int(step), name) for step, name, *_ in loads] == [
        (step, f"blocks.{i}.mlp.deepspeed_moe") for step in range(1, 5) for i in (1, 3)
    ]
    assert all(sum(map(int, tokens.split())) == 2 * 2 * 32 for *_, tokens, _ in loads), loads
    assert re.search(r"blocks\.\d.*(recomputed|kept)", text), text


def test_a_chart_of_loads():
    lines = load_chart([2, 0, 6, 4], [0, 0, 3, 0], width=12).splitlines()
    bars = [line[13:26] for line in lines]
    assert bars == ["####  |      ", "      |      ", "######xxxxxx ", "########     "], bars
    assert [line[26:].split() for line in lines][2] == ["6", "tokens,", "3", "dropped"]
    assert load_chart([0, 0], [0, 0], width=3).splitlines()[0][13:17] == "|   "


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--experts", "4", "--pp", "2"], "does not go with --tp and --pp"),
        (["--experts", "1"], "2 or more"),
        (["--ep-size", "2"], "give --experts N"),
        (["--experts", "2", "--layers", "1"], "give --layers N"),
    ],
)
def test_experts_that_do_not_fit_are_refused(tmp_path, given, said):
    done = fresh.run([*SCRIPT, *given], cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
