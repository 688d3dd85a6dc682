"""``--generation-config``: the file is read as transformers writes it, wrong values end the start, requests override."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_c.errors import ConfigError
from deepspeed_c.ops.sample import Rules
from deepspeed_c.server.defaults import default_rules
from deepspeed_c.server.fields import Bounds, read_completion

transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
running = pytest.importorskip("tests.deepspeed_c.server.running")
cli = pytest.importorskip("deepspeed_c.server.cli")
limits = pytest.importorskip("deepspeed_c.server.limits")

NAME = "generation_config.json"
# The likeliest token, and no other one.
NARROW = {"top_k": 1}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return running.chat_folder(tmp_path_factory.mktemp("model"))


def test_values_are_those_of_transformers(tmp_path: Path) -> None:
    written = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05, eos_token_id=3
    )
    written.save_pretrained(tmp_path)
    read = transformers.GenerationConfig.from_pretrained(tmp_path)
    expected = Rules(read.temperature, read.top_k, read.top_p, read.min_p, read.repetition_penalty)
    assert default_rules("auto", str(tmp_path)) == default_rules(str(tmp_path), "elsewhere") == expected
    assert expected == Rules(0.6, 20, 0.95, 0.05, 1.05)
    assert default_rules("vllm", str(tmp_path)) == Rules()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", Rules()),
        ('{"temperature": null, "eos_token_id": [1, 2], "do_sample": false, "max_length": 3}', Rules()),
        ('{"top_k": -1}', Rules()),
        ('{"temperature": 0}', Rules(temperature=0.0)),
        ('{"temperature": 2, "top_k": 2147483647}', Rules(temperature=2.0, top_k=2**31 - 1)),
    ],
)
def test_a_file_may_name_some_of_them(tmp_path: Path, text: str, expected: Rules) -> None:
    (tmp_path / NAME).write_text(text)
    assert default_rules("auto", str(tmp_path)) == expected


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert default_rules("auto", str(tmp_path)) == Rules()
    with pytest.raises(ConfigError, match="cannot be read"):
        default_rules(str(tmp_path), str(tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"temperature": -0.1}', "temperature .* is -0.1"),
        ('{"temperature": 2.5}', "temperature .* is 2.5"),
        ('{"temperature": "hot"}', "temperature .* is a string"),
        ('{"temperature": NaN}', "temperature .* is nan"),
        ('{"temperature": Infinity}', "temperature .* is inf"),
        ('{"top_p": 0}', "top_p .* is 0"),
        ('{"top_p": true}', "top_p .* is true or false"),
        ('{"top_k": 1.5}', "top_k .* is a number"),
        ('{"top_k": -2}', "top_k .* is -2"),
        ('{"min_p": 1.1}', "min_p .* is 1.1"),
        ('{"repetition_penalty": 0}', "repetition_penalty .* is 0"),
        ('{"repetition_penalty": [1]}', "repetition_penalty .* is a list"),
        ("[]", "has no object"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_wrong_file_ends_the_start(model_folder: str, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        cli.main([model_folder, "--generation-config", str(tmp_path)])
    assert error.value.where == f"--generation-config {tmp_path}" and "--generation-config vllm" in error.value.fix


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        default_rules("auto", str(tmp_path))


def test_a_request_overrides_each_of_them() -> None:
    own = Rules(0.6, 20, 0.95, 0.05, 1.05)
    bounds = Bounds(n_words=300, max_model_len=64, rules=own)

    def rules(**fields: Any) -> Rules:
        return read_completion({"prompt": "a", **fields}, bounds).sampling.rules

    assert rules() == rules(temperature=None, top_k=None) == own
    for name, value in (("temperature", 1), ("top_k", 7), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1)):
        assert rules(**{name: value}) == own._replace(**{name: value})
    assert rules(top_k=0) == rules(top_k=-1) == own._replace(top_k=0)


@pytest.fixture(scope="module")
def narrow(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server whose defaults allow the likeliest token alone."""
    folder = tmp_path_factory.mktemp("defaults")
    (folder / NAME).write_text(json.dumps(NARROW))
    settings = cli._settings(cli._parser().parse_args([model_folder, "--generation-config", str(folder)]))
    with running.served(model_folder, settings) as found:
        yield found


def test_answers_have_the_defaults(narrow: Any) -> None:
    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:

        def text(**fields: Any) -> str:
            extra = {name: fields.pop(name) for name in [*fields] if name == "top_k"}
            found = client.completions.create(
                model="tiny", prompt="def main", max_tokens=20, seed=1, extra_body=extra, **fields
            )
            return found.choices[0].text

        likeliest = text(temperature=0)
        assert text() == text(temperature=2) == likeliest
        assert text(temperature=2, top_k=0) != likeliest
        message = {"role": "user", "content": "def main"}
        chats = [
            client.chat.completions.create(model="tiny", messages=[message], max_tokens=20, seed=1, **fields)
            for fields in ({}, {"temperature": 0})
        ]
    assert chats[0].choices[0].message.content == chats[1].choices[0].message.content
