"""Collectives of ``deepspeed_c.comm`` over gloo, which ranks compare before data moves.

[Note: compared first] Where ranks give other lengths or dtypes, gloo ends a process, leaves old values or reads bits as
another dtype. It cannot be asked beforehand. So each rank first gathers a description of the call from all ranks, and
descriptions all have one length. A rank that finds a difference raises the same error as all others, has sent nothing,
and the group remains usable.

[Note: started at once] A collective with ``async_op=True`` must not wait for other ranks: the program may wait for a
message of theirs first. So its data moves at the same time, and descriptions are compared when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from deepspeed_c.comm.transports import table
from deepspeed_c.comm.transports.described import COMPARISON_TAG, Members, as_bytes, head_of, text_of
from deepspeed_c.comm.work import FailedStart, Handle

__all__ = ["agree", "agree_on_name", "agree_on_sum", "as_moved", "is_over_gloo"]


def is_over_gloo(tensor: Any, group: ProcessGroup | None) -> bool:
    """Whether ``tensor`` is moved by gloo, among ranks of ``group`` that this rank belongs to."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu or group == dist.GroupMember.NON_GROUP_MEMBER:
        return False
    whole = dist.group.WORLD if group is None else group
    return whole.size() > 1 and table.cpu_backend(whole) == "gloo"


def as_moved(*lists: Sequence[torch.Tensor] | None) -> list[list[torch.Tensor] | None]:
    """The lists with the bytes of their tensors: gloo does not move every dtype. Where dtypes differ or a tensor has
    gaps, torch gets the tensors themselves, and says what it refuses.
    """
    tensors = [tensor for each in lists for tensor in each or ()]
    plain = all(
        isinstance(t, torch.Tensor) and t.is_cpu and t.layout == torch.strided and t.is_contiguous() for t in tensors
    )
    if plain and len({t.dtype for t in tensors}) == 1:
        return [None if each is None else [as_bytes(t.detach()) for t in each] for each in lists]
    return [None if each is None else list(each) for each in lists]


def agree(
    call: Callable[[], Any], what: str, tensors: Sequence[torch.Tensor], group: ProcessGroup | None, is_async: bool
) -> Any:
    """What ``call`` returns. It is called on all ranks or on none: they have to agree on ``what``, and on dtype and
    length of ``tensors``. Raises RuntimeError with both values on all ranks where they do not.
    """
    if not tensors or not is_over_gloo(tensors[0], group):
        return call()
    return _compared(call, f"{what} of {', '.join(map(_in_words, tensors))}", group, is_async)


def agree_on_name(call: Callable[[], Any], what: str, group: ProcessGroup | None, is_async: bool = False) -> Any:
    """``agree`` for a call that moves no tensors of the caller: a barrier, or objects."""
    if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(group) != "gloo":
        return call()
    return call() if dist.get_world_size(group) == 1 else _compared(call, what, group, is_async)


def _compared(call: Callable[[], Any], text: str, group: ProcessGroup | None, is_async: bool) -> Any:
    comparison = _Comparison(text, group)
    if is_async:
        return _Compared(call(), comparison)
    comparison.wait()
    return call()


def agree_on_sum(
    call: Callable[[], Any],
    name: str,
    op: Any,
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup | None,
    is_async: bool,
) -> Any:
    """``agree`` for a reduction by ``op``. Raises RuntimeError where gloo cannot reduce the dtype."""
    if not tensors or not is_over_gloo(tensors[0], group):
        return call()
    dtype, op_name = tensors[0].dtype, getattr(op, "name", type(op).__name__)
    if op == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(
            f"AVG of {dtype}: an average of integers is no integer; use SUM and divide, or a float dtype"
        )
    try:
        return agree(call, f"{name} ({op_name})", tensors, group, is_async)
    except RuntimeError as error:
        if "Invalid scalar type" in str(error):
            raise RuntimeError(f"gloo cannot reduce {dtype}: convert the tensor to another dtype first") from error
        raise


def _in_words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} [{tensor.numel()}]"


@lru_cache(maxsize=256)
def _as_head(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(head_of(text)), dtype=torch.uint8)


class _Comparison:
    """The descriptions of a call, under way from all ranks to all: 2 (n - 1) short messages of each rank. On 2 ranks
    they take as long as gloo's gather, and unlike a gather they may be under way while the data is.
    """

    def __init__(self, text: str, group: ProcessGroup | None) -> None:
        members = Members.of(group)
        self._ranks, rank, n = members.global_ranks, members.rank, len(members.global_ranks)
        whole = dist.group.WORLD if group is None else group
        own = _as_head(text)
        self._heads = own.repeat(n, 1)
        self._handles: list[Handle] = []
        try:
            for other in ((rank + i) % n for i in range(1, n)):
                self._handles.append(whole.recv([self._heads[other]], other, COMPARISON_TAG))
                self._handles.append(whole.send([own], other, COMPARISON_TAG))
        except RuntimeError as error:
            self._handles.append(FailedStart(error))

    def wait(self) -> None:
        """Raises RuntimeError where the calls differ."""
        while self._handles:
            self._handles.pop().wait()
        heads = [each.numpy().tobytes() for each in self._heads]
        other = next((i for i, head in enumerate(heads) if head != heads[0]), None)
        if other is not None:
            raise RuntimeError(
                f"rank {self._ranks[0]} calls {text_of(heads[0])}, rank {self._ranks[other]} calls"
                f" {text_of(heads[other])}"
            )


class _Compared:
    """The handle of a collective that is under way together with its comparison."""

    def __init__(self, handle: Any, comparison: _Comparison) -> None:
        self._handle, self._comparison = handle, comparison

    def wait(self, *args: Any) -> Any:
        self._comparison.wait()
        return self._handle.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
