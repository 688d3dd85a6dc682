"""The configuration classes of MII 0.3.3, with its keys and defaults, and their reading from the arguments of
``pipeline`` and ``serve``.

Every mistake of a user is a ``ConfigError``, a ``FeatureError`` or an ``UnknownArgument`` that names the key.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from deepspeed_c.config.config_model import DeepSpeedConfigModel, Field, setattr_unchecked
from deepspeed_c.config.nearest import nearest
from deepspeed_c.config.ragged import RaggedInferenceEngineConfig
from deepspeed_c.env import read_env
from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.mii.constants import DeploymentType, ModelProvider, TaskType
from deepspeed_c.mii.errors import UnknownArgument

__all__ = ["GenerateParamsConfig", "MIIConfig", "ModelConfig", "ReplicaConfig", "split_arguments"]

_LARGEST_COUNT = 2**31 - 1  # the engine counts tokens in 32 bits
_LARGEST_PORT = 2**16 - 1
_LONGEST_NAME = 200
# Key of ``ModelConfig`` that has to be false -> what to do instead.
_NOT_HERE = {
    "sync_debug": "leave it out; CUDA_LAUNCH_BLOCKING=1 makes each kernel wait",
    "profile_model_time": "leave it out; call the pipeline under torch.profiler.profile()",
}
_PORTS_OF_A_REPLICA = 100  # distance of MASTER_PORT between replicas, as in MII


def _ports(default: int) -> Any:
    return Field(default, ge=0, le=_LARGEST_PORT)


def _count(default: int | None, least: int) -> Any:
    return Field(default, ge=least, le=_LARGEST_COUNT)


class _Keys(DeepSpeedConfigModel):
    """A class of MII. An unknown key is an ``UnknownArgument``."""

    @classmethod
    def _is_unfilled(cls, key: str, value: Any) -> bool:
        return False  # "auto" is a word like any other: a string of ``stop``, the name of a deployment

    @classmethod
    def _unknown(cls, names: list[str], known: Iterable[str]) -> ConfigError:
        return _unknown(names, cls.__name__, known)


def _unknown(names: list[str], where: str, known: Iterable[str]) -> UnknownArgument:
    """The error about keys that no class of ``where`` has."""
    shown = ", ".join(name if len(name) <= 60 else f"{name[:57]}..." for name in names[:5])
    near = nearest(names[0], known)
    fix = f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(known)}"
    if names[0] in GenerateParamsConfig.model_fields and names[0] not in known:
        fix = "give it to the call of the pipeline, or to generate of the client"
    elif names[0] in _names(MIIConfig) and names[0] not in known:
        fix = "mii.serve takes it; a pipeline has no deployment"
    return UnknownArgument(
        f"{shown}{', ...' if len(names) > 5 else ''}: no such name{'s' if len(names) > 1 else ''}",
        where=where,
        fix=fix,
    )


class GenerateParamsConfig(_Keys):
    """How the text behind one prompt is generated."""

    prompt_length: int = _count(..., 1)
    """Tokens of the prompt. The server writes it; a user's value has no effect."""
    max_length: int = _count(1024, 1)
    """Most tokens of prompt and new text together."""
    max_new_tokens: int | None = _count(None, 1)
    """Most new tokens. None: as many as ``max_length`` allows, which is a limit in any case."""
    min_new_tokens: int = _count(0, 0)
    """New tokens before the end-of-text token, or a string of ``stop``, may end the text. The other limits prevail."""
    stream: bool = False
    """The text comes in pieces."""
    ignore_eos: bool = False
    """The end-of-text token does not end the text."""
    return_full_text: bool = False
    """The text begins with the prompt."""
    do_sample: bool = True
    """False: the likeliest token is taken each time."""
    top_p: float = Field(0.9, gt=0, le=1)
    """Tokens are drawn from the smallest set whose probabilities sum to this."""
    top_k: int | None = _count(None, 1)
    """Tokens are drawn from this many likeliest ones."""
    temperature: float | None = Field(None, gt=0)
    """Logits are divided by this number."""
    stop: list[str] = Field([])
    """A string, or strings, that end the text where they appear in it, across tokens too. They are kept sorted."""
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    """A prompt with a seed gets the same draws in any company. Not in MII. None: from the pipeline's own generator."""

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if isinstance(data.get("stop"), str):
            data["stop"] = [data["stop"]]
        super().__init__(strict, **data)

    def _check(self) -> None:
        if self.max_length <= self.prompt_length:
            raise ConfigError(
                f"is {self.max_length}, and the prompt has {self.prompt_length} tokens",
                where=self._where("max_length"),
                fix=f"write a number above {self.prompt_length}, or shorten the prompt",
            )
        if self.temperature is not None and not math.isfinite(self.temperature):
            raise ConfigError(
                f"is {self.temperature}", where=self._where("temperature"), fix="write a finite number > 0"
            )
        if "" in self.stop:
            raise ConfigError(
                "has an empty string, which every text contains", where=self._where("stop"), fix="remove it"
            )
        if self.max_new_tokens is None:
            setattr_unchecked(self, "max_new_tokens", self.max_length - self.prompt_length)
        setattr_unchecked(self, "stop", sorted(self.stop))


class ReplicaConfig(_Keys):
    """The place of one replica."""

    hostname: str = ""
    """This host; replicas on other hosts are refused."""
    tensor_parallel_ports: list[int] = Field([])
    """Read, without an effect: replicas listen on sockets that are files."""
    torch_dist_port: int | None = _ports(None)
    """MASTER_PORT of the replica's ranks. None: any free port."""
    gpu_indices: list[int] = Field([])
    """Devices of the ranks. Empty: ``ModelConfig.device_map`` decides."""
    zmq_port: int | None = _ports(None)
    """Read, without an effect: ranks talk through torch.distributed."""


class ModelConfig(_Keys):
    """The model of a pipeline or a deployment."""

    model_name_or_path: str = Field("")
    """A folder as transformers writes it, or the name of a model of the Hugging Face hub. It must be given."""
    tokenizer: Any = None
    """A name or a folder; for a pipeline also an object with ``encode`` and ``decode``. None: the model's own."""
    task: TaskType | None = TaskType.TEXT_GENERATION
    tensor_parallel: int = Field(default_factory=lambda: read_env().world_size, ge=1, le=_LARGEST_COUNT)
    """Ranks that hold one model together. The default is WORLD_SIZE, or 1."""
    quantization_mode: str | None = None
    """How weights are stored. None: in the model's dtype; "int8": 8 bits."""
    inference_engine_config: RaggedInferenceEngineConfig = Field(default_factory=RaggedInferenceEngineConfig)
    """Limits of the ragged engine. Its ``tp_size`` and ``quantization_mode`` follow the two keys above."""
    torch_dist_port: int = _ports(29500)
    """MASTER_PORT of the first replica's ranks; each further replica uses a port 100 higher. If it is not given, any
    free port serves, so that two deployments do not want the same one."""
    zmq_port_number: int = _ports(25555)
    """Read, without an effect: ranks talk through torch.distributed."""
    replica_num: int = _count(1, 1)
    """Replicas of the model in a deployment."""
    replica_configs: list[ReplicaConfig] = Field([])
    """The place of each replica; it prevails over ``device_map``."""
    device_map: Literal["auto"] | dict[str, list[list[int]]] = "auto"
    """Devices of the ranks of each replica, by host. "auto": in order, if the host has devices. A device, a list of
    devices (one replica) or a list of such lists belongs to this host."""
    max_length: int | None = _count(None, 2)
    """Default of a request's ``max_length``. None: the limit of the model and the engine."""
    sync_debug: bool = False
    """True is refused: nothing waits for the device within a step."""
    profile_model_time: bool = False
    """True is refused: a profiler of torch has more to say."""

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if isinstance(name := data.get("model_name_or_path"), os.PathLike):
            data["model_name_or_path"] = os.fspath(name)
        if "device_map" in data:
            data["device_map"] = _by_host(data["device_map"])
        if isinstance(task := data.get("task"), str) and task not in list(TaskType):
            raise FeatureError(
                f"is {task[:60]!r}",
                where=f"{type(self).__name__}.task",
                fix='write "text-generation"; deepspeed_c.init_inference runs other models',
            )
        super().__init__(strict, **data)

    @property
    def provider(self) -> ModelProvider:
        """The origin of the model's code."""
        return ModelProvider.HUGGING_FACE

    def _check(self) -> None:
        if not self.model_name_or_path.strip() or "\0" in self.model_name_or_path:
            raise ConfigError(
                f"is {self.model_name_or_path!r}",
                where=self._where("model_name_or_path"),
                fix="write the folder of a model, or its name",
            )
        if not self.tokenizer:
            setattr_unchecked(self, "tokenizer", self.model_name_or_path)
        elif not isinstance(self.tokenizer, str) and not _can_encode(self.tokenizer):
            raise ConfigError(
                f"is of {type(self.tokenizer).__name__}",
                where=self._where("tokenizer"),
                fix="give a name, a folder, or an object with the methods encode and decode",
            )
        setattr_unchecked(self, "task", TaskType.TEXT_GENERATION.value)
        if self.replica_configs and len(self.replica_configs) != self.replica_num:
            raise ConfigError(
                f"has {len(self.replica_configs)} entries, and replica_num is {self.replica_num}",
                where=self._where("replica_configs"),
                fix="describe each replica, or leave replica_configs out",
            )
        for name, fix in _NOT_HERE.items():
            if getattr(self, name):
                raise FeatureError("is true", where=self._where(name), fix=fix)
        self._check_devices()
        self._propagate()

    def _check_devices(self) -> None:
        if self.device_map == "auto":
            return
        devices = [ranks for replicas in self.device_map.values() for ranks in replicas]
        if len(devices) != self.replica_num:
            raise ConfigError(
                f"places {len(devices)} replicas, and replica_num is {self.replica_num}",
                where=self._where("device_map"),
                fix="write one list of devices for each replica",
            )
        for ranks in devices:
            if len(ranks) != self.tensor_parallel or min(ranks) < 0:
                raise ConfigError(
                    f"gives a replica the devices {ranks}, and tensor_parallel is {self.tensor_parallel}",
                    where=self._where("device_map"),
                    fix="write one number >= 0 for each rank of a replica",
                )

    def _propagate(self) -> None:
        """Make the keys that this class and ``inference_engine_config`` share equal, in a copy of the caller's object.

        Raises:
            ConfigError: both are given, with different values.
            FeatureError: the quantization mode is not here.
        """
        engine = self.inference_engine_config
        size = self._shared("tensor_parallel", engine.tensor_parallel, "tp_size")
        mode = self._shared("quantization_mode", engine.quantization, "quantization_mode")
        if mode not in (None, "int8"):
            raise FeatureError(
                f"{mode[:60]!r} is no format of weights here",
                where=self._where("quantization_mode"),
                fix='write "int8" (8 bits a weight), or leave it out',
            )
        sections = {
            "tensor_parallel": engine.tensor_parallel.model_copy(update={"tp_size": size}),
            "quantization": engine.quantization.model_copy(update={"quantization_mode": mode}),
        }
        setattr_unchecked(self, "inference_engine_config", engine.model_copy(update=sections))
        setattr_unchecked(self, "tensor_parallel", size)
        setattr_unchecked(self, "quantization_mode", mode)

    def _shared(self, name: str, section: DeepSpeedConfigModel, inner: str) -> Any:
        outside, inside = getattr(self, name), getattr(section, inner)
        if inner not in section.model_fields_set or inside == outside:
            return outside
        if name in self.model_fields_set:
            raise ConfigError(
                f"is {outside!r}, and inference_engine_config has {inner} {inside!r}",
                where=self._where(name),
                fix="write one of the two",
            )
        return inside


class MIIConfig(_Keys):
    """A deployment."""

    deployment_name: str = ""
    """Clients find the deployment by this name. Default: the model's name, with ``-mii-deployment`` behind it."""
    deployment_type: DeploymentType = DeploymentType.LOCAL
    model_conf: ModelConfig = Field(alias="model_config")
    port_number: int = _ports(50050)
    """Read, without an effect: clients reach the deployment by a socket that is a file of this user."""
    enable_restful_api: bool = False
    """Answer HTTP too."""
    restful_api_host: str = "localhost"
    """The address of the HTTP server."""
    restful_api_port: int = _ports(51080)
    """The port of the HTTP server; 0: any free port."""
    restful_processes: int = _count(32, 1)
    """Requests by HTTP that are answered at one time."""
    hostfile: str = "/job/hostfile"
    """Read, without an effect: all replicas are on this host."""
    version: int = 1
    """Read, without an effect: a value of Azure's deployments."""
    instance_type: str = "Standard_NC12s_v3"
    """Read, without an effect: a value of Azure's deployments."""

    def _check(self) -> None:
        if self.deployment_type != DeploymentType.LOCAL:
            azure = self.deployment_type == DeploymentType.AML
            raise FeatureError(
                f"is {self.deployment_type!r}",
                where=self._where("deployment_type"),
                fix=(
                    'write "local", in a container of Azure Machine Learning too'
                    if azure
                    else "call mii.pipeline, which needs no deployment"
                ),
            )
        model = self.model_conf
        if not self.deployment_name:
            setattr_unchecked(self, "deployment_name", generate_deployment_name(model.model_name_or_path))
        name = self.deployment_name
        if len(name) > _LONGEST_NAME or not name.isprintable() or not name.strip():
            raise ConfigError(
                f"is {name[:60]!r}, of {len(name)} characters",
                where=self._where("deployment_name"),
                fix=f"write at most {_LONGEST_NAME} characters that can be printed",
            )
        if not isinstance(model.tokenizer, str):
            raise FeatureError(
                f"is an object of {type(model.tokenizer).__name__}, which stays in this process",
                where="ModelConfig.tokenizer",
                fix="save it into a folder and give the folder, or use mii.pipeline",
            )
        hosts = {replica.hostname for replica in model.replica_configs}
        hosts.update(() if model.device_map == "auto" else model.device_map)
        if other := sorted(hosts - {"", "localhost", "127.0.0.1", socket.gethostname()}):
            raise FeatureError(
                f"places replicas on {', '.join(other)}",
                where="ModelConfig.replica_configs" if model.replica_configs else "ModelConfig.device_map",
                fix="write localhost; start one deployment on each host",
            )
        is_given = "torch_dist_port" in model.model_fields_set and not model.replica_configs
        last = model.torch_dist_port + _PORTS_OF_A_REPLICA * (model.replica_num - 1)
        if is_given and last > _LARGEST_PORT:
            raise ConfigError(
                f"is {model.torch_dist_port}, and the last of {model.replica_num} replicas would meet at {last}",
                where="ModelConfig.torch_dist_port",
                fix="choose a lower port, or write replica_configs",
            )


def generate_deployment_name(model_name_or_path: str) -> str:
    """The name of a deployment that its creator gave none: the model's folder or name and ``-mii-deployment``."""
    is_folder = os.path.exists(model_name_or_path)
    name = os.path.basename(os.path.abspath(model_name_or_path)) if is_folder else model_name_or_path
    return f"{name}-mii-deployment"


def split_arguments(
    model_name_or_path: str | os.PathLike[str],
    model_config: Mapping[str, Any] | ModelConfig | None,
    mii_config: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any],
) -> tuple[ModelConfig, MIIConfig | None]:
    """The configurations from the arguments of ``pipeline`` and ``serve``. No argument is changed.

    Args:
        model_name_or_path: the model; "" if ``model_config`` names it.
        model_config: keys of ``ModelConfig``, or such an object. None: ``mii_config["model_config"]``, if it is there.
        mii_config: keys of ``MIIConfig``; ``{}`` for a deployment with the defaults, None for a pipeline.
        kwargs: keys of ``ModelConfig``, for a deployment also of ``MIIConfig``.

    Returns:
        The configurations of the model and of the deployment. The second is None for a pipeline.

    Raises:
        UnknownArgument: an entry of ``kwargs``, or a key, that no class has.
        ConfigError: a value is wrong, or is given twice with different values.
        FeatureError: a value asks for something that is not here.
    """
    deployment = None if mii_config is None else dict(_mapping(mii_config, "mii_config"))
    nested = None if deployment is None else deployment.pop("model_config", deployment.pop("model_conf", None))
    model = {} if model_config is None else _given(model_config, "model_config")
    if nested is not None:
        _join(model, _given(nested, "mii_config.model_config"), "mii_config.model_config")
    names = _names(ModelConfig)
    own = {name: value for name, value in kwargs.items() if name in names}
    if os.fspath(model_name_or_path):
        own["model_name_or_path"] = model_name_or_path
    _join(model, own, "model_config")
    rest = {name: value for name, value in kwargs.items() if name not in names}
    known = names if deployment is None else names | (_names(MIIConfig) - {"model_conf", "model_config"})
    if unknown := sorted(rest.keys() - known):
        raise _unknown(unknown, "mii.pipeline" if deployment is None else "mii.serve", sorted(known))
    if deployment is None:
        return ModelConfig(**model), None
    _join(deployment, rest, "mii_config")
    whole = MIIConfig(**deployment, model_config=ModelConfig(**model))
    return whole.model_conf, whole


def _names(kind: type[DeepSpeedConfigModel]) -> set[str]:
    return {name for key, field in kind.model_fields.items() for name in (key, field.alias) if name}


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"is of {type(value).__name__}", where=where, fix="give a dictionary of keys")
    return value


def _given(value: Any, where: str) -> dict[str, Any]:
    """The keys that a caller has written."""
    if isinstance(value, ModelConfig):
        return {name: getattr(value, name) for name in value.model_fields_set}
    return dict(_mapping(value, where))


def _join(into: dict[str, Any], more: Mapping[str, Any], where: str) -> None:
    """Add ``more`` to ``into``. A key of both must have one value."""
    for name, value in more.items():
        present = into.get(name, value)
        paths = [os.fspath(each) if isinstance(each, os.PathLike) else each for each in (present, value)]
        if paths[0] is not paths[1] and paths[0] != paths[1]:
            raise ConfigError(
                f"is {present!r}, and the argument {name} is {value!r}",
                where=f"{where}.{name}",
                fix="give the value once",
            )
        into[name] = present


def _by_host(device_map: Any) -> Any:
    if isinstance(device_map, int) and not isinstance(device_map, bool):
        return {"localhost": [[device_map]]}
    if isinstance(device_map, (list, tuple)) and device_map:
        return {"localhost": [device_map] if isinstance(device_map[0], int) else device_map}
    return device_map


def _can_encode(tokenizer: Any) -> bool:
    return all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode"))
