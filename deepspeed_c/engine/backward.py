"""The backward pass of an engine: how it begins, the factors of its gradients, and how it ends.

A pass begins in one of three ways: by ``engine.backward``, by a caller's ``loss.backward()`` through outputs of the
engine, or inside the module. In the last case the first gradient shows that a pass has begun.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten

from deepspeed_c import _C
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.boundary import scale_outputs, watch_outputs
from deepspeed_c.engine.passes import accumulates_into, leads_here, nodes_of, will_run
from deepspeed_c.engine.window import Window
from deepspeed_c.errors import BackwardError
from deepspeed_c.logging import logger
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.weights.drivers.recorded import RecordedPlan
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.param import saved_parameters_answer

__all__ = ["BackwardPass"]

# A number that no pass of autograd has.
NO_PASS = -2

# All engines' passes, because one pass of autograd may go through the outputs of several engines.
_all: weakref.WeakSet[BackwardPass] = weakref.WeakSet()


class PassCompiler(Protocol):
    """Traces and compiles backward passes as they run."""

    def running(self) -> AbstractContextManager[None]:
        """Surrounds a backward pass."""

    def outside(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook``, which the compiler does not trace."""


class BackwardPass:
    """One engine's backward passes, one at a time.

    ``drop_window`` is called when a pass has failed, because its window is incomplete then. ``needs_weights``: every
    loss must go through ``weigh``. Call ``drive`` before the first forward.
    """

    def __init__(
        self,
        window: Window,
        scaler: _C.LossScaler | None,
        mesh: Mesh,
        drop_window: Callable[[], None],
        needs_weights: bool,
    ) -> None:
        self._window, self._scaler, self._mesh, self._drop_window = window, scaler, mesh, drop_window
        self._reducer: GradientReducer | None = None
        self._fetcher: Fetcher | None = None
        self.n_backwards = 0  # in this window
        self.is_inside_no_sync = False
        # Autograd's number of the last pass that reached the outputs and goes on to parameters, and the factor that it
        # applies to gradients of the outputs.
        self._task, self._output_factor = NO_PASS, 1.0
        self._scaled_pass = NO_PASS, 1.0  # the last pass whose loss this engine has scaled, and the factor
        self._has_told_of_inputs = False
        self._needs_weights, self._weighed_pass = needs_weights, NO_PASS
        self._compiler: PassCompiler | None = None
        self.begin_window()

    def compile_by(self, compiler: PassCompiler | None) -> None:
        """From now on ``compiler`` compiles the passes that ``run`` begins."""
        self._compiler = compiler

    def _outside(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return hook if self._compiler is None else self._compiler.outside(hook)

    def drive(self, reducer: GradientReducer, fetcher: Fetcher | None) -> None:
        """Sets the reducer that takes the gradients of passes, and the fetcher that gathers weights for them."""
        self._reducer, self._fetcher = reducer, fetcher
        reducer.bind_passes(self)
        _all.add(self)

    def leave(self) -> None:
        """Drops the references to the arguments of ``drive``."""
        self._reducer = self._fetcher = None

    def begin_window(self) -> None:
        """Forgets the passes of the previous window."""
        self.n_backwards = 0
        self._has_gradient_graph = False  # a pass with create_graph=True has come through outputs in this window
        self._forget_inputs()

    def _forget_inputs(self) -> None:
        # The number of a pass that scales gradients at the outputs, and the graph nodes that receive gradients of the
        # forward's inputs.
        self._scaled_inputs: tuple[int, frozenset[Any]] = NO_PASS, frozenset()

    @property
    def _has_sharded(self) -> bool:
        return self._fetcher is not None and bool(self._fetcher.groups)

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.scale

    def recover(self) -> None:
        """Cleans up after a pass that raised before its end. Call it at a time when no pass of this engine can be
        running."""
        if torch._C._current_graph_task_id() != -1:
            return
        if not self._reducer.is_in_backward:
            if self._fetcher is not None:
                self._fetcher.drivers.of(RecordedPlan).drop_reading()
            return
        logger.warning(
            "rank %d: a backward pass raised before it had ended; the gradients of this accumulation window are dropped",
            self._mesh.comm.global_rank,
        )
        self._drop_window()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Postpones the reduction of gradients, unless each pass has to be reduced by itself (``same_bits``). Loops of
        accelerate enter it, whatever the configuration says."""
        before, self.is_inside_no_sync = self.is_inside_no_sync, True
        try:
            with nullcontext() if self._window.reduces_each_pass else self._reducer.no_sync():
                yield
        finally:
            self.is_inside_no_sync = before

    def _begin(
        self,
        *,
        factor: float,
        output_factor: float = 1.0,
        starts: Sequence[Any] | None = None,
    ) -> None:
        """Begins a pass. Its gradients are multiplied by ``output_factor`` at the outputs, and by ``factor`` when they
        are collected.

        starts: the first nodes of the graph. None for a pass that is running already: its first nodes are not known,
        and a callback of autograd ends it.
        """
        self._window.check_pass(self.n_backwards)
        self._mesh.enter_phase("backward")
        self._reducer.begin_backward(
            is_boundary=self._window.is_boundary(),
            factor=factor,
            divisor=self._window.divisor(),
            starts=starts,
        )
        self._output_factor = output_factor
        if starts is None:
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._reducer.end_backward()

    def run(self, loss: torch.Tensor, retain_graph: bool, scale_wrt_gas: bool) -> None:
        """Does the work of ``engine.backward``: computes the gradients of the loss times the window's factor."""
        starts = [] if loss.grad_fn is None else [loss.grad_fn]
        self._begin(factor=1.0, starts=starts)
        try:
            scaled = self.scale(loss, self._window.factor(scale_wrt_gas))
            with ExitStack() as around:
                if self._has_sharded:
                    around.enter_context(saved_parameters_answer())
                if self._compiler is not None:
                    around.enter_context(self._compiler.running())
                scaled.backward(retain_graph=retain_graph)
            self._end()
        except BaseException:
            self._drop_window()
            raise
        self.n_backwards += 1

    @contextmanager
    def part(self) -> Iterator[None]:
        """Context for a run of autograd that is a part of a pipeline's pass. The run starts from gradients of a loss
        that the last stage has scaled (``scale``)."""
        self._begin(factor=1.0, starts=[])
        try:
            with saved_parameters_answer() if self._has_sharded else nullcontext():
                yield
            self._end()
        except BaseException:
            self._drop_window()
            raise
        self.n_backwards += 1

    def scale(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """The loss times ``factor`` and, in fp16, times the loss scale. Hooks on parameters and activations see
        gradients of the scaled loss. If its backward reaches parameters of other engines, those find the scale by
        ``_scale_of_pass``."""
        total = self._loss_scale * factor
        if total == 1.0 and self._scaler is None:
            return loss

        def note(_: torch.Tensor) -> None:
            self._scaled_pass = torch._C._current_graph_task_id(), total

        scaled = loss * total
        if scaled.requires_grad:
            scaled.register_hook(self._outside(note))
        return scaled

    def weigh(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """The loss times ``weight``: this rank's term in the sum over the ranks of its sequences. A mean over zero
        tokens is NaN, and its weight is zero."""
        loss = loss if weight else torch.where(loss.isfinite(), loss, 0.0)

        def note(_: torch.Tensor) -> None:
            self._weighed_pass = torch._C._current_graph_task_id()

        weighed = loss * weight
        if weighed.requires_grad:
            weighed.register_hook(self._outside(note))
        return weighed

    def _check_weighed(self, task: int) -> None:
        if self._needs_weights and task != self._weighed_pass:
            raise BackwardError(
                "it is not known how this rank's loss contributes to the loss of its sequences, of which it holds a part",
                where="loss.backward()",
                fix="use engine.backward(loss), or engine.scale(loss).backward(); or weight the losses by valid tokens"
                ' yourself and set "sequence_parallel": {"loss": "part"}',
            )

    def begin_inside(self) -> None:
        """Called when a gradient arrives and the pass has not reached an output of the engine: the pass began inside
        the module."""
        carried = self._scale_of_pass(torch._C._current_graph_task_id())
        self._check_weighed(torch._C._current_graph_task_id())
        if carried is None and self._scaler is not None:
            raise BackwardError(
                "fp16 gradients reached the parameters without the loss scale",
                where="loss.backward()",
                fix="use engine.backward(loss), or engine.scale(loss).backward()",
            )
        self._begin(factor=self._loss_scale * self._window.factor() / (carried or 1.0))

    def begin_before(self, param: torch.nn.Parameter) -> None:
        """Called before a gradient of ``param`` is added to the collected gradients, or returned by ``autograd.grad``."""
        if accumulates_into([param], ()):
            self.begin_inside()

    def watch(self, inputs: Any, outputs: Any) -> Any:
        """Returns a forward's outputs, with hooks that notice when a backward pass reaches them."""
        if torch._C._are_functorch_transforms_active():
            # Within torch.func.grad and similar transforms, which do not compute gradients of parameters.
            self._has_gradient_graph = True
            return outputs
        enter = partial(self._enter, nodes_of(tree_flatten(inputs)[0]), torch._C._current_graph_task_id())
        enters = self._outside(enter)
        if self._scaler is not None:
            return scale_outputs(outputs, enters)
        watch_outputs(outputs, enters)
        return outputs

    def _enter(self, inputs: frozenset[Any], made_in: int) -> float:
        """Called when a backward pass has reached outputs of a forward. Returns the factor for the gradients of the
        outputs.

        inputs: the graph nodes that receive gradients of the forward's inputs. made_in: the pass within which the
        forward ran, as in recomputation; -1 if it ran outside of any pass.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task and self._reducer.is_in_backward:
            return self._output_factor
        if not accumulates_into((slot.param for slot in self._reducer.slots), inputs):
            # The pass adds to no parameter's gradient (autograd.grad, backward(inputs=...), or only frozen parameters),
            # so it does not belong to the window.
            self._has_gradient_graph |= torch.is_grad_enabled()
            if self._fetcher is not None:
                self._fetcher.driver.begin_reading()
            return 1.0
        if not self._reducer.is_in_backward:
            self._begin_by_caller(task, made_in)
        self._task = task
        self._check_scales(task, inputs)
        return self._output_factor

    def _begin_by_caller(self, task: int, made_in: int) -> None:
        self._check_weighed(task)
        wanted, carried = self._loss_scale * self._window.factor(), self._scale_of_pass(task, made_in)
        scales_here = carried is None and self._scaler is not None
        if scales_here and self._has_gradient_graph:
            raise BackwardError(
                "in fp16 the gradients of outputs are scaled, but gradients of a result of autograd.grad(..., create_graph=True) in this window do not pass through outputs",
                where="loss.backward()",
                fix="use engine.backward(loss), or engine.scale(loss).backward()",
            )
        if scales_here:
            self._begin(factor=1.0, output_factor=wanted)
        else:
            self._begin(factor=wanted / (carried or 1.0))
        self.n_backwards += 1

    def _scale_of_pass(self, *tasks: int) -> float | None:
        """The factor by which an engine has scaled the loss of a pass. This engine's factor takes precedence; None if
        no engine has scaled the loss."""
        found = {each: each._scaled_pass[1] for each in _all if each._scaled_pass[0] in tasks}
        if self in found or not found:
            return found.get(self)
        if len(set(found.values())) > 1:
            raise BackwardError(
                "an engine got gradients of losses that several other engines have scaled",
                where="loss.backward()",
                fix="have one engine scale the sum of the losses: engine.backward(loss), or engine.scale(loss).backward()",
            )
        return next(iter(found.values()))

    def _check_scales(self, task: int, inputs: frozenset[Any]) -> None:
        """Raises if gradients arrive that another engine has multiplied at its outputs. Warns once that gradients
        beyond the inputs carry a loss scale."""
        for other in _all:
            if other is not self and other._scaled_inputs[0] == task and leads_here(other._scaled_inputs[1]):
                raise BackwardError(
                    "gradients came through another engine in fp16, which has multiplied them by its loss scale",
                    where="loss.backward()",
                    fix="scale the loss instead: engine.backward(loss), or engine.scale(loss).backward(), of the engine nearest to it",
                )
        if self._output_factor != 1.0 and inputs:
            self._scaled_inputs = task, inputs
            Variable._execution_engine.queue_callback(self._forget_inputs)
        if self._scaler is not None and not self._has_told_of_inputs and will_run(inputs):
            self._has_told_of_inputs = True
            logger.warning(
                "rank %d: this backward pass goes on beyond the inputs of the engine. In fp16 the gradients beyond them are multiplied by loss scale / accumulation steps (%g now),"
                " unless they belong to another engine's parameters; torch.autograd.grad(loss, inputs) returns them unscaled",
                self._mesh.comm.global_rank,
                self._scale_of_pass(task) or self._output_factor,
            )
