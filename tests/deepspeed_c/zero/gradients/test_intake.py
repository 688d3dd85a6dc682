"""Gradients on their way into buckets, against torch's own."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from deepspeed_c.utils import safe_get_full_grad
from deepspeed_c.zero.gradients.intake import GradientIntake
from deepspeed_c.zero.gradients.scaling import PassScaling
from deepspeed_c.zero.gradients.slots import SlotTable
from tests.deepspeed_c.zero.gradients.slots import make_slots
from tests.deepspeed_c.zero.gradients.test_shown import batch, make_engine
from tests.ranks import on_ranks

SIZES = (3, 5, 2)
WIDTH = 7


class Sums:
    """A bucket that holds whole gradients in fp64, by slot."""

    def __init__(self, slots: SlotTable, number: int, path) -> None:
        self.slots, self.number, self.path = slots, number, path
        self.buffer = torch.zeros(sum(SIZES), dtype=torch.float64)
        self.has_result = False
        self.is_open = False

    def open(self, will_reduce: bool) -> None:
        self.is_open = True
        self.path.open(self.number, 0, sum(SIZES), torch.float32)

    def add(self, slot, grad: torch.Tensor, ratio: float, *, will_reduce: bool) -> None:
        self.buffer[slot.offset : slot.offset + slot.numel] += grad.double() * ratio


class Rig:
    """An intake over one bucket. C takes no gradient, because the scale of each pass is not 1."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.full((n,), float(n))) for n in SIZES]
        self.slots = make_slots(self.params, [[[0, 1, 2]]])
        self.path = self.slots.make_path()
        self.bucket = Sums(self.slots, 0, self.path)
        self.scaling = PassScaling(self.slots, [], lambda param: None)
        self.begun = 0
        for p in self.params:
            p.grad = torch.ones_like(p)  # from before the engine
        self.intake = GradientIntake(
            self.slots,
            [self.bucket],
            self.path,
            self.scaling,
            begin_inside=self.begin,
            start=lambda i: None,
            lock=threading.RLock(),
        )
        self.begin_window()

    def begin_window(self) -> None:
        self.scaling.end_window()
        self.scaling.begin_pass(1.0)  # the window's factor
        self.scaling.end_pass()
        self.intake.set_mode(is_in_pass=False, will_reduce=True, launches=False)

    def begin(self) -> None:
        self.begun += 1
        self.scaling.begin_pass(0.25)
        self.intake.set_mode(is_in_pass=True, will_reduce=True, launches=False)

    def of(self, k: int) -> torch.Tensor:
        slot = self.slots.find(self.params[k])
        return self.bucket.buffer[slot.offset : slot.offset + slot.numel]


def test_the_first_gradient_begins_a_pass_that_nobody_announced() -> None:
    rig = Rig()
    assert all(p.grad is None for p in rig.params)
    sum((p * p).sum() for p in rig.params).backward()
    assert rig.begun == 1
    for k, p in enumerate(rig.params):
        want = 0.25 * 2 * p.detach().double()
        assert torch.equal(rig.of(k), want), (rig.of(k), want)
        assert p.grad is None


def test_graphs_hand_in_gradients_and_parts_of_gradients() -> None:
    rig = Rig()
    rig.begin()
    numbers = [rig.intake.number_of(p) for p in rig.params]
    part = torch.ones(SIZES[1])
    rig.intake.take(numbers[0], torch.full((SIZES[0],), 8.0))
    rig.intake.take_part(numbers[1], part)
    rig.intake.take_part(numbers[1], 3 * part)
    rig.intake.take_part(numbers[2], torch.ones(SIZES[2]))
    assert torch.equal(rig.of(1), torch.zeros(SIZES[1], dtype=torch.float64)), rig.of(1)
    assert torch.equal(part, torch.ones(SIZES[1])), "the graph's own tensor"
    (rig.params[1] * 4).sum().backward()  # autograd adds to the parts, and its hook takes the sum
    rig.intake.end_pass()
    for k, want in enumerate((2.0, 2.0, 0.25)):
        assert rig.of(k).tolist() == [want] * SIZES[k], (k, rig.of(k), want)
    rig.intake.end_pass()
    assert rig.of(2).tolist() == [0.25] * SIZES[2], "parts are taken once"


def test_graphs_get_no_number_for_gradients_that_others_see() -> None:
    rig = Rig()
    numbers = [rig.slots.find(p).tracker_index for p in rig.params]
    assert [rig.intake.number_of(p) for p in rig.params] == numbers
    rig.params[1].register_hook(lambda grad: None)
    assert rig.intake.number_of(rig.params[1]) is None
    assert rig.intake.number_of(torch.zeros(3)) is None


def test_cleared_parts_do_not_come_to_a_bucket() -> None:
    rig = Rig()
    rig.begin()
    rig.intake.take_part(rig.intake.number_of(rig.params[0]), torch.ones(SIZES[0]))
    rig.intake.clear()
    rig.intake.end_pass()
    assert not rig.bucket.buffer.any() and rig.params[0].grad is None


def test_wrapped_and_closed_hooks() -> None:
    rig, seen = Rig(), []
    rig.begin()

    def wrap(i, hook):
        def noting(param: torch.Tensor) -> None:
            seen.append(i)
            hook(param)

        return noting

    rig.intake.wrap_hooks(wrap)
    rig.params[0].sum().backward()
    assert seen == [rig.intake.number_of(rig.params[0])] and rig.of(0).tolist() == [0.25] * 3
    rig.intake.close()
    rig.params[0].sum().backward()
    assert len(seen) == 1 and rig.params[0].grad.tolist() == [1.0] * 3


def test_a_caller_gets_a_place_before_the_sums_are_there() -> None:
    rig = Rig()
    slot = rig.slots.find(rig.params[1])
    rig.bucket.has_result = True
    rig.intake.open_for_caller(slot)
    assert not rig.bucket.is_open
    rig.bucket.has_result = False
    rig.intake.open_for_caller(slot)
    assert rig.bucket.is_open and slot.tracker_index not in rig.path.missing(0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(1)
def test_gradients_from_before_the_engine_are_none_of_its(rank: int, world: int, stage: int) -> None:
    net = nn.Linear(WIDTH, 1)
    net(batch(0, 0)).sum().backward()
    engine = make_engine(net, 1, stage)
    assert net.weight.grad is None
    engine.backward(engine(batch(0, 1)).sum())
    assert torch.allclose(safe_get_full_grad(net.weight), batch(0, 1).sum(0, keepdim=True))
    engine.close()
