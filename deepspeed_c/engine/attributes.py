"""Attributes of DeepSpeed's engine that are no methods and that programs read, as rows of a table.

A row is asked only for a name that the engine itself lacks, and before the model's attributes, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["ATTRIBUTES"]


def _names_of_sparse_tensors(engine: Any) -> set[str]:
    """Weights of embeddings whose gradients are sent as rows."""
    if not engine.sparse_gradients_enabled():
        return set()
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {f"{name}.weight" for name, module in engine.module.named_modules() if isinstance(module, kinds)}


def _of_loader(attribute: str) -> Callable[[Any], Any]:
    return lambda engine: getattr(engine.training_dataloader, attribute, None)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda engine: value


# Attribute -> its value for an engine. Features that are not built have the values that they have when they are off.
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "client_optimizer": lambda engine: None if engine.optimizer_name() else engine.basic_optimizer,
    "client_lr_scheduler": lambda engine: None if engine.scheduler_name() else engine.lr_scheduler,
    "training_data": _of_loader("dataset"),
    "collate_fn": _of_loader("collate_fn"),
    "param_names": lambda engine: {param: name for name, param in engine.module.named_parameters()},
    "sparse_tensor_module_names": _names_of_sparse_tensors,
    "inside_no_sync_ctxt": lambda engine: engine._passes.is_inside_no_sync,
    "gas_boundary_ctr": lambda engine: engine.global_steps,
    "dist_backend": lambda engine: torch.distributed.get_backend(),
    "pipeline_parallelism": _always(False),
    "flatten": _always(_flatten_dense_tensors),
    "unflatten": _always(_unflatten_dense_tensors),
    "gradient_average": _always(True),
    "dont_change_device": _always(False),
    "use_ds_comm": _always(False),
    "has_moe_layers": _always(False),
    "num_experts": lambda engine: [],
    "gate_modules": lambda engine: [],
    "moe_layers": lambda engine: [],
    "progressive_layer_drop": _always(None),
    "eigenvalue": _always(None),
    "block_eigenvalue": _always(None),
    "optimized_linear_base_weight_sharding": _always(False),
    "optimized_linear_lora_enabled": _always(False),
}
