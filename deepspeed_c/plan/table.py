"""A plan for every stage and offload choice, and how it is printed: a table for people, JSON for programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deepspeed_c.config import load_config, problems_of
from deepspeed_c.engine.build import build_optimizer
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import DeepSpeedCError, UnsupportedConfigError
from deepspeed_c.plan.memory import KINDS, PHASES, MemoryPlan, Offload, plan_memory
from deepspeed_c.plan.sizes import ModelSizes, group_sizes, model_of, sizes_of
from deepspeed_c.zero.layout import mark_leaves
from deepspeed_c.zero.stages import STAGES

__all__ = ["Row", "Table", "as_json", "as_text", "plan_table"]

# What is assumed where sizes alone are planned and the configuration names no optimizer.
ASSUMED_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-4}}
OFFLOADS = (Offload(), Offload(optimizer=True), Offload(optimizer=True, params=True))
_OFFLOAD_KEYS = {
    "zero_optimization.offload_optimizer.device": "optimizer",
    "zero_optimization.offload_param.device": "params",
}


class Row(NamedTuple):
    """One stage with one offload choice: its plan, or why there is none."""

    stage: int
    offload: Offload
    plan: MemoryPlan | None
    refusal: str = ""


class Table(NamedTuple):
    """All rows, and what they were planned for."""

    rows: list[Row]
    chosen: int  # index of the row that the configuration asks for
    sizes: ModelSizes
    n_ranks: int
    precision: str
    optimizer: str  # "" for an engine that only evaluates
    device_type: str
    activation_bytes: int
    notes: list[str]


def plan_table(
    source: Any,
    n_ranks: int,
    *,
    sizes: ModelSizes | None = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    is_sharded: bool = False,
    device_type: str = "cpu",
    activation_bytes: int = 0,
) -> Table:
    """Plans ``sizes``, or ``model`` (on the meta device) with what else was given to ``initialize``, for every stage under the configuration ``source``.

    Raises what is wrong with the configuration (ConfigError) and with the optimizer (OptimizerError, ModelError). Offload, which this version refuses, is
    planned all the same, and noted.
    """
    notes: list[str] = []
    asked = Offload()
    overrides: dict[str, Any] = {}
    for problem in problems_of(source, world_size=n_ranks, batch="skip"):
        key = problem.where.split(" ")[0]
        if isinstance(problem, UnsupportedConfigError) and key in _OFFLOAD_KEYS:
            asked = asked._replace(**{_OFFLOAD_KEYS[key]: True})
            overrides[key] = "none"
            notes.append(f"{key}: offload is planned only; deepspeed_c.initialize refuses it in this version")
    config = load_config(source, world_size=n_ranks, overrides=overrides, batch="skip")
    if sizes is not None and config.optimizer is None:
        overrides["optimizer"] = ASSUMED_OPTIMIZER
        notes.append(f"the configuration names no optimizer: {ASSUMED_OPTIMIZER['type']} is assumed")
        config = load_config(source, world_size=n_ranks, overrides=overrides, batch="skip")

    chosen = (config.zero.stage, asked)
    is_given_sizes = model is None
    if is_given_sizes:
        model, _ = model_of(sizes)
    base = build_optimizer(config, model, optimizer, model_parameters)
    if not is_given_sizes:
        mark_leaves(model, config)
        sizes = _sizes_of(model, base, Precision(config, model), is_sharded)
    rows: list[Row] = []
    for stage in STAGES:
        for offload in dict.fromkeys((*OFFLOADS, asked)):
            if (offload.fits(stage) and stage != 0) or offload == Offload() or (stage, offload) == chosen:
                rows.append(
                    _row(stage, offload, source, overrides, sizes, n_ranks, base, device_type, activation_bytes)
                )
    return Table(
        rows,
        next(i for i, row in enumerate(rows) if (row.stage, row.offload) == chosen),
        sizes,
        n_ranks,
        next((name for name in ("fp16", "bf16") if getattr(config, name).enabled), "fp32"),
        "" if base is None else type(base).__name__,
        device_type,
        activation_bytes,
        notes,
    )


def _sizes_of(
    model: torch.nn.Module, base: torch.optim.Optimizer | None, precision: Precision, is_sharded: bool
) -> ModelSizes:
    groups = [] if base is None else [group["params"] for group in base.param_groups]
    autocasts = precision.autocast_dtype is not None
    found = sizes_of(model, groups, lambda name, p: precision.dtypes_of(name, p).comm if autocasts else None)
    if not is_sharded:
        return found
    # Under zero.Init parameters are made in the dtype of the configuration.
    params = tuple(
        p._replace(dtype=precision.dtype) if precision.dtype is not None and p.dtype.is_floating_point else p
        for p in found.params
    )
    return found._replace(params=params, is_sharded=True)


def _row(
    stage: int,
    offload: Offload,
    source: Any,
    overrides: dict[str, Any],
    sizes: ModelSizes,
    n_ranks: int,
    base: torch.optim.Optimizer | None,
    device_type: str,
    activation_bytes: int,
) -> Row:
    try:
        config = load_config(
            source, world_size=n_ranks, overrides={**overrides, "zero_optimization.stage": stage}, batch="skip"
        )
        optimizer = None
        if base is not None:
            is_cut = STAGES[stage].optimizer and n_ranks > 1
            optimizer = group_sizes(base, is_sharded=is_cut, allow_untested=config.zero_allow_untested_optimizer)
        plan = plan_memory(
            sizes,
            config,
            n_ranks,
            optimizer,
            device_type=device_type,
            offload=offload,
            activation_bytes=activation_bytes,
        )
    except DeepSpeedCError as error:
        return Row(stage, offload, None, f"{error.where}: {error.what}" if error.where else error.what)
    return Row(stage, offload, plan)


# -- printing -----------------------------------------------------------------------------------------------------------


def _count(n: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.4g}{unit}"
    return str(n)


def as_text(table: Table) -> str:
    """The table, the chosen row marked, and what its peak consists of."""
    sizes = table.sizes
    frozen = sizes.numel - sizes.n_trained
    trained = f"{_count(sizes.n_trained)} trained, {_count(frozen)} frozen" if frozen else "all trained"
    peaks = [row.plan.peak.nbytes for row in table.rows if row.plan is not None]
    unit, scale = ("GiB", 2**30) if max(peaks, default=0) >= 2**30 else ("MiB", 2**20)
    what = (
        f"{_count(sizes.numel)} parameters in {len(sizes.params)} tensors ({trained}), {table.n_ranks} ranks, {table.precision},"
        f" {table.optimizer or 'evaluation only'}, device {table.device_type}"
    )
    if table.activation_bytes:
        activations = f"{table.activation_bytes / scale:.2f} of activations are in forward and backward"
    else:
        activations = "activations are not known here and not in it (--activations)"
    lines = [
        what,
        f"{unit} per rank at the peak of each phase; {activations}",
        "",
        f"    {'stage':7}{'offload':40}" + "".join(f"{name:>12}" for name in (*PHASES, "peak", "on the host")),
    ]
    for i, row in enumerate(table.rows):
        mark = "  * " if i == table.chosen else "    "
        offload = "none" if row.offload == Offload() else f"{row.offload} (plan only)"
        head = f"{mark}{row.stage:<7}{offload:40}"
        if row.plan is None:
            lines.append(f"{head}  refused: {row.refusal}")
            continue
        phases = row.plan.phases
        cells = [phases[name].nbytes / scale if name in phases else None for name in PHASES]
        host = max(phase.host_nbytes for phase in phases.values())
        cells += [row.plan.peak.nbytes / scale, host / scale]
        lines.append(head + "".join(f"{'-':>12}" if cell is None else f"{cell:12.2f}" for cell in cells))
    lines += ["", *_peak_lines(table, unit, scale), *(f"note: {note}" for note in table.notes)]
    return "\n".join(lines)


def _peak_lines(table: Table, unit: str, scale: int) -> list[str]:
    plan = table.rows[table.chosen].plan
    if plan is None:
        return [f"stage {table.rows[table.chosen].stage} (*) cannot be used as configured"]
    host_kinds = plan.offload.kinds(plan.stage)
    lines = []
    # What training takes, and what starting it takes where that is more.
    steady = max(
        (p for name, p in plan.phases.items() if name != "initialize"), key=lambda p: p.nbytes, default=plan.peak
    )
    for phase in dict.fromkeys((steady.name, plan.peak.name)):
        at = plan.phases[phase]
        lines.append(f"stage {plan.stage} (*), {phase}: {at.nbytes / scale:.2f} {unit}")
        for kind, nbytes in sorted(at.kinds.items(), key=lambda item: -item[1]):
            place = ", on the host" if kind in host_kinds else ""
            lines.append(f"    {nbytes / scale:10.2f}  {kind}{place}: {KINDS[kind]}")
    piece = "gather unit" if plan.window_elems else "bucket"
    lines.append(
        f"largest {piece}: {plan.largest_unit}, {plan.largest_unit_bytes / scale:.2f} {unit}; {plan.n_buckets} buckets of gradients"
        + (f"; at most {_count(plan.window_elems)} elements are gathered at once" if plan.window_elems else "")
    )
    return lines


def as_json(table: Table) -> dict[str, Any]:
    """Everything in bytes."""
    return {
        "params": table.sizes.numel,
        "trained": table.sizes.n_trained,
        "tensors": len(table.sizes.params),
        "ranks": table.n_ranks,
        "precision": table.precision,
        "optimizer": table.optimizer,
        "device": table.device_type,
        "activation_bytes": table.activation_bytes,
        "notes": table.notes,
        "rows": [_row_json(row, i == table.chosen) for i, row in enumerate(table.rows)],
    }


def _row_json(row: Row, is_chosen: bool) -> dict[str, Any]:
    line: dict[str, Any] = {
        "stage": row.stage,
        "offload_optimizer": row.offload.optimizer,
        "offload_param": row.offload.params,
        "is_chosen": is_chosen,
    }
    if row.plan is None:
        return line | {"refused": row.refusal}
    return line | {
        "peak_bytes": row.plan.peak.nbytes,
        "peak_phase": row.plan.peak.name,
        "host_bytes": max(phase.host_nbytes for phase in row.plan.phases.values()),
        "gradient_buckets": row.plan.n_buckets,
        "gathered_elems": row.plan.window_elems,
        "phases": {
            name: {"bytes": phase.nbytes, "host_bytes": phase.host_nbytes, "kinds": phase.kinds}
            for name, phase in row.plan.phases.items()
        },
    }
