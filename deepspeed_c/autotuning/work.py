"""The work of a step, from a candidate's plan and from a run of its model on tensors without data.

Only work that no kernel can avoid is counted. Attention is left out, whose masks let kernels skip products, and so are
convolutions, which have faster algorithms, and the recomputation of layers for their backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_c.autotuning.bound import StepWork
from deepspeed_c.engine.precision import Precision
from deepspeed_c.plan.activations import (
    MODELS_OWN,
    ForwardShape,
    first_result,
    likely_inputs,
    running_without_data,
    twin_without_data,
)
from deepspeed_c.plan.memory import MASTERS, STATE, MemoryPlan

__all__ = ["state_work", "trace_products"]


def trace_products(model: torch.nn.Module, batch: ForwardShape, precision: Precision, device_type: str) -> int:
    """FLOPs of the matrix products of a forward and its backward, from a run of a copy of ``model`` on tensors without
    data. 0 if the model does not run on them."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # these imports are large
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    formulas = {each: flop_registry[each] for each in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)}

    class Products(TorchDispatchMode):
        n_flops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out, formula = func(*args, **(kwargs or {})), formulas.get(func.overloadpacket)
            if formula is not None:
                self.n_flops += formula(*args, **(kwargs or {}), out_val=out)
            return out

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        twin = twin_without_data(model, precision.dtype, fake, None)
        for inputs in likely_inputs(twin, batch, precision.dtype or torch.float32):
            products = Products()
            try:
                with running_without_data(precision, device_type, None), torch.enable_grad(), products:
                    found = twin(**inputs) if isinstance(inputs, dict) else twin(*inputs)
                    result = first_result(found)
                    if result is not None:
                        torch.autograd.backward(result.float().sum())
            except MODELS_OWN:
                continue
            return products.n_flops
    return 0


def state_work(plan: MemoryPlan, n_trained: int, config: Any, device_type: str) -> StepWork:
    """The work of an update, from the plan of a rank. n_trained: elements with gradients, without those of
    experts."""
    kinds, is_host, zero = plan.phases["step"].kinds, device_type == "cpu", config.zero
    elsewhere = plan.offload.kinds(plan.stage, is_host=is_host)
    kept = sum(kinds.get(kind, 0) for kind in (MASTERS, STATE) if kind not in elsewhere)
    # Two bytes an element are the least that is sent. Offloaded states are always sharded.
    is_offloaded = not is_host and plan.offload.optimizer != "none"
    link = 2 * n_trained / plan.n_ranks * zero.offload_optimizer.ratio if is_offloaded else 0.0
    peer = 0.0 if is_host else 2 * n_trained * (plan.n_ranks - 1) / plan.n_ranks
    return StepWork(0.0, 2.0 * kept, link, peer, is_serial=plan.offload.optimizer == "none")
