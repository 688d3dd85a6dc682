"""The operators that a model's forward and backward run, by module, from a run on tensors without data."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import DeepSpeedCError, ModelError
from deepspeed_c.plan.activations import (
    MODELS_OWN,
    ForwardShape,
    first_result,
    likely_inputs,
    refuse_experts,
    running_without_data,
    twin_without_data,
)
from deepspeed_c.plan.machine import Operator
from deepspeed_c.plan.timed import TimedOperator, timed_operator_of

__all__ = ["ModelOperators", "trace_operators"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class ModelOperators(NamedTuple):
    """The operators of one micro-batch, by the path of the module that runs them itself ("": the model)."""

    forward: Mapping[str, list[Operator]]
    backward: Mapping[str, list[Operator]]
    calls: Mapping[str, TimedOperator]
    """By signature: a call that can be made again with tensors of the same kind."""


def trace_operators(
    model: torch.nn.Module, batch: ForwardShape, precision: Precision, device_type: str
) -> ModelOperators:
    """Runs a forward and a backward of a copy of ``model`` without data, and notes its operators. Views are left out:
    they move no bytes.

    Raises ModelError if the model reads values of tensors, or needs other inputs than ``batch``.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # a large import

    refuse_experts(model, "--simulate")
    problem: Exception | None = None
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        twin = twin_without_data(model, precision.dtype, fake, None)
        for inputs in likely_inputs(twin, batch, precision.dtype or torch.float32):
            notes = _NotedOperators(twin)
            try:
                with running_without_data(precision, device_type, None), torch.enable_grad(), notes:
                    outputs = twin(**inputs) if isinstance(inputs, dict) else twin(*inputs)
                    loss = first_result(outputs)
                    if loss is not None:
                        torch.autograd.backward(loss if loss.numel() == 1 else loss.float().sum())
            except DeepSpeedCError:
                raise
            except MODELS_OWN as error:
                problem = problem or error
                continue
            return ModelOperators(dict(notes.forward), dict(notes.backward), notes.calls)
    raise ModelError(
        f"its forward fails on tensors without data: {type(problem).__name__}: {str(problem).strip()}",
        where=f"deepspeed_c plan --simulate: {type(model).__name__}",
        fix="name what the model is given (--batch, --seq, --sample), and leave out what reads values of tensors in forward",
    ) from problem


class _NotedOperators(TorchDispatchMode):
    """Notes each operator with the module that runs it.

    A node of autograd has the next sequence number of its thread, so an operator of the backward belongs to the module
    that was at work when its node's number was given out.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from torch.utils.flop_counter import flop_registry  # a large import

        super().__init__()
        self.forward: defaultdict[str, list[Operator]] = defaultdict(list)
        self.backward: defaultdict[str, list[Operator]] = defaultdict(list)
        self.calls: dict[str, TimedOperator] = {}
        self._model, self._stack = model, ExitStack()
        self._at: list[str] = [""]  # paths of the modules at work, the innermost last
        self._begins: list[int] = []  # sequence numbers at which another module began
        self._paths: list[str] = []  # of the modules that began there
        self._formulas: Mapping[Any, Callable[..., int]] = flop_registry

    def __enter__(self) -> Self:
        for path, module in self._model.named_modules():
            handles = (
                module.register_forward_pre_hook(partial(self._enter, path)),
                module.register_forward_hook(self._leave),
            )
            for handle in handles:
                self._stack.callback(handle.remove)
        self._switch()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        super().__exit__(*exc)

    def _enter(self, path: str, module: torch.nn.Module, args: Any) -> None:
        self._at.append(path)
        self._switch()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._at.pop()
        self._switch()

    def _switch(self) -> None:
        self._begins.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(self._at[-1])

    def _path_of(self, node: Any) -> str:
        return self._paths[max(bisect_right(self._begins, node._sequence_nr()) - 1, 0)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        read, written = (
            {id(x.untyped_storage()): x for x in tree_leaves(each) if torch.is_tensor(x)}
            for each in ((args, kwargs), outputs)
        )
        is_view = not func._schema.is_mutable and bool(written) and all(key in read for key in written)
        if is_view or not written:
            return outputs
        call = timed_operator_of(func, args, kwargs)
        formula = self._formulas.get(func.overloadpacket)
        first = next(iter(written.values()))
        n_bytes = sum(x.numel() * x.element_size() for x in (*read.values(), *written.values()))
        operator = Operator(
            call.signature,
            0 if formula is None else int(formula(*args, **kwargs, out_val=outputs)),
            n_bytes,
            _name_of(first.dtype),
            func._schema.name.removeprefix("aten::") in _PRODUCTS,
        )
        self.calls.setdefault(call.signature, call)
        node = torch._C._current_autograd_node()
        if node is None:
            self.forward[self._at[-1]].append(operator)
        else:
            self.backward[self._path_of(node)].append(operator)
        return outputs


def _name_of(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
