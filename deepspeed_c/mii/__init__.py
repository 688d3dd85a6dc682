"""Serving under MII's names: pipelines, deployments and their clients (docs/serving.md).

Each name is imported at its first use, so that ``import deepspeed_c.mii`` needs no torch.
"""

from __future__ import annotations

import importlib

from deepspeed_c._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Name -> the module that defines it.
PUBLIC_NAMES: dict[str, str] = {
    "pipeline": "deepspeed_c.mii.pipeline",
    "async_pipeline": "deepspeed_c.mii.pipeline",
    "MIIPipeline": "deepspeed_c.mii.pipeline",
    "MIIAsyncPipeline": "deepspeed_c.mii.pipeline",
    "serve": "deepspeed_c.mii.deployment",
    "client": "deepspeed_c.mii.deployment",
    "MIIClient": "deepspeed_c.mii.deployment",
    "GenerateParamsConfig": "deepspeed_c.mii.config",
    "MIIConfig": "deepspeed_c.mii.config",
    "ModelConfig": "deepspeed_c.mii.config",
    "ReplicaConfig": "deepspeed_c.mii.config",
    "Response": "deepspeed_c.mii.data",
    "DeploymentType": "deepspeed_c.mii.constants",
    "GenerationFinishReason": "deepspeed_c.mii.constants",
    "ModelProvider": "deepspeed_c.mii.constants",
    "TaskType": "deepspeed_c.mii.constants",
    "DeploymentNotFoundError": "deepspeed_c.mii.errors",
    "UnknownArgument": "deepspeed_c.mii.errors",
    "get_supported_models": "deepspeed_c.mii.models",
}

__all__ = ["__version__", *PUBLIC_NAMES]  # noqa: PLE0604  (they are strings)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(PUBLIC_NAMES[name]), name)
    globals()[name] = value
    return value
