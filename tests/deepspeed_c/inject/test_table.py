"""Families with adapters, generation and kernels: cut models give the same results as one process."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ModelError
from deepspeed_c.inject import cut_model
from deepspeed_c.inject.kernels import inject_kernels
from tests.cells import every
from tests.deepspeed_c.inject.families import FAMILIES, PLANNED, feed, make
from tests.ranks import run_ranks

# Without encoders, which generate nothing, and without T5 and CLIP, which are not causal. test_families.py covers them.
CAUSAL = [family for family in (*FAMILIES, *PLANNED) if family not in ("bert", "distilbert", "t5", "clip")]

TARGETS = {
    "mixtral": ["q_proj", "k_proj", "o_proj"],
    "llama4": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "deepseek_v3": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
"""The families with experts. peft's "all-linear" adapts their parameters and not layers. In Llama 4 it adapts the
router, which returns two tensors; peft's own forward fails on them, in one process too."""
REFUSED = {"mixtral": "ParamWrapper", "deepseek_v3": "ParamWrapper"}
"""A part of the ModelError for "all-linear"."""


def adapted(family: str, targets: str | list[str]) -> tuple[torch.nn.Module, torch.nn.Module]:
    from peft import LoraConfig, get_peft_model

    pair = []
    for _ in range(2):
        model = make(family).train()
        torch.manual_seed(5)
        options = {"r": 3, "target_modules": targets, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        pair.append(get_peft_model(model, LoraConfig(**options)).train())
    return pair[0], pair[1]


def row(rank: int, world: int, family: str) -> dict[str, float]:
    batch, errors = feed(family), {}
    if family == "llama4":
        whole, cut = adapted(family, "all-linear")
        cut_model(cut, TensorParallel(), Collectives())
        for model in (whole, cut):
            with pytest.raises(AttributeError, match="'tuple' object has no attribute 'dtype'"):
                model(**batch)
    if family in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[family]):
            cut_model(adapted(family, "all-linear")[1], TensorParallel(), Collectives())
    errors |= errors_of_adapters(*adapted(family, TARGETS.get(family, "all-linear")), batch)
    plain, cut = make(family).eval(), make(family).eval()
    cut_model(cut, TensorParallel(), Collectives())
    ids = batch["input_ids"]
    for how in ({"do_sample": False}, {"do_sample": True}):
        torch.manual_seed(3)
        expected = plain.generate(ids, max_new_tokens=4, **how)
        torch.manual_seed(3 + rank)
        got = cut.generate(ids, max_new_tokens=4, **how)
        errors[f"tokens {how}"] = 0.0 if torch.equal(expected, got) else 1.0
    inject_kernels(cut)
    with torch.no_grad():
        errors["kernels"] = (plain(input_ids=ids).logits - cut(input_ids=ids).logits).abs().max().item()
    return {name: error for name, error in errors.items() if not error < 1e-4}


def errors_of_adapters(whole: torch.nn.Module, cut: torch.nn.Module, batch: dict) -> dict[str, float]:
    errors = {}
    cut_model(cut, TensorParallel(), Collectives())
    a, b = whole(**batch), cut(**batch)
    a.loss.backward(), b.loss.backward()
    errors["loss of adapters"] = (a.loss - b.loss).abs().item()
    scale = max(p.grad.abs().max().item() for p in whole.parameters() if p.grad is not None)
    for name, param in cut.named_parameters():
        grad = whole.get_parameter(name).grad
        if param.requires_grad and grad is not None:
            grad = param.tp_cut.take(grad) if param.tensor_model_parallel else grad
            if grad.numel():
                errors[name] = (param.grad - grad).abs().max().item() / scale
    return errors


@pytest.mark.parametrize("family", every(2, CAUSAL))
def test_adapters_generation_and_kernels(family: str) -> None:
    for errors in run_ranks(2, row, family, preload="tests.deepspeed_c.inject.preload"):
        assert not errors, errors
