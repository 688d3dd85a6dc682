"""``serve`` starts a deployment and waits until it answers; ``client`` finds one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from deepspeed_c.errors import DeepSpeedCError, LaunchError
from deepspeed_c.mii.config import MIIConfig, ModelConfig, generate_deployment_name, split_arguments
from deepspeed_c.mii.deployment import failures, frames, registry
from deepspeed_c.mii.deployment.client import MIIClient
from deepspeed_c.mii.deployment.logs import tail
from deepspeed_c.mii.deployment.placement import places_of

__all__ = ["client", "serve", "start"]

# A deployment that a rank of some launch starts is no part of that launch.
_OF_A_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DSC_RUN_TOKEN")
_LAUNCH_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


def serve(
    model_name_or_path: str | os.PathLike[str] = "",
    model_config: Mapping[str, Any] | ModelConfig | None = None,
    mii_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> MIIClient:
    """Starts a deployment of a model, waits until all replicas are ready, and returns a client.

    The deployment goes on after this process has ended, until ``terminate_server`` of any client.

    Args:
        model_name_or_path: a model's folder or name; "" if ``model_config`` names it.
        model_config: keys of ``ModelConfig``.
        mii_config: keys of ``MIIConfig``.
        kwargs: keys of both.

    Raises:
        UnknownArgument: no class has such a key.
        ConfigError: a value is wrong, or is given twice with different values.
        StateError: a deployment with this name runs.
        LaunchError: the deployment did not start; the text has the last lines of its log.
        DeepSpeedCError: the model cannot be loaded. The class is the one of the replica's error.
    """
    _, config = split_arguments(model_name_or_path, model_config, mii_config or {}, kwargs)
    assert config is not None  # because of the mapping
    return start(config)


def client(model_or_deployment_name: str) -> MIIClient:
    """A client of the running deployment with this name, or with the default name for this model.

    Raises DeploymentNotFoundError with the nearest name.
    """
    found = registry.find(model_or_deployment_name, generate_deployment_name(model_or_deployment_name))
    return MIIClient(MIIConfig(**found.config["mii"]))


def start(config: MIIConfig, factory: str = "deepspeed_c.mii.service:build_service") -> MIIClient:
    """Starts a deployment and waits until it is ready. factory: "module:function" that makes a replica's ``Service``
    from a ``ModelConfig``. Raises as ``serve`` does."""
    model = config.model_conf
    rest = {"host": config.restful_api_host, "port": config.restful_api_port, "n_handlers": config.restful_processes}
    description = {
        "mii": config.model_dump(mode="json"),
        "model": model.model_dump(mode="json"),
        "tensor_parallel": model.tensor_parallel,
        "places": [place._asdict() for place in places_of(model)],
        "rest": rest if config.enable_restful_api else None,
    }
    name = config.deployment_name
    place = registry.reserve(name, description)
    ours, theirs = socket.socketpair()
    log = place.folder / "supervisor.log"
    try:
        with theirs, log.open("wb") as output:
            # It forks and ends at once, so that the deployment is no child of this process.
            starter = subprocess.run(
                [
                    *(sys.executable, "-m", "deepspeed_c.mii.deployment.supervisor", "--folder", str(place.folder)),
                    *("--fd", str(place.fd), "--ready-fd", str(theirs.fileno()), "--factory", factory),
                ],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                pass_fds=(place.fd, theirs.fileno()),
                start_new_session=True,
            )
        # From now on, the folder's lock belongs to the deployment alone.
        os.close(place.fd)
        answer = frames.receive(ours) if starter.returncode == 0 else None
        message = {} if answer is None else frames.parse(answer)
        if "error" in message:
            frames.receive(ours)  # the connection's end; the name is free then
            raise failures.error_of(message["error"])
        if "ready" not in message:
            raise LaunchError(
                f"its process ended before it was ready\n{tail(log)}",
                where=f"deployment {name!r}",
                fix="see the lines above; memory may have run out",
            )
    except ConnectionError as error:
        raise LaunchError(f"its process ended: {error}", where=f"deployment {name!r}") from None
    except DeepSpeedCError:
        registry.remove(place.folder)
        raise
    finally:
        ours.close()
    return MIIClient(config)


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_LAUNCH and not name.startswith(_LAUNCH_PREFIXES)
    }
