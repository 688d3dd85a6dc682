"""LoRA adapters of peft on a cut model: the two factors of an adapter are cut as the layer below the adapter is.

With y = x W + x A B there are two cases. Where W is cut by columns, B is cut by the same columns and A is whole: x A is
whole on all ranks, and B is a column layer, which sums the gradient of its input. Where W is cut by rows, A is cut by
the same rows and B is whole: A is a row layer, and its sum is whole. So a whole factor has the same gradient on all
ranks, without a further sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.inject.linear import product_of
from deepspeed_c.inject.plan import Planned

__all__ = ["with_adapters"]

_FIX = (
    "use LoRA without variants on plain linear layers, merge the adapter first (merge_and_unload), or leave these"
    ' layers whole: "partition_type": "skip" in tensor_parallel.partition_config'
)


def with_adapters(planned: Iterable[Planned]) -> Iterator[Planned]:
    """``planned``, but each adapted layer is replaced by those of its linear layers that are to be cut.

    Raises ModelError for an adapter that cannot be cut with its layer.
    """
    for step in planned:
        base = getattr(step.module, "base_layer", None)
        # Rules of these styles cut nothing: the whole adapted layer computes as before.
        if not isinstance(base, torch.nn.Module) or step.rule.style in ("shared", "latent"):
            yield step
            continue
        factors = _factors_of(step, base)
        yield replace(step, name=f"{step.name}.base_layer", module=base, adapted=step.name)
        for name, factor in factors:
            yield replace(step, name=f"{step.name}.{name}", module=factor, adapted=step.name)


def _factors_of(step: Planned, base: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Name and module of each factor that is cut with ``base``, after checks."""
    kind = type(step.module)
    is_lora = kind.__name__ == "Linear" and kind.__module__.startswith("peft.tuners.lora.")
    variants = sorted(type(variant).__name__ for variant in getattr(step.module, "lora_variant", {}).values())
    if step.rule.style not in ("column", "row") or not is_lora:
        problem = f"{kind.__module__}.{kind.__name__} is an adapter that cannot be cut"
    elif variants or any(getattr(step.module, "use_dora", {}).values()):
        problem = f"{', '.join(variants) or 'DoRA'} needs the whole weight, of which a rank has a part"
    elif product_of(base) is None:
        problem = f"its base layer, {type(base).__name__}, is no linear layer that can be cut"
    else:
        which = "lora_B" if step.rule.style == "column" else "lora_A"
        return [(f"{which}.{adapter}", factor) for adapter, factor in getattr(step.module, which).items()]
    raise ModelError(problem, where=step.name, fix=_FIX)
