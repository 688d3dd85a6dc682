"""The trial of a cut: code between cut layers that the trial cannot handle is refused by its name, and scales of cut
values are summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ModelError
from deepspeed_c.inject import cut_model
from deepspeed_c.inject.cutting import preview_cut
from deepspeed_c.logging import logger
from tests.deepspeed_c.inject.families import VOCAB, feed, make
from tests.ranks import run_ranks

PRELOAD = "tests.deepspeed_c.inject.preload"


def stablelm() -> torch.nn.Module:
    import transformers as t

    torch.manual_seed(3)
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
    return t.StableLmForCausalLM(
        t.StableLmConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=64, qk_layernorm=True)
    )


class Between(torch.nn.Module):
    """Replaces the activation of an MLP or the projection of an attention, and makes a change that the trial has to
    notice."""

    def __init__(self, inner: torch.nn.Module, kind: str, size: int) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind
        if kind in ("scale", "columns", "same"):
            self.factor = torch.nn.Parameter(torch.full((size,) if kind == "columns" else (1,), 1.5))
        if kind == "buffer":
            self.register_buffer("factor", torch.linspace(1, 2, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.kind == "scan":
            for _ in range(10**7):  # takes minutes
                y = y + 0
            return y
        if self.kind == "mean":
            return y - y.mean(-1, keepdim=True)
        return y * self.factor


def changed(kind: str, place: str) -> torch.nn.Module:
    """Llama with a ``Between`` in the second of its two layers."""
    model = make("llama")
    layer = model.model.layers[1]
    if place == "act_fn":
        layer.mlp.act_fn = Between(layer.mlp.act_fn, kind, 70)
    elif place == "input_layernorm":
        layer.input_layernorm = Between(layer.input_layernorm, kind, 48)
    return model


REFUSED = {
    "a parameter of columns": ("columns", "act_fn", r"layers\.1\.mlp\.act_fn.*rank 0 of 2 cannot compute"),
    "a buffer of columns": ("buffer", "act_fn", r"layers\.1\.mlp\.act_fn.*rank 0 of 2 cannot compute"),
    "a mean over columns": ("mean", "act_fn", r"layers\.1\.mlp\.down_proj.*another value than the whole layer"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_code_between_cut_layers_that_needs_all_columns_is_refused_by_name(name: str) -> None:
    kind, place, text = REFUSED[name]
    model = changed(kind, place)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match=text):
        preview_cut(model, TensorParallel(), 1, 2)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and all(param.grad is None for param in model.parameters())


def test_the_same_code_outside_a_region_is_cut_as_ever() -> None:
    for kind in ("columns", "buffer", "mean", "same"):
        report = preview_cut(changed(kind, "input_layernorm"), TensorParallel(), 0, 2)
        rules = {row.name: row.rule for row in report.rows}
        assert rules.get("model.layers.1.input_layernorm.factor", "no rule: whole") == "no rule: whole", rules


def refused_norms(rank: int, world: int) -> tuple[str, bool]:
    model = stablelm()
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    try:
        cut_model(model, TensorParallel(), Collectives())
        text = "nothing"
    except ModelError as error:
        text = str(error)
    return text, all(
        param is before[name][0] and torch.equal(param, before[name][1]) for name, param in model.named_parameters()
    )


def test_a_list_of_one_norm_a_head_is_refused_on_all_ranks_and_nothing_changes() -> None:
    (first, kept), (second, kept_too) = run_ranks(2, refused_norms, preload=PRELOAD)
    assert first == second and kept and kept_too, (first, second)
    assert "self_attn.o_proj" in first and "layernorm.norms.0.weight" in first and "Fix: " in first, first


def scaled(rank: int, world: int) -> dict[str, Any]:
    whole, cut = changed("scale", "act_fn"), changed("scale", "act_fn")
    report = cut_model(cut, TensorParallel(), Collectives())
    batch = feed("llama")
    whole(**batch).loss.backward()
    cut(**batch).loss.backward()
    name = "model.layers.1.mlp.act_fn.factor"
    rules = {row.name: row.rule for row in report.rows}
    return {
        "whole": whole.get_parameter(name).grad.item(),
        "cut": cut.get_parameter(name).grad.item(),
        "rule": rules[name],
    }


def test_a_scale_between_cut_layers_gets_the_whole_gradient() -> None:
    for found in run_ranks(3, scaled, preload=PRELOAD):
        assert found["cut"] == pytest.approx(found["whole"], rel=1e-4, abs=1e-9), found
        assert abs(found["whole"]) > 1e-7 and "its gradient is summed" in found["rule"], found


def test_a_policy_that_forgets_a_count_of_heads_is_refused() -> None:
    model = make("gpt2")
    model.config.model_type = "no family of ours"
    attention = {"transformer.h.*.attn.c_attn": "colwise", "transformer.h.*.attn.c_proj": "rowwise"}
    model.tp_plan = attention  # this plan does not cut the thirds of the fused matrix one by one
    with pytest.raises(ModelError, match=r"transformer\.h\.0\.attn.*(cannot compute|another value)"):
        preview_cut(model, TensorParallel(), 0, 2)


def test_a_trial_that_takes_too_long_ends_in_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", said.append)
    report = preview_cut(changed("scan", "act_fn"), TensorParallel(), 0, 2)
    expected = preview_cut(make("llama"), TensorParallel(), 0, 2)
    assert [(row.name, row.local_shape) for row in report.rows] == [
        (row.name, row.local_shape) for row in expected.rows
    ]
    assert len(said) == 1 and "was not finished" in said[0] and "LlamaForCausalLM over 2 ranks" in said[0], said
    # An unfinished trial knows nothing of a parameter between cut layers, so it refuses this one.
    model = changed("scan", "act_fn")
    model.model.layers[1].mlp.act_fn.factor = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.act_fn\.factor.*was not finished"):
        preview_cut(model, TensorParallel(), 0, 2)
