"""Runs a rank's list of actions, from any schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten

from deepspeed_c import _C
from deepspeed_c.errors import CommError, DeepSpeedCError, ModelError, RankMismatchError
from deepspeed_c.pipe.link import Link, LocalLink
from deepspeed_c.pipe.split import SplitBackward
from deepspeed_c.pipe.stopping import Peers, Stopped
from deepspeed_c.pipe.writable import needs_gradient

__all__ = ["COMPUTATIONS", "Lent", "Runner", "Stage"]

_WHAT = {
    _C.PIPE_FORWARD: "the forward",
    _C.PIPE_BACKWARD: "the backward",
    _C.PIPE_INPUT: "the backward",
    _C.PIPE_WEIGHT: "the backward",
}
COMPUTATIONS = frozenset(_WHAT)
"""The kinds of actions that compute; the others move values between ranks."""


class _StageFailed(NamedTuple):
    """Goes through the links in place of values after a stage has raised an exception."""


class Stage(NamedTuple):
    """One stage of this rank, and its links. Links are None at the ends of the pipeline."""

    run: Callable[[Any], Any]
    """Runs the stage's layers."""
    inputs: Link | None
    """Brings values from the previous stage. Their gradients go back through ``input_grads``."""
    input_grads: Link | None
    outputs: Link | None
    """Takes values to the next stage. Their gradients come back through ``output_grads``."""
    output_grads: Link | None
    splits: bool
    """Whether the stage's backward can be done in two halves. Otherwise the first half does all of it."""


class Lent(NamedTuple):
    """Functions that the engine provides for one run."""

    first_inputs: Callable[[int], Any]
    """Returns the input of the first stage for a micro-batch."""
    result: Callable[[Any, int], Any]
    """(output of the last stage, micro-batch) -> the result of the micro-batch: in training a scalar loss."""
    scale: Callable[[torch.Tensor], torch.Tensor]
    """Maps the loss to the scalar where the backward starts."""
    backward: Callable[[], AbstractContextManager[None]]
    """The context around each run of autograd."""
    measure: Callable[[str], AbstractContextManager[None]] = nullcontext
    """A context whose time counts as a phase: "forward", "backward", or "messages" of the links."""
    computing: Callable[[int, int], AbstractContextManager[None]] = lambda kind, stage: nullcontext()
    """The context of one computation, which is (kind of action, stage)."""
    skip: Callable[[int, int], None] = lambda kind, stage: None
    """Called in place of a computation after a stage has failed: does this rank's part of what other ranks need."""


class _Flight:
    """The part of a micro-batch that a stage keeps from its forward to its backward: the places where gradients enter
    and leave. Outputs themselves are freed as soon as they are sent."""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        self.inputs = [leaf for leaf in tree_flatten(inputs)[0] if needs_gradient(leaf)]
        self.roots = [get_gradient_edge(leaf) for leaf in tree_flatten(outputs)[0] if needs_gradient(leaf)]
        self.half: SplitBackward | None = None


class Runner:
    """Runs actions (``dsc/pipe.h``) over the stages of this rank. Stages are given by number."""

    def __init__(self, stages: Mapping[int, Stage], peers: Peers) -> None:
        self._stages, self._peers = dict(stages), peers
        self._compute: dict[int, Callable[[int, int, Any], None]] = {
            _C.PIPE_FORWARD: self._forward,
            _C.PIPE_BACKWARD: self._backward,
            _C.PIPE_INPUT: self._input,
            _C.PIPE_WEIGHT: self._weight,
        }
        self._move: dict[int, Callable[[int, int], None]] = {
            _C.PIPE_SEND_F: self._send_output,
            _C.PIPE_RECV_F: self._post_input,
            _C.PIPE_SEND_B: self._send_gradients,
            _C.PIPE_RECV_B: self._post_gradients,
        }
        self._forget()

    def _forget(self) -> None:
        # The keys are (stage, micro-batch).
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._outputs: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], list[torch.Tensor | None]] = {}

    def run(self, actions: Sequence[tuple[int, int, int]], lent: Lent, *, has_backward: bool) -> dict[int, Any]:
        """Run a list of (kind, stage, micro-batch). Returns the last stage's results by micro-batch; they are empty on
        other ranks. After an exception no state of the run is left.

        Raises Stopped if a stage of the pipeline raises an exception, after all messages of the run: the rank computes
        no more, and sends ``_StageFailed`` in place of each further value. A rank that receives it does the same, and
        so does a rank whose collectives have failed because a peer has stopped ([Note: peers] in stopping.py). Errors
        of messages are raised at once, and after them ranks can no longer exchange values.
        """
        self._lent, self._has_backward = lent, has_backward
        self._results: dict[int, Any] = {}
        self._stopped: Stopped | None = None
        self._peers.begin()
        try:
            for kind, stage, micro_batch in actions:
                if kind in self._move:
                    self._move[kind](stage, micro_batch)
                else:
                    self._step(kind, stage, micro_batch)
            with lent.measure("messages"):
                for link in self._links():
                    link.flush()
        except BaseException:
            for link in self._links():
                link.clear()
            raise
        finally:
            self._forget()
        if self._stopped is not None:
            for link in self._links():
                link.clear()  # values between two stages of this rank may be left
            raise self._stopped
        return self._results

    def _step(self, kind: int, s: int, k: int) -> None:
        """Receive the value that a computation needs, and compute, unless a stage has failed."""
        link = self._source(kind, s)
        value = None
        if link is not None and not (self._stopped and isinstance(link, LocalLink)):
            with self._lent.measure("messages"):
                value = link.take()
        if isinstance(value, _StageFailed) and self._stopped is None:
            self._stop(Stopped())
        if self._stopped is not None:
            self._lent.skip(kind, s)
            return
        try:
            with self._lent.computing(kind, s):
                self._compute[kind](s, k, value)
        except (CommError, RankMismatchError):
            if self._peers.notice() is None:
                raise
            self._stop(Stopped())
        except Exception as error:  # noqa: BLE001  layers raise anything, and all ranks have to learn of it
            text = error.what if isinstance(error, DeepSpeedCError) else str(error)
            where = f"{_WHAT[kind]} of stage {s}, micro-batch {k}"
            self._stop(Stopped(f"{where}, raised {type(error).__name__}: {text}", error))

    def _source(self, kind: int, s: int) -> Link | None:
        """The link that brings the value that a computation needs."""
        if kind == _C.PIPE_FORWARD:
            return self._stages[s].inputs
        return None if kind == _C.PIPE_WEIGHT else self._stages[s].output_grads

    def _stop(self, stopped: Stopped) -> None:
        self._stopped = stopped
        self._peers.stop(stopped)

    def _links(self) -> list[Link]:
        return [
            link
            for stage in self._stages.values()
            for link in (stage.inputs, stage.input_grads, stage.outputs, stage.output_grads)
            if link is not None
        ]

    def _forward(self, s: int, k: int, value: Any) -> None:
        stage = self._stages[s]
        inputs = self._lent.first_inputs(k) if stage.inputs is None else value
        with self._lent.measure("forward"):
            outputs = stage.run(inputs)
            if stage.outputs is None:
                outputs = self._lent.result(outputs, k)
                self._results[k] = outputs.detach() if self._has_backward else outputs
                if self._has_backward:
                    outputs = self._lent.scale(outputs)
            else:
                self._outputs[s, k] = outputs
        if self._has_backward:
            self._flights[s, k] = _Flight(() if stage.inputs is None else inputs, outputs)
        if isinstance(stage.outputs, LocalLink):
            self._send_output(s, k)

    def _send(self, link: Link, value: Any, label: str) -> None:
        with self._lent.measure("messages"):
            if self._stopped is None:
                try:
                    link.send(value, label)
                    return
                except ModelError as error:  # nothing has been sent
                    self._stop(Stopped(f"{label} raised {type(error).__name__}: {error.what}", error))
            link.send(_StageFailed(), label)

    def _send_output(self, s: int, k: int) -> None:
        self._send(self._stages[s].outputs, self._outputs.pop((s, k), None), _label("output", s, k))

    def _post_input(self, s: int, k: int) -> None:
        self._stages[s].inputs.post(_label("output", s - 1, k))

    def _send_gradients(self, s: int, k: int) -> None:
        value = self._gradients.pop((s, k), None)
        self._send(self._stages[s].input_grads, value, _label("gradient of the input", s, k))

    def _post_gradients(self, s: int, k: int) -> None:
        self._stages[s].output_grads.post(_label("gradient of the input", s + 1, k))

    def _roots(
        self, s: int, k: int, received: list[torch.Tensor | None] | None
    ) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """The edges where the backward starts, and their gradients. There are no edges if no later stage has used the
        output.
        """
        stage, roots = self._stages[s], self._flights[s, k].roots
        if stage.output_grads is None:
            return roots, [torch.ones_like(self._results[k]) for _ in roots]
        pairs = [(root, grad) for root, grad in zip(roots, received, strict=True) if grad is not None]
        return [root for root, _ in pairs], [grad for _, grad in pairs]

    def _backward(self, s: int, k: int, value: Any) -> None:
        roots, grads = self._roots(s, k, value)
        flight = self._flights.pop((s, k))
        with self._lent.measure("backward"), self._lent.backward():
            if roots:
                torch.autograd.backward(roots, grads)
        self._give_back(s, k, [leaf.grad for leaf in flight.inputs])

    def _input(self, s: int, k: int, value: Any) -> None:
        if not self._stages[s].splits:
            self._backward(s, k, value)
            return
        roots, grads = self._roots(s, k, value)
        flight = self._flights[s, k]
        flight.half = SplitBackward(roots, grads, flight.inputs)
        with self._lent.measure("backward"), self._lent.backward():
            given = flight.half.input_half()
        self._give_back(s, k, given)

    def _weight(self, s: int, k: int, value: None) -> None:
        flight = self._flights.pop((s, k), None)
        if flight is not None and flight.half is not None:
            with self._lent.measure("backward"), self._lent.backward():
                flight.half.weight_half()

    def _give_back(self, s: int, k: int, grads: list[torch.Tensor | None]) -> None:
        stage = self._stages[s]
        if stage.input_grads is None:
            return
        self._gradients[s, k] = grads
        if isinstance(stage.input_grads, LocalLink):
            self._send_gradients(s, k)


def _label(what: str, stage: int, micro_batch: int) -> str:
    return f"{what} of stage {stage}, micro-batch {micro_batch}"
