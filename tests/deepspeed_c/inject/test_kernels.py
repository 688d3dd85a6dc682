"""Kernels in models of Hugging Face: logits and gradients stay the same, nothing else changes, and kernels can be taken
out again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import PartitionConfig, TensorParallel
from deepspeed_c.errors import ConfigError, ModelError, StateError
from deepspeed_c.inject import cut_model, tp_model_init
from deepspeed_c.inject.kernels import inject_kernels, kernels_as_asked, revert_kernels
from tests.deepspeed_c.inject.families import FAMILIES, PLANNED, feed, make
from tests.deepspeed_c.inject.test_families import logits_of
from tests.ranks import run_ranks
from tests.training import config, descend, engine_of, update

PRELOAD = "tests.deepspeed_c.inject.preload"
# The families whose modules must be swapped, besides norms; and families with similar modules that must stay.
ROTARY = (
    *("llama", "llama_tied_shared", "qwen2", "qwen3", "mixtral", "deepseek_v3", "phi", "phi3", "gpt_neox", "falcon"),
    *("falcon_7b", "starcoder2", "cohere", "granite", "aria", "apertus", "granite_swa"),
)
GATED = (
    *("llama", "llama_tied_shared", "qwen2", "qwen3", "deepseek_v3", "phi3", "cohere", "granite", "aria", "llama4"),
    *("granite_swa",),
)
_ANGLES = "its rotary angles lie in no known order"
REST = {"gptj": _ANGLES, "codegen": _ANGLES, "gpt_oss": _ANGLES, "clip": "computes another activation"}
REST["inkling"] = "has more than gate, up, activation and down"  # it scales the sum


@pytest.mark.parametrize("family", [*FAMILIES, *PLANNED])
def test_logits_and_gradients_are_the_same(family: str) -> None:
    model, batch = make(family).train(), feed(family)
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    expected = model(**batch)
    expected.loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    report = inject_kernels(model)
    kinds = set(report.swapped.values())
    assert kinds & {"layer_norm", "rms_norm"} and len(report.swapped) >= 5
    assert ("rotary" in kinds) == (family in ROTARY) and ("swiglu" in kinds) == (family in GATED)
    assert set(report.remainder.values()) == ({REST[family]} if family in REST else set())
    got = model(**batch)
    got.loss.backward()
    assert (logits_of(got) - logits_of(expected)).abs().max() < 5e-6
    scale = max(grad.abs().max().item() for grad in grads.values())
    for name, param in model.named_parameters():
        if name in grads:
            assert (param.grad - grads[name]).abs().max() < 2e-6 * max(scale, 1), name
    assert names == [name for name, _ in model.named_modules()] and keys == list(model.state_dict())
    twin = copy.deepcopy(model)  # the twin gets kernels of its own
    with pytest.raises(StateError, match="revert_kernels"):
        inject_kernels(model)
    assert revert_kernels(model) == len(report.swapped) and revert_kernels(model) == 0
    assert torch.equal(logits_of(model(**batch)), logits_of(expected))
    assert revert_kernels(twin) == len(report.swapped)


def test_kernels_do_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_c.inject import kernels

    model, called = make("llama").eval(), []
    inject_kernels(model)
    for name in ("rms_norm", "swiglu", "rotary"):
        own = getattr(kernels.nn, name)
        monkeypatch.setattr(
            kernels.nn, name, lambda *args, name=name, own=own, **kw: called.append(name) or own(*args, **kw)
        )
    other = make("llama").eval()
    ids = feed("llama")["input_ids"]
    with torch.no_grad():
        model(ids)
        n_calls = len(called)
        other(ids)  # another model of the same classes stays unchanged
    # rotary is called for queries and for keys. Calls of swiglu are not noted: the modules hold the function itself.
    assert n_calls == len(called) and called.count("rms_norm") == 5 and called.count("rotary") == 4


class Strange(nn.Module):
    """Is named like a norm, but computes something else."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.rand(6) + 0.5), 1e-6, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled * (self.weight if self.power == 0 else self.weight**self.power)


class OneMoreRMSNorm(Strange):
    """Is named like a norm."""


class GemmaLikeRMSNorm(nn.Module):
    """A norm that multiplies by 1 plus its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(6)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


class Gate(nn.Module):
    """A gated MLP, or a module that differs from one in a detail."""

    def __init__(self, act: Any, is_right: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)
        self.act_fn, self.is_right = act, is_right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up if self.is_right else gate * self.act_fn(up))


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (OneMoreRMSNorm(0), "rms_norm"),
        (OneMoreRMSNorm(1), "rms_norm"),
        (OneMoreRMSNorm(2), "computes another norm"),
        (GemmaLikeRMSNorm(), "rms_norm of 1 + weight"),
        (nn.LayerNorm(6, elementwise_affine=False), "layer_norm"),
        (nn.LayerNorm(6, bias=False), "layer_norm"),
        (nn.LayerNorm((2, 6)), "norms 2 dimensions together"),
        (nn.RMSNorm(6), "rms_norm"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (nn.ReLU(), "relu"),
        (nn.LeakyReLU(), "computes another activation"),
        (Gate(nn.SiLU(), True), "swiglu"),
        (Gate(nn.GELU(), True), "geglu"),
        (Gate(nn.GELU("tanh"), True), "geglu with tanh"),
        (Gate(nn.SiLU(), False), "computes another gated network"),
        (Gate(nn.Tanh(), True), "computes another gated network"),
    ],
)
def test_a_module_is_what_it_computes(module: nn.Module, found: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 2, 6)
    model = nn.Sequential(nn.LayerNorm(6), module)
    expected = module(x)
    report = inject_kernels(model)
    assert {**report.swapped, **report.remainder}["1"] == found
    assert ("1" in report.swapped) == ("forward" in vars(module))
    assert torch.allclose(module(x), expected, rtol=1e-5, atol=1e-6)
    assert f"{len(report.swapped)} modules run kernels, {len(report.remainder)} keep their own" in str(report)


class OfItsOwnEpsilon(nn.Module):
    """A norm whose epsilon depends on the dtype. Only in float32 does it compute the same as the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(6) + 0.5), torch.finfo(torch.float32).eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (6,), self.weight.float(), torch.finfo(x.dtype).eps).to(x.dtype)


class WideRMSNorm(OfItsOwnEpsilon):
    """Is named like a norm."""


class FloatRMSNorm(Strange):
    """A norm whose output is float32 for every dtype of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (6,), self.weight.float(), self.eps)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REPLACED = (
    lambda: nn.RMSNorm(6),
    lambda: nn.RMSNorm(6, eps=1e-3),
    lambda: nn.RMSNorm(6, elementwise_affine=False),
    lambda: nn.LayerNorm(6),
    lambda: nn.LayerNorm(6, bias=False),
    lambda: nn.LayerNorm(6, elementwise_affine=False),
    lambda: OneMoreRMSNorm(1),
    lambda: GemmaLikeRMSNorm(),
    lambda: nn.GELU(),
    lambda: nn.GELU("tanh"),
    lambda: nn.SiLU(),
    lambda: nn.ReLU(),
    lambda: Gate(nn.SiLU(), True),
    lambda: Gate(nn.GELU(), True),
    lambda: Gate(nn.GELU("tanh"), True),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make_module", REPLACED)
def test_small_values_and_large_in_every_dtype(make_module: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    module = make_module().to(dtype)
    own = copy.deepcopy(module)
    assert inject_kernels(nn.Sequential(module)).swapped
    for scale in (0.02, 1.0, 30.0):
        x = (scale * torch.randn(4, 6)).to(dtype)
        want, got = own(x), module(x)
        error = (got.float() - want.float()).abs().max() / want.float().abs().max()
        bound = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
        assert got.dtype == want.dtype == dtype and error <= bound, (scale, error, got, want)


@pytest.mark.parametrize("make_module", [WideRMSNorm, lambda: FloatRMSNorm(0)])
def test_a_norm_that_differs_in_16_bits_keeps_its_own(make_module: Any) -> None:
    module = make_module()
    report = inject_kernels(nn.Sequential(nn.LayerNorm(6), module))
    assert report.remainder == {"1": "computes another norm"}, report


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_dtypes_are_promoted_by_the_module_itself(dtype: torch.dtype) -> None:
    module = OneMoreRMSNorm(1)
    own = copy.deepcopy(module)
    assert inject_kernels(nn.Sequential(module)).swapped
    x = torch.randn(3, 6).to(dtype)
    want, got = own(x), module(x)
    assert got.dtype == want.dtype == torch.float32 and torch.allclose(got, want, rtol=1e-5, atol=1e-6), (got, want)


def test_meta_weights_half_precision_and_autocast() -> None:
    with torch.device("meta"):
        empty = make("qwen3")
    assert set(inject_kernels(empty).swapped.values()) == {"rms_norm", "silu", "swiglu"}  # angles have no values yet
    model = make("llama").to(torch.bfloat16).eval()
    ids = feed("llama")["input_ids"]
    expected = model(ids).logits
    inject_kernels(model)
    got = model(ids).logits
    assert got.dtype is torch.bfloat16 and (got - expected).abs().max() < 0.02 * expected.abs().max()
    model = make("llama").eval()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids).logits
        inject_kernels(model)
        assert torch.equal(model(ids).logits, expected)  # dtypes are as before


def test_what_has_no_kernel_is_refused_with_nothing_changed() -> None:
    double, clip, plain = make("llama").double(), make("clip"), nn.Sequential(nn.Linear(2, 2))
    patched = make("gpt2")
    patched.transformer.ln_f.forward = patched.transformer.ln_f.forward
    for model, strict, text in (
        (double, False, "float16, not in torch.float64"),
        (clip, True, "4 modules keep their own forward"),
        (plain, False, "nothing has a kernel"),
        (patched, True, "somebody has given it another forward"),
    ):
        with pytest.raises(ModelError, match=text) as caught:
            inject_kernels(model, strict=strict)
        assert "Fix: " in str(caught.value) and revert_kernels(model) == 0
    assert "transformer.ln_f" in inject_kernels(patched).remainder


def test_a_failure_takes_them_out_again() -> None:
    model = make("gpt2")
    strict = TensorParallel(replace_with_kernel_inject=True, partition_config=PartitionConfig(strict_mode=True))
    with pytest.raises(ConfigError, match="mine"), kernels_as_asked(model, strict) as report:
        assert report is not None and "forward" in vars(model.transformer.ln_f)
        raise ConfigError("mine")
    assert revert_kernels(model) == 0
    with kernels_as_asked(model, TensorParallel()) as report:
        assert report is None and revert_kernels(model) == 0


def cut_with_kernels(rank: int, world: int, family: str) -> dict[str, Any]:
    whole, batch = make(family).train(), feed(family)
    cut = tp_model_init(make(family).train(), world, None, {"replace_with_kernel_inject": True})
    n_kernels = sum("forward" in vars(module) for module in cut.modules())
    expected, got = whole(**batch), cut(**batch)
    error = (logits_of(got) - logits_of(expected)).abs().max().item()
    expected.loss.backward()
    cut(**batch).loss.backward()
    grads = dict(whole.named_parameters())
    for name, param in cut.named_parameters():
        grad = grads[name].grad
        if grad is not None and param.grad is not None and param.numel():
            grad = param.tp_cut.take(grad) if hasattr(param, "tp_cut") else grad
            error = max(error, (param.grad - grad).abs().max().item())
    # Kernels can also be put into a model that is already cut.
    late = make(family).train()
    cut_model(late, TensorParallel(), Collectives())
    inject_kernels(late)
    error = max(error, (logits_of(late(**batch)) - logits_of(expected)).abs().max().item())
    return {"error": error, "n_kernels": n_kernels}


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox", "bert", "mixtral"])
def test_cut_models_have_them_too(family: str) -> None:
    for result in run_ranks(2, cut_with_kernels, family, preload=PRELOAD):
        assert result["error"] < 1e-5 and result["n_kernels"] > 5, result


def train(rank: int, world: int, stage: int, tp: int) -> list[float]:
    tensor_parallel = {"autotp_size": tp, "replace_with_kernel_inject": True}
    zero = {"stage3_param_persistence_threshold": 0}
    settings = config(stage, rows=2, lr=0.3, zero=zero, gradient_clipping=0.0, tensor_parallel=tensor_parallel)
    model = make("llama").train()
    engine = engine_of(model, settings)
    assert sum("forward" in vars(module) for module in model.modules()) == 11
    losses = [update(engine, engine(**feed("llama")).loss) for _ in range(4)]
    return losses


def plain_losses() -> list[float]:
    model, losses = make("llama").train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(4):
        losses.append(descend(optimizer, model(**feed("llama")).loss))
    return losses


@pytest.mark.parametrize(("stage", "tp"), [(0, 1), (3, 1), (2, 2), (3, 2)])
def test_an_engine_trains_with_them(stage: int, tp: int) -> None:
    expected = plain_losses()
    for losses in run_ranks(2, train, stage, tp, preload=PRELOAD):
        assert losses == pytest.approx(expected, abs=2e-5) and losses[-1] < losses[0]


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_a_model_with_kernels_compiles(family):
    """Without a graph break in the forward that turns positions, and with the values of the model itself."""
    given = {"input_ids": feed(family)["input_ids"]}
    model = make(family).eval()
    with torch.no_grad():
        wanted = model(**given).logits
        inject_kernels(model)
        model.compile(backend="eager")
        found = model(**given).logits
    assert torch.allclose(found, wanted, atol=1e-5), float((found - wanted).abs().max())
