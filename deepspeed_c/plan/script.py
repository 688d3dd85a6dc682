"""Finds the model that a training script passes to ``initialize``: runs the script on the meta device up to that
call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from typing_extensions import Self

from deepspeed_c.config.source import CONFIG_ARGUMENTS, GivenConfig, source_of_engine
from deepspeed_c.errors import FeatureError, ModelError
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.pipe import module as pipe_module
from deepspeed_c.pipe import transformers as pipe_transformers
from deepspeed_c.script import StopScript, line_of, run_script
from deepspeed_c.zero.weights import init as partition_parameters

__all__ = ["Found", "find_model"]

ADVICE = (
    "make the script reach deepspeed_c.initialize on its main path (tensors have no data before it: what reads values, loads weights or moves tensors must"
    " come after it), or plan from sizes with --params and --layers"
)


class Found(NamedTuple):
    """The arguments of a script's call of ``initialize``; the model's parameters are on the meta device."""

    model: torch.nn.Module
    optimizer: Any
    model_parameters: Any
    configs: dict[str, Any]  # the arguments that give the configuration, by name
    is_sharded: bool  # the model was built under ``zero.Init``

    def read_source(self) -> GivenConfig | None:
        """Read the script's configuration; None if it passed none. Raises ConfigError."""
        return source_of_engine(self.configs)


class _Reached(StopScript):
    """Raised by the stand-in for ``initialize``."""

    def __init__(self, found: Found) -> None:
        super().__init__("initialize was reached")
        self.found = found


def find_model(script: str, arguments: Sequence[str], n_ranks: int, *, rank: int | None = None) -> Found:
    """Runs ``script`` as ``rank`` of ``n_ranks`` until it calls ``deepspeed_c.initialize``. Its process group sends
    nothing. rank: of the process group, which decides which layers a PipelineModule has; None: rank 0, and a
    PipelineModule is refused.

    Tensors are made on the meta device and moving a module between devices does nothing, so that no memory is taken.
    Raises ModelError if there is no such file, or if the script ends before it calls initialize, or fails on tensors
    without data. Raises FeatureError for a PipelineModule that is refused.
    """
    notes = {"is_sharded": False}
    try:
        with _stand_ins(notes, n_ranks, rank):
            run_script(script, arguments, n_ranks, 29500, _stopping(notes))
    except _Reached as reached:
        return reached.found
    except SystemExit as stop:
        raise ModelError(
            f"the script ended with exit code {stop.code!r} before it called deepspeed_c.initialize",
            where=script,
            fix=ADVICE,
        ) from stop
    except (RuntimeError, TypeError, ValueError) as error:
        if getattr(error, "where", None) is not None:
            raise  # errors of this package need no further explanation
        raise ModelError(
            f"the script failed before it called deepspeed_c.initialize: {type(error).__name__}: {error}",
            where=line_of(error, script),
            fix=ADVICE,
        ) from error
    raise ModelError("the script ended and did not call deepspeed_c.initialize", where=script, fix=ADVICE)


@contextmanager
def _stand_ins(notes: dict[str, bool], n_ranks: int, rank: int | None) -> Iterator[None]:
    """While the script runs, replaces the functions that allocate memory or communicate with other ranks."""
    package = sys.modules[__name__.partition(".")[0]]  # the script looks up public names in this module
    with ExitStack() as stack:
        init = _stand_in_for_init(notes)
        for owner in (package.zero, partition_parameters):
            stack.enter_context(mock.patch.object(owner, "Init", init))
        if rank is None:
            stack.enter_context(mock.patch.object(PipelineModule, "__init__", _refuse_pipeline))
        stack.enter_context(mock.patch.object(pipe_module, "_lay_out_ranks", _on_the_host(pipe_module._lay_out_ranks)))
        stack.enter_context(mock.patch.object(PipelineModule, "_measure", _refuse_measuring))
        for name in ("fill_from_files", "fill_from_seeds"):
            stack.enter_context(mock.patch.object(pipe_transformers, name, _leave_on_meta))
        # A model has values in a run. Its copy here is on the meta device, and knows which weights are frozen.
        stack.enter_context(mock.patch.object(pipe_transformers, "_has_values", lambda model: True))
        copied = _on_the_host(pipe_transformers.fill_from_model)
        stack.enter_context(mock.patch.object(pipe_transformers, "fill_from_model", copied))
        for name in ("to", "cpu", "cuda"):
            stack.enter_context(mock.patch.object(torch.nn.Module, name, _staying(name)))
        stack.enter_context(_silent_group(n_ranks, rank or 0))
        # accelerate seeds its loaders with a generator on this device, and generators cannot be on the meta device.
        stack.enter_context(mock.patch.object(torch, "get_default_device", lambda: torch.device("cpu")))
        stack.enter_context(torch.device("meta"))
        yield


def _stopping(notes: dict[str, bool]) -> Callable:
    def stop(_: Callable[..., Any], given: dict[str, Any]) -> None:
        model = given.get("model")
        if not isinstance(model, torch.nn.Module):
            raise ModelError(
                f"model must be a torch.nn.Module, not {type(model).__name__}",
                where="initialize(model=...)",
                fix="pass the model",
            )
        configs = {name: given.get(name) for name in CONFIG_ARGUMENTS}
        found = Found(model, given.get("optimizer"), given.get("model_parameters"), configs, notes["is_sharded"])
        raise _Reached(found)

    return stop


def _refuse_pipeline(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    raise FeatureError(
        "a PipelineModule has other layers on each of its ranks, and one rank is planned here",
        where="PipelineModule",
        fix="call `deepspeed_c plan SCRIPT`, which plans a rank of each stage",
    )


def _refuse_measuring(module: torch.nn.Module, *args: Any) -> None:
    raise FeatureError(
        "layers are measured while they run, and tensors have no data in a plan",
        where='PipelineModule(partition_method="profile")',
        fix="pass the parts that a run has found, which are module.parts[:-1] there",
    )


def _on_the_host(function: Callable) -> Callable:
    """The function with tensors that have data: the places of ranks are read."""

    def run(*args: Any) -> Any:
        with torch.device("cpu"):
            return function(*args)

    return run


def _leave_on_meta(*_: Any) -> None:
    """Gives the weights of ``from_transformers`` no values, which a plan does not read."""


def _stand_in_for_init(notes: dict[str, bool]) -> type:
    class PlannedInit:
        """A stand-in for ``zero.Init`` that only records its use."""

        def __init__(
            self, module: torch.nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any
        ) -> None:
            self.enabled = enabled
            notes["is_sharded"] = notes["is_sharded"] or enabled

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            return None

    return PlannedInit


def _staying(name: str) -> Callable:
    """``Module.to`` and similar methods without the change of device."""
    original = torch.nn.Module.to

    def move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if name != "to":
            return module
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        return module if dtype is None else original(module, dtype=dtype)

    return move


@contextmanager
def _silent_group(n_ranks: int, rank: int) -> Iterator[None]:
    """A process group of ``n_ranks`` whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this import registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n_ranks)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
