"""The common base of the fused optimizers: groups, states, and one operator call for all tensors of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_, is_not
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from deepspeed_c.errors import OptimizerError, StateError
from deepspeed_c.ops import flat, q8
from deepspeed_c.ops.lazy_dynamo import Optimizer
from deepspeed_c.ops.scope import Scope, Shards

__all__ = ["BIAS_CORRECTION", "BY_TYPE", "MAXIMIZE", "NESTEROV", "Call", "FusedOptimizer", "NormedOptimizer"]

# Bits of the operators' `flags` argument: DSC_OPTIM_* of dsc/optim.h.
BIAS_CORRECTION = 1
NESTEROV = 2
MAXIMIZE = 4

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Errors with which an operator refuses a call before it writes anything, from its own checks or from the dispatcher
# (sparse tensors, devices without a kernel).
REFUSALS = (ValueError, NotImplementedError)

BY_TYPE: dict[str, type[FusedOptimizer]] = {}
"""Classes by their names in ``config_types``; each class registers itself."""


class Call(NamedTuple):
    """The lists of one operator call.

    ``state`` holds one list for each state slot, and so does ``scales`` for states of 8 bits. ``copies`` is empty or as
    long as ``params``.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    state: Sequence[Sequence[Tensor]]
    copies: Sequence[Tensor]
    scales: Sequence[Sequence[Tensor]] = ()

    def take(self, indices: Sequence[int]) -> Call:
        def pick(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensors[i] for i in indices] if len(tensors) > 0 else []

        slots, scales = [pick(s) for s in self.state], [pick(s) for s in self.scales]
        return Call(pick(self.params), pick(self.grads), slots, pick(self.copies), scales)


class Steps:
    """The ``step`` entries of some parameters' states as views of one buffer, so that one operation advances them all.

    Other code sees the entries as before: fp32 tensors of no dimension, one a parameter, as in ``torch.optim``.
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
        """Adds 1 to each step and returns the new numbers, or a list of one number if all are equal."""
        self.buffer.add_(1)
        low, high = torch.aminmax(self.buffer)
        return [int(low)] if low == high else [int(step) for step in self.buffer.tolist()]

    def retreat(self) -> None:
        """Takes the last ``advance`` back."""
        self.buffer.sub_(1)


class FusedOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose step is one pass over memory in C.

    A subclass names its ``kind`` (an entry of ``csrc/optim/optimizers.inc``) and the ``state_names`` of its slots, and
    sets up its defaults. Parameters, gradients, states and 16-bit copies may each be float32, bfloat16 or float16;
    arithmetic is float32. With ``state_dtype=torch.int8`` states on the host are codes of 8 bits (see
    :mod:`deepspeed_c.ops.q8`): ``state[p]["exp_avg"]`` has a code an element, in the shape of ``p``, and
    ``state[p]["exp_avg_scale"]`` a float32 scale a block; :meth:`dequantized_state` and :meth:`quantize_state_`
    convert. State dicts have the keys and types of ``torch.optim``: each parameter's ``step`` is a float32 tensor of no
    dimension.

    Besides :meth:`step`, which reads ``p.grad``, there is an interface for an engine that keeps gradients elsewhere and
    updates piece by piece::

        optimizer.begin_step()                                        # counts the step, once
        optimizer.step_tensors(group, params, grads, copies, scale)   # any number of disjoint pieces

    Errors: OptimizerError (a ValueError) for sparse gradients, unsupported dtypes and hyper-parameters out of range.
    Nothing has changed after such an error.
    """

    kind: str = ""
    state_names: ClassVar[tuple[str, ...]] = ()
    # With states of 8 bits: the dtype of the codes of each state, int8 for signed states and uint8 for unsigned ones.
    q8_dtypes: ClassVar[dict[str, torch.dtype]] = {}
    # If q8_dtypes is empty, the reason why this optimizer has no states of 8 bits.
    q8_refusal: ClassVar[str] = "its states cannot be quantised"
    # Attributes besides torch's that make up the object, for pickle and deepcopy.
    option_names: ClassVar[tuple[str, ...]] = ("state_dtype",)
    # The data that `update_bucket` needs besides the elements that it changes. If groups differ, `scope_of_group`
    # decides.
    scope: ClassVar[Scope] = "element"
    updates_buckets: ClassVar[bool] = True
    # Whether DeepSpeed has a fused class of this name. DeepSpeed's class flattens 16-bit groups, and counts steps in an
    # int.
    is_fused_in_deepspeed: ClassVar[bool] = False
    # The values of `optimizer.type` in a configuration, in lower case, that mean this class.
    config_types: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        BY_TYPE.update(dict.fromkeys(cls.__dict__.get("config_types", ()), cls))

    def __init__(self, params: Any, defaults: dict[str, Any], *, state_dtype: torch.dtype | None = None) -> None:
        self._check_state_dtype(state_dtype)
        self.state_dtype = state_dtype
        self._steps: dict[int, Steps] = {}
        self._open: dict[int, int] = {}
        self._counted: list[int] = []  # number of groups at the last begin_step
        super().__init__(params, defaults)

    @classmethod
    def from_config(
        cls, kind: str, groups: list[dict[str, Any]], params: dict[str, Any], names: Mapping[int, str]
    ) -> Any:
        """The optimizer that a configuration asks for: ``kind`` is in ``config_types``, ``params`` a copy of its
        ``optimizer.params``, and ``names`` are the names of the model's parameters, by ``id``."""
        return cls(groups, **params)

    def _check_state_dtype(self, dtype: torch.dtype | None) -> None:
        if dtype == torch.int8 and not self.q8_dtypes:
            raise self._error(
                f"no states of 8 bits: {self.q8_refusal}", fix="use float32 or bfloat16, or Adam, AdamW, Lion or SGD"
            )
        if dtype is not None and dtype not in (*SUPPORTED_DTYPES, torch.int8):
            raise self._error(
                f"states of {dtype} are not supported",
                fix="use float32, bfloat16, float16 or int8, or None for the parameter's own dtype",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.option_names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            if group.get("amsgrad"):
                raise self._error("the AMSGrad variant is not supported", fix="set amsgrad=False")
        super().__setstate__(state)
        self._steps = {}
        self._open = {}
        self._counted = []
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for values in self.state.values():
            # torch.optim.SGD writes None for a momentum_buffer that does not exist.
            for key in [key for key, value in values.items() if value is None]:
                del values[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that states keep this optimizer's state dtype (torch casts them to the parameter's).

        States of 8 bits load into any dtype, and states of any dtype into 8 bits; between optimizers of 8 bits they
        stay the same, bit for bit.
        """
        given, state = state_dict["state"], {}
        for key, values in given.items():
            codes = {name for name in values if q8.scale_name(name) in values} | set(
                self.q8_dtypes if self.is_quantized else ()
            )
            apart = codes | set(map(q8.scale_name, codes))
            state[key] = {
                name: value for name, value in values.items() if name not in apart
            }  # torch would convert codes to floats
        super().load_state_dict({**state_dict, "state": state})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        members = [(i, param) for i, group in enumerate(self.param_groups) for param in group["params"]]
        for key, (index, param) in zip(keys, members):
            for name in self.names_of_states(index):
                value = given.get(key, {}).get(name)
                if torch.is_tensor(value):
                    self._load_state(param, name, value.detach(), given[key].get(q8.scale_name(name)))

    def _load_state(self, param: Tensor, name: str, value: Tensor, scales: Tensor | None) -> None:
        """Takes over one state: codes where ``scales`` is given."""
        if scales is not None and not self.is_quantized:
            elements, value = q8.dequantize(value.cpu(), scales.cpu()), torch.empty_like(value, dtype=torch.float32)
            q8.in_memory_order(value).copy_(elements)
        if self.is_quantized and scales is None:
            codes = self._empty_state(param, name)
            for tensor in codes.values():
                flat.zero_([tensor])
            self.state[param].update(codes)
            laid = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format).copy_(value)
            self.quantize_state_(param, name, laid)
        elif self.is_quantized:
            self.state[param][name] = value.to(device=param.device, copy=True)
            self.state[param][q8.scale_name(name)] = scales.detach().to(device=param.device, copy=True)
        elif param.dtype != self.dtype_of_state(param) or scales is not None:
            self.state[param][name] = value.to(device=param.device, dtype=self.dtype_of_state(param), copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns the result of ``closure`` if given."""
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
            self._update(index, self._call(params, grads, state, ()), steps, 1.0)
        except REFUSALS:
            # The operator refused before it wrote anything, so the counted step did not happen.
            self._steps[index].retreat()
            raise

    def _update(self, index: int, call: Call, steps: list[int], grad_scale: float) -> None:
        """Updates members of one group. ``steps`` has one number for all of them, or one for each parameter."""
        self._run("optim_step_q8_" if self.is_quantized else "optim_step_", index, call, steps, grad_scale)

    def begin_step(self, params: Iterable[Tensor] | None = None) -> None:
        """Counts one step for ``params`` (all parameters by default), and allows one call of ``step_tensors`` or
        ``apply`` for each.

        Missing states are made. All pieces of the step have the same step number.
        """
        chosen = None if params is None else set(map(id, params))
        self._open, self._counted = {}, []
        for index, group in enumerate(self.param_groups):
            members = group["params"] if chosen is None else [p for p in group["params"] if id(p) in chosen]
            if not members:
                continue
            steps = self._advance(index, members, self._entries(index, members, in_pieces=True)[0])
            self._counted.append(index)
            ids = list(map(id, members))
            self._open.update(dict.fromkeys(ids, steps[0]) if len(steps) == 1 else zip(ids, steps))

    def take_back_step(self) -> None:
        """Undoes the count of the last ``begin_step``.

        The caller must restore parameters and states that have been updated since.
        """
        for index in self._counted:
            self._steps[index].retreat()
        self._open, self._counted = {}, []

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

        ``copies`` is empty or has, for each parameter, a tensor that receives the updated weights (or None). Raises
        StateError unless ``begin_step`` has opened each parameter and it has not been updated since.
        """
        if params:
            call = self._call(params, grads, self._states(group, params), copies)
            self._update(group, call, self._opened(params), grad_scale)
            self._close(params)

    def scope_of_group(self, group: int) -> Scope:
        return self.scope

    def update_bucket(self, shards: Shards) -> None:
        """Updates this rank's pieces of a bucket's parameters, which ``begin_step`` has opened. An engine calls this
        once for each bucket, in the same order on every rank. If the group's scope is "matrix", ranks without a piece
        of the bucket call it too.
        """
        self.step_tensors(shards.group, shards.params, shards.grads, shards.copies, shards.grad_scale)

    def update_bytes(self, matrices: Sequence[int], *, on_host: bool) -> int:
        """Bytes of temporary memory that ``update_bucket`` takes besides its arguments. ``matrices`` are the numbers of
        elements of the bucket's whole matrices, in a group of scope "matrix".
        """
        return 0

    @torch.no_grad()
    def step_slice(self, group: int, param: Tensor, call: Call, grad_scale: float, *, is_last: bool) -> None:
        """Like ``step_tensors``, for a part of a parameter in other memory. ``call`` holds this part of the elements,
        gradient, states (in the order of ``names_of_states``) and scales, one tensor each. States of 8 bits are cut
        between blocks. To be called once for each part.
        """
        self._update(group, call, self._opened([param]), grad_scale)
        if is_last:
            self._close([param])

    def fused_step(
        self,
        grads: Sequence[Sequence[Tensor | None]],
        copies: Sequence[Sequence[Tensor | None]] | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        """Does one whole step with the caller's gradients. ``grads[i][j]`` is the gradient of parameter j of group i,
        or None to leave the parameter unchanged. ``copies`` has the same form.
        """
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
        for index, (group, members) in enumerate(zip(self.param_groups, chosen)):
            self._entries(index, [group["params"][j] for j in members])
        self.begin_step(g["params"][j] for g, members in zip(self.param_groups, chosen) for j in members)
        for index, (group, members) in enumerate(zip(self.param_groups, chosen)):
            params = [group["params"][j] for j in members]
            given = [grads[index][j] for j in members]
            targets = [copies[index][j] for j in members] if copies else []
            self.step_tensors(index, params, given, targets, grad_scale)

    def init_state(self, group: int, param: Tensor) -> dict[str, Any]:
        """Returns the state of ``param``. A state that does not exist yet is made (zeros, step 0)."""
        return self._make_states(group, [param])[0]

    def _make_states(self, group: int, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The states of parameters that one operator call will update: new tensors are first touched by the threads
        that will update them.
        """
        fresh: dict[str, list[Tensor]] = {}
        try:
            return [self._make_state(group, param, fresh) for param in params]
        finally:
            for tensors in fresh.values():
                flat.zero_(tensors)

    def _make_state(self, group: int, param: Tensor, fresh: dict[str, list[Tensor]]) -> dict[str, Any]:
        """As :meth:`init_state`, but new tensors have undefined contents and are added to ``fresh``, by name."""
        state = self.state[param]
        if "step" not in state:
            # A momentum without a step count comes from torch.optim.SGD, so its first step has been done.
            state["step"] = torch.tensor(1.0 if any(name in state for name in self.state_names) else 0.0)
        for name in self.names_of_states(group):
            if name in state and (q8.scale_name(name) in state) == self.is_quantized:
                continue
            if name in state:
                raise StateError(
                    f"the state {name} is of {state[name].dtype}, and states are to be of {self.state_dtype}",
                    where=type(self).__name__,
                    fix="choose the state dtype before the first step; state dicts convert",
                )
            for key, tensor in self._empty_state(param, name).items():
                state[key] = tensor
                fresh.setdefault(key, []).append(tensor)
        return state

    def names_of_states(self, group: int) -> tuple[str, ...]:
        """The state slots that are in use with the group's hyper-parameters."""
        return self.state_names

    def dtype_of_state(self, param: Tensor) -> torch.dtype:
        """The dtype of the states of ``param``. ``torch.int8`` means 8-bit codes, signed or unsigned, with separate
        scales.
        """
        return param.dtype if self.state_dtype is None else self.state_dtype

    @property
    def is_quantized(self) -> bool:
        """Whether states are codes of 8 bits with scales."""
        return self.state_dtype == torch.int8

    def layout_of_state(self, group: int, param: Tensor) -> dict[str, tuple[torch.dtype, int]]:
        """Every tensor but ``step`` that ``state[param]`` holds, scales included: name -> (dtype, elements)."""
        if not self.is_quantized:
            return {name: (self.dtype_of_state(param), param.numel()) for name in self.names_of_states(group)}
        layout: dict[str, tuple[torch.dtype, int]] = {}
        for name in self.names_of_states(group):
            layout[name] = (self.q8_dtypes[name], param.numel())
            layout[q8.scale_name(name)] = (torch.float32, q8.n_scales(param.numel()))
        return layout

    def dequantized_state(self, param: Tensor, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Returns a float32 copy of a state of 8 bits: in the shape of ``param``, or for a range of its elements, in
        the order of memory, [end - begin].

        The range may begin and end anywhere. Raises StateError if there is no such state of 8 bits.
        """
        codes, scales = self._codes(param, name)
        if begin == 0 and end is None:
            whole = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
            q8.in_memory_order(whole).copy_(q8.dequantize(codes, scales))
            return whole
        try:
            return q8.dequantize(codes, scales, begin, end)
        except ValueError as error:
            raise self._error(
                f"the range [{begin}, {end}) of {name}: {error}", fix="ask for elements that exist"
            ) from error

    def quantize_state_(self, param: Tensor, name: str, values: Tensor, begin: int = 0) -> None:
        """Replaces elements of a state of 8 bits, from ``begin`` on in the order of memory, by ``values``. Values of
        other dtypes than float32 are converted.

        The range must be whole blocks (:data:`deepspeed_c.ops.q8.BLOCK_ELEMS`), or reach to the tensor's end: a block's
        scale depends on all its elements. Values that :meth:`dequantized_state` returned, whole or in blocks, give the
        same codes and scales, bit for bit. Raises OptimizerError, with nothing changed, for a range that cuts a block
        and for negative values of a second moment.
        """
        codes, scales = self._codes(param, name)
        if values.dim() != 1 and values.stride() != codes.stride():  # a whole state laid out in another order
            values = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format).copy_(values)
        values = q8.in_memory_order(values).to(device=codes.device, dtype=torch.float32)
        try:
            q8.quantize_(codes, scales, values, begin)
        except ValueError as error:
            raise self._error(f"the state {name}: {error}", fix="see the message; nothing was changed") from error

    def _codes(self, param: Tensor, name: str) -> tuple[Tensor, Tensor]:
        state = self.state.get(param, {})
        codes, scales = state.get(name), state.get(q8.scale_name(name))
        if codes is None or scales is None:
            raise StateError(
                f"the parameter has no state {name!r} of 8 bits",
                where=type(self).__name__,
                fix="make it with init_state(group, param), of an optimizer with state_dtype=torch.int8",
            )
        return codes, scales

    def _empty_state(self, param: Tensor, name: str) -> dict[str, Tensor]:
        """The tensors of one state slot, not yet written to: the state, or codes and scales, by the names of their
        entries.
        """
        if not self.is_quantized:
            dtype = self.dtype_of_state(param)
            return {name: torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)}
        if param.device.type != "cpu":
            raise self._error(
                f"states of 8 bits are for the host, and a parameter is on {param.device}",
                fix="offload the optimizer to the host, or use bfloat16 states",
            )
        return {
            name: torch.empty_like(param, dtype=self.q8_dtypes[name], memory_format=torch.preserve_format),
            q8.scale_name(name): torch.empty(q8.n_scales(param.numel()), dtype=torch.float32, device=param.device),
        }

    def _call(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: list[list[Tensor]],
        copies: Sequence[Tensor | None],
    ) -> Call:
        """``state`` is as returned by :meth:`_states`: the slots, followed by their scales if there are any."""
        n_slots = len(state) // 2 if self.is_quantized else len(state)
        return Call(params, grads, state[:n_slots], copies, state[n_slots:])

    def _entries(self, group: int, params: Sequence[Tensor], *, in_pieces: bool = False) -> list[list[Any]]:
        """The states of ``params``, one list for each entry: ``step`` first, then the slots in use, then their scales
        if they have any. Missing states are made. ``in_pieces`` means that the parameters will be updated one by one,
        which determines the threads that first write to new states.
        """
        states = list(map(self.state.__getitem__, params))
        names = ("step", *self.names_of_states(group))
        if self.is_quantized:
            names += tuple(map(q8.scale_name, names[1:]))
        try:
            return [[state[name] for state in states] for name in names]
        except KeyError:
            if in_pieces:
                states = [self.init_state(group, param) for param in params]
            else:
                states = self._make_states(group, params)
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

    def _flags(self, group: dict[str, Any]) -> int:
        flags = MAXIMIZE if group.get("maximize") else 0
        return (
            flags
            | (NESTEROV if group.get("nesterov") else 0)
            | (BIAS_CORRECTION if group.get("bias_correction", True) else 0)
        )

    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        """The operators' hyper-parameters from lr to max_coeff; values that the kind does not use are always in range."""
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
        """Calls an operator with ``call``. Returns its result with one row for each parameter, or None if the operator
        has no result.

        Nearly always all tensors share dtypes, device and step number, and one call suffices, so this is tried first.
        The operator checks all of its arguments before it writes. Only after a refusal are the arguments examined one
        by one.
        """
        group = self.param_groups[index]
        function = getattr(torch.ops.deepspeed_c, op).default
        before, after = self._hyper(group), (grad_scale, self._flags(group))

        def invoke(part: Call, step: int, part_ratios: Tensor | None) -> Tensor | None:
            state0, state1 = [*part.state, [], []][:2]
            scales = [*part.scales, [], []][:2] if self.is_quantized else []
            last = () if part_ratios is None else (part_ratios,)
            return function(
                *(self.kind, part.params, part.grads, state0, state1, part.copies, *scales, step),
                *(*before, *after, *last),
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
        """The operators write through raw pointers, so autograd must be told here that tensors that it may have saved
        have changed.
        """
        torch.autograd.graph.increment_version(call.params)
        if call.copies:
            torch.autograd.graph.increment_version([copy for copy in call.copies if copy is not None])

    def _untangle(
        self, index: int, call: Call, steps: list[int], refusal: Exception | None
    ) -> list[tuple[list[int], Call, int]]:
        """Splits ``call`` into parts for one operator call each: one device, one set of dtypes, one step number, and
        gradients in the memory order of their parameters. Raises OptimizerError, before any part is run, if there is no
        such split.
        """
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
            slots = [slot[i] for slot in call.state]
            others = [param, *grads[i : i + 1], *([] if copy is None else [copy])]
            for tensor in (*others, *slots):
                self._check_member(index, i, param, tensor, any(tensor is slot for slot in slots))
            step = steps[i] if len(steps) > 1 else steps[0]
            key = (param.device, *(t.dtype for t in (*others, *slots)), copy is None, step)
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
        """``grad``, or a copy of it with the memory layout of ``param``."""
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

    def _check_member(self, index: int, i: int, param: Tensor, tensor: Tensor, is_state: bool) -> None:
        if tensor.dtype not in SUPPORTED_DTYPES and not (is_state and tensor.dtype in self.q8_dtypes.values()):
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

    scope = "norms"

    def update_bucket(self, shards: Shards) -> None:
        if shards.params:
            ratios = self.trust_ratios(shards.group, shards.sums).to(shards.params[0].device)
            self.apply(shards.group, shards.params, shards.grads, shards.copies, shards.grad_scale, ratios)

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

        Returns float64 [n, 2], the sums of squares of each parameter and of its update; if parameters are cut over
        ranks, the caller adds these up over the ranks. ``copies`` are checked but not written.
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
        """Second half: applies lr * ratio * update. ``ratios`` are float64 [n], from :meth:`trust_ratios`; ``grads``
        are not read.
        """
        if params:
            self._apply(group, Call(params, [], self._states(group, params), copies), self._opened(params), ratios)
            self._close(params)

    def trust_ratios(self, group: int, sumsq: Tensor) -> Tensor:
        """|param| / |update|, bounded by the group's ``min_coeff`` and ``max_coeff``; 1 where either norm is 0 (arXiv
        1904.00962).

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
        """Runs both halves at once, for whole parameters."""
        ratios = self.trust_ratios(index, self._norms(index, call, steps, grad_scale))
        self._note_ratios(ratios)
        self._apply(index, call, steps, ratios)

    def _note_ratios(self, ratios: Tensor) -> None:
        """Called with the trust ratios of each update; a subclass may keep them."""
