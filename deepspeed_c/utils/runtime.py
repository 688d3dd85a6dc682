"""Small helpers that training scripts import from ``deepspeed.runtime.utils``; nothing in this package needs them."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c import comm
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.errors import StateError
from deepspeed_c.logging import write_line
from deepspeed_c.profile.timers import see_memory_usage
from deepspeed_c.utils import groups
from deepspeed_c.utils.gradients import (
    OutputBackwardHookManager,
    all_gather_dp_groups,
    all_gather_into_tensor_dp_groups,
    check_internal_apis_for_count_used_parameters,
    count_used_parameters_in_backward,
    get_alignment_padding,
    get_flattened_grad_norm,
    get_grad_zeros,
    graph_process,
    is_model_parallel_parameter,
    is_transformers_cache,
    maybe_loss_for_backward,
    offload_adam_states,
    register_output_backward_hooks,
    reload_adam_states,
)
from deepspeed_c.zero.weights.param import ZeroParamStatus

__all__ = [
    "OutputBackwardHookManager",
    "align_dense_tensors",
    "all_gather_dp_groups",
    "all_gather_into_tensor_dp_groups",
    "call_to_str",
    "check_internal_apis_for_count_used_parameters",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "compare_tensors_in_structures",
    "copy_to_device",
    "count_used_parameters_in_backward",
    "empty_cache",
    "ensure_directory_exists",
    "filter_empty_parameters",
    "get_alignment_padding",
    "get_checkpoint_folder_size",
    "get_flattened_grad_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_grad_zeros",
    "get_inactive_params",
    "get_ma_status",
    "get_norm_with_moe_layers",
    "get_norm_with_moe_layers_fast",
    "get_only_unique_item",
    "get_tensor_bytes",
    "get_weight_norm",
    "graph_process",
    "has_inf_or_nan",
    "is_model_parallel_parameter",
    "is_transformers_cache",
    "mask_nan_or_inf_with_val_inplace",
    "maybe_loss_for_backward",
    "memory_status",
    "move_to_device",
    "offload_adam_states",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "register_output_backward_hooks",
    "reload_adam_states",
    "see_memory_usage",
    "set_random_seed",
]


def _map(item: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    if is_leaf(item):
        return function(item)
    if isinstance(item, (list, tuple)):
        return type(item)(_map(each, function, is_leaf) for each in item)
    if isinstance(item, dict):
        return {key: _map(each, function, is_leaf) for key, each in item.items()}
    return item


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """``item`` (a tensor, or lists, tuples and dictionaries of them) with the tensors that fit the criterion copied to
    ``device``, the rest as it is.
    """
    return _map(item, lambda tensor: tensor.to(device), criterion_func)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """``item`` with its tensors on ``device``.

    With a criterion, fitting tensors are moved in place (a parameter stays the same object) and the rest stays.
    """
    if criterion_func is None:
        return _map(item, lambda tensor: tensor.to(device), torch.is_tensor)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        tensor.data = tensor.data.to(device)
        return tensor

    return _map(item, move, criterion_func)


def get_tensor_bytes(item: Any) -> int:
    """Bytes of the elements of all tensors in ``item``."""
    if torch.is_tensor(item):
        return item.numel() * item.element_size()
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return sum(map(get_tensor_bytes, parts))


def compare_tensors_in_structures(inputs1: list[Any] | dict[Any, Any], inputs2: list[Any] | dict[Any, Any]) -> bool:
    """Whether two lists, or two dictionaries, hold equal values; tensors are compared by their elements, on any device."""
    if type(inputs1) is not type(inputs2) or len(inputs1) != len(inputs2):
        return False
    if isinstance(inputs1, dict):
        return inputs1.keys() == inputs2.keys() and all(_equal(inputs1[key], inputs2[key]) for key in inputs1)
    return isinstance(inputs1, list) and all(map(_equal, inputs1, inputs2))


def _equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one, other.to(one.device))
    return not torch.is_tensor(one) and not torch.is_tensor(other) and one == other


def align_dense_tensors(tensor_list: list[torch.Tensor], alignment: int) -> list[torch.Tensor]:
    """The list, with a tensor of zeros at its end where its elements are not a multiple of ``alignment``."""
    missing = -sum(t.numel() for t in tensor_list) % alignment
    return [*tensor_list, tensor_list[0].new_zeros(missing)] if missing else tensor_list


def mask_nan_or_inf_with_val_inplace(
    input: torch.Tensor, device: torch.device | str | None = None, val: float = -1.0
) -> None:
    """Puts ``val`` in the place of inf and NaN. ``device`` is accepted: the tensor stays where it is."""
    input.masked_fill_(~torch.isfinite(input), val)


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Whether ``x`` has an inf or a NaN, as a tensor on its device. Of a sparse tensor the stored elements count.

    Only the largest and the smallest element are tested, so that no mask of the size of ``x`` is made. Both are NaN if
    any element is.
    """
    x = x._values() if x.is_sparse else x
    if x.numel() == 0:
        return torch.tensor(False, device=x.device)
    return ~(torch.isfinite(x.amax()) & torch.isfinite(x.amin()))


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The L2 norm of a vector whose parts have these L2 norms."""
    return math.hypot(*norm_list)


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, group: Any) -> torch.Tensor:
    """The norm of all tensors as one vector, over the ranks of ``group`` if there is one: an fp32 scalar where the
    first tensor lies; -1 for inf and NaN.
    """
    device = tensors[0].device if tensors else torch.device(get_accelerator().current_device_name())
    norms = [torch.linalg.vector_norm(t.detach(), norm_type, dtype=torch.float32).to(device) for t in tensors]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    if group is not None:
        is_max = math.isinf(norm_type)
        total = total if is_max else total.pow(norm_type)
        comm.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        total = total if is_max else total.pow(1 / norm_type)
    return torch.where(torch.isfinite(total), total, -1.0)


def _model_parallel(mpu: Any) -> Any:
    return None if mpu is None else mpu.get_model_parallel_group()


def _counted(parameters: Iterable[torch.Tensor], mpu: Any) -> list[torch.Tensor]:
    """The parameters that this rank counts. The first model-parallel rank counts the parameters that all of them hold
    alike."""
    is_first = mpu is None or mpu.get_model_parallel_rank() == 0
    return [p for p in parameters if is_first or is_model_parallel_parameter(p)]


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    use_graph: bool = False,
    moe_ep_group: Any = None,
) -> torch.Tensor:
    """The norm of the tensors as one vector, a scalar tensor; -1 for inf and NaN.

    With ``mpu`` over its model-parallel ranks, with ``moe_ep_group`` over that group too. ``use_graph`` changes
    nothing.
    """
    total = _norm(input_tensors, float(norm_type), _model_parallel(mpu))
    if moe_ep_group is None:
        return total
    return _norm([torch.where(total < 0, math.nan, total)], float(norm_type), moe_ep_group)


def get_norm_with_moe_layers(
    non_expert_norm: float | torch.Tensor,
    mpu: Any,
    expert_tensors: Mapping[str, Sequence[torch.Tensor]],
    norm_type: float = 2,
) -> float:
    """The norm of a model with experts: ``non_expert_norm`` and the norms of ``expert_tensors``, this rank's tensors by
    the name of the groups of experts ("ep_size_2"), over the ranks that together hold the experts. -1 for inf and NaN.

    Collective. Raises StateError for a name without groups.
    """
    norms = [float(non_expert_norm)]
    for name, tensors in expert_tensors.items():
        group = groups._get_expert_parallel_group(name)
        norms.append(float(get_global_norm_of_tensors(tensors, norm_type, mpu, moe_ep_group=group)))
    if -1 in norms:
        return -1
    total = torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), float(norm_type)).item()
    return total if math.isfinite(total) else -1


def get_norm_with_moe_layers_fast(all_groups_norm: float | torch.Tensor, group: Any) -> float:
    """The mean of the ranks' norms ``all_groups_norm``, which DeepSpeed takes for a norm that all ranks agree on.
    Collective over ``group``."""
    norm = torch.tensor(float(all_groups_norm), device=get_accelerator().current_device_name())
    comm.all_reduce(norm, group=group)
    return norm.item() / comm.get_world_size(group)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: float | torch.Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
    use_graph: bool = False,
) -> float | torch.Tensor:
    """Scales the tensors, in place, so that their global norm is at most ``max_norm``; returns the norm before.

    ``use_graph`` changes nothing.

    A norm that is inf or NaN (-1) leaves them as they are.
    """
    if global_norm is None:
        global_norm = get_global_norm_of_tensors(input_tensors, mpu=mpu)
    factor = max_norm / (float(global_norm) + eps)
    if 0 <= factor < 1:
        torch._foreach_mul_([t.detach() for t in input_tensors], factor)
    return global_norm


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Scales the ``grad`` of the parameters, in place, so that their norm is at most ``max_norm``; returns the norm
    before, a scalar tensor.

    The norm is over model-parallel ranks (with ``mpu``) and the mean over data-parallel ones. For parameters that no
    engine trains: an engine keeps no ``grad`` and clips by its configuration.
    """
    parameters = [parameters] if torch.is_tensor(parameters) else list(parameters)
    with_grad = [p for p in parameters if p.grad is not None]
    total = _norm([p.grad for p in _counted(with_grad, mpu)], float(norm_type), _model_parallel(mpu))
    if comm.is_initialized():
        group = groups.get_data_parallel_group()
        total = total / comm.get_world_size(group)
        comm.all_reduce(total, group=group)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in with_grad:
        p.grad.detach().mul_(factor.to(p.grad.device))
    return total


def get_weight_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of the parameters as one vector, with ``mpu`` over its model-parallel ranks; -1 for inf and NaN."""
    parameters = [parameters] if torch.is_tensor(parameters) else list(parameters)
    return _norm(_counted(parameters, mpu), float(norm_type), _model_parallel(mpu)).item()


def filter_empty_parameters(params: Any) -> Any:
    """A list of parameters, or of parameter groups, without parameters that have no elements and groups that have none
    left.
    """
    if not isinstance(params, (list, tuple)) or not params:
        return params
    if not isinstance(params[0], dict):
        return [p for p in params if p.numel() > 0]
    kept = [{**group, "params": [p for p in group["params"] if p.numel() > 0]} for group in params]
    return [group for group in kept if group["params"]]


def get_inactive_params(param_list: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The sharded parameters among these whose data is not here now."""
    return [p for p in param_list if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """The sums of the first 1, 2, ... weights."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The begins of ``num_parts`` equal runs of items, and the end of the last; the first runs have one item more where
    the number does not divide.
    """
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    each, more = divmod(num_items, num_parts)
    return [part * each + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Where ``num_parts`` runs of items begin, and the last one ends, such that the heaviest run is little heavier than
    the lightest one. No run is empty where there are as many items as runs.

    The cuts are those of DeepSpeed, so that a model has the same layers on the same ranks. They come from a table: the
    best cut of the first ``i`` items into ``j`` runs adds a last run to a best cut of fewer items into ``j - 1`` runs.
    Of equally good cuts the one with the shortest last run counts. A best cut does not have to consist of best cuts, so
    a few results are not the best of all.
    """
    n = len(weights)
    if n <= num_parts:
        return partition_uniform(n, num_parts)
    sums = [0, *accumulate(weights)]
    # The lightest and the heaviest run of the best cut of the first i items. Without runs there is no lightest one.
    best: list[tuple[float, float]] = [(math.inf, 0)] + [(math.inf, math.inf)] * n
    begins: list[list[int]] = []
    for part in range(1, num_parts + 1):
        longer, begin_of = [(math.inf, math.inf)] * (n + 1), [0] * (n + 1)
        for end in range(part, n + 1):
            spread = math.inf
            for begin in range(part - 1, end):
                lightest, heaviest = best[begin]
                last = sums[end] - sums[begin]
                low, high = min(lightest, last), max(heaviest, last)
                if high - low <= spread:
                    spread, longer[end], begin_of[end] = high - low, (low, high), begin
        best = longer
        begins.append(begin_of)
    bounds = [n]
    for begin_of in reversed(begins):
        bounds.append(begin_of[bounds[-1]])
    return bounds[::-1]


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The common value of all ``items``. Raises StateError (a RuntimeError) when they differ, or there is none."""
    items = list(items)
    if len(set(items)) != 1:
        raise StateError(f"{items} are not all the same", where="get_only_unique_item", fix="pass equal values")
    return items[0]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """``base(1, key='x')`` as text."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def set_random_seed(seed: int) -> None:
    """Seeds the generators of Python, torch and, where it is installed, numpy."""
    random.seed(seed)
    torch.manual_seed(seed % 2**63)
    try:
        import numpy
    except ModuleNotFoundError:
        return
    numpy.random.seed(seed % 2**32)


def ensure_directory_exists(filename: str) -> None:
    """Makes the folder that the file is to lie in."""
    os.makedirs(os.path.dirname(os.path.abspath(filename)), exist_ok=True)


def get_checkpoint_folder_size(save_dir: str, tag: str, local_rank: int | None = None) -> int:
    """Bytes of the files below ``save_dir/tag``: on rank 0 the sum over all hosts, each counted by its rank of
    ``local_rank`` 0. Collective.
    """
    size = 0
    if local_rank == 0:
        for folder, _, files in os.walk(os.path.join(save_dir, tag)):
            size += sum(os.path.getsize(os.path.join(folder, file)) for file in files)
    total = torch.tensor(size, device=get_accelerator().current_device_name())
    comm.reduce(total, dst=0)
    return int(total)


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Prints the memory of the device's allocator, on rank ``print_rank`` or all ranks (-1).

    ``reset_max`` begins the peaks anew before.
    """
    rank = comm.get_rank() if comm.is_initialized() else 0
    if print_rank not in (-1, rank):
        return
    accelerator = get_accelerator()
    accelerator.synchronize()
    if reset_max:
        accelerator.reset_peak_memory_stats()
    gib = [
        f"{name} {n_bytes / 2**30:.4f} GiB"
        for name, n_bytes in (
            ("allocated", accelerator.memory_allocated()),
            ("peak", accelerator.max_memory_allocated()),
            ("reserved", accelerator.memory_reserved()),
            ("peak reserved", accelerator.max_memory_reserved()),
        )
    ]
    write_line(f"rank {rank}, {accelerator.current_device_name()}: {msg}: {', '.join(gib)}", sys.stdout)


def get_ma_status() -> int:
    """Bytes of device memory that are allocated, on rank 0; 0 on the others."""
    return get_accelerator().memory_allocated() if not comm.is_initialized() or comm.get_rank() == 0 else 0


def empty_cache() -> None:
    """Returns the device's unused memory to the system and begins its peaks anew."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()
