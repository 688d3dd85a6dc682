"""Helpers around gradients and optimizer states that engines import from ``deepspeed.runtime.utils``; nothing in this
package needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c import comm
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm import groups as process_groups
from deepspeed_c.errors import StateError

__all__ = [
    "OutputBackwardHookManager",
    "all_gather_dp_groups",
    "all_gather_into_tensor_dp_groups",
    "check_internal_apis_for_count_used_parameters",
    "count_used_parameters_in_backward",
    "get_alignment_padding",
    "get_flattened_grad_norm",
    "get_grad_zeros",
    "graph_process",
    "is_model_parallel_parameter",
    "is_transformers_cache",
    "maybe_loss_for_backward",
    "offload_adam_states",
    "register_output_backward_hooks",
    "reload_adam_states",
]


def get_alignment_padding(tensor_list: Iterable[torch.Tensor], alignment: int) -> int:
    """Elements that the tensors together lack to a multiple of ``alignment``."""
    return -sum(tensor.numel() for tensor in tensor_list) % alignment


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Whether Megatron has marked the parameter as cut: each rank holds another part."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def _with_gradient(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    several = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [param for param in several if param.grad is not None]


def _over_model_parallel(value: float, op: dist.ReduceOp, mpu: Any) -> float:
    if mpu is None:
        return value
    total = torch.tensor([value], dtype=torch.float32, device=get_accelerator().current_device_name())
    comm.all_reduce(total, op=op, group=mpu.get_model_parallel_group())
    return total.item()


def get_flattened_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    grad_norm_mask: Sequence[torch.Tensor] | None = None,
) -> float:
    """The norm of all gradients as one vector, over the model-parallel ranks of ``mpu``; -1 where it is inf or NaN.

    Args:
        norm_type: p of the norm; inf is the largest absolute value.
        grad_norm_mask: for each parameter with a gradient an integer tensor of shape (n, 2), ranges [begin, end) of a
            flat gradient that do not count.
    """
    norm_type = float(norm_type)
    is_max = math.isinf(norm_type)
    norms = []
    for i, param in enumerate(_with_gradient(parameters)):
        grad = param.grad.detach().float()
        if not is_max and grad_norm_mask is not None and len(grad_norm_mask[i]) > 0:
            grad = grad.clone()
            for begin, end in grad_norm_mask[i].tolist():
                grad[begin:end] = 0
        norms.append(torch.linalg.vector_norm(grad, norm_type).item())
    total = torch.linalg.vector_norm(torch.tensor([0.0, *norms], dtype=torch.float64), norm_type).item()
    if is_max:
        total = _over_model_parallel(total, dist.ReduceOp.MAX, mpu)
    elif mpu is not None:
        total = _over_model_parallel(total**norm_type, dist.ReduceOp.SUM, mpu) ** (1 / norm_type)
    return total if math.isfinite(total) else -1


def get_grad_zeros(parameters: torch.Tensor | Iterable[torch.Tensor], mpu: Any = None) -> float:
    """Number of elements of the gradients that are 0, over the model-parallel ranks of ``mpu``; a parameter that all of
    these ranks hold alike counts once.
    """
    is_first = mpu is None or mpu.get_model_parallel_rank() == 0
    total = 0
    for param in _with_gradient(parameters):
        if not getattr(param, "ds_pipe_replicated", False) and (is_first or is_model_parallel_parameter(param)):
            total += param.grad.numel() - int(torch.count_nonzero(param.grad))
    return _over_model_parallel(float(total), dist.ReduceOp.SUM, mpu)


def maybe_loss_for_backward(value: Any) -> bool:
    """Whether ``value`` can be a loss: a tensor of one element with a graph behind it."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.grad_fn is not None


class OutputBackwardHookManager:
    """Calls a function before the backward of outputs, and another on the gradient of each.

    It lives as long as any of the outputs.
    """

    def __init__(
        self,
        preprocess_once_fn: Callable[[], None],
        preprocess_per_tensor_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """preprocess_once_fn: called once, at the first output that backward enters; preprocess_per_tensor_fn: takes
        the gradient of an output, returns its replacement.
        """
        self.preprocess_once_fn, self.preprocess_per_tensor_fn = preprocess_once_fn, preprocess_per_tensor_fn
        self.preprocess_done = False
        self.hook_handles: list[Any] = []

    def register_hooks_on_outputs(self, outputs: Any) -> None:
        """Takes ``outputs`` (a tensor, or lists, tuples and dictionaries of them) in the place of earlier ones."""
        self.reset()
        self.remove_hooks()
        self.hook_handles += [tensor.register_hook(self._on_gradient) for tensor in _graph_tensors(outputs)]

    def _on_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        if not self.preprocess_done:
            self.preprocess_done = True
            self.preprocess_once_fn()
        return grad if self.preprocess_per_tensor_fn is None else self.preprocess_per_tensor_fn(grad)

    def remove_hooks(self) -> None:
        for handle in self.hook_handles:
            handle.remove()
        self.hook_handles.clear()

    def reset(self) -> None:
        """The next backward calls ``preprocess_once_fn`` again."""
        self.preprocess_done = False


def _graph_tensors(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.grad_fn is not None else []
    parts = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _graph_tensors(part)]


def register_output_backward_hooks(
    outputs: Any,
    preprocess_once_fn: Callable[[], None],
    preprocess_per_tensor_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> OutputBackwardHookManager:
    """A manager with hooks on ``outputs``; see there."""
    manager = OutputBackwardHookManager(preprocess_once_fn, preprocess_per_tensor_fn)
    manager.register_hooks_on_outputs(outputs)
    return manager


def check_internal_apis_for_count_used_parameters() -> bool:
    """Whether this torch can say which nodes a backward will run."""
    return hasattr(torch.autograd.graph, "_get_grad_fn_or_grad_acc") and all(
        hasattr(torch._C, name) for name in ("_current_graph_task_id", "_will_engine_execute_node")
    )


def count_used_parameters_in_backward(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Number of the parameters that the running backward reaches; to be called from a hook of that backward.

    Raises:
        StateError: there is no backward under way.
    """
    if torch._C._current_graph_task_id() == -1:
        raise StateError(
            "no backward is under way",
            where="count_used_parameters_in_backward",
            fix="call it from a hook that backward calls",
        )
    with torch.enable_grad():
        found = {
            torch.autograd.graph._get_grad_fn_or_grad_acc(param)
            for param in parameters
            if isinstance(param, torch.Tensor) and param.requires_grad
        }
    return sum(map(torch._C._will_engine_execute_node, found))


def all_gather_into_tensor_dp_groups(
    groups_flat: Sequence[torch.Tensor],
    partitioned_param_groups: Sequence[Sequence[torch.Tensor]],
    dp_process_group: Sequence[Any],
) -> None:
    """Gathers each flat group from the ranks' equal parts of it, over its own process group; a group of one rank is
    whole.
    """
    for flat, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group):
        if process_groups.get_world_size(group) > 1:
            comm.all_gather_into_tensor(flat, parts[process_groups.get_rank(group)], group)


def all_gather_dp_groups(
    groups_flat: Sequence[torch.Tensor],
    partitioned_param_groups: Sequence[Sequence[torch.Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """``all_gather_into_tensor_dp_groups``.

    The last two arguments cut the work where a backend has no gather into one tensor; each that torch has today does.
    """
    all_gather_into_tensor_dp_groups(groups_flat, partitioned_param_groups, dp_process_group)


_MOMENTS = ("exp_avg", "exp_avg_sq")


def offload_adam_states(
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
    pin_memory: bool = False,
    non_blocking: bool = False,
) -> None:
    """Moves the moments of a torch optimizer of the Adam kind to ``device``.

    The buffers there are kept in the state, under the key "exp_avg_offload_buffer" and its like, for the next time.
    With ``non_blocking`` synchronise before reading them.
    """
    for state in optimizer.state.values():
        for key in _MOMENTS:
            if key in state:
                buffer = state.get(f"{key}_offload_buffer")
                if buffer is None:
                    buffer = torch.empty_like(state[key], device=device)
                    buffer = get_accelerator().pin_memory(buffer) if pin_memory else buffer
                    state[f"{key}_offload_buffer"] = buffer
                buffer.copy_(state[key], non_blocking=non_blocking)
                state[key].data = buffer


def reload_adam_states(
    optimizer: torch.optim.Optimizer, device: torch.device | str, non_blocking: bool = False
) -> None:
    """Brings the states that ``offload_adam_states`` has moved back to ``device``.

    Raises StateError where it has moved nothing.
    """
    for state in optimizer.state.values():
        for key in _MOMENTS:
            if key in state:
                if f"{key}_offload_buffer" not in state:
                    raise StateError(
                        f"{key} has not been offloaded",
                        where="reload_adam_states",
                        fix="call offload_adam_states first",
                    )
                state[key].data = state[f"{key}_offload_buffer"].to(device, non_blocking=non_blocking)


_graphs: dict[str, Any] = {}


def graph_process(replay_first_step: bool, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Runs a function of device operations as a captured graph.

    The first call under its name runs it, captures it and, with ``replay_first_step``, replays it once. Later calls
    replay it and ignore their arguments, so the data must stay at its addresses. Raises StateError on the CPU, which
    has no graphs.
    """
    accelerator = get_accelerator()
    if func.__name__ in _graphs:
        accelerator.replay_graph(_graphs[func.__name__])
        return
    graph = accelerator.create_graph()
    stream = accelerator.Stream()
    stream.wait_stream(accelerator.current_stream())
    with accelerator.stream(stream):
        func(*args, **kwargs)
    accelerator.current_stream().wait_stream(stream)
    with accelerator.capture_to_graph(graph):
        func(*args, **kwargs)
    _graphs[func.__name__] = graph
    if replay_first_step:
        accelerator.replay_graph(graph)


def is_transformers_cache(obj: Any) -> bool:
    """Whether ``obj`` is a cache of keys and values from transformers; False where transformers is not installed."""
    return any(cls.__name__ == "Cache" and cls.__module__ == "transformers.cache_utils" for cls in type(obj).__mro__)
