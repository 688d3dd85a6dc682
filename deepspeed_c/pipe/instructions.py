"""``deepspeed.runtime.pipe.schedule``: a rank's part of a batch as steps of instructions.

The engine runs other tables (``deepspeed_c.pipe.schedule``) and does not read these objects. They are for programs that
print or extend DeepSpeed's schedules. The order of forwards and backwards in ``TrainSchedule`` is that of our table
"1f1b", and steps and buffers are those of DeepSpeed 0.19.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from deepspeed_c import _C
from deepspeed_c.pipe.schedule import make_table
from deepspeed_c.utils.runtime import call_to_str

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]


class PipeInstruction:
    """An instruction of a step. Keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """The update of the weights."""


class ReduceGrads(PipeInstruction):
    """The reduction of gradients over data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """The sum of the gradients of tied layers over stages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on the values of one micro-batch. buffer_id: number of the buffer that holds them."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take a micro-batch from the data, for its inputs (first stage) or labels (last stage)."""


class ForwardPass(BufferOpInstruction):
    """Run the layers of the stage."""


class BackwardPass(BufferOpInstruction):
    """Compute gradients of the stage's input and weights."""


class SendActivation(BufferOpInstruction):
    """Send the output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the input from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the input to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the output from the next stage."""


class PipeSchedule(ABC):
    """The steps of one stage for a batch; an iterator over lists of instructions. Subclasses define ``steps``.

    micro_batches: number of micro-batches of the batch. stages: number of stages. stage_id: the stage, from 0.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__()
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.it: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the list of instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Number of buffers of the stage."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """The buffer of a micro-batch; buffers are used in turn."""
        if not self._valid_micro_batch(micro_batch_id):
            raise ValueError(f"there is no micro-batch {micro_batch_id}; there are {self.micro_batches}")
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> PipeSchedule:
        self.it = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self.it is None:
            self.it = self.steps()
        return next(self.it)


class TrainSchedule(PipeSchedule):
    """One forward, one backward (1F1B). In each step every stage computes at most one of them. Stages of even number do
    their forwards in even steps and their backwards in odd steps, other stages the other way round.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        at = self._steps_of_table()
        n_steps = 2 * (self.micro_batches + self.stages - 1)
        is_end = self.is_first_stage or self.is_last_stage
        before: int | None = None
        for step in range(n_steps):
            is_forward = step % 2 == self.stage_id % 2
            now = at.get(step)
            # Results are sent one step after they are computed.
            instructions: list[PipeInstruction] = []
            if is_forward and self._valid_stage(self.prev_stage):
                if before is not None:
                    instructions.append(SendGrad(self._buffer_idx(before)))
                if now is not None:
                    instructions.append(RecvActivation(self._buffer_idx(now)))
            if not is_forward and self._valid_stage(self.next_stage):
                if now is not None:
                    instructions.append(RecvGrad(self._buffer_idx(now)))
                if before is not None:
                    instructions.append(SendActivation(self._buffer_idx(before)))
            if now is not None:
                buffer = self._buffer_idx(now)
                if is_forward and is_end:
                    instructions.append(LoadMicroBatch(buffer))
                instructions.append(ForwardPass(buffer) if is_forward else BackwardPass(buffer))
            if step == n_steps - 1:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = now
            yield instructions

    def _steps_of_table(self) -> dict[int, int]:
        """step -> the micro-batch that the stage computes in it, from the table of "1f1b". A stage computes its list in
        order. Micro-batch k goes forward through stage 0 in step 2k, and each stage is a step later; its backward
        begins on the last stage in the step after its forward there.
        """
        table = make_table("1f1b", self.stages, 1, self.micro_batches, "TrainSchedule")
        found: dict[int, int] = {}
        for kind, stage, k in table.actions(self.stage_id):
            if kind == _C.PIPE_FORWARD:
                found[2 * k + stage] = k
            elif kind == _C.PIPE_BACKWARD:
                found[2 * k + 2 * self.stages - 1 - stage] = k
        return found

    def num_pipe_buffers(self) -> int:
        """Number of forwards that wait for their backward at the same time, and at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class InferenceSchedule(PipeSchedule):
    """Forwards only. Micro-batch k goes through stage s in step k + s, and its output is sent in the next step."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            k = step - self.stage_id
            # Two buffers are used in turn, one to receive and one to send.
            receive, send = (step + self.stage_id) % 2, (step + self.stage_id + 1) % 2
            instructions: list[PipeInstruction] = []
            if (self.is_first_stage or self.is_last_stage) and self._valid_micro_batch(k):
                instructions.append(LoadMicroBatch(receive))
            moves: list[PipeInstruction] = []
            if self._valid_stage(self.next_stage) and self._valid_micro_batch(k - 1):
                moves.append(SendActivation(send))
            if self._valid_stage(self.prev_stage) and self._valid_micro_batch(k):
                moves.append(RecvActivation(receive))
            # Neighbours do them in opposite order, so that a send meets its receive.
            instructions += moves if self.stage_id % 2 == 0 else moves[::-1]
            if self._valid_micro_batch(k):
                instructions.append(ForwardPass(receive))
            yield instructions

    def num_pipe_buffers(self) -> int:
        """2."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """Each step is the forward and backward of a micro-batch, without a pipeline."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches):
            instructions: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if step == self.micro_batches - 1:
                instructions += [ReduceGrads(), OptimizerStep()]
            yield instructions

    def num_pipe_buffers(self) -> int:
        """1."""
        return 1
