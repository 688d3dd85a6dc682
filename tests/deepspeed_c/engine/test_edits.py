"""engine/edits.py: edits are applied in the order of the table. Undoing them, at the end or after an exception half
way, restores the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.engine import edits
from deepspeed_c.engine.edits import EDITS, Edits, ModelEdit
from deepspeed_c.errors import ConfigError
from deepspeed_c.inject.kernels import inject_kernels
from tests.ranks import on_ranks, run_ranks
from tests.toys import llama

pytest.importorskip("transformers")


def make_llama() -> nn.Module:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    return llama(0, **sizes, use_cache=False)


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"replace_with_kernel_inject": True}, "sequence_parallel": {"tiles": "auto"},
        "activation_checkpointing": {"layers": r"model\.layers\.\d+"}, **more,
    }  # fmt: skip


def face(model: nn.Module) -> dict[str, tuple]:
    """Everything that an edit may change in a model, except the data of its parameters."""
    found = {}
    for name, module in model.named_modules():
        own = vars(module)
        hooks = [len(own[key]) for key in sorted(own) if key.endswith("_hooks")]
        kept = {
            key: value for key, value in own.items() if key in ("forward", "_loss_function", "gradient_checkpointing")
        }
        found[name] = type(module), type(own["_parameters"]), hooks, kept
    return found


def one_step(model: nn.Module, config: dict[str, Any]) -> Any:
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    ids = torch.arange(20).reshape(2, 10)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return engine


def test_the_table_is_in_order():
    names = [edit.name for edit in EDITS]
    assert len(set(names)) == len(names)
    for i, edit in enumerate(EDITS):
        assert set(edit.after) <= set(names[:i]), (edit.name, edit.after, names[:i])
        # Edits that need the layout must come after all edits that run before the layout exists.
        assert all(later.needs_layout for later in EDITS[i:]) or not edit.needs_layout


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(1)
def test_a_closed_engine_leaves_the_model_as_it_was(rank: int, world: int, stage: int) -> None:
    model = make_llama()
    before = face(model)
    engine = one_step(model, config(stage))
    during = face(model)
    assert during != before and "forward" in during["model.layers.0.mlp"][3]
    engine.close()
    after = face(model)
    assert after == before, {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def twice(rank: int, world: int) -> None:
    """A second engine takes over a model with kernels, and makes and undoes edits of its own."""
    model = make_llama()
    before = face(model)
    first = one_step(model, config(1))
    second = one_step(model, config(1))
    assert first._is_closed
    second.close()
    assert face(model) == before


def test_an_engine_that_takes_over_makes_its_own():
    run_ranks(1, twice)


class Breaks(Exception):
    pass


@pytest.mark.parametrize("broken", [edit.name for edit in EDITS])
@on_ranks(1)
def test_an_exception_half_way_undoes_what_was_made(rank: int, world: int, broken: str) -> None:
    def fail(model: nn.Module, context: Any) -> None:
        raise Breaks

    def replaced(edit: ModelEdit) -> ModelEdit:
        return (
            ModelEdit(edit.name, lambda context: True, fail, edit.after, edit.needs_layout)
            if edit.name == broken
            else edit
        )

    model = make_llama()
    before = face(model)
    whole, edits.EDITS = edits.EDITS, tuple(map(replaced, EDITS))
    try:
        with pytest.raises(Breaks):
            one_step(model, config(1))
    finally:
        edits.EDITS = whole
    assert face(model) == before
    one_step(model, config(1)).close()


def inference(rank: int, world: int, broken: str) -> None:
    """``init_inference`` makes kernels by the row of the table. It undoes its own only."""
    config = {"dtype": torch.float32, "replace_with_kernel_inject": True}
    model = make_llama().eval()
    before = face(model)
    engine = deepspeed_c.init_inference(model, config)
    made = engine._edits.get("kernels")
    engine.close()
    assert made is not None and face(model) == before

    def fail(model: nn.Module, context: Any) -> None:
        raise Breaks

    whole = edits.EDITS
    edits.EDITS = tuple(replace(edit, apply=fail) if edit.name == broken else edit for edit in EDITS)
    try:
        with pytest.raises(Breaks):
            deepspeed_c.init_inference(model, config)
    finally:
        edits.EDITS = whole
    assert face(model) == before

    inject_kernels(model)
    with_kernels = face(model)
    deepspeed_c.init_inference(model, dtype=torch.float32).close()
    assert face(model) == with_kernels != before


@pytest.mark.parametrize("broken", ["kernels", "tensor cut"])
def test_inference_makes_its_edits_by_the_table(broken: str):
    run_ranks(1, inference, broken)


@on_ranks(1)
def test_a_configuration_that_does_not_fit_undoes_them_too(rank: int, world: int) -> None:
    model = make_llama()
    before = face(model)
    with pytest.raises(ConfigError, match="fits the whole name of none"):
        one_step(model, config(2, activation_checkpointing={"layers": "nothing"}))
    assert face(model) == before


def test_all_are_undone_last_first_even_if_one_raises():
    order: list[str] = []

    class Made:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            order.append(self.name)
            if self.name == "b":
                raise Breaks

    rows = tuple(
        ModelEdit(
            name,
            lambda context, name=name: name != "c",
            lambda model, context, name=name: Made(name),
            needs_layout=False,
        )
        for name in "abcd"
    )
    whole, edits.EDITS = edits.EDITS, rows
    try:
        made = Edits(nn.Linear(1, 1))
        made.make(edits.EditContext(config=None, mesh=None))
        made.undo("d")
        with pytest.raises(Breaks):
            made.close()
        made.close()
    finally:
        edits.EDITS = whole
    assert order == ["d", "b", "a"]
