"""``deepspeed_c --autotuning``: plan the candidates, run those that fit, and write down the best."""

from __future__ import annotations

import json
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed_c.autotuning.bound import BOUNDED, MachineRates, StepWork, least_seconds, why_beaten
from deepspeed_c.autotuning.experiment import Launch, Result, config_index, prepare, run_experiment
from deepspeed_c.autotuning.feasible import MemoryNeed, plan_candidates, shape_of
from deepspeed_c.autotuning.progress import ProgressBar
from deepspeed_c.autotuning.rates import measure_rates
from deepspeed_c.autotuning.results import Records
from deepspeed_c.autotuning.search import KINDS, check_kind
from deepspeed_c.autotuning.space import ACCUMULATION, Candidate, Space, make_space, spread
from deepspeed_c.autotuning.trainer import trainer_mappings
from deepspeed_c.config.source import read_source
from deepspeed_c.errors import ConfigError
from deepspeed_c.logging import write_line

__all__ = ["tune"]

# The planner's folder among those of the experiments.
_PLAN = "plan"


def tune(launch: Launch, *, has_accelerator: bool) -> list[str]:
    """Searches the space of the script's configuration file. Returns the launcher's words for the best candidate.

    Raises ConfigError if the space is empty, no candidate fits or succeeds, the script ignores the configuration,
    the results folder belongs to another run, or the kind of search needs a package that is absent.
    """
    i, prefix = config_index(launch.arguments)
    config, _ = read_source(launch.arguments[i].removeprefix(prefix))
    space = make_space(config, launch.n_ranks, has_accelerator=has_accelerator)
    check_kind(space.section.tuner_type)
    space = space._replace(mappings={**trainer_mappings(space.autos, launch), **space.mappings})
    with _ended_by_signals():
        return _Search(space, launch).run()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the running experiment too, as Ctrl-C does."""

    def end(number: int, _: Any) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Search:
    """One search, from its space to its results."""

    def __init__(self, space: Space, launch: Launch) -> None:
        self._space, self._section, self._launch = space, space.section, launch
        self._records = Records(space, launch)
        self._exps = Path(space.section.exps_dir).absolute()
        self._mappings = space.mappings
        self._planned: dict[str, MemoryNeed] = {}
        self._tried: list[Candidate] = []
        self._values: dict[str, float] = {}
        self._n_since_best = 0
        self._model = ""
        self._host_limit: int | None = None
        self._bar = ProgressBar(space.section.end_profile_step + 1, sys.stderr)
        self._rates: MachineRates | None = None
        self._inputs_vary = False

    def run(self) -> list[str]:
        section = self._section
        left = self._without_excess(self._space.candidates, None)
        self._records.begin(self._model)
        if left:
            # The smallest micro-batch runs first: it shows the shape of a sample, with which the others are planned.
            metrics = self._try(left.pop(0), len(left) + 1).metrics
            shape = None if metrics is None else shape_of(metrics)
            if shape is not None and self._launch.is_file:
                left = self._without_excess(left, shape)
            if not self._space.has_listed_batches:
                left = self._chosen_sizes(left)
        choose = KINDS[section.tuner_type]
        while len(self._tried) < section.tuner_num_trials and not self._has_stopped():
            left = self._without_beaten(left)
            if not left:
                break
            candidate = choose(left, self._tried, self._values, section.metric)
            left.remove(candidate)
            self._try(candidate, len(left) + 1)
        words = self._records.finish()
        _say(self._records.table())
        return words

    def _has_stopped(self) -> bool:
        return self._records.repeats_an_error() or 0 < self._section.tuner_early_stopping <= self._n_since_best

    def _without_excess(self, candidates: Sequence[Candidate], shape: dict[str, Any] | None) -> list[Candidate]:
        """The candidates that are not known to exceed a rank's memory. The others are recorded."""
        if not (candidates and self._launch.is_file):
            return list(candidates)
        arguments = [prepare(each, self._launch, self._exps / each.name, self._mappings) for each in candidates]
        plans, memory, self._model = plan_candidates(candidates, arguments, self._launch, self._exps / _PLAN, shape)
        if memory.host is not None:
            self._host_limit = memory.host * self._launch.n_local
        fitting, unknown, firsts = [], set(), {}
        for candidate in candidates:
            planned = plans[candidate.name]
            if planned.ignores:
                raise ConfigError(
                    "the script ignores the configuration: it passes another one to deepspeed_c.initialize",
                    where=f"--autotuning: {self._launch.script}",
                    fix="pass args (with --deepspeed_config), or the content of that file, to initialize",
                )
            if planned.unknown:
                unknown.add(planned.unknown)
            else:
                self._planned[candidate.name] = planned
            reason = planned.excess(memory)
            first = firsts.setdefault(_run_of(candidate, planned), candidate.name)
            if first != candidate.name and not reason:
                reason = f"it runs as {first} does: no bucket of it is full"
            if reason:
                self._records.leave_out(candidate, reason, planned)
                _say(f"autotuning: {candidate.name} is left out: {reason.splitlines()[0]}")
            else:
                fitting.append(candidate)
        for why in sorted(unknown):
            _say(f"autotuning: not planned: {why.splitlines()[0]}")
        return fitting

    def _without_beaten(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that may beat the best so far. The others are recorded."""
        best, metric = self._records.best, self._section.metric
        if best is None or metric not in BOUNDED or self._inputs_vary:
            return list(candidates)
        kept = []
        for candidate in candidates:
            why = ""
            work = self._work_of(candidate)
            if work is not None:
                seconds = least_seconds(work, candidate.config[ACCUMULATION], self._known_rates())
                why = why_beaten(metric, seconds, candidate.config[ACCUMULATION] * self._samples_of(candidate), best[1])
            if why:
                self._records.leave_out(candidate, why, self._planned.get(candidate.name), "pruned")
                _say(f"autotuning: {candidate.name} is pruned: {why}")
            else:
                kept.append(candidate)
        return kept

    def _work_of(self, candidate: Candidate) -> StepWork | None:
        planned = self._planned.get(candidate.name)
        return StepWork(**planned.work) if planned is not None and planned.work else None

    def _samples_of(self, candidate: Candidate) -> int:
        """Samples of a micro-batch on all ranks. No more: ranks that share a sample make it fewer."""
        return candidate.micro_batch * self._launch.n_ranks

    def _known_rates(self) -> MachineRates:
        """The rates of a rank, measured once."""
        if self._rates is None:
            self._rates = measure_rates(self._launch.n_local, self._exps / _PLAN)
        return self._rates

    def _chosen_sizes(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """``num_tuning_micro_batch_sizes`` micro-batches of each group, with those that ran, over its whole range."""
        sizes: defaultdict[str, list[int]] = defaultdict(list)
        for each in sorted((*self._tried, *candidates), key=lambda each: each.micro_batch):
            sizes[each.group].append(each.micro_batch)
        n = self._section.num_tuning_micro_batch_sizes
        return [each for each in candidates if each.micro_batch in spread(sizes[each.group], n)]

    def _told_best(self) -> str:
        best = self._records.best
        return "none" if best is None else f"{best[0].name}, {best[1]:.4g}"

    def _try(self, candidate: Candidate, n_left: int) -> Result:
        """Runs a candidate. n_left: how many there are with it."""
        n_left = min(n_left, self._section.tuner_num_trials - len(self._tried))
        watch = self._bar.watch(candidate.name, len(self._tried), n_left, self._told_best())
        folder = self._exps / candidate.name
        result = run_experiment(candidate, self._launch, folder, self._mappings, watch, self._host_limit)
        self._bar.clear()
        self._tried.append(candidate)
        self._check(candidate, result)
        is_best = self._records.add(candidate, result, self._planned.get(candidate.name))
        self._n_since_best = 0 if is_best else self._n_since_best + 1
        metric = self._section.metric
        value = result.value(metric)
        self._learn(candidate, result)
        if value is not None:
            self._values[candidate.name] = value
        told = result.problem if value is None else f"{metric} {value:.4g}"
        _say(
            f"autotuning: {len(self._tried)}. {candidate.name}: {told}"
            f" ({'from an earlier search' if result.is_reused else f'{result.seconds:.1f} s'};"
            f" best: {self._told_best()})"
        )
        return result

    def _learn(self, candidate: Candidate, result: Result) -> None:
        """No rate is below what an experiment has reached, and samples of many shapes have no known work."""
        work, latency = self._work_of(candidate), result.value("latency")
        if result.metrics is None:
            return
        self._inputs_vary |= bool(result.metrics.get("inputs_vary"))
        if work is not None and latency and self._rates is not None and self._rates.flops:
            reached = work.flops * candidate.config[ACCUMULATION] / latency
            self._rates = self._rates._replace(flops=max(self._rates.flops, reached))

    def _check(self, candidate: Candidate, result: Result) -> None:
        """Raises ConfigError if the script did not do as its configuration says: others would not, either."""
        folder = self._exps / candidate.name
        if result.metrics is None:
            if result.problem.startswith(("exit code", "out of memory")) or (result.is_stuck and self._values):
                return
            if result.is_stuck:
                raise ConfigError(
                    f"the script does not train: {result.problem}",
                    where=f"--autotuning: {folder}",
                    fix="see stderr.log and stdout.log there; if it only takes longer, raise"
                    " autotuning.max_minutes_without_step",
                )
            raise ConfigError(
                result.problem,
                where=f"--autotuning: {folder}",
                fix="pass args (with --deepspeed_config) or the file to deepspeed_c.initialize, and take more steps, or"
                " lower start_profile_step and end_profile_step",
            )
        told, ran = candidate.micro_batch, result.metrics.get("train_micro_batch_size_per_gpu")
        inputs = [each["shape"] for each in result.metrics.get("inputs") or () if each["shape"]]
        # Some models take the batch as the second dimension.
        if ran == told and inputs and not any(told in shape[:2] for shape in inputs):
            ran = inputs[0][0]
        if ran != told:
            raise ConfigError(
                f"the script ignores the configuration: it was told a micro-batch of {told}, and ran {ran}",
                where=f"--autotuning: {folder}",
                fix="take the micro-batch from engine.train_micro_batch_size_per_gpu(), use the loader that initialize"
                " returns, or name the script's own option in autotuning.arg_mappings",
            )
        if result.value(self._section.metric) is None:
            raise ConfigError(
                f"an experiment of this model does not measure {self._section.metric!r}",
                where="autotuning.metric",
                fix='choose "throughput" or "latency"',
            )


def _run_of(candidate: Candidate, planned: MemoryNeed) -> str:
    """Equal for two candidates that differ in bucket sizes, if these make no difference to the model."""
    if not planned.buckets:
        return candidate.name
    others = {key: value for key, value in candidate.choices.items() if not key.endswith("_bucket_size")}
    return json.dumps([others, planned.buckets, planned.device, planned.host], sort_keys=True)


def _say(text: str) -> None:
    write_line(text, sys.stdout)
