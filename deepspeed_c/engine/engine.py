"""The training engine: forward, backward and step of a model whose states are sharded by ZeRO.

The engine decides which micro-batch ends a window, and with which weight a loss counts. The base classes do the work
(``host.py``, ``training.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from deepspeed_c.engine.checkpoint.experts import load_moe_state_dict
from deepspeed_c.engine.inputs import count_tokens
from deepspeed_c.engine.training import TrainingHost
from deepspeed_c.engine.whole import WholeModel
from deepspeed_c.errors import BackwardError, DeepSpeedCError
from deepspeed_c.recompute.rng import stream_of_grain
from deepspeed_c.zero.states.optimizer import ZeroOptimizer

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(WholeModel, TrainingHost):
    """A model that is ready to be trained. Call the engine as the model, then ``backward`` with the loss, then
    ``step``.

    ``deepspeed_c.initialize`` makes it. ``module`` is the model. Its parameters stay the same objects; their storage
    lies in flat buffers until ``close``. At stage 0 ``param.grad`` is the gradient, and edits of ``param.grad`` count.
    At stages 1 to 3 ``param.grad`` is None after a backward pass, and ``deepspeed_c.utils.safe_get_full_grad`` reads
    the reduced gradient.
    """

    load_moe_state_dict = staticmethod(load_moe_state_dict)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module, with autocast and with cast inputs if the configuration asks for them."""
        self._require_open()
        self._require_states("forward")
        if self._trains:
            self._passes.recover()
            if self.training:
                kwargs |= self._arguments.of_step(self.global_steps)
            if self.training and torch.is_grad_enabled():
                self._inputs.look(self.global_steps, inputs, kwargs)
                self._experiment.look(inputs, kwargs)
                self._state.note_tokens(count_tokens(inputs, kwargs))
        if self._tput_timer is not None and self.training:
            self._tput_timer.start()
        self._mesh.enter_phase("forward")
        self._begin_graphs()
        with self.phases.measure("forward"), self._random_stream(), self._flops.forward():
            outputs = self._run(inputs, kwargs)
        if not self._trains or not torch.is_grad_enabled():
            return outputs
        outputs = self._passes.watch((inputs, kwargs), outputs)
        if self._share.is_needed:
            self._share.note(self.module, inputs, kwargs, outputs)
        return outputs

    def _random_stream(self) -> AbstractContextManager[None]:
        """Context that sets the random numbers for a forward. With ``same_bits`` those of a training forward follow
        the place of its grain in the run."""
        if not (self._config.same_bits.enabled and self._trains and self.module.training):
            return self._sequence_stream()
        micro_batch, call = self._window.note_forward(self._passes.n_backwards)
        ranks = self._mesh.data
        position = micro_batch * ranks.world_size + ranks.rank
        return stream_of_grain(self._config.seed, self.global_steps, position, call)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times 1 / accumulation steps and, in fp16, times the loss scale. For callers that call
        ``backward()`` themselves."""
        optimizer = self._require_optimizer("scale")
        weighed = self._weigh(loss)
        optimizer.note_loss(weighed, self._window.share())
        return self._passes.scale(weighed, self._window.factor())

    def _weigh(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """The loss weighted as this rank's term in the loss of sequences that are cut over ranks."""
        if not self._share.is_needed:
            return loss
        weight = self._share.weight(loss)
        if not retain_graph:
            self._share.forget()
        return self._passes.weigh(loss, weight)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Runs backward from a scalar loss and collects the gradients.

        Gradients are averaged over ranks and over micro-batches. With ``scale_wrt_gas`` False the caller has already
        divided by the accumulation steps. Returns the loss with the factor of the average. It may be called several
        times in one micro-batch; the gradients add up. Raises BackwardError unless ``loss`` is a scalar in a graph.
        After an exception within backward the window's gradients are dropped, and the next forward begins the window
        again.
        """
        optimizer = self._require_optimizer("backward")
        if not torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad:
            got = f"a tensor of shape {tuple(loss.shape)}" if torch.is_tensor(loss) else type(loss).__name__
            why = " that requires no gradient" if torch.is_tensor(loss) and not loss.requires_grad else ""
            raise BackwardError(
                f"backward needs a scalar loss in a graph, not {got}{why}",
                where="engine.backward",
                fix="reduce the loss with mean() or sum(); compute it from the engine's output with gradients enabled",
            )
        self._passes.recover()
        share = self._window.share(scale_wrt_gas)
        weighed = self._weigh(loss, retain_graph)
        optimizer.note_loss(weighed, share)
        with self.phases.measure("backward"):
            self._passes.run(weighed, retain_graph, scale_wrt_gas)
        self._flops.end_backward()
        return loss.detach() * share

    def no_sync(self) -> AbstractContextManager[None]:
        """Postpones the reduction of gradients, at every stage. Meanwhile each rank keeps whole gradients."""
        self._require_optimizer("no_sync")
        return self._passes.no_sync()

    def coalesce_grad_reduction(self):
        """Context at whose end the gradients of all backward passes within it are reduced together."""
        return self._require_optimizer("coalesce_grad_reduction").reducer.coalesce()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch. At a boundary it also reduces and clips gradients, updates the weights, and advances the
        schedule.

        A skipped step (overflow) changes no weight, no moment and not the schedule. If ``ZeroOptimizer.step`` raises,
        the counters advance as for a skipped step, so a caller that catches the error can go on with the next window.
        """
        optimizer = self._require_optimizer("step")
        self._require_states("step")
        self._generation.end("step")
        if self._passes.is_inside_no_sync:
            raise BackwardError(
                "step() was called within no_sync()", where="engine.step", fix="leave the context before the step"
            )
        self._step_applied = False
        if not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            self.phases.end_micro_step(is_step=False)
            self._stop_tput_timer(is_step=False)
            return
        self._update(optimizer, lr_kwargs or {})

    def _complete_window(self, optimizer: ZeroOptimizer) -> None:
        if self._share.compares:
            # All ranks first take part in the sums of gradients. A rank that has called no backward joins them here.
            optimizer.complete_gradients()
            try:
                self._share.compare()
            except DeepSpeedCError:
                self._state.begin_window()  # the scale of the gradients is unknown
                raise
