"""Deterministic forwards: the operators of torch that may run have the same bits in any place, and the others run as
operators of the core."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from deepspeed_c.errors import FeatureError
from deepspeed_c.inference.engine import init_inference
from deepspeed_c.inference.v2 import InferenceEngineV2, deterministic
from deepspeed_c.inference.v2.deterministic import Deterministic, require_row_wise
from tests.deepspeed_c.engine.test_families_in_blocks import DECODERS, make
from tests.deepspeed_c.inference.v2.test_ragged_engine import settings, tokens_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")

transformers = pytest.importorskip("transformers")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 3, 7, 16, 33, 64, 100, 257, 1152]
PIECES = [(0, 1), (1, 2), (3, 5), (5, 22), (0, 66), (40, 41), (2, 39), (0, 67)]
Operator = Callable[[torch.Tensor], torch.Tensor]

ELEMENTS: dict[str, Operator] = {
    "add": lambda x: x + 1.3,
    "sub": lambda x: x - 0.7,
    "rsub": lambda x: torch.rsub(x, 2.5),
    "mul": lambda x: x * 1.3,
    "div": lambda x: x / 3.7,
    "neg": torch.neg,
    "abs": torch.abs,
    "pow": lambda x: torch.pow(x, 3.0) + x.pow(2),
    "square": torch.square,
    "sqrt": lambda x: x.abs().sqrt(),
    "reciprocal": torch.reciprocal,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: torch.clamp_min(x, 0.3),
    "clamp_max": lambda x: torch.clamp_max(x, 0.3),
    "minimum": lambda x: torch.minimum(x, -x),
    "maximum": lambda x: torch.maximum(x, 2 * x),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "cos": torch.cos,
    "sin": torch.sin,
    "relu": F.relu,
    "sign": torch.sign,
}
ROWS: dict[str, Operator] = {
    "sum": lambda x: x.sum(-1) + x[:, None].expand(-1, 5, -1).sum(1)[:, 0],
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "_softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "native_layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "_fused_rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "topk": lambda x: x.topk(min(3, x.shape[-1]), -1).values,
}
ACTIVATIONS: dict[str, Operator] = {
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x.clone(), inplace=True),
    "module": torch.nn.SiLU(),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "method": lambda x: x * (1.702 * x).sigmoid(),
}


def numbers(n_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(n_rows, width, generator=torch.Generator().manual_seed(seed))).to(dtype)


def count_wrong(run: Operator, dtype: torch.dtype) -> int:
    """Pieces of rows that get other bits than in the company of all rows."""
    n_wrong = 0
    for width in WIDTHS:
        x = numbers(67, width, dtype)
        whole = run(x)
        for begin, end in PIECES:
            alone = run(x[begin:end].clone())
            n_wrong += not torch.equal(whole[begin:end].nan_to_num(), alone.nan_to_num())
    return n_wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_that_may_run_have_the_same_bits_in_any_place(dtype: torch.dtype) -> None:
    wrong = {name: n for name, run in (ELEMENTS | ROWS).items() if (n := count_wrong(run, dtype))}
    assert not wrong, wrong
    assert dtype != torch.float32 or not count_wrong(torch.rsqrt, dtype)


def test_each_operator_that_computes_is_tested() -> None:
    assert {name.rstrip("_") for name in deterministic._ELEMENTS} == set(ELEMENTS)
    assert {*deterministic._ROWS, "topk"} == set(ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_run_as_the_cores(dtype: torch.dtype) -> None:
    for name, run in ACTIVATIONS.items():
        x = numbers(5, 33, dtype)
        with Deterministic():
            assert not count_wrong(run, dtype), name
            found = run(x.clone())
        near = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found, run(x.clone()), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_run_as_the_cores(dtype: torch.dtype) -> None:
    n_terms, n_columns = 67, 19
    weight, bias = numbers(n_terms, n_columns, dtype, 1), numbers(1, n_columns, dtype, 2)[0]
    stack = numbers(3 * n_terms, n_columns, dtype, 3).view(3, n_terms, n_columns)
    ends = torch.tensor([0, 30, 41], dtype=torch.int32)
    products: dict[str, Operator] = {
        "linear": lambda x: F.linear(x, weight.t().contiguous(), bias),
        "linear of a view": lambda x: F.linear(x[None], weight.t())[0],
        "matmul": lambda x: torch.matmul(x, weight),
        "@": lambda x: x[:, None] @ weight,
        "mm": lambda x: x.mm(weight),
        "addmm": lambda x: torch.addmm(bias, x, weight),
        "strided": lambda x: x @ numbers(n_terms, 2 * n_columns, dtype, 1)[:, ::2],
    }
    for name, run in products.items():
        x = numbers(41, n_terms, dtype)
        exact = (
            x.double() @ (weight if name != "strided" else numbers(n_terms, 2 * n_columns, dtype, 1)[:, ::2]).double()
        )
        exact = exact + bias.double() if name in ("linear", "addmm") else exact
        with Deterministic():
            whole = run(x)
            for begin, end in ((0, 1), (1, 2), (7, 23), (7, 24), (0, 41)):
                assert torch.equal(whole[begin:end], run(x[begin:end])), (name, begin, end)
        near = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        exact = exact if name != "linear of a view" else x.double() @ weight.double()
        torch.testing.assert_close(whole.double().view(41, -1), exact, rtol=near, atol=near * float(exact.abs().max()))
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is not None:
        x = numbers(41, n_terms, dtype)
        with Deterministic():
            found = grouped(x, stack, offs=ends)
            assert torch.equal(found[:30], x[:30] @ stack[1]) and torch.equal(found[30:], x[30:] @ stack[2])


def test_what_a_mode_cannot_change_is_refused_by_name() -> None:
    x = torch.randn(5, 7)
    with pytest.raises(FeatureError) as caught, Deterministic(), require_row_wise("SomeModel"):
        F.softplus(x)
        torch.einsum("ab,cb->ac", x, x)
    assert "SomeModel" in str(caught.value) and "softplus" in str(caught.value) and "bmm" in str(caught.value)
    with Deterministic(), require_row_wise("SomeModel"):
        F.linear(F.silu(x), x) + torch.matmul(x[:, :, None], x[:, None, :])[0, :5, :5]
        torch.arange(4).cumsum(0)
    for name, run in {"rsqrt": lambda: x.bfloat16().rsqrt(), "pow": lambda: x.abs().pow(0.3)}.items():
        with pytest.raises(FeatureError) as caught, require_row_wise("SomeModel"):
            run()
        assert name in str(caught.value)


def texts_of(n: int = 4) -> dict[int, torch.Tensor]:
    return {uid: tokens_of(length, uid) for uid, length in zip(range(n), (41, 3, 17, 58, 1))}


def bits_alone(engine: InferenceEngineV2, text: torch.Tensor) -> torch.Tensor:
    found = engine.put([99], [text], salts={99: str(random.random())})[0]
    engine.flush(99)
    return found


def compare_bits(engine: InferenceEngineV2) -> None:
    """Company, pieces, found prefixes and threads change no bit."""
    texts = texts_of()
    expected = {uid: bits_alone(engine, text) for uid, text in texts.items()}
    together = engine.put(list(texts), list(texts.values()))
    for row, uid in zip(together, texts, strict=True):
        assert torch.equal(row, expected[uid]), uid
        engine.flush(uid)
    assert engine.count_found(texts[3]) >= 32
    found = engine.put([3], [texts[3]])[0]  # the whole text was there
    assert torch.equal(found, expected[3]) and engine._state.get_sequence(3).cached.n_found
    engine.flush(3)
    last = {}
    seen = dict.fromkeys(texts, 0)
    rng = random.Random(3)
    while any(seen[uid] < len(texts[uid]) for uid in texts):
        ends = {uid: min(seen[uid] + rng.choice([1, 2, 16, 19]), len(texts[uid])) for uid in texts}
        ends = {uid: end for uid, end in ends.items() if end > seen[uid] and rng.random() < 0.7}
        if ends:
            salts = dict.fromkeys(ends, "pieces")
            rows = engine.put(list(ends), [texts[uid][seen[uid] : end] for uid, end in ends.items()], salts=salts)
            last |= dict(zip(ends, rows, strict=True))
            seen |= ends
    for uid in texts:
        assert torch.equal(last[uid], expected[uid]), uid
        engine.flush(uid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*DECODERS, "llama with kernels", "int8"])
def test_a_sequence_has_the_same_bits_in_any_company(family: str, dtype: torch.dtype) -> None:
    model = make("llama" if family in ("llama with kernels", "int8") else family)
    host = init_inference(
        model,
        dtype=torch.int8 if family == "int8" else dtype,
        replace_with_kernel_inject=family == "llama with kernels",
    )
    engine = InferenceEngineV2(host, settings(60, deterministic=True, max_context=80, max_ragged_batch_size=160))
    n_threads = torch.get_num_threads()
    try:
        compare_bits(engine)
        one = bits_alone(engine, texts_of()[3])
        torch.set_num_threads(1 if n_threads > 1 else 2)
        assert torch.equal(bits_alone(engine, texts_of()[3]), one)
    finally:
        torch.set_num_threads(n_threads)
        engine.destroy()


@on_ranks(2)
def test_ranks_have_the_same_bits_in_any_company(rank: int, world: int) -> None:
    for family in ("llama", "mixtral"):
        host = init_inference(make(family), dtype=torch.float32, tensor_parallel={"tp_size": 2})
        limits = {"max_context": 80, "max_ragged_batch_size": 160}
        engine = InferenceEngineV2(host, settings(60, tp=2, deterministic=True, **limits))
        random.seed(7)  # salts are the same on all ranks
        compare_bits(engine)
        engine.destroy()


def test_a_model_that_cannot_is_refused_by_name() -> None:
    model = make("llama")
    model.model.layers[0].mlp.act_fn = torch.nn.Softplus()
    host = init_inference(model, dtype=torch.float32)
    with pytest.raises(FeatureError) as caught:
        InferenceEngineV2(host, settings(deterministic=True))
    assert "LlamaForCausalLM" in str(caught.value) and "softplus" in str(caught.value)
    InferenceEngineV2(host, settings()).destroy()
