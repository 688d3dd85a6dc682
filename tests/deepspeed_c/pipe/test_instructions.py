"""DeepSpeed's schedules as steps of instructions."""

from __future__ import annotations

import itertools

import pytest

from deepspeed_c import _C
from deepspeed_c.pipe.instructions import (
    BackwardPass,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    PipeInstruction,
    PipeSchedule,
    TrainSchedule,
)
from deepspeed_c.pipe.schedule import make_table

LETTERS = {"LoadMicroBatch": "L", "ForwardPass": "F", "BackwardPass": "B", "SendActivation": "sa", "RecvActivation": "ra",
           "SendGrad": "sg", "RecvGrad": "rg", "ReduceGrads": "R", "ReduceTiedGrads": "T", "OptimizerStep": "O"}  # fmt: skip

# Printed by DeepSpeed 0.19.6 in this form.
OF_DEEPSPEED = {
    (TrainSchedule, 3, 2, 0): "L0F0|sa0|L1F1|rg0sa1B0|L0F0|rg1sa0B1||rg0B0TRO",
    (TrainSchedule, 2, 3, 1): "|ra0F0|sa0|ra1F1|rg0sa1B0|sg0|rg1B1|sg1TRO",
    (InferenceSchedule, 3, 2, 0): "L0F0|L1sa0F1|L0sa1F0|sa0",
    (InferenceSchedule, 3, 2, 1): "|L0ra0F0|L1ra1F1|L0ra0F0",
    (DataParallelSchedule, 2, 1, 0): "L0F0B0|L0F0B0RO",
}


def text_of(schedule: PipeSchedule) -> str:
    return "|".join("".join(f"{LETTERS[c.name]}{getattr(c, 'buffer_id', '')}" for c in step) for step in schedule)


@pytest.mark.parametrize("shape", OF_DEEPSPEED, ids=lambda shape: shape[0].__name__)
def test_steps_are_those_of_deepspeed(shape):
    kind, *numbers = shape
    assert text_of(kind(*numbers)) == OF_DEEPSPEED[shape]


@pytest.mark.parametrize("n, stages", list(itertools.product(range(1, 9), range(1, 5))))
def test_sends_meet_receives_and_computations_are_those_of_the_table(n, stages):
    table = make_table("1f1b", stages, 1, n, "test")
    kinds = {_C.PIPE_FORWARD: ForwardPass, _C.PIPE_BACKWARD: BackwardPass}
    for kind in (TrainSchedule, InferenceSchedule):
        steps = [[{c.name for c in step} for step in kind(n, stages, s)] for s in range(stages)]
        for a, b in itertools.pairwise(steps):
            for mine, other in zip(a, b, strict=True):
                assert ("SendActivation" in mine) == ("RecvActivation" in other)
                assert ("RecvGrad" in mine) == ("SendGrad" in other)
    for s in range(stages):
        schedule = TrainSchedule(n, stages, s)
        computed = [type(c) for step in schedule for c in step if isinstance(c, (ForwardPass, BackwardPass))]
        assert computed == [kinds[a] for a, _, _ in table.actions(s) if a in kinds]
        assert (schedule.num_stages, schedule.stage, schedule.num_micro_batches) == (stages, s, n)
        assert (schedule.is_first_stage, schedule.is_last_stage) == (s == 0, s == stages - 1)


def test_a_schedule_of_a_program():
    class Noted(PipeInstruction):
        pass

    class Own(TrainSchedule):
        def steps(self):
            for step in super().steps():
                yield [*step, Noted(at=3)]

    steps = list(Own(2, 2, 1))
    assert [repr(step[-1]) for step in steps] == ["Noted(at=3)"] * 6
    assert steps[0][-1].at == 3 and steps[0][-1].kwargs == {"at": 3}
    with pytest.raises(TypeError):
        PipeSchedule(1, 1, 0)
