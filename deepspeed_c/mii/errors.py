"""Errors of deployments and of arguments, under MII's names."""

from __future__ import annotations

from deepspeed_c.errors import ConfigError, DeepSpeedCError

__all__ = ["DeploymentNotFoundError", "UnknownArgument"]


class DeploymentNotFoundError(DeepSpeedCError, LookupError):
    """No deployment of this user has the name that a client asks for."""


class UnknownArgument(ConfigError):
    """A keyword argument or a key that no configuration class of MII has."""
