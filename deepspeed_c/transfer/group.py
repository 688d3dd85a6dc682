"""Weights by broadcasts over a process group of torch, whose other ranks receive them (``receive_weights``).

All ranks of the group take the same steps: versions of the receivers, the list of names, which receivers may refuse,
one broadcast a tensor, checksums, and what became of it on each receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c.errors import CommError
from deepspeed_c.transfer.folder import checksum
from deepspeed_c.transfer.target import WeightEntry, WeightsTarget, unknown_names

__all__ = ["GroupTarget", "receive_weights"]


def _everyone(value: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _problem_of(found: Sequence[Any]) -> str:
    said = [f"rank {rank} of the group: {text}" for rank, text in enumerate(found) if text]
    return "; ".join(said)


class GroupTarget(WeightsTarget):
    """Sends to the other ranks of ``group``."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._device = torch.device("cpu") if dist.get_backend(group) == "gloo" else None

    def versions(self) -> list[int | None]:
        own = dist.get_rank(self._group)
        return [said for rank, said in enumerate(_everyone(None, self._group)) if rank != own]

    def put(self, version: int, entries: Sequence[WeightEntry], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        header = [(entry.name, tuple(entry.shape), entry.dtype, entry.tied_to) for entry in entries]
        src = dist.get_global_rank(self._group, dist.get_rank(self._group))
        dist.broadcast_object_list([(version, header)], src=src, group=self._group)
        problem = _problem_of(_everyone("", self._group))
        if problem:
            raise CommError(
                f"the weights were refused: {problem}",
                where="send_weights",
                fix="send them to engines of the same model",
            )
        ties = {entry.name for entry in entries if entry.tied_to is not None}
        sums: dict[str, int] = {}
        for name, tensor in weights:
            if name not in ties:
                sent = tensor.contiguous() if self._device is None else tensor.to(self._device).contiguous()
                dist.broadcast(sent, src=src, group=self._group)
                sums[name] = checksum(sent)
        dist.broadcast_object_list([sums], src=src, group=self._group)
        problem = _problem_of(_everyone("", self._group))
        if problem:
            raise CommError(
                f"not all receivers have version {version}: {problem}",
                where="send_weights",
                fix="look at that rank's exception, and send again: the next call sends all weights to it",
            )


def receive_weights(
    group: Any,
    load: Callable[[str, torch.Tensor], Any],
    *,
    src: int = 0,
    version: int | None = None,
    known: Collection[str] | None = None,
    device: torch.device | str = "cpu",
) -> int:
    """Receives what ``engine.send_weights(group)`` sends, and calls ``load(name, tensor)`` for each tensor. Returns the
    number of the version. Collective over ``group``.

    A tensor is valid during the call. src: the sender's rank in the group. version: the version that this receiver has;
    the sender sends only what has changed since then if all receivers have the same one. known: the names that ``load``
    takes; weights with other names are refused before the first of them is loaded.

    Raises CommError, here and at the sender, for unknown names (with the nearest known one) and wrong checksums. An
    exception of ``load`` is raised when all tensors have come, and the sender raises CommError with its text.
    """
    root = dist.get_global_rank(group, src)
    _everyone(version, group)
    header: list[Any] = [None]
    dist.broadcast_object_list(header, src=root, group=group)
    number, entries = header[0]
    refused = "" if known is None else unknown_names([name for name, *_ in entries], known)
    problem = _problem_of(_everyone(refused, group))
    if problem:
        raise CommError(
            f"the weights were refused: {problem}", where="receive_weights", fix="receive those of the same model"
        )
    failure: Exception | None = None
    sums: dict[str, int] = {}
    tensor = torch.empty(0)
    for name, shape, dtype, tied_to in entries:
        if tied_to is None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, src=root, group=group)
            sums[name] = checksum(tensor)
        if failure is None:
            try:
                load(name, tensor)
            except Exception as error:  # noqa: BLE001  the sender has to learn of any failure
                failure = error
    sent: list[Any] = [None]
    dist.broadcast_object_list(sent, src=root, group=group)
    wrong = [name for name in sums if sums[name] != sent[0][name]]
    text = "" if failure is None else f"load raised {type(failure).__name__}: {failure}"
    if wrong:
        text = f"{wrong[0]} came with checksum {sums[wrong[0]]:#010x}, and {sent[0][wrong[0]]:#010x} was sent"
    _everyone(text, group)
    if wrong:
        raise CommError(
            text, where="receive_weights", fix="receive the weights again; if it recurs, look at the network"
        )
    if failure is not None:
        raise failure
    return number
