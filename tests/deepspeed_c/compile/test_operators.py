"""The four operators of compiled graphs: their declarations, and what each passes on to its host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from deepspeed_c.compile.operators import ZERO_GATHER, ZERO_REDUCE, ZERO_RELEASE, ZERO_WAIT, register_host


class Host:
    """Writes down the calls that arrive, with the objects that they pass."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def gather(self, unit: int) -> None:
        self.calls.append(("gather", unit))

    def wait(self, unit: int, weights: Any, places: Any) -> None:
        self.calls.append(("wait", unit, list(weights), list(places)))

    def release(self, unit: int, weights: Any, places: Any) -> None:
        self.calls.append(("release", unit, list(weights), list(places)))

    def reduce(self, gradient: torch.Tensor, slot: int) -> None:
        self.calls.append(("reduce", gradient, slot))


# Left out of opcheck's tests: the one of autograd and the one of dynamic shapes. The operators stand in graphs that
# autograd has already split into a forward and a backward, and they return nothing.
TESTS = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("shapes", [[], [(0, 7)], [(3, 5), (13,)], [()]])
@pytest.mark.parametrize("operator", [ZERO_GATHER, ZERO_WAIT, ZERO_RELEASE, ZERO_REDUCE], ids=lambda op: op.name())
def test_declarations(operator: Any, shapes: list[tuple[int, ...]]) -> None:
    host = Host()
    weights, order = [torch.randn(shape) for shape in shapes], torch.zeros(1, dtype=torch.uint8)
    unit = (order, register_host(host), 4, list(range(len(weights))))
    if operator is ZERO_REDUCE:
        for weight in weights:
            opcheck(operator, (weight, *unit[:3]), test_utils=TESTS)
        return
    after = ([torch.ones(2)],) if operator is ZERO_RELEASE else ()
    opcheck(operator, (weights, *after, *unit), test_utils=TESTS)


def test_the_host_gets_the_tensors_themselves() -> None:
    host, other = Host(), Host()
    number, _ = register_host(host), register_host(other)
    weights, order, gradient = [torch.ones(3), torch.ones(0)], torch.zeros(1, dtype=torch.uint8), torch.randn(5)
    assert ZERO_GATHER(weights, order, number, 7, [1, 0]) is None
    ZERO_WAIT(weights, order, number, 7, [1, 0])
    ZERO_RELEASE(weights, [gradient], order, number, 7, [1, 0])
    ZERO_REDUCE(gradient, order, number, 2)
    assert [call[0] for call in host.calls] == ["gather", "wait", "release", "reduce"] and not other.calls
    for name, unit, tensors, places in host.calls[1:3]:
        assert unit == 7 and places == [1, 0], name
        assert all(a is b for a, b in zip(tensors, weights, strict=True)), name
    assert host.calls[3][1] is gradient and host.calls[3][2] == 2
    assert not order.any(), "order is only declared to be written to"


def test_a_host_that_is_gone_is_not_called() -> None:
    number = register_host(Host())
    with pytest.raises(KeyError):
        ZERO_GATHER([], torch.zeros(1, dtype=torch.uint8), number, 0, [])
