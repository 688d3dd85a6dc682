"""The edit that gives a run on a CPU fast products of 16-bit elements, where torch has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.logging import log_dist
from deepspeed_c.ops.product_times import product_times
from deepspeed_c.ops.products import widen_products

__all__ = ["take_over_products"]


def take_over_products(
    model: torch.nn.Module, dtypes: Iterable[torch.dtype], ranks: Collectives, *, asks_no_clock: bool = False
) -> Callable[[], None]:
    """Widens the products of 16-bit dtypes, of the model or of ``dtypes``, if torch's are slow on any rank: all ranks
    must round alike. asks_no_clock: widens them in any case, because another run may measure other times. Returns the
    function that ends it. Collective.
    """
    used = {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} | set(dtypes)
    halves = used & {torch.bfloat16, torch.float16}
    if asks_no_clock:
        return widen_products(halves)
    times = {dtype: product_times(dtype) for dtype in sorted(halves, key=str)}
    for dtype, found in times.items():
        log_dist(f"products of {str(dtype)[6:]} {found}", ranks=[0])
    slow = {dtype for dtype, found in times.items() if found.is_torch_slow}
    return widen_products(set().union(*ranks.gather_objects(slow)))
