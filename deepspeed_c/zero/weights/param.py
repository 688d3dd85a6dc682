"""A sharded parameter. Each rank always keeps a piece of a ``torch.nn.Parameter``, and holds the whole parameter only
while it is used.

The parameter object never changes. A *released* parameter has an empty storage, and its class is a subclass in which
reading ``.data`` raises an error with a fix. An *available* parameter behaves as an ordinary one of its own class. A
``ShardState`` holds the parameter's state. Without an engine (a model under ``zero.Init``) the state is a
``StandaloneShard``. With an engine it belongs to one of the engine's gather units (``gather_unit.py``).
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import StateError
from deepspeed_c.zero.weights.grad_face import GradFace

__all__ = [
    "ShardState",
    "StandaloneShard",
    "ZeroParamStatus",
    "ZeroParamType",
    "adopt_shape",
    "check_edit",
    "gradient_edge",
    "hollow_out",
    "is_data_held",
    "is_released",
    "join_pieces",
    "make_sharded",
    "point_at",
    "point_at_nothing",
    "saved_parameters_answer",
    "shape_of",
    "state_of",
    "take_over",
    "unmake_sharded",
    "whole_of",
]

_ATTRIBUTE = "_dsc_shard"
_DATA = torch.Tensor.data  # torch's descriptor: reads and writes storage without the checks below
_set_data = _DATA.__set__  # bound once, because each step calls it twice for each parameter
_ids = itertools.count()


class ZeroParamType(Enum):
    """The kinds of parameters (DeepSpeed's names)."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether the whole parameter is in this rank's memory (DeepSpeed's names)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ShardState:
    """A rank's knowledge of one sharded parameter.

    ``piece`` holds exactly the elements that this rank owns: flat, [n], in the parameter's dtype. ``begins`` and
    ``numels`` give the range of elements that each rank of ``comm`` owns. ``everyone`` are all ranks that hold pieces
    of the parameter, including ranks that hold copies of the same pieces.
    """

    def __init__(
        self,
        param: torch.nn.Parameter,
        name: str,
        comm: Collectives,
        shape: torch.Size,
        persists: bool,
        everyone: Collectives | None = None,
    ) -> None:
        self.ds_id = next(_ids)
        self.name, self.comm, self.persists = name, comm, persists
        self.everyone = comm if everyone is None else everyone
        self.shape, self.numel = shape, shape.numel()
        self.dtype, self.device = param.dtype, param.device
        self.active_modules: set[Any] = set()  # DeepSpeed's attribute: callers clear it; we do not read it
        self.empty = torch.empty(0, dtype=self.dtype, device=self.device)
        self._stand_in: torch.Tensor | None = None
        self._hollow: torch.Tensor | None = None

    piece: torch.Tensor
    begins: Sequence[int]
    numels: Sequence[int]
    near: Collectives | None = None
    """The ranks that keep second shards together."""

    @property
    def second_piece(self) -> torch.Tensor | None:
        """The elements of this rank's second shard, flat; None while it is out of date, and without second shards."""
        return None

    @property
    def status(self) -> ZeroParamStatus:
        raise NotImplementedError

    def acquire(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Makes ``params``, whose states are all of this class, available until ``give_back``. Collective; calls may
        nest."""
        raise NotImplementedError

    def give_back(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Ends one ``acquire``. The last call releases the parameters."""
        raise NotImplementedError

    def store(self, param: torch.nn.Parameter) -> None:
        """Stores this rank's piece of the available ``param``, in its masters as well if an engine trains it."""
        raise NotImplementedError

    @property
    def is_available(self) -> bool:
        return self.status is ZeroParamStatus.AVAILABLE

    @property
    def stand_in(self) -> torch.Tensor:
        """A tensor with the parameter's whole shape, all NaN, that takes the memory of one element. It is needed
        because autograd checks a parameter's shape when its gradient arrives."""
        if self._stand_in is None:
            one = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
            self._stand_in = one.expand(self.shape) if self.numel else one.new_empty(self.shape)
        return self._stand_in

    @property
    def hollow(self) -> torch.Tensor:
        """A tensor with the parameter's whole shape and strides whose storage has no memory. Operators that read it
        raise torch's error that its data is not allocated."""
        if self._hollow is None:
            with torch.inference_mode(False):
                self._hollow = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self._hollow.untyped_storage().resize_(0)
        return self._hollow

    def own_part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's elements of the whole parameter, given flat."""
        rank = self.comm.rank
        return flat.narrow(0, self.begins[rank], self.numels[rank])

    def open_for_edit(self, param: torch.nn.Parameter) -> bool:
        """Makes a released ``param`` available when code accesses it, if that is allowed at this time. Returns False if
        it is not."""
        return False

    def hold(self) -> Callable[[], None]:
        """Keeps an available parameter available until the returned function is called."""
        return lambda: None

    def change_dtype(self, dtype: torch.dtype) -> None:
        """Called when the whole module is cast (``half()``, ``to(dtype)``) while the parameter is released."""
        if dtype != self.dtype:
            raise self.describe_released()

    def describe_released(self) -> StateError:
        return StateError(
            f"the parameter of shape {tuple(self.shape)} is sharded over {self.comm.world_size} ranks and released: its data is not here",
            where=self.name,
            fix="read or edit it within `with deepspeed_c.zero.GatheredParameters(param, modifier_rank=0):`, on all ranks;"
            " deepspeed_c.utils.safe_get_full_fp32_param(param) copies its master weight",
        )

    # A parameter that is copied or pickled while it is released must not turn into an empty one.
    def __deepcopy__(self, memo: dict) -> ShardState:
        raise self.describe_released()

    def __reduce__(self):
        raise self.describe_released()


class Builder(Protocol):
    """The ``zero.Init`` that sharded a parameter: while it is open, constructors may edit sharded parameters."""

    is_open: bool

    def open_for_edit(self, param: torch.nn.Parameter) -> None: ...


class StandaloneShard(ShardState):
    """The state of a sharded parameter without an engine. Its elements are split evenly, or as a former engine has
    split them. ``home``: the device of this rank's piece, if it differs from the device where the parameter is used."""

    def __init__(
        self,
        param: torch.nn.Parameter,
        name: str,
        comm: Collectives,
        *,
        shape: torch.Size | None = None,
        piece: torch.Tensor | None = None,
        ranges: tuple[Sequence[int], Sequence[int]] | None = None,
        home: torch.device | None = None,
        everyone: Collectives | None = None,
        builder: Builder | None = None,
    ) -> None:
        super().__init__(param, name, comm, param.shape if shape is None else shape, persists=False, everyone=everyone)
        if ranges is None:
            spans = [_C.shard_range(self.numel, comm.world_size, rank) for rank in range(comm.world_size)]
            ranges = [begin for begin, _ in spans], [end - begin for begin, end in spans]
        self.begins, self.numels = ranges
        if piece is None:
            # The piece is a copy, because a view would keep the whole parameter alive.
            piece = self.own_part(_DATA.__get__(param).reshape(-1)).to(home or param.device, copy=True)
        self.piece = piece
        self._depth = 0
        self.builder = builder

    @property
    def status(self) -> ZeroParamStatus:
        return ZeroParamStatus.AVAILABLE if self._depth else ZeroParamStatus.NOT_AVAILABLE

    @property
    def is_shared(self) -> bool:
        """Whether several ``acquire`` calls are open, so that other code also reads the data."""
        return self._depth > 1

    def whole(self) -> torch.Tensor:
        """The whole parameter from all ranks' pieces: a new tensor in the parameter's shape. Collective."""
        return join_pieces(self.piece, self.begins, self.numels, self.comm, self.device, self.name).view(self.shape)

    def acquire(self, params: Sequence[torch.nn.Parameter]) -> None:
        for param in params:
            state = state_of(param)
            if state._depth == 0:
                point_at(param, state.whole())
            state._depth += 1

    def give_back(self, params: Sequence[torch.nn.Parameter]) -> None:
        for param in params:
            state = state_of(param)
            state._depth -= 1
            if state._depth == 0:
                point_at_nothing(param)

    def store(self, param: torch.nn.Parameter) -> None:
        with torch.no_grad():
            self.piece.copy_(self.own_part(_DATA.__get__(param).reshape(-1)))

    def open_for_edit(self, param: torch.nn.Parameter) -> bool:
        if self.builder is None or not self.builder.is_open:
            return False
        self.builder.open_for_edit(param)
        return True

    def change_dtype(self, dtype: torch.dtype) -> None:
        self.piece, self.empty, self.dtype = self.piece.to(dtype), self.empty.to(dtype), dtype
        self._stand_in = self._hollow = None

    def transpose(self) -> None:
        """Makes the parameter, a matrix that is released, its transpose. Collective."""
        whole = self.whole().t().contiguous()
        self.piece.copy_(self.own_part(whole.view(-1)))
        self.shape = whole.shape
        self._stand_in = self._hollow = None


def join_pieces(
    piece: torch.Tensor,
    begins: Sequence[int],
    numels: Sequence[int],
    comm: Collectives,
    device: torch.device,
    label: str,
) -> torch.Tensor:
    """All ranks' pieces in one flat tensor. ``begins`` and ``numels`` give the range of elements of each rank. They
    have one entry if every rank has a copy of all elements. Collective."""
    numel = max((begin + n for begin, n in zip(begins, numels)), default=0)
    whole = torch.empty(numel, dtype=piece.dtype, device=device)
    if len(begins) == 1:  # a copy on every rank
        return whole.copy_(piece)
    whole.narrow(0, begins[comm.rank], numels[comm.rank]).copy_(piece)
    for rank, (begin, n) in enumerate(zip(begins, numels)):
        comm.broadcast(whole.narrow(0, begin, n), rank, label=label)
    return whole


class _Gathered:
    """The handle of a gather that has ended already."""

    def wait(self, *_: Any, **__: Any) -> None:
        """Return at once."""


class _Face(GradFace):
    """The attributes that a sharded parameter has in both states, under DeepSpeed's ``ds_`` names."""

    ds_param_type = ZeroParamType.PARTITIONED
    nvme_swapper = None  # there is no swapper of single parameters
    _dsc_base: type  # the parameter's own class
    _dsc_available: type
    _dsc_released: type

    @property
    def ds_id(self) -> int:
        return self._dsc_shard.ds_id

    @property
    def ds_shape(self) -> torch.Size:
        return self._dsc_shard.shape

    @property
    def ds_numel(self) -> int:
        return self._dsc_shard.numel

    @property
    def ds_tensor(self) -> torch.Tensor:
        return self._dsc_shard.piece

    @property
    def ds_secondary_tensor(self) -> torch.Tensor | None:
        return self._dsc_shard.second_piece

    @property
    def ds_zero_param_process_group(self) -> Any:
        """The group of the ranks that keep second shards together; None without second shards."""
        near = self._dsc_shard.near
        return None if near is None else near.group

    @property
    def ds_status(self) -> ZeroParamStatus:
        return self._dsc_shard.status

    @property
    def ds_persist(self) -> bool:
        return self._dsc_shard.persists

    @property
    def ds_process_group(self) -> Any:
        return self._dsc_shard.comm.group

    @property
    def ds_active_sub_modules(self) -> set[Any]:
        return self._dsc_shard.active_modules

    def ds_summary(self, *_: Any, **__: Any) -> dict[str, Any]:
        """A summary of the parameter for messages."""
        state = self._dsc_shard
        return {
            "id": state.ds_id,
            "name": state.name,
            "status": state.status.name,
            "shape": tuple(state.shape),
            "numel": state.numel,
            "persist": state.persists,
            "piece": state.numels[state.comm.rank],
            "requires_grad": self.requires_grad,
        }

    def all_gather(self, param_list: Sequence[torch.nn.Parameter] | None = None, **_: Any) -> None:
        """Makes this parameter, or the parameters in ``param_list``, available until ``partition``. Collective."""
        for param in [self] if param_list is None else param_list:
            state = state_of(param)
            if state is not None:
                state.acquire([param])

    def all_gather_coalesced(self, params: Sequence[torch.nn.Parameter], *_: Any, **__: Any) -> _Gathered:
        """As ``all_gather`` of ``params``. Returns a handle; the parameters are gathered already when ``wait`` is
        called."""
        self.all_gather(params)
        return _Gathered()

    def partition(
        self, param_list: Sequence[torch.nn.Parameter] | None = None, has_been_updated: bool = False, **_: Any
    ) -> None:
        """Ends one ``all_gather``. With ``has_been_updated`` the parameter's present values are stored; they must be
        the same on all ranks.
        """
        for param in [self] if param_list is None else param_list:
            state = state_of(param)
            if state is not None and state.is_available:
                if has_been_updated:
                    state.store(param)
                state.give_back([param])

    def partition_numel(self) -> int:
        """The number of elements of this rank's piece."""
        state = self._dsc_shard
        return state.numels[state.comm.rank]


class _ReleasedTensor(torch.Tensor):
    """The result of ``detach``, ``to`` and similar methods of a released parameter. A module's ``state_dict()`` calls
    them. It has a dtype and a device, but no data to read."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, state: ShardState, empty: torch.Tensor | None = None) -> torch.Tensor:
        tensor = torch.Tensor._make_subclass(cls, state.empty if empty is None else empty)
        tensor._dsc_shard_of = state
        return tensor

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._dsc_shard_of.describe_released()

    __reduce_ex__ = __deepcopy__ = _refuse


class _Released(_Face):
    """The class of a parameter while it is released. A read or a write raises, or makes the parameter available if that
    is allowed, for instance in an open ``zero.Init``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles functions that are not methods (``F.linear``, ``torch.cat``). With the empty storage they would
        return an empty result or raise an error about sizes."""
        if func in (torch.autograd.grad, torch.autograd.backward):
            return func(*_as_edges(args), **dict(zip(kwargs, _as_edges(kwargs.values()))))
        held: list[Callable[[], None]] = []
        try:
            if func.__name__ not in _HARMLESS_FUNCTIONS:
                for param in _sharded_in([*args, *(kwargs or {}).values()]):
                    if isinstance(param, _Released):
                        _open_or_refuse(param)
                    # Making the next parameter available must not release this one.
                    held.append(state_of(param).hold())
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        finally:
            for let_go in held:
                let_go()

    def detach(self) -> torch.Tensor:
        if self._dsc_shard.open_for_edit(self):
            return self.detach()
        return _ReleasedTensor.of(self._dsc_shard)

    @property
    def data(self) -> torch.Tensor:
        _open_or_refuse(self)
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        state = self._dsc_shard
        if value.numel():
            _open_or_refuse(self)
            _set_data(self, value)
        else:
            # Module.to() and similar methods assign the empty data that they were given, possibly in another dtype.
            state.change_dtype(value.dtype)
            _set_data(self, state.empty)

    # Shapes and sizes are the whole parameter's. So code that asks for sizes works as with a plain model:
    # ``torch.nn.init``, Muon's choice of matrices, counts of parameters.

    @property
    def shape(self) -> torch.Size:
        return self._dsc_shard.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    ndimension, nelement = dim, numel

    def __repr__(self) -> str:
        state = self._dsc_shard
        return (
            f"Parameter {state.name} (released; {tuple(state.shape)} {state.dtype} over {state.comm.world_size} ranks)"
        )

    def __deepcopy__(self, memo: dict) -> Any:
        """Returns an ordinary, whole parameter. Collective. If an engine holds the parameter it raises, because a
        forward may be running.

        peft copies modules in this way. It gathers parameters first only if ``numel()`` is 0, as it is in DeepSpeed.
        """
        state = self._dsc_shard
        if not isinstance(state, StandaloneShard):
            raise state.describe_released()
        if id(self) not in memo:
            memo[id(self)] = _ordinary(self, state.whole())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        raise self._dsc_shard.describe_released()


@contextmanager
def saved_parameters_answer() -> Iterator[None]:
    """Context for a backward pass, within which every tensor has a ``ds_status`` that says it is available.

    Autograd returns parameters that were saved for backward as plain tensors, which are whole. Kernels that recompute
    (trl's) read ``ds_status`` of these tensors.
    """
    before = torch.Tensor.__dict__.get("ds_status")
    torch.Tensor.ds_status = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        if before is None:
            del torch.Tensor.ds_status


def gradient_edge(leaf: torch.Tensor) -> GradientEdge:
    """The graph edge at which gradients of a leaf arrive. As ``torch.autograd.graph.get_gradient_edge``, but it works
    for released parameters too."""
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        return GradientEdge(torch.Tensor.view_as(leaf, leaf).grad_fn.next_functions[0][0], 0)


def _as_edges(values: Iterable[Any]) -> list[Any]:
    """Arguments of a backward pass in which graph edges replace released parameters. The pass needs to know where
    gradients arrive, and does not need the parameters' data."""
    edges = []
    for value in values:
        if isinstance(value, _Released):
            value = gradient_edge(value)
        elif isinstance(value, (list, tuple)) and not isinstance(value, GradientEdge):
            value = tuple(_as_edges(value))
        edges.append(value)
    return edges


def _sharded_in(values: Sequence[Any]) -> list[torch.nn.Parameter]:
    found = []
    for value in values:
        if isinstance(value, _Face):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _sharded_in(value)
    return found


def _open_or_refuse(param: torch.nn.Parameter) -> None:
    state = state_of(param)
    if not state.open_for_edit(param):
        raise state.describe_released()


def _touching(name: str) -> Callable:
    # If the right-hand operand is of a subclass, Python calls its method first: "x * param" calls param.__rmul__(x).
    of_left = getattr(operator, f"__{name[3:]}", None) if name.startswith("__r") else None

    @functools.wraps(getattr(torch.Tensor, name))
    def call(self: torch.nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        _open_or_refuse(self)
        # Autograd saves operands in their order, so a recomputation must use the same order.
        return getattr(self, name)(*args, **kwargs) if of_left is None else of_left(*args, self)

    return call


def _viewing(name: str) -> property:
    def view(self: torch.nn.Parameter) -> torch.Tensor:
        _open_or_refuse(self)
        return getattr(self, name)

    return property(view)


def _converting(name: str) -> Callable:
    @functools.wraps(getattr(torch.Tensor, name))
    def call(self: torch.nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        state = self._dsc_shard
        return _ReleasedTensor.of(state, getattr(state.empty, name)(*args, **kwargs))

    return call


# The methods that ``Module.to``, ``half`` and the like call on every parameter.
_CONVERSIONS = ("bfloat16", "cpu", "cuda", "double", "float", "half", "ipu", "to", "type", "xpu")
# Methods that ask about the object and not about its elements.
_HARMLESS = frozenset(
    [
        "as_subclass",
        "data_ptr",
        "detach_",
        "element_size",
        "get_device",
        "has_names",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_neg",
        "is_pinned",
        "is_set_to",
        "is_shared",
        "is_signed",
        "new",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_tensor",
        "new_zeros",
        "record_stream",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "share_memory_",
        "storage",
        "storage_offset",
        "storage_type",
        "stride",
        "untyped_storage",
    ]
)
# The same holds for functions, and for reads and writes of attributes such as ``grad`` and ``dtype``.
_HARMLESS_FUNCTIONS = frozenset(
    {
        *_HARMLESS,
        *_CONVERSIONS,
        "__get__",
        "__set__",
        "__delete__",
        "__hash__",
        "__repr__",
        "_has_compatible_shallow_copy_type",
    }
    | {
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "detach",
        "is_tensor",
        "is_storage",
    }
)
# Attributes that are views of the elements.
_VIEWS = ("H", "T", "imag", "mH", "mT", "real")
_OPERATORS = [
    "abs",
    "add",
    "array",
    "bool",
    "float",
    "ge",
    "getitem",
    "gt",
    "iadd",
    "imul",
    "index",
    "int",
    "isub",
    "iter",
    "itruediv",
    "le",
    "len",
    "lt",
    "matmul",
    "mul",
    "neg",
    "pow",
    "radd",
    "rmatmul",
    "rmul",
    "rpow",
    "rsub",
    "rtruediv",
    "setitem",
    "sub",
    "truediv",
]


@functools.cache
def _refuse_access() -> None:
    """Adds to ``_Released`` the methods that a released parameter refuses (about 700). Called once, before the first
    parameter is released."""
    methods = [
        name
        for name in dir(torch.Tensor)
        if not name.startswith("_")
        and name not in _HARMLESS
        and type(getattr(torch.Tensor, name)).__name__ in ("method_descriptor", "function")
    ]
    for name in (*methods, *(f"__{short}__" for short in _OPERATORS)):
        if name in _CONVERSIONS:
            setattr(_Released, name, _converting(name))
        elif name not in vars(_Released):
            setattr(_Released, name, _touching(name))
        if name not in ("dim", "size", "numel", "nelement", "ndimension", "detach"):
            setattr(_ReleasedTensor, name, _ReleasedTensor._refuse)
    for name in _VIEWS:
        setattr(_Released, name, _viewing(name))
        setattr(_ReleasedTensor, name, property(_ReleasedTensor._refuse))


class _Available(_Face):
    """The class of a parameter while it is available. Copies of it are ordinary parameters."""

    def detach(self) -> torch.Tensor:
        plain = super().detach()
        if torch.compiler.is_compiling():
            return plain
        if sys._getframe(1).f_code is not _MAKE_PARAMETER:
            return plain
        # ``Parameter(weight)`` calls this, for instance in torch's parametrizations. It needs an object of the same
        # class, and marks this object as a parameter. The weight's memory is freed when it is released, so the new
        # parameter gets data of its own.
        made = plain.clone(memory_format=torch.preserve_format)
        made.__class__ = type(self)
        return made

    @property
    def _is_param(self) -> bool:
        return True

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        unmake_sharded(self)

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _ordinary(self, self.data.clone(memory_format=torch.preserve_format))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        return torch.nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def _ordinary(param: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """A copy of a sharded parameter that is not sharded, with this data. It has the parameter's own class, and the
    attributes that this class copies, as bitsandbytes' do."""
    base = param._dsc_base
    if base is torch.nn.Parameter:
        return torch.nn.Parameter(data, param.requires_grad)
    made = torch.Tensor._make_subclass(base, data, param.requires_grad)
    made.__dict__.update((name, value) for name, value in param.__dict__.items() if not name.startswith("_dsc"))
    return copy.deepcopy(made)


_MAKE_PARAMETER = torch.nn.Parameter.__new__.__code__

_faces: dict[type, tuple[type, type]] = {}


def _faces_of(base: type) -> tuple[type, type]:
    """(available, released) subclasses of a parameter's own class."""
    if base not in _faces:
        _refuse_access()
        made = []
        for face in (_Available, _Released):
            made.append(type(base.__name__, (face, base), {"__module__": base.__module__, "_dsc_base": base}))
        _faces[base] = made[0], made[1]
        for face in made:
            face._dsc_available, face._dsc_released = made
    return _faces[base]


def state_of(param: Any) -> ShardState | None:
    """The state of a sharded parameter; None for any other object."""
    return getattr(param, "__dict__", {}).get(_ATTRIBUTE)


def make_sharded(param: torch.nn.Parameter, state: ShardState) -> None:
    """Gives ``param`` the classes of a sharded parameter. Its data and its other attributes stay unchanged."""
    param.__dict__[_ATTRIBUTE] = state
    if not isinstance(param, _Face):
        param.__class__ = _faces_of(type(param))[0]


def shape_of(param: torch.nn.Parameter) -> torch.Size:
    """The whole parameter's shape, whether the parameter is available or released."""
    state = state_of(param)
    return param.shape if state is None else state.shape


def whole_of(param: torch.nn.Parameter) -> torch.Tensor:
    """The whole parameter's data. If the parameter is sharded and released, the data is gathered, which is collective."""
    state = state_of(param)
    if isinstance(state, StandaloneShard) and not state.is_available:
        return state.whole()
    return param.data


def take_over(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Makes ``param`` an ordinary parameter with this data, whatever state it was in."""
    _set_data(param, data)
    unmake_sharded(param)


def unmake_sharded(param: torch.nn.Parameter) -> None:
    """Undoes ``make_sharded``: gives the parameter its own class back. Its data stays unchanged."""
    param.__dict__.pop(_ATTRIBUTE, None)
    if isinstance(param, _Face):
        param.__class__ = type(param)._dsc_base


def check_edit(state: ShardState, data: torch.Tensor) -> None:
    """Raises StateError on all ranks alike if an edit on any rank has changed a parameter's shape. Collective."""
    shapes = state.everyone.gather_numbers(int(data.shape != state.shape), label=state.name)
    if any(shapes):
        raise StateError(
            f"rank {shapes.index(1)} replaced its data by a tensor of another shape"
            f"{f' ({tuple(data.shape)})' if data.shape != state.shape else ''}; the parameter has {tuple(state.shape)}",
            where=state.name,
            fix="keep the shape, or make a new Parameter and give it to the module before deepspeed_c.initialize",
        )


def is_data_held(param: torch.nn.Parameter) -> bool:
    """Whether anything else than ``param`` refers to its storage; True if torch cannot tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return True
    mine = _DATA.__get__(torch.nn.Parameter(torch.empty(1)))
    return count(_DATA.__get__(param).untyped_storage()._cdata) > count(mine.untyped_storage()._cdata)


def point_at(param: torch.nn.Parameter, whole: torch.Tensor) -> None:
    """Makes ``whole`` the storage of a sharded parameter. The parameter is available afterwards."""
    # The class is changed first, because every access to a released parameter goes through Python.
    param.__class__ = param._dsc_available
    _set_data(param, whole)


def point_at_nothing(param: torch.nn.Parameter) -> None:
    """Releases a sharded parameter. Afterwards it takes no memory, and reading it raises."""
    # The data is set while the parameter has the class of an available parameter, because every access to a released
    # one goes through Python.
    param.__class__ = param._dsc_available
    _set_data(param, param._dsc_shard.empty)
    param.__class__ = param._dsc_released


def adopt_shape(param: torch.nn.Parameter) -> None:
    """As ``point_at_nothing``, but a trained parameter has its whole shape. Used while a gradient may arrive."""
    param.__class__ = param._dsc_available
    state = param._dsc_shard
    _set_data(param, state.stand_in if param.requires_grad else state.empty)
    param.__class__ = param._dsc_released


def hollow_out(param: torch.nn.Parameter) -> None:
    """As ``adopt_shape``, but the parameter has the class, shape and strides of an available one. The guards of
    ``torch.compile`` compare these, so a graph does not depend on what is gathered."""
    param.__class__ = param._dsc_available
    _set_data(param, param._dsc_shard.hollow)


def is_released(param: Any) -> bool:
    """Whether ``param`` is a sharded parameter that is released."""
    return isinstance(param, _Released)
