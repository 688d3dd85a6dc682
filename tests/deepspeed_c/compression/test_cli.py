"""``deepspeed_c compress``: bytes against the exported files and errors against the formula, for Hugging Face folders and
for checkpoints of an engine; wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from deepspeed_c.compression.cli import main as compress
from deepspeed_c.launcher.main import main
from tests.deepspeed_c.compression.oracle import Model, rounded
from tests.deepspeed_c.compression.test_packed import config_of, make_llama
from tests.ranks import run_ranks
from tests.training import engine_of

SAFETENSORS = pytest.importorskip("safetensors.torch")


def written(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **config}))
    return str(path)


def report(folder: Path, *words: str) -> dict[str, Any]:
    file = folder / "report.json"
    assert main(["compress", *words, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def errors(weight: torch.Tensor, bits: int, n_groups: int, is_symmetric: bool = True) -> tuple[float, float]:
    """(largest error over largest magnitude, norm of the error over norm of the weight), by the formula."""
    difference = (rounded(weight.view(n_groups, -1), bits, is_symmetric).view(weight.shape) - weight).double()
    return (difference.abs().max() / weight.abs().max()).item(), (difference.norm() / weight.double().norm()).item()


@pytest.mark.parametrize(("bits", "n_groups", "kind"), [(8, 32, "symmetric"), (4, 256, "asymmetric")])
def test_a_report_says_what_an_export_writes(bits: int, n_groups: int, kind: str, tmp_path: Path, capsys: Any) -> None:
    model, folder, out = make_llama(), tmp_path / "model", tmp_path / "out"
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    options = {"quantization_type": kind, "schedule_offset": 100}
    config = written(tmp_path, config_of(bits, n_groups, ("mlp", "embed_tokens"), **options))
    picture = tmp_path / "report.svg"
    found = report(tmp_path, "report", str(folder), "--config", config, "--plot", str(picture))
    assert found == report(tmp_path, "export", str(folder), str(out), "--config", config)
    assert "model.layers.1.mlp.up_proj" in capsys.readouterr().out
    assert len(ElementTree.parse(picture).findall("{*}rect")) == 1 + 2 * len(found["layers"]) == 15
    files = SAFETENSORS.load_file(out / "model.safetensors")
    assert (out / "tokenizer.json").exists() and json.loads((out / "config.json").read_text())["quantization_config"]
    weights = model.state_dict()
    assert found["bytes_before"] == sum(weight.nbytes for weight in weights.values())
    assert found["bytes_after"] == sum(tensor.nbytes for tensor in files.values()) < found["bytes_before"]
    for layer in found["layers"]:
        name, is_table = layer["name"], "embed" in layer["name"]
        own = sum(tensor.nbytes for key, tensor in files.items() if key.startswith(f"{name}.weight"))
        assert own == layer["bytes_after"], layer
        n_own, weight = 128 if is_table else n_groups, weights[f"{name}.weight"]
        assert layer["bits"] == bits and layer["group"] == weight.numel() // n_own
        wanted = errors(weight, bits, n_own, kind == "symmetric")
        assert (layer["max_error"], layer["rms_error"]) == pytest.approx(wanted, rel=1e-5), (name, wanted)


def save(rank: int, world: int, folder: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    engine = engine_of(Model(), config)
    engine.save_checkpoint(folder)
    engine.destroy()


def test_a_checkpoint_of_an_engine_needs_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    run_ranks(2, save, str(folder))
    config = written(tmp_path, config_of(8, 4, ("mid", "table")))
    found = report(tmp_path, "report", str(folder), "--config", config)
    layers, model = {layer["name"]: layer for layer in found["layers"]}, Model()
    assert layers.keys() == {"table", "mid"}
    packed = 8 * 8 + 8 * 4 + 16  # codes; the scale of two rows, once for each row; the shape
    assert layers["mid"]["bytes_after"] == packed and layers["mid"]["group"] == 16
    assert layers["table"]["bytes_after"] == layers["table"]["bytes_before"] == 12 * 8 * 4  # the head shares it
    wanted = errors(model.mid.weight.detach(), 8, 4)
    assert (layers["mid"]["max_error"], layers["mid"]["rms_error"]) == pytest.approx(wanted, rel=1e-5)


def test_pruned_layers_show_what_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_llama().save_pretrained(folder)
    groups = {"up": {"params": {"dense_ratio": 0.5}, "modules": ["up_proj"], "related_modules": [["down_proj"]]}}
    rows = {"shared_parameters": {"enabled": True, "method": "topk"}, "different_groups": groups}
    heads = {
        "shared_parameters": {"enabled": True, "num_heads": 2},
        "different_groups": {
            "all": {
                "params": {"dense_ratio": 0.5},
                "modules": ["o_proj"],
                "related_modules": [["q_proj", "k_proj", "v_proj"]],
            }
        },
    }
    config = written(tmp_path, {"compression_training": {"row_pruning": rows, "head_pruning": heads}})
    found = report(tmp_path, "report", str(folder), "--config", config)
    halves = {layer["name"].rpartition(".")[2]: layer for layer in found["layers"]}
    assert halves.keys() == {"up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(layer["bytes_after"] * 2 == layer["bytes_before"] and layer["kept"] == 0.5 for layer in halves.values())
    assert halves["down_proj"]["techniques"] == ["related"] and halves["up_proj"]["rms_error"] is None
    assert main(["compress", "export", str(folder), str(tmp_path / "out"), "--config", config]) == 2


def save_tokenizer(folder: Path, n_words: int) -> None:
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(n_words)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def loss_of(model: Any, ids: torch.Tensor, context: int) -> float:
    """transformers' own loss of windows, weighted by their tokens."""
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(ids) - 1, context - 1):
            window = ids[None, first : first + context]
            total += model(input_ids=window, labels=window).loss.item() * (window.shape[1] - 1)
    return total / (len(ids) - 1)


@pytest.mark.parametrize("context", [2, 13, 32])
def test_a_text_shows_the_loss_before_and_after(context: int, tmp_path: Path, capsys: Any) -> None:
    folder, out, picture = tmp_path / "model", tmp_path / "out", tmp_path / "report.svg"
    model = make_llama().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(8)  # so that 4 bits change the loss
    model.save_pretrained(folder)
    save_tokenizer(folder, 60)
    ids = torch.randint(60, (61,), generator=torch.Generator().manual_seed(1))
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{i}" for i in ids.tolist()))
    config = written(tmp_path, config_of(4, 32, ("mlp", "embed_tokens")))
    words = ("--config", config, "--text", str(text), "--context", str(context))
    shown = report(tmp_path, "report", str(folder), *words, "--plot", str(picture))
    assert "nats per token" in capsys.readouterr().out and "nats per token" in picture.read_text()
    found = report(tmp_path, "export", str(folder), str(out), *words)
    before = loss_of(model, ids, context)
    state = model.state_dict()
    for layer in found["layers"]:
        weight = state[f"{layer['name']}.weight"]
        weight.copy_(rounded(weight.view(-1, layer["group"]), 4, True).view(weight.shape))
    after = loss_of(model, ids, context)
    assert abs(before - after) > 1e-3, (before, after)
    for figures in (shown, found):
        assert (figures["loss_before"], figures["loss_after"]) == pytest.approx((before, after), rel=1e-5)
        assert figures["milliseconds_before"] > 0 and figures["milliseconds_after"] > 0


def test_models_that_are_not_packed(tmp_path: Path, capsys: Any) -> None:
    folder, text = tmp_path / "model", tmp_path / "text"
    make_llama().save_pretrained(folder)
    save_tokenizer(folder, 10)
    text.write_text("w1 w2 w3")
    params = {"enabled": True, "quantization_type": "symmetric", "range_calibration": "dynamic", "schedule_offset": 9}
    groups = {"all": {"params": {"bits": 8}, "modules": ["q_proj"]}}
    section = config_of(8, 32, ("q_proj",))["compression_training"]
    section["activation_quantization"] = {"shared_parameters": params, "different_groups": groups}
    config = written(tmp_path, {"compression_training": section})
    found = report(tmp_path, "report", str(folder), "--config", config, "--text", str(text))
    assert found["loss_after"] > 0 and "not packed" in capsys.readouterr().err
    # A gated MLP multiplies the outputs of two layers, and one of them gets smaller.
    groups = {"up": {"params": {"dense_ratio": 0.5}, "modules": ["up_proj"], "related_modules": [["down_proj"]]}}
    rows = {"shared_parameters": {"enabled": True, "method": "l1"}, "different_groups": groups}
    config = written(tmp_path, {"compression_training": {"row_pruning": rows}})
    refused(
        capsys, ["report", str(folder), "--config", config, "--text", str(text)], "LlamaForCausalLM", "related_modules"
    )


def refused(capsys: Any, words: list[str], *texts: str) -> None:
    assert main(["compress", *words]) == 2
    said = capsys.readouterr().err
    assert all(text in said for text in texts), said


def test_wrong_input(tmp_path: Path, capsys: Any) -> None:
    folder, out = tmp_path / "model", str(tmp_path / "out")
    model = make_llama()
    model.save_pretrained(folder)
    right = written(tmp_path, config_of(8, 32, ("mlp",)))
    nothing = tmp_path / "nothing.json"
    nothing.write_text('{"train_micro_batch_size_per_gpu": 1}')
    refused(capsys, ["report", str(folder), "--config", str(nothing)], "compression_training", '"enabled": true')
    refused(capsys, ["report", str(tmp_path / "absent"), "--config", right], "absent", "does not exist")
    refused(capsys, ["export", str(tmp_path / "absent"), out, "--config", right], "absent", "config.json")
    refused(capsys, ["export", str(folder), str(folder), "--config", right], str(folder), "new folder")
    refused(capsys, ["report", str(folder), "--config", right, "--plot", f"{tmp_path}/no/a.svg"], "no/a.svg")
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **config_of(8, 32, ("up_prj",))}))
    refused(capsys, ["report", str(folder), "--config", str(wrong)], "up_prj", "up_proj")
    weights = SAFETENSORS.load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    SAFETENSORS.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(capsys, ["report", str(folder), "--config", right], "layers.0.mlp.up_proj.weight", "NaN")
    del weights["model.layers.1.mlp.up_proj.weight"]
    SAFETENSORS.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(capsys, ["export", str(folder), out, "--config", right], "lack", "layers.1.mlp.up_proj.weight")
    assert not Path(out).exists()


def test_names_say_which_matrices_are_embeddings(tmp_path: Path) -> None:
    """A group for each row of an embedding, and layers below a layer."""
    tensors = {"wte.weight": torch.randn(6, 4), "a.weight": torch.randn(4, 4), "a.b.weight": torch.randn(4, 4)}
    file = tmp_path / "weights.safetensors"
    SAFETENSORS.save_file(
        {**tensors, "norm.weight": torch.ones(4), "ids.weight": torch.ones(2, 2, dtype=torch.int64)}, file
    )
    config, found = written(tmp_path, config_of(4, 2)), tmp_path / "found.json"
    assert compress(["report", str(file), "--config", config, "--json", str(found)]) == 0
    groups = {layer["name"]: layer["group"] for layer in json.loads(found.read_text())["layers"]}
    assert groups == {"wte": 4, "a": 8, "a.b": 8}


def test_wrong_texts(tmp_path: Path, capsys: Any) -> None:
    folder, text, empty = tmp_path / "model", tmp_path / "text", tmp_path / "empty"
    make_llama().save_pretrained(folder)
    words = ["report", str(folder), "--config", written(tmp_path, config_of(8, 32, ("mlp",)))]
    text.write_text("w1 w2 w200")
    empty.write_text("w1")
    refused(capsys, [*words, "--text", str(text)], str(folder), "tokenizer")
    save_tokenizer(folder, 300)
    refused(capsys, [*words, "--text", str(tmp_path / "absent")], "absent", "cannot be read")
    refused(capsys, [*words, "--text", str(empty)], "empty", "1 token(s)")
    refused(capsys, [*words, "--text", str(text)], "token 200", "128")
    refused(capsys, [*words, "--text", str(text), "--context", "1"], "--context", "from 2")
    refused(capsys, [*words, "--text", str(text), "--context", "100000"], "--context", "100000")
    weights = folder / "model.safetensors"
    refused(capsys, ["report", str(weights), *words[2:], "--text", str(text)], "--text", "Hugging Face folder")
