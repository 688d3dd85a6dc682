"""Decides where ``generate`` of a cut model gathers candidates instead of whole logits (``candidates.py``).

[Note: proof] Three things must hold, on all ranks:

- The decoding loop is transformers' own for one sequence a row, and returns tokens alone. It chooses the largest logit,
  or its first processors divide by a temperature and keep the largest k. transformers itself makes the list of
  processors for each call, and this file reads that list.
- The model returns the tensor of its output layer as it is. A first forward gathers whole logits, and compares the
  returned tensor with the layer's: the same object, the same bits. Each later forward compares the object again.
- Nobody else reads the logits: only this package has forward hooks on the layer and on the modules around it. If the
  loop does not begin a forward itself (a stopping criterion does), the forward gets whole logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import StateError
from deepspeed_c.inject.candidates import Choice, ColumnGather, Returned, last_position
from deepspeed_c.inject.layers import LinearLayer

__all__ = ["CandidateDecoding", "choice_of"]

_LOOP = ("generate", "_sample", "_prefill", "_get_logits_processor")
_FOLLOWED = ("_get_logits_processor", "prepare_inputs_for_generation")
_PROCESSORS = "transformers.generation.logits_process"


class CandidateDecoding:
    """The calls of ``generate`` of one model."""

    def __init__(self, model: torch.nn.Module, comm: Collectives) -> None:
        self._model, self._comm = model, comm
        # Whether the model returns the layer's logits as they are, for each set of forward hooks.
        self._verdicts: dict[tuple[int, ...], bool] = {}
        self._call: _WatchedCall | None = None

    @contextmanager
    def watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Within this context the model's ``generate`` is called once with these arguments."""
        head = self._head()
        if head is None:
            yield
            return
        given = dict(zip(list(inspect.signature(type(self._model).generate).parameters)[1:], args)) | dict(kwargs)
        # A stopping criterion may generate within a call. The inner call follows the model's methods, not the outer's.
        outer = self._call
        methods = {name: getattr(self._model, name) for name in _FOLLOWED} if outer is None else outer.methods
        call = self._call = _WatchedCall(self._model, head, self._comm, self._verdicts, given, methods)
        columns = head.gather_by(call.columns)
        own = {name: self._model.__dict__.get(name) for name in _FOLLOWED}
        hook = self._model.register_forward_hook(call.after)
        self._model.__dict__.update(call.followed())
        try:
            yield
        finally:
            self._call = outer
            hook.remove()
            head.gather_by(columns)
            for name, before in own.items():
                if before is None:
                    del self._model.__dict__[name]
                else:
                    self._model.__dict__[name] = before

    def _head(self) -> LinearLayer | None:
        """The cut output layer whose columns are gathered; None if there is none, or the loop is not transformers'."""
        kind = type(self._model)
        mixin = next((base for base in kind.__mro__ if base.__name__ == "GenerationMixin"), None)
        if mixin is None or mixin.__module__ != "transformers.generation.utils":
            return None
        if any(getattr(kind, name, None) is not getattr(mixin, name, None) for name in _LOOP):
            return None
        head = self._model.get_output_embeddings()
        return head if isinstance(head, LinearLayer) and head.sizes is not None and head.ranks.n_ranks > 1 else None


class _WatchedCall:
    """One call of ``generate``."""

    def __init__(
        self,
        model: torch.nn.Module,
        head: LinearLayer,
        comm: Collectives,
        verdicts: dict[tuple[int, ...], bool],
        given: Mapping[str, Any],
        methods: Mapping[str, Any],
    ) -> None:
        """given: the arguments by name. methods: the model's own methods of the names in ``_FOLLOWED``."""
        self.columns, self.methods = ColumnGather(), methods
        self._model, self._comm, self._verdicts, self._given = model, comm, verdicts, given
        around = [module for module in model.modules() if any(part is head for part in module.modules())]
        self._hooks = tuple(
            number
            for module in around
            for number, hook in module._forward_hooks.items()
            if getattr(hook, "__func__", None) is not _WatchedCall.after
        )
        self._has_readers = _has_foreign_readers(around)
        self._choice: Choice | None = None
        self._is_proving = False

    def followed(self) -> dict[str, Any]:
        """The methods in ``_FOLLOWED`` with a call of this object after each."""
        prepare, begin = (self.methods[name] for name in _FOLLOWED)

        @wraps(prepare)
        def list_processors(*args: Any, **kwargs: Any) -> Any:
            processors = prepare(*args, **kwargs)
            self._decide(processors, kwargs)
            return processors

        @wraps(begin)
        def begin_forward(*args: Any, **kwargs: Any) -> Any:
            inputs = begin(*args, **kwargs)
            if self._choice is not None:
                self.columns.open(None if self._is_proving else self._choice, copies=self._is_proving)
            return inputs

        return dict(zip(_FOLLOWED, (list_processors, begin_forward), strict=True))

    def _decide(self, processors: Any, kwargs: Mapping[str, Any]) -> None:
        """Follows transformers' list of processors, its last preparation before the loop. Collective."""
        settings, inputs = kwargs.get("generation_config"), kwargs.get("model_kwargs")
        if settings is None or inputs is None:  # another loop, which does not begin with these
            return
        choice = None if self._has_readers else self._choice_for(settings, processors, inputs)
        verdict = self._verdicts.get(self._hooks)
        # Functions do not pickle, so the scales are compared by their temperatures.
        mine = (choice and (choice.n_best, [scale.temperature for scale in _temperatures(processors)]), verdict)
        everyone = self._comm.gather_objects(mine, label="agreement on candidates")
        is_agreed = choice is not None and verdict is not False and all(other == mine for other in everyone)
        self._choice = choice if is_agreed else None
        self._is_proving = is_agreed and verdict is None

    def _choice_for(self, settings: Any, processors: Any, inputs: Any) -> Choice | None:
        if self._given.get("custom_generate") is not None or settings.output_scores or settings.output_logits:
            return None
        mode = str(getattr(settings.get_generation_mode(self._given.get("assistant_model")), "value", ""))
        if mode not in ("greedy_search", "sample") or settings.is_assistant:
            return None
        if self._model._valid_auto_compile_criteria(inputs, settings):
            return None
        return choice_of(processors, is_sampling=mode == "sample")

    def after(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        """A hook after the forward. Collective at the first forward."""
        if not self.columns.is_open:
            return
        returned = self.columns.close()
        logits = getattr(output, "logits", None)
        is_as_it_was = len(returned) == 1 and _is_unchanged(logits, returned[0])
        if self._is_proving:
            self._is_proving = False
            is_proved = all(self._comm.gather_objects(is_as_it_was, label="proof of candidates"))
            self._verdicts[self._hooks] = is_proved
            self._choice = self._choice if is_proved else None
        elif not is_as_it_was and not all(one.is_whole for one in returned):
            self._verdicts[self._hooks] = False
            raise StateError(
                "the forward has changed the logits of its output layer, and did not in an earlier call",
                where="generate of a model that is cut over tensor-parallel ranks",
                fix="call generate again: from now on it gathers whole logits",
            )


def choice_of(processors: Any, *, is_sampling: bool) -> Choice | None:
    """The choice that a list of transformers' logits processors leaves to the largest logits; None if it is another.

    Processors after a top-k get the same scores from candidates as from whole logits, so they may be of any class.
    """
    temperatures = _temperatures(processors)
    if len(temperatures) == len(processors):
        # A temperature may make two logits equal, and the loop then takes the first.
        return None if is_sampling or temperatures else Choice(0)
    top = processors[len(temperatures)]
    if not _is(top, "TopKLogitsWarper"):
        return None
    return Choice(top.top_k, tuple(_scale_by(one) for one in temperatures))


def _temperatures(processors: Any) -> list[Any]:
    """The processors at the beginning of the list that divide by a temperature."""
    n = next((i for i, one in enumerate(processors) if not _is(one, "TemperatureLogitsWarper")), len(processors))
    return list(processors[:n])


def _scale_by(processor: Any) -> Any:
    return lambda logits: processor(None, logits)


def _is(processor: Any, name: str) -> bool:
    # A derived class may compute something else.
    return type(processor).__name__ == name and type(processor).__module__ == _PROCESSORS


def _has_foreign_readers(modules: list[torch.nn.Module]) -> bool:
    """Whether code of other packages may read the results of these modules."""
    readers = [hook for module in modules for hook in module._forward_hooks.values()]
    readers += torch.nn.modules.module._global_forward_hooks.values()
    readers += [module.__dict__["forward"] for module in modules if "forward" in module.__dict__]
    return any((getattr(one, "__module__", None) or "").partition(".")[0] != "deepspeed_c" for one in readers)


def _is_unchanged(logits: Any, layer: Returned) -> bool:
    if logits is not layer.logits or (layer.version is not None and logits._version != layer.version):
        return False
    if layer.last is None:
        return True
    return torch.equal(last_position(logits).contiguous().view(torch.uint8), layer.last.view(torch.uint8))
