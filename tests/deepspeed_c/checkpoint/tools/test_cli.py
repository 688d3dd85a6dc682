"""The command ``deepspeed_c checkpoint``: its output, its files, the damage it finds, and its exit codes."""

from __future__ import annotations

import json
import os

import pytest
import safetensors.torch
import torch

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import BUFFER
from deepspeed_c.checkpoint.tools.cli import _human
from deepspeed_c.checkpoint.tools.convert import Target, convert
from deepspeed_c.launcher.main import main
from tests import fresh
from tests.deepspeed_c.checkpoint.memory_source import adam_checkpoint


@pytest.fixture
def saved(tmp_path):
    convert(adam_checkpoint(), tmp_path / "ckpt", "deepspeed_c")
    return str(tmp_path / "ckpt")


def run(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


def flip(path, at: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_info(saved, capsys):
    assert run("info", saved) == 0
    out = capsys.readouterr().out
    for text in (
        *("global_step10", "format     deepspeed_c", "saved by   2 ranks, stage 1", "global_steps 10"),
        *("checksums  verified", "also       client_state", "embed.weight", "13x7"),
        "param bfloat16, master float32, exp_avg float32, exp_avg_sq float32 (also head.weight)",
        *("param bfloat16 (frozen)", "scalar", "0x3"),
    ):
        assert text in out, f"{text!r} is not in\n{out}"
    assert run("info", saved, "--json", "--no-verify") == 0
    found = json.loads(capsys.readouterr().out)
    source = adam_checkpoint()
    assert {(t["kind"], t["name"]): (t["shape"], t["dtype"], t["bytes"]) for t in found["tensors"]} == {
        key: (list(t.shape), str(t.dtype)[6:], t.nbytes) for key, t in source.values.items()
    }
    alone = {"tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1}
    assert found["topology"] == {"world_size": 2, "stage": 1, **alone, "axes": {}}
    assert found["aliases"] == {"head.weight": "embed.weight"} and found["frozen"] == ["frozen.weight"]
    assert found["problems"] is None and found["counters"]["global_steps"] == 10


def test_info_of_other_formats(saved, tmp_path, capsys):
    assert run("export", saved, tmp_path / "hf") == 0
    assert run("info", tmp_path / "hf") == 0
    out = capsys.readouterr().out
    assert "format     huggingface" in out and "checksums" not in out


def test_verify(saved, tmp_path, capsys):
    assert run("verify", saved) == 0
    assert "all checksums match (deepspeed_c, 23 tensors" in capsys.readouterr().out
    payload = next(p for p in (tmp_path / "ckpt" / "global_step10").iterdir() if p.suffix == ".safetensors")
    flip(payload)
    assert run("verify", saved) == 1
    captured = capsys.readouterr()
    assert payload.name in captured.err and "broken" in captured.err and captured.out == ""
    assert run("verify", saved, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and payload.name in found["problems"][0]
    assert run("info", saved) == 1
    assert "1 problems" in capsys.readouterr().out
    os.truncate(payload, 100)
    assert run("verify", saved) == 1
    assert payload.name in capsys.readouterr().err
    os.unlink(payload.parent / "manifest.json")
    assert run("verify", saved) == 1
    assert "manifest.json" in capsys.readouterr().err


def test_verify_reads_all_of_other_formats(saved, tmp_path, capsys):
    assert run("export", saved, tmp_path / "hf", "--max-shard-size", "100B") == 0
    assert run("verify", tmp_path / "hf") == 0
    assert "no checksums" in capsys.readouterr().out
    assert run("convert", saved, tmp_path / "dcp", "--to", "torch-dcp") == 0
    payload = tmp_path / "dcp" / "__0_0.distcp"
    os.truncate(payload, payload.stat().st_size // 2)
    capsys.readouterr()
    assert run("verify", tmp_path / "dcp") == 1
    assert "__0_0.distcp" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["deepspeed", "deepspeed-universal", "torch-dcp"])
def test_verify_like(saved, tmp_path, capsys, form):
    assert run("convert", saved, tmp_path / "other", "--to", form) == 0
    capsys.readouterr()
    assert run("verify", saved, "--like", tmp_path / "other") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["(deepspeed_c)", f"({form})"]
    assert lines[0].split()[0] == lines[1].split()[0] and len(lines[0].split()[0]) == 16


def test_verify_like_names_the_first_tensor_that_differs(saved, tmp_path, capsys):
    source = adam_checkpoint()
    for name in ("layer.bias", "scale"):
        source.values["exp_avg", name].view(torch.int32).view(-1)[-1] ^= 1
    source.values[BUFFER, "count"] += 1  # does not count
    convert(source, tmp_path / "other", "deepspeed_c")
    assert run("verify", saved, "--like", tmp_path / "other") == 1
    captured = capsys.readouterr()
    first, second = (line.split()[0] for line in captured.out.splitlines())
    assert first != second
    assert captured.err.startswith("first difference: exp_avg of scale: float32 () ")
    assert run("verify", saved, "--like", tmp_path / "other", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [side["fingerprint"] for side in found["compared"]] == [first, second]
    assert found["ok"] is False and found["first_difference"].startswith("exp_avg of scale")
    assert run("export", saved, tmp_path / "hf") == 0
    capsys.readouterr()
    assert run("verify", saved, "--like", tmp_path / "hf") == 1
    assert "param of embed.weight: float32" in (error := capsys.readouterr().err) and " and bfloat16" in error


@pytest.mark.parametrize("form", ["safetensors", "fp32-pt"])
def test_export(saved, tmp_path, capsys, form):
    out = tmp_path / "out"
    assert (
        run("export", saved, out, "--format", form, "--dtype", "fp16", "--exclude-frozen", "--tag", "global_step10")
        == 0
    )
    assert "7 tensors" in capsys.readouterr().out
    got = (
        safetensors.torch.load_file(out / "model.safetensors")
        if form == "safetensors"
        else torch.load(out / "pytorch_model.bin", weights_only=True)
    )
    want = adam_checkpoint().values["master", "layer.weight"].half()
    assert torch.equal(got["layer.weight"], want) and "frozen.weight" not in got


def test_convert(saved, tmp_path, capsys):
    assert (
        run("convert", saved, tmp_path / "ds", "--to", "deepspeed", "--world-size", 3, "--stage", 2, "--new-tag", "t")
        == 0
    )
    assert "ds/t: deepspeed, from" in capsys.readouterr().out
    with open_checkpoint(tmp_path / "ds") as source:
        assert (source.topology.world_size, source.topology.stage) == (3, 2)
    assert run("convert", tmp_path / "ds", tmp_path / "back", "--from", "deepspeed", "--to", "deepspeed_c") == 0
    assert run("verify", tmp_path / "back") == 0
    assert (tmp_path / "back" / "zero_to_fp32.py").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["info", "nowhere"], "nowhere: does not exist"),
        (["verify", "nowhere"], "nowhere: does not exist"),
        (["export", "CKPT", "out", "--max-shard-size", "big"], "'big' is no size"),
        (["export", "CKPT", "out", "--from", "huggingface"], "is a checkpoint of format deepspeed_c, not huggingface"),
        (["convert", "CKPT", "out", "--to", "torch-dcp", "--stage", "1"], "has no stage"),
        (["info", "CKPT", "--tag", "no"], "there are global_step10"),
        (["convert", "CKPT", "out", "--to", "gguf"], "invalid choice"),
        (["info"], "PATH"),
        ([], "info | verify | export | convert"),
    ],
)
def test_wrong_calls_are_exit_code_2(saved, tmp_path, capsys, monkeypatch, words, text):
    monkeypatch.chdir(tmp_path)
    assert run(*[saved if word == "CKPT" else word for word in words]) == 2
    assert text in capsys.readouterr().err
    assert not os.path.exists("out")


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234567, "1.23 MB"), (999999, "1 MB"), (5 * 10**12, "5 TB"),
        (10**19, "1e+04 PB"),
    ],
)  # fmt: skip
def test_bytes_are_shown(n, text):
    assert _human(n) == text


def test_help_names_it_all():
    done = fresh.run(["-m", "deepspeed_c", "checkpoint", "--help"])
    assert done.returncode == 0, done.stderr
    for word in ("info", "verify", "export", "convert"):
        assert word in done.stdout
    assert Target().max_shard_size == "5GB"
