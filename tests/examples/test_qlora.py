"""examples/qlora.py on two ranks: the loss falls, each rank holds half of the codes, and plain peft loads the adapters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import fresh
from tests.hf.stack import PRELOAD, on_ranks

pytest.importorskip("bitsandbytes")
pytest.importorskip("trl")  # the ranks import it

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "qlora.py"
TINY = ["--layers", "1", "--width", "64", "--context", "32", "--lib_bytes", "300000", "--steps", "12", "--lr", "0.02"]


def parameters_of(rank, world, folder):
    """The numbers of elements of quantized and other weights, and of adapters, as plain transformers and peft load them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=quantization)
    codes = [p.quant_state for p in base.parameters() if type(p).__name__ == "Params4bit"]
    others = sum(p.numel() for p in base.parameters() if type(p).__name__ != "Params4bit")
    model = PeftModel.from_pretrained(base, folder / "adapter")
    is_trained = [p.abs().max().item() > 0 for name, p in model.named_parameters() if "lora_B" in name]
    return sum(state.shape.numel() for state in codes), sum(state.absmax.numel() for state in codes), others, is_trained


def test_it_trains_adapters_beside_shares_of_codes(tmp_path):
    done = fresh.run_ranks_of(2, [SCRIPT, *TINY, "--out", tmp_path], cwd=tmp_path, preload=PRELOAD, is_told=True)
    said = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), said
    before, after = map(float, re.search(r"loss ([\d.]+) .* beginning, ([\d.]+) at the end", done[0].stdout).groups())
    assert 5 < before < 6 and after < before - 0.3
    n_codes, n_scales, n_others, is_trained = on_ranks(1, parameters_of, tmp_path)[0]
    assert is_trained == [True] * 7
    for rank, program in enumerate(done):
        held, whole = re.search(rf"rank {rank} holds ([\d,]+) of the base's ([\d,]+) bytes", program.stdout).groups()
        assert int(whole.replace(",", "")) == n_codes / 2 + 4 * n_others + n_scales
        assert int(held.replace(",", "")) == n_codes / 4 + 2 * n_others + n_scales
