"""Makes ``save_pretrained`` of a cut model write whole weights, as a single process would."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import StateError

__all__ = ["save_whole", "whole_state"]


def save_whole(model: torch.nn.Module, comm: Collectives) -> None:
    """Make every ``save_pretrained`` in ``model`` write whole weights, on the first rank of ``comm``.

    All ranks of ``comm`` call ``save_pretrained`` together. A ``state_dict`` that the caller passes is written
    unchanged.
    """
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            module.__dict__["save_pretrained"] = _wrap(module, module.save_pretrained, comm)


def _wrap(module: torch.nn.Module, save: Any, comm: Collectives) -> Any:
    signature = inspect.signature(save)

    @wraps(save)
    def save_together(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        more = given.arguments if "state_dict" in signature.parameters else given.arguments.setdefault("kwargs", {})
        if more.get("state_dict") is None:
            more["state_dict"] = whole_state(module, comm)
            is_main = given.arguments.get("is_main_process", True)
            given.arguments["is_main_process"] = is_main and comm.rank == 0
        return save(*given.args, **given.kwargs)

    return save_together


def whole_state(module: torch.nn.Module, comm: Collectives) -> dict[str, torch.Tensor]:
    """The state dict of ``module`` with every cut parameter whole. Collective over ``comm``, and over the ranks that
    hold a stack of experts together.

    Raises StateError, on all ranks, where ZeRO has cut the parts further.
    """
    kept = module.state_dict(keep_vars=True)
    for name, value in kept.items():
        cut = getattr(value, "tp_cut", None) or getattr(value, "expert_cut", None)
        if cut is not None and value.shape != cut.local_shape:
            raise StateError(
                f"its weights are sharded over data-parallel ranks (stage 3): {name}",
                where="save_pretrained",
                fix="pass state_dict=engine._zero3_consolidated_16bit_state_dict()",
            )
    whole: dict[str, torch.Tensor] = module.state_dict()
    for name, value in kept.items():
        cut = getattr(value, "tp_cut", None)
        if cut is not None:
            whole[name] = value.new_zeros(cut.logical_shape, requires_grad=False)
            if cut.rank == cut.copies[0]:
                cut.put(value.detach(), whole[name])
            comm.all_reduce(whole[name].view(-1), label=f"whole {name}").wait()
    return whole
