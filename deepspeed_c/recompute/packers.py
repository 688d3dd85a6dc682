"""Ways to keep the inputs of a recomputed layer: cut over tensor-parallel ranks, in one arena, in host memory, or in a
file.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import torch

from deepspeed_c import _C
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import RankMismatchError
from deepspeed_c.logging import logger
from deepspeed_c.recompute.compare import digest
from deepspeed_c.recompute.counters import LayerCalls
from deepspeed_c.recompute.nests import is_activation
from deepspeed_c.recompute.stash import Stash, Stashed
from deepspeed_c.saved_tensors import overwritten

__all__ = ["Arena", "Gather", "ShardPacker", "StashPacker", "own_range"]

_ALIGNMENT_BYTES = 64
# For inputs of at least _TRIMMED_BYTES, memory that the C library has freed is returned to the system once in
# _TRIMMED_RUNS runs of layers. The next use of each returned page is a page fault. Returning it in every run would cost
# a sixth of a narrow layer's time.
_TRIMMED_BYTES, _TRIMMED_RUNS = 1 << 20, 8


def own_range(numel: int, rank: int, n_ranks: int) -> tuple[int, int]:
    """(begin, number) of the elements that ``rank`` keeps."""
    begin, end = _C.shard_range(numel, n_ranks, rank)
    return begin, end - begin


class Gather:
    """The elements of one tensor on their way from the ranks that keep them. All ranks make gathers in the same order.

    part: this rank's elements. None: this rank does not need the result, and takes part only because the other ranks
    would wait for it.
    """

    def __init__(
        self, comm: Collectives | None, numel: int, part: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._numel, self._n_ranks = numel, 1 if comm is None else comm.world_size
        rank = 0 if comm is None else comm.rank
        # Collectives move equal slices. Where the elements do not divide, the first ranks have one element more.
        self._slice_elems = own_range(numel, 0, self._n_ranks)[1]
        self._flat = torch.empty(self._slice_elems * self._n_ranks, dtype=dtype, device=device)
        if part is not None:
            self._flat.narrow(0, rank * self._slice_elems, part.numel()).copy_(part, non_blocking=True)
        self._work = None
        if self._n_ranks > 1:
            self._work = comm.all_gather(self._flat, label="partitioned activations")

    def wait(self) -> torch.Tensor:
        """All elements of the tensor, flat."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._flat.numel() == self._numel:
            return self._flat
        sizes = [own_range(self._numel, rank, self._n_ranks)[1] for rank in range(self._n_ranks)]
        slices = self._flat.view(self._n_ranks, self._slice_elems)
        return torch.cat([part[:size] for part, size in zip(slices, sizes, strict=True)])


class Arena:
    """One piece of memory for all parts that are kept between a forward and its backward. Its size is measured in the
    first forward.

    Other memory is used where the arena has no room (a second forward is in flight, or a forward is longer). Such
    tensors count for the next arena's size. The piece is reused when all parts in it have been released.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._used_bytes = self._wanted_bytes = self._n_lent = 0
        # Graphs are freed on any thread, and by the garbage collector even within a method of this class.
        self._lock = threading.RLock()
        self.n_outside = 0
        """How often the arena had no room, since the process began."""

    @property
    def n_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        n_bytes = math.ceil(numel * dtype.itemsize / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        with self._lock:
            self._n_lent += 1
            self._wanted_bytes += n_bytes
            begin = self._used_bytes
            if self._buffer is not None and self._buffer.device == device and begin + n_bytes <= self.n_bytes:
                self._used_bytes += n_bytes
                return self._buffer[begin : begin + numel * dtype.itemsize].view(dtype)
            self.n_outside += 1
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, device: torch.device) -> None:
        with self._lock:
            self._n_lent -= 1
            if self._n_lent:
                return
            if self._wanted_bytes > self.n_bytes:
                self._buffer = None  # frees the old buffer before the new one is made
                self._buffer = torch.empty(self._wanted_bytes, dtype=torch.uint8, device=device)
            self._used_bytes = self._wanted_bytes = 0

    def clear(self) -> None:
        """Frees the memory, unless a part lies in it."""
        with self._lock:
            if not self._n_lent:
                self._buffer = None


class _Kept:
    """The kept form of one tensor. It can be turned back into the tensor."""

    __slots__ = (
        "__weakref__", "_arena", "_of_memory", "_own_shape", "_span_elems", "_watch", "device", "dtype", "flat", "numel",
        "shape", "source", "stashed", "stride", "version",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor) -> None:
        self.source, self.version = weakref.ref(tensor), tensor._version
        # An alias without data: its version goes on counting changes in place after the tensor and its memory are gone.
        self._watch = tensor.detach()
        self._watch.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.shape, self.stride, self.device, self.dtype = tensor.shape, tensor.stride(), tensor.device, tensor.dtype
        # Along an expanded dimension only one element is kept.
        self._own_shape = [1 if stride == 0 else size for size, stride in zip(self.shape, self.stride, strict=True)]
        n_elems = math.prod(self._own_shape)
        # Number of elements of memory from the first element to the last. A tensor without gaps is kept as it lies in
        # memory, in any order of dimensions. A slice of a larger tensor is kept without the gaps between its elements.
        self._span_elems = 1 + sum((n - 1) * stride for n, stride in zip(self._own_shape, self.stride, strict=True))
        self._of_memory = self._span_elems <= n_elems
        self.numel = self._span_elems if self._of_memory else n_elems
        self.flat: torch.Tensor | None = None
        self.stashed: Stashed | None = None
        self._arena: Arena | None = None

    def elements_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The kept elements of ``tensor``, flat."""
        if self._of_memory:
            return tensor.detach().as_strided((self.numel,), (1,))
        return tensor.detach().as_strided(self._own_shape, self.stride).reshape(-1)

    def keep(self, values: torch.Tensor, arena: Arena | None) -> None:
        """Copies ``values``, into the arena if there is one."""
        if arena is None:
            self.flat = torch.empty(values.numel(), dtype=values.dtype, device=values.device)
        else:
            self.flat = arena.take(values.numel(), values.dtype, values.device)
            self._arena = arena
        self.flat.copy_(values, non_blocking=True)

    def check(self) -> None:
        """Raises RuntimeError, as autograd does, where the tensor was overwritten after it was kept."""
        if self._watch._version != self.version:
            raise overwritten(f"{self.dtype} {list(self.shape)}", self._watch._version, self.version)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor with its original strides. With other strides some operators compute other bits, or save other
        tensors.
        """
        if not self._of_memory:
            values, flat = flat.view(self._own_shape), flat.new_empty(self._span_elems)
            flat.as_strided(self._own_shape, self.stride).copy_(values)
        return flat.as_strided(self.shape, self.stride)

    def __del__(self) -> None:
        if self._arena is not None:
            self._arena.give_back(self.flat.device)


class _KeptBefore:
    """Kept tensors that are still in use, so that a tensor given to many layers is kept once."""

    def __init__(self) -> None:
        self._kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()

    def find(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], _Kept]) -> _Kept:
        kept = self._kept.get(id(tensor))
        if kept is None or kept.source() is not tensor or kept.version != tensor._version:
            self._kept[id(tensor)] = kept = make(tensor)
        return kept


class _Claim:
    """One layer's use of a kept tensor. It holds the gather that was started ahead for this use."""

    __slots__ = ("__weakref__", "_kept", "call", "device", "dtype", "gather", "numel")

    def __init__(self, kept: _Kept, call: int) -> None:
        self._kept, self.call = weakref.ref(kept), call
        self.numel, self.dtype, self.device = kept.numel, kept.dtype, kept.device
        self.gather: Gather | None = None

    @property
    def kept(self) -> _Kept | None:
        """The kept tensor; None after the graph was freed."""
        return self._kept()


class _Order:
    """Predicts the layer whose inputs the backward will ask for next, from the order in which layers kept their inputs
    and in which the inputs were asked for. Ranks of one program agree on that order, but not on the moment when an
    object is freed.
    """

    _MAX_CALLS = 1024  # calls that are remembered

    def __init__(self) -> None:
        self._claims: dict[int, list[_Claim]] = {}  # by number of the call
        self._n_calls = self._of = 0
        self._at = self._n_run = self._n_run_before = 0

    def add(self, kept: _Kept, call: int) -> _Claim:
        """Notes that ``call`` keeps ``kept``. ``call`` must differ between two consecutive calls of layers."""
        if call != self._of or not self._n_calls:
            self._of, self._n_calls = call, self._n_calls + 1
            self._claims[self._n_calls] = []
            self._claims.pop(self._n_calls - self._MAX_CALLS, None)
        claim = _Claim(kept, self._n_calls)
        self._claims[self._n_calls].append(claim)
        return claim

    def enter(self, call: int) -> tuple[list[_Claim], list[_Claim]]:
        """A backward asks for the first input of ``call``. Returns (the claims of this call, the claims of the call
        that is expected next). The second list is empty once this backward has gone as far, call by call, as the
        backward before.
        """
        if call == self._at:
            return [], []
        if call == self._at - 1:
            self._n_run += 1
        else:
            self._n_run_before, self._n_run = self._n_run or self._n_run_before, 1
        self._at = call
        comes = self._claims.get(call - 1, []) if self._n_run < self._n_run_before else []
        return self._claims.get(call, []), comes

    def leave(self) -> None:
        """The forward goes on, so the next request begins another backward."""
        if self._at:
            self._at, self._n_run_before, self._n_run = 0, self._n_run, 0


class ShardPacker:
    """Keeps this rank's part of each activation. Tensor-parallel ranks hold the same activations, and gather the parts
    again. The gather is one layer ahead of the backward, if the previous backward went through the layers in reverse
    order.
    """

    def __init__(
        self, comm: Collectives | None, calls: LayerCalls, *, arena: Arena | None, stash: Stash | None
    ) -> None:
        self._comm, self._calls, self._arena, self._stash = comm, calls, arena, stash
        self._n_ranks = 1 if comm is None else comm.world_size
        self._rank = 0 if comm is None else comm.rank
        self._memory, self._order = _KeptBefore(), _Order()
        self._has_gathered = False
        self._on_the_way: list[_Claim] = []
        self._trimmed_at = self._n_untrimmed = 0

    def pack(self, tensor: torch.Tensor) -> tuple[_Kept, _Claim] | None:
        if not is_activation(tensor, self._n_ranks) or isinstance(tensor, torch.nn.Parameter):
            return None
        self._order.leave()
        self._drop_gathers()
        self._trim(tensor.device, tensor.nbytes, self._calls.number)
        kept = self._memory.find(tensor, self._cut)
        if kept.stashed is not None:
            self._stash.touch(kept.stashed, None)
        return kept, self._order.add(kept, self._calls.number)

    def _cut(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        flat = kept.elements_of(tensor)
        if not self._has_gathered:
            self._check(tensor, flat)
        part = flat.narrow(0, *own_range(kept.numel, self._rank, self._n_ranks))
        # An expanded tensor may have fewer kept elements than there are ranks.
        if self._stash is not None and part.numel() and self._stash.takes(tensor.device):
            kept.stashed = self._stash.put(part.clone())
        else:
            kept.keep(part, self._arena)
        return kept

    def _check(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        """Checks, in the first forward, that all ranks have the same values. Collective."""
        if self._comm is None or self._n_ranks == 1:
            return
        digests = self._comm.gather_numbers(digest(flat), label="checksums of partitioned activations")
        if len(set(digests)) > 1:
            raise RankMismatchError(
                f"an activation of shape {tuple(tensor.shape)} has checksums {digests} on the ranks"
                f" {self._comm.global_ranks}",
                where='"partition_activations"',
                fix="give tensor-parallel ranks the same inputs and random numbers, mark what differs with"
                " tensor.no_checkpointing = True, or set partition_activations to false",
            )

    def unpack(self, packed: tuple[_Kept, _Claim]) -> torch.Tensor:
        kept, claim = packed
        self._has_gathered = True
        kept.check()
        self._trim(kept.device, kept.numel * kept.dtype.itemsize, -claim.call)
        if self._n_ranks > 1:
            asked, comes = self._order.enter(claim.call)
            for each in (*asked, *comes):
                if each.gather is None:
                    each.gather = self._gather(each)
                    self._on_the_way.append(each)
        gather, claim.gather = claim.gather or self._gather(claim), None
        self._on_the_way = [each for each in self._on_the_way if each is not claim]
        return kept.shaped(gather.wait())

    def _trim(self, device: torch.device, n_bytes: int, at: int) -> None:
        """Called before a layer runs whose input has ``n_bytes``. at: a number that differs between consecutive runs.

        Parts of inputs lie in the C library's heap between freed whole inputs. The library would keep the pages of the
        freed inputs, so a rank would hold as many bytes as without cutting. An accelerator's allocator reuses them.
        """
        accelerator = get_accelerator()
        is_host = device.type == "cpu" and accelerator.device_name() == "cpu"
        if n_bytes < _TRIMMED_BYTES or at == self._trimmed_at or not is_host:
            return
        self._trimmed_at = at
        self._n_untrimmed += 1
        if self._n_untrimmed >= _TRIMMED_RUNS:
            self._n_untrimmed = 0
            accelerator.empty_cache()

    def _gather(self, claim: _Claim) -> Gather:
        kept, part = claim.kept, None
        if kept is not None:
            part = kept.flat if kept.stashed is None else self._stash.get(kept.stashed)
        return Gather(self._comm, claim.numel, part, claim.dtype, claim.device)

    def _drop_gathers(self) -> None:
        """Drops gathers that no backward has asked for."""
        for claim in self._on_the_way:
            claim.gather.wait()
            claim.gather = None
        self._on_the_way = []


class StashPacker:
    """Keeps activations in a ``Stash``: in host memory or in a file."""

    def __init__(self, stash: Stash) -> None:
        self._stash, self._memory = stash, _KeptBefore()
        self._has_said = False

    def pack(self, tensor: torch.Tensor) -> _Kept | None:
        if not self._stash.takes(tensor.device):
            if not self._has_said and tensor.device.type == "cpu":
                self._has_said = True
                logger.info("the activations are in host memory already, where they were to go; nothing is moved")
            return None
        if not is_activation(tensor) or isinstance(tensor, torch.nn.Parameter):
            return None
        kept = self._memory.find(tensor, _Kept)
        if kept.stashed is None:
            kept.stashed = self._stash.put(kept.elements_of(tensor))
        else:
            self._stash.touch(kept.stashed, kept.elements_of(tensor))
        return kept

    def unpack(self, kept: _Kept) -> torch.Tensor:
        kept.check()
        return kept.shaped(self._stash.get(kept.stashed))
