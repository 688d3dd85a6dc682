"""The settings of a process for recomputed layers outside any engine, and the functions that call such layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.config.offload import Aio
from deepspeed_c.config.parallel import LocalTransport
from deepspeed_c.recompute.active import current
from deepspeed_c.recompute.recomputer import Recomputer, check_section, tensor_parallel_ranks

__all__ = ["Configured", "checkpoint", "configured", "non_reentrant_checkpoint"]


class Configured:
    """The settings that ``checkpointing.configure`` has made in this process, and the recomputer for them."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Restores the state before the first ``configure``."""
        self.is_done = False
        self.n_layers: int | None = None
        self.mpu: Any = None
        self.comm: Collectives | None = None
        self.aio = Aio()
        self.recomputer = Recomputer(ActivationCheckpointing())

    def set_up(self, section: ActivationCheckpointing, mpu: Any, aio: Aio, local: LocalTransport) -> None:
        check_section(section, self.n_layers, "checkpointing.configure")
        comm = tensor_parallel_ranks(mpu, local)
        recomputer = Recomputer(section, comm, aio)
        self.recomputer.close()
        self.comm, self.mpu, self.is_done, self.aio, self.recomputer = comm, mpu, True, aio, recomputer

    def cut(self, is_cut: bool) -> None:
        section = msgspec.structs.replace(self.recomputer.section, partition_activations=bool(is_cut))
        check_section(section, self.n_layers, "checkpointing.partition_activations_in_checkpoint")
        recomputer = Recomputer(section, self.comm, self.aio)
        self.recomputer.close()
        self.recomputer = recomputer

    def count_layers(self, n_layers: int) -> None:
        self.n_layers = n_layers


configured = Configured()


def _recomputer() -> Recomputer:
    return current() or configured.recomputer


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` so that its activations are computed again in the backward.

    Arguments may be any nest of tensors and other objects; the result of ``function`` is returned unchanged. The
    caller's tensors are never changed. In the backward ``function`` has to do the same again. It then draws the same
    random numbers from torch and from ``get_cuda_rng_tracker()``.

    Raises RecomputeError, in the backward, where ``function`` did something else, or where an input was overwritten.
    """
    return _recomputer().run(function, args, kwargs)


def non_reentrant_checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """``checkpoint`` in the form that works with ``autograd.grad``, whatever the section says."""
    return _recomputer().run(function, args, kwargs, is_reentrant=False)
