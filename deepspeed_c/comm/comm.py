"""DeepSpeed's communication calls, by their names and signatures, over ``torch.distributed``.

Each function takes the arguments of the ``torch.distributed`` function of the same name, and also ``prof``,
``log_name`` and ``debug`` for the communication log. An operation that fails raises ``CommError`` (a RuntimeError),
with the reason that torch gave.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from inspect import Parameter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket, ProcessGroup, ReduceOp

from deepspeed_c.comm import point_to_point
from deepspeed_c.comm.agreed import agree, agree_on_name, agree_on_sum, as_moved, is_over_gloo
from deepspeed_c.comm.discover import DEFAULT_PORT, discover
from deepspeed_c.comm.groups import is_initialized, require_initialized
from deepspeed_c.comm.ledger import Ledger, LedgerEntry, ledger_of
from deepspeed_c.comm.log import CommsLogger, EngineCollectives, shared_calls_of
from deepspeed_c.comm.transports import torch_backend
from deepspeed_c.comm.transports.described import Members, as_bytes, lists_described
from deepspeed_c.env import read_env
from deepspeed_c.errors import CommError
from deepspeed_c.logging import logger

__all__ = [
    "GradBucket",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "comms_logger",
    "configure",
    "enable_symm_mem_for_group",
    "gather",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "inference_all_reduce",
    "init_deepspeed_backend",
    "irecv",
    "isend",
    "log_summary",
    "monitored_barrier",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
    "set_backend",
]

# Each process has one log, as it has one default group: ``configure`` and ``log_summary`` take no object to work on.
comms_logger = CommsLogger()
comms_logger.on_switch = EngineCollectives(comms_logger).switch

# Names of the parameter that holds the data to send, in the order of preference.
_PAYLOADS = ("tensor", "tensors", "input_list", "input_tensor_list", "input_tensors", "object_list")


# Operations with a parameter that is only one rank's piece of the data that the collective moves.
_OF_PIECES = frozenset({"all_gather", "all_gather_coalesced", "all_gather_into_tensor", "gather", "scatter"})
_MESSAGES = frozenset({"send", "recv", "isend", "irecv"})

# The parameters for the log, which come after an operation's own.
_OF_LOG = (
    Parameter("prof", Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation="bool"),
    Parameter("log_name", Parameter.POSITIONAL_OR_KEYWORD, annotation="str"),
    Parameter("debug", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="str | None"),
)


def _operation(log_name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps an operation. The wrapper checks that there is a group, enters the call in the group's ledger, records the
    call if the log wants it, and turns errors into ``CommError``. It takes the operation's own parameters, and those
    for the log after them.

    log_name: the default of the parameter of that name; "": the operation has no parameters for the log.
    """
    return functools.partial(_wrapped, log_name)


def _wrapped(default_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    names = list(signature.parameters)
    n_own = len(names)
    payload = next((name for name in _PAYLOADS if name in names), None)
    payload_at = names.index(payload) if payload else 0
    group_at = names.index("group")
    of_log = [each.replace(default=default_name) if each.name == "log_name" else each for each in _OF_LOG]
    if not default_name:
        default_name, of_log = function.__name__, []
    signature = signature.replace(parameters=[*signature.parameters.values(), *of_log])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        require_initialized(function.__name__)
        log_name, prof = default_name, False
        if of_log:
            if len(args) > n_own:  # parameters for the log by position
                args, kwargs = (), signature.bind(*args, **kwargs).arguments
            if kwargs:
                log_name, prof = kwargs.pop("log_name", default_name), kwargs.pop("prof", False)
                kwargs.pop("debug", None)
        is_logged = comms_logger.wants(log_name, bool(prof))
        begin = time.perf_counter() if is_logged else 0.0
        sent = (args[payload_at] if len(args) > payload_at else kwargs.get(payload)) if payload else None
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        caller = sys._getframe(1)
        entry = _enter(function.__name__, sent, group, f"{caller.f_code.co_filename}:{caller.f_lineno}")
        try:
            entry.begin_wait()
            result = function(*args, **kwargs)
        except BaseException as error:
            entry.end()
            if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
                raise _failed(function.__name__, error) from error
            raise
        is_handle = result is not None and hasattr(result, "wait")
        if is_handle:
            entry.started()
        else:
            entry.finish()
        if not is_logged:
            return _Handle(function.__name__, result, entry) if is_handle else result
        if comms_logger.debug:
            log_name = f"{log_name} | [Caller Func: {caller.f_code.co_name}]"

        def record() -> None:
            _synchronize(sent)
            seconds, n_ranks = time.perf_counter() - begin, len(entry.ranks)
            comms_logger.record(
                function.__name__, log_name, seconds, _n_bytes(sent), n_ranks, shared=shared_calls_of(entry)
            )

        if is_handle:
            return _Handle(function.__name__, result, entry, record)
        record()
        return result

    vars(call).update(__signature__=signature)
    call.__annotations__.update({each.name: each.annotation for each in of_log})
    return call


def _enter(name: str, sent: Any, group: Any, line: str) -> LedgerEntry:
    """Enters a call in the ledger. ``line`` is the source line of the call."""
    # torch's placeholder for a group without this rank: there is no group, and nothing is sent.
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return Ledger("", ()).enter_message(name, 0)
    ledger = ledger_of(group)
    n_bytes = _n_bytes(sent) * (len(ledger.ranks) if name in _OF_PIECES else 1)
    enter = ledger.enter_message if name in _MESSAGES else ledger.enter
    first = sent[0] if isinstance(sent, (list, tuple)) and sent else sent
    entry = enter(f"comm.{name}", n_bytes, device=first.device if isinstance(first, torch.Tensor) else None)
    entry.module = line
    return entry


def _failed(name: str, error: RuntimeError) -> CommError:
    return CommError(
        f"{name} failed: {error}",
        where=f"rank {dist.get_rank()}" if is_initialized() else "",
        fix="look at the other ranks' output (one has stopped, or runs something else), and at the tensors passed",
    )


class _Handle:
    """A handle for an asynchronous operation. Waiting for it ends the operation's ledger entry and records the
    operation.
    """

    def __init__(self, name: str, handle: Any, entry: LedgerEntry, record: Callable[[], None] | None = None) -> None:
        self._name, self._handle, self._entry, self._record = name, handle, entry, record

    def wait(self, *args: Any) -> Any:
        with self._entry:
            try:
                result = self._handle.wait(*args)
            except RuntimeError as error:
                raise _failed(self._name, error) from error
        record, self._record = self._record, None
        if record is not None:
            record()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _synchronize(sent: Any) -> None:
    first = sent[0] if isinstance(sent, (list, tuple)) and sent else sent
    if isinstance(first, torch.Tensor) and first.device.type != "cpu":
        torch.accelerator.synchronize(first.device)


def _n_bytes(sent: Any) -> int:
    if isinstance(sent, torch.Tensor):
        return sent.numel() * sent.element_size()
    if isinstance(sent, (list, tuple)):
        return sum(_n_bytes(part) for part in sent)
    return 0


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Sets the communication log: first from the ``comms_logger`` section of a configuration (a dict or an object),
    then from the other arguments.
    """
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    section = None
    if deepspeed_config is not None:
        # DeepSpeed's object for a whole configuration keeps the section one level down.
        section = _read(_read(deepspeed_config, "comms_config") or deepspeed_config, "comms_logger")
    for name, value in given.items():
        if value is None and section is not None:
            value = _read(section, name)
        if value is not None:
            setattr(comms_logger, name, list(value) if name == "prof_ops" else value)


def _read(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Prints the recorded calls on rank 0, to standard output; every rank calls it.

    ``show_straggler``: also shows, for each operation, the time of the fastest rank and the additional time of this
    rank, which is its wait for late ranks.

    Returns, if ``return_dict`` is True, {"summary": {name: {bytes: statistics}}, "straggler_analysis": the same or
    None, "metadata": ...}. Times are in ms, bandwidths in Gbit/s.
    """
    require_initialized("log_summary")
    return comms_logger.log_all(dist.get_rank() == 0, show_straggler, return_dict)


def reset_log() -> None:
    """Forgets all recorded calls."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Whether anything has been recorded."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """How many calls have been recorded."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The names of the recorded calls."""
    return comms_logger.get_operation_names()


@_operation("broadcast")
def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Global rank ``src`` sends ``tensor`` to the group."""
    (moved,) = as_moved([tensor])
    return agree(
        lambda: dist.broadcast(moved[0], src, group=group, async_op=async_op),
        f"broadcast from rank {src}",
        [tensor],
        group,
        async_op,
    )


@_operation()
def broadcast_object_list(
    object_list: list[Any], src: int, group: ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Global rank ``src`` sends a list of objects that pickle. The lists of the other ranks have the same length and
    are overwritten.
    """
    return agree_on_name(
        lambda: dist.broadcast_object_list(object_list, src, group=group, device=device),
        f"broadcast_object_list from rank {src} of {len(object_list)} objects",
        group,
    )


@_operation("reduce")
def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Global rank ``dst``'s ``tensor`` becomes the reduction of all ranks'."""
    return agree_on_sum(
        lambda: dist.reduce(tensor, dst, op=op, group=group, async_op=async_op),
        f"reduce to rank {dst}",
        op,
        [tensor],
        group,
        async_op,
    )


@_operation("gather")
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Global rank ``dst`` gets every rank's ``tensor`` in ``gather_list``; the other ranks pass no list."""
    moved, places = as_moved([tensor], gather_list)
    return agree(
        lambda: dist.gather(moved[0], places, dst, group=group, async_op=async_op),
        f"gather to rank {dst}",
        [tensor],
        group,
        async_op,
    )


@_operation("scatter")
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Global rank ``src`` sends each rank its entry of ``scatter_list``; the other ranks pass no list."""
    moved, sent = as_moved([tensor], scatter_list)
    return agree(
        lambda: dist.scatter(moved[0], sent, src, group=group, async_op=async_op),
        f"scatter from rank {src}",
        [tensor],
        group,
        async_op,
    )


@_operation("all_reduce")
def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Every rank's ``tensor`` becomes the reduction of all."""
    return _all_reduce([tensor], op, group, async_op)


@_operation("all_reduce")
def inference_all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """``all_reduce``, by the name that inference calls it."""
    return _all_reduce([tensor], op, group, async_op)


@_operation("all_reduce")
def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """``all_reduce`` of several tensors."""
    return _all_reduce(tensors, op, group, async_op)


def _all_reduce(tensors: list[torch.Tensor], op: Any, group: ProcessGroup | None, async_op: bool) -> Any:
    def call() -> Any:
        if len(tensors) == 1:
            return dist.all_reduce(tensors[0], op=op, group=group, async_op=async_op)
        return _together([dist.all_reduce(t, op=op, group=group, async_op=True) for t in tensors], async_op)

    return agree_on_sum(call, "all_reduce", op, tensors, group, async_op)


@_operation("all_gather")
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Every rank gets all ranks' ``tensor`` in ``tensor_list``."""
    places, moved = as_moved(tensor_list, [tensor])
    return agree(
        lambda: dist.all_gather(places, moved[0], group=group, async_op=async_op),
        "all_gather",
        [tensor],
        group,
        async_op,
    )


@_operation("all_gather_into_tensor")
def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Every rank gets all ranks' ``tensor``, one after another, in ``output_tensor``."""
    whole, moved = as_moved([output_tensor], [tensor])
    return agree(
        lambda: torch_backend.all_gather_single(whole[0], moved[0], group=group, async_op=async_op),
        "all_gather_into_tensor",
        [tensor],
        group,
        async_op,
    )


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    debug: str | None = None,
) -> Any:
    """``all_gather_into_tensor``, by its name in earlier versions."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@_operation()
def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """``all_gather_into_tensor`` of several tensors."""
    if len(output_tensors) != len(input_tensors):
        raise ValueError(f"{len(output_tensors)} output tensors for {len(input_tensors)} input tensors")

    def call() -> Any:
        pairs = [as_moved([out], [tensor]) for out, tensor in zip(output_tensors, input_tensors)]
        handles = [
            torch_backend.all_gather_single(whole[0], moved[0], group=group, async_op=True) for whole, moved in pairs
        ]
        return _together(handles, async_op)

    return agree(call, "all_gather_coalesced", input_tensors, group, async_op)


@_operation("all_gather_object")
def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Every rank gets all ranks' ``obj`` (anything that pickles) in ``object_list``."""
    return agree_on_name(lambda: dist.all_gather_object(object_list, obj, group=group), "all_gather_object", group)


@_operation("reduce_scatter")
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Rank r's ``output`` becomes the reduction of all ranks' ``input_list[r]``."""
    return agree_on_sum(
        lambda: dist.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op),
        "reduce_scatter",
        op,
        input_list,
        group,
        async_op,
    )


@_operation("reduce_scatter_tensor")
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Rank r's ``output_tensor`` becomes the reduction of slice r of all ranks' ``tensor``."""
    return agree_on_sum(
        lambda: torch_backend.reduce_scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op),
        "reduce_scatter_tensor",
        op,
        [tensor],
        group,
        async_op,
    )


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    debug: str | None = None,
) -> Any:
    """``reduce_scatter_tensor``, by its name in earlier versions."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, prof=prof)


@_operation("all_to_all_single")
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Piece j of rank i's ``tensor`` becomes piece i of rank j's ``output``. By default all pieces are equal."""
    is_plain = output.dtype == tensor.dtype and output.is_contiguous() and tensor.is_contiguous()
    if is_plain and is_over_gloo(tensor, group):
        members = Members.of(group)
        n = len(members.global_ranks)
        sent, received = _pieces(tensor, input_split_sizes, n), _pieces(output, output_split_sizes, n)
        if sent is not None and received is not None:
            return _together([lists_described(members, sent, received, tensor.dtype)], async_op)
    return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op)


def _pieces(tensor: torch.Tensor, sizes: list[int] | None, n: int) -> list[torch.Tensor] | None:
    """The bytes of ``tensor``'s rows for each of ``n`` ranks. None where the sizes do not fit: torch refuses them."""
    if not tensor.dim() or (sizes and (len(sizes) != n or sum(sizes) != len(tensor) or min(sizes) < 0)):
        return None
    if not sizes and len(tensor) % n:
        return None
    return [as_bytes(rows) for rows in tensor.detach().split(sizes or [len(tensor) // n] * n)]


@_operation()
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Entry j of rank i's input list becomes entry i of rank j's output list."""
    if not output_tensor_list or not is_over_gloo(output_tensor_list[0], group):
        if dist.get_world_size(group) == 1 and output_tensor_list:  # torch has no all_to_all over lists for gloo
            output_tensor_list[0].copy_(input_tensor_list[0])
            return _together([], async_op)
        return dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)
    members, dtype = Members.of(group), output_tensor_list[0].dtype
    for tensors in (output_tensor_list, input_tensor_list):
        if len(tensors) != len(members.global_ranks) or any(t.dtype != dtype for t in tensors):
            raise ValueError(
                f"{len(tensors)} tensors of {', '.join(sorted({str(t.dtype) for t in tensors}))} in a list for"
                f" {len(members.global_ranks)} ranks; one tensor for each rank is needed, all of {dtype}"
            )
    sent, received = [[as_bytes(t.detach()) for t in each] for each in (input_tensor_list, output_tensor_list)]
    return _together([lists_described(members, sent, received, dtype)], async_op)


class _Together:
    """A handle that waits for several handles."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = tuple(handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


def _together(handles: Sequence[Any], async_op: bool) -> _Together | None:
    together = _Together(handles)
    if async_op:
        return together
    together.wait()
    return None


@_operation("send")
def send(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Sends ``tensor`` to global rank ``dst``."""
    return point_to_point.send(tensor, dst, group=group, tag=tag)


@_operation("recv")
def recv(tensor: torch.Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receives into ``tensor`` from global rank ``src``, or from any; returns the sender."""
    return point_to_point.recv(tensor, src, group=group, tag=tag)


@_operation("isend")
def isend(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """``send`` that returns a handle to wait for."""
    return point_to_point.isend(tensor, dst, group=group, tag=tag)


@_operation("irecv")
def irecv(tensor: torch.Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """``recv`` that returns a handle to wait for."""
    return point_to_point.irecv(tensor, src, group=group, tag=tag)


@_operation("barrier")
def barrier(group: ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Returns when every rank of the group has come here."""
    return agree_on_name(
        lambda: dist.barrier(group=group, async_op=async_op, device_ids=device_ids), "barrier", group, async_op
    )


@_operation("monitored_barrier")
def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """``barrier`` over gloo. Its error names the ranks that did not come within ``timeout``."""
    return dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)


def has_all_gather_into_tensor() -> bool:
    require_initialized("has_all_gather_into_tensor")
    return True


def has_reduce_scatter_tensor() -> bool:
    require_initialized("has_reduce_scatter_tensor")
    return True


def has_all_reduce_coalesced() -> bool:
    require_initialized("has_all_reduce_coalesced")
    return True


def has_coalescing_manager() -> bool:
    require_initialized("has_coalescing_manager")
    return hasattr(dist.distributed_c10d, "_coalescing_manager")


def set_backend() -> None:
    """Does nothing: ``torch.distributed`` is the one backend. The name is kept for programs that call it."""


def init_deepspeed_backend(ds_backend: str, timeout: timedelta | None = None, init_method: str | None = None) -> None:
    """Checks that torch has the backend ``ds_backend``. There are no other backends here, and ``init_distributed``
    starts them.
    """
    if not dist.is_backend_available(ds_backend):
        raise CommError(
            f"this torch has no {ds_backend!r} backend",
            where="init_deepspeed_backend",
            fix="call init_distributed() without dist_backend",
        )


def enable_symm_mem_for_group(group_name: str) -> None:
    """Allows symmetric memory within the group of that name (CUDA)."""
    require_initialized("enable_symm_mem_for_group")
    from torch.distributed import _symmetric_memory

    _symmetric_memory.enable_symm_mem_for_group(group_name)


def in_aml() -> bool:
    """Whether this is an Azure Machine Learning job."""
    return read_env().azure_ml_experiment is not None


def in_aws_sm() -> bool:
    """Whether this is an AWS SageMaker job."""
    return read_env().sagemaker_environment is not None


def in_dlts() -> bool:
    """Whether this is a DLTS job."""
    return read_env().dlts_job is not None


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of Azure ML, and keeps NCCL off
    Docker's bridge.
    """
    _publish_mpi(master_port, "Azure ML", verbose)
    os.environ["NCCL_SOCKET_IFNAME"] = "^docker0,lo"


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of SageMaker."""
    _publish_mpi(DEFAULT_PORT, "AWS SageMaker", verbose)


def _publish_mpi(port: int, service: str, verbose: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if "AZ_BATCH_MASTER_NODE" in environ and ":" in environ["AZ_BATCH_MASTER_NODE"]:
        environ.setdefault("MASTER_PORT", environ["AZ_BATCH_MASTER_NODE"].split(":")[1])
    place = discover(environ, distributed_port=port)
    if place.world_size == 1 and "OMPI_COMM_WORLD_RANK" not in environ:
        raise CommError(
            f"this does not look like a process that {service} started by MPI: OMPI_COMM_WORLD_RANK is not set",
            where="environment",
            fix="call init_distributed(), which finds other launchers too",
        )
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank or 0),
        MASTER_ADDR=place.master_addr or "127.0.0.1",
        MASTER_PORT=str(place.master_port or port),
    )
    if verbose:
        logger.info("%s: rank %d of %d, rank 0 at %s", service, place.rank, place.world_size, place.master_addr)
