"""inject/few_rows.py: layers multiply a few rows by our product within the context, and are as before after it."""

from __future__ import annotations

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
    """The numbers of rows that our product gets."""
    found = []
    ours = few_rows._product
    monkeypatch.setattr(few_rows, "_product", lambda x, *rest: found.append(len(x)) or ours(x, *rest))
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
    assert calls == [1] * (MOST_ROWS + 1) + list(range(MOST_ROWS + 1)) + [12]


def test_more_rows_other_dtypes_and_gradients_are_torchs(calls):
    model = Layers(torch.float32)
    x = torch.randn(MOST_ROWS + 1, 37)
    wanted = model.plain(x)
    with few_row_products(model):
        assert torch.equal(model.plain(x), wanted)
        model.plain(x[:2].requires_grad_()).sum().backward()
        with pytest.raises(RuntimeError, match="dtype"):
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
    assert calls == [2] and seen == [(2, 29)]


def test_autocast_decides_the_dtype():
    model, x = Layers(torch.float32), torch.randn(2, 37)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model.plain(x)
        with few_row_products(model):
            found = model.plain(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert_close(found, wanted, rtol=2**-7, atol=2**-7)
