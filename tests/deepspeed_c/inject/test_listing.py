"""The list of cuts is data: its lines are those of the table in docs/concepts/tensor-parallel.md, and the model stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ModelError
from deepspeed_c.inject.checking import check_cuts
from deepspeed_c.inject.listing import CutRequest, list_cuts
from deepspeed_c.inject.plan import RankPlace

N_RANKS = 3
HEADS, KEY_HEADS, HEAD, WIDTH, INNER, WORDS = 8, 4, 6, 48, 70, 101


def llama(**more: Any) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        vocab_size=WORDS,
        num_hidden_layers=2,
        **more,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def state_of(model: torch.nn.Module) -> list[Any]:
    """All that a cut changes: classes, attributes and hooks of modules, shapes and marks of parameters."""
    modules = [
        (name, type(module), {key: repr(value) for key, value in vars(module).items() if key != "_modules"})
        for name, module in model.named_modules()
    ]
    return [modules, [(name, param.shape, dict(vars(param))) for name, param in model.named_parameters()]]


def test_a_list_has_a_line_for_each_matrix_and_the_model_stays() -> None:
    model = llama()
    before = state_of(model)
    listed = list_cuts(model, RankPlace(1, N_RANKS), CutRequest(TensorParallel()))
    parts = check_cuts(listed)
    got = {line.name: line.dim for line in listed.params}
    dims = {"embed_tokens": 0, "lm_head": 0, "o_proj": 1, "down_proj": 1}
    dims |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
    matrices = [name for name, param in model.named_parameters() if param.dim() > 1]
    expected = {name: dims[name.split(".")[-2]] for name in matrices}
    print(got, expected, sep="\n")
    assert got == expected
    # 4 key heads over 3 ranks are 2, 1 and 1; each has 2 query heads. 70 columns are 24, 23 and 23; 101 words 34, 34, 33.
    sizes = {"q_proj": 2 * HEAD, "k_proj": HEAD, "v_proj": HEAD, "o_proj": 2 * HEAD}
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 23) | {"embed_tokens": 34, "lm_head": 34}
    names = {name: param for param, name in listed.names.items()}
    held = {name: parts.cuts[names[name]][0].local_shape[dim] for name, dim in got.items()}
    assert held == {name: sizes[name.split(".")[-2]] for name in matrices}
    assert state_of(model) == before


def test_a_list_that_does_not_fit_is_made_and_refused_when_it_is_checked() -> None:
    model = llama()
    before = state_of(model)
    tied = model.model.layers[0].mlp
    tied.down_proj.weight = torch.nn.Parameter(torch.empty(INNER, WIDTH, device="meta"))
    tied.gate_proj.weight = tied.down_proj.weight  # its rows are cut by one rule, its columns by the other
    listed = list_cuts(model, RankPlace(0, N_RANKS), CutRequest(TensorParallel()))
    with pytest.raises(ModelError, match="two rules cut it in two ways") as caught:
        check_cuts(listed)
    assert "model.layers.0.mlp.down_proj.weight" in str(caught.value)
    assert [row[:2] for row in state_of(model)[0]] == [row[:2] for row in before[0]]
