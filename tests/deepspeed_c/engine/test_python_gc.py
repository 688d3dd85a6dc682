"""disable_python_gc: automatic garbage collection is off while an engine with this key lives, and as before
afterwards."""

from __future__ import annotations

import gc
import os
from unittest import mock

import torch

import deepspeed_c
from deepspeed_c.engine import edits
from deepspeed_c.engine.python_gc import CollectorPause
from tests import training
from tests.ranks import run_ranks
from tests.waits import exit_status, fork_with_alarm


class Node:
    """A part of a cycle, which only the collector frees."""

    freed = 0

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        Node.freed += 1


def make(*, is_off: bool) -> deepspeed_c.DeepSpeedEngine:
    config = training.config(1, rows=3, disable_python_gc=is_off)
    return deepspeed_c.initialize(model=torch.nn.Linear(5, 3), config=config)[0]


def freed_of_cycles() -> int:
    """How many of 5000 cycles automatic collections free."""
    before = Node.freed
    for _ in range(5000):
        Node()
    return Node.freed - before


def engines_body(rank: int, world: int) -> list:
    gc.enable()
    seen = [gc.isenabled()]
    Node()
    before = Node.freed
    first = make(is_off=True)
    seen += [gc.isenabled(), Node.freed - before]  # the garbage of the start has been collected once
    second, third = make(is_off=True), make(is_off=False)
    training.update(first, first(torch.ones(3, 5)).square().mean())
    seen += [freed_of_cycles(), first.collect_python_gc() >= 5000]
    third.close()
    seen.append(gc.isenabled())
    first.close()
    first.close()
    seen.append(gc.isenabled())  # the second engine still needs the pause
    second.destroy()
    seen += [gc.isenabled(), freed_of_cycles() > 0]
    return seen


def test_collections_are_off_until_the_last_engine_is_closed():
    for seen in run_ranks(2, engines_body):
        assert seen == [True, False, 1, 0, True, False, False, True, True], seen


def failed_body(rank: int, world: int) -> list[bool]:
    """The last edit fails, which is made during the pause; the pause must end."""
    gc.enable()
    seen = []

    def fail(*_: object) -> None:
        seen.append(gc.isenabled())
        raise KeyError("the last edit")

    failing = edits.ModelEdit("failing", wanted=lambda context: True, apply=fail)
    with mock.patch.object(edits, "EDITS", (*edits.EDITS, failing)):
        try:
            make(is_off=True)
        except KeyError:
            return [*seen, gc.isenabled()]
    raise AssertionError("nothing failed")


def test_a_failed_start_turns_collections_on_again():
    assert run_ranks(2, failed_body) == [[False, True]] * 2


def off_before_body(rank: int, world: int) -> list[bool]:
    gc.disable()
    engine = make(is_off=True)
    during = gc.isenabled()
    engine.close()
    after = gc.isenabled()
    gc.enable()
    return [during, after]


def test_a_collector_that_the_program_turned_off_stays_off():
    assert run_ranks(2, off_before_body) == [[False, False]] * 2


def fork_body(rank: int, world: int) -> list:
    gc.enable()
    pause = CollectorPause()
    pid = fork_with_alarm()
    if pid == 0:
        is_on = gc.isenabled()
        pause.close()  # the pause belongs to the parent: nothing happens
        later = CollectorPause()
        is_off = not gc.isenabled()
        later.close()
        os._exit(0 if is_on and is_off and gc.isenabled() else 1)
    code = exit_status(pid)
    still_off = not gc.isenabled()
    pause.close()
    return [code, still_off, gc.isenabled()]


def test_a_forked_child_collects():
    assert run_ranks(1, fork_body) == [[0, True, True]]
