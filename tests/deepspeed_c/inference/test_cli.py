"""``deepspeed_c generate``: its tokens are those of transformers' own generate, on one rank and on two, and bad input."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c.compression.compress import init_compression, redundancy_clean
from deepspeed_c.launcher.main import main
from tests.deepspeed_c.inject.families import VOCAB, make
from tests.ranks import run_ranks

PRELOAD = "tests.deepspeed_c.inject.preload"
IDS = [5, 17, 3, 99, 40]


def save(family: str, folder: Path, *, words: bool = False) -> str:
    model = make(family)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)  # the likeliest token is far from the second
    model.save_pretrained(folder)
    if words:
        import tokenizers
        import transformers

        vocab = {"<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(VOCAB) if i not in (1, 2)}}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="w0"
        ).save_pretrained(folder)
    return str(folder)


def by_transformers(folder: str, **how: Any) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([IDS])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(IDS) :].tolist()


def printed(rank: int, world: int, words: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["generate", *words, "--tp", str(world)])
    return code, out.getvalue()


def as_ids(ids: list[int]) -> str:
    return ",".join(map(str, ids)) + "\n"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rank_0_prints_what_transformers_generates(family: str, world: int, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    words = [folder, "--ids", ",".join(map(str, IDS)), "--max-new-tokens", "9", "--dtype", "fp32"]
    expected = as_ids(by_transformers(folder, max_new_tokens=9, do_sample=False))
    for more in ([], ["--kernels"], ["--stream"]):
        results = run_ranks(world, printed, [*words, *more], preload=PRELOAD)
        assert results == [(0, expected), *[(0, "")] * (world - 1)], (results, expected)


def test_samples_follow_the_seed(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    words = [folder, "--ids", ",".join(map(str, IDS)), "--max-new-tokens", "9", "--dtype", "fp32"]
    how = ["--sample", "--temperature", "3", "--top-k", "50", "--top-p", "0.99", "--seed", "11"]
    torch.manual_seed(11)
    expected = by_transformers(folder, max_new_tokens=9, do_sample=True, temperature=3.0, top_k=50, top_p=0.99)
    torch.manual_seed(12)
    assert expected != by_transformers(folder, max_new_tokens=9, do_sample=True, temperature=3.0, top_k=50, top_p=0.99)
    ((_, found),) = run_ranks(1, printed, [*words, *how], preload=PRELOAD)
    assert found == as_ids(expected), (found, expected)


def test_text_goes_through_the_tokenizer(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, words=True)
    words = [folder, "--prompt", " ".join(f"w{i}" for i in IDS), "--max-new-tokens", "6", "--dtype", "fp32"]
    new = by_transformers(folder, max_new_tokens=6, do_sample=False)
    expected = " ".join(f"w{i}" for i in new if i not in (1, 2)) + "\n"
    for more in ([], ["--stream"]):
        ((_, found),) = run_ranks(1, printed, [*words, *more], preload=PRELOAD)
        assert found == expected, (found, expected)


PACKING = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_weight_in_forward": True, "quantize_groups": 96},
        "different_groups": {
            "bytes": {"params": {"target_bits": 8}, "modules": ["q_proj", "k_proj"]},
            "halves": {"params": {"target_bits": 4}, "modules": ["v_proj", "o_proj"]},
        },
    }
}


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_packed_layers_are_read(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokens are those of a folder with the rounded weights as floats."""
    import transformers

    save("llama", tmp_path / "trained")
    PACKING["weight_quantization"]["shared_parameters"]["quantization_type"] = kind
    config = {"compression_training": PACKING}
    for name, pack in (("rounded", False), ("packed", True), ("bytes", "int-quantized")):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
        redundancy_clean(init_compression(model, config), config, pack=pack).save_pretrained(tmp_path / name)
    expected = as_ids(by_transformers(str(tmp_path / "rounded"), max_new_tokens=9, do_sample=False))
    packed, words = str(tmp_path / "packed"), ["--ids", ",".join(map(str, IDS)), "--max-new-tokens", "9"]
    for more in ([], ["--kernels"]):
        assert run_ranks(1, printed, [packed, *words, *more], preload=PRELOAD) == [(0, expected)]
    for refused, said in (
        ([packed, *words, "--tp", "2"], "not cut over ranks"),
        ([str(tmp_path / "bytes"), *words], "int-quantized"),
    ):
        code, found = main(["generate", *refused]), capsys.readouterr().err
        assert code == 2 and said in found and "Fix: " in found, found


def test_it_starts_its_own_ranks(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    words = [
        "generate",
        folder,
        "--ids",
        ",".join(map(str, IDS)),
        "--max-new-tokens",
        "5",
        "--dtype",
        "fp32",
        "--tp",
        "2",
    ]
    command, elsewhere = [sys.executable, "-m", "deepspeed_c", *words], tmp_path
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=elsewhere)
    expected = as_ids(by_transformers(folder, max_new_tokens=5, do_sample=False))
    assert (done.returncode, done.stdout) == (0, expected), (done, expected)


def test_typed_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("llama", tmp_path / "llama")
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "no_such_model"}')
    bare = tmp_path / "bare"
    bare.mkdir()
    read = json.loads((tmp_path / "llama" / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**read, "architectures": ["LlamaModel"]}))
    for words, expected in (
        ([str(tmp_path / "nowhere"), "--ids", "1"], "there is no such folder"),
        ([str(tmp_path), "--ids", "1"], "no config.json is there"),
        ([str(unknown), "--ids", "1"], "transformers cannot build it"),
        ([str(bare), "--ids", "1"], "LlamaModel does not generate"),
        ([folder, "--prompt", "a word"], "--ids 1,2,3"),
        ([folder], "neither --prompt nor --ids"),
        ([folder, "--prompt", "a", "--ids", "1"], "both --prompt and --ids"),
        ([folder, "--ids", "1,x"], "'x' is no token id"),
        ([folder, "--ids", "1,101"], "token 101 is not in the model's vocabulary of 101"),
        (
            [folder, "--ids", "1,2", "--max-new-tokens", "63"],
            "2 token(s); with 63 new ones they exceed the model's 64 positions",
        ),
        ([folder, "--ids", ",".join(["1"] * 64)], "64 token(s); with 1 new ones they exceed"),
        ([folder, "--ids", "1", "--max-new-tokens", "0"], "0 is no number of tokens"),
        ([folder, "--ids", "1", "--tp", "0"], "0 is no number of ranks"),
        ([folder, "--ids", "1", "--tp", "7"], "the model has 6 attention heads, fewer than the 7"),
        ([folder, "--ids", "1", "--top-k", "5"], "no effect without --sample"),
        ([folder, "--ids", "1", "--sample", "--top-p", "1.5"], "1.5 is not in (0, 1]"),
    ):
        assert main(["generate", *words]) == 2, words
        said = capsys.readouterr().err
        assert expected in said and "Fix: " in said, said
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["generate", folder, "--ids", "1"]) == 2
    assert "pip install transformers" in capsys.readouterr().err
