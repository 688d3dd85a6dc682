"""Responses as messages, and the families that generate."""

from __future__ import annotations

import json
import pickle
import sys

import pytest

from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.mii import GenerationFinishReason, Response, TaskType, get_supported_models
from tests.waits import ran


def test_response_is_its_text_and_survives_json():
    response = Response("día\n", 3, 4, GenerationFinishReason.STOP)
    assert str(response) == repr(response) == "día\n"
    assert f"{[response, response]}" == "[día\n, día\n]"
    message = json.loads(json.dumps(response.to_msg_dict()))
    assert message == {"generated_text": "día\n", "prompt_length": 3, "generated_length": 4, "finish_reason": "stop"}
    again = Response.from_msg_dict(message)
    assert again == response and again.finish_reason is GenerationFinishReason.STOP
    assert pickle.loads(pickle.dumps(response)) == response
    assert response.finish_reason == "stop" and response != Response("día\n", 3, 5, GenerationFinishReason.STOP)


GOOD = {"generated_text": "a", "prompt_length": 1, "generated_length": 0, "finish_reason": "none"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"more": 1}, "has the fields"),
        ({"generated_text": None}, "a text of NoneType"),
        ({"prompt_length": True}, "two numbers >= 0"),
        ({"generated_length": -1}, "two numbers >= 0"),
        ({"finish_reason": "eos"}, "one of stop, length, none"),
        ({"finish_reason": []}, "one of stop, length, none"),
    ],
)
def test_messages_that_are_no_response(change, text):
    with pytest.raises(ConfigError, match="Response") as error:
        Response.from_msg_dict({**GOOD, **change})
    assert text in str(error.value)
    with pytest.raises(ConfigError, match="has the fields"):
        Response.from_msg_dict({key: GOOD[key] for key in list(GOOD)[1:]})
    assert Response.from_msg_dict(GOOD).generated_text == "a"


def test_families_that_generate():
    found = get_supported_models(TaskType.TEXT_GENERATION)
    assert found == get_supported_models("text-generation") == sorted(found)
    assert {"llama", "qwen3", "mixtral", "falcon", "opt", "phi"} <= set(found)
    assert not {"bert", "clip", "t5", "whisper"} & set(found)
    with pytest.raises(FeatureError, match="init_inference"):
        get_supported_models("text-to-image")


def test_configurations_load_neither_torch_nor_transformers():
    code = """
import sys
import deepspeed_c.mii as mii
mii.MIIConfig(model_config={"model_name_or_path": "m"})
mii.GenerateParamsConfig(prompt_length=1)
mii.Response("", 0, 0, "none")
print(sorted({"torch", "transformers", "numpy", "pydantic", "asyncio"} & sys.modules.keys()))
"""
    done = ran([sys.executable, "-c", code], timeout=300)
    assert done.stdout == "[]\n", done
