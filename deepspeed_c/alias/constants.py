"""Plain values that DeepSpeed's modules hold under these names."""

from __future__ import annotations

import os

from deepspeed_c.alias.version import API_VERSION

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "VERSION_MAJOR", "VERSION_MINOR", "VERSION_PATCH"]

# File of NAME=VALUE lines that a launch over several hosts hands on; accelerate writes it.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")

VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = (int(part) for part in API_VERSION.split("+")[0].split("."))
