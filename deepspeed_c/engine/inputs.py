"""The arguments of forward: their number of tokens, and the check that tensor-parallel ranks compute with the same
data, before the first pass and at intervals afterwards."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.comm.axes import AXES, TP
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import RankMismatchError
from deepspeed_c.inject.alike import describe_call, digest_of, first_difference
from deepspeed_c.inject.generation import random_state
from deepspeed_c.zero.gradients.drift import DriftFound

__all__ = ["InputCheck", "count_tokens"]

# Number of windows from one check to the next.
EVERY = 100
# Ranks with the same place along these axes hold the same layers together.
_OTHERS = tuple(axis for axis in AXES if axis != TP)


class InputCheck:
    """Compares the arguments of forward between the ranks that hold one model together."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._devices = [torch.device("cpu"), *([device] if device.type != "cpu" else [])]
        self._last: int | None = None
        self._window: int | None = None
        self._hashes: list[tuple[str, torch.Tensor]] = []
        self._states: list[bytes] = []

    def look(self, step: int, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Checks the arguments before the first training forward of a window, in every ``EVERY``th window. ``step``:
        the number of the step that ends the window. A check is collective over all ranks.

        Raises RankMismatchError on all ranks alike if arguments differ. The error names the ranks and the argument."""
        if self._mesh.size(TP) == 1:
            return
        self._note(step, inputs, kwargs)
        if self._last is not None and (step == self._last or step % EVERY):
            return
        self._last = step
        lines = describe_call(inputs, kwargs)
        digest = digest_of(lines)
        comm, mine = self._mesh.comm, self._mesh.index(*_OTHERS)
        everyone = comm.gather_objects((mine, digest), label="inputs of tensor-parallel ranks")
        firsts: dict[int, int] = {}
        pairs = ((firsts.setdefault(group, rank), rank) for rank, (group, _) in enumerate(everyone))
        other = next(((a, b) for a, b in pairs if everyone[a][1] != everyone[b][1]), None)
        if other is None:
            return
        ours, theirs = first_difference(comm, lines, *other)
        ranks = [comm.global_ranks[rank] for rank in other]
        raise RankMismatchError(
            f"ranks {ranks[0]} and {ranks[1]} hold one model together and were given different data:"
            f" {ours} and {theirs}",
            where="engine.forward",
            fix="give all ranks of a tensor-parallel group the same batch: sample by the data-parallel rank"
            " (engine.deepspeed_io, deepspeed.utils.groups.get_data_parallel_rank()), not by the rank of the job",
        )

    def _note(self, step: int, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keeps hashes of a window's tensors on the tensors' devices. A step that finds no drift does not wait for
        them."""
        if step != self._window:
            self._window, self._hashes, self._states = step, [], self._random_states()
        for path, value in torch.utils._pytree.tree_flatten_with_path((tuple(inputs), dict(kwargs)))[0]:
            if isinstance(value, torch.Tensor):
                self._hashes.append((torch.utils._pytree.keystr(path), _hash_of(value.detach())))

    def hash_of_window(self) -> int:
        """A hash of all tensors in the arguments of the window's training forwards."""
        return zlib.crc32(repr([(path, value.tolist()) for path, value in self._hashes]).encode())

    def _random_states(self) -> list[bytes]:
        return [random_state(device).numpy().tobytes() for device in self._devices]

    def cause_of(self, drift: DriftFound) -> RankMismatchError:
        """The error that names the cause of different values on twins: different data, different random numbers, an
        edit, or a parameter for which each rank has only a part of the gradient. Collective over all ranks."""
        comm, group = self._mesh.comm, self._mesh.index(*_OTHERS)
        hashes = [(path, tuple(value.tolist())) for path, value in self._hashes]
        everyone = comm.gather_objects((group, hashes, self._states, self._random_states()), label="causes of drift")
        found, why = f"{drift.found or 'parameters differ'}, which hold it whole", ""
        if drift.what == "data":
            found = "what this window's gradients were computed from differs on ranks that hold one model together"
        fix = "load a checkpoint to go on; "
        for rank, (mine, batch, begun, ended) in enumerate(everyone):
            other = next(i for i, theirs in enumerate(everyone) if theirs[0] == mine)
            _, first_batch, first_begun, first_ended = everyone[other]
            ranks = f"ranks {comm.global_ranks[other]} and {comm.global_ranks[rank]}"
            if batch != first_batch:
                at = next((i for i, (a, b) in enumerate(zip(batch, first_batch)) if a != b), None)
                what = f"tensor {batch[at][0]} of forward" if at is not None else "the number of tensors"
                why = f"{ranks} were given different data in this window ({what})"
                fix += "give all ranks of a tensor-parallel group the same batch: sample by the data-parallel rank"
                break
            drew = begun != ended or first_begun != first_ended
            if not why and ((begun != first_begun and drew) or (begun == first_begun and ended != first_ended)):
                why = f"{ranks} were given the same data and drew different random numbers"
        if why and not fix.endswith("rank"):
            fix += "seed all ranks of a tensor-parallel group alike"
        if not why and drift.what == "weights":
            why = "data and random numbers are the same, so the weights were edited or loaded apart"
            fix += "make the same edits on all ranks of a tensor-parallel group"
        elif not why:
            why = "data and random numbers are the same, so each rank has a part of its gradient"
            fix += "set param.tp_sum_gradients = True before initialize, or sum the gradient in the model"
        return RankMismatchError(f"{found}: {why}", where="engine.step", fix=fix)


def count_tokens(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The number of tokens in the arguments of a forward; 0 if the arguments are not tokens.

    Tokens are the elements of ``input_ids``, or the rows of ``inputs_embeds`` [..., tokens, width]. Both may be keyword
    arguments or entries of a mapping that is the first argument. Otherwise tokens are the elements of the first
    argument, if it is a tensor [samples, tokens] of integers."""
    first = inputs[0] if inputs else None
    for given in (kwargs, first if isinstance(first, Mapping) else {}):
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        if torch.is_tensor(ids):
            return ids.numel()
        if torch.is_tensor(embeds) and embeds.dim() > 1:
            return embeds.numel() // max(1, embeds.shape[-1])
    if torch.is_tensor(first) and first.dim() == 2 and first.dtype in (torch.int64, torch.int32):
        return first.numel()
    return 0


def _hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of the tensor's bytes over 1024 runs, weighted by position. They are computed on the tensor's device without
    waiting for it."""
    if tensor.numel() == 0:
        return torch.zeros(1, dtype=torch.int64)
    data = tensor.contiguous().view(-1).view(torch.uint8)
    n_runs = min(data.numel(), 1024)
    runs = [run.sum(dtype=torch.int64).view(1) for run in (data[n_runs * (data.numel() // n_runs) :],)]
    sums = data[: n_runs * (data.numel() // n_runs)].view(n_runs, -1).sum(1, dtype=torch.int64)
    places = torch.arange(1, n_runs + 1, device=data.device)
    return torch.cat([(sums * places).sum().view(1), sums.sum().view(1), *runs])
