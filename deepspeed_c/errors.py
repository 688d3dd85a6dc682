"""Typed errors for mistakes of users and failures of machines. Each states the event, the place and the fix."""

from __future__ import annotations

__all__ = [
    "AioError",
    "AliasError",
    "BackwardError",
    "BatchSizeError",
    "BuildError",
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DataFileError",
    "DeepSpeedCError",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "EventError",
    "FeatureError",
    "LaunchError",
    "LossScaleError",
    "MissingModuleError",
    "MissingNameError",
    "MissingPackageError",
    "ModelError",
    "NonFiniteLossError",
    "OffloadError",
    "OptimizerError",
    "RankMismatchError",
    "RecomputeError",
    "RoutingError",
    "StageError",
    "StateError",
    "UnsupportedConfigError",
]


class DeepSpeedCError(Exception):
    """The base of all errors of this package.

    The attributes ``what`` (the event), ``where`` (a configuration key, a parameter, a rank, a file) and ``fix`` (the
    user's way out) make up the message.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        parts = [f"{where}: {what}" if where else what]
        if fix:
            parts.append(f"Fix: {fix}")
        super().__init__("\n".join(parts))

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(cls: type, what: str, where: str, fix: str) -> DeepSpeedCError:
    return cls(what, where=where, fix=fix)


class ConfigError(DeepSpeedCError, ValueError):
    """The configuration is malformed: an unknown key, a value of the wrong type or out of range."""


class UnsupportedConfigError(ConfigError, NotImplementedError):
    """A known key requests a feature that this version does not have."""


class MissingPackageError(ConfigError, ModuleNotFoundError):
    """A package that the configuration requires is missing, broken or too old; ``name`` is its name."""

    def __init__(self, what: str, *, where: str = "", fix: str = "", package: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.name = package

    def __reduce__(self):
        return _rebuild_missing, (type(self), self.what, self.where, self.fix, self.name)


def _rebuild_missing(cls: type, what: str, where: str, fix: str, package: str) -> MissingPackageError:
    return cls(what, where=where, fix=fix, package=package)


class EventError(DeepSpeedCError, ValueError):
    """An event for monitors is not a tuple (name, number, step)."""


class BatchSizeError(ConfigError):
    """train_batch_size is not the product of micro-batch size, accumulation steps and world size."""


class ElasticityError(ConfigError):
    """The section elasticity cannot give a batch. The base of the two errors below."""


class ElasticityConfigError(ElasticityError):
    """The section elasticity is missing or malformed, differs from the one that a scheduler has seen, or stands beside
    other batch keys."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """This number of ranks cannot share the batch of the section elasticity."""


class ModelError(DeepSpeedCError, ValueError):
    """The model cannot be trained as given (no trainable parameter, no module, ...)."""


class OptimizerError(DeepSpeedCError, ValueError):
    """The optimizer does not fit the model or the configuration."""


class RankMismatchError(DeepSpeedCError, RuntimeError):
    """Ranks disagree on something that must be equal (model, configuration, number of steps)."""


class BackwardError(DeepSpeedCError, RuntimeError):
    """A backward pass was aborted, or called when it is not allowed."""


class StageError(BackwardError):
    """A layer or the loss function of a pipeline raised an exception on some rank. All ranks raise this error, and its
    message names the rank, the stage and the exception. On that rank ``__cause__`` is the exception."""


class RecomputeError(DeepSpeedCError, RuntimeError):
    """A checkpointed layer cannot be recomputed as it ran in forward, or its recomputation differed from forward."""


class RoutingError(DeepSpeedCError, ValueError):
    """A router gave a logit for which no score exists (NaN or +inf), so its token cannot be sent to experts."""


class NonFiniteLossError(DeepSpeedCError, ArithmeticError):
    """The loss itself is inf or NaN, which no loss scale can correct. The step was skipped; state is unchanged."""


class LossScaleError(DeepSpeedCError, OverflowError):
    """The loss scale is at its floor and gradients still overflow."""


class StateError(DeepSpeedCError, RuntimeError):
    """The object is not in a state that allows the call (closed, not initialised, no optimizer)."""


class CheckpointError(DeepSpeedCError, RuntimeError):
    """A weight file or checkpoint cannot be written or read as asked."""


class DataFileError(DeepSpeedCError, ValueError):
    """A file of samples is damaged, is of another kind, or does not belong to the others."""


class OffloadError(DeepSpeedCError, RuntimeError):
    """A state that is offloaded to a file could not be written, or was read back with other content."""


class AioError(DeepSpeedCError, OSError):
    """A transfer between memory and a file failed. It is also an ``OSError``, with ``errno`` and ``filename`` from the
    system.

    ``offset`` and ``n_bytes`` describe the request, in bytes; they are None without a request, for example if a file
    cannot be opened. A read beyond the end of its file has ``errno.ENODATA``.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        fix: str = "",
        path: str | None = None,
        offset: int | None = None,
        n_bytes: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.filename, self.offset, self.n_bytes, self.errno = path, offset, n_bytes, errno

    def __str__(self) -> str:
        return str(self.args[0])  # OSError.__str__ would only show errno and filename

    def __reduce__(self):
        fields = {"path": self.filename, "offset": self.offset, "n_bytes": self.n_bytes, "errno": self.errno}
        return _rebuild_aio, (type(self), self.what, self.where, self.fix, fields)


def _rebuild_aio(cls: type, what: str, where: str, fix: str, fields: dict[str, object]) -> AioError:
    return cls(what, where=where, fix=fix, **fields)


class CommError(DeepSpeedCError, RuntimeError):
    """Communication between ranks could not be set up, or failed."""


class LaunchError(DeepSpeedCError, RuntimeError, ValueError):
    """The launcher could not start the processes as asked. DeepSpeed raises RuntimeError or ValueError here."""


class BuildError(DeepSpeedCError, RuntimeError):
    """The compiled part of the package is missing or does not fit the installed torch."""


class FeatureError(DeepSpeedCError, NotImplementedError):
    """A part of DeepSpeed's API that this version does not have yet."""


class MissingNameError(FeatureError, AttributeError):
    """A name of DeepSpeed that this version does not have was read as an attribute of its module."""


class MissingModuleError(FeatureError, ModuleNotFoundError):
    """A module of DeepSpeed that this version does not have, or a name in such a module, was imported."""


class AliasError(DeepSpeedCError, RuntimeError):
    """deepspeed_c cannot be imported as ``deepspeed``: another package has looked for DeepSpeed already, or a real
    DeepSpeed would be hidden."""
