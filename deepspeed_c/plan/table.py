"""Plans for every stage and offload choice, and their output: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from deepspeed_c.config import read_config
from deepspeed_c.config.source import GivenConfig
from deepspeed_c.config.stages import STAGES
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import DeepSpeedCError
from deepspeed_c.ops.scope import declaration
from deepspeed_c.plan.activations import ForwardShape, Traced, trace_activations
from deepspeed_c.plan.generation import GenerationMoment, GenerationShape, trace_generation
from deepspeed_c.plan.memory import KINDS, PHASES, Activations, LeasePlan, MemoryPlan, Offload, plan_memory
from deepspeed_c.plan.prepared import optimizer_sizes, prepare
from deepspeed_c.plan.sizes import ModelSizes
from deepspeed_c.plan.tiers import Budgets, Placed, Rates, offload_section, place_states, suggest_ratio
from deepspeed_c.plan.timeline import Option, options_of
from deepspeed_c.quantity import count_in_words

__all__ = ["Row", "Table", "as_json", "as_text", "plan_table"]

OFFLOADS = (
    Offload(),
    Offload("cpu"),
    Offload("nvme"),
    Offload("cpu", "cpu"),
    Offload("nvme", "cpu"),
    Offload("nvme", "nvme"),
)
# Offload choices if the CPU computes: host memory is then the device's memory.
OFFLOADS_ON_CPU = (Offload(), Offload("nvme"), Offload("nvme", "nvme"))


class Row(NamedTuple):
    """One stage with one offload choice: its plan, or the reason why there is none."""

    stage: int
    offload: Offload
    plan: MemoryPlan | None
    refusal: str = ""


class Saves(NamedTuple):
    """The cost of the saves by ``checkpoint.every``, for a rank."""

    every_seconds: float
    nbytes: int  # of a checkpoint, and of the copy in host memory
    copy_seconds: float  # how long a step waits for the copy, by the rates

    @property
    def share(self) -> float:
        """Part of the run's time."""
        return self.copy_seconds / self.every_seconds


class Table(NamedTuple):
    """All rows, and the inputs of the plan."""

    rows: list[Row]
    chosen: int  # index of the row for the configuration
    sizes: ModelSizes
    n_ranks: int
    precision: str
    optimizer: str  # "" for an engine that only evaluates
    device_type: str
    activations: Activations
    notes: list[str]
    budgets: Budgets | None = None
    placed: Sequence[Placed] = ()  # one for each stage, if budgets were given
    nvme_path: str | None = None
    rates: Rates = Rates()
    n_tensor: int = 1
    batch: ForwardShape | None = None
    options: Sequence[Option] = ()  # ways to keep activations, if the batch is known
    asked: int = 0  # index of the option for the configuration
    generates: GenerationShape | None = None
    generation: Sequence[GenerationMoment] = ()  # forwards of ``generate``, if it was asked for
    saves: Saves | None = None  # if the engine saves by itself, and the configuration can be planned


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
    activations: Activations = Activations(),  # noqa: B008  (immutable)
    budgets: Budgets | None = None,
    rates: Rates = Rates(),  # noqa: B008
    n_tensor: int | None = None,
    batch: ForwardShape | None = None,
    generates: GenerationShape | None = None,
    every_stage: bool = True,
) -> Table:
    """Plans ``sizes``, or ``model`` (on the meta device) with the other arguments of ``initialize``, for every stage
    under the configuration ``source``.

    With ``budgets`` it also places the states of each stage, and suggests the host's part of the update for the given
    ``rates``. ``n_tensor`` is the number of tensor-parallel ranks (default: from the configuration). With ``batch``, a
    traced forward of ``model`` gives the bytes of activations, instead of ``activations``. With ``generates``, the rank
    generates between steps, and traced forwards of ``model`` give the bytes of keys, values and workspace. Without
    ``every_stage`` the table has the row of the configuration alone. Raises ConfigError for the configuration,
    OptimizerError and ModelError for optimizer and model.
    """
    prepared = prepare(
        source,
        n_ranks,
        sizes=sizes,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        is_sharded=is_sharded,
        n_tensor=n_tensor,
    )
    source, overrides, n_ranks, n_tensor = prepared.source, prepared.overrides, prepared.n_ranks, prepared.n_tensor
    config = prepared.resolve(has_batch=False)
    model, sizes, base, ranks, notes = prepared.model, prepared.sizes, prepared.base, prepared.ranks, [*prepared.notes]
    asked = Offload.of(config.zero)
    chosen = (config.zero.stage, asked)
    nvme_path = prepared.nvme_path
    options: list[Option] = []
    asked_option = 0
    if batch is not None:
        section = config.activation_checkpointing
        traced = trace_activations(model, batch, prepared.precision, section.layers, device_type, ranks)
        options, asked_option = options_of(traced, section, n_tensor=n_tensor, is_host=device_type == "cpu")
        notes += [traced.note] if traced.note else []
        activations = _activations_of(options[asked_option], traced, is_host=device_type == "cpu")

    generation: list[GenerationMoment] = []
    if generates is not None:
        generation = trace_generation(model, generates, Precision(config, model), device_type, ranks)
    largest = max(generation, key=lambda moment: moment.nbytes, default=None)

    @cache
    def row_of(stage: int, offload: Offload) -> Row:
        return _row(stage, offload, source, overrides, sizes, n_ranks, base, device_type, activations, largest)

    def plan_of(stage: int, offload: Offload) -> MemoryPlan | str:
        row = row_of(stage, offload)
        return row.refusal if row.plan is None else row.plan

    choices = OFFLOADS_ON_CPU if device_type == "cpu" else OFFLOADS
    if base is None:
        choices = choices[:1]
    rows = [
        row_of(stage, offload)
        for stage in STAGES
        for offload in dict.fromkeys((*choices, asked))
        if (every_stage and offload.fits(stage)) or (stage, offload) == chosen
    ]
    placed = []
    if budgets is not None and base is not None:
        is_host = device_type == "cpu"
        placed = [place_states(stage, partial(plan_of, stage), budgets, is_host=is_host) for stage in STAGES]
        placed = [
            one._replace(ratio=suggest_ratio(one, budgets, rates))
            if one.plan is not None and one.offload.optimizer == "cpu" and declaration(base).updates_buckets
            else one
            for one in placed
        ]
    chosen_row = next(i for i, row in enumerate(rows) if (row.stage, row.offload) == chosen)
    plan, every = rows[chosen_row].plan, config.checkpoint.every_seconds
    saves = None
    if plan is not None and every is not None and asked.optimizer == "nvme":
        notes.append(
            "checkpoint.every: states on NVMe are not copied, so a step with a save lasts until all is written"
        )
    elif plan is not None and plan.saved_bytes and every is not None:
        # The link carries the bytes once. A copy within host memory reads and writes them.
        seconds = 2 * plan.saved_bytes / rates.host if device_type == "cpu" else plan.saved_bytes / rates.link
        saves = Saves(every, plan.saved_bytes, seconds)
    return Table(
        rows,
        chosen_row,
        sizes,
        n_ranks,
        next((name for name in ("fp16", "bf16") if getattr(config, name).enabled), "fp32"),
        "" if base is None else type(base).__name__,
        device_type,
        activations,
        notes,
        budgets,
        placed,
        nvme_path,
        rates,
        n_tensor,
        batch,
        options,
        asked_option,
        generates,
        generation,
        saves,
    )


def _activations_of(option: Option, traced: Traced, *, is_host: bool) -> Activations:
    """What is on its way is counted as if nothing were recomputed: a layer has it in either run. Holes in the heap are
    the same part of what is alive."""
    forward, backward = option.peak(is_backward=False), option.peak(is_backward=True)
    passing = traced.passing_bytes
    alive, holes = max(forward + passing[0], backward + passing[1]), 0
    if is_host and traced.alive is not None:
        whole = max(traced.alive.forward, traced.alive.backward, 1)
        holes = alive * max(traced.alive.heap - whole, 0) // whole
    return Activations(forward, backward, option.host_peak, option.nvme_peak, passing, holes)


def _row(
    stage: int,
    offload: Offload,
    source: GivenConfig,
    overrides: dict[str, Any],
    sizes: ModelSizes,
    n_ranks: int,
    base: torch.optim.Optimizer | None,
    device_type: str,
    activations: Activations,
    generation: GenerationMoment | None,
) -> Row:
    choice = {
        "zero_optimization.stage": stage,
        "zero_optimization.offload_optimizer.device": offload.optimizer,
        "zero_optimization.offload_param.device": offload.params,
    }
    if offload.params == "nvme":
        choice["zero_optimization.offload_param.max_in_cpu"] = offload.kept_elems
    if offload.optimizer != "cpu":
        choice["zero_optimization.offload_optimizer.super_offload"] = False
    try:
        read = read_config(source, overrides={**overrides, **choice})
        config = read.resolve(world_size=n_ranks, batch="skip")
        optimizer = optimizer_sizes(
            base,
            config.zero,
            n_ranks,
            device_type,
            forces_own=config.forces_own_optimizer,
            allow_untested=config.zero_allow_untested_optimizer,
        )
        plan = plan_memory(
            sizes,
            config,
            n_ranks,
            optimizer,
            device_type=device_type,
            activations=activations,
            generation=generation,
        )
    except DeepSpeedCError as error:
        return Row(stage, offload, None, f"{error.where}: {error.what}" if error.where else error.what)
    return Row(stage, offload, plan)


def as_text(table: Table) -> str:
    """The table with the chosen row marked, and the parts of that row's peak."""
    sizes = table.sizes
    frozen = sizes.numel - sizes.n_trained
    trained = f"{count_in_words(sizes.n_trained)} trained, {count_in_words(frozen)} frozen" if frozen else "all trained"
    peaks = [row.plan.peak.nbytes for row in table.rows if row.plan is not None]
    unit, scale = ("GiB", 2**30) if max(peaks, default=0) >= 2**30 else ("MiB", 2**20)
    tensor = f" x {table.n_tensor} that hold the model together" if table.n_tensor > 1 else ""
    what = (
        f"{count_in_words(sizes.numel)} parameters in {len(sizes.params)} tensors ({trained}), {table.n_ranks} ranks{tensor}, {table.precision},"
        f" {table.optimizer or 'evaluation only'}, device {table.device_type}"
    )
    if table.activations.backward:
        activations = f"{table.activations.backward / scale:.2f} of activations are in forward and backward"
    else:
        activations = "activations are not known here and not in it (--batch and --seq, or --activations)"
    planned = {name for row in table.rows if row.plan is not None for name in row.plan.phases}
    phase_names = [name for name in PHASES if name in planned]
    lines = [
        what,
        f"{unit} per rank at the peak of each phase; {activations}",
        "",
        f"    {'stage':7}{'offload':40}"
        + "".join(f"{name:>12}" for name in (*phase_names, "peak", "on the host", "on NVMe")),
    ]
    for i, row in enumerate(table.rows):
        mark = "  * " if i == table.chosen else "    "
        head = f"{mark}{row.stage:<7}{row.offload!s:40}"
        if row.plan is None:
            lines.append(f"{head}  refused: {row.refusal}")
            continue
        phases = row.plan.phases
        cells = [phases[name].nbytes / scale if name in phases else None for name in phase_names]
        host = max(phase.host_nbytes for phase in phases.values())
        nvme = max(phase.nvme_nbytes for phase in phases.values())
        cells += [row.plan.peak.nbytes / scale, host / scale, nvme / scale]
        lines.append(head + "".join(f"{'-':>12}" if cell is None else f"{cell:12.2f}" for cell in cells))
    lines += [
        "",
        *_peak_lines(table, unit, scale),
        *_save_lines(table, unit, scale),
        *_generation_lines(table, unit, scale),
        *_option_lines(table, unit, scale),
        *_placed_lines(table, unit, scale),
        *(f"note: {note}" for note in table.notes),
    ]
    return "\n".join(lines)


def _peak_lines(table: Table, unit: str, scale: int) -> list[str]:
    plan = table.rows[table.chosen].plan
    if plan is None:
        return [f"stage {table.rows[table.chosen].stage} (*) cannot be used as configured"]
    places = plan.offload.kinds(plan.stage, is_host=table.device_type == "cpu")
    names = {"host": ", on the host", "nvme": ", on NVMe"}
    lines = []
    # The peak of training, and the peak of the start if it is higher.
    steady = max(
        (p for name, p in plan.phases.items() if name != "initialize"), key=lambda p: p.nbytes, default=plan.peak
    )
    for phase in dict.fromkeys((steady.name, plan.peak.name, *(["generate"] if table.generation else []))):
        at = plan.phases[phase]
        lines.append(f"stage {plan.stage} (*), {phase}: {at.nbytes / scale:.2f} {unit}")
        for kind, nbytes in sorted(at.kinds.items(), key=lambda item: -item[1]):
            lines.append(f"    {nbytes / scale:10.2f}  {kind}{names.get(places.get(kind, ''), '')}: {KINDS[kind]}")
    piece = "gather unit" if plan.window_elems else "bucket"
    lines.append(
        f"largest {piece}: {plan.largest_unit}, {plan.largest_unit_bytes / scale:.2f} {unit}; {plan.n_buckets} buckets of gradients"
        + (f"; at most {count_in_words(plan.window_elems)} elements are gathered at once" if plan.window_elems else "")
    )
    return lines


def _save_lines(table: Table, unit: str, scale: int) -> list[str]:
    saves = table.saves
    if saves is None:
        return []
    line = (
        f"checkpoint.every, {saves.every_seconds:g} s: a rank copies {saves.nbytes / scale:.2f} {unit} to host memory, where the"
        f" copy stays, and writes it in the background; the copy takes {saves.copy_seconds:.2g} s, {saves.share:.2g} of the time"
    )
    return [line]


def _generation_lines(table: Table, unit: str, scale: int) -> list[str]:
    """The forwards of ``generate``, and what a lease takes in the row of the configuration."""
    if table.generates is None:
        return []
    n_samples, n_prompt, n_new = table.generates
    lines = [
        "",
        f"generate with {n_samples} prompts of {n_prompt} tokens, {n_new} new tokens each; {unit} of a rank:",
        f"    {'a forward of':26}{'cache':>12}{'workspace':>12}",
    ]
    lines += [f"    {one.name:26}{one.cache / scale:12.2f}{one.workspace / scale:12.2f}" for one in table.generation]
    plan = table.rows[table.chosen].plan
    if plan is not None:
        lines.append(f"stage {plan.stage} (*): {_lease_line(plan.lease, unit, scale)}")
    return lines


def _lease_line(lease: LeasePlan | None, unit: str, scale: int) -> str:
    if lease is None:
        return "weights are whole, nothing is gathered"
    if not lease.nbytes:
        return "weights lie in joint memory, a lease takes nothing"
    n_bytes = f"{lease.nbytes / scale:.2f} {unit}"
    if lease.is_taken:
        return (
            f"a lease gathers all weights once, {n_bytes}; with stage3_max_live_parameters < {lease.elems} each forward"
            " gathers"
        )
    return (
        f"no lease, each forward gathers (join mode): {lease.elems} elements are more than stage3_max_live_parameters ="
        f" {lease.max_elems}; with {lease.elems}, one gather of {n_bytes} is enough for all tokens"
    )


def _option_lines(table: Table, unit: str, scale: int) -> list[str]:
    """The ways to keep activations, with the configured way marked."""
    if table.batch is None:
        return []
    batch = table.batch
    of_what = f"of {batch.n_tokens} tokens" if batch.sample is None else f"of {'x'.join(map(str, batch.sample))}"
    wire = "    sent along tp" if table.n_tensor > 1 else ""
    lines = [
        "",
        f"activations of {batch.n_samples} samples {of_what}, {unit} of a rank:",
        f"    {'activation_checkpointing':26}{'forward':>12}{'backward':>12}{'on the host':>12}{'on NVMe':>12}{'run again':>12}{wire}",
    ]
    for i, option in enumerate(table.options):
        head = f"{'  * ' if i == table.asked else '    '}{option.name:26}"
        if not option.moments:
            lines.append(f"{head}  refused: {option.refusal}")
            continue
        peaks = (option.peak(is_backward=False), option.peak(is_backward=True), option.host_peak, option.nvme_peak)
        cells = "".join(f"{nbytes / scale:12.2f}" for nbytes in peaks)
        sent = f"{option.wire_bytes / scale:17.2f}" if wire else ""
        why = f"  ({option.refusal})" if option.refusal else ""
        lines.append(f"{head}{cells}{option.run_again:12.0%}{sent}{why}")
    return lines


def _placed_lines(table: Table, unit: str, scale: int) -> list[str]:
    if table.budgets is None:
        return []
    device, host, nvme = (nbytes / scale for nbytes in table.budgets)
    lines = [
        "",
        f"where states live with {device:.2f} {unit} of the device, {host:.2f} of the host and {nvme:.2f} of NVMe a rank:",
    ]
    for placed in table.placed:
        if placed.plan is None:
            lines.append(f"    stage {placed.stage}: does not fit: {placed.refusal}")
            continue
        kinds = placed.plan.phases["step"].kinds
        where = ", ".join(
            f"{kind} on {tier if tier == 'NVMe' else f'the {tier}'}"
            for kind, tier in placed.tiers.items()
            if kind in kinds
        )
        lines.append(f"    stage {placed.stage}: {where}")
        if placed.refusal:
            lines.append(f"        but {placed.refusal}")
        lines.append(f"        {json.dumps(offload_section(placed.stage, placed.offload, table.nvme_path))}")
        if placed.ratio is not None:
            rates = " and ".join(f"{rate / 1e9:g} of the {name}" for name, rate in table.rates._asdict().items())
            lines.append(
                f'        "ratio": {placed.ratio:g} in offload_optimizer has the host update so much that it is done when the device is, as far as the device has room;'
                f" at {rates}, in GB/s of a rank (--rates)"
            )
    return lines


def as_json(table: Table) -> dict[str, Any]:
    """The table as JSON values, with all sizes in bytes."""
    return {
        "params": table.sizes.numel,
        "trained": table.sizes.n_trained,
        "held": table.sizes.n_held,
        "tensors": len(table.sizes.params),
        "ranks": table.n_ranks,
        "precision": table.precision,
        "optimizer": table.optimizer,
        "device": table.device_type,
        "tensor_parallel_ranks": table.n_tensor,
        "activation_bytes": max(table.activations.forward, table.activations.backward),
        "activations": [_option_json(option, i == table.asked) for i, option in enumerate(table.options)],
        "generation": None if table.generates is None else _generation_json(table.generates, table.generation),
        "notes": table.notes,
        "rows": [_row_json(row, i == table.chosen) for i, row in enumerate(table.rows)],
        "budgets": None if table.budgets is None else table.budgets._asdict(),
        "rates": table.rates._asdict(),
        "saves": None if table.saves is None else table.saves._asdict(),
        "placements": [_placed_json(placed, table.nvme_path) for placed in table.placed],
    }


def _generation_json(shape: GenerationShape, moments: Sequence[GenerationMoment]) -> dict[str, Any]:
    return {**shape._asdict(), "forwards": [moment._asdict() for moment in moments]}


def _option_json(option: Option, is_asked: bool) -> dict[str, Any]:
    return {
        "option": option.name,
        "is_chosen": is_asked,
        "refused": option.refusal,
        "forward_bytes": option.peak(is_backward=False),
        "backward_bytes": option.peak(is_backward=True),
        "host_bytes": option.host_peak,
        "nvme_bytes": option.nvme_peak,
        "run_again": option.run_again,
        "wire_bytes": option.wire_bytes,
        "moments": [moment._asdict() for moment in option.moments],
    }


def _placed_json(placed: Placed, nvme_path: str | None) -> dict[str, Any]:
    if placed.plan is None:
        return {"stage": placed.stage, "fits": False, "refused": placed.refusal}
    return {
        "stage": placed.stage,
        "fits": not placed.refusal,
        "refused": placed.refusal,
        "tiers": placed.tiers,
        "config": offload_section(placed.stage, placed.offload, nvme_path),
        "ratio": placed.ratio,
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
        "nvme_bytes": max(phase.nvme_nbytes for phase in row.plan.phases.values()),
        "gradient_buckets": row.plan.n_buckets,
        "gathered_elems": row.plan.window_elems,
        "lease": None if row.plan.lease is None else row.plan.lease._asdict(),
        "phases": {
            name: {
                "bytes": phase.nbytes,
                "host_bytes": phase.host_nbytes,
                "nvme_bytes": phase.nvme_nbytes,
                "kinds": phase.kinds,
            }
            for name, phase in row.plan.phases.items()
        },
    }
