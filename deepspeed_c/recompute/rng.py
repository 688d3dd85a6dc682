"""Random numbers that differ or agree between ranks, as each part of a model requires.

Tensor-parallel ranks: named states of one generator, on an accelerator and on the CPU.
Data-parallel ranks with ``same_bits``: all generators follow the number of the grain, whichever rank computes it.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.errors import StateError

__all__ = [
    "SEQUENCE_RNG",
    "CudaRNGStatesTracker",
    "RandomStates",
    "device_state",
    "get_cuda_rng_tracker",
    "reseed_tensor_parallel",
    "restore_device_state",
    "seed_all",
    "stream_of_grain",
    "stream_of_rank",
]

MODEL_PARALLEL_RNG = "model-parallel-rng"
SEQUENCE_RNG = "sequence-parallel-rng"
# Megatron's distance between the seeds of tensor-parallel ranks and the seed that all of them share.
_TENSOR_PARALLEL_OFFSET = 2718
# Our distance for ranks that hold parts of one sequence: a prime, larger than seeds that people choose by counting.
_SEQUENCE_OFFSET = 1_000_003


def _device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def device_state(device: torch.device | None = None) -> torch.Tensor:
    """The state of the generator for operators on ``device``, by default on this rank's device."""
    device = _device() if device is None else device
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def restore_device_state(state: torch.Tensor, device: torch.device | None = None) -> None:
    device = _device() if device is None else device
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _state_of_seed(seed: int) -> torch.Tensor:
    return torch.Generator(_device()).manual_seed(seed).get_state()


class CudaRNGStatesTracker:
    """Named states of this rank's generator, on the computing device. Within ``fork`` numbers are drawn from a named
    state.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def reset(self) -> None:
        """Forgets all names and seeds."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the named states. Later draws do not change the copy."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replaces all named states by a result of ``get_states``."""
        self._states = {name: state.clone() for name, state in states.items()}

    def put_back(self, states: Mapping[str, torch.Tensor]) -> None:
        """Sets the states of the names in ``states``. Names that have been added since stay as they are."""
        self._states.update((name, state.clone()) for name, state in states.items())

    def add(self, name: str, seed: int) -> None:
        """Adds a state. Raises StateError if the name or the seed is there already: two equal seeds would give equal
        numbers.
        """
        if seed in self._seeds or name in self._states:
            what = f"seed {seed}" if seed in self._seeds else f"the name {name!r}"
            raise StateError(
                f"{what} has been added before", where="get_cuda_rng_tracker().add", fix="choose another, or reset()"
            )
        self._seeds.add(seed)
        self._states[name] = _state_of_seed(seed)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draws from the state ``name`` within this context, and from the previous state afterwards."""
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise StateError(
                f"there is no state {name!r}; there are: {known}",
                where="get_cuda_rng_tracker().fork",
                fix="call model_parallel_cuda_manual_seed(seed) or add(name, seed) first",
            )
        around = device_state()
        restore_device_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = device_state()
            restore_device_state(around)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process. Its states are replayed where a layer is recomputed, and are in checkpoints."""
    return _tracker


class RandomStates:
    """The states of all random generators that a layer may draw from, at the time of construction.

    device: the accelerator; None: there is the CPU alone.
    with_python: includes Python's ``random``.
    """

    __slots__ = ("_cpu", "_device", "_python", "_tracker")

    def __init__(self, device: torch.device | None, *, with_python: bool) -> None:
        self._cpu = torch.get_rng_state()
        self._device = None if device is None else (device, device_state(device))
        self._tracker = _tracker.get_states()
        self._python = random.getstate() if with_python else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._device is not None:
            restore_device_state(self._device[1], self._device[0])
        _tracker.put_back(self._tracker)
        if self._python is not None:
            random.setstate(self._python)


@contextmanager
def stream_of_grain(seed: int, step: int, position: int, call: int = 0) -> Iterator[None]:
    """Within this context random numbers are a function of the arguments, on whatever rank. Afterwards all generators
    go on from their states before it.

    These are torch's generators of the CPU and of this rank's accelerator, the named states of the process's tracker,
    and the global generators of Python's ``random`` and of numpy. A layer that is recomputed after the context has
    ended draws the same numbers as within it, as far as recomputation restores them.

    step, position: number of the step, and of the grain in the step's global batch. call: number of the forward, if a
    grain has several.
    """

    def drawn(name: str) -> int:
        words = repr((seed, step, position, call, name)).encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1

    device, numpy = _device(), sys.modules.get("numpy")
    before = RandomStates(None if device.type == "cpu" else device, with_python=True)
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        torch.default_generator.manual_seed(drawn("cpu"))
        if device.type != "cpu":
            restore_device_state(_state_of_seed(drawn("device")), device)
        _tracker.put_back({name: _state_of_seed(drawn(f"tracker:{name}")) for name in _tracker.get_states()})
        random.seed(drawn("python"))
        if numpy is not None:
            numpy.random.seed(drawn("numpy") & 0xFFFF_FFFF)
        yield
    finally:
        before.restore()
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def stream_of_rank(name: str, rank: int) -> AbstractContextManager[None]:
    """Within this context numbers are drawn from the state ``name`` of the process's tracker. A new state begins with a
    seed made of torch's initial seed and ``rank``.
    """
    if name not in _tracker:
        _tracker.add(name, torch.initial_seed() % 2**62 + _SEQUENCE_OFFSET * (rank + 1))
    return _tracker.fork(name)


def _rank_of(mpu: Any) -> int:
    for name in ("get_tensor_model_parallel_rank", "get_model_parallel_rank"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return 0


def seed_all(seed: int, mpu: Any) -> None:
    """``model_parallel_cuda_manual_seed`` for the tensor-parallel ranks of ``mpu``. ``mpu`` None: this rank alone."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(MODEL_PARALLEL_RNG, seed + _TENSOR_PARALLEL_OFFSET + _rank_of(mpu))


def reseed_tensor_parallel(seed: int, mpu: Any) -> None:
    """``model_parallel_reconfigure_tp_seed`` for the tensor-parallel ranks of ``mpu``."""
    with _tracker.fork():
        get_accelerator().manual_seed(seed + _TENSOR_PARALLEL_OFFSET + _rank_of(mpu))
