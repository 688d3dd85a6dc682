"""The shared body of the fused optimizers: groups, states, and one operator call for a group, however many tensors it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import is_, is_not
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from deepspeed_c.errors import OptimizerError, StateError

__all__ = ["BIAS_CORRECTION", "MAXIMIZE", "NESTEROV", "FusedOptimizer", "NormedOptimizer"]

# Bits of the operators' `flags` argument: DSC_OPTIM_* of dsc/optim.h.
BIAS_CORRECTION = 1
NESTEROV = 2
MAXIMIZE = 4

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# How an operator refuses a call before it writes anything: its own checks, or the dispatcher (sparse tensors, devices without a kernel).
REFUSALS = (ValueError, NotImplementedError)


class Call(NamedTuple):
    """The lists of one operator call. ``state`` holds one list a state slot; ``copies`` is empty or as long as ``params``."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    state: Sequence[Sequence[Tensor]]
    copies: Sequence[Tensor]

    def take(self, indices: Sequence[int]) -> Call:
        def pick(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensors[i] for i in indices] if len(tensors) > 0 else []

        return Call(pick(self.params), pick(self.grads), [pick(s) for s in self.state], pick(self.copies))


class Steps:
    """The ``step`` entries of some parameters' states as views of one buffer, so that one operation advances them all.

    The entries stay what they are for everyone else: fp32 tensors of no dimension, one a parameter, as in ``torch.optim``.
    """

    def __init__(self, states: Sequence[dict[str, Any]]) -> None:
        values = [float(state["step"]) for state in states]
        self.buffer = torch.tensor(values, dtype=torch.float32)
        self.tensors = list(self.buffer.unbind())
        for state, tensor in zip(states, self.tensors):
            state["step"] = tensor

    def fits(self, tensors: Sequence[Any]) -> bool:
        return len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))

    def advance(self) -> list[int]:
        """Adds one step to each and returns the new numbers; a list of one when all are equal."""
        self.buffer.add_(1)
        low, high = torch.aminmax(self.buffer)
        return [int(low)] if low == high else [int(step) for step in self.buffer.tolist()]

    def retreat(self) -> None:
        """Takes the last ``advance`` back."""
        self.buffer.sub_(1)


class FusedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose step is one pass over memory in C.

    A subclass names its ``kind`` (an entry of ``csrc/optim/optimizers.inc``) and the ``state_names`` of its slots, and sets up its defaults.
    Parameters, gradients, states and 16-bit copies may each be float32, bfloat16 or float16; arithmetic is float32.
    State dicts have the keys and types of ``torch.optim``: each parameter's ``step`` is a float32 tensor of no dimension.

    Besides :meth:`step`, which reads ``p.grad``, there is a face for an engine that keeps gradients elsewhere and updates piece by piece::

        optimizer.begin_step()                                        # counts the step, once
        optimizer.step_tensors(group, params, grads, copies, scale)   # any number of disjoint pieces

    Errors: OptimizerError (a ValueError) for sparse gradients, unsupported dtypes and hyper-parameters out of range; nothing has changed then.
    """

    kind: str = ""
    state_names: ClassVar[tuple[str, ...]] = ()
    # Attributes besides torch's that make up the object, for pickle and deepcopy.
    option_names: ClassVar[tuple[str, ...]] = ("state_dtype",)
    # A slice of a parameter may be updated without the rest of it.
    is_elementwise: bool = True
    # Each tensor's update is scaled by norms over the whole tensor: see `norms` and `apply`.
    needs_norms: bool = False

    def __init__(self, params: Any, defaults: dict[str, Any], *, state_dtype: torch.dtype | None = None) -> None:
        if state_dtype is not None and state_dtype not in SUPPORTED_DTYPES:
            raise OptimizerError(
                f"states of {state_dtype} are not supported",
                where=type(self).__name__,
                fix="use float32, bfloat16 or float16, or None for the parameter's own dtype",
            )
        self.state_dtype = state_dtype
        self._steps: dict[int, Steps] = {}
        self._open: dict[int, int] = {}
        super().__init__(params, defaults)

    # -- saving, copying, loading ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.option_names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            if group.get("amsgrad"):
                raise self._error("the AMSGrad variant is not supported", fix="set amsgrad=False")
        super().__setstate__(state)
        self._steps = {}
        self._open = {}
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for values in self.state.values():
            # torch.optim.SGD writes a momentum_buffer of None where it has none.
            for key in [key for key, value in values.items() if value is None]:
                del values[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that states keep this optimizer's state dtype (torch casts them to the parameter's)."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(keys, params):
            dtype = self.dtype_of_state(param)
            if param.dtype == dtype:
                continue
            for name in self.state_names:
                value = state_dict["state"].get(key, {}).get(name)
                if torch.is_tensor(value):
                    self.state[param][name] = value.detach().to(device=param.device, dtype=dtype, copy=True)

    # -- one step over p.grad --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what ``closure``, if given, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            params, grads = self._with_gradient(group["params"])
            if params:
                self._step_group(index, params, grads)
        return loss

    @staticmethod
    def _with_gradient(params: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
        grads = [p.grad for p in params]
        if all(map(is_not, grads, repeat(None))):
            return params, grads
        return [p for p, g in zip(params, grads) if g is not None], [g for g in grads if g is not None]

    def _step_group(self, index: int, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        counts, *state = self._entries(index, params)
        steps = self._advance(index, params, counts)
        try:
            self._update(index, Call(params, grads, state, ()), steps, 1.0)
        except REFUSALS:
            # Refused before anything was written, so the step that was counted did not happen.
            self._steps[index].retreat()
            raise

    def _update(self, index: int, call: Call, steps: list[int], grad_scale: float) -> None:
        """The update itself, of members of one group; ``steps`` has one number, or one a parameter."""
        self._run("optim_step_", index, call, steps, grad_scale)

    # -- the engine's face -----------------------------------------------------------------------------------------------

    def begin_step(self, params: Iterable[Tensor] | None = None) -> None:
        """Counts one step for ``params`` (all parameters by default), and opens them for ``step_tensors`` or ``apply``, once each.

        States that do not exist yet are made. However many pieces the step is then done in, all see the same step number.
        """
        chosen = None if params is None else set(map(id, params))
        self._open = {}
        for index, group in enumerate(self.param_groups):
            members = group["params"] if chosen is None else [p for p in group["params"] if id(p) in chosen]
            if not members:
                continue
            steps = self._advance(index, members, self._entries(index, members)[0])
            ids = list(map(id, members))
            self._open.update(dict.fromkeys(ids, steps[0]) if len(steps) == 1 else zip(ids, steps))

    @torch.no_grad()
    def step_tensors(
        self,
        group: int,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        copies: Sequence[Tensor | None] = (),
        grad_scale: float = 1.0,
    ) -> None:
        """Updates ``params``, members of group number ``group``, from ``grads`` times ``grad_scale``.

        ``copies`` is empty or has, for each parameter, a tensor that receives the updated weights (or None). Raises StateError unless
        ``begin_step`` has opened each parameter and it has not been updated since.
        """
        if params:
            call = Call(params, grads, self._states(group, params), copies)
            self._update(group, call, self._opened(params), grad_scale)
            self._close(params)

    def fused_step(
        self,
        grads: Sequence[Sequence[Tensor | None]],
        copies: Sequence[Sequence[Tensor | None]] | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        """One whole step with gradients from outside: ``grads[i][j]`` is for parameter j of group i, None leaves it alone. So for ``copies``."""
        if len(grads) != len(self.param_groups):
            raise self._error(
                f"{len(grads)} lists of gradients for {len(self.param_groups)} groups", fix="pass one list a group"
            )
        chosen: list[list[int]] = []
        for index, (group, given) in enumerate(zip(self.param_groups, grads)):
            if len(given) != len(group["params"]):
                raise self._error(
                    f"{len(given)} gradients for {len(group['params'])} parameters of group {index}",
                    fix="pass one each, or None",
                )
            chosen.append([j for j, grad in enumerate(given) if grad is not None])
        self.begin_step(g["params"][j] for g, members in zip(self.param_groups, chosen) for j in members)
        for index, (group, members) in enumerate(zip(self.param_groups, chosen)):
            params = [group["params"][j] for j in members]
            given = [grads[index][j] for j in members]
            targets = [copies[index][j] for j in members] if copies else []
            self.step_tensors(index, params, given, targets, grad_scale)

    # -- states and step numbers -----------------------------------------------------------------------------------------

    def init_state(self, group: int, param: Tensor) -> dict[str, Any]:
        """The state of ``param``, made (zeros, step 0) where it does not exist yet."""
        state = self.state[param]
        if "step" not in state:
            # A momentum without a count comes from torch.optim.SGD: it has had its first step.
            state["step"] = torch.tensor(1.0 if any(name in state for name in self.state_names) else 0.0)
        for name in self.names_of_states(group):
            if name not in state:
                state[name] = torch.zeros_like(
                    param, dtype=self.dtype_of_state(param), memory_format=torch.preserve_format
                )
        return state

    def names_of_states(self, group: int) -> tuple[str, ...]:
        """The state slots that the group's hyper-parameters make use of."""
        return self.state_names

    def dtype_of_state(self, param: Tensor) -> torch.dtype:
        """What the states of ``param`` are held in."""
        return param.dtype if self.state_dtype is None else self.state_dtype

    def _entries(self, group: int, params: Sequence[Tensor]) -> list[list[Any]]:
        """The states of ``params``, a list an entry: ``step`` first, then the slots in use. States that do not exist yet are made."""
        states = list(map(self.state.__getitem__, params))
        names = ("step", *self.names_of_states(group))
        try:
            return [[state[name] for state in states] for name in names]
        except KeyError:
            states = [self.init_state(group, param) for param in params]
            return [[state[name] for state in states] for name in names]

    def _states(self, group: int, params: Sequence[Tensor]) -> list[list[Tensor]]:
        return self._entries(group, params)[1:]

    def _advance(self, index: int, params: Sequence[Tensor], counts: Sequence[Any]) -> list[int]:
        """Counts a step for ``params``, whose ``step`` entries are ``counts``."""
        steps = self._steps.get(index)
        if steps is None or not steps.fits(counts):
            steps = self._steps[index] = Steps([self.state[param] for param in params])
        return steps.advance()

    def _opened(self, params: Sequence[Tensor]) -> list[int]:
        missing = next((i for i, p in enumerate(params) if id(p) not in self._open), None)
        if missing is not None:
            raise StateError(
                f"parameter {missing} of the call is not open: its step was not begun, or it has been updated already",
                where=type(self).__name__,
                fix="call begin_step() once before the pieces of a step, and pass each parameter in one piece only",
            )
        steps = [self._open[id(p)] for p in params]
        return steps[:1] if all(step == steps[0] for step in steps) else steps

    def _close(self, params: Sequence[Tensor]) -> None:
        for param in params:
            del self._open[id(param)]

    # -- the operator call -----------------------------------------------------------------------------------------------

    def _flags(self, group: dict[str, Any]) -> int:
        flags = MAXIMIZE if group.get("maximize") else 0
        return (
            flags
            | (NESTEROV if group.get("nesterov") else 0)
            | (BIAS_CORRECTION if group.get("bias_correction", True) else 0)
        )

    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        """The operators' hyper-parameters from lr to max_coeff; what the kind has no use for keeps a value that is always in range."""
        beta1, beta2 = group.get("betas", (0.9, 0.999))
        return (
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group.get("eps", 0.0)),
            float(group.get("weight_decay", 0.0)),
            float(group.get("momentum", 0.0)),
            float(group.get("dampening", 0.0)),
            float(group.get("lr_decay", 0.0)),
            float(group.get("min_coeff", 0.0)),
            float(group.get("max_coeff", 1.0)),
        )

    def _run(
        self, op: str, index: int, call: Call, steps: list[int], grad_scale: float, ratios: Tensor | None = None
    ) -> Tensor | None:
        """Calls an operator over ``call``; returns its result, one row a parameter, or None where it has none.

        One call does it where dtypes, device and step number are one, which is nearly always, so that is what is tried: the operator
        checks all of its arguments before it writes, and only when it refuses are they looked at one by one here.
        """
        group = self.param_groups[index]
        function = getattr(torch.ops.deepspeed_c, op).default
        before, after = self._hyper(group), (grad_scale, self._flags(group))

        def invoke(part: Call, step: int, part_ratios: Tensor | None) -> Tensor | None:
            state0, state1 = [*part.state, [], []][:2]
            last = () if part_ratios is None else (part_ratios,)
            return function(
                self.kind, part.params, part.grads, state0, state1, part.copies, step, *before, *after, *last
            )

        is_uniform = len(steps) == 1 and all(map(is_not, call.copies, repeat(None)))
        refusal: Exception | None = None
        if is_uniform:
            try:
                result = invoke(call, steps[0], ratios)
                self._note_writes(call)
                return result
            except REFUSALS as error:
                refusal = error
        rows: list[tuple[list[int], Tensor | None]] = []
        for indices, part, step in self._untangle(index, call, steps, refusal):
            try:
                rows.append((indices, invoke(part, step, None if ratios is None else ratios[indices])))
            except ValueError as error:
                raise self._error(str(error), group=index, fix="see the message") from error
        self._note_writes(call)
        if not rows or rows[0][1] is None:
            return None
        result = torch.empty(
            (len(call.params), *rows[0][1].shape[1:]), dtype=rows[0][1].dtype, device=rows[0][1].device
        )
        for indices, rows_of_part in rows:
            result[indices] = rows_of_part.to(result.device)
        return result

    @staticmethod
    def _note_writes(call: Call) -> None:
        """The operators write through raw pointers; autograd learns here that what it may have saved has changed."""
        torch.autograd.graph.increment_version(call.params)
        if call.copies:
            torch.autograd.graph.increment_version([copy for copy in call.copies if copy is not None])

    def _untangle(
        self, index: int, call: Call, steps: list[int], refusal: Exception | None
    ) -> list[tuple[list[int], Call, int]]:
        """Parts of ``call`` that one operator call each can do: one device, one set of dtypes, one step number, and gradients in memory
        order of their parameters. Raises OptimizerError where no such parts exist, before any of them is run."""
        grads = list(call.grads)
        has_moved = False
        by_key: dict[tuple[Any, ...], list[int]] = {}
        for i, param in enumerate(call.params):
            self._check_dense(index, i, param)
            if grads:
                fitting = self._fitting_gradient(index, i, param, grads[i])
                has_moved = has_moved or fitting is not grads[i]
                grads[i] = fitting
            copy = call.copies[i] if call.copies else None
            members = [param, *grads[i : i + 1], *(slot[i] for slot in call.state), *([] if copy is None else [copy])]
            for tensor in members:
                self._check_member(index, i, param, tensor)
            step = steps[i] if len(steps) > 1 else steps[0]
            key = (param.device, *(t.dtype for t in members), copy is None, step)
            by_key.setdefault(key, []).append(i)
        if refusal is not None and len(by_key) == 1 and not has_moved:
            if not isinstance(refusal, ValueError):
                raise refusal
            raise self._error(str(refusal), group=index, fix="see the message; nothing was changed") from refusal
        call = call._replace(grads=grads)
        parts = []
        for key, indices in by_key.items():
            part = call.take(indices)
            has_copy = bool(call.copies) and call.copies[indices[0]] is not None
            parts.append((indices, part if has_copy else part._replace(copies=[]), key[-1]))
        return parts

    def _fitting_gradient(self, index: int, i: int, param: Tensor, grad: Tensor) -> Tensor:
        """``grad``, or a copy of it that lies in memory as ``param`` does."""
        if grad.layout != torch.strided:
            raise self._error(
                f"the gradient of parameter {i} is sparse ({grad.layout})",
                group=index,
                fix="use dense gradients (sparse=False in nn.Embedding), or torch.optim.SparseAdam for that parameter",
            )
        if grad.stride() == param.stride() or (grad.is_contiguous() and param.is_contiguous()):
            return grad
        if grad.shape != param.shape:
            raise self._error(
                f"the gradient of parameter {i} has shape {tuple(grad.shape)}, the parameter {tuple(param.shape)}",
                group=index,
                fix="pass gradients in the shape of their parameters",
            )
        return torch.empty_like(param, dtype=grad.dtype, memory_format=torch.preserve_format).copy_(grad)

    def _check_dense(self, index: int, i: int, param: Tensor) -> None:
        # preserve_format keeps the strides of just those tensors that have neither gaps nor overlaps.
        is_dense = param.is_contiguous() or torch.empty_like(param, device="meta").stride() == param.stride()
        if not is_dense:
            raise self._error(
                f"parameter {i} (shape {tuple(param.shape)}, strides {param.stride()}) has gaps or overlaps in memory",
                group=index,
                fix="make it contiguous before it is given to the optimizer",
            )

    def _check_member(self, index: int, i: int, param: Tensor, tensor: Tensor) -> None:
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise self._error(
                f"parameter {i}, its gradient, a state or its copy is of {tensor.dtype}",
                group=index,
                fix="float32, bfloat16 and float16 are supported",
            )
        if tensor.device != param.device or tensor.numel() != param.numel():
            raise self._error(
                f"parameter {i} has {param.numel()} elements on {param.device},"
                f" but its gradient, a state or its copy has {tensor.numel()} on {tensor.device}",
                group=index,
                fix="keep them together; after moving a model make the optimizer anew or load its state dict",
            )

    def _refuse_arguments(self, **arguments: Any) -> None:
        given = [name for name, value in arguments.items() if value is not None]
        if given:
            raise self._error(
                f"step() takes no {', '.join(given)}",
                fix="use fused_step(grads, copies, grad_scale) for gradients from outside",
            )

    def _error(self, what: str, *, fix: str, group: int | None = None) -> OptimizerError:
        where = type(self).__name__ if group is None else f"{type(self).__name__}, group {group}"
        return OptimizerError(what, where=where, fix=fix)


class NormedOptimizer(FusedOptimizer):
    """A fused optimizer whose updates are scaled by norms over whole tensors (LAMB)."""

    is_elementwise = False
    needs_norms = True

    @torch.no_grad()
    def norms(
        self,
        group: int,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        copies: Sequence[Tensor | None] = (),
        grad_scale: float = 1.0,
    ) -> Tensor:
        """First half of a step, to be called once for each piece: updates the moments.

        Returns float64 [n, 2], the sums of squares of each parameter and of its update; where parameters are cut over ranks the caller adds
        these up over the ranks. ``copies`` are checked and left alone.
        """
        if not params:
            return torch.zeros(0, 2, dtype=torch.float64)
        return self._norms(
            group, Call(params, grads, self._states(group, params), copies), self._opened(params), grad_scale
        )

    @torch.no_grad()
    def apply(
        self,
        group: int,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        grad_scale: float,
        ratios: Tensor,
    ) -> None:
        """Second half: applies lr * ratio * update, with ``ratios`` float64 [n] as :meth:`trust_ratios` gives them; ``grads`` are not read."""
        if params:
            self._apply(group, Call(params, [], self._states(group, params), copies), self._opened(params), ratios)
            self._close(params)

    def trust_ratios(self, group: int, sumsq: Tensor) -> Tensor:
        """|param| / |update|, bounded by the group's ``min_coeff`` and ``max_coeff``; 1 where either norm is 0 (arXiv 1904.00962).

        ``sumsq`` is float64 [n, 2] as :meth:`norms` returns it, added up over ranks. Returns float64 [n].
        """
        low, high = float(self.param_groups[group]["min_coeff"]), float(self.param_groups[group]["max_coeff"])
        param_norm, update_norm = sumsq.sqrt().unbind(1)
        ratio = (param_norm / update_norm).clamp(low, high)
        return torch.where((param_norm == 0) | (update_norm == 0), torch.ones_like(ratio), ratio)

    def _norms(self, index: int, call: Call, steps: list[int], grad_scale: float) -> Tensor:
        return self._run("optim_norms_", index, call, steps, grad_scale)

    def _apply(self, index: int, call: Call, steps: list[int], ratios: Tensor) -> None:
        self._run("optim_apply_", index, call._replace(grads=[]), steps, 1.0, ratios)

    def _update(self, index: int, call: Call, steps: list[int], grad_scale: float) -> None:
        """Both halves at once, for parameters that are whole."""
        ratios = self.trust_ratios(index, self._norms(index, call, steps, grad_scale))
        self._note_ratios(ratios)
        self._apply(index, call, steps, ratios)

    def _note_ratios(self, ratios: Tensor) -> None:
        """Called with the trust ratios of each update; a subclass may keep them."""
