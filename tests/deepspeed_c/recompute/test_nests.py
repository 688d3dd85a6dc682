"""recompute/nests.py: arguments are taken apart and put together again. DeepSpeed's three helper functions are tested
too."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch

from deepspeed_c.checkpointing import detach_variable, extract_tensors, merge_tensors
from deepspeed_c.recompute.nests import Arguments, tensors_of

Pair = namedtuple("Pair", "a b")


def test_any_nest_comes_back() -> None:
    x, y = torch.randn(3), torch.arange(2)
    args = (x, None, [y, {"k": x}], Pair(1.5, (x[:1],)), OrderedDict(z=[[]]), "text", True)
    kwargs = {"mask": y, "n": 3, "deep": [[(y,)]]}
    arguments = Arguments(args, kwargs)
    assert [id(t) for t in arguments.tensors] == [id(x), id(y), id(args[3].b[0])], "each once"
    others = [t.clone() for t in arguments.tensors]
    arguments.forget()
    assert arguments.tensors == []
    got, named = arguments.with_tensors(others)
    assert got[0] is got[2][1]["k"] is others[0] and named["mask"] is got[2][0] is named["deep"][0][0][0] is others[1]
    assert type(got[3]) is Pair and got[3].a == 1.5 and got[3].b[0] is others[2]
    assert (got[1], got[4], got[5], got[6], named["n"]) == (None, OrderedDict(z=[[]]), "text", True, 3)


@pytest.mark.parametrize("args", [(), (None,), (1, "a", 2.0), (torch.zeros(0),), (torch.nn.Parameter(torch.ones(1)),)])
def test_short_ways(args: tuple) -> None:
    arguments = Arguments(args, {})
    got, kwargs = arguments.with_tensors(arguments.tensors)
    assert len(got) == len(args) and all(a is b for a, b in zip(got, args)) and kwargs == {}


def test_tensors_of_a_call_are_those_of_its_arguments() -> None:
    x, y, z = torch.randn(3), torch.nn.Parameter(torch.ones(1)), torch.arange(0)
    for args, kwargs in (
        ((), {}),
        ((None, 2), {}),
        ((x,), {}),
        ((y, x, y), {}),
        ((x, None), {"mask": z, "n": 3, "again": x}),
        ((x,), {"rotary": (y, z), "more": {"k": [x, z]}}),
        ((Pair(z, 1), [x]), {"last": y}),
    ):
        found, expected = tensors_of(args, kwargs), Arguments(args, kwargs).tensors
        assert list(map(id, found)) == list(map(id, expected)), f"{found} of {expected}"


@pytest.mark.parametrize("make", [tuple, list])
def test_extract_and_merge(make: type) -> None:
    x, y = torch.randn(2), torch.randn(3)
    objects = make([1, x, None, y, x])
    tensors, others, flags = extract_tensors(objects)
    assert all(type(part) is make for part in (tensors, others, flags))
    assert [t is u for t, u in zip(tensors, (x, y, x))] == [True] * 3
    assert list(others) == [1, None] and list(flags) == [False, True, False, True, True]
    merged = merge_tensors(tensors, others, flags)
    assert type(merged) is tuple and all(a is b for a, b in zip(merged, objects)) and len(merged) == 5
    assert merge_tensors(*extract_tensors(make([]))) == ()
    with pytest.raises(ValueError, match="2 tensors and 2 other objects; the flags want 3 and 2"):
        merge_tensors(tensors[:2], others, flags)


def test_detach_variable() -> None:
    x, y = torch.randn(2, requires_grad=True), torch.arange(2)
    got = detach_variable((x * 1, y, None, 3))
    assert type(got) is tuple and got[0].is_leaf and got[0].requires_grad and not got[1].requires_grad
    assert torch.equal(got[0], x) and got[2:] == (None, 3)
    assert detach_variable([y], device="cpu")[0].device.type == "cpu"
    with pytest.raises(TypeError, match="Tensor"):
        detach_variable(x)
