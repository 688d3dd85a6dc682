"""The accelerator has every name of DeepSpeed's. Values for the CPU are compared with the system's, values for CUDA
with torch.cuda's."""

import gc
import importlib
import inspect
import mmap
import os
import time

import pytest
import torch

from deepspeed_c import accelerator
from deepspeed_c.accelerator import (
    Accelerator,
    DeepSpeedAccelerator,
    HostEvent,
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)
from deepspeed_c.errors import BuildError, ConfigError, StateError
from tests import fresh

NAMES = [
    "is_synchronized_device",
    "use_host_timers",
    "resolves_data_dependency",
    "handles_memory_backpressure",
    "device_name",
    "device",
    "set_device",
    "current_device",
    "current_device_name",
    "device_count",
    "synchronize",
    "random",
    "set_rng_state",
    "get_rng_state",
    "manual_seed",
    "manual_seed_all",
    "initial_seed",
    "default_generator",
    "Stream",
    "stream",
    "current_stream",
    "default_stream",
    "Event",
    "empty_cache",
    "memory_allocated",
    "max_memory_allocated",
    "reset_max_memory_allocated",
    "memory_cached",
    "max_memory_cached",
    "reset_max_memory_cached",
    "memory_stats",
    "reset_peak_memory_stats",
    "memory_reserved",
    "max_memory_reserved",
    "total_memory",
    "available_memory",
    "is_bf16_supported",
    "is_fp16_supported",
    "supported_dtypes",
    "is_available",
    "range_push",
    "range_pop",
    "lazy_call",
    "communication_backend_name",
    "is_triton_supported",
    "prefer_triton_grouped_mm",
    "create_graph",
    "capture_to_graph",
    "replay_graph",
    "BFloat16Tensor",
    "ByteTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "pin_memory",
    "is_pinned",
    "unpin_memory",
    "on_accelerator",
    "op_builder_dir",
    "create_op_builder",
    "get_op_builder",
    "build_extension",
    "export_envs",
    "visible_devices_envs",
    "set_visible_devices_envs",
    "get_compile_backend",
    "set_compile_backend",
]
MIB = 1 << 20

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def cpu():
    return Accelerator("cpu")


def resident_bytes():
    """The resident memory, from another file than the accelerator reads."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_deepspeed_is_there(name):
    assert hasattr(Accelerator, name)


def test_one_object():
    assert get_accelerator() is get_accelerator()
    wanted = torch.accelerator.current_accelerator(check_available=True)
    assert get_accelerator().device_name() == ("cpu" if wanted is None else wanted.type)


def test_another_one_is_asked_for(monkeypatch):
    monkeypatch.setattr(accelerator, "_chosen", [])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert get_accelerator().device_name() == "cpu" and is_current_accelerator_supported()
    monkeypatch.setattr(accelerator, "_chosen", [])
    monkeypatch.setenv("DS_ACCELERATOR", "hpu")
    with pytest.raises(ConfigError, match="DS_ACCELERATOR: is 'hpu'.*\n.*cpu"):
        get_accelerator()


def test_another_one_is_set(monkeypatch, cpu):
    monkeypatch.setattr(accelerator, "_chosen", [])

    class Other(DeepSpeedAccelerator):
        def device_name(self, device_index=None):
            return "other"

    other = Other("cpu")
    set_accelerator(other)
    assert get_accelerator() is other and not is_current_accelerator_supported()
    with pytest.raises(ConfigError, match="str is no Accelerator"):
        set_accelerator("cpu")
    assert get_accelerator() is other


def test_cpu_names(cpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert (cpu.device_name(), cpu.device_name(1), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert (cpu.current_device(), cpu.device_count()) == (2, 3)
    # DeepSpeed's variable has precedence. 0 counts as unset, as in DeepSpeed.
    for local_size, count in (("5", 5), ("0", 3), ("", 3)):
        monkeypatch.setenv("LOCAL_SIZE", local_size)
        assert cpu.device_count() == count, (local_size, count)
    monkeypatch.delenv("LOCAL_SIZE")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert cpu.device_count() == 1
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.is_available() and cpu.is_synchronized_device() and cpu.use_host_timers()
    assert cpu.on_accelerator(torch.ones(1)) and not cpu.on_accelerator(torch.ones(1, device="meta"))
    assert cpu.set_device(1) is None and cpu.synchronize() is None and cpu.synchronize(device_index=0) is None
    with cpu.device(0):
        assert torch.ones(1).device.type == "cpu"


def new_pages(n_bytes: int) -> torch.Tensor:
    """Memory that the process has just got, and returns at once when the tensor is gone. An allocator may reuse what
    earlier tests have freed."""
    return torch.frombuffer(mmap.mmap(-1, n_bytes), dtype=torch.uint8).fill_(1)


def test_cpu_memory_is_what_the_kernel_counts(cpu):
    gc.collect()
    before = cpu.memory_allocated()
    assert abs(before - resident_bytes()) < 8 * MIB, (before, resident_bytes())
    block = new_pages(64 * MIB)
    after = cpu.memory_allocated()
    assert abs(after - before - 64 * MIB) < 16 * MIB, (before, after)
    # The kernel counts pages for each processor and adds the counts now and then, so both numbers may lag a little.
    assert cpu.max_memory_allocated() >= after - 4 * MIB
    assert cpu.memory_reserved() == pytest.approx(after, abs=8 * MIB)
    assert cpu.memory_stats()["allocated_bytes.all.peak"] >= after - 4 * MIB
    del block
    gc.collect()
    assert cpu.memory_allocated() < after - 32 * MIB
    assert cpu.max_memory_allocated() >= after - 4 * MIB


def test_cpu_peak_can_be_reset(cpu):
    block = new_pages(64 * MIB)
    high = cpu.max_memory_allocated()
    del block
    gc.collect()
    cpu.reset_peak_memory_stats()
    low = cpu.max_memory_allocated()
    assert low < high - 32 * MIB, (low, high)
    assert low == pytest.approx(resident_bytes(), abs=16 * MIB)


def test_cpu_total_memory(cpu):
    assert cpu.total_memory() == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"), rel=0.01)
    assert 0 < cpu.available_memory() <= cpu.total_memory()


def test_unreadable_proc_is_typed(cpu, monkeypatch):
    import builtins

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(StateError, match="/proc/self/status"):
        cpu.memory_allocated()
    with pytest.raises(StateError, match="clear_refs"):
        cpu.reset_peak_memory_stats()


def test_cpu_random_numbers(cpu):
    cpu.manual_seed(5)
    assert cpu.initial_seed() == 5 == cpu.default_generator(0).initial_seed()
    state = cpu.get_rng_state()
    first = torch.rand(4)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    cpu.manual_seed_all(5)
    assert torch.equal(torch.rand(4), first)
    assert cpu.random() is torch.random


def test_cpu_streams_work_as_code_for_devices_uses_them(cpu):
    stream = cpu.Stream()
    stream.wait_stream(cpu.current_stream())
    with cpu.stream(stream):
        value = torch.ones(3).sum()
    cpu.default_stream().wait_stream(stream)
    assert value == 3


def test_host_events_measure_milliseconds(cpu):
    start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    begin = time.perf_counter()
    start.record()
    time.sleep(0.02)
    end.record(cpu.current_stream())
    outer = (time.perf_counter() - begin) * 1e3
    end.synchronize()
    end.wait()
    assert end.query()
    assert 20 <= start.elapsed_time(end) <= outer
    with pytest.raises(StateError, match="recorded"):
        start.elapsed_time(HostEvent())


def test_cpu_dtypes(cpu):
    assert cpu.is_bf16_supported() and cpu.is_fp16_supported()
    assert cpu.supported_dtypes() == [torch.float, torch.half, torch.bfloat16]
    assert not cpu.is_triton_supported() and not cpu.prefer_triton_grouped_mm()
    for dtype in cpu.supported_dtypes():
        assert torch.isfinite(torch.ones(4, 4, dtype=dtype) @ torch.ones(4, 4, dtype=dtype)).all()


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("BFloat16Tensor", torch.bfloat16),
        ("ByteTensor", torch.uint8),
        ("DoubleTensor", torch.float64),
        ("FloatTensor", torch.float32),
        ("HalfTensor", torch.float16),
        ("IntTensor", torch.int32),
        ("LongTensor", torch.int64),
    ],
)
def test_tensor_types(cpu, name, dtype):
    made = getattr(cpu, name)([1, 2])
    assert made.dtype == dtype and made.tolist() == [1, 2] and made.device.type == "cpu"


def test_cpu_pinning_is_nothing(cpu):
    tensor = torch.ones(3)
    assert cpu.pin_memory(tensor) is tensor
    assert not cpu.is_pinned(tensor)
    assert cpu.unpin_memory(tensor) is None


def test_cpu_lazy_call_runs_now(cpu):
    calls = []
    cpu.lazy_call(lambda: calls.append(1))
    assert calls == [1]


def test_cpu_ranges_are_nothing(cpu):
    assert cpu.range_push("step", domain="d", category="c") is None
    assert cpu.range_pop() is None


@pytest.mark.parametrize(
    "call",
    [lambda a: a.create_graph(), lambda a: a.capture_to_graph(None), lambda a: a.replay_graph(None)],
    ids=["create", "capture", "replay"],
)
def test_graphs_need_a_device(cpu, call):
    with pytest.raises(StateError, match="cpu devices have no"):
        call(cpu)


def test_builders_of_operators(cpu):
    from torch.utils.cpp_extension import BuildExtension

    from deepspeed_c.ops import adam, op_builder

    assert cpu.get_op_builder("FusedAdamBuilder") is op_builder.FusedAdamBuilder
    assert cpu.create_op_builder("CPUAdamBuilder").load() is adam
    with pytest.raises(BuildError, match="inference engine"):
        cpu.create_op_builder("InferenceBuilder").load()
    # These names are not builders of DeepSpeed. importlib and ALL_OP are other names in its module.
    for name in ("NoSuchBuilder", "importlib", "ALL_OP"):
        assert cpu.get_op_builder(name) is None and cpu.create_op_builder(name) is None, name
    assert cpu.build_extension() is BuildExtension


def test_the_builder_that_code_asks_for(cpu):
    from deepspeed_c.ops.aio import AsyncIOBuilder, aio_handle

    assert cpu.get_op_builder("AsyncIOBuilder") is AsyncIOBuilder
    assert cpu.create_op_builder("AsyncIOBuilder").load().aio_handle is aio_handle
    assert importlib.import_module(cpu.op_builder_dir()).AsyncIOBuilder is AsyncIOBuilder


def test_compile_backend(cpu):
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(ConfigError, match="no_such_backend.*\n.*inductor"):
        cpu.set_compile_backend("no_such_backend")
    assert cpu.get_compile_backend() == "eager"


def test_environment_for_workers(cpu):
    env = {}
    cpu.set_visible_devices_envs(env, [0, 2])
    assert env == {} and cpu.visible_devices_envs() == [] and cpu.export_envs() == []


def test_cuda_names_without_a_context():
    cuda = Accelerator("cuda")
    env = {}
    cuda.set_visible_devices_envs(env, [0, 2])
    assert env == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert (cuda.device_name(), cuda.device_name(1)) == ("cuda", "cuda:1")
    assert cuda.communication_backend_name() == "nccl"
    assert not cuda.is_synchronized_device()
    assert cuda.Stream is torch.cuda.Stream and cuda.Event is torch.cuda.Event
    assert cuda.on_accelerator(torch.ones(1)) is False


def test_import_creates_no_context_and_prints_nothing():
    code = "import deepspeed_c.accelerator, torch; assert not torch.cuda.is_initialized()"
    done = fresh.run(["-c", code], has_package=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_forwarded_methods_are_documented():
    for name in NAMES:
        member = inspect.getattr_static(Accelerator, name)
        if name in (*accelerator._ABOUT_PROCESS, *accelerator._ABOUT_DEVICE):
            assert "torch.cuda" in inspect.getdoc(member)


@needs_cuda
def test_cuda_against_torch():
    cuda = Accelerator("cuda")
    assert cuda.device_count() == torch.cuda.device_count()
    assert cuda.current_device_name() == f"cuda:{torch.cuda.current_device()}"
    before = cuda.memory_allocated()
    block = torch.ones(MIB, device="cuda")
    assert cuda.memory_allocated() - before == 4 * MIB == torch.cuda.memory_allocated() - before
    assert cuda.memory_allocated(device_index=0) == torch.cuda.memory_allocated(0)
    assert cuda.total_memory() == torch.cuda.get_device_properties(0).total_memory
    assert 0 < cuda.available_memory() < cuda.total_memory()
    assert cuda.is_pinned(cuda.pin_memory(torch.ones(4)))
    assert cuda.on_accelerator(block)
    with cuda.stream(cuda.Stream()):
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        block.add_(1)
        end.record()
    cuda.synchronize()
    assert start.elapsed_time(end) > 0
    assert cuda.default_generator(0) is torch.cuda.default_generators[0]
    cuda.manual_seed_all(3)
    assert cuda.initial_seed() == 3
