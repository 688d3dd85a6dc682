"""``generate`` of a cut model: the ranks of a group get the same prompts and draw the same tokens.

Logits have the same bits on all ranks. So with the same random numbers all ranks draw the same tokens, in any loop
(transformers' own, beam search, a drafting model).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import RankMismatchError
from deepspeed_c.inject.alike import describe_call, digest_of, first_difference
from deepspeed_c.inject.decoding import CandidateDecoding

__all__ = ["generate_alike", "random_state"]


def generate_alike(model: torch.nn.Module, comm: Collectives) -> None:
    """Make every ``generate`` in ``model`` (also inside wrapped models) draw from rank 0's random state.

    comm: the tensor-parallel ranks of the model."""
    together = _AlikeGeneration(comm)
    for module in model.modules():
        # A wrapper that only passes the attribute through does not own a ``generate``.
        if callable(getattr(type(module), "generate", None)):
            module.__dict__["generate"] = together.wrap(module.generate, CandidateDecoding(module, comm))


class _AlikeGeneration:
    """Wraps the calls of ``generate`` of one model."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._is_generating = False

    def wrap(self, generate: Any, decoding: CandidateDecoding) -> Any:
        def decode(args: Any, kwargs: Any) -> Any:
            with decoding.watch(args, kwargs):
                return generate(*args, **kwargs)

        @wraps(generate)
        def alike(*args: Any, **kwargs: Any) -> Any:
            if self._is_generating:  # a wrapper's generate calls the generate of its model
                return decode(args, kwargs)
            self._compare(args, kwargs)
            draws = _SharedDraws(self._comm, _devices_in(generate, args, kwargs))
            self._is_generating = True
            try:
                return decode(args, kwargs)
            finally:
                self._is_generating = False
                draws.end()

        return alike

    def _compare(self, args: Any, kwargs: Any) -> None:
        """Raises RankMismatchError, on all ranks and before the first token, if the arguments differ between ranks."""
        lines = describe_call(args, kwargs)
        digests = self._comm.gather_objects(digest_of(lines), label="prompts")
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return
        ours, theirs = first_difference(self._comm, lines, 0, other)
        ranks = [self._comm.global_ranks[rank] for rank in (0, other)]
        raise RankMismatchError(
            f"ranks {ranks[0]} and {ranks[1]} hold one model together and were given different prompts:"
            f" {ours} and {theirs}",
            where="generate",
            fix="give all ranks of a tensor-parallel group the same prompts and arguments",
        )


class _SharedDraws:
    """Sets all ranks to the random states of rank 0, until ``end``."""

    def __init__(self, comm: Collectives, devices: list[torch.device]) -> None:
        self._devices = devices
        self._own = [random_state(device) for device in devices]
        everyone = comm.gather_objects([state.numpy().tobytes() for state in self._own], label="random states")
        self._differ = any(states != everyone[0] for states in everyone)
        self._is_first = comm.rank == 0
        if self._differ and not self._is_first:
            for device, state in zip(devices, everyone[0], strict=True):
                _set_state(device, torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def end(self) -> None:
        """Restores the own states of ranks whose states differed from rank 0's. Where all ranks had the same state,
        nothing is restored: all have drawn the same numbers, and restoring would make them differ from rank 0.
        """
        if self._differ and not self._is_first:
            for device, state in zip(self._devices, self._own, strict=True):
                _set_state(device, state)


def _devices_in(generate: Any, args: Any, kwargs: Any) -> list[torch.device]:
    """The host and the accelerators of the model and of the arguments, in the same order on all ranks."""
    found = {torch.device("cpu")}
    found |= {x.device for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    model = getattr(generate, "__self__", None)
    if isinstance(model, torch.nn.Module):
        found |= {param.device for param in model.parameters()}
    return sorted((device for device in found if device.type != "meta"), key=lambda d: (d.type != "cpu", str(d)))


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of ``device``, as bytes on the host."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
