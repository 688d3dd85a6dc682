"""The engine of a ``PipelineModule``. It runs whole batches through all stages, as the table of a schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed_c import _C
from deepspeed_c.comm.axes import COPIES, DATA, EP, PP, SP, TOKENS, TP, WITHIN_STAGE
from deepspeed_c.comm.ledger import ranks_in_words
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config.parallel import Pipeline
from deepspeed_c.config.zero import Zero
from deepspeed_c.data.loader import RepeatingLoader
from deepspeed_c.engine.attributes import ATTRIBUTES, OF_PIPELINES
from deepspeed_c.engine.engine import DeepSpeedEngine
from deepspeed_c.engine.inputs import count_tokens
from deepspeed_c.engine.parts import Parts
from deepspeed_c.engine.training import TrainingHost
from deepspeed_c.errors import (
    BackwardError,
    BatchSizeError,
    ConfigError,
    FeatureError,
    ModelError,
    RankMismatchError,
    StateError,
)
from deepspeed_c.observe.record import Event, StepRecord, phases_text
from deepspeed_c.pipe import CausalLMPipeline, PipelineModule, TiedLayerSpec
from deepspeed_c.pipe.link import Link, LocalLink, RemoteLink
from deepspeed_c.pipe.runner import COMPUTATIONS, Lent, Runner, Stage
from deepspeed_c.pipe.schedule import Cost, fitting, make_table, traits_of
from deepspeed_c.pipe.stopping import Peers, Stopped, raise_on_all
from deepspeed_c.pipe.units import check_units
from deepspeed_c.pipe.weigh import Scale
from deepspeed_c.pipe.writable import copied, writable
from deepspeed_c.recompute.conditions import Conditions
from deepspeed_c.zero.layout.unit import UnitPlan
from deepspeed_c.zero.weights.drivers.batch import BatchPlan
from deepspeed_c.zero.weights.gather_unit import PlacedShard
from deepspeed_c.zero.weights.param import state_of

__all__ = ["PipelineEngine", "check_pipeline", "connect_pipeline"]

# Ranks tell each other these in place of the number of their micro-batches.
_NO_DATA, _OTHER_SIZE = -1, -2


def check_pipeline(module: PipelineModule, section: Pipeline, zero: Zero) -> None:
    """Raises before anything is sent if the configuration, or its number of ranks, does not fit the module."""
    n_ranks = module.num_stages
    if zero.offload_optimizer.super_offload:
        raise FeatureError(
            "super_offload under a pipeline: gradients are summed at the end of a batch, so that no update can begin"
            " while backward runs",
            where="zero_optimization.offload_optimizer.super_offload",
            fix='set it to false; "device": "cpu" offloads the same states',
        )
    if section.stages not in ("auto", n_ranks):
        raise ConfigError(
            f"is {section.stages}, the PipelineModule has {n_ranks}",
            where="pipeline.stages",
            fix="write one of them, or leave it out",
        )
    if section.virtual_stages not in (None, module.virtual_stages):
        raise ConfigError(
            f"is {section.virtual_stages}, the PipelineModule was built with {module.virtual_stages} stages a rank",
            where="pipeline.virtual_stages",
            fix=f"build it with PipelineModule(virtual_stages={section.virtual_stages}, ...): it decides which layers a rank has",
        )
    if section.schedule not in (None, "auto", module.schedule):
        traits, built = traits_of(section.schedule, "pipeline.schedule"), traits_of(module.schedule, "PipelineModule")
        fits = traits.min_virtual <= module.virtual_stages <= traits.max_virtual and traits.is_v == built.is_v
        if not fits or not traits.has_backward:
            raise ConfigError(
                f"is {section.schedule!r}, the PipelineModule was built for {module.schedule!r} with {module.virtual_stages} stages a rank",
                where="pipeline.schedule",
                fix=f"build it with PipelineModule(schedule={section.schedule!r}, ...): it decides which layers a rank has"
                if traits.has_backward
                else "name one that trains",
            )


def connect_pipeline(module: PipelineModule, mesh: Mesh) -> bool:
    """Makes the process groups of a pipeline. Collective over all of its ranks, and called before any other groups of
    the mesh are made. Returns whether any rank has a parameter to train; stages of other ranks may be frozen then.
    """
    n_trained = mesh.comm.gather_numbers(sum(p.requires_grad for p in module.parameters()), label="trained parameters")
    mesh.along(PP)
    mesh.along(*WITHIN_STAGE)
    tied = sorted({ranks for ranks in module.tied_ranks().values() if len(ranks) > 1})
    # Ranks that sum a tied weight: stage 0 does it over TOKENS, other stages over COPIES. A weight that tensor-parallel
    # ranks use on parts is summed over tp too.
    for axes in (WITHIN_STAGE, TOKENS, COPIES, (*COPIES, TP)):
        mesh.connect_some(tied, PP, *axes)
    return max(n_trained) > 0


def _most_in_flight(actions: list[tuple[int, int, int]]) -> int:
    """The largest number of forwards on one rank that wait for their backward at the same time."""
    n, most = 0, 1
    for kind, _, _ in actions:
        n += (kind == _C.PIPE_FORWARD) - (kind in (_C.PIPE_BACKWARD, _C.PIPE_INPUT))
        most = max(most, n)
    return most


class PipelineEngine(TrainingHost):
    """Trains a ``PipelineModule``. ``train_batch`` runs ``gradient_accumulation_steps`` micro-batches through all
    stages, then updates the weights. All ranks call it together.

    A micro-batch is (inputs, labels). The first stage's ranks need the inputs, the last one's the labels; other ranks
    may have no data. Data-parallel ranks get different micro-batches, ranks of one pipeline the same, and so do
    tensor-parallel ranks.
    """

    pipeline_parallelism = True
    takes_arguments = False
    _attributes = ATTRIBUTES | OF_PIPELINES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        module: PipelineModule = self.module
        section = self._config.pipeline
        if section.activation_checkpoint_interval > 0:
            module.set_checkpoint_interval(section.activation_checkpoint_interval)
        self.num_stages, self.stage_id = module.num_stages, module.stage_id
        self.grid = module.mpu()
        self._tables: dict[tuple[bool, int], _C.PipeTable] = {}
        self._batch_fn: Callable[[Any], Any] | None = None
        self._data_iterator: Iterator[Any] | None = None
        self.loss: torch.Tensor | None = None
        """The loss of the last batch."""
        self._stages = self._make_stages()
        together = [self._comm.global_ranks[rank] for rank in self._mesh.ranks(EP, SP, TP)]
        self._peers = Peers(self._comm, together)
        self._runner = Runner(self._stages, self._peers)
        self._costs = [Cost()] * len(module.rank_of)
        self._is_weighed = section.activation_bytes_limit is None
        if not self._is_weighed and self._config.activation_checkpointing.budget is not None:
            raise ConfigError(
                "and activation_checkpointing.budget both limit the memory of activations",
                where="pipeline.activation_bytes_limit",
                fix="write one of them: the budget decides what is recomputed for the schedule",
            )

    def _require_states(self, what: str) -> None:
        self._peers.require_connected(what)
        super()._require_states(what)

    def _check_plans(self, plans: Sequence[UnitPlan]) -> None:
        zero = self._config.zero
        if zero.sharding.parameters:
            check_units(plans, zero.stage3_max_live_parameters, self._comm)

    def _units_of(self, stage: int) -> list[int]:
        """The gather units of one of this rank's stages, in the order of its layers."""
        module, modules = self.module, dict(self.module.named_modules())
        units: dict[int, None] = {}
        for index in range(module.parts[stage], module.parts[stage + 1]):
            spec = module.specs[index]
            layer = modules.get(f"tied_modules.{spec.key}" if isinstance(spec, TiedLayerSpec) else str(index))
            for param in () if layer is None else layer.parameters():
                state = state_of(param)
                if type(state) is PlacedShard:
                    units[state.group.index] = None
        return list(units)

    def _weights_of(self, key: Any, table: _C.PipeTable) -> AbstractContextManager[None]:
        """The context of a run in which sharded weights are gathered as its computations need them."""
        if not self._shards_parameters:
            return nullcontext()
        units = {s: self._units_of(s) for s in self.module.stages}
        actions = [(kind, s) for kind, s, _ in table.actions(self.stage_id) if kind in COMPUTATIONS]
        return self._fetcher.drivers.of(BatchPlan).running(key, actions, units)

    def _stage_names(self) -> list[str]:
        return [str(stage) for stage in self.module.stages]

    def _make_stages(self) -> dict[int, Stage]:
        module, rank_of, ranks = self.module, self.module.rank_of, self._mesh.pipeline

        def link(source: int, target: int) -> Link | None:
            """The link from a stage to its neighbour."""
            if not 0 <= min(source, target) <= max(source, target) < len(rank_of):
                return None
            a, b = rank_of[source], rank_of[target]
            if a == b:
                # A stage may write to what it receives, and the stage before it may need that for its backward.
                return local.setdefault((source, target), LocalLink(copies=source < target))
            return RemoteLink(ranks, a, b, 2 * max(source, target) + (source > target), self.device)

        local: dict[tuple[int, int], LocalLink] = {}
        # If a backward is split in two halves, each half would recompute the layers. Column layers whose sums overlap
        # compute their weights' gradients where the input's gradient is computed, so each half would add them.
        recomputes = module.activation_checkpoint_interval > 0 or self._config.activation_checkpointing.layers
        overlaps = self._config.tensor_parallel.tp_overlap_comm
        return {
            s: Stage(
                run=self._run_of(s),
                inputs=link(s - 1, s),
                input_grads=link(s, s - 1),
                outputs=link(s, s + 1),
                output_grads=link(s + 1, s),
                splits=not (recomputes or overlaps),
            )
            for s in module.stages
        }

    def _run_of(self, stage: int) -> Callable[[Any], Any]:
        module, precision = self.module, self._precision

        def run(value: Any) -> Any:
            value = precision.cast_inputs(copied(value)) if stage == 0 else writable(value)
            with precision.autocast(self.device), self._sequence_stream(), self._blocks.active(value, str(stage)):
                return module.run_stage(stage, value)

        return run

    def _table(self, n_micro_batches: int, *, trains: bool) -> _C.PipeTable:
        """The schedule for ``n_micro_batches``."""
        found = self._tables.get((trains, n_micro_batches))
        if found is None:
            module, section = self.module, self._config.pipeline
            is_v = traits_of(module.schedule, "PipelineModule").is_v
            if trains:
                wanted, limit = section.schedule or module.schedule, section.activation_bytes_limit
                wanted = fitting(wanted, module.num_stages, n_micro_batches, self._costs, limit, is_v=is_v)
            else:
                wanted = "inference_v" if is_v else "inference"
            found = self._tables[trains, n_micro_batches] = make_table(
                wanted, module.num_stages, module.virtual_stages, n_micro_batches, "pipeline.schedule"
            )
        return found

    def _weigh(self, batch: tuple[Any, Any]) -> None:
        """Measures in one forward of ``batch`` how many bytes each stage keeps of a micro-batch. Collective. Random
        generators and running statistics of norms stay as they are.
        """
        module = self.module
        last = len(module.rank_of) - 1
        fetcher = self._fetcher
        scale = Scale(
            [*module.parameters(), *module.buffers()],
            lambda tensor: fetcher is not None and fetcher.packer.pack(tensor) is not None,
        )
        stages = {
            s: stage._replace(run=scale.stage(s, stage.run, splits=stage.splits, is_last=s == last))
            for s, stage in self._stages.items()
        }
        loss = scale.result(last, lambda outputs, k: self._loss_of(outputs, batch), splits=stages[min(stages)].splits)
        lent = Lent(lambda k: batch[0], loss, lambda loss: loss, self._passes.part)
        with Conditions(with_python=True).replayed():
            runner = Runner(stages, self._peers)
            self._run(self._table(1, trains=False), lent, "train_batch", "weigh", has_backward=False, runner=runner)
        found = self._comm.gather_objects(scale.bytes_of, label="bytes of activations")
        for s in range(last + 1):
            # Parallel pipelines can have samples of different lengths. The same schedule has to fit all of them.
            kept, between = zip(*(of_rank[s] for of_rank in found if s in of_rank), strict=True)
            self._costs[s] = Cost(kept_bytes=max(kept), weight_bytes=max(between))
        self._tables.clear()
        self._is_weighed = True

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Trains on one batch; returns its mean loss on all ranks.

        data_iter: yields micro-batches; default: the iterator of ``set_dataiterator``, or the loader of
        ``training_data``.

        Raises on all ranks before anything is trained: StateError if the data end early on one rank or cannot be read,
        and BatchSizeError if a micro-batch does not have ``train_micro_batch_size_per_gpu`` samples. That is the first
        dimension of the first tensor of its inputs; inputs without a tensor are not checked. Layers that take the
        sequence first get it from a function that transposes, as the first layer. Raises StageError on all
        ranks if a layer or the loss function raises an exception on one of them: the weights do not change, and the
        engine can train the next batch, unless other ranks of the same stage waited for that rank (``stopping.py``).
        Raises NonFiniteLossError on all ranks if the loss of a micro-batch is inf or NaN on one of them, as the mean
        over no labels is: the weights do not change.
        """
        self._require_optimizer("train_batch")
        self._require_states("train_batch")
        n = self.gradient_accumulation_steps()
        with self.phases.measure("data"):
            size = self.train_micro_batch_size_per_gpu()
            batches = self._fetch(data_iter, n, "train_batch", needs_labels=True, size=size)
            self._compare_inputs(batches)
        self.module.train()
        self._passes.recover()
        self._arguments.of_step(self.global_steps)
        if not self._is_weighed:
            self._weigh(batches[0] if batches else (None, None))
        table = self._table(n, trains=True)
        self._blocks.expect(_most_in_flight(table.actions(self.stage_id)))
        self._state.begin_window()
        if self.is_first_stage():
            self._state.note_tokens(sum(count_tokens((inputs,), {}) for inputs, _ in batches))
        self._window.place(self._window.begin + n - 1)  # the next micro-batches are one window, which they complete

        def loss_of(outputs: Any, k: int) -> torch.Tensor:
            loss = self._term_of(self._loss_of(outputs, batches[k]), batches[k][1])
            self._optimizer.note_loss(loss, self._window.share())
            return loss

        lent = Lent(
            first_inputs=lambda k: batches[k][0],
            result=loss_of,
            scale=lambda loss: self._passes.scale(loss, self._window.factor()),
            backward=self._passes.part,
            measure=self.phases.measure,
        )
        try:
            with self._passes.no_sync(), self._flops.forward():
                self._run(table, lent, "train_batch", ("train", n), has_backward=True)
        except BaseException:
            self._state.begin_window()
            raise
        self._update(self._optimizer)
        # The exchange that decides about overflow has brought the losses of the last stage to all ranks.
        self.loss = torch.tensor(self._optimizer.last_facts.loss, dtype=torch.float32, device=self.device)
        return self.loss

    def _run(
        self,
        table: _C.PipeTable,
        lent: Lent,
        what: str,
        key: Any,
        *,
        has_backward: bool,
        runner: Runner | None = None,
    ) -> dict[int, Any]:
        """The results of the last stage by micro-batch. Collective: if a stage raises an exception on one rank, all
        ranks raise StageError. Ranks of other pipelines, and stages that only send, learn of it here.

        key: runs with equal keys have equal tables.
        """
        results: dict[int, Any] = {}
        how: Stopped | None = None
        runner = self._runner if runner is None else runner
        if self._shards_parameters:
            plan = self._fetcher.drivers.of(BatchPlan)
            lent = lent._replace(computing=partial(plan.computing, saves=torch.is_grad_enabled()), skip=plan.skip)
        with self._weights_of(key, table):
            # The rest of the batch's gathers follows after a failed stage, too: other pipelines need them.
            try:
                results = runner.run(table.actions(self.stage_id), lent, has_backward=has_backward)
            except Stopped as stopped:
                how = stopped
        raise_on_all(self._comm, how, self._peers, what)
        return results

    def _lines(self, record: StepRecord) -> list[str]:
        """The log of a step. It also has the phases of each stage's rank in the pipeline of rank 0."""
        if not self.phases.is_enabled:
            return super()._lines(record)
        found = self._mesh.pipeline.gather_objects(self.phases.mean_ms(reset=True), label="phases of the stages")
        return [record.line({}), *(f"stage {stage}: {phases_text(means)}" for stage, means in enumerate(found))]

    def _mean(self, loss: float) -> torch.Tensor:
        """The mean over the pipelines of a number that the ranks of the last stage have. All ranks get it."""
        mine = loss / self._mesh.size(*DATA, SP, TP) if self.is_last_stage() else 0.0
        (mean,) = self._comm.sum_numbers([mine], label="mean loss")
        return torch.tensor(mean, dtype=torch.float32, device=self.device)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Runs forwards only, in evaluation mode and without gradients.

        Returns the mean loss over micro-batches and pipelines on all ranks. The arguments change this as follows.
        Without ``bcast_loss`` a rank of the last stage gets the mean of its own pipeline, and other ranks get None.
        With ``reduce_output`` "sum" ranks of the last stage get the sum over their micro-batches, and with None the
        list of losses. Without ``compute_loss`` ranks of the last stage get the outputs of the last stage by
        micro-batch. With ``return_logits`` the result is a pair of all this and the outputs by micro-batch.
        """
        self._require_open()
        self._require_states("eval_batch")
        if reduce_output not in ("avg", "sum", None):
            raise ConfigError(
                f"is {reduce_output!r}", where="eval_batch(reduce_output=...)", fix='pass "avg", "sum" or None'
            )
        n = num_micro_batches or self.gradient_accumulation_steps()
        table = self._table(n, trains=False)
        batches = self._fetch(data_iter, n, "eval_batch", needs_labels=compute_loss, size=None)
        outputs: dict[int, Any] = {}

        def result_of(value: Any, k: int) -> Any:
            if return_logits or not compute_loss:
                outputs[k] = value
            if not compute_loss:
                return None
            term = self._term_of(self._loss_of(value, batches[k]), batches[k][1])
            return self._whole_loss(term)

        lent = Lent(lambda k: batches[k][0], result_of, lambda loss: loss, self._passes.part)
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                losses = self._run(table, lent, "eval_batch", ("eval", n), has_backward=False)
        finally:
            self.module.train(was_training)
        logits = [outputs[k] for k in sorted(outputs)] if self.is_last_stage() else None
        result: Any = None
        if not compute_loss:
            return logits
        if self.is_last_stage():
            result = [losses[k] for k in sorted(losses)]
            if reduce_output is not None:
                result = torch.stack([loss.float() for loss in result]).sum() / (n if reduce_output == "avg" else 1)
        if bcast_loss and reduce_output == "avg":
            result = self._mean(0.0 if result is None else float(result))
            if self.monitor.is_writing:
                self.monitor.write_events([Event("Train/Samples/eval_loss", float(result), self.global_samples)])
        return (result, logits) if return_logits else result

    def _loss_of(self, outputs: Any, batch: tuple[Any, Any]) -> torch.Tensor:
        loss = outputs if self.module.loss_fn is None else self.module.loss_fn(outputs, batch[1])
        if not torch.is_tensor(loss) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if torch.is_tensor(loss) else type(loss).__name__
            raise BackwardError(
                f"the loss of the last stage has to be a scalar, not {got}",
                where="PipelineModule(loss_fn=...)",
                fix="have it return one number: mean() or sum()",
            )
        return loss.reshape(())

    def _term_of(self, loss: torch.Tensor, labels: Any) -> torch.Tensor:
        """The loss weighted as this rank's term in the loss of sequences that are cut over ranks. Collective over the
        ranks of a sequence.
        """
        return self._passes.weigh(loss, self._share.weight_of(labels)) if self._share.is_needed else loss

    def _whole_loss(self, term: torch.Tensor) -> torch.Tensor:
        """The sum of the terms of the ranks of a sequence."""
        if not self._share.is_needed:
            return term
        return term.new_tensor(self._mesh.sequence.sum_numbers([float(term)], label="losses of sequences")[0])

    def _fetch(
        self, data_iter: Iterator[Any] | None, n: int, what: str, *, needs_labels: bool, size: int | None
    ) -> list[tuple[Any, Any]]:
        """The micro-batches of a batch as (inputs, labels), if this rank needs them. Collective: if a micro-batch is
        missing on any rank, or inputs do not have ``size`` samples, all ranks raise."""
        problem, kind, cause = "", _NO_DATA, None
        batches: list[tuple[Any, Any]] = []
        if self.is_first_stage() or (self.is_last_stage() and needs_labels):
            try:
                source = self._source_of(data_iter)
                while len(batches) < n and not problem:
                    batches.append(self._split(next(source)))
            except StopIteration:
                problem = f"its data ended after {len(batches)} of {n} micro-batches"
            except (ModelError, StateError) as error:
                problem = error.what
            except Exception as error:  # noqa: BLE001  data sets raise anything, and all ranks have to learn of it
                cause = error
                problem = f"micro-batch {len(batches)} of its data raised {type(error).__name__}: {error}"
            if not problem and size is not None and self.is_first_stage():
                problem, kind = _problem_of_sizes(batches, size), _OTHER_SIZE
        found = self._comm.gather_numbers(kind if problem else n, label=f"{what}: micro-batches")
        if min(found) < 0:
            rank = next(rank for rank, number in enumerate(found) if number < 0)
            text = f"rank {self._comm.global_ranks[rank]}: {self._comm.gather_objects(problem, label=what)[rank]}"
            if found[rank] == _OTHER_SIZE:
                raise BatchSizeError(
                    text,
                    where=f"engine.{what}",
                    fix="set train_micro_batch_size_per_gpu to the number of samples in each micro-batch, and leave out"
                    " a last smaller one (drop_last=True); if layers take the sequence first, let a function that"
                    " transposes be the first layer, and give inputs whose first dimension is the samples",
                )
            raise StateError(
                text,
                where=f"engine.{what}",
                fix="give the first and the last stage of each pipeline the same micro-batches, as many as"
                " gradient_accumulation_steps",
            ) from cause
        if len(set(found)) > 1:
            by_number = {
                n: [r for r, m in zip(self._comm.global_ranks, found, strict=True) if m == n]
                for n in sorted(set(found))
            }
            raise RankMismatchError(
                "ranks run different numbers of micro-batches: "
                + "; ".join(f"{ranks_in_words(at)} {'run' if at[1:] else 'runs'} {n}" for n, at in by_number.items()),
                where=f"engine.{what}",
                fix="pass the same number, or set the same gradient_accumulation_steps, on all ranks",
            )
        return batches

    def _compare_inputs(self, batches: list[tuple[Any, Any]]) -> None:
        """Checks that ranks that hold parts of the same layers have the same micro-batches. Collective."""
        is_first, is_last = self.is_first_stage(), self.is_last_stage()
        used = [(inputs if is_first else None, labels if is_last else None) for inputs, labels in batches]
        self._inputs.look(self.global_steps, used, {})

    def _source_of(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            return data_iter
        if self._data_iterator is None and self.training_dataloader is not None:
            self._data_iterator = iter(RepeatingLoader(self.training_dataloader))
        if self._data_iterator is None:
            raise StateError(
                "it has no data",
                where="engine.train_batch",
                fix="pass data_iter, or training_data to deepspeed_c.initialize",
            )
        return self._data_iterator

    def _split(self, batch: Any) -> tuple[Any, Any]:
        batch = batch if self._batch_fn is None else self._batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ModelError(
                f"a micro-batch is a {type(batch).__name__}, not (inputs, labels)",
                where="engine.train_batch",
                fix="have the iterator give pairs, or pass a function that makes them to engine.set_batch_fn",
            )
        inputs, labels = tree_map(lambda v: v.to(self.device) if torch.is_tensor(v) else v, tuple(batch))
        return inputs, labels

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self.module.stages

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage. In a V-shaped schedule that is the first rank."""
        return len(self.module.rank_of) - 1 in self.module.stages

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Sets the iterator from which ``train_batch`` takes micro-batches."""
        self._data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Sets the loader from which ``train_batch`` takes micro-batches; it begins again when it ends."""
        self._data_iterator = iter(RepeatingLoader(loader))

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Sets the function that makes (inputs, labels) of an iterator's item."""
        self._batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Accepted: values between stages may be of any kind."""

    def reset_activation_shape(self) -> None:
        """Accepted: shapes may change from one micro-batch to the next."""

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """The losses that the module reports in addition to the total loss."""
        return self.module.get_additional_losses()

    def save_16bit_model(self, save_dir: str, *, max_shard_size: int | str = "5GB") -> bool:
        """Writes a model of ``from_transformers`` to the folder ``save_dir``, which ``from_pretrained`` of transformers
        reads, in the dtype of training. Collective. Returns True.

        Raises FeatureError for other models, CheckpointError on all ranks if the folder cannot be written.
        """
        self._require_open()
        self._require_states("save_16bit_model")
        if not isinstance(self.module, CausalLMPipeline):
            raise FeatureError(
                "this rank has the layers of its stages only",
                where="PipelineEngine.save_16bit_model",
                fix="call save_checkpoint, and get one file of all weights by `deepspeed_c checkpoint export`",
            )
        parts = Parts(self.module, self.module.own_tensors(), self._mesh)
        self.module.save_pretrained(save_dir, max_shard_size=max_shard_size, parts=parts)
        return True

    save_fp16_model = save_model = save_16bit_model

    def get_deepcompile_backend(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FeatureError(
            "deepcompile edits the graphs of one forward and its backward, and a pipeline's rank runs those of several"
            " micro-batches in turn",
            where="PipelineEngine.compile with compile.deepcompile",
            fix='set "compile": {"deepcompile": false}: engine.compile() then compiles each layer by itself',
        )

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FeatureError(
            "generation needs all layers, and this rank has those of its stages",
            where="PipelineEngine.generate",
            fix="save the model with save_16bit_model (a model of from_transformers), and load the folder with"
            " deepspeed_c.init_inference or with transformers",
        )

    def iter_full_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FeatureError(
            "this rank has the layers of its stages only",
            where="PipelineEngine.iter_full_weights",
            fix="save the model with save_16bit_model (a model of from_transformers), and load the folder",
        )

    send_weights = iter_full_weights

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("forward")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("step")


def _problem_of_sizes(batches: list[tuple[Any, Any]], size: int) -> str:
    """Words about the first micro-batch whose inputs do not have ``size`` samples; empty if there is none."""
    for k, (inputs, _) in enumerate(batches):
        first = next((leaf for leaf in tree_leaves(inputs) if torch.is_tensor(leaf)), None)
        if first is not None and first.ndim > 0 and len(first) != size:
            return f"micro-batch {k} has {len(first)} samples, and train_micro_batch_size_per_gpu is {size}"
    return ""


# In DeepSpeed the pipeline engine is a subclass of DeepSpeedEngine, and callers check for it with isinstance.
DeepSpeedEngine.register(PipelineEngine)


def _refuse(what: str) -> NoReturn:
    raise StateError(
        "a pipeline runs whole batches",
        where=f"PipelineEngine.{what}",
        fix="call engine.train_batch(data_iter) or engine.eval_batch(data_iter)",
    )
