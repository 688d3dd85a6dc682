"""The placement of each stage's states in limited memory: ``csrc/zero/tier.c`` computes it from the planner's byte
counts, and this module writes the configuration for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deepspeed_c import _C
from deepspeed_c.config.stages import STAGES
from deepspeed_c.plan.memory import GRADIENTS, MASTERS, STATE, SWAP, WEIGHTS, MemoryPlan, Offload

__all__ = ["NVME_PATH", "TIERS", "Budgets", "Placed", "Rates", "offload_section", "place_states", "suggest_ratio"]

# The swap folder in a plan if the configuration names none.
NVME_PATH = "/local_nvme"

TIERS = {_C.TIER_DEVICE: "device", _C.TIER_HOST: "host", _C.TIER_NVME: "NVMe"}
_DEVICES = {_C.TIER_DEVICE: "none", _C.TIER_HOST: "cpu", _C.TIER_NVME: "nvme"}
STATES = (MASTERS, STATE, GRADIENTS, WEIGHTS)


class Budgets(NamedTuple):
    """Bytes that a rank may use of each kind of memory. A rank that trains on the CPU uses only the device's budget."""

    device: int
    host: int = 0
    nvme: int = 0


class Rates(NamedTuple):
    """Bytes that a rank moves in a second. The time of an update is the time to move its bytes. The defaults fit one of
    eight ranks on a node of accelerators."""

    device: float = 2e12
    host: float = 25e9
    link: float = 25e9


class Placed(NamedTuple):
    """The placement of one stage's states, or the reason why there is none."""

    stage: int
    offload: Offload
    tiers: dict[str, str]  # name of the tier by kind; empty if nothing fits
    plan: MemoryPlan | None
    refusal: str = ""
    ratio: float | None = (
        None  # from ``suggest_ratio``, if the optimizer's state is in host memory and a device computes
    )


def offload_section(stage: int, offload: Offload, nvme_path: str | None) -> dict[str, Any]:
    """The part of a configuration that requests a placement."""
    zero: dict[str, Any] = {"stage": stage}
    if offload.optimizer != "none":
        zero["offload_optimizer"] = {"device": offload.optimizer}
        if offload.optimizer == "nvme":
            zero["offload_optimizer"]["nvme_path"] = nvme_path or NVME_PATH
    if offload.params != "none":
        zero["offload_param"] = {"device": offload.params}
        if offload.params == "nvme":
            zero["offload_param"] |= {"nvme_path": nvme_path or NVME_PATH, "max_in_cpu": offload.kept_elems}
    return {"zero_optimization": zero}


def place_states(
    stage: int, plan_of: Callable[[Offload], MemoryPlan | str], budgets: Budgets, *, is_host: bool = False
) -> Placed:
    """Places the states of a stage within ``budgets``.

    ``plan_of`` plans the stage with an offload choice, or returns the reason why the engine refuses it. States move in
    the same combinations as in the configuration: the optimizer's state moves with the master weights, and sums of
    gradients move at most to the host. All other bytes (activations, gathered weights, buffers) are first subtracted
    from the device's budget. ``is_host``: ranks train on the CPU.
    """
    none = plan_of(Offload())
    if isinstance(none, str):
        return Placed(stage, Offload(), {}, None, none)
    plans = {"none": none, "cpu": none if is_host else plan_of(Offload("cpu")), "nvme": plan_of(Offload("nvme"))}
    found = {place: plan for place, plan in plans.items() if not isinstance(plan, str)}
    may_move_weights = STAGES[stage].parameters and not isinstance(plan_of(Offload(params="cpu")), str)
    steady = [phase for name, phase in none.phases.items() if name != "initialize"]
    fixed = max(phase.nbytes - sum(phase.kinds.get(kind, 0) for kind in STATES) for phase in steady)
    if fixed > budgets.device:
        why = f"what is no state takes {fixed} bytes of the device, which has {budgets.device}"
        return Placed(stage, Offload(), {}, None, why)
    try:
        tiers, _ = _C.tier_plan(
            _kinds(none, found, may_move_weights, is_host), (budgets.device - fixed, budgets.host, budgets.nvme)
        )
    except MemoryError as error:
        why = f"{str(error).partition(': ')[2]}; beside them {fixed} bytes of the device are taken"
        return Placed(stage, Offload(), {}, None, why)
    offload = Offload(_DEVICES[tiers[0]], _DEVICES[tiers[3]])
    plan = plan_of(offload)
    if isinstance(plan, str):
        return Placed(stage, offload, {}, None, plan)
    return Placed(
        stage,
        offload,
        {kind: TIERS[tier] for kind, tier in zip(STATES, tiers)},
        plan,
        _excess(plan, budgets),
    )


def suggest_ratio(placed: Placed, budgets: Budgets, rates: Rates) -> float:
    """The fraction of the update that the host should compute, rounded up to hundredths (Twin-Flow;
    ``csrc/include/dsc/tier.h`` has the formula). With this fraction host and device finish at the same time. The
    fraction is larger if the device has no room for its part.

    In ``placed`` the states must be in host memory. An update reads and writes master weights and state, and reads the
    sums of gradients.
    """
    kinds = placed.plan.phases["step"].kinds
    sums, states = kinds.get(GRADIENTS, 0), kinds.get(MASTERS, 0) + kinds.get(STATE, 0)
    weights = kinds.get(WEIGHTS, 0) // (1 if STAGES[placed.stage].parameters else placed.plan.n_ranks)
    used = max(phase.nbytes for name, phase in placed.plan.phases.items() if name != "initialize")
    held, moved = states + sums, 2 * states + sums
    # The split is in bytes, because padding and scales can make the bytes per element a fraction.
    ratio, _ = _C.twin_flow_ratio(
        n_elems=held,
        device_elems_per_s=rates.device * held / moved,
        host_elems_per_s=rates.host * held / moved,
        link_bytes_per_s=rates.link,
        link_bytes_per_elem=(sums + weights) / held,
        state_bytes_per_elem=1,
        device_bytes=max(budgets.device - used, 0),
    )
    return min(math.ceil(ratio * 100) / 100, 1.0)  # rounded up, so that the device's part fits


def _excess(plan: MemoryPlan, budgets: Budgets) -> str:
    """Describes the phase in which a run with that placement exceeds a budget; "" if there is none. The start of a run
    may need more memory, and layouts with swapping have other buckets."""
    for name, phase in plan.phases.items():
        needs = (("device", phase.nbytes), ("host", phase.host_nbytes), ("nvme", phase.nvme_nbytes))
        for memory, nbytes in needs:
            if nbytes > getattr(budgets, memory):
                lacking = nbytes - getattr(budgets, memory)
                return f"{name} needs {lacking} bytes more {memory} memory than there are"
    return ""


def _kinds(none: MemoryPlan, plans: Mapping[str, MemoryPlan], may_move_weights: bool, is_host: bool) -> list[tuple]:
    """The kinds in STATES, in the form of the C core."""
    held = {place: _largest(plan) for place, plan in plans.items()}
    here, there, swapped = held["none"], held.get("cpu", {}), held.get("nvme", {})
    buffers = swapped.get(SWAP, 0)
    # On the CPU the device's tensors are in host memory. Moving them to the host gains nothing, so the host's budget is
    # 0.
    behind = [buffers, 0] if is_host else [0, buffers]
    last = _C.TIER_NVME if swapped else _C.TIER_HOST if there else _C.TIER_DEVICE
    near = _C.TIER_DEVICE if is_host else min(last, _C.TIER_HOST)
    weights = here.get(WEIGHTS, 0)
    shard = weights if STAGES[none.stage].parameters else weights // none.n_ranks

    def square(kind: str, *, with_buffers: bool = False) -> list[list[int]]:
        on_nvme = [*(behind if with_buffers else [0, 0]), swapped.get(kind, here.get(kind, 0))]
        return [[here.get(kind, 0), 0, 0], [0, there.get(kind, here.get(kind, 0)), 0], on_nvme]

    return [
        # If the master weights are not on the device, updated weights come back over the link.
        (square(MASTERS, with_buffers=True), shard, 2 * swapped.get(MASTERS, 0), last, -1),
        (square(STATE), 0, 2 * swapped.get(STATE, 0), last, 0),
        (square(GRADIENTS), there.get(GRADIENTS, 0), 0, near, 0),
        # Weights are gathered in forward and again in backward, and written once.
        (square(WEIGHTS), 2 * weights, 3 * weights, _C.TIER_NVME if may_move_weights else _C.TIER_DEVICE, -1),
    ]


def _largest(plan: MemoryPlan) -> dict[str, int]:
    """Bytes of each kind at the peak of the phase "step"."""
    return plan.phases["step"].kinds
