"""``deepspeed_c report``: the build, the machine, and the versions that a bug report needs."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from deepspeed_c._version import __version__
from deepspeed_c.command_line import command_parser
from deepspeed_c.env import read_env
from deepspeed_c.launcher.compare import CLOCK, SECONDS, report_of_hosts
from deepspeed_c.launcher.cores import allowed_cpus, as_ranges, threads_per_rank
from deepspeed_c.processor import processor_name

__all__ = ["gather", "main"]

EXIT_NOT_WHOLE = 1
PROBE_SECONDS = 10
ROOT = Path(__file__).resolve().parent.parent
# (dots, module) of an import on one line. All imports of this package fit one line, and parsing each file would take
# seconds.
IMPORT = re.compile(r"^\s*(?:from|import)\s+(\.*)((?:[A-Za-z_][\w.]*)?)(?=\s|$)", re.MULTILINE)
CUDA_LIBRARY = "libdsc_cuda.so"
# All backends that a build can have, so that the report can name missing backends.
IO_BACKENDS = ("uring", "libaio", "threads", "sync")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report. Return 0, or 1 if a module is missing or the compiled module does not load; with --hostfile
    also if a host does not answer."""
    parser = command_parser("report", "Says what was built, what was found on this machine, and versions.")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("-H", "--hostfile", metavar="FILE", help="of all hosts of this file, over ssh, side by side")
    parser.add_argument("--ssh_port", type=int, metavar="PORT", help="port of the hosts' ssh servers")
    options = parser.parse_args(argv)
    if options.hostfile is not None:
        return report_of_hosts(options.hostfile, options.ssh_port, options.json)
    if options.ssh_port is not None:
        parser.error("--ssh_port is for the hosts of a --hostfile")
    report, is_whole = gather()
    if options.json:
        # Flushed at once: the other end compares the time with its own when the text arrives
        print(json.dumps({**report, CLOCK: {SECONDS: time.time()}}, indent=2), flush=True)
    else:
        print(_as_text(report))
    return 0 if is_whole else EXIT_NOT_WHOLE


def gather() -> tuple[dict[str, dict[str, Any]], bool]:
    """(the report as sections of plain values, whether the package is complete). In a complete package all modules
    exist and the compiled module loads.
    """
    import torch

    extension, problem = _extension()
    missing = _missing_modules({"deepspeed_c": ROOT, "deepspeed_c.ops": _folder_of_ops()})
    sections = {
        "package": {
            "deepspeed_c": __version__,
            "folder": str(ROOT),
            "modules": f"missing: {', '.join(missing)}. Fix: install the package again" if missing else "all there",
            "extension": problem or extension.__file__,
            "python": f"{platform.python_version()} ({sys.executable})",
            "torch": torch.__version__,
            "system": platform.platform(),
        },
        "built": _built(extension) if extension else {},
        "cpu": _cpu(extension),
        "memory": _memory(),
        "devices": _devices(torch),
        "cuda library": _cuda_library(extension),
        "i/o backends": _io_backends(extension),
        "communication": _communication(torch, extension),
    }
    return {title: values for title, values in sections.items() if values}, extension is not None and not missing


def _folder_of_ops() -> Path | None:
    """The folder of ops: beside the package in an editable installation, else inside the package."""
    spec = importlib.util.find_spec("deepspeed_c.ops")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _missing_modules(folders: Mapping[str, Path | None]) -> list[str]:
    """Missing modules of this package that a file imports, anywhere in the file.

    This function imports nothing, because even the first import could fail.

    ``folders`` maps the names of top-level packages to folders. Packages inside them are found by path.
    """
    wanted: set[str] = set(folders)
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")) if folder is not None else ():
            inside = [package, *path.relative_to(folder).parts[:-1]]
            for dots, name in IMPORT.findall(path.read_text(encoding="utf-8")):
                base = inside[: len(inside) - len(dots) + 1] if dots else []
                wanted.add(".".join([*base, *([name] if name else [])]))
    # The compiled module has a separate line in the report.
    ours = {name for name in wanted if name.split(".")[0] == "deepspeed_c"} - {"deepspeed_c._C"}
    return sorted(name for name in ours if not _is_there(name, folders))


def _is_there(name: str, folders: Mapping[str, Path | None]) -> bool:
    package = max((p for p in folders if name == p or name.startswith(f"{p}.")), key=len)
    folder = folders[package]
    if folder is None:
        return False
    path = folder.joinpath(*name.removeprefix(package).split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _extension() -> tuple[ModuleType | None, str]:
    try:
        import torch  # noqa: F401  the extension needs its libraries to be loaded

        return importlib.import_module("deepspeed_c._C"), ""
    except ImportError as error:  # the file is missing, or cannot be linked
        return None, f"missing or does not load ({error}). Fix: build it with `pip install --no-build-isolation .`"


def _built(extension: ModuleType) -> dict[str, Any]:
    """The build's own information, except the entries that other sections show."""
    elsewhere = ("version", "isas", "cuda")
    return {name: value for name, value in extension.build_info().items() if name not in elsewhere}


def _cpu(extension: ModuleType | None) -> dict[str, Any]:
    cpus = allowed_cpus()
    values: dict[str, Any] = {
        "model": processor_name(),
        "cores": f"{os.cpu_count()}, allowed: {as_ranges(cpus)}",
        "threads of one process": threads_per_rank(1),
        "OMP_NUM_THREADS": read_env().omp_num_threads or "not set",
    }
    if extension:
        isas = extension.cpu_isas()
        values["instruction sets built"] = ", ".join(name for name, _ in isas)
        values["... that run here"] = ", ".join(name for name, is_runnable in isas if is_runnable)
        try:
            values["threads of an optimizer step"] = extension.pool_n_threads()
            values["... in use"] = extension.cpu_isa()
            values.update(_products())
        except ValueError as error:  # an environment variable has an invalid value, which every operator reports too
            values["threads of an optimizer step"] = str(error)
    return values


def _products() -> dict[str, str]:
    """Who multiplies 16-bit elements under "cpu_products": "auto"."""
    import torch

    from deepspeed_c.ops.product_times import product_times

    return {f"products of {str(dtype)[6:]}": str(product_times(dtype)) for dtype in (torch.bfloat16, torch.float16)}


def _memory() -> dict[str, Any]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    values = {"total": _gib(kib["MemTotal"] << 10), "available": _gib(kib["MemAvailable"] << 10)}
    try:
        values["/dev/shm free"] = _gib(shutil.disk_usage("/dev/shm").free)
    except OSError:
        values["/dev/shm free"] = "not there"
    return values


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.1f} GiB"


def _devices(torch: ModuleType) -> dict[str, Any]:
    values: dict[str, Any] = {"torch built for CUDA": torch.version.cuda or "no", "nvcc": _nvcc()}
    if not torch.accelerator.is_available():
        return {**values, "accelerators": "none"}
    kind = torch.accelerator.current_accelerator().type
    values["accelerators"] = f"{torch.accelerator.device_count()} ({kind})"
    if kind == "cuda":
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            values[f"cuda:{i}"] = f"{device.name}, {_gib(device.total_memory)}, compute {device.major}.{device.minor}"
    return values


def _nvcc() -> str:
    program = shutil.which("nvcc")
    if program is None:
        return "not found"
    try:
        shown = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{program} does not run: {error}"
    release = [line for line in shown.stdout.splitlines() if "release" in line]
    return f"{release[0].split('release')[1].split(',')[0].strip() if release else 'unknown version'} ({program})"


def _cuda_library(extension: ModuleType | None) -> dict[str, Any]:
    if extension is None:
        return {}
    path = Path(extension.__file__).with_name(CUDA_LIBRARY)
    values: dict[str, Any] = {"built": bool(extension.build_info()["cuda"])}
    if not path.is_file():
        return {**values, "file": "not there"}
    try:
        ctypes.CDLL(str(path))
        return {**values, "file": str(path), "loads": True}
    except OSError as error:
        return {**values, "file": str(path), "loads": f"no: {error}"}


def _io_backends(extension: ModuleType | None) -> dict[str, Any]:
    """The I/O backends for checkpoints and offload to NVMe: whether each is built and usable on this kernel, and the
    reason if it is not.
    """
    if extension is None:
        return {}
    built = extension.aio_backends()
    values: dict[str, Any] = {
        name: "built, usable" if is_usable else f"built, not usable: {reason}" for name, is_usable, reason in built
    }
    for name in IO_BACKENDS:
        values.setdefault(name, "not built: the compiler found no header of it")
    return {**values, "auto takes": next((name for name, is_usable, _ in built if is_usable), "none")}


def _communication(torch: ModuleType, extension: ModuleType | None) -> dict[str, Any]:
    values = _backends(torch)
    if extension is not None:
        problem = _shared_memory(extension)
        values["shared memory"] = f"not between ranks: {problem}" if problem else "usable between ranks of this host"
        values["CPU tensors of such ranks"] = (
            "over gloo" if problem else 'through shared memory ("comm": {"local": "auto"})'
        )
        values["CPU tensors of ranks on several hosts"] = (
            "over gloo" if problem else "through shared memory inside a host, over gloo between hosts"
        )
    return values


def _shared_memory(extension: ModuleType) -> str:
    """Test shared memory between two ends in this process. Return the reason if ranks of this host cannot share memory,
    else ""."""
    ends = []
    try:
        for rank in range(2):
            ends.append(extension.ShmGroup(rank, 2, PROBE_SECONDS))
        for end in ends:
            end.attach([other.address for other in ends])
    except (MemoryError, OSError, ValueError, RuntimeError) as error:  # the errors of a refusal
        return str(error)
    finally:
        for end in ends:
            end.close()
    return ""


def _backends(torch: ModuleType) -> dict[str, Any]:
    dist = torch.distributed
    if not dist.is_available():
        return {"torch.distributed": "not built"}
    values: dict[str, Any] = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    if values["nccl"]:
        values["nccl version"] = ".".join(map(str, torch.cuda.nccl.version()))
    return values


def _as_text(report: Mapping[str, Mapping[str, Any]]) -> str:
    width = max(len(name) for values in report.values() for name in values)
    lines = []
    for title, values in report.items():
        lines += ["", title] if lines else [title]
        lines += [f"  {name:<{width}}  {_word(value)}" for name, value in values.items()]
    return "\n".join(lines)


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
