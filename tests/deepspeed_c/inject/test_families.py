"""Every family is cut over several numbers of ranks. Logits, loss and gradients equal those of transformers' own model
in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import StateError
from deepspeed_c.inject import cut_model
from tests.cells import every
from tests.deepspeed_c.inject.families import FAMILIES, PLANNED, feed, make
from tests.ranks import run_ranks

PRELOAD = "tests.deepspeed_c.inject.preload"


def logits_of(output: Any) -> torch.Tensor:
    return (output.logits if "logits" in output else output.logits_per_text).detach()


def compare(rank: int, world: int, family: str) -> dict[str, Any]:
    whole, cut = make(family).train(), make(family).train()
    if rank:  # initial weights of other ranks than 0 do not matter
        with torch.no_grad():
            for param in cut.parameters():
                param.add_(1.0)
    names = {name: id(param) for name, param in cut.named_parameters()}
    report = cut_model(cut, TensorParallel(), Collectives())
    assert names == {name: id(param) for name, param in cut.named_parameters()}
    batch = feed(family)
    expected, got = whole(**batch), cut(**batch)
    logits, loss = logits_of(expected), expected.loss.detach()
    errors = {"logits": (logits_of(got) - logits).abs().max().item(), "loss": (got.loss.detach() - loss).abs().item()}
    assert logits_of(got).shape == logits.shape
    for _ in range(2):  # two backwards accumulate gradients
        whole(**batch).loss.backward()
        cut(**batch).loss.backward()
    scale = max(param.grad.abs().max().item() for param in whole.parameters() if param.grad is not None)
    grads = dict(whole.named_parameters())
    for name, param in cut.named_parameters():
        grad = grads[name].grad
        if grad is None:
            assert param.grad is None or not param.grad.any(), name
            continue
        if param.tensor_model_parallel:
            assert param.shape == param.tp_cut.local_shape != grad.shape
            grad = param.tp_cut.take(grad)
        if grad.numel():
            errors[name] = (param.grad - grad).abs().max().item() / scale
    whole.eval(), cut.eval()
    with torch.no_grad():
        expected, got = whole(**batch), cut(**batch)
    errors["logits without labels"] = (logits_of(got) - logits_of(expected)).abs().max().item()
    n_cut = sum(row.is_cut for row in report.rows)
    return {
        "worst": max(errors, key=errors.get),
        "error": max(errors.values()),
        "n_cut": n_cut,
        "share": report.local_elems / report.logical_elems,
    }


# These families are cut over 2, 3 and 4 ranks, the others over one or two of these numbers. 6 heads over 4 ranks are
# 2, 2, 1 and 1.
EIGHT = ("llama", "qwen3", "mixtral", "deepseek_v3", "phi3", "gpt2", "bloom", "bert")
CASES = {(2 + i % 2, family) for i, family in enumerate((*FAMILIES, *PLANNED))}
CASES |= {(2 + (i + 1) % 2, family) for i, family in enumerate(FAMILIES[:8])}
CASES |= {(world, family) for world in (2, 3, 4) for family in EIGHT} | {(4, "llama_tied_shared"), (4, "falcon")}


@pytest.mark.parametrize(("world", "family"), every(2, sorted(CASES)))
def test_a_cut_model_is_the_whole_one(world: int, family: str) -> None:
    for result in run_ranks(world, compare, family, preload=PRELOAD):
        assert result["error"] < 1e-5, result
        assert result["n_cut"] >= 7 and result["share"] < 0.5 + 0.5 / world, result


def copies_agree(rank: int, world: int) -> list[tuple]:
    cut = make("llama_tied_shared")
    cut_model(cut, TensorParallel(), Collectives())
    cut(**feed("llama")).loss.backward()
    return [
        (name, param.detach().numpy().tobytes(), param.grad.numpy().tobytes())
        for name, param in cut.named_parameters()
        if not param.tensor_model_parallel
    ]


def test_whole_parameters_and_shared_key_heads_have_the_same_bits_on_all_ranks() -> None:
    first, *others = run_ranks(3, copies_agree, preload=PRELOAD)
    assert len(first) > 8 and any("k_proj" in name for name, *_ in first)
    assert all(other == first for other in others)


def shared_in_part(rank: int, world: int) -> tuple:
    """A model with 2 key heads is cut over 3 ranks, so two ranks share a key head."""
    import transformers

    model = make("llama")
    config = model.config
    config.num_attention_heads, config.num_key_value_heads = 8, 2
    torch.manual_seed(1)
    whole = transformers.LlamaForCausalLM(config)
    torch.manual_seed(1)
    cut = transformers.LlamaForCausalLM(config)
    cut_model(cut, TensorParallel(), Collectives())
    batch = feed("llama")
    whole(**batch).loss.backward()
    cut(**batch).loss.backward()
    key = "model.layers.1.self_attn.k_proj.weight"
    param, grad = cut.get_parameter(key), whole.get_parameter(key).grad
    return (
        param.tp_cut.copies,
        param.tp_cut.n_copies,
        (param.tp_cut.take(grad) - param.grad).abs().max().item(),
        param.grad.sum().item(),
    )


def test_ranks_that_share_a_key_head_have_its_whole_gradient() -> None:
    a, b, c = run_ranks(3, shared_in_part, preload=PRELOAD)
    assert a[:2] == b[:2] == ((0, 1), 2) and c[:2] == ((2,), 1)
    assert max(a[2], b[2], c[2]) < 1e-6 and a[3] == b[3]


def read_and_generate(rank: int, world: int) -> tuple:
    whole, cut = make("llama").train(), make("llama").train()
    cut_model(cut, TensorParallel(), Collectives())
    ids = feed("llama")["input_ids"]
    output = cut(input_ids=ids, labels=ids)
    shape = tuple(output.logits.shape)
    tokens = output.logits.argmax(-1)
    same = bool((tokens == whole(input_ids=ids).logits.argmax(-1)).all())
    output.loss.backward()
    try:
        output.logits.argmax(-1)
        refused = "nothing"
    except StateError as error:
        refused = str(error)
    generated = cut.eval().generate(ids, max_new_tokens=5, do_sample=False)
    return (
        shape,
        same,
        refused,
        bool((generated == whole.eval().generate(ids, max_new_tokens=5, do_sample=False)).all()),
    )


def test_logits_are_whole_when_read_and_tokens_are_the_whole_models() -> None:
    for shape, same, refused, generated in run_ranks(2, read_and_generate, preload=PRELOAD):
        assert shape == (2, 9, 101) and same and generated
        assert "gradient has taken the place" in refused


def draw(rank: int, world: int) -> tuple:
    import transformers

    config = make("bert").config
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.5
    torch.manual_seed(4)
    cut = transformers.BertForMaskedLM(config).train()
    cut_model(cut, TensorParallel(), Collectives())
    torch.manual_seed(9)
    masks: list[torch.Tensor] = []
    for module in cut.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, args, output: masks.append((output == 0).clone()))
    cut.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda *_: masks.append(torch.rand(4)))
    output = cut(**feed("bert"))
    output.loss.backward()
    return [mask.numpy().tobytes() for mask in masks], torch.rand(4).tolist(), output.logits.detach().numpy().tobytes()


def test_dropout_is_alike_outside_the_cut_region_and_apart_inside() -> None:
    first, second = run_ranks(2, draw, preload=PRELOAD)
    differ = [a != b for a, b in zip(first[0], second[0], strict=True)]
    assert differ.count(True) == 1  # only the numbers drawn after the query projection differ
    assert first[1:] == second[1:]
