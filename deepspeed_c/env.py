"""Every environment variable that the package reads by its name, in one class. The variables by which launchers give
ranks and hosts their places are read from a mapping, by ``comm/discover.py`` and ``scheduled.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import ConfigError

__all__ = ["JOB_VARIABLE", "RUN_TOKEN", "STEP_FILE", "VARIABLES", "Env", "read_env"]

JOB_VARIABLE = "DSC_LAUNCH_JOB"
RUN_TOKEN = "DSC_RUN_TOKEN"
STEP_FILE = "DSC_STEP_FILE"


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

    @property
    def given_world_size(self) -> int | None:
        """``world_size``, or None if its variable is unset or empty."""
        return self.world_size if self._environ.get("WORLD_SIZE", "").strip() else None

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

    omp_num_threads: str | None = _Variable("OMP_NUM_THREADS", None, str)
    """OMP_NUM_THREADS: threads of one process, or of each level ("4,2"); the launcher sets it if the user has not."""

    kmp_affinity: str | None = _Variable("KMP_AFFINITY", None, str)
    """KMP_AFFINITY: how OpenMP binds threads to cores; ranks are not bound then."""

    gloo_interface: str | None = _Variable("GLOO_SOCKET_IFNAME", None, str)
    """GLOO_SOCKET_IFNAME: network interface of gloo; the launcher sets it if the user has not."""

    agent_store: str | None = _Variable("TORCHELASTIC_USE_AGENT_STORE", None, str)
    """TORCHELASTIC_USE_AGENT_STORE: "True" if torchrun's agent listens at MASTER_PORT, and not rank 0."""

    elasticity_config: str | None = _Variable("DEEPSPEED_ELASTICITY_CONFIG", None, str)
    """DEEPSPEED_ELASTICITY_CONFIG: the section elasticity, as JSON, by which a scheduler has chosen the ranks."""

    restart_count: int = _Variable("TORCHELASTIC_RESTART_COUNT", 0, int, 0)
    """TORCHELASTIC_RESTART_COUNT: how often torchrun's agent has started the ranks before."""

    visible_devices: str | None = _Variable("CUDA_VISIBLE_DEVICES", None, str)
    """CUDA_VISIBLE_DEVICES: names of the devices that torch may use."""

    python_path: str | None = _Variable("PYTHONPATH", None, str)
    """PYTHONPATH: folders of modules, which agents and ranks get as well."""

    cpu_isa: str | None = _Variable("DSC_CPU_ISA", None, str, words=("scalar", "avx2", "avx512", "neon"))
    """DSC_CPU_ISA: instruction set of the CPU loops, instead of the best available."""

    onednn_isa: str | None = _Variable("ONEDNN_MAX_CPU_ISA", None, str)
    """ONEDNN_MAX_CPU_ISA: the most of the instruction sets that torch's matrix products may use."""

    cache_home: str | None = _Variable("XDG_CACHE_HOME", None, str)
    """XDG_CACHE_HOME: folder of measurements that are kept from run to run, instead of ~/.cache."""

    mii_cache: str | None = _Variable("MII_CACHE_PATH", None, str)
    """MII_CACHE_PATH: folder for the deployments of ``mii.serve``, instead of the folder for temporary files."""

    num_threads: int | None = _Variable("DSC_NUM_THREADS", None, int, 1)
    """DSC_NUM_THREADS: number of threads for a pass over host memory, such as an optimizer step; default: this rank's
    share of the host's processors. OMP_NUM_THREADS has no effect on it."""

    log: str | None = _Variable("DSC_LOG", None, str)
    """DSC_LOG: level of the logger and, with "json", one JSON object a line; for example "debug" or "info,json"."""

    accelerator: str | None = _Variable("DS_ACCELERATOR", None, str)
    """DS_ACCELERATOR: kind of device to train on ("cpu", "cuda"), instead of the machine's."""

    step_file: str | None = _Variable("DSC_STEP_FILE", None, str)
    """DSC_STEP_FILE: file in which the engine notes its steps and saves for the launcher that made it."""

    alias_force: str | None = _Variable("DSC_ALIAS_FORCE", None, str, words=("0", "1"))
    """DSC_ALIAS_FORCE: 1 hides a real DeepSpeed while deepspeed_c is imported under its name; `deepspeed_c run --force`
    sets it.
    """

    alias_python: str | None = _Variable("DSC_ALIAS_PYTHON", None, str)
    """DSC_ALIAS_PYTHON: interpreter for DeepSpeed's programs in compat/alias/bin, which read this variable themselves;
    `deepspeed_c run` sets it to its own interpreter.
    """

    environment_file: str | None = _Variable("DS_ENV_FILE", None, str)
    """DS_ENV_FILE: file of variables for ranks on all hosts, instead of .deepspeed_env."""

    pdsh_ssh_arguments: str | None = _Variable("PDSH_SSH_ARGS_APPEND", None, str)
    """PDSH_SSH_ARGS_APPEND: further options of ssh, as for pdsh."""

    impi_root: str | None = _Variable("I_MPI_ROOT", None, str)
    """I_MPI_ROOT: folder of Intel MPI."""

    slurm_job: str | None = _Variable("SLURM_JOB_ID", None, str)
    """SLURM_JOB_ID: the allocation that the launching command is in."""

    slurm_hosts: str | None = _Variable("SLURM_JOB_NODELIST", None, str)
    """SLURM_JOB_NODELIST: the hosts of that allocation."""

    launch_job: str | None = _Variable(JOB_VARIABLE, None, str, is_secret=True)
    """DSC_LAUNCH_JOB: the job as JSON, for agents that MPI or Slurm starts. The job holds the run's secret, so it is
    passed in the environment, never on a command line."""

    azure_ml_experiment: str | None = _Variable("AZUREML_EXPERIMENT_ID", None, str)
    """AZUREML_EXPERIMENT_ID: set in jobs of Azure Machine Learning."""

    sagemaker_environment: str | None = _Variable("SM_TRAINING_ENV", None, str)
    """SM_TRAINING_ENV: set in jobs of AWS SageMaker."""

    dlts_job: str | None = _Variable("DLTS_JOB_ID", None, str)
    """DLTS_JOB_ID: set in jobs of DLTS."""

    ascend_home: str | None = _Variable("ASCEND_HOME_PATH", None, str)
    """ASCEND_HOME_PATH: folder of Ascend's toolkit."""

    timeout_minutes: float | None = _Variable("DEEPSPEED_TIMEOUT", None, float, 0.0)
    """DEEPSPEED_TIMEOUT: minutes that one collective may take."""

    ssl_keyfile: str | None = _Variable("SSL_KEYFILE", None, str)
    """SSL_KEYFILE: the key of MII's server with --ssl."""

    ssl_certfile: str | None = _Variable("SSL_CERTFILE", None, str)
    """SSL_CERTFILE: the certificate of MII's server with --ssl."""

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
