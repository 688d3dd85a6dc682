"""MII's configuration classes: keys and defaults, the error for each mistake, and the reading of arguments."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_c.config.ragged import RaggedInferenceEngineConfig
from deepspeed_c.errors import ConfigError, DeepSpeedCError, FeatureError
from deepspeed_c.mii import GenerateParamsConfig, MIIConfig, ModelConfig, ReplicaConfig, UnknownArgument
from deepspeed_c.mii.config import generate_deployment_name, split_arguments
from deepspeed_c.mii.constants import DeploymentType, ModelProvider, TaskType

# The keys of MII 0.3.3 and their defaults, as its documentation lists them.
GENERATE = {
    "max_length": 1024, "min_new_tokens": 0, "stream": False, "ignore_eos": False, "return_full_text": False,
    "do_sample": True, "top_p": 0.9, "top_k": None, "temperature": None, "stop": [],
}  # fmt: skip
REPLICA = {"hostname": "", "tensor_parallel_ports": [], "torch_dist_port": None, "gpu_indices": [], "zmq_port": None}
MODEL = {
    "task": "text-generation", "tensor_parallel": 1, "quantization_mode": None, "torch_dist_port": 29500,
    "zmq_port_number": 25555, "replica_num": 1, "replica_configs": [], "device_map": "auto", "max_length": None,
    "sync_debug": False, "profile_model_time": False,
}  # fmt: skip
DEPLOYMENT = {
    "deployment_type": "local", "port_number": 50050, "enable_restful_api": False, "restful_api_host": "localhost",
    "restful_api_port": 51080, "restful_processes": 32, "hostfile": "/job/hostfile", "version": 1,
    "instance_type": "Standard_NC12s_v3",
}  # fmt: skip


def generate(**data: Any) -> GenerateParamsConfig:
    return GenerateParamsConfig(**{"prompt_length": 5, **data})


def model(**data: Any) -> ModelConfig:
    return ModelConfig(**{"model_name_or_path": "org/model", **data})


def deployment(**data: Any) -> MIIConfig:
    return MIIConfig(**{"model_config": {"model_name_or_path": "org/model"}, **data})


@pytest.mark.parametrize(
    ("make", "defaults", "more"),
    [
        (generate, GENERATE, {"prompt_length": 5, "max_new_tokens": 1019, "seed": None}),
        (ReplicaConfig, REPLICA, {}),
        (model, MODEL, {"model_name_or_path": "org/model", "tokenizer": "org/model"}),
        (deployment, DEPLOYMENT, {"deployment_name": "org/model-mii-deployment"}),
    ],
)
def test_keys_and_defaults_are_those_of_mii(make, defaults, more, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = make()
    found = config.model_dump(exclude={"inference_engine_config", "model_conf"})
    assert found == {**defaults, **more}


def test_tensor_parallel_defaults_to_the_ranks_of_the_job(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = model()
    assert (config.tensor_parallel, config.inference_engine_config.tensor_parallel.tp_size) == (3, 3)
    assert model(tensor_parallel=1).inference_engine_config.tensor_parallel.tp_size == 1


@pytest.mark.parametrize(
    ("data", "field", "text"),
    [
        ({"max_length": 5}, "max_length", "is 5, and the prompt has 5 tokens"),
        ({"max_length": 4}, "max_length", "is 4, and the prompt has 5 tokens"),
        ({"prompt_length": 1024}, "max_length", "is 1024, and the prompt has 1024 tokens"),
        ({"max_length": -1}, "max_length", "number >= 1"),
        ({"max_length": 2**31}, "max_length", "number <= 2147483647"),
        ({"max_length": 10**5000}, "max_length", "an integer of 16610 bits"),
        ({"max_length": 6.5}, "max_length", "a whole number"),
        ({"max_length": math.inf}, "max_length", "a whole number"),
        ({"max_length": None}, "max_length", "a whole number"),
        ({"max_length": "auto"}, "max_length", "a whole number"),
        ({"prompt_length": 0}, "prompt_length", "number >= 1"),
        ({"max_new_tokens": 0}, "max_new_tokens", "number >= 1"),
        ({"max_new_tokens": -3}, "max_new_tokens", "number >= 1"),
        ({"min_new_tokens": -1}, "min_new_tokens", "number >= 0"),
        ({"temperature": math.nan}, "temperature", "is nan"),
        ({"temperature": math.inf}, "temperature", "is inf"),
        ({"temperature": -math.inf}, "temperature", "number > 0"),
        ({"temperature": "nan"}, "temperature", "is 'nan'"),
        ({"temperature": 0}, "temperature", "number > 0"),
        ({"temperature": -1.5}, "temperature", "number > 0"),
        ({"temperature": 10**400}, "temperature", "a number"),
        ({"temperature": [1.0]}, "temperature", "a number"),
        ({"top_p": 0}, "top_p", "number > 0"),
        ({"top_p": -0.1}, "top_p", "number > 0"),
        ({"top_p": 1.0001}, "top_p", "number <= 1"),
        ({"top_p": math.nan}, "top_p", "is nan"),
        ({"top_p": None}, "top_p", "a number"),
        ({"top_k": 0}, "top_k", "number >= 1"),
        ({"top_k": -1}, "top_k", "number >= 1"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": 3}, "stop", "a list"),
        ({"stop": ["a", 3]}, "stop[1]", "text"),
        ({"stream": 2}, "stream", "true or false"),
        ({"seed": -1}, "seed", "number >= 0"),
        ({"seed": 2**63}, "seed", "number <= 9223372036854775807"),
    ],
)
def test_bad_values_of_a_request_name_the_field_and_the_limit(data, field, text):
    good = generate(temperature=0.7, seed=3)
    with pytest.raises(ConfigError) as error:
        generate(**data)
    assert error.value.where == f"GenerateParamsConfig.{field}", str(error.value)[:300]
    assert text in str(error.value) and error.value.fix, str(error.value)[:300]
    assert len(str(error.value)) < 500
    assert generate(temperature=0.7, seed=3) == good


@pytest.mark.parametrize("length", [1, 1023])
def test_both_limits_of_new_tokens_are_kept(length):
    assert generate(prompt_length=length).max_new_tokens == 1024 - length
    config = generate(prompt_length=length, max_new_tokens=7, max_length=length + 1)
    assert (config.max_new_tokens, config.max_length) == (7, length + 1)
    assert generate(prompt_length=length, max_new_tokens=7, min_new_tokens=9).min_new_tokens == 9


def test_stop_is_a_sorted_list_of_strings():
    assert generate(stop="end").stop == ["end"]
    assert generate(stop="auto").stop == ["auto"]
    given = ["b", "a", "é"]
    assert generate(stop=given).stop == ["a", "b", "é"] and given == ["b", "a", "é"]


@pytest.mark.parametrize(
    ("make", "key", "near"),
    [
        (generate, "temprature", "temperature"),
        (generate, "max_tokens", "the names are prompt_length"),
        (model, "tensor_paralel", "tensor_parallel"),
        (deployment, "restful_port", "restful_api_port"),
        (deployment, "deploymnt_name", "deployment_name"),
        (ReplicaConfig, "host_name", "hostname"),
    ],
)
def test_unknown_fields_get_the_nearest_name(make, key, near):
    with pytest.raises(UnknownArgument) as error:
        make(**{key: 1})
    assert key in error.value.what and near in error.value.fix


def test_many_long_unknown_fields_make_a_short_error():
    with pytest.raises(UnknownArgument) as error:
        generate(**{f"{'x' * 10_000}{i}": i for i in range(1000)})
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("data", "kind", "field", "text"),
    [
        ({"model_name_or_path": ""}, ConfigError, "model_name_or_path", "the folder of a model"),
        ({"model_name_or_path": "  "}, ConfigError, "model_name_or_path", "the folder of a model"),
        ({"model_name_or_path": "a\0b"}, ConfigError, "model_name_or_path", "the folder of a model"),
        ({"model_name_or_path": None}, ConfigError, "model_name_or_path", "text"),
        ({"task": "text2img"}, FeatureError, "task", "init_inference"),
        ({"tokenizer": 3}, ConfigError, "tokenizer", "encode and decode"),
        ({"tensor_parallel": 0}, ConfigError, "tensor_parallel", "number >= 1"),
        ({"tensor_parallel": -2}, ConfigError, "tensor_parallel", "number >= 1"),
        ({"quantization_mode": "wf6af16"}, FeatureError, "quantization_mode", "int8"),
        ({"quantization_mode": "int4"}, FeatureError, "quantization_mode", "int8"),
        ({"replica_num": 0}, ConfigError, "replica_num", "number >= 1"),
        ({"torch_dist_port": 65536}, ConfigError, "torch_dist_port", "number <= 65535"),
        ({"torch_dist_port": -1}, ConfigError, "torch_dist_port", "number >= 0"),
        ({"max_length": 1}, ConfigError, "max_length", "number >= 2"),
        ({"max_length": -5}, ConfigError, "max_length", "number >= 2"),
        ({"replica_configs": [{}, {}]}, ConfigError, "replica_configs", "replica_num is 1"),
        ({"device_map": []}, ConfigError, "device_map", "'auto'"),
        ({"device_map": [[0], [1]]}, ConfigError, "device_map", "replica_num is 1"),
        ({"device_map": [0, 1], "tensor_parallel": 1}, ConfigError, "device_map", "tensor_parallel is 1"),
        ({"device_map": [-1], "tensor_parallel": 1}, ConfigError, "device_map", "number >= 0"),
        ({"device_map": [[]], "tensor_parallel": 1}, ConfigError, "device_map", "one number >= 0"),
        ({"sync_debug": True}, FeatureError, "sync_debug", "CUDA_LAUNCH_BLOCKING"),
        ({"profile_model_time": "yes"}, FeatureError, "profile_model_time", "torch.profiler"),
        ({"inference_engine_config": 3}, ConfigError, "inference_engine_config", "dictionary"),
    ],
)
def test_bad_values_of_a_model_name_the_field(data, kind, field, text, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(kind) as error:
        model(**data)
    assert f"ModelConfig.{field}" in error.value.where and text in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        ({"deployment_type": "aml"}, FeatureError, "Azure"),
        ({"deployment_type": DeploymentType.AML}, FeatureError, "Azure"),
        ({"deployment_type": "non-persistent"}, FeatureError, "mii.pipeline"),
        ({"deployment_type": "amll"}, ConfigError, "'local'"),
        ({"deployment_name": "a\nb"}, ConfigError, "printed"),
        ({"deployment_name": " "}, ConfigError, "printed"),
        ({"deployment_name": "x" * 201}, ConfigError, "201 characters"),
        ({"port_number": 70000}, ConfigError, "number <= 65535"),
        ({"restful_api_port": -1}, ConfigError, "number >= 0"),
        ({"restful_processes": 0}, ConfigError, "number >= 1"),
        ({"model_config": None}, ConfigError, "model_config"),
        ({"model_config": {"model_name_or_path": ""}}, ConfigError, "model_name_or_path"),
        ({"model_config": {"model_name_or_path": "m", "device_map": {"far": [[0]]}}}, FeatureError, "far"),
        ({"model_config": {"model_name_or_path": "m", "replica_configs": [{"hostname": "far"}]}}, FeatureError, "far"),
        ({"model_config": {"model_name_or_path": "m", "torch_dist_port": 65500, "replica_num": 2}}, ConfigError, "65600"),
        ({"model_config": {"model_name_or_path": "m", "replica_nun": 2}}, UnknownArgument, "replica_num"),
    ],
)  # fmt: skip
def test_bad_values_of_a_deployment(data, kind, text, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(kind, match=text) as error:
        deployment(**data)
    assert error.value.fix


def test_tokenizer_that_is_an_object_serves_a_pipeline_and_no_deployment():
    tokenizer = SimpleNamespace(encode=lambda text: [], decode=lambda tokens: "")
    config = model(tokenizer=tokenizer)
    assert config.tokenizer is tokenizer
    with pytest.raises(FeatureError, match="stays in this process"):
        MIIConfig(model_config=config)


def test_shared_keys_follow_the_engine_and_the_callers_object_stays_as_it_was():
    engine = RaggedInferenceEngineConfig(deterministic=True)
    config = model(tensor_parallel=2, quantization_mode="int8", inference_engine_config=engine)
    inner = config.inference_engine_config
    assert (inner.tensor_parallel.tp_size, inner.quantization.quantization_mode, inner.deterministic) == (
        2,
        "int8",
        True,
    )
    assert (engine.tensor_parallel.tp_size, engine.quantization.quantization_mode) == (1, None)
    given = {"tp": {"tp_size": 4}, "quantization": {"quantization_mode": "int8"}}
    config = model(inference_engine_config=given)
    assert (config.tensor_parallel, config.quantization_mode) == (4, "int8")
    with pytest.raises(ConfigError, match="tensor_parallel: is 2, and inference_engine_config has tp_size 4"):
        model(tensor_parallel=2, inference_engine_config=given)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (3, {"localhost": [[3]]}),
        ([3], {"localhost": [[3]]}),
        ([[3]], {"localhost": [[3]]}),
        ({"localhost": [[3]]}, {"localhost": [[3]]}),
        ("auto", "auto"),
    ],
)
def test_device_map_has_several_forms(given, read):
    assert model(device_map=given, tensor_parallel=1).device_map == read


def test_json_and_back_is_the_same():
    config = deployment(
        model_config={
            "model_name_or_path": "m", "tensor_parallel": 2, "quantization_mode": "int8", "device_map": [0, 1],
            "inference_engine_config": {"state_manager": {"max_context": 99}}, "max_length": 50,
        },
        deployment_name="d",
        enable_restful_api=True,
    )  # fmt: skip
    again = MIIConfig(**json.loads(config.model_dump_json()))
    assert again == config and again.model_dump() == config.model_dump()
    request = generate(stop=["b", "a"], seed=7, temperature=0.25)
    assert GenerateParamsConfig(**json.loads(request.model_dump_json())) == request


def test_name_of_a_deployment_without_one(tmp_path):
    assert generate_deployment_name("org/model") == "org/model-mii-deployment"
    folder = tmp_path / "my model"
    folder.mkdir()
    for path in (str(folder), f"{folder}/"):
        assert generate_deployment_name(path) == "my model-mii-deployment"
    assert MIIConfig(model_config={"model_name_or_path": folder}).deployment_name == "my model-mii-deployment"


# -- arguments ----------------------------------------------------------------------------------------------------------


def test_arguments_of_a_pipeline():
    given = {"tensor_parallel": 2}
    config, none = split_arguments("m", given, None, {"max_length": 9, "tensor_parallel": 2})
    assert none is None and given == {"tensor_parallel": 2}
    assert (config.model_name_or_path, config.tensor_parallel, config.max_length) == ("m", 2, 9)
    assert split_arguments(Path("m"), None, None, {})[0].model_name_or_path == "m"
    assert split_arguments("", {"model_name_or_path": "m"}, None, {})[0].model_name_or_path == "m"
    assert split_arguments("", config, None, {})[0] == config
    assert split_arguments(Path("m"), {"model_name_or_path": "m"}, None, {})[0].model_name_or_path == "m"


def test_arguments_of_a_deployment():
    given = {"deployment_name": "d", "model_config": {"tensor_parallel": 2}}
    copy = json.loads(json.dumps(given))
    kwargs = {"max_length": 9, "restful_api_port": 0, "deployment_name": "d"}
    config, whole = split_arguments("m", None, given, kwargs)
    assert given == copy and config is whole.model_conf
    assert (config.model_name_or_path, config.tensor_parallel, config.max_length) == ("m", 2, 9)
    assert (whole.deployment_name, whole.restful_api_port) == ("d", 0)
    assert split_arguments("m", None, {}, {})[1].deployment_name == "m-mii-deployment"


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("m", {"model_name_or_path": "n"}, None, {}), ConfigError, "is 'n', and the argument model_name_or_path is 'm'"),
        (("m", {"max_length": 3}, None, {"max_length": 4}), ConfigError, "model_config.max_length: is 3"),
        (("m", None, {"version": 2}, {"version": 3}), ConfigError, "mii_config.version: is 2"),
        (("m", {"max_length": 3}, {"model_config": {"max_length": 4}}, {}), ConfigError, "max_length"),
        (("m", [], None, {}), ConfigError, "model_config: is of list"),
        (("m", None, "x", {}), ConfigError, "mii_config: is of str"),
        (("", None, None, {}), ConfigError, "model_name_or_path"),
        (("m", None, None, {"tensor_paralel": 2}), UnknownArgument, "mii.pipeline: tensor_paralel.*\n.*tensor_parallel"),
        (("m", None, {}, {"deploymnt_name": 2}), UnknownArgument, "mii.serve: deploymnt_name.*\n.*deployment_name"),
        (("m", None, None, {"deployment_name": "d"}), UnknownArgument, "mii.serve takes it"),
        (("m", None, None, {"max_new_tokens": 3}), UnknownArgument, "to the call of the pipeline"),
        (("m", None, {}, {"do_sample": False}), UnknownArgument, "generate of the client"),
        (("m", {"max_new_tokens": 3}, None, {}), UnknownArgument, "to the call of the pipeline"),
        (("m", None, {}, {"a": 1, "b": 2}), UnknownArgument, "a, b: no such names"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, kind, text):
    with pytest.raises(kind, match=text):
        split_arguments(*arguments)


def test_words_are_those_of_mii():
    assert model().provider is ModelProvider.HUGGING_FACE and model(task=None).task == TaskType.TEXT_GENERATION
    assert deployment().deployment_type == DeploymentType.LOCAL


def test_any_value_of_json_is_read_or_is_a_typed_error():
    rng = random.Random(0)
    values = [
        None, True, False, 0, 1, -1, 2**31, 10**400, 0.5, 1e308, math.nan, math.inf, "", "auto", "1", "x" * 1000, [], [1],
        ["a"], [[0]], {}, {"a": 1}, [None], "\0", "\ud800", -0.0, 5e-324, {"localhost": [[0]]}, {"localhost": 0},
    ]  # fmt: skip
    n_read = 0
    for make in (generate, model, deployment, ReplicaConfig):
        kind = type(make())
        keys = [*kind.model_fields, "model_config", "unknown"]
        for _ in range(1500):
            data = {rng.choice(keys): rng.choice(values) for _ in range(rng.randint(1, 3))}
            try:
                make(**data)
                n_read += 1
            except DeepSpeedCError as error:
                assert error.what and error.where and error.fix and len(str(error)) < 1000, data
    assert n_read > 300, n_read
