"""Plain values that DeepSpeed's modules hold under names of their own."""

from __future__ import annotations

import os

from deepspeed_c.compat.alias.version import API_VERSION

# File of NAME=VALUE lines that a launch over several hosts hands on; accelerate writes it.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")

VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = (int(part) for part in API_VERSION.split("+")[0].split("."))

# As in a release of DeepSpeed's that was not built from a checkout.
GIT_HASH = GIT_BRANCH = "unknown"

# The section of the configuration.
ZERO_OPTIMIZATION = "zero_optimization"
