"""Users' mistakes when the configuration or an mpu cuts a model: errors name the mistake, and nothing is changed."""

from __future__ import annotations

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import CommError, ConfigError, DeepSpeedCError, ModelError
from tests.deepspeed_c.inject.families import make
from tests.deepspeed_c.zero.megatron import Mpu
from tests.ranks import run_ranks
from tests.training import engine_of

BASE = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
ROW = {"patterns": [r".*\.o_proj\.weight"], "partition_type": "row"}
QKV = {"patterns": [r".*\.q_proj\.weight"], "shape": [[16, 16, 20], -1], "partition_dim": 0}
# Mistake -> (the section, the error, a part of its message).
WRONG = {
    "two sizes": (
        {"autotp_size": 2, "partition_config": {"tp_size": 3, "layer_specs": [ROW]}},
        *(ConfigError, ("tp_size is 3", "2", "tensor_parallel")),
    ),
    "parts that do not sum": (
        {"autotp_size": 2, "partition_config": {"layer_specs": [QKV]}},
        *(ModelError, ("make 52", "has 48", "q_proj.weight")),
    ),
    "a pattern that matches nothing": (
        {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": [r".*\.qq_proj\.weight"]}]}},
        *(ConfigError, ("qq_proj", "matches none", "layer_specs")),
    ),
    "no such preset": ({"autotp_size": 2, "preset_model": "lama"}, ConfigError, ("no preset 'lama'", "preset_model")),
}


def start(rank: int, world: int, names: list[str]) -> list[tuple[str, str, bool]]:
    found = []
    for name in names:
        section, kind, _ = WRONG[name]
        model = make("llama")
        before = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
        try:
            deepspeed_c.initialize(model=model, config={**BASE, "tensor_parallel": section})
            text = "nothing was said"
        except DeepSpeedCError as error:
            text = str(error) if isinstance(error, kind) else repr(error)
        same = all(
            value.data_ptr() == before[key][0] and torch.equal(value, before[key][1])
            for key, value in model.state_dict().items()
        )
        found.append((name, text, same and type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear))
    return found


HEADS = {
    "none": ({}, "names no output layer"),
    "skipped": (
        {"patterns": [r"lm_head\.weight"], "partition_type": "skip"},
        "lm_head.weight stays whole (partition_config leaves",
    ),
    "by its inputs": (
        {"patterns": [r"lm_head\.weight"], "partition_type": "row"},
        "cuts the output layer lm_head.weight along its inputs",
    ),
}


def ask_for_a_cut_head(rank: int, world: int, name: str) -> tuple[str, bool]:
    spec = HEADS[name][0] if name in HEADS else {}
    model = make("llama")
    section = {"autotp_size": 2, "vocab_parallel_lm_head": True}
    if name == "none":
        model = model.model  # transformers' LlamaModel has no head
    elif spec:
        section["partition_config"] = {"layer_specs": [spec], "use_default_specs": True}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        engine = engine_of(model, {**BASE, "tensor_parallel": section})
    except ModelError as error:
        same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        return str(error), same
    n_rows = engine.module.lm_head.weight.shape[0]
    engine.destroy()
    return f"{n_rows} rows", True


@pytest.mark.parametrize("name", HEADS)
def test_an_output_layer_that_cannot_be_cut_as_asked(name: str) -> None:
    for text, same in run_ranks(2, ask_for_a_cut_head, name, preload="tests.deepspeed_c.inject.preload"):
        print(text)
        assert HEADS[name][1] in text and "vocab_parallel_lm_head" in text and "Fix: " in text and same, (text, same)


def test_an_output_layer_that_is_cut_as_asked() -> None:
    found = run_ranks(2, ask_for_a_cut_head, "plain", preload="tests.deepspeed_c.inject.preload")
    n_rows = make("llama").lm_head.weight.shape[0]
    assert [text for text, _ in found] == [f"{(n_rows + 1 - rank) // 2} rows" for rank in range(2)], (found, n_rows)


def test_sections_that_do_not_fit() -> None:
    for found in run_ranks(2, start, list(WRONG), preload="tests.deepspeed_c.inject.preload"):
        assert [name for name, _, _ in found] == list(WRONG)
        for name, text, same in found:
            assert all(part in text for part in WRONG[name][2]) and "Fix: " in text and same, (name, text, same)


def start_with(rank: int, world: int, kind: str) -> str:
    model, options, section = make("llama"), {}, {}
    if kind == "world":
        section = {"tensor_parallel": {"autotp_size": 2}}
    else:
        lacks = {
            "rank": ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_group"),
            "data": ("get_data_parallel_world_size", "get_data_parallel_group"),
        }[kind]
        options = {"mpu": Mpu(2, lacks)}
    with pytest.raises(CommError if kind != "world" else ConfigError) as caught:
        deepspeed_c.initialize(model=model, config={**BASE, **section}, **options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), make("llama").parameters(), strict=True))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "world", "parts"),
    [
        ("world", 3, ("3 ranks", "groups of 2", "autotp_size")),
        ("rank", 2, ("get_tensor_model_parallel_rank()", "initialize(mpu=...)", "there are 2 such ranks")),
        ("data", 2, ("get_data_parallel_world_size()", "initialize(mpu=...)")),
    ],
)
def test_a_world_or_an_mpu_that_does_not_fit(kind: str, world: int, parts: tuple[str, ...]) -> None:
    for text in run_ranks(world, start_with, kind, preload="tests.deepspeed_c.inject.preload"):
        assert all(part in text for part in parts) and "Fix: " in text, text
