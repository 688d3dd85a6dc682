"""inject/few_rows.py: layers multiply a few rows by our product within the context, and are as before after it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from deepspeed_c.inject import few_rows
from deepspeed_c.inject.few_rows import MOST_ROWS, few_row_products

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class Layers(nn.Module):
    """A plain layer, a layer of a class of its own, and a layer with another forward."""

    def __init__(self, dtype: torch.dtype, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.plain = nn.Linear(37, 29, bias=bias, dtype=dtype)
        self.own = type("Own", (nn.Linear,), {})(37, 29, dtype=dtype)
        self.other = nn.Linear(37, 29, dtype=dtype)
        self.other.forward = lambda x: x


@pytest.fixture
def calls(monkeypatch):
    """(rows, layers) of each call of our product."""
    found = []

    def note(x, weights, biases):
        found.append((x.shape[:-1].numel(), len(weights)))
        return few_rows_layers(x, weights, biases)

    few_rows_layers = few_rows._layers
    monkeypatch.setattr(few_rows, "_layers", note)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_few_rows_are_near_the_formula_and_have_the_bits_of_each_row_alone(dtype, bias, calls):
    model = Layers(dtype, bias=bias)
    x = torch.randn(MOST_ROWS + 1, 37).to(dtype)
    formula = nn.functional.linear(x.double(), model.plain.weight.double(), model.plain.bias.double() if bias else None)
    with torch.no_grad(), few_row_products(model):
        rows = torch.cat([model.plain(row[None]) for row in x])
        for n_rows in range(MOST_ROWS + 1):
            assert torch.equal(model.plain(x[:n_rows]), rows[:n_rows]), f"{n_rows} rows: {model.plain(x[:n_rows])}"
        assert torch.equal(model.plain(x[:12].view(3, 4, 37)).flatten(0, 1), rows[:12])
    assert_close(rows.double(), formula, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert calls == [(n, 1) for n in [1] * (MOST_ROWS + 1) + list(range(MOST_ROWS + 1)) + [12]]


def test_more_rows_other_dtypes_and_gradients_are_torchs(calls):
    model = Layers(torch.float32)
    x = torch.randn(MOST_ROWS + 1, 37)
    wanted = model.plain(x)
    with few_row_products(model):
        assert torch.equal(model.plain(x), wanted)
        model.plain(x[:2]).sum().backward()
        with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
            model.plain(x[:2].double())
    assert calls == [] and model.plain.weight.grad is not None


def test_other_layers_stay_and_all_are_as_before_afterwards(calls):
    model = Layers(torch.float32)
    x, seen = torch.randn(2, 37), []
    model.plain.register_forward_hook(lambda *given: seen.append(given[2].shape))
    other = model.other.forward
    with pytest.raises(ZeroDivisionError), torch.no_grad(), few_row_products(model):
        assert "forward" in vars(model.plain) and "forward" not in vars(model.own)
        assert torch.equal(model.other(x), x)
        assert torch.equal(model.own(x), nn.functional.linear(x, model.own.weight, model.own.bias))
        model.plain(x)
        raise ZeroDivisionError
    assert "forward" not in vars(model.plain) and vars(model.other)["forward"] is other
    assert calls == [(2, 1)] and seen == [(2, 29)]


def test_autocast_decides_the_dtype():
    model, x = Layers(torch.float32), torch.randn(2, 37)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model.plain(x)
        with few_row_products(model):
            found = model.plain(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert_close(found, wanted, rtol=2**-7, atol=2**-7)


class Four(nn.Module):
    """Layers that read one input, of which the model calls those that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(19, n, bias=n != 7) for n in (3, 7, 11, 1))

    def forward(self, x: torch.Tensor, order: str = "0123") -> list[torch.Tensor]:
        return [self.layers[int(i)](x) for i in order]


def same(found: list[torch.Tensor], model: Four, x: torch.Tensor, order: str = "0123") -> None:
    for y, i in zip(found, order, strict=True):
        layer = model.layers[int(i)]
        wanted = nn.functional.linear(
            x.double(), layer.weight.double(), layer.bias if layer.bias is None else layer.bias.double()
        )
        assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6, msg=lambda text, i=i: f"layer {i}: {text}")


@pytest.mark.parametrize("n_rows", [1, 3, MOST_ROWS])
def test_layers_with_one_input_run_in_one_call_from_the_second_time_on(n_rows, calls):
    model = Four()
    with torch.no_grad(), few_row_products(model):
        for _ in range(3):
            x = torch.randn(n_rows, 19)
            found = model(x)
            same(found, model, x)
            alone = [torch.cat([model.layers[i](row[None].clone()) for row in x]) for i in (3, 1, 0, 2)]
            assert all(torch.equal(a, found[i]) for a, i in zip(alone, (3, 1, 0, 2), strict=True))
    with torch.no_grad(), few_row_products(model):
        calls.clear()
        for _ in range(3):
            model(torch.randn(n_rows, 19))
    assert calls == [(n_rows, 1)] * 4 + [(n_rows, 4)] * 2


def test_layers_that_do_not_follow_once_are_computed_alone_from_then_on(calls):
    model = Four()
    with torch.no_grad(), few_row_products(model):
        for order in ("01", "01", "0", "01", "10", "10", "001", "23", "23"):
            x = torch.randn(2, 19)
            same(model(x, order), model, x, order)
    assert [n for _, n in calls] == [1, 1, 2, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2], calls


def test_an_input_or_a_weight_that_changes_between_two_layers_is_seen():
    model, x = Four(), torch.randn(2, 19)
    with torch.no_grad(), few_row_products(model):
        for _ in range(3):
            model(x.clone())
        y = x.clone()
        first = model.layers[0](y)
        y += 1
        same([first], model, x, "0")
        same(model(y, "12"), model, y, "12")
        # A hook that makes the weight just before its layer runs, as a sharded model gathers it.
        late = model.layers[2]
        whole = late.weight.data
        late.weight.data = torch.empty(0)
        late.register_forward_pre_hook(lambda *_: setattr(late.weight, "data", whole))
        for _ in range(3):
            z = torch.randn(2, 19)
            same(model(z), model, z)
            late.weight.data = torch.empty(0)


def test_inference_mode_has_the_same_results():
    model = Four()
    with torch.inference_mode(), few_row_products(model):
        for _ in range(3):
            x = torch.randn(2, 19)
            found = model(x)
            x += 1
            same(model(x, "01"), model, x, "01")
            same(found, model, x - 1)


def test_threads_with_one_model_do_not_see_one_another(calls):
    model, both = Four(), threading.Barrier(2)

    def call(seed: int) -> None:
        with torch.no_grad(), few_row_products(model):
            for n in range(3):
                x = torch.randn(2, 19, generator=torch.Generator().manual_seed(seed + n))
                found = []
                for order in ("0", "1"):
                    both.wait(timeout=60)
                    found += model(x, order)
                same(found, model, x, "01")
            both.wait(timeout=60)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, (1, 100)))
    assert sorted(n for _, n in calls) == [1] * 4 + [2] * 4, calls
