"""DeepSpeed's quick estimates of model states, ``estimate_zero{2,3}_model_states_mem_needs*``; ``deepspeed_c plan``
gives exact numbers.

Bytes per parameter of mixed-precision training with Adam (arXiv 1910.02054, section 5.1): 2 for the 16-bit weight, 2
for its gradient, 4 for the fp32 master weight, 8 for the two moments. Gradients are counted as in this package, which
reduces them into 16-bit shards without an fp32 copy. Without offload, host memory is needed only at the start, for the
fp32 model that each process of a node builds.
"""

from __future__ import annotations

import torch

from deepspeed_c.errors import ConfigError
from deepspeed_c.zero.weights.param import shape_of

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_to_params",
]

WEIGHT = GRADIENT = 2
MASTER = GIVEN = 4
MOMENTS = 8
UPDATED = MASTER + MOMENTS  # held by the optimizer


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(host bytes per node, device bytes per rank) of model states at stage 2.

    ``additional_buffer_factor`` multiplies the host bytes, to leave room for other data. Raises ConfigError for invalid
    counts.
    """
    n_ranks = _ranks(num_gpus_per_node, num_nodes)
    _check_params(total_params)
    given = GIVEN * total_params * num_gpus_per_node
    if cpu_offload:
        device = WEIGHT * total_params
        # All ranks of a node hold their shards of gradients, masters and moments. Earlier, each rank builds the whole
        # model.
        host = max(given, (GRADIENT + UPDATED) * total_params / num_nodes)
    else:
        device = WEIGHT * total_params + (GRADIENT + UPDATED) * total_params / n_ranks
        host = given
    return int(host * additional_buffer_factor), int(device)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(host bytes per node, device bytes per rank, bytes of the largest layer) of model states at stage 3.

    The largest layer is gathered whole, with its gradients. This takes 4 bytes a parameter on the device, besides the
    shards.
    ``zero_init``: the model is built under ``zero.Init``, so that no process ever holds the whole model.
    ``cpu_offload_params`` has an effect only together with ``cpu_offload``. The other arguments are explained in
    ``estimate_zero2_model_states_mem_needs``.
    """
    n_ranks = _ranks(num_gpus_per_node, num_nodes)
    _check_params(total_params)
    if not 0 <= largest_layer_params <= total_params:
        raise ConfigError(
            f"a layer of {largest_layer_params} parameters is none of a model of {total_params}",
            where="largest_layer_params",
            fix="pass a number from 0 to total_params",
        )
    layer = (WEIGHT + GRADIENT) * largest_layer_params
    shards = WEIGHT + GRADIENT + UPDATED
    on_host = 0
    if cpu_offload:
        on_host = shards if cpu_offload_params else shards - WEIGHT
    device = layer + (shards - on_host) * total_params / n_ranks
    # Weights that a process builds before they are sharded: one layer at a time under zero.Init, else the whole model.
    given = GIVEN * num_gpus_per_node * (largest_layer_params if zero_init else total_params)
    host = max(given, on_host * total_params / num_nodes)
    return int(host * additional_buffer_factor), int(device), layer


def model_to_params(model: torch.nn.Module) -> tuple[int, int]:
    """(number of parameters, number of parameters of the largest single module). The first number counts shared
    parameters once.

    Parameters that are sharded or on the meta device count with their full size.
    """
    total = sum(shape_of(p).numel() for p in model.parameters())
    largest = max((sum(shape_of(p).numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    return total, largest


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 2 for a model that exists (on the meta device, or sharded, too)."""
    total, _ = model_to_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 3 for a model that exists (on the meta device, or sharded, too)."""
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 2 for a number of parameters, with and without offload."""
    rows = []
    for cpu_offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
        )
        rows.append((host, device, f"offload_optimizer={_place(cpu_offload)}"))
    _print(f"{total_params / 1e6:.0f}M parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 for numbers of parameters, for each choice of offload and ``zero.Init``."""
    rows = []
    for cpu_offload, cpu_offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                cpu_offload,
                cpu_offload_params,
                zero_init,
                additional_buffer_factor,
            )
            places = f"offload_param={_place(cpu_offload_params)}, offload_optimizer={_place(cpu_offload)}"
            rows.append((host, device, f"{places}, zero_init={int(zero_init)}"))
    what = f"{total_params / 1e6:.0f}M parameters, {largest_layer_params / 1e6:.0f}M in the largest layer"
    _print(what, num_gpus_per_node, num_nodes, rows)


def _place(is_on_host: bool) -> str:
    return "cpu " if is_on_host else "none"


def _print(what: str, n_per_node: int, n_nodes: int, rows: list[tuple[int, int, str]]) -> None:
    print(f"Model states of {what} on {n_nodes} x {n_per_node} ranks:")
    print("host, node | device, rank | options")
    for host, device, options in rows:
        print(f"{host / 2**30:8.2f}GB | {device / 2**30:10.2f}GB | {options}")


def _ranks(n_per_node: int, n_nodes: int) -> int:
    for name, n in (("num_gpus_per_node", n_per_node), ("num_nodes", n_nodes)):
        if n < 1:
            raise ConfigError(f"{n} is not a number of them", where=name, fix="pass an integer >= 1")
    return n_per_node * n_nodes


def _check_params(total_params: int) -> None:
    if total_params < 0:
        raise ConfigError(
            f"{total_params} is not a number of parameters", where="total_params", fix="pass an integer >= 0"
        )
