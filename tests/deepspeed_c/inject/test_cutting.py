"""Rules in the configuration, refusals before any weight is changed, and cuts of single layers."""

from __future__ import annotations

import itertools
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import deepspeed_c
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError
from deepspeed_c.inject import Cut, CutBox, cut_model
from deepspeed_c.inject.cutting import preview_cut
from deepspeed_c.inject.model_init import tp_model_init
from tests.deepspeed_c.inject.families import make
from tests.ranks import run_ranks


class Fused(torch.nn.Module):
    """Queries, keys and values in one matrix, of 6, 4 and 4 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(5, 14)
        self.out = torch.nn.Linear(6, 5)
        self.norm = torch.nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.qkv(self.norm(x))
        third = y.shape[-1] * 3 // 7
        q, k, v = (
            y[..., :third],
            y[..., third : third + (y.shape[-1] - third) // 2],
            y[..., third + (y.shape[-1] - third) // 2 :],
        )
        return self.out(q * (k * v).sum(-1, keepdim=True).detach().mul(0) + q) + v.sum() * 0


def specs(*entries: dict[str, Any], **more: Any) -> TensorParallel:
    return msgspec.convert(
        {"partition_config": {"layer_specs": entries, "use_default_specs": False, **more}}, TensorParallel
    )


QKV = {"patterns": [r"qkv\.weight"], "partition_type": "column", "shape": [[6, 4, 4], -1], "partition_dim": 0}
OUT = {"patterns": [r"out\.weight"], "partition_type": "row"}


def fused(rank: int, world: int) -> tuple:
    torch.manual_seed(0)
    model = Fused()
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    x = torch.randn(4, 5)
    expected = model(x)
    expected.sum().backward()
    expected = expected.detach()  # a graph that stays alive would keep the whole parameters
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    report = cut_model(model, specs(QKV, OUT), Collectives())
    got = model(x)
    got.sum().backward()
    errors = {"out": (got - expected).abs().max().item()}
    for name, param in model.named_parameters():
        grad, weight = grads[name], whole[name]
        if param.tensor_model_parallel:
            grad, weight = param.tp_cut.take(grad), param.tp_cut.take(weight)
        errors[name] = (param.grad - grad).abs().max().item()
        assert torch.equal(param, weight)
    return errors, model.qkv.weight.tp_cut.boxes, str(report)


def test_parts_of_a_fused_matrix_are_cut_one_by_one() -> None:
    results = run_ranks(2, fused)
    for errors, _, report in results:
        assert max(errors.values()) < 1e-5, errors
        assert "qkv.weight" in report and "[14, 5] -> [7, 5]" in report
    # Of the 6, 4 and 4 rows each of two ranks has 3, 2 and 2.
    assert results[1][1] == (
        CutBox((0, 0), (3, 0), (3, 5)),
        CutBox((3, 0), (8, 0), (2, 5)),
        CutBox((5, 0), (12, 0), (2, 5)),
    )


BAD = {
    "parts that do not sum": (specs({**QKV, "shape": [[6, 4, 5], -1]}), ModelError, "make 15, the dimension has 14"),
    "a pattern for nothing": (specs(QKV, {"patterns": [r"gate\.weight"]}), ConfigError, "matches none"),
    "no regular expression": (specs({"patterns": ["("]}), ConfigError, "no regular expression"),
    "too many dimensions": (specs({**QKV, "shape": [2, -1, -1]}), ConfigError, "3 entries, qkv.weight 2 dimensions"),
    "another dimension": (specs({**QKV, "partition_dim": 1}), ConfigError, "dimension 0, not 1"),
    "unequal parts": (specs({**QKV, "shape": [3, -1]}), ConfigError, "14 elements of qkv.weight are no 3 equal parts"),
    "strict": (specs(QKV, strict_mode=True), ModelError, "no rule cuts 1 matrices: out.weight"),
    "no rule": (TensorParallel(), ModelError, "no rule for model type ''"),
    "no preset": (TensorParallel(preset_model="lama"), ConfigError, "no preset 'lama'"),
}


class Named(torch.nn.Linear):
    """A linear layer of a class that differs only by its name."""


class Doubled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_linear_layer_that_computes_something_else() -> None:
    for kind, rules, expected in ((Named, (QKV, OUT), [7, 5]), (Doubled, (QKV,), [14, 5])):
        model = Fused()
        model.qkv = kind(5, 14)
        report = preview_cut(model, specs(*rules), 1, 2)
        (row,) = [row for row in report.rows if row.name == "qkv.weight"]
        assert list(row.local_shape) == expected and list(model.qkv.weight.shape) == [14, 5]
        assert row.is_cut or row.rule == "Doubled is no linear layer that can be cut"
    # A layer cannot stay whole if the other layer of its pair is cut.
    model = Fused()
    model.qkv = Doubled(5, 14)
    with pytest.raises(ModelError, match="qkv: Doubled cannot be cut, and out beside it is"):
        preview_cut(model, specs(QKV, OUT), 1, 2)
    llama = make("llama")
    torch.nn.utils.parametrizations.weight_norm(llama.model.layers[0].mlp.up_proj)
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\.up_proj: ParametrizedLinear cannot be cut, and .*_proj beside"
    ):
        preview_cut(llama, TensorParallel(), 0, 2)
    assert type(llama.model.layers[0].mlp.gate_proj) is torch.nn.Linear


def refuse(rank: int, world: int) -> list[tuple[str, str, bool]]:
    found = []
    for name, (section, kind, _) in BAD.items():
        model = Fused()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        try:
            cut_model(model, section, Collectives())
            text = "nothing"
        except DeepSpeedCError as error:
            text = str(error) if isinstance(error, kind) else repr(error)
        same = type(model.qkv) is torch.nn.Linear and all(
            torch.equal(before[key], value) for key, value in model.state_dict().items()
        )
        found.append((name, text, same and not hasattr(model.qkv.weight, "tp_cut")))
    return found


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    for name, text, same in run_ranks(2, refuse)[1]:
        assert BAD[name][2] in text and "Fix: " in text and same, (name, text, same)


def initialise(rank: int, world: int) -> list:
    torch.manual_seed(0)
    section = msgspec.to_builtins(specs(QKV, OUT))
    model = tp_model_init(Fused(), 2, torch.bfloat16, {"tensor_parallel": section})
    texts = []
    for size, config in ((3, {}), (2, {"autotp_size": 4})):
        try:
            tp_model_init(Fused(), size, None, config)
        except ConfigError as error:
            texts.append(str(error))
    return [model.qkv.weight.tp_cut.rank, model.qkv.weight.dtype, list(model.qkv.weight.shape), texts]


def test_tp_model_init_makes_groups_of_neighbours() -> None:
    for rank, (tp_rank, dtype, shape, texts) in enumerate(run_ranks(4, initialise)):
        assert (tp_rank, dtype, shape) == (rank % 2, torch.bfloat16, [7, 5])
        assert "4 ranks are no multiple of tp_size 3" in texts[0] and "tp_size is 2, autotp_size 4" in texts[1]


def alone(rank: int, world: int) -> tuple:
    model = Fused()
    report = cut_model(model, specs(QKV, OUT), Collectives())
    return type(model.qkv).__name__, report.local_elems, report.logical_elems


def test_one_rank_is_left_as_it_is() -> None:
    n_elems = sum(param.numel() for param in Fused().parameters())
    assert run_ranks(1, alone) == [("Linear", n_elems, n_elems)]


def test_take_and_put_are_inverse() -> None:
    cut = Cut(torch.Size([14, 5]), (CutBox((0, 0), (3, 0), (3, 5)), CutBox((3, 0), (8, 0), (2, 5))), 1, 1, 2, (1,))
    whole = torch.arange(70.0).view(14, 5)
    local = cut.take(whole)
    assert torch.equal(local, torch.cat([whole[3:6], whole[8:10]])) and local.shape == cut.local_shape
    back = torch.zeros(14, 5)
    cut.put(local, back)
    assert torch.equal(back[3:6], whole[3:6]) and back[8:10].equal(whole[8:10]) and not back[:3].any()
    nothing = Cut(torch.Size([1, 5]), (CutBox((0, 0), (0, 0), (0, 5)),), 1, 1, 2, (1,))
    assert nothing.take(torch.ones(1, 5)).shape == (0, 5)
    with pytest.raises(ValueError, match=r"\(4, 5\), the cut is of \(14, 5\)"):
        cut.take(torch.zeros(4, 5))


def test_a_style_of_a_plan_that_is_not_known() -> None:
    llama = make("llama")
    llama.config.model_type = "no family of ours"
    llama.tp_plan = {**llama.tp_plan, "model.layers.*.self_attn": "packed_rowwise"}
    with pytest.raises(ModelError, match=r"style 'packed_rowwise' for model\.layers\.\*\.self_attn") as caught:
        preview_cut(llama, TensorParallel(), 0, 2)
    assert "Fix: " in str(caught.value)
    llama.tp_plan = {name: style for name, style in llama.tp_plan.items() if style != "packed_rowwise"}
    assert (
        preview_cut(llama, TensorParallel(), 0, 2).local_elems
        < preview_cut(make("llama"), TensorParallel(), 0, 1).logical_elems
    )


def wide() -> torch.nn.Module:
    model = Fused()
    model.norm = torch.nn.LayerNorm(900)  # most of the model, and no rule cuts it
    return model


def test_a_model_that_is_hardly_cut_is_a_warning_and_an_error_with_strict_mode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("deepspeed_c").propagate, kept = True, logging.getLogger("deepspeed_c").propagate
    try:
        report = preview_cut(wide(), specs(QKV, OUT), 0, 2)
    finally:
        logging.getLogger("deepspeed_c").propagate = kept
    assert report.local_elems / report.logical_elems > 0.75
    assert "saves little" in caplog.text and "norm.weight [900]" in caplog.text, caplog.text
    for rank in (0, 1):
        with pytest.raises(
            ModelError,
            match=r"rank 0 of 2 holds .*whole on every rank are 3 parameters, the largest: norm\.weight \[900\]",
        ):
            preview_cut(wide(), specs(QKV, OUT, strict_mode=True), rank, 2)


def test_a_plan_of_words_alone_is_no_plan() -> None:
    llama = make("llama")
    llama.config.model_type = "no family of ours"
    llama.tp_plan = {"lm_head": "colwise_gather_output"}
    with pytest.raises(ModelError, match="no rule for model type"):
        preview_cut(llama, TensorParallel(), 0, 2)


def cut_without_data(rank: int, world: int) -> list[tuple[str, Any, Any]]:
    found = []
    for family in ("llama_tied_shared", "gpt2", "mixtral"):
        plain = make(family)
        with deepspeed_c.OnDevice(dtype=torch.float32, device="meta"):
            model = make(family)
        for each in (plain, model):
            cut_model(each, TensorParallel(), Collectives())
        for (name, got), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert got.is_meta and got.shape == wanted.shape, f"{family} {name}: {got.shape} {wanted.shape}"
            found.append((f"{family} {name}", getattr(got, "tp_cut", None), getattr(wanted, "tp_cut", None)))
    return found


def test_a_model_on_the_meta_device_is_cut_as_one_with_data() -> None:
    for of_rank in run_ranks(3, cut_without_data, preload="tests.deepspeed_c.inject.preload"):
        assert sum(wanted is not None for _, _, wanted in of_rank) > 20
        for name, got, wanted in of_rank:
            assert got == wanted, f"{name}: {got} {wanted}"


def walk(rank: int, world: int) -> list[str]:
    """The files of the folder that a reader of one call of ``cut_model`` meets, function by function."""
    model = make("llama")
    cut_model(make("llama"), TensorParallel(), Collectives())  # so that imports are done
    seen, files = set(), []

    def look(frame: Any, kind: str, _: Any) -> None:
        code = frame.f_code
        is_function = not code.co_name.startswith("<")
        if kind == "call" and is_function and "/deepspeed_c/inject/" in code.co_filename and code not in seen:
            seen.add(code)
            files.append(Path(code.co_filename).name)

    sys.setprofile(look)
    try:
        cut_model(model, TensorParallel(), Collectives())
    finally:
        sys.setprofile(None)
    return [name for name, _ in itertools.groupby(files)]


def test_a_reader_meets_the_three_steps_in_order_and_enters_each_once() -> None:
    files = run_ranks(2, walk)[0]
    print(" ".join(files))
    steps = ("cutting.py", "listing.py", "checking.py", "making.py")
    assert [name for name in files if name in steps] == list(steps)
    n_returns = len(files) - len(set(files))
    assert n_returns <= 7, (
        f"{n_returns} returns to a file that was left; there were 7 when this was written, and 42 before"
    )
