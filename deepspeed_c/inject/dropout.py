"""Dropout of a cut model: the regions in which ranks drop different elements, and the dropouts of adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_c.inject.draws import DropoutRegion
from deepspeed_c.inject.plan import Planned
from deepspeed_c.inject.ranks import TensorRanks

__all__ = ["PartDropout", "WholeDropout", "cut_dropouts", "drops_out"]


def cut_dropouts(model: torch.nn.Module, planned: Sequence[Planned], ranks: TensorRanks) -> dict[str, DropoutRegion]:
    """Return the regions of ``model`` that apply dropout, by name, and replace the dropouts of its adapters."""
    styles: dict[str, set[str]] = {}
    for step in planned:
        styles.setdefault(step.region, set()).add(step.rule.style)
    regions = {
        name: DropoutRegion(ranks)
        for name, found in styles.items()
        if name and {"column", "row"} <= found and drops_out(model.get_submodule(name))
    }
    for step in planned:
        if step.adapted:
            is_part = step.rule.style == "row" and not step.rule.gathers
            _cut_adapter(model.get_submodule(step.adapted), ranks, regions.get(step.region), is_part=is_part)
    return regions


def drops_out(module: torch.nn.Module) -> bool:
    """Whether ``module``, or a direct child, may apply dropout."""
    for holder in (module, *module.children()):
        if isinstance(holder, torch.nn.Dropout) and holder.p > 0:
            return True
        for name, value in vars(holder).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
        if any(isinstance(child, torch.nn.Dropout) and child.p > 0 for child in holder.children()):
            return True
    return False


def _cut_adapter(layer: torch.nn.Module, ranks: TensorRanks, region: DropoutRegion | None, *, is_part: bool) -> None:
    """Make the adapters of ``layer`` drop the same elements of a whole input on all ranks.

    is_part: the input is this rank's columns only, so this rank draws separate numbers. region: the region of the layer
    in which ranks draw different numbers; None where there is none."""
    for name, dropout in list(layer.lora_dropout.items()):
        if isinstance(dropout, torch.nn.Dropout) and dropout.p > 0:
            layer.lora_dropout[name] = PartDropout(dropout, ranks) if is_part else WholeDropout(dropout, region)


class WholeDropout(torch.nn.Dropout):
    """Dropout on a tensor that is whole on all ranks. All ranks draw the same numbers for it, even inside a region
    where ranks draw different numbers.
    """

    def __init__(self, dropout: torch.nn.Dropout, region: DropoutRegion | None) -> None:
        super().__init__(dropout.p, dropout.inplace)
        self.region = region
        self.train(dropout.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.region is None or not self.training:
            return super().forward(x)
        with self.region.drawn_alike(x.device):
            return super().forward(x)


class PartDropout(torch.nn.Dropout):
    """Dropout on a rank's own columns, with numbers that differ between ranks."""

    def __init__(self, dropout: torch.nn.Dropout, ranks: TensorRanks) -> None:
        super().__init__(dropout.p, dropout.inplace)
        self.region = DropoutRegion(ranks)
        self.train(dropout.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        self.region.enter(x.device)
        try:
            return super().forward(x)
        finally:
            self.region.leave(x.device)
