"""Plain values that DeepSpeed's modules hold under names of their own."""

from __future__ import annotations

import os

from deepspeed_c.compat.alias.version import API_VERSION

# File of NAME=VALUE lines, written by accelerate. A launch over several hosts passes these variables to its processes.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")

VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = (int(part) for part in API_VERSION.split("+")[0].split("."))

# The values of a DeepSpeed release that was not built from a checkout.
GIT_HASH = GIT_BRANCH = "unknown"

# The section of the configuration.
ZERO_OPTIMIZATION = "zero_optimization"
