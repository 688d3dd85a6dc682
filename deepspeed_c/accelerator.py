"""The device that this process trains on, under the method names of DeepSpeed's accelerators.

DeepSpeed has a class of 70 methods for each kind of device. Here there is one class. It calls a *backend* that has the
function names of ``torch.cuda``: the module ``torch.cuda`` itself, or :class:`_Host` for the CPU. Importing this file
creates no context on a device.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .cgroups import memory_left
from .env import read_env
from .errors import ConfigError, StateError

__all__ = [
    "Accelerator",
    "DeepSpeedAccelerator",
    "HostEvent",
    "get_accelerator",
    "has_streams",
    "is_current_accelerator_supported",
    "set_accelerator",
]


def has_streams(device: torch.device) -> bool:
    """Whether operators on ``device`` run asynchronously, in streams. The meta device runs nothing."""
    return device.type not in ("cpu", "meta")


class HostEvent:
    """A point in time on the host's clock, with the methods of ``torch.cuda.Event``.

    On the host, all earlier work has ended when an event is recorded, so no method has to wait.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._at_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        self._at_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Returns at once, as do ``synchronize`` and ``query``."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to ``end_event``. Raises StateError unless both have been recorded."""
        if self._at_ns is None or end_event._at_ns is None:
            raise StateError(
                "an event has not been recorded", where="HostEvent.elapsed_time", fix="call record() on both first"
            )
        return (end_event._at_ns - self._at_ns) / 1e6


def _proc(path: str, key: str) -> int:
    """The value of the line ``key`` of a file in /proc, converted from kB to bytes."""
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name == key:
                    return int(rest.split()[0]) * 1024
    except OSError as error:
        raise StateError(f"memory cannot be read: {error}", where=path, fix="mount /proc (Linux)") from error
    raise StateError(f"has no line {key}", where=path, fix="use a Linux kernel that reports it")


class _Host:
    """The CPU under ``torch.cuda``'s names. A device index is ignored, as there is one CPU.

    Memory is this process's resident memory, in bytes. The kernel counts memory for each processor and sums the counts
    from time to time, so a number may lag by a few MiB. Raises StateError if /proc cannot be read.
    """

    Stream = torch.cpu.Stream
    Event = HostEvent
    stream = staticmethod(torch.cpu.stream)
    current_stream = default_stream = staticmethod(torch.cpu.current_stream)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)
    is_available = staticmethod(lambda: True)
    synchronize = set_device = staticmethod(lambda device=None: None)
    memory_allocated = memory_reserved = staticmethod(lambda device=None: _proc("/proc/self/status", "VmRSS"))
    max_memory_allocated = max_memory_reserved = staticmethod(lambda device=None: _proc("/proc/self/status", "VmHWM"))
    is_bf16_supported = staticmethod(lambda: True)
    _lazy_call = staticmethod(lambda callback: callback())

    @staticmethod
    def current_device() -> int:
        return read_env().local_rank

    @staticmethod
    def empty_cache() -> None:
        """Returns memory that the C library keeps after a free to the system, if the library supports this (glibc)."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    @staticmethod
    def device_count() -> int:
        """The number of processes of the job on this host, so that each local rank has a device with its number:
        LOCAL_SIZE, or else LOCAL_WORLD_SIZE.
        """
        env = read_env()
        return env.local_size or env.local_world_size

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """(free bytes, total bytes of the machine). The free bytes are the machine's available memory, or the remaining
        memory of the control groups if this is less."""
        free, left = _proc("/proc/meminfo", "MemAvailable"), memory_left()
        return free if left is None else min(free, left), _proc("/proc/meminfo", "MemTotal")

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": _Host.memory_allocated(),
            "allocated_bytes.all.peak": _Host.max_memory_allocated(),
        }

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        # Writing 5 sets VmHWM to VmRSS: see proc(5).
        path = "/proc/self/clear_refs"
        try:
            with open(path, "w", encoding="ascii") as file:
                file.write("5")
        except OSError as error:
            raise StateError(f"the peak cannot be reset: {error}", where=path, fix="mount /proc for writing") from error


# DeepSpeed's name -> the backend's name, for methods that call the backend. The first table is about the process, the
# second about a device (None: the current device). Memory is in bytes.
_ABOUT_PROCESS = {
    "current_device": "current_device",
    "device_count": "device_count",
    "is_available": "is_available",
    "initial_seed": "initial_seed",
    "empty_cache": "empty_cache",
    "is_bf16_supported": "is_bf16_supported",
}
_ABOUT_DEVICE = {
    "synchronize": "synchronize",
    "get_rng_state": "get_rng_state",
    "current_stream": "current_stream",
    "default_stream": "default_stream",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "max_memory_reserved": "max_memory_reserved",
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "memory_stats": "memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}

_TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


def _ask_process(name: str, target: str) -> Callable[..., Any]:
    def method(self: Accelerator) -> Any:
        return self._ask(target)()

    return _named(method, name, target)


def _ask_device(name: str, target: str) -> Callable[..., Any]:
    def method(self: Accelerator, device_index: Any = None) -> Any:
        # Without an index, call the function without an argument: some functions of torch.cuda have the default "cuda"
        # and do not accept None.
        return self._ask(target)() if device_index is None else self._ask(target)(device_index)

    return _named(method, name, target)


def _named(method: Callable[..., Any], name: str, target: str) -> Callable[..., Any]:
    method.__name__, method.__qualname__ = name, f"Accelerator.{name}"
    method.__doc__ = f"``torch.cuda.{target}``, or the same of this device."
    return method


class Accelerator:
    """One kind of device. ``device_index`` is a number on this host, None for the current device.

    Raises StateError if this kind of device lacks a feature (graphs on the CPU).
    """

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self._backend: Any = _Host if device_type == "cpu" else torch.get_device_module(device_type)
        self._compile_backend = "inductor"

    def __repr__(self) -> str:
        return f"Accelerator({self._type!r})"

    def _ask(self, name: str) -> Any:
        found = getattr(self._backend, name, None)
        if found is None:
            raise StateError(
                f"{self._type} devices have no {name.strip('_')}", where="get_accelerator()", fix="use a CUDA device"
            )
        return found

    @property
    def _is_host(self) -> bool:
        return self._type == "cpu"

    def device_name(self, device_index: int | str | None = None) -> str:
        """ "cuda:1", or "cuda" without an index; always "cpu" on the host."""
        return self._type if device_index is None or self._is_host else f"{self._type}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context manager that makes the device current."""
        return torch.device(self._type) if self._is_host else self._ask("device")(device_index)

    def set_device(self, device_index: Any) -> None:
        self._ask("set_device")(device_index)

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._type

    def communication_backend_name(self) -> str:
        """The ``torch.distributed`` backend for tensors of this device: "nccl", "gloo"."""
        return torch.distributed.get_default_backend_for_device(self._type)

    def is_synchronized_device(self) -> bool:
        """Whether the work of a call has ended when the call returns: True on the CPU."""
        return self._is_host

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_fp16_supported(self) -> bool:
        """True for the CPU, and for CUDA devices from compute capability 5.3 on."""
        return self._is_host or self._type != "cuda" or torch.cuda.get_device_capability() >= (5, 3)

    def is_fp64_supported(self) -> bool:
        """False for Apple's GPUs, which have no float64."""
        return self._type != "mps"

    def supported_dtypes(self) -> list[torch.dtype]:
        half = [torch.half] if self.is_fp16_supported() else []
        return [torch.float, *half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_triton_supported(self) -> bool:
        return self._type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)

    def prefer_triton_grouped_mm(self) -> bool:
        """False: no kernel of this package is in Triton."""
        return False

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return self._ask("manual_seed")(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return self._ask("manual_seed_all")(seed)

    def set_rng_state(self, new_state: torch.Tensor, device_index: Any = None) -> None:
        self._ask("set_rng_state")(new_state, *(() if device_index is None else (device_index,)))

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context whose work goes to ``stream``."""
        return self._ask("stream")(stream)

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls ``callback`` as soon as the device is initialised."""
        return self._ask("_lazy_call")(callback)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator if self._is_host else self._ask("default_generators")[device_index]

    @property
    def Stream(self) -> type:
        return self._ask("Stream")

    @property
    def Event(self) -> type:
        return self._ask("Event")

    def total_memory(self, device_index: int | None = None) -> int:
        return self._ask("mem_get_info")(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes on the device; on the CPU, free bytes of the machine or of its container."""
        return self._ask("mem_get_info")(device_index)[0]

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A copy of the host tensor in page-locked memory; on the CPU, the tensor itself."""
        return tensor if self._is_host else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return not self._is_host and tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Does nothing: page-locked memory returns to its pool when the last tensor over it is destroyed."""

    def create_graph(self) -> Any:
        return self._ask("CUDAGraph")()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return self._ask("graph")(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        self._ask("CUDAGraph")
        graph.replay()

    # Ranges have no domains.
    supports_nvtx_domain = False

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Opens a named range for a profiler: NVTX on CUDA, nothing on the CPU."""
        if self._type == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        if self._type == "cuda":
            torch.cuda.nvtx.range_pop()

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Raises ConfigError unless ``torch.compile`` knows the backend."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(
                f"{backend!r} is no backend of torch.compile",
                where="compile backend",
                fix=f"use one of {', '.join(known)}",
            )
        self._compile_backend = backend

    def export_envs(self) -> list[str]:
        """Prefixes of environment variables that a launcher has to pass to other hosts."""
        return ["NCCL"] if self._type == "cuda" else []

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"] if self._type == "cuda" else []

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def op_builder_dir(self) -> str:
        """The module that holds the builders."""
        return "deepspeed_c.ops.op_builder"

    def get_op_builder(self, class_name: str) -> type | None:
        """DeepSpeed's builder class ``class_name``, such as "FusedAdamBuilder"; None if DeepSpeed has no such class."""
        builders = importlib.import_module(self.op_builder_dir())  # loads the compiled module, so import it only here
        return getattr(builders, class_name, None) if class_name in builders.__all__ else None

    def create_op_builder(self, class_name: str) -> Any:
        """An instance of ``get_op_builder(class_name)``, or None."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def build_extension(self) -> Any:
        """torch's command ``build_ext``, for setup scripts of programs. This package builds nothing at run time."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension


for _name, _target in _ABOUT_PROCESS.items():
    setattr(Accelerator, _name, _ask_process(_name, _target))
for _name, _target in _ABOUT_DEVICE.items():
    setattr(Accelerator, _name, _ask_device(_name, _target))
for _name, _dtype in _TENSOR_TYPES.items():
    setattr(
        Accelerator,
        _name,
        property(lambda self, dtype=_dtype: functools.partial(torch.tensor, dtype=dtype, device=self._type)),
    )


DeepSpeedAccelerator = Accelerator

_chosen: list[Accelerator] = []  # at most one: chosen by get_accelerator, or set by set_accelerator


def get_accelerator() -> Accelerator:
    """The accelerator of this process, always the same object: the machine's accelerator, or else the CPU.

    DS_ACCELERATOR names another kind of device, such as "cpu" on a machine with GPUs. Raises ConfigError if the machine
    has no such device.
    """
    if not _chosen:
        asked = read_env().accelerator
        found = torch.accelerator.current_accelerator(check_available=True)
        here = "cpu" if found is None else found.type
        if asked not in (None, "cpu", here):
            raise ConfigError(
                f"is {asked!r}, and the accelerator of this machine is {here!r}",
                where="DS_ACCELERATOR",
                fix="unset it, or use one of " + ", ".join(sorted({"cpu", here})),
            )
        _chosen.append(Accelerator(asked or here))
    return _chosen[0]


def set_accelerator(accel_obj: Accelerator) -> None:
    """Sets the object that ``get_accelerator`` returns. Raises ConfigError if ``accel_obj`` is no ``Accelerator``."""
    if not isinstance(accel_obj, Accelerator):
        raise ConfigError(
            f"{type(accel_obj).__name__} is no Accelerator",
            where="set_accelerator",
            fix="pass an instance of deepspeed_c.accelerator.Accelerator, or of a class derived from it",
        )
    _chosen[:] = [accel_obj]


def is_current_accelerator_supported() -> bool:
    """Whether this package supports the accelerator in use: True for CPU and CUDA."""
    return get_accelerator().device_name() in ("cpu", "cuda")
