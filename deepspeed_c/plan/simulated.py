"""A simulated training step of a script's model, on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.plan.activations import ForwardShape
from deepspeed_c.plan.computing import ModuleWork
from deepspeed_c.plan.machine import Machine, operator_ns
from deepspeed_c.plan.memory import RankWalk
from deepspeed_c.plan.operators import ModelOperators, trace_operators
from deepspeed_c.plan.prepared import Prepared, optimizer_sizes, prepare
from deepspeed_c.plan.recorded import Recorder
from deepspeed_c.plan.script import Found
from deepspeed_c.plan.simulation import Cluster, SimulatedStep, simulate
from deepspeed_c.plan.table import Table, plan_table
from deepspeed_c.recompute.blocks import find_blocks

__all__ = ["PlannedStep", "StepPlan", "plan_step", "prepare_step"]


class StepPlan(NamedTuple):
    """The work of a rank in a step, without times."""

    prepared: Prepared
    batch: ForwardShape
    operators: ModelOperators
    n_passes: int
    """Micro-batches of a rank."""
    notes: tuple[str, ...]

    def record(self, machine: Machine) -> Recorder:
        """The rank's program, with the times of its computations on a machine."""
        forward, backward = (
            {path: sum(operator_ns(machine, each) for each in found) for path, found in half.items()}
            for half in (self.operators.forward, self.operators.backward)
        )
        prepared, config = self.prepared, self.prepared.resolve(has_batch=True)
        again = []
        if config.activation_checkpointing.layers is not None:
            again = find_blocks(prepared.model, config.activation_checkpointing.layers)
        states = optimizer_sizes(
            prepared.base,
            config.zero,
            prepared.n_ranks,
            machine.device,
            forces_own=config.forces_own_optimizer,
            allow_untested=config.zero_allow_untested_optimizer,
        )
        work = ModuleWork(forward, backward, 1e9 / machine.memory_bytes_per_s, 1e9 / machine.update_bytes_per_s, again)
        with ExitStack() as at_end:
            walk = RankWalk(prepared.sizes, config, prepared.n_ranks, states, machine.device, at_end, work)
            return walk.record_step()


class PlannedStep(NamedTuple):
    """A simulated step with the memory of its ranks."""

    step: SimulatedStep
    table: Table
    cluster: Cluster
    batch: ForwardShape
    n_passes: int
    """Micro-batches of a rank."""
    notes: tuple[str, ...]
    operators: ModelOperators

    @property
    def peak_bytes(self) -> int | None:
        """The peak of a rank's device; None if the configuration cannot be planned."""
        plan = self.table.rows[self.table.chosen].plan
        return None if plan is None else plan.peak.nbytes


def _batch_of(found: Found, n_samples: int, n_tokens: int | None, sample: tuple[int, ...] | None) -> ForwardShape:
    """The inputs of a rank's forward. By default a sample has as many tokens as the model's own configuration allows.
    Raises ConfigError if neither says it."""
    if n_tokens is None and sample is None:
        own = getattr(found.model, "config", None)
        n_tokens = getattr(own, "max_position_embeddings", None)
        if not isinstance(n_tokens, int):
            raise ConfigError(
                "neither the tokens nor the shape of a sample are known",
                where="--simulate",
                fix="give --seq N, or --sample 3x224x224",
            )
    return ForwardShape(n_samples, n_tokens, sample)


def prepare_step(
    found: Found,
    source: Any,
    n_ranks: int,
    device_type: str,
    *,
    n_tokens: int | None = None,
    sample: tuple[int, ...] | None = None,
    operators: ModelOperators | None = None,
) -> StepPlan:
    """Traces the operators of the model's forward and backward, unless ``operators`` has those of an earlier trace with
    the same model, batch and dtype. Raises the errors of ``plan_table`` and of
    ``trace_operators``, and FeatureError for what is not simulated yet."""
    if isinstance(found.model, PipelineModule):
        raise _not_yet("a PipelineModule", "give a whole model; deepspeed_c plan without --simulate plans its memory")
    prepared = prepare(
        source,
        n_ranks,
        model=found.model,
        optimizer=found.optimizer,
        model_parameters=found.model_parameters,
        is_sharded=found.is_sharded,
    )
    config = prepared.resolve(has_batch=True)
    if prepared.base is None:
        raise _not_yet("an engine without an optimizer", "name an optimizer")
    if prepared.n_tensor > 1:
        raise _not_yet("tensor parallelism", "leave out tensor_parallel")
    if config.expert_parallel.enabled:
        raise _not_yet("expert parallelism", "leave out expert_parallel")
    batch = _batch_of(found, config.train_micro_batch_size_per_gpu, n_tokens, sample)
    if operators is None:
        operators = trace_operators(found.model, batch, prepared.precision, device_type)
    notes = list(prepared.notes)
    if n_tokens is None and sample is None:
        notes.append(f"{batch.n_tokens} tokens a sample, as many as the model allows (--seq)")
    if config.activation_checkpointing.budget is not None:
        notes.append("activation_checkpointing.budget: all layers are counted as recomputed")
    return StepPlan(prepared, batch, operators, config.gradient_accumulation_steps or 1, tuple(notes))


def _not_yet(what: str, fix: str) -> FeatureError:
    return FeatureError(f"{what} is not simulated", where="deepspeed_c plan --simulate", fix=fix)


def plan_step(
    found: Found,
    source: Any,
    cluster: Cluster,
    *,
    n_tokens: int | None = None,
    sample: tuple[int, ...] | None = None,
    operators: ModelOperators | None = None,
) -> PlannedStep:
    """A step of the model that a script passes to ``initialize``. The other arguments and the errors are those of
    ``prepare_step``. Also raises ConfigError if the machine has no rate that the step needs."""
    machine = cluster.machine
    plan = prepare_step(
        found, source, cluster.n_ranks, machine.device, n_tokens=n_tokens, sample=sample, operators=operators
    )
    table = plan_table(
        source,
        cluster.n_ranks,
        model=found.model,
        optimizer=found.optimizer,
        model_parameters=found.model_parameters,
        is_sharded=found.is_sharded,
        device_type=machine.device,
        batch=plan.batch,
        every_stage=False,
    )
    flops = _flops_by_dtype(plan.operators, plan.n_passes)
    step = simulate(plan.record(machine), cluster, flops)
    return PlannedStep(step, table, cluster, plan.batch, plan.n_passes, plan.notes, plan.operators)


def _flops_by_dtype(operators: ModelOperators, n_passes: int) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for half in (operators.forward, operators.backward):
        for each in (each for own in half.values() for each in own if each.is_product):
            found[each.dtype] = found.get(each.dtype, 0) + each.flops * n_passes
    return found
