"""Plain values that DeepSpeed's modules hold under names of their own."""

from __future__ import annotations

from deepspeed_c.compat.alias.version import API_VERSION
from deepspeed_c.env import read_env

# File of NAME=VALUE lines, written by accelerate. A launch over several hosts passes these variables to its processes.
DEEPSPEED_ENVIRONMENT_NAME = read_env().environment_file or ".deepspeed_env"

VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = (int(part) for part in API_VERSION.split("+")[0].split("."))

# The values of a DeepSpeed release that was not built from a checkout.
GIT_HASH = GIT_BRANCH = "unknown"

# The section of the configuration.
ZERO_OPTIMIZATION = "zero_optimization"
