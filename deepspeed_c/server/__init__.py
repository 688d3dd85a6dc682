"""An HTTP server with the routes of OpenAI's API, over the ragged engine (docs/serving.md)."""

from importlib.util import find_spec

from deepspeed_c.errors import MissingPackageError

for _name in ("fastapi", "uvicorn", "prometheus_client", "transformers"):
    if find_spec(_name) is None:
        raise MissingPackageError(
            f"the package {_name} is not installed",
            where="deepspeed_c.server",
            fix='pip install "deepspeed-c[serve]"',
            package=_name,
        )
