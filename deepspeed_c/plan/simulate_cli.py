"""``deepspeed_c plan --simulate``: the time of a training step on many ranks."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_c.config.source import read_source
from deepspeed_c.errors import ConfigError
from deepspeed_c.plan.lanes import draw_lanes
from deepspeed_c.plan.machine import Machine, read_machine, shipped_machines, write_machine
from deepspeed_c.plan.options import require_config, sample_of
from deepspeed_c.plan.script import Found, find_model
from deepspeed_c.plan.simulated import PlannedStep, plan_step, prepare_step
from deepspeed_c.plan.simulation import Cluster
from deepspeed_c.plan.timed import TimedOperator
from deepspeed_c.plan.variants import VariantRow, parse_variants, plan_variants
from deepspeed_c.quantity import parse_seconds

__all__ = ["ThisMachine", "add_options", "run"]


class ThisMachine(NamedTuple):
    """Measurements of the machine on which the command runs."""

    device_type: str
    calibrate: Callable[[int, Sequence[TimedOperator], Path], Machine]
    """(ranks, operators, a folder on the disk that is measured) -> the machine."""
    measure_steps: Callable[[str, Sequence[str], Mapping[str, Any], int], float]
    """(script, its arguments, configuration, ranks) -> seconds of a step."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a simulation."""
    group = parser.add_argument_group("time of a step (--simulate)")
    group.add_argument("--simulate", action="store_true", help="simulate a training step of a script's model")
    group.add_argument(
        "--machine", metavar="FILE", help="a machine that the package has (h100, a100, h200, epyc-9654), or its file"
    )
    group.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine and write its file (--machine, by default machine.json); then simulate on it, and compare with ten real steps",
    )
    group.add_argument("--hosts", type=int, metavar="N", help="hosts of the run, in place of --ranks")
    group.add_argument("--per-host", type=int, metavar="N", help="ranks of a host; default: as the machine has")
    group.add_argument("--slow", metavar="RANK:FACTOR", help="ranks that compute longer, such as 17:1.1 or 17:1.1,40:2")
    group.add_argument(
        "--what-if", metavar="CHANGES", help="variants to simulate beside it, one change each: link=2x,stage=2,hpz=8"
    )
    group.add_argument("--mtbf", metavar="TIME", help="mean time between failures of the run, such as 4h")
    group.add_argument("--save-every", metavar="TIME", help="time between checkpoints (--mtbf), such as 60s")


def run(
    options: argparse.Namespace,
    script: str,
    arguments: Sequence[str],
    write_svg: Callable[[str, str], None],
    this_machine: ThisMachine | None = None,
) -> int:
    """Prints the simulated step. this_machine: for ``--calibrate``. Raises ConfigError for options that do not fit, and
    the errors of ``plan_step``."""
    if not script:
        raise ConfigError(
            "sizes alone do not say what a model computes", where="--simulate", fix="give a script in place of --params"
        )
    if options.calibrate:
        if this_machine is None:
            raise ConfigError(
                "this caller cannot measure the machine", where="--calibrate", fix="run the command deepspeed_c plan"
            )
        return _calibrate(options, script, arguments, this_machine)
    if options.machine is None:
        raise ConfigError("no machine was given", where="--machine", fix="name one (h100), or the file of one")
    cluster = _cluster(options, read_machine(options.machine))
    loss = _expected_loss(options)
    variants = [] if options.what_if is None else parse_variants(options.what_if)
    found, source = _find(options, script, arguments, cluster.n_ranks)
    shape = _shape(options)
    planned = plan_step(found, source, cluster, **shape)
    rows = plan_variants(variants, found, source, cluster, operators=planned.operators, **shape)
    if options.svg is not None:
        write_svg(options.svg, draw_lanes(planned.step))
    if options.json:
        what_if = [{"change": row.variant.name, "refusal": row.refusal, **_step_json(row)} for row in rows]
        print(json.dumps({**_as_json(planned, loss), "what_if": what_if}))
    else:
        print("\n".join([_as_text(planned, loss), *_variant_lines(planned, rows)]))
    return 0


def _find(options: argparse.Namespace, script: str, arguments: Sequence[str], n_ranks: int) -> tuple[Found, Any]:
    """(the model of a script, its configuration)."""
    found = find_model(script, arguments, n_ranks, rank=0)
    source = options.config if options.config is not None else found.read_source()
    require_config(source, f"--config, or {script}")
    if isinstance(found.model_parameters, Iterator):  # each plan reads them
        found = found._replace(model_parameters=list(found.model_parameters))
    return found, source


def _shape(options: argparse.Namespace) -> dict[str, Any]:
    """The shape of a sample, as ``plan_step`` takes it."""
    n_tokens, sample = sample_of(options)
    return {"n_tokens": n_tokens, "sample": sample}


def _calibrate(options: argparse.Namespace, script: str, arguments: Sequence[str], this_machine: ThisMachine) -> int:
    """Measures this machine, simulates a step on it, and compares the step with real ones."""
    if options.ranks < 1:
        raise ConfigError(f"{options.ranks} is not a number of ranks", where="--ranks", fix="write an integer >= 1")
    path = Path("machine.json" if options.machine is None else options.machine)
    if str(path) in shipped_machines():
        raise ConfigError("is a machine that the package has", where=f"--machine {path}", fix="name a file to write")
    found, source = _find(options, script, arguments, options.ranks)
    shape = _shape(options)
    operators = prepare_step(found, source, options.ranks, this_machine.device_type, **shape).operators
    machine = this_machine.calibrate(options.ranks, list(operators.calls.values()), path.parent)
    try:
        write_machine(machine, path)
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", where=f"--machine {path}", fix="name another"
        ) from error
    planned = plan_step(found, source, Cluster(machine, options.ranks, options.ranks), operators=operators, **shape)
    print(_as_text(planned, None))
    print(f"written: {path}")
    seconds = this_machine.measure_steps(script, arguments, read_source(source).keys, options.ranks)
    print(
        f"ten real steps took {_seconds(seconds).strip()} each: simulated / measured {planned.step.seconds / seconds:.3f}"
    )
    return 0


def _cluster(options: argparse.Namespace, machine: Machine) -> Cluster:
    n_below = machine.links[0].n_below if machine.links else 1
    per_host, n_ranks = options.per_host, options.ranks
    for name, value in (("--per-host", per_host), ("--hosts", options.hosts), ("--ranks", n_ranks)):
        if value is not None and value < 1:
            raise ConfigError(f"{value} is not a number of ranks", where=name, fix="write an integer >= 1")
    if options.hosts is not None:
        if per_host is None and not n_below:
            raise ConfigError("nothing says how many ranks a host has", where="--hosts", fix="give --per-host N")
        per_host = per_host or n_below
        n_ranks = options.hosts * per_host
        if options.ranks not in (1, n_ranks):
            raise ConfigError(
                f"{options.hosts} hosts of {per_host} ranks are {n_ranks} ranks, not {options.ranks}",
                where="--ranks",
                fix="leave it out",
            )
    per_host = min(per_host or n_below or n_ranks, n_ranks)
    return Cluster(machine, n_ranks, per_host, _slow(options.slow, n_ranks))


def _slow(text: str | None, n_ranks: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for word in [] if text is None else text.split(","):
        rank, _, factor = word.partition(":")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            found = {-1: 0.0}
        if not all(0 <= each < n_ranks and 0 < by < 1000 for each, by in found.items()):
            raise ConfigError(
                f"{word!r} is not understood",
                where="--slow",
                fix=f"write a rank below {n_ranks} and how many times longer it computes, such as 0:1.1",
            )
    return found


def _expected_loss(options: argparse.Namespace) -> float | None:
    """The part of time that failures cost; None if no option asks for it.

    A failure costs what was computed since the last checkpoint. With failures as a Poisson process of mean time M, and
    a checkpoint after each S seconds of work, the expected time for them is M (exp(S/M) - 1) (Daly 2006, "A higher
    order estimate of the optimum checkpoint interval for restart dumps", without restarts and the time of a dump).
    """
    if options.mtbf is None and options.save_every is None:
        return None
    if options.mtbf is None or options.save_every is None:
        raise ConfigError("--mtbf and --save-every go together", where="--mtbf", fix="give both, or none")
    mtbf, every = parse_seconds(options.mtbf, "--mtbf"), parse_seconds(options.save_every, "--save-every")
    if not (mtbf > 0 and every > 0 and every / mtbf < 100):
        raise ConfigError(
            f"{options.save_every} and {options.mtbf} do not fit",
            where="--save-every",
            fix="save more often than failures come",
        )
    return 1 - every / (mtbf * math.expm1(every / mtbf))


def _as_json(planned: PlannedStep, loss: float | None) -> dict[str, Any]:
    step, cluster = planned.step, planned.cluster
    return {
        "machine": cluster.machine.name,
        "ranks": cluster.n_ranks,
        "hosts": cluster.n_hosts,
        "step_seconds": step.seconds,
        "flops": step.n_flops,
        "flops_share": step.flops_share,
        "peak_bytes": [planned.peak_bytes] * cluster.n_ranks,
        "busy_seconds": list(step.busy_seconds),
        "waited_seconds": list(step.waited_seconds),
        "collectives": [
            {
                "op": each.op,
                "axis": each.axis,
                "link": each.link,
                "phase": each.phase,
                "count": each.count,
                "bytes": each.n_bytes,
                "seconds": each.seconds,
                "exposed_seconds": each.exposed_seconds,
            }
            for each in step.collectives
        ],
        "link_bytes": dict(step.link_bytes),
        "lost_to_failures": loss,
        "notes": list(planned.notes),
    }


def _step_json(row: VariantRow) -> dict[str, Any]:
    if row.planned is None:
        return {"step_seconds": None, "peak_bytes": None}
    return {"step_seconds": row.planned.step.seconds, "peak_bytes": row.planned.peak_bytes}


def _variant_lines(planned: PlannedStep, rows: Sequence[VariantRow]) -> list[str]:
    if not rows:
        return []
    lines = ["", f"  {'what if':16}{'step':>12}{'of it now':>12}{'rank 0 waits':>16}{'GiB':>8}"]
    for row in rows:
        if row.planned is None:
            lines.append(f"  {row.variant.name:16}  refused: {row.refusal}")
            continue
        step, peak = row.planned.step, row.planned.peak_bytes
        memory = "-" if peak is None else f"{peak / 2**30:.2f}"
        lines.append(
            f"  {row.variant.name:16}{_seconds(step.seconds)}{step.seconds / planned.step.seconds:12.1%}"
            f"    {_seconds(step.waited_seconds[0])}{memory:>8}"
        )
    return lines


def _as_text(planned: PlannedStep, loss: float | None) -> str:
    step, cluster = planned.step, planned.cluster
    batch = planned.batch
    each = f"{batch.n_tokens} tokens" if batch.sample is None else "x".join(map(str, batch.sample))
    row = planned.table.rows[planned.table.chosen]
    passes = f"{_several(planned.n_passes, 'micro-batch')} of {batch.n_samples} x {each}"
    waited = step.waited_seconds[0]
    lines = [
        f"{_several(cluster.n_ranks, 'rank')} on {_several(cluster.n_hosts, 'host')}, {cluster.machine.name}; stage {row.stage}, {passes}",
        "",
        f"step                    {_seconds(step.seconds)}",
        f"  rank 0 computes       {_seconds(step.busy_seconds[0])}  {step.busy_seconds[0] / step.seconds:6.1%}",
        f"  rank 0 waits          {_seconds(waited)}  {waited / step.seconds:6.1%}",
        f"products at full rate   {_seconds(step.flops_seconds)}  {step.flops_share:6.1%}",
    ]
    if len(set(step.busy_seconds)) > 1:
        slowest = max(range(cluster.n_ranks), key=lambda rank: step.busy_seconds[rank])
        lines.append(f"  rank {slowest} computes longest: {_seconds(step.busy_seconds[slowest]).strip()}")
    lines += ["", f"  {'':16}{'over':14}{'link':16}{'phase':10}{'count':>6}{'MB':>12}{'takes':>12}{'not hidden':>12}"]
    lines += [
        f"  {one.op:16}{one.axis or '-':14}{one.link:16}{one.phase:10}{one.count:6}{one.n_bytes / 1e6:12.3f}"
        f"{_seconds(one.seconds)}{_seconds(one.exposed_seconds)}"
        for one in sorted(step.collectives, key=lambda one: -one.exposed_seconds)
    ]
    crossed = ", ".join(f"{name} {n / 1e6:.3f}" for name, n in step.link_bytes.items())
    lines += ["", f"MB over links, of all ranks: {crossed or 'none'}"]
    if planned.peak_bytes is None:
        lines.append(f"memory: refused: {row.refusal}")
    else:
        of = planned.cluster.machine.memory_bytes
        fits = "" if planned.peak_bytes <= of else f": more than the {of / 2**30:.2f} GiB of {cluster.machine.name}"
        lines.append(f"memory of a rank at its peak: {planned.peak_bytes / 2**30:.2f} GiB{fits}")
    if loss is not None:
        lines.append(f"failures cost {loss:.2%} of the time")
    return "\n".join([*lines, *(f"note: {note}" for note in planned.notes)])


def _several(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 'es' if what.endswith('ch') else 's'}"


def _seconds(seconds: float) -> str:
    """In twelve columns, with the unit of its size."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:9.3f} {unit:2}"
    return f"{seconds / 1e-6:9.3f} us"
