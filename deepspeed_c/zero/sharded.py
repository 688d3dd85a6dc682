"""A sharded parameter: a ``torch.nn.Parameter`` of which each rank keeps one piece, and the whole only while somebody uses it.

The object stays the same one for good. While it is *released* its storage is empty and its class is a subclass that turns a read of ``.data`` into an
error that says what to do; while it is *available* it is an ordinary parameter of its own class. What is known about it lies in a ``ShardState``, which
either stands alone (a model under ``zero.Init`` that no engine has yet) or belongs to an engine's gather unit (``fetch.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import StateError

__all__ = [
    "ShardState",
    "StandaloneShard",
    "ZeroParamStatus",
    "ZeroParamType",
    "adopt_shape",
    "join_pieces",
    "make_sharded",
    "point_at",
    "point_at_nothing",
    "shape_of",
    "state_of",
    "take_over",
    "unmake_sharded",
    "whole_of",
]

_ATTRIBUTE = "_dsc_shard"
_DATA = torch.Tensor.data  # the descriptor: reads and writes storage past the checks below
_ids = itertools.count()


class ZeroParamType(Enum):
    """What kind of parameter it is (DeepSpeed's names)."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether the whole parameter is here (DeepSpeed's names)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ShardState:
    """What a rank knows about one sharded parameter.

    ``piece`` is this rank's part, flat, of exactly the elements that it owns: [n], the parameter's dtype. ``begins`` and ``numels`` say which elements each rank owns.
    """

    def __init__(
        self, param: torch.nn.Parameter, name: str, comm: Collectives, shape: torch.Size, persists: bool
    ) -> None:
        self.ds_id = next(_ids)
        self.name, self.comm, self.persists = name, comm, persists
        self.shape, self.numel = shape, shape.numel()
        self.dtype, self.device = param.dtype, param.device
        self.active_modules: set[Any] = set()  # DeepSpeed's bookkeeping, which callers clear; nothing of ours reads it
        self.empty = torch.empty(0, dtype=self.dtype, device=self.device)
        self._stand_in: torch.Tensor | None = None

    # -- what the two kinds of state define

    piece: torch.Tensor
    begins: Sequence[int]
    numels: Sequence[int]

    @property
    def status(self) -> ZeroParamStatus:
        raise NotImplementedError

    def acquire(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Makes this kind's ``params`` available until ``give_back``. Collective; calls may nest."""
        raise NotImplementedError

    def give_back(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Ends one ``acquire``; the last one releases."""
        raise NotImplementedError

    def store(self, param: torch.nn.Parameter) -> None:
        """Takes this rank's piece from the available ``param`` (its masters too, where an engine trains it)."""
        raise NotImplementedError

    # -- common

    @property
    def is_available(self) -> bool:
        return self.status is ZeroParamStatus.AVAILABLE

    @property
    def stand_in(self) -> torch.Tensor:
        """A tensor of the whole shape that takes one element of memory, all NaN: autograd looks at a parameter's shape when its gradient arrives."""
        if self._stand_in is None:
            one = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
            self._stand_in = one.expand(self.shape) if self.numel else one.new_empty(self.shape)
        return self._stand_in

    def own_part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's elements of the whole parameter, given flat."""
        rank = self.comm.rank
        return flat.narrow(0, self.begins[rank], self.numels[rank])

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


class StandaloneShard(ShardState):
    """The state of a parameter that no engine holds: split evenly by elements, or in the pieces of the engine that it was in."""

    def __init__(
        self,
        param: torch.nn.Parameter,
        name: str,
        comm: Collectives,
        *,
        shape: torch.Size | None = None,
        piece: torch.Tensor | None = None,
        ranges: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        super().__init__(param, name, comm, param.shape if shape is None else shape, persists=False)
        if ranges is None:
            spans = [_C.shard_range(self.numel, comm.world_size, rank) for rank in range(comm.world_size)]
            ranges = [begin for begin, _ in spans], [end - begin for begin, end in spans]
        self.begins, self.numels = ranges
        # A copy: a view would keep the whole parameter alive.
        self.piece = self.own_part(_DATA.__get__(param).reshape(-1)).clone() if piece is None else piece
        self._depth = 0

    @property
    def status(self) -> ZeroParamStatus:
        return ZeroParamStatus.AVAILABLE if self._depth else ZeroParamStatus.NOT_AVAILABLE

    def whole(self) -> torch.Tensor:
        """The parameter put together from all ranks' pieces: a new tensor in its shape. Collective."""
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


def join_pieces(
    piece: torch.Tensor,
    begins: Sequence[int],
    numels: Sequence[int],
    comm: Collectives,
    device: torch.device,
    label: str,
) -> torch.Tensor:
    """All ranks' pieces in one flat tensor. ``begins`` and ``numels`` say which elements each rank has; one rank has all where every rank has. Collective."""
    numel = max((begin + n for begin, n in zip(begins, numels)), default=0)
    whole = torch.empty(numel, dtype=piece.dtype, device=device)
    if len(begins) == 1:  # a copy on every rank
        return whole.copy_(piece)
    whole.narrow(0, begins[comm.rank], numels[comm.rank]).copy_(piece)
    for rank, (begin, n) in enumerate(zip(begins, numels)):
        comm.broadcast(whole.narrow(0, begin, n), rank, label=label)
    return whole


# -- the parameter's two faces ------------------------------------------------------------------------------------------


class _Face:
    """What a sharded parameter answers to in both states: DeepSpeed's ``ds_`` names."""

    ds_param_type = ZeroParamType.PARTITIONED

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
        """What is known about the parameter, for a message."""
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
        """Makes the whole parameter (or those listed) available until ``partition``. Collective."""
        for param in [self] if param_list is None else param_list:
            state = state_of(param)
            if state is not None:
                state.acquire([param])

    def partition(
        self, param_list: Sequence[torch.nn.Parameter] | None = None, has_been_updated: bool = False, **_: Any
    ) -> None:
        """Ends one ``all_gather``; with ``has_been_updated`` what the parameter holds (the same on all ranks) is kept."""
        for param in [self] if param_list is None else param_list:
            state = state_of(param)
            if state is not None and state.is_available:
                if has_been_updated:
                    state.store(param)
                state.give_back([param])

    def partition_numel(self) -> int:
        """Elements of this rank's piece."""
        state = self._dsc_shard
        return state.numels[state.comm.rank]


class _ReleasedTensor(torch.Tensor):
    """What ``detach`` of a released parameter gives, as in a module's ``state_dict()``: it has a dtype and a device, and no data to copy or save."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, state: ShardState) -> torch.Tensor:
        tensor = torch.Tensor._make_subclass(cls, state.empty)
        tensor._dsc_shard_of = state
        return tensor

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._dsc_shard_of.describe_released()

    clone = cpu = cuda = to = numpy = tolist = item = contiguous = __array__ = _refuse
    __reduce_ex__ = __deepcopy__ = _refuse


class _Released(_Face):
    """The face while the data is not here."""

    def detach(self) -> torch.Tensor:
        return _ReleasedTensor.of(self._dsc_shard)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._dsc_shard.describe_released()

    clone = numpy = tolist = item = __array__ = _refuse

    @property
    def data(self) -> torch.Tensor:
        raise self._dsc_shard.describe_released()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Module.to() and the like put back what they were given: nothing.
        state = self._dsc_shard
        if value.numel() or value.dtype != state.dtype:
            raise state.describe_released()

    def __repr__(self) -> str:
        state = self._dsc_shard
        return (
            f"Parameter {state.name} (released; {tuple(state.shape)} {state.dtype} over {state.comm.world_size} ranks)"
        )

    def __deepcopy__(self, memo: dict) -> Any:
        raise self._dsc_shard.describe_released()

    def __reduce_ex__(self, protocol: int) -> Any:
        raise self._dsc_shard.describe_released()


class _Available(_Face):
    """The face while the whole parameter is here: copies of it are plain parameters."""

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(
                self.data.clone(memory_format=torch.preserve_format), self.requires_grad
            )
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        return torch.nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


_faces: dict[type, tuple[type, type]] = {}


def _faces_of(base: type) -> tuple[type, type]:
    """(available, released) subclasses of a parameter's own class."""
    if base not in _faces:
        made = []
        for face in (_Available, _Released):
            made.append(type(base.__name__, (face, base), {"__module__": base.__module__, "_dsc_base": base}))
        _faces[base] = made[0], made[1]
    return _faces[base]


def state_of(param: Any) -> ShardState | None:
    """The state of a sharded parameter; None for any other object."""
    return getattr(param, "__dict__", {}).get(_ATTRIBUTE)


def make_sharded(param: torch.nn.Parameter, state: ShardState) -> None:
    """Gives ``param`` the faces of a sharded parameter; what it holds and its other attributes stay."""
    param.__dict__[_ATTRIBUTE] = state
    if not isinstance(param, _Face):
        param.__class__ = _faces_of(type(param))[0]


def shape_of(param: torch.nn.Parameter) -> torch.Size:
    """The whole parameter's shape, whether it is here or not."""
    state = state_of(param)
    return param.shape if state is None else state.shape


def whole_of(param: torch.nn.Parameter) -> torch.Tensor:
    """The whole parameter's data; put together (collective) where it is sharded and released."""
    state = state_of(param)
    if isinstance(state, StandaloneShard) and not state.is_available:
        return state.whole()
    return param.data


def take_over(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Makes ``param`` an ordinary parameter with this data, whatever it was before."""
    _DATA.__set__(param, data)
    unmake_sharded(param)


def unmake_sharded(param: torch.nn.Parameter) -> None:
    """Takes the faces of a sharded parameter away; what it holds stays."""
    param.__dict__.pop(_ATTRIBUTE, None)
    if isinstance(param, _Face):
        param.__class__ = type(param)._dsc_base


def point_at(param: torch.nn.Parameter, whole: torch.Tensor) -> None:
    """Makes ``whole`` the storage of a sharded parameter, which is then available."""
    _DATA.__set__(param, whole)
    param.__class__ = _faces_of(type(param)._dsc_base)[0]


def point_at_nothing(param: torch.nn.Parameter) -> None:
    """Releases a sharded parameter: it takes no memory, and reading it says so."""
    _DATA.__set__(param, state_of(param).empty)
    param.__class__ = _faces_of(type(param)._dsc_base)[1]


def adopt_shape(param: torch.nn.Parameter) -> None:
    """As ``point_at_nothing``, with the whole shape: while a gradient may arrive."""
    _DATA.__set__(param, state_of(param).stand_in)
    param.__class__ = _faces_of(type(param)._dsc_base)[1]
