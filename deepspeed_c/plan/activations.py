"""Find the tensors that a forward keeps for its backward, layer by layer, by running the model on tensors without data.

The model's own operators run on fake tensors (``torch._subclasses``), which know shapes, dtypes and storages; autograd
saves the same tensors as in a run. A storage counts once even if several tensors lie in it. Storages of parameters and
buffers do not count.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError
from deepspeed_c.inject.loss import CutLogits
from deepspeed_c.moe.auto import RoutedExperts
from deepspeed_c.moe.dispatch import Way, from_experts, to_experts
from deepspeed_c.moe.layer import MOELayer
from deepspeed_c.ops import moe as moe_operators
from deepspeed_c.plan.heap import HeapEvent, heap_peak
from deepspeed_c.plan.pretended import PretendedRanks, PretendedSharedMemory
from deepspeed_c.recompute.blocks import find_blocks
from deepspeed_c.recompute.nests import Arguments
from deepspeed_c.recompute.operators import MeasuredLayer, Measurement, Meter
from deepspeed_c.zero.weights.kinds import is_codes

__all__ = [
    "MODELS_OWN",
    "Alive",
    "ForwardShape",
    "Segment",
    "Traced",
    "first_result",
    "likely_inputs",
    "refuse_experts",
    "running_without_data",
    "trace_activations",
    "twin_without_data",
]

# Operations that an accelerator and a CPU compute in the time in which they move one byte. A plan depends only on the
# ratios between the times of operators.
_FLOPS_PER_BYTE = {"cuda": 200.0, "cpu": 10.0}
_BYTES_PER_NS = {"cuda": 2000.0, "cpu": 10.0}
# Errors that a model's own code raises on wrong inputs, or when it reads values of tensors.
MODELS_OWN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
_ADVICE = (
    "name what the model is given (--batch, --seq, --sample), leave out what reads values of tensors in forward, or"
    " measure a run and pass --activations"
)


class ForwardShape(NamedTuple):
    """The inputs of one forward of a rank."""

    n_samples: int
    n_tokens: int | None = None  # tokens of a sample
    sample: tuple[int, ...] | None = None  # shape of a sample that does not consist of tokens


class Segment(NamedTuple):
    """A segment of the forward: one call of a layer, or the operators between two calls. Mappings give bytes by
    storage."""

    label: str
    measured: MeasuredLayer | None  # None: the segment is no layer
    given: Mapping[int, int]  # inputs of a layer
    movable: frozenset[int]  # storages of floating-point inputs, which may be moved to other memory
    saved: Mapping[int, int]  # saved for the backward, if nothing is recomputed
    wire_bytes: int = 0  # bytes that a rank sends to its tensor-parallel group when the layer is recomputed


class Alive(NamedTuple):
    """The most bytes that are alive at the same time if nothing is recomputed: tensors that operators pass on and that
    are not saved count too, parameters, buffers and their gradients do not."""

    forward: int
    backward: int
    heap: int  # the most bytes of a host process's heap for these tensors


class Traced(NamedTuple):
    """The segments of a forward, in order, and the traffic of tensor-parallel ranks in the forward and its backward."""

    segments: tuple[Segment, ...]
    wire_bytes: int = 0  # bytes that a rank sends, if nothing is recomputed
    note: str = ""
    alive: Alive | None = None

    @property
    def layers(self) -> list[MeasuredLayer]:
        return [segment.measured for segment in self.segments if segment.measured is not None]

    @property
    def passing_bytes(self) -> tuple[int, int]:
        """Bytes beside the saved tensors at the peak of (forward, backward)."""
        if self.alive is None:
            return 0, 0
        saved = self.saved_bytes
        return max(self.alive.forward - saved, 0), max(self.alive.backward - saved, 0)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved tensors, if nothing is recomputed."""
        found: dict[int, int] = {}
        for segment in self.segments:
            found.update(segment.saved)
        return sum(found.values())


def trace_activations(
    model: torch.nn.Module,
    batch: ForwardShape,
    precision: Precision,
    layers: str | None,
    device_type: str,
    ranks: Collectives | None = None,
) -> Traced:
    """Runs a forward and a backward of a copy of ``model`` without data. The tensors of ``model`` may be on the meta
    device, and are not changed.

    layers: the modules that may be recomputed, as in the configuration; None: the model's repeated blocks.
    ranks: pretended tensor-parallel ranks; their ledger records the traffic. Raises ModelError if the model reads
    values of tensors, or needs other inputs than ``batch``.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # a large import

    refuse_experts(model, "--batch")
    names, note = _layers_of(model, layers)
    problem: Exception | None = None
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        twin = twin_without_data(model, precision.dtype, fake, ranks)
        ways = list(likely_inputs(twin, batch, precision.dtype or torch.float32))
        while True:
            inputs = ways.pop(0)
            trace = _Trace(twin, names, device_type, ranks)
            if ranks is not None:
                ranks.ledger.reset_totals()
            try:
                trace.run(inputs, precision)
                wire_bytes = trace.wire_bytes
                alive = _alive_in(twin, inputs, precision, device_type, ranks)
            except DeepSpeedCError:
                raise
            except MODELS_OWN as error:
                problem = problem or error
                if not ways:
                    raise ModelError(
                        f"its forward fails on tensors without data: {type(problem).__name__}: {str(problem).strip()}",
                        where=f"deepspeed_c plan: {type(model).__name__}",
                        fix=_ADVICE,
                    ) from problem
            else:
                return Traced(tuple(trace.segments()), wire_bytes, note, alive)


@contextmanager
def running_without_data(precision: Precision, device_type: str, ranks: Collectives | None) -> Iterator[None]:
    """Context of a forward of a ``twin_without_data`` with the operators of this type of device."""
    with ExitStack() as stack:
        if device_type != "cpu":
            stack.enter_context(_Attention())
        stack.enter_context(_Values(ranks))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Cut logits are a tensor subclass that gathers itself when it is read. Fake tensors cannot have that class.
        stack.enter_context(mock.patch.object(CutLogits, "of", lambda logits, sizes, ranks: logits))
        stack.enter_context(_even_experts())
        stack.enter_context(precision.autocast(torch.device("cpu")))
        yield


@contextmanager
def _even_experts() -> Iterator[None]:
    """Context of a forward in which all experts of spread mixtures get equally many rows, as a router without values
    cannot say more. A rank then gets as many rows as it sends."""
    ranks = PretendedRanks(1, BufferPool(), PretendedSharedMemory())

    def sort(indices: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        order = torch.empty(indices.numel(), dtype=torch.int64, device="cpu")
        return order, torch.empty_like(indices, dtype=torch.int64), torch.empty(n_experts, dtype=torch.int64)

    def run(layer: RoutedExperts, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        of_rank, of_expert = (_even(rows.shape[0], n) for n in (layer.ep_size, layer.num_local_experts))
        if layer.ep_size == 1:
            return layer.run_own(rows, of_expert)
        order = None
        if layer.num_local_experts > 1:
            order = torch.empty(rows.shape[0], dtype=torch.int64, device="cpu")
        way = Way(ranks, "", of_rank, of_rank, of_expert, order, order)
        return from_experts(layer.run_own(to_experts(rows, way), of_expert), way)

    with (
        mock.patch.object(moe_operators, "sort_slots", sort),
        mock.patch.object(RoutedExperts, "run_spread", run),
    ):
        yield


def _even(n: int, n_parts: int) -> list[int]:
    return [n * (i + 1) // n_parts - n * i // n_parts for i in range(n_parts)]


def refuse_experts(model: torch.nn.Module, flag: str) -> None:
    """Raises ModelError for a mixture of experts: the rows of an expert are values that a forward computes. ``flag``:
    the option that asks for such a forward."""
    for name, module in model.named_modules():
        if isinstance(module, MOELayer):
            raise ModelError(
                "how many tokens each expert gets is not known before a run, and activations depend on it",
                where=f"deepspeed_c plan: {name}",
                fix=f"leave out {flag}, and measure a run (--activations)",
            )


def _layers_of(model: torch.nn.Module, layers: str | None) -> tuple[list[str], str]:
    try:
        return find_blocks(model, layers or "auto"), ""
    except ConfigError:
        if layers is not None:
            raise
        return [], "no repeated blocks were found that could be recomputed (activation_checkpointing.layers)"


def twin_without_data(model: torch.nn.Module, dtype: torch.dtype | None, fake: Any, ranks: Any) -> torch.nn.Module:
    """Within the mode ``fake``: a copy whose tensors have no data and report the host as their device. dtype: the dtype
    of floating-point parameters."""
    known: dict[int, Any] = {}

    def made_for(tensor: torch.Tensor, as_dtype: torch.dtype) -> torch.Tensor:
        if id(tensor) not in known:
            made = torch.empty(tensor.shape, dtype=as_dtype, device="cpu")
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            known[id(tensor)] = made
        return known[id(tensor)]

    with _without(fake):
        twin = copy.deepcopy(model, {id(ranks): ranks})
    for module in twin.modules():
        for name, param in module._parameters.items():
            if param is not None:
                is_cast = dtype is not None and param.is_floating_point() and not is_codes(param)
                module._parameters[name] = made_for(param, dtype if is_cast else param.dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made_for(buffer, buffer.dtype)
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                vars(module)[name] = made_for(value, value.dtype)
    return twin


@contextmanager
def _without(fake: Any) -> Iterator[None]:
    """Make ordinary tensors inside this context."""
    fake.__exit__(None, None, None)
    try:
        yield
    finally:
        fake.__enter__()


def likely_inputs(model: torch.nn.Module, batch: ForwardShape, dtype: torch.dtype) -> Iterator[dict[str, Any] | tuple]:
    """Possible arguments for a call of the model, the likeliest first. Raises ModelError if ``batch`` is incomplete."""
    names = inspect.signature(model.forward).parameters
    if batch.sample is not None:
        yield (torch.empty(batch.n_samples, *batch.sample, dtype=dtype, device="cpu"),)
        return
    if batch.n_tokens is None:
        raise ModelError(
            "neither the tokens nor the shape of a sample are known",
            where="deepspeed_c plan",
            fix="give --seq N beside --batch, or --sample 3x224x224",
        )
    tokens = torch.zeros(batch.n_samples, batch.n_tokens, dtype=torch.int64, device="cpu")
    if "input_ids" not in names:
        wanted = [
            each
            for each in names.values()
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        yield tuple(tokens for _ in wanted) or (tokens,)
        return
    if "labels" in names:
        yield {"input_ids": tokens, "labels": tokens}
        yield {"input_ids": tokens, "labels": tokens[:, 0]}
    yield {"input_ids": tokens}
    if "decoder_input_ids" in names:
        yield {"input_ids": tokens, "decoder_input_ids": tokens}


class _Trace:
    """One forward and backward of a model of fake tensors."""

    def __init__(
        self, model: torch.nn.Module, names: Sequence[str], device_type: str, ranks: Collectives | None
    ) -> None:
        self._model, self._names, self._device_type, self._ranks = model, names, device_type, ranks
        self._weights = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._held: list[torch.Tensor] = []  # kept alive, so that no new storage reuses an address
        self._open: dict[str, Any] = {"label": "before the layers", "saved": {}}
        self._found: list[dict[str, Any]] = [self._open]
        self._counted: set[int] = set()
        self._is_within = False
        self._meter = _Arithmetic(device_type)

    def segments(self) -> Iterator[Segment]:
        for each in self._found:
            given = each.get("given", [])
            if "measured" not in each and not each["saved"]:
                continue
            yield Segment(
                each["label"],
                each.get("measured"),
                {_place(t): t.untyped_storage().nbytes() for t in given},
                frozenset(_place(t) for t in given if t.is_floating_point()),
                each["saved"],
                each.get("wire_bytes", 0),
            )

    @property
    def wire_bytes(self) -> int:
        """Bytes sent until now."""
        return 0 if self._ranks is None else sum(total.wire_bytes for total in self._ranks.ledger.totals.values())

    def run(self, inputs: Any, precision: Precision) -> None:
        undo: list[Callable[[], None]] = []
        with ExitStack() as stack:
            for name in self._names:
                undo.append(self._wrap(name, self._model.get_submodule(name)))
            for each in undo:
                stack.callback(each)
            stack.enter_context(running_without_data(precision, self._device_type, self._ranks))
            stack.enter_context(saved_tensors_hooks(self._save, _same))
            stack.enter_context(torch.enable_grad())
            found = self._model(**inputs) if isinstance(inputs, dict) else self._model(*inputs)
        loss = first_result(found)
        if loss is not None:
            with _Values(self._ranks):  # records the traffic of tensor-parallel layers in the backward
                torch.autograd.backward(loss.float().sum())

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        place = _place(tensor)
        if place not in self._weights:
            self._held.append(tensor.detach())
            self._open["saved"][place] = tensor.untyped_storage().nbytes()
        return tensor

    def _wrap(self, name: str, module: torch.nn.Module) -> Callable[[], None]:
        forward = module.forward

        def traced(*args: Any, **kwargs: Any) -> Any:
            if self._is_within:
                return forward(*args, **kwargs)
            tensors = [t for t in Arguments(args, kwargs).tensors if _place(t) not in self._weights]
            self._held += tensors
            measurement = Measurement(name, module, tensors, self._counted, self._meter)
            self._begin(name, given=tensors)
            before = self.wire_bytes

            def save(tensor: torch.Tensor) -> torch.Tensor:
                measurement.note_saved(tensor)
                self._open["wire_bytes"] = self.wire_bytes - before  # up to the last saved tensor
                return self._save(tensor)

            self._is_within = True
            try:
                with measurement, saved_tensors_hooks(save, _same):
                    outputs = forward(*args, **kwargs)
            finally:
                self._is_within = False
            self._open["measured"] = measurement.done()
            self._begin(f"after {name}")
            return outputs

        vars(module)["forward"] = traced
        return lambda: vars(module).pop("forward", None)

    def _begin(self, label: str, **known: Any) -> None:
        self._open = {"label": label, "saved": {}, **known}
        self._found.append(self._open)


def _alive_in(model: torch.nn.Module, inputs: Any, precision: Precision, device_type: str, ranks: Any) -> Alive:
    """Runs one forward and backward of a model of fake tensors, without anything that keeps tensors alive longer."""
    lives = _Lives((*model.parameters(), *model.buffers()))
    hooks = [
        param.register_post_accumulate_grad_hook(lives.forget_gradient)
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        with running_without_data(precision, device_type, ranks), torch.enable_grad(), lives:
            loss = first_result(model(**inputs) if isinstance(inputs, dict) else model(*inputs))
        n_forward = lives.end_phase()
        if loss is not None:
            with _Values(ranks), lives:
                torch.autograd.backward(loss.float().sum())
        del loss
        lives.end_phase()
    finally:
        for hook in hooks:
            hook.remove()
    return lives.alive(n_forward)


class _Lives(TorchDispatchMode):
    """Records when each storage is made and freed. Storages of gradients and of ``without`` are left out."""

    def __init__(self, without: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {_place(tensor) for tensor in without}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._events: list[HeapEvent] = []
        self._n = 0
        self._gradients: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note_freed()
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if torch.is_tensor(leaf) and _place(leaf) not in self._known:
                self._note_made(leaf.untyped_storage())
        return outputs

    def _note_made(self, storage: torch.UntypedStorage) -> None:
        before = self._alive.get(storage._cdata)
        if before is not None and not before[0].expired():
            return
        self._note_freed()  # a freed storage may have had this address
        if storage.nbytes():
            self._n += 1
            self._alive[storage._cdata] = StorageWeakRef(storage), self._n
            self._events.append(HeapEvent(self._n, storage.nbytes()))

    def _note_freed(self) -> None:
        for place in [place for place, (reference, _) in self._alive.items() if reference.expired()]:
            self._events.append(HeapEvent(self._alive.pop(place)[1], 0))

    def forget_gradient(self, param: torch.Tensor) -> None:
        """Hook of a parameter whose gradient is there. The engine takes it away at once, and counts it itself."""
        found = self._alive.get(_place(param.grad))
        if found is not None:
            self._gradients.add(found[1])
        param.grad = None

    def end_phase(self) -> int:
        """Returns the number of events until now."""
        self._note_freed()
        return len(self._events)

    def alive(self, n_forward: int) -> Alive:
        """n_forward: number of events of the forward."""
        events = [event for event in self._events if event.storage not in self._gradients]
        n_forward -= sum(event.storage in self._gradients for event in self._events[:n_forward])
        sizes = {event.storage: event.nbytes for event in events if event.nbytes}
        now, after = 0, []
        for event in events:
            now += event.nbytes or -sizes[event.storage]
            after.append(now)
        left = sizes.keys() - {event.storage for event in events if not event.nbytes}
        forward, backward = (max(part, default=0) for part in (after[:n_forward], after[max(n_forward - 1, 0) :]))
        return Alive(forward, backward, heap_peak([*events, *(HeapEvent(each, 0) for each in left)]))


def first_result(found: Any) -> torch.Tensor | None:
    """The first output that a backward can begin at: the loss, of models that compute it."""
    leaves = (leaf for leaf in tree_leaves(_plain(found)) if torch.is_tensor(leaf) and leaf.requires_grad)
    return next(leaves, None)


def _plain(outputs: Any) -> Any:
    """The values in an output object of transformers."""
    return list(outputs.values()) if isinstance(outputs, Mapping) else outputs


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Arithmetic(Meter):
    """Estimates the time of an operator from its operations and its bytes."""

    def __init__(self, device_type: str) -> None:
        from torch.utils.flop_counter import flop_registry  # imports a part of the compiler

        self._known = flop_registry
        self._bytes_per_ns = _BYTES_PER_NS.get(device_type, _BYTES_PER_NS["cuda"])
        self._flops_per_ns = self._bytes_per_ns * _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int, bool]:
        outputs = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, outputs)) if torch.is_tensor(leaf)]
        is_view = func.is_view or not tensors
        moved = 0 if is_view else sum(t.numel() * t.dtype.itemsize for t in tensors)
        ns = max(moved / self._bytes_per_ns, self._flops(func, args, kwargs, outputs) / self._flops_per_ns)
        draws = torch.Tag.nondeterministic_seeded in func.tags and _dropout_of(func, args, kwargs) > 0
        return outputs, int(ns), draws

    def _flops(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> float:
        if "scaled_dot_product" in func._schema.name:
            query, key = args[0], args[1]
            return 4.0 * query.numel() * key.shape[-2]
        known = self._known.get(func.overloadpacket)
        return 0.0 if known is None else float(known(*args, **kwargs, out_val=outputs))


def _dropout_of(func: Any, args: Any, kwargs: Any) -> float:
    """The dropout rate of an operator of attention; 1 for other operators that may draw."""
    for i, each in enumerate(func._schema.arguments):
        if each.name == "dropout_p":
            return args[i] if i < len(args) else kwargs.get("dropout_p", 0.0)
    return 1.0


# Operators of ``inject/exchange.py``, and the names of their collectives in a ledger.
_SCATTERS = "deepspeed_c::tp_scatter_start"
_SENT_BY = {
    **dict.fromkeys(("deepspeed_c::tp_sum_", "deepspeed_c::tp_sum_start", "deepspeed_c::tp_sum_start_"), "all-reduce"),
    "deepspeed_c::tp_gather_start": "all-gather",
    _SCATTERS: "reduce-scatter",
}


class _Values(TorchDispatchMode):
    """Supplies values when a forward reads values of tensors without data.

    A number that is drawn and read at once is a seed, which influences no shape. A mask on an integer tensor is assumed
    to select errors, such as invalid ids: it selects no element. Other masks select all elements.

    The traffic of tensor-parallel layers is recorded in the ledger of ``ranks`` here, because collectives on fake
    tensors send nothing.
    """

    def __init__(self, ranks: Collectives | None) -> None:
        super().__init__()
        self._ranks = ranks
        self._drawn: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and _place(args[0]) in map(_place, self._drawn):
            return 0
        if func is torch.ops.aten.index.Tensor and [i.dtype for i in args[1] if i is not None] == [torch.bool]:
            return self._picked(args[0], *args[1])
        outputs = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::randint":
            self._drawn.append(outputs)
        if func._schema.name in _SENT_BY and self._ranks is not None:
            n_bytes = args[0].nbytes if outputs is None else outputs.nbytes
            if func._schema.name == _SCATTERS:  # its result is a rank's part of the sum
                n_bytes *= self._ranks.world_size
            self._ranks.ledger.enter(_SENT_BY[func._schema.name], n_bytes, args[-1]).end()
        return outputs

    @staticmethod
    def _picked(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n = mask.numel() if tensor.is_floating_point() else 0
        return tensor.new_empty((n, *tensor.shape[mask.dim() :]))


class _Attention(TorchFunctionMode):
    """Replaces operators that save fewer bytes on an accelerator than on the host. Attention, also with dropout and
    masks, saves its output and one number a row. Dropout saves a byte an element."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _flash(*args, **kwargs)
        if func is torch.nn.functional.dropout:
            return _dropped(*args, **kwargs)
        return func(*args, **kwargs)


def _dropped(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
