"""``deepspeed_c inject``: its table matches ``cut_model``, and models that it cannot show give an error with a
message."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.inject import cut_model
from deepspeed_c.launcher.main import main
from tests.deepspeed_c.inject.families import make
from tests.ranks import run_ranks


def folder_of(family: str, at: Path) -> str:
    make(family).config.save_pretrained(at)
    return str(at)


def cut(rank: int, world: int) -> list[tuple[str, list[int]]]:
    model = make("llama_tied_shared")
    cut_model(model, TensorParallel(), Collectives())
    return [(name, list(param.shape)) for name, param in model.named_parameters()]


def test_it_prints_what_each_rank_will_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("llama_tied_shared", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    assert main(["inject", folder, "--tp", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for rank, held in enumerate(run_ranks(2, cut)):
        assert [(row["name"], row["local_shape"]) for row in printed[rank]["parameters"]] == held
    n_elems = sum(param.numel() for param in make("llama_tied_shared").parameters())
    assert printed[1]["logical_elems"] == n_elems and n_elems / 2 < printed[1]["local_elems"] < 0.6 * n_elems
    assert main(["inject", folder, "--tp", "2"]) == 0
    text = capsys.readouterr().out
    assert "policy llama: column queries" in text and text.count(" of 2 holds ") == 2
    assert main(["inject", folder, "--tp", "2", "--rank", "1"]) == 0
    assert capsys.readouterr().out.count(" of 2 holds ") == 1
    # With 7 ranks and 6 query heads a layer stays whole. Its row gives the reason.
    assert main(["inject", folder, "--tp", "7", "--rank", "6"]) == 0
    assert "6 query heads" in capsys.readouterr().out


def test_a_configuration_brings_its_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("llama", tmp_path)
    words = ["inject", folder, "--tp", "2", "--config", str(tmp_path / "ds.json"), "--json"]

    def write(pattern: str) -> None:
        spec = {"patterns": [pattern], "partition_type": "skip"}
        ds_config = {"train_batch_size": 1, "tensor_parallel": {"partition_config": {"layer_specs": [spec]}}}
        (tmp_path / "ds.json").write_text(json.dumps(ds_config))

    write(r".*\.mlp\..*\.weight")
    assert main(words) == 0
    rules = {row["name"]: row["rule"] for row in json.loads(capsys.readouterr().out)[0]["parameters"]}
    assert "partition_config" in next(rule for name, rule in rules.items() if name.endswith("up_proj.weight"))
    assert "policy llama" in next(rule for name, rule in rules.items() if name.endswith("q_proj.weight"))
    write(r".*\.up_proj\.weight")  # 70 columns of one layer are multiplied with 35 of the other
    assert main(words) == 2
    assert "layers.0.mlp" in (said := capsys.readouterr().err) and "35" in said and "70" in said, said


def test_typed_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("llama", tmp_path / "llama")
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "no_such_model"}')
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    odd = tmp_path / "odd"
    odd.mkdir()
    llama = json.loads((tmp_path / "llama" / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**llama, "hidden_size": 50}))
    for words, expected in (
        ([str(tmp_path), "--tp", "2"], "no config.json is there"),
        ([folder, "--tp", "0"], "0 is no number of ranks"),
        ([folder, "--tp", "2", "--rank", "2"], "there is no rank 2 among 2"),
        ([str(unknown), "--tp", "2"], "transformers cannot build it"),
        ([str(broken), "--tp", "2"], "transformers cannot build it"),
        ([str(odd), "--tp", "2"], "not a multiple of the number of attention heads"),
    ):
        assert main(["inject", *words]) == 2
        said = capsys.readouterr().err
        assert expected in said and "Fix: " in said, said
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["inject", folder, "--tp", "2"]) == 2
    assert "pip install transformers" in capsys.readouterr().err
