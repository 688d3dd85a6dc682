"""Every environment variable of the package, in one class. comm/discover.py reads the variables of other launchers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import ConfigError

__all__ = ["RUN_TOKEN", "VARIABLES", "Env", "read_env"]

RUN_TOKEN = "DSC_RUN_TOKEN"


class _Facts(NamedTuple):
    name: str
    default: Any
    kind: type
    minimum: float | None = None
    words: tuple[str, ...] = ()
    is_secret: bool = False


class _Variable:
    """An attribute that reads and checks its variable at each access, so that a variable without an access may have any
    value.
    """

    def __init__(self, *facts: Any, **more: Any) -> None:
        self.facts = _Facts(*facts, **more)

    def __get__(self, env: Env | None, owner: type[Env]) -> Any:
        if env is None:
            return self
        text = env._environ.get(self.facts.name, "").strip()
        return _parse(text, self.facts) if text else self.facts.default

    def __set__(self, env: Env, value: Any) -> None:
        raise AttributeError(f"{self.facts.name} is only read here")


class Env:
    """The variables of ``environ``, read at each access. Unset or empty variables have their default value.

    Raises:
        ConfigError: the variable is malformed or out of range.
    """

    __slots__ = ("_environ",)

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __repr__(self) -> str:
        shown = (facts.name for facts in VARIABLES.values() if not facts.is_secret)
        return f"Env({', '.join(f'{name}={self._environ[name]!r}' for name in shown if name in self._environ)})"

    rank: int = _Variable("RANK", 0, int, 0)
    """RANK: number of this process in the job."""

    world_size: int = _Variable("WORLD_SIZE", 1, int, 1)
    """WORLD_SIZE: processes of the job."""

    local_rank: int = _Variable("LOCAL_RANK", 0, int, 0)
    """LOCAL_RANK: number of this process on its host; chooses the device."""

    local_world_size: int = _Variable("LOCAL_WORLD_SIZE", 1, int, 1)
    """LOCAL_WORLD_SIZE: processes of the job on this host; they share its cores."""

    local_size: int | None = _Variable("LOCAL_SIZE", None, int, 0)
    """LOCAL_SIZE: number of devices that the CPU reports, rather than LOCAL_WORLD_SIZE; 0 counts as unset."""

    master_addr: str | None = _Variable("MASTER_ADDR", None, str)
    """MASTER_ADDR: host of rank 0."""

    master_port: int | None = _Variable("MASTER_PORT", None, int, 1)
    """MASTER_PORT: TCP port at which rank 0 waits for the other ranks."""

    omp_num_threads: int | None = _Variable("OMP_NUM_THREADS", None, int, 1)
    """OMP_NUM_THREADS: threads of one process; launchers set it to 1 if the user has not set it."""

    cpu_isa: str | None = _Variable("DSC_CPU_ISA", None, str, words=("scalar", "avx2", "avx512", "neon"))
    """DSC_CPU_ISA: instruction set of the CPU loops, instead of the best available."""

    onednn_isa: str | None = _Variable("ONEDNN_MAX_CPU_ISA", None, str)
    """ONEDNN_MAX_CPU_ISA: the most of the instruction sets that torch's matrix products may use."""

    cache_home: str | None = _Variable("XDG_CACHE_HOME", None, str)
    """XDG_CACHE_HOME: folder of measurements that are kept from run to run, instead of ~/.cache."""

    num_threads: int | None = _Variable("DSC_NUM_THREADS", None, int, 1)
    """DSC_NUM_THREADS: number of threads for a pass over host memory, such as an optimizer step; default: this rank's
    share of the host's processors. OMP_NUM_THREADS has no effect on it."""

    log: str | None = _Variable("DSC_LOG", None, str)
    """DSC_LOG: level of the logger and, with "json", one JSON object a line; for example "debug" or "info,json"."""

    accelerator: str | None = _Variable("DS_ACCELERATOR", None, str)
    """DS_ACCELERATOR: kind of device to train on ("cpu", "cuda"), instead of the machine's."""

    alias_force: str | None = _Variable("DSC_ALIAS_FORCE", None, str, words=("0", "1"))
    """DSC_ALIAS_FORCE: 1 hides a real DeepSpeed while deepspeed_c is imported under its name; `deepspeed_c run --force`
    sets it.
    """

    alias_python: str | None = _Variable("DSC_ALIAS_PYTHON", None, str)
    """DSC_ALIAS_PYTHON: interpreter for DeepSpeed's programs in compat/alias/bin, which read this variable themselves;
    `deepspeed_c run` sets it to its own interpreter.
    """

    timeout_minutes: float | None = _Variable("DEEPSPEED_TIMEOUT", None, float, 0.0)
    """DEEPSPEED_TIMEOUT: minutes that one collective may take."""

    run_token: str | None = _Variable(RUN_TOKEN, None, str, is_secret=True)
    """DSC_RUN_TOKEN: a secret that only the processes of one run know. The watchdog ends the run only on messages with
    this secret. The deepspeed_c launcher makes a new secret for each run. Under other launchers it can be set by hand,
    to the same value on all ranks."""


VARIABLES: dict[str, _Facts] = {
    attribute: value.facts for attribute, value in vars(Env).items() if isinstance(value, _Variable)
}


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """The variables of ``environ``; default: the process's environment."""
    return Env(os.environ if environ is None else environ)


def _parse(text: str, facts: _Facts) -> Any:
    name, kind, minimum, words = facts.name, facts.kind, facts.minimum, facts.words
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
