"""The transfer of a value from one stage to the next. A value is any nest of tensors and other objects, in one message.

A message is a head of 64 bytes, followed by the tensors. Its receiver has to know its length beforehand, and assumes
that it equals the length of the previous message. If a value has another form (shapes, dtypes, objects other than
tensors), a message of the old length announces that in its head, and two messages with the form and the value follow.
So an unchanged form costs nothing, and a changed form costs two additional messages.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.work import Work
from deepspeed_c.errors import ModelError, RankMismatchError

__all__ = ["Link", "LocalLink", "RemoteLink"]

HEAD_BYTES = 64
_N_HEAD_WORDS = 3
"""Number of integers of 64 bits in a head."""
_ALIGN_BYTES = 64
_WORD = torch.int64
"""Dtype of messages: the head can be read without a change of the dtype. Their lengths are multiples of 64 bytes."""


class Link(Protocol):
    """One direction between two neighbouring stages. Values arrive in the order of ``send``."""

    def send(self, value: Any, label: str) -> None:
        """Start to send. The tensors may be freed at once. Raises ModelError, before anything is sent, for a value that
        does not pickle.
        """
        ...

    def post(self, label: str) -> None:
        """The receiver allocates memory for the next value. The value may arrive from now on."""
        ...

    def take(self) -> Any:
        """Wait for the value that was posted first. Its tensors are detached, and require gradients as the sent tensors
        did.
        """
        ...

    def flush(self) -> None:
        """Return when everything has been sent."""
        ...

    def clear(self) -> None:
        """Discard values under way, after an error."""
        ...


class LocalLink:
    """A link between two stages on this rank. copies: the receiver gets memory of its own."""

    def __init__(self, *, copies: bool = False) -> None:
        self._values: deque[Any] = deque()
        self._copies = copies

    def send(self, value: Any, label: str) -> None:
        leaves, spec = tree_flatten(value)
        own = [self._detached(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        self._values.append(tree_unflatten(own, spec))

    def _detached(self, leaf: torch.Tensor) -> torch.Tensor:
        own = leaf.detach().clone() if self._copies else leaf.detach()
        return own.requires_grad_(leaf.requires_grad)

    def post(self, label: str) -> None:
        """Does nothing: values need no further memory."""

    def take(self) -> Any:
        return self._values.popleft()

    def flush(self) -> None:
        """Does nothing: no messages are under way."""

    def clear(self) -> None:
        self._values.clear()


class _Packed(NamedTuple):
    """Description of a tensor, known before the tensor's bytes arrive."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    begin: int
    """Number of elements of the dtype that would fit before the tensor in the message."""


class _Form(NamedTuple):
    """Description of a value: everything except the bytes of its tensors."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """A ``_Packed`` for each tensor, and pickled bytes for any other leaf."""
    n_bytes: int
    """Number of bytes of the message."""

    @classmethod
    def of(cls, leaves: list[Any], spec: TreeSpec) -> _Form:
        known: list[Any] = []
        end = HEAD_BYTES
        for leaf in leaves:
            if not torch.is_tensor(leaf):
                known.append(_pickle_leaf(leaf))
                continue
            strides = torch.empty(leaf.shape, device="meta").stride()
            begin = end // leaf.dtype.itemsize
            known.append(_Packed(leaf.dtype, tuple(leaf.shape), strides, leaf.requires_grad, begin))
            end += -(-leaf.numel() * leaf.dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        return cls(spec, tuple(known), end)

    def fits(self, leaves: list[Any], spec: TreeSpec) -> bool:
        """Whether it describes this value. Takes a third of the time of a new form."""
        return (
            len(leaves) == len(self.leaves)
            and spec == self.spec
            and all(_is_alike(known, leaf) for known, leaf in zip(self.leaves, leaves, strict=True))
        )


class _Buffer(NamedTuple):
    """Memory for messages of one form, with the places that each of them fills. Making the places takes longer than all
    else that a send of a small value needs, so they are kept during a run.
    """

    form: _Form
    data: torch.Tensor
    """Of ``Collectives.outgoing``."""
    number: torch.Tensor
    """The word of the head for the value's number. The other words are the same in all values of the form."""
    places: tuple[torch.Tensor, ...]
    """A view for each tensor of a value."""


def _is_alike(known: Any, leaf: Any) -> bool:
    if not torch.is_tensor(leaf):
        return _pickle_leaf(leaf) == known
    return (
        isinstance(known, _Packed)
        and leaf.dtype == known.dtype
        and leaf.shape == known.shape
        and leaf.requires_grad == known.requires_grad
    )


def _pickle_leaf(leaf: Any) -> bytes:
    try:
        return pickle.dumps(leaf)
    except Exception as error:
        raise ModelError(
            f"a {type(leaf).__name__} cannot be sent to another stage: {error}",
            where="PipelineModule",
            fix="have layers pass on tensors, and objects that pickle",
        ) from error


class _FormPickler(pickle.Pickler):
    """Pickles the place of a leaf as a call of ``_leaf_spec``. Unpickling torch's own class prints a FutureWarning
    since torch 2.13.
    """

    def reducer_override(self, obj: Any) -> Any:
        return (_leaf_spec, ()) if isinstance(obj, TreeSpec) and obj.is_leaf() else NotImplemented


def _leaf_spec() -> TreeSpec:
    return tree_flatten(None)[1]


def _pickle_form(form: _Form) -> bytearray:
    file = io.BytesIO()
    _FormPickler(file).dump(form)
    return bytearray(file.getbuffer())


_NOTHING = _Form(tree_flatten(())[1], (), HEAD_BYTES)


class RemoteLink:
    """One end of a link between two ranks of ``comm``: ``src`` sends to ``dst``. tag: must differ from other links'
    between them.
    """

    def __init__(self, comm: Collectives, src: int, dst: int, tag: int, device: torch.device) -> None:
        self._comm, self._src, self._dst, self._tag, self._device = comm, src, dst, tag, device
        self._form = _NOTHING
        self._n_begun = 0
        """Number of values that were sent or taken here."""
        self._sent: deque[tuple[Work, _Buffer | None]] = deque()
        """Messages under way, and the buffers of those with values."""
        self._free: list[_Buffer] = []
        """Buffers of the present form that no message uses."""
        self._posted: deque[tuple[torch.Tensor, Work, str]] = deque()
        self._opened: deque[Any] = deque()

    def _message(self, data: torch.Tensor, label: str) -> Work:
        return self._comm.message(data, self._src, self._dst, tag=self._tag, label=label)

    def _empty(self, form: _Form) -> torch.Tensor:
        return torch.empty(form.n_bytes // _WORD.itemsize, dtype=_WORD, device=self._device)

    def _announce(self, form: _Form, label: str) -> None:
        """The next value has another form than the previous value."""
        header = torch.frombuffer(_pickle_form(form), dtype=torch.uint8).to(self._device)
        notice = self._empty(self._form)
        _write_head(notice, header.numel(), self._n_begun)
        # The receiver cannot distinguish a notice from a value before it arrives, so both have the same label.
        self._sent += [(self._message(notice, label), None), (self._message(header, f"{label}, form"), None)]
        self._give_back()
        self._form = form

    def _take_buffer(self) -> _Buffer:
        if self._free:
            return self._free.pop()
        form = self._form
        # The receiver copies a message out of this memory, so nothing is gained where it has some of the same kind.
        data = self._comm.outgoing.take(form.n_bytes // _WORD.itemsize, _WORD, self._device)
        _write_head(data, 0, self._n_begun)
        places = tuple(_view(data, known) for known in form.leaves if isinstance(known, _Packed))
        return _Buffer(form, data, _head_of(data)[-1], places)

    def send(self, value: Any, label: str) -> None:
        leaves, spec = tree_flatten(value)
        if not self._form.fits(leaves, spec):
            self._announce(_Form.of(leaves, spec), label)
        buffer = self._take_buffer()
        buffer.number.fill_(self._n_begun)
        self._n_begun += 1
        tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
        for place, tensor in zip(buffer.places, tensors, strict=True):
            place.copy_(tensor.detach() if tensor.requires_grad else tensor)
        self._sent.append((self._message(buffer.data, label), buffer))
        while len(self._sent) > 4:  # two values under way, and two messages about a new form
            self._end_first()

    def _end_first(self) -> None:
        work, buffer = self._sent.popleft()
        work.wait()
        if buffer is None:
            return
        if buffer.form is self._form:
            self._free.append(buffer)
        else:
            self._comm.outgoing.give(buffer.data)

    def _give_back(self) -> None:
        """Give the free buffers to the pool, from which other links take theirs."""
        while self._free:
            self._comm.outgoing.give(self._free.pop().data)

    def post(self, label: str) -> None:
        # The length of this message equals the length of the previous message, whose form has to be known first.
        while self._posted:
            self._opened.append(self._open())
        data = self._empty(self._form)
        self._posted.append((data, self._message(data, label), label))

    def take(self) -> Any:
        return self._opened.popleft() if self._opened else self._open()

    def _open(self) -> Any:
        data, work, label = self._posted.popleft()
        work.wait()
        n_header = self._check_head(data, label)
        if n_header:
            header = torch.empty(n_header, dtype=torch.uint8, device=self._device)
            self._message(header, f"{label}, form").wait()
            self._form = pickle.loads(header.cpu().numpy().tobytes())
            data = self._empty(self._form)
            self._message(data, label).wait()
            self._check_head(data, label)
        self._n_begun += 1
        leaves: list[Any] = []
        for known in self._form.leaves:
            if isinstance(known, _Packed):
                # Views count their overwrites together. Tensors of a message do not overlap, so each counts its own.
                tensor = _view(data, known).data
                leaves.append(tensor.requires_grad_() if known.requires_grad else tensor)
            else:
                leaves.append(pickle.loads(known))
        return tree_unflatten(leaves, self._form.spec)

    def _check_head(self, data: torch.Tensor, label: str) -> int:
        """Check that a message is the expected one. Returns the length of the form that follows; 0 if none follows."""
        n_header, n_bytes, number = _head_of(data).tolist()
        for what, got, expected in (("a message of bytes", n_bytes, data.nbytes), ("value", number, self._n_begun)):
            if got != expected:
                raise RankMismatchError(
                    f"{what} {got} came from rank {self._comm.global_ranks[self._src]} instead of {expected}",
                    where=f"rank {self._comm.global_ranks[self._dst]}, {label}",
                    fix="make a new engine on all ranks: after an error in the middle of a batch they are in different"
                    " places, and a checkpoint says where to begin",
                )
        return n_header

    def flush(self) -> None:
        while self._sent:
            self._end_first()
        self._give_back()

    def clear(self) -> None:
        self._sent.clear()
        self._free.clear()
        self._posted.clear()
        self._opened.clear()


def _head_of(data: torch.Tensor) -> torch.Tensor:
    """The head of a message, which is the beginning of a storage."""
    return data.as_strided((_N_HEAD_WORDS,), (1,))


def _write_head(data: torch.Tensor, n_header: int, number: int) -> None:
    """n_header: length of the form that follows; 0 if the value is in this message. number: of the value."""
    _head_of(data).copy_(torch.tensor((n_header, data.nbytes, number)))


def _view(data: torch.Tensor, known: _Packed) -> torch.Tensor:
    """The view of a tensor that lies in a message."""
    # Two calls of torch; a slice and a view of its shape would be three.
    return data.view(known.dtype).as_strided(known.shape, known.strides, known.begin)
