"""Borders around the regions of a cut model, and the division of the tokens outside them over ranks."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import StateError
from deepspeed_c.inject.draws import DropoutRegion
from deepspeed_c.inject.dropout import drops_out
from deepspeed_c.inject.flow import Flow
from deepspeed_c.inject.overlap import Border, TokenStream
from deepspeed_c.inject.ranks import TensorRanks

__all__ = ["open_borders"]


def open_borders(model: torch.nn.Module, flow: Flow, section: TensorParallel, ranks: TensorRanks) -> None:
    """Put a ``Border`` around each region. Divide the tokens outside the regions over ranks if the configuration asks
    for it.
    """
    stream = None
    if section.sequence_parallel_norms:
        modules = [model.get_submodule(name) for name in flow.layers]
        draws = any(drops_out(module) for module in modules)
        stream = TokenStream(ranks.comm, DropoutRegion(ranks) if draws else None)
        modules[0].register_forward_pre_hook(stream.begin, with_kwargs=True)
        modules[-1].register_forward_hook(stream.end)
        model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
    for region in flow.regions:
        columns = [model.get_submodule(name) for name in region.columns]
        border = Border(
            model.get_submodule(region.name),
            columns,
            ranks.comm,
            region.name,
            overlaps=section.tp_overlap_comm,
            stream=stream,
            is_attention=region.is_attention,
        )
        for layer in (*columns, model.get_submodule(region.row)):
            layer.stay_in(border)


def _refuse_hidden_states(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("output_hidden_states")
    if module.training and (getattr(module.config, "output_hidden_states", False) if wanted is None else wanted):
        raise StateError(
            "each rank has its own tokens of hidden states",
            where="output_hidden_states with tensor_parallel.sequence_parallel_norms",
            fix="ask for them in evaluation, or set one of the two to false",
        )
