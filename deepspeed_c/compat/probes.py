"""DeepSpeed's questions about torch, the machine and tensors (``is_*``, ``has_*``, ``installed_*``), from many modules.

Programs ask them before they use a feature, often while they are imported. None raises because a feature is not there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.cpp_extension

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.discover import number_given
from deepspeed_c.compat.torch_version import required_torch_version
from deepspeed_c.env import read_env
from deepspeed_c.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed_c.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed_c.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed_c.ops.muon import Muon

__all__ = [
    "can_send_recv",
    "get_default_compute_capabilities",
    "get_local_rank_from_launcher",
    "get_norm_dtype",
    "get_shm_size",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_hierarchical_all_gather_groups",
    "installed_cann_path",
    "installed_cann_version",
    "installed_cuda_version",
    "is_autoep_folding_gradient_corrected",
    "is_autoep_zero3_partitioned_entry",
    "is_backend_inductor",
    "is_builtin_type",
    "is_cast_op",
    "is_comm_op",
    "is_dynamo_guard_evaluation",
    "is_even",
    "is_gated",
    "is_module_compressible",
    "is_nfs_path",
    "is_profile_incomplete",
    "is_release_node",
    "is_torch_elastic_compatible",
    "is_triton_available",
    "is_zero_param",
    "is_zero_supported_optimizer",
    "no",
    "nothing",
    "should_release_reduce_buckets",
    "was_interrupted",
]

_DEFAULT_ARCHITECTURES = "6.0;6.1;7.0"
_SEARCH_SECONDS = 10


def no(*args: Any, **kwargs: Any) -> bool:
    """False: the answer of each question about a feature of DeepSpeed that is not part of this package."""
    return False


def nothing(*args: Any, **kwargs: Any) -> None:
    """None: the current object of a feature of DeepSpeed that is not part of this package."""


def can_send_recv() -> bool:
    """Always True: every torch that this package supports sends between two ranks."""
    return hasattr(torch.distributed, "send") or not torch.distributed.is_available()


def is_torch_elastic_compatible() -> bool:
    """Always True: every torch that this package supports has torch.distributed.elastic."""
    return required_torch_version(min_version="1.11")


def has_all_reduce_coalesced() -> bool:
    """Whether torch reduces lists of tensors in one call."""
    return hasattr(torch.distributed, "all_reduce_coalesced")


def has_coalescing_manager() -> bool:
    """Whether torch joins collective calls."""
    return hasattr(getattr(torch.distributed, "distributed_c10d", None), "_coalescing_manager")


def is_triton_available() -> bool:
    """Whether Triton can be imported and finds a device."""
    try:
        import triton

        triton.runtime.driver.active.get_current_target()
    except Exception:  # noqa: BLE001  (Triton's drivers raise errors of their own)
        return False
    return True


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """(major, minor) of the nvcc that torch would call; (0, 0) without one, where DeepSpeed raises."""
    home = torch.utils.cpp_extension.CUDA_HOME
    if home is None:
        return 0, 0
    command = [os.path.join(home, "bin", "nvcc"), "-V"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SEARCH_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return 0, 0
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def get_default_compute_capabilities() -> str:
    """Generations of GPUs for the installed nvcc, as TORCH_CUDA_ARCH_LIST spells them."""
    major, minor = installed_cuda_version()
    added = [("8.0", major == 12 or major == 11), ("8.6", major == 12 or (major == 11 and minor >= 1))]
    added += [("9.0", major == 12 or (major == 11 and minor >= 8))]
    added += [("10.0", major == 12 and minor >= 8), ("12.0", major == 12 and minor >= 8)]
    return ";".join([_DEFAULT_ARCHITECTURES, *(name for name, is_known in added if is_known)])


def installed_cann_path() -> str | None:
    """The folder of Ascend's toolkit, from the environment."""
    return read_env().ascend_home


def installed_cann_version() -> str:
    """The version of Ascend's toolkit, or a sentence without one."""
    folder = installed_cann_path()
    if folder is None:
        return "CANN_HOME does not exist, unable to compile NPU op(s)"
    for file in sorted(Path(folder).resolve().rglob("ascend_*_install.info")):
        found = re.search(r"version.*=(.*)", file.read_text(encoding="utf-8"))
        if found:
            return found[1].strip()
    return ""


def is_nfs_path(path: str) -> bool:
    """Whether a file, or the folder where it would be made, lies on NFS. False on systems without /proc/mounts."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    # A space in a path is written as \\040.
    mounts = [line.split()[1:3] for line in lines]
    kinds = {re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), where): kind for where, kind in mounts}
    folder = Path(os.path.realpath(path))
    return next(("nfs" in kinds[str(each)] for each in (folder, *folder.parents) if str(each) in kinds), False)


def is_even(number: int) -> bool:
    """Whether ``number`` is a multiple of 2."""
    return number % 2 == 0


def is_builtin_type(obj: object) -> bool:
    """Whether the class of ``obj`` is Python's own."""
    return type(obj).__module__ == "builtins"


def is_zero_param(parameter: object) -> bool:
    """Whether ``parameter`` is a tensor that stage 3 manages."""
    return torch.is_tensor(parameter) and hasattr(parameter, "ds_id")


_SUPPORTED = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad),
    *(DeepSpeedCPULion, FusedLion, Muon),
)


def is_zero_supported_optimizer(optimizer: object) -> bool:
    """Whether DeepSpeed's list of optimizers for ZeRO has the class itself. Others run here too, where
    ``initialize`` does not refuse them."""
    return type(optimizer) in _SUPPORTED


def get_norm_dtype() -> torch.dtype:
    """The dtype in which squares of gradients are summed: float64 where the device has it."""
    return torch.float64 if get_accelerator().is_fp64_supported() else torch.float32


def has_hierarchical_all_gather_groups(comm_groups: Any) -> bool:
    """Whether the object has groups within nodes and between nodes."""
    return comm_groups.param_intra_node_group is not None and comm_groups.param_inter_node_shard_group is not None


_COMPRESSIBLE = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Embedding, torch.nn.BatchNorm2d)


def is_module_compressible(module: torch.nn.Module, mpu: Any = None) -> bool:
    """Whether DeepSpeed compresses modules of this class; ``mpu`` may name the classes of its parallel layers."""
    parallel = () if mpu is None else (mpu.RowParallelLinear, mpu.ColumnParallelLinear)
    return isinstance(module, (*_COMPRESSIBLE, *parallel))


def is_gated(act_fn: int) -> bool:
    """Whether a number of ``ActivationType`` is an activation with a gate: GEGLU, ReGLU or SiGLU."""
    return int(act_fn) in (3, 4, 5)


def was_interrupted(filename: str) -> bool | str:
    """Whether a file of messages has a KeyboardInterrupt; a sentence if there is no file."""
    file = Path(filename)
    return "KeyboardInterrupt" in file.read_text(encoding="utf-8") if file.exists() else f"{file.name} does not exist"


def is_autoep_zero3_partitioned_entry(entry: object) -> bool:
    """Whether an entry of a checkpoint says that its experts are cut over ranks."""
    return isinstance(entry, dict) and entry.get("checkpoint_format") == "zero3_partitioned"


def is_autoep_folding_gradient_corrected(param: object) -> bool:
    """Whether the parameter has DeepSpeed's mark of a gradient that is summed already."""
    return bool(getattr(param, "ds_autoep_folding_grad_corrected", False))


def is_backend_inductor(backend: str) -> bool:
    """Whether the text is "inductor"."""
    return backend == "inductor"


def is_comm_op(node: torch.fx.Node) -> bool:
    """Whether a node of a graph is marked as communication."""
    return bool(node.meta.get("comm"))


def is_cast_op(node: torch.fx.Node) -> tuple[bool, torch.dtype | None]:
    """(whether a node of a graph only changes the dtype, the new dtype)."""
    if node.op == "call_function" and node.target == torch.ops.prims.convert_element_type.default:
        return True, node.args[1]
    if node.op == "call_function" and node.target == torch.ops.aten._to_copy.default and [*node.kwargs] == ["dtype"]:
        return True, node.kwargs["dtype"]
    return False, None


def is_release_node(n: torch.fx.Node) -> bool:
    """Whether a node of a graph releases a parameter. No graph here has such a node; DeepSpeed's may."""
    return str(n.target) == "dc.release_param.default"


def is_profile_incomplete(graph: torch.fx.Graph | None) -> bool:
    """Whether a graph has DeepSpeed's mark of a profile with gaps."""
    if graph is None:
        return False
    return getattr(graph, "_deepcompile_profile_incomplete", False) or any(
        node.meta.get("deepcompile_profile_incomplete", False) for node in graph.nodes
    )


def should_release_reduce_buckets(graph_order: Sequence[tuple[int, bool]], graph_id: int) -> bool:
    """Whether no graph in the order (id, has a backward) has a backward, or ``graph_id`` is the first that has one."""
    return next((number for number, has_backward in graph_order if has_backward), graph_id) == graph_id


def is_dynamo_guard_evaluation() -> bool:
    """Whether the call comes from a guard of torch.compile."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.guards":
            return True
        frame = frame.f_back
    return False


def get_local_rank_from_launcher() -> int:
    """The rank on this host, from the variables of the launcher or of Open MPI; 0 without them."""
    return number_given(os.environ, "local_rank", default=0)


def get_world_rank_from_launcher() -> int:
    """The rank, from the variables of the launcher or of Open MPI; 0 without them."""
    return number_given(os.environ, "rank", default=0)


def get_world_size_from_launcher() -> int:
    """The number of ranks, from the variables of the launcher or of Open MPI; 1 without them."""
    return number_given(os.environ, "world_size", default=1)


def get_shm_size() -> tuple[str, list[str] | None]:
    """(size of /dev/shm as text, warnings); ("UNKNOWN", None) on systems without it."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        return "UNKNOWN", None
    size = stats.f_frsize * stats.f_blocks
    warnings = (
        ["/dev/shm might be too small; start a container with at least --shm-size=1gb"] if size < 512 << 20 else []
    )
    number, unit = float(size), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if number >= 1024:
            number, unit = number / 1024, larger
    return f"{number:.2f} {unit}", warnings
