"""Every environment variable that the package itself reads, in one dataclass. (Launchers' own: comm/discover.py.)"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError

__all__ = ["Env", "read_env"]


def _variable(name: str, default: Any, kind: type, minimum: float | None = None, words: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"name": name, "kind": kind, "minimum": minimum, "words": words})


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """The variables at the time of reading; a variable that is unset or empty has its default."""

    rank: int = _variable("RANK", 0, int, 0)
    """RANK: number of this process in the job."""

    world_size: int = _variable("WORLD_SIZE", 1, int, 1)
    """WORLD_SIZE: processes of the job."""

    local_rank: int = _variable("LOCAL_RANK", 0, int, 0)
    """LOCAL_RANK: number of this process on its host; chooses the device."""

    local_world_size: int = _variable("LOCAL_WORLD_SIZE", 1, int, 1)
    """LOCAL_WORLD_SIZE: processes of the job on this host; they share its cores."""

    master_addr: str | None = _variable("MASTER_ADDR", None, str)
    """MASTER_ADDR: host of rank 0."""

    master_port: int | None = _variable("MASTER_PORT", None, int, 1)
    """MASTER_PORT: TCP port at which rank 0 waits for the others."""

    omp_num_threads: int | None = _variable("OMP_NUM_THREADS", None, int, 1)
    """OMP_NUM_THREADS: threads of one process; launchers set it to 1 where the user did not."""

    cpu_isa: str | None = _variable("DSC_CPU_ISA", None, str, words=("scalar", "avx2", "avx512", "neon"))
    """DSC_CPU_ISA: instruction set of the CPU loops, instead of the best one. The C core reads it by itself."""

    num_threads: int | None = _variable("DSC_NUM_THREADS", None, int, 1)
    """DSC_NUM_THREADS: threads that share a pass over host memory, such as an optimizer step, instead of this rank's part of the host's processors, whatever
    OMP_NUM_THREADS says. The C core reads it by itself, at the first such pass."""

    log: str | None = _variable("DSC_LOG", None, str)
    """DSC_LOG: level of the logger and, with "json", one JSON object a line; for example "debug" or "info,json"."""

    accelerator: str | None = _variable("DS_ACCELERATOR", None, str)
    """DS_ACCELERATOR: kind of device to train on ("cpu", "cuda"), where that of the machine is not meant."""

    alias_force: str | None = _variable("DSC_ALIAS_FORCE", None, str, words=("0", "1"))
    """DSC_ALIAS_FORCE: 1 hides a real DeepSpeed where deepspeed_c answers to its name; `deepspeed_c run --force` sets it."""

    timeout_minutes: float | None = _variable("DEEPSPEED_TIMEOUT", None, float, 0.0)
    """DEEPSPEED_TIMEOUT: minutes that one collective may take."""


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """Reads the variables from ``environ``, by default that of the process.

    Raises:
        ConfigError: one of them is malformed or out of range.
    """
    environ = os.environ if environ is None else environ
    values = {}
    for variable in fields(Env):
        text = environ.get(variable.metadata["name"], "").strip()
        if text:
            values[variable.name] = _parse(text, **variable.metadata)
    return Env(**values)


def _parse(text: str, *, name: str, kind: type, minimum: float | None, words: tuple[str, ...]) -> Any:
    if kind is str:
        if words and text not in words:
            raise ConfigError(f"is {text!r}", where=name, fix=f"set it to one of {', '.join(words)}, or unset it")
        return text
    wanted = {int: "a whole number", float: "a number"}[kind]
    wanted += "" if minimum is None else f" >= {minimum:g}" if kind is int else f" > {minimum:g}"
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"is {text!r}", where=name, fix=f"set it to {wanted}, or unset it") from None
    if not math.isfinite(value) or minimum is not None and (value < minimum or kind is float and value == minimum):
        raise ConfigError(f"is {text}", where=name, fix=f"set it to {wanted}, or unset it")
    return value
