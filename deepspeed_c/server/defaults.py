"""Defaults of requests, from the file ``generation_config.json`` that transformers writes beside a model."""

from __future__ import annotations

import json
from pathlib import Path

from deepspeed_c.errors import ConfigError
from deepspeed_c.ops.sample import Rules
from deepspeed_c.server.errors import RequestRefused
from deepspeed_c.server.fields import read_rules

__all__ = ["FIELDS", "default_rules"]

FIELDS = Rules._fields
"""Keys of the file that are read, under the names of requests."""
_FILE = "generation_config.json"
_OPTION = "--generation-config"


def default_rules(source: str, model_folder: str) -> Rules:
    """The rules of requests that do not give their own.

    Args:
        source: vLLM's values of ``--generation-config``. "auto": the file of the model's folder, if it is there;
            "vllm": no file; else a folder with the file. ``do_sample`` is not read, as in vLLM: clients of OpenAI's
            API expect draws.

    Raises ConfigError for a file that is not there, is no JSON or has a value that no request may have.
    """
    if source == "vllm":
        return Rules()
    path = Path(model_folder if source == "auto" else source) / _FILE
    if source == "auto" and not path.exists():
        return Rules()
    where, fix = f"{_OPTION} {source}", f"correct {path}, or write {_OPTION} vllm, which reads no file"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", where=where, fix=fix) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has no object", where=where, fix=fix)
    try:
        return read_rules({name: found[name] for name in FIELDS if name in found})
    except RequestRefused as error:
        what = f"{error.param} of {path} {error.what}; {error.fix}"
        raise ConfigError(what, where=where, fix=fix) from error
