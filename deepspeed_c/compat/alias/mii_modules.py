"""MII's module paths and names, and their modules and objects here. modules.py explains the tables."""

from __future__ import annotations

__all__ = ["ABSENT", "MODULES", "NAMES"]

MODULES: dict[str, str] = {
    "mii": "deepspeed_c.mii",
    "mii.config": "deepspeed_c.mii.config",
    "mii.constants": "deepspeed_c.mii.constants",
    "mii.errors": "deepspeed_c.mii.errors",
    "mii.modeling.tokenizers": "deepspeed_c.mii.tokenizers",
}

_CLIENT = {"MIIClient": "deepspeed_c.mii.deployment:MIIClient"}
_PIPELINES = {name: f"deepspeed_c.mii.pipeline:{name}" for name in ("MIIAsyncPipeline", "MIIPipeline")}
_RESPONSE = {"Response": "deepspeed_c.mii.data:Response"}

NAMES: dict[str, dict[str, str]] = {
    "mii.api": {
        **{name: f"deepspeed_c.mii.pipeline:{name}" for name in ("async_pipeline", "pipeline")},
        **{name: f"deepspeed_c.mii.deployment:{name}" for name in ("client", "serve")},
    },
    "mii.backend": _CLIENT,
    "mii.backend.client": _CLIENT,
    "mii.batching": _PIPELINES,
    "mii.batching.data_classes": _RESPONSE,
    "mii.batching.ragged_batching": {**_PIPELINES, **_RESPONSE},
    "mii.entrypoints.openai_api_server": {"main": "deepspeed_c.server.cli_of_mii:main"},
    "mii.legacy.utils": {"is_aml": "deepspeed_c.compat.probes:no"},
    "mii.logging": {"logger": "deepspeed_c.logging:logger"},
    "mii.utils": {
        "generate_deployment_name": "deepspeed_c.mii.config:generate_deployment_name",
        "is_aml": "deepspeed_c.compat.probes:no",
    },
    "mii.version": {"__version__": "deepspeed_c.compat.alias.version:MII_VERSION"},
}

_AZURE = "deploy a container that calls mii.serve; no files for Azure Machine Learning are written here"
_COMMAND = (
    "python -m mii.entrypoints.openai_api_server and mii.serve(..., enable_restful_api=True) answer HTTP requests"
)
_INNER = "mii.pipeline, mii.serve and mii.client reach what this part of MII did"
_DEPLOY = "use mii.serve(model_name_or_path, ...)"
_HANDLE = "use mii.client(deployment_name)"
_TERMINATE = "use mii.client(deployment_name).terminate_server()"
_SERVER = "mii.serve starts the processes of a deployment, and client.terminate_server ends them"
_LEGACY = "use mii.pipeline, or mii.serve and mii.client, for text; deepspeed_c.init_inference runs other models"

ABSENT: dict[str, str] = {
    "mii.MIIServer": _SERVER,
    "mii.aml_output_path": _AZURE,
    "mii.deploy": _DEPLOY,
    "mii.mii_query_handle": _HANDLE,
    "mii.terminate": _TERMINATE,
    "mii.aml_related": _AZURE,
    "mii.api": _INNER,
    "mii.backend": _SERVER,
    "mii.batching": _INNER,
    "mii.batching.generation": "mii.config.GenerateParamsConfig has keys for the choice of tokens and the end of a text",
    "mii.config": "mii.client finds a deployment by its name; client.mii_config is its configuration",
    "mii.entrypoints": _COMMAND,
    "mii.grpc_related": "client and server send JSON through a socket that is a file; mii.client reaches it",
    "mii.launch": "mii.serve starts the processes of a deployment",
    "mii.legacy": _LEGACY,
    "mii.legacy.aml_related": _AZURE,
    "mii.legacy.deployment": _DEPLOY,
    "mii.legacy.client": _HANDLE,
    "mii.legacy.server": _SERVER,
    "mii.legacy.terminate": _TERMINATE,
    "mii.logging": "use logging of Python",
    "mii.modeling": "deepspeed.inference.v2.build_hf_engine builds the engine of a model",
    "mii.score": "mii.serve keeps its configuration itself; mii.client(deployment_name).mii_config is a copy",
    "mii.utils": _INNER,
}
