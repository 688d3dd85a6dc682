"""Buffers that a model keeps in fp32 by name: the names, and a router that chooses the same experts as in plain torch
in one process."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import ConfigError
from deepspeed_c.zero.weights.fp32_buffers import buffers_in_fp32, keep_buffers_in_fp32
from tests.ranks import run_ranks

N_EXPERTS, WIDTH, N_TOKENS, TOP_K = 256, 24, 33, 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def corrections() -> torch.Tensor:
    """Values that differ by less than an ulp of bf16 and of fp16, as in trained routers."""
    return 11.0 + torch.randperm(N_EXPERTS, generator=torch.Generator().manual_seed(7)).float() * 1e-4


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N_EXPERTS, WIDTH) / 64)
        self.register_buffer("e_score_correction_bias", torch.zeros(N_EXPERTS))
        self.register_buffer("tables", torch.zeros(3))
        self.register_buffer("range_scale", torch.zeros(2))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.sigmoid(nn.functional.linear(x, self.weight)).float()
        # The choice does not depend on tokens or dtypes, only on the buffer.
        return scores, torch.topk(self.e_score_correction_bias.float() + torch.zeros_like(scores), TOP_K).indices


class Experts(nn.Module):
    _keep_in_fp32_modules_strict = frozenset({"e_score_correction_bias"})
    _keep_in_fp32_modules = ("range_*",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.router = Router()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, chosen = self.router(self.first(x))
        return scores.gather(1, chosen).square().mean(), chosen


class Whole(nn.Module):
    """A model inside this one has the names. A buffer outside of it has the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Experts()
        self.register_buffer("e_score_correction_bias", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x)


BIAS, TABLES, RANGE = (f"inner.router.{name}" for name in ("e_score_correction_bias", "tables", "range_scale"))
OUTER = "e_score_correction_bias"


@pytest.mark.parametrize(
    "setting, bf16, fp16",
    [
        ("auto", {BIAS}, {BIAS, RANGE}),
        ([], set(), set()),
        (["tables"], {TABLES}, {TABLES}),
        (["inner*correction"], {BIAS}, {BIAS}),
        (["correction"], {BIAS, OUTER}, {BIAS, OUTER}),
        (["inner.router.t", "range"], {TABLES, RANGE}, {TABLES, RANGE}),
        (["counts", "first", "weight"], set(), set()),  # integers and parameters
        (["r.uter", "(", "inner[.]"], set(), set()),  # only * is special
    ],
)
def test_names_of_buffers_that_stay_fp32(setting, bf16, fp16):
    model = Whole()
    for dtype, expected in ((torch.bfloat16, bf16), (torch.float16, fp16), (torch.float32, set()), (None, set())):
        kept = buffers_in_fp32(model, setting, dtype)
        names = {name for name, buffer in model.named_buffers() if id(buffer) in kept}
        assert names == expected and len(kept) == len(expected), (setting, dtype, names, expected)


def test_fp32_data_is_given_in_place_and_to_a_buffer_of_two_modules_once():
    model = Whole().to(torch.bfloat16)
    model.twin = nn.Module()
    model.twin.register_buffer("shared", model.inner.router.e_score_correction_bias)
    before = model.inner.router.e_score_correction_bias
    keep_buffers_in_fp32(model, "auto", torch.bfloat16)
    assert model.inner.router.e_score_correction_bias is before is model.twin.shared
    found = {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.dtype is torch.float32}
    assert found == {BIAS: torch.float32}, found


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state = Whole().state_dict()
    state |= {BIAS: corrections(), TABLES: torch.tensor([1 / 3, 2 / 3, 0.1]), RANGE: torch.tensor([0.1, 0.7])}
    return state


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(N_TOKENS, 5, generator=torch.Generator().manual_seed(rank))


def plain() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The buffers and the choice of plain torch in fp32, in one process."""
    model = Whole()
    model.load_state_dict(values())
    return dict(model.named_buffers()), model(batch_of(0))[1]


def kept_body(rank: int, world: int, stage: int, dtype: str, setting, built: str) -> dict:
    """Two steps of training; returns buffers, choice of experts and dtypes of parameters."""
    config = {
        "train_micro_batch_size_per_gpu": N_TOKENS,
        dtype: {"enabled": True} | ({"initial_scale_power": 4} if dtype == "fp16" else {}),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "data_types": {"buffer_dtype": dtype},
    }
    if setting is not None:
        config["data_types"]["keep_in_fp32_modules"] = setting
    if built == "within":
        with deepspeed_c.zero.Init(config_dict_or_path=config):
            model = Whole()
        made = {name: buffer.dtype for name, buffer in model.named_buffers()}
    elif built == "afterwards":
        model = Whole().to(DTYPES[dtype])
        deepspeed_c.zero.Init(module=model, config_dict_or_path=config)
        made = {name: buffer.dtype for name, buffer in model.named_buffers()}
    else:
        model, made = Whole(), None
    # Copy values of a file into the existing buffers, as loaders of pretrained models do.
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values()[name])
    engine, *_ = deepspeed_c.initialize(model=model, config=config)
    with engine:
        for _ in range(2):
            loss, chosen = engine(batch_of(rank).to(DTYPES[dtype]))
            engine.backward(loss)
            engine.step()
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        params = {param.dtype for param in engine.module.parameters()}
    return {"made": made, "buffers": buffers, "chosen": chosen, "params": params}


HOW = [(stage, "") for stage in range(4)] + [(3, "within"), (3, "afterwards")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage, built", HOW)
def test_experts_are_chosen_as_by_plain_torch(stage, built, dtype):
    expected, choice = plain()
    fp32 = {BIAS} if dtype == "bf16" else {BIAS, RANGE}
    for result in run_ranks(2, kept_body, stage, dtype, None, built):
        for name, buffer in result["buffers"].items():
            is_kept = name in fp32 or not expected[name].is_floating_point()
            wanted = expected[name] if is_kept else expected[name].to(DTYPES[dtype])
            assert buffer.dtype == wanted.dtype, (name, buffer.dtype, wanted.dtype)
            assert torch.equal(buffer, wanted), (name, buffer, wanted)
            assert result["made"] is None or result["made"][name] == wanted.dtype, (name, result["made"])
        assert torch.equal(result["chosen"], choice), (result["chosen"][0], choice[0])
        assert result["params"] == {DTYPES[dtype]}, result["params"]


@pytest.mark.parametrize("setting, fp32", [([], set()), (["table*"], {TABLES})])
@pytest.mark.parametrize("stage, built", [(1, ""), (3, "within")])
def test_a_list_takes_the_place_of_the_names_of_the_model(stage, built, setting, fp32):
    for result in run_ranks(2, kept_body, stage, "bf16", setting, built):
        found = {name for name, buffer in result["buffers"].items() if buffer.dtype is torch.float32}
        assert found == fp32, (found, fp32)
        # The test above can fail: rounding leaves few different values, which choose other experts.
        assert result["buffers"][BIAS].unique().numel() < 8, result["buffers"][BIAS]
        assert not torch.equal(result["chosen"], plain()[1])


WRONG = ["router", 3, ["a", 1], {"a": 1}, True]


@pytest.mark.parametrize("value", WRONG, ids=json.dumps)
def test_a_wrong_value_is_refused_by_the_configuration(value):
    with pytest.raises(ConfigError) as caught:
        deepspeed_c.config.load_config(
            {"train_batch_size": 1, "data_types": {"keep_in_fp32_modules": value}}, world_size=1
        )
    assert "data_types.keep_in_fp32_modules" in caught.value.where, caught.value


def wrong_body(rank: int, world: int) -> list[str]:
    places = []
    for value in (*WRONG, None):
        for config in ({"data_types": {"keep_in_fp32_modules": value}}, {"data_types.keep_in_fp32_modules": value}):
            model = Whole()
            try:
                deepspeed_c.zero.Init(module=model, config_dict_or_path=config)
            except ConfigError as error:
                places.append(error.where)
            assert all(param.numel() for param in model.parameters()), (value, "parameters are sharded")
    return places


def test_a_wrong_value_is_refused_by_zero_init_on_all_ranks():
    for places in run_ranks(2, wrong_body):
        assert places == ["data_types.keep_in_fp32_modules"] * 2 * (len(WRONG) + 1), places
