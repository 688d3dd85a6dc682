"""DeepSpeed's ``Autotuner`` and ``ResourceManager``, for programs that start searches and experiments themselves."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_c.autotuning.experiment import Launch, config_index, metric_path, run_experiment
from deepspeed_c.autotuning.planning import machine_memory
from deepspeed_c.autotuning.search import is_better
from deepspeed_c.autotuning.show import RECORDS, as_text
from deepspeed_c.autotuning.space import ACCUMULATION, Candidate
from deepspeed_c.autotuning.tune import tune
from deepspeed_c.compat.config_sections import DeepSpeedAutotuningConfig
from deepspeed_c.config.source import read_source
from deepspeed_c.errors import ConfigError, StateError
from deepspeed_c.launcher.launch import experiment_launch
from deepspeed_c.launcher.launch import main as launch
from deepspeed_c.launcher.options import parse_options
from deepspeed_c.launcher.plan import find_devices
from deepspeed_c.logging import write_line

__all__ = ["Autotuner", "ResourceManager"]


def _launch_of(args: Namespace) -> Launch:
    words = getattr(args, "launcher_words", None)
    if words is None:
        raise ConfigError(
            "these options are not those of a command line",
            where="Autotuner(args)",
            fix="take them from deepspeed.launcher.runner.parse_args",
        )
    return experiment_launch(parse_options([*words, args.user_script, *args.user_args]), words)


class Autotuner:
    """A search over the configuration that a command line names, as by ``deepspeed_c --autotuning``.

    args: what ``deepspeed.launcher.runner.parse_args`` returns. active_resources: host -> slots, as ``args`` has them.
    DeepSpeed's methods for the steps of its own search (``tune_space``, ``get_plateau_mbs``, ...) are not here.

    Raises ConfigError for other options, and where the script's arguments name no configuration file, and LaunchError
    where no experiment could start.
    """

    def __init__(self, args: Namespace, active_resources: Mapping[str, Sequence[int]]) -> None:
        self.args = args
        self._launch = _launch_of(args)
        i, prefix = config_index(self._launch.arguments)
        self.user_config, _ = read_source(self._launch.arguments[i].removeprefix(prefix))
        self.autotuning_config = DeepSpeedAutotuningConfig(self.user_config)
        self.exps_dir = self.autotuning_config.exps_dir
        self.results_dir = self.autotuning_config.results_dir
        self._words: list[str] | None = None
        n_slots = sum(map(len, active_resources.values()))
        if n_slots != self._launch.n_ranks:
            raise ConfigError(
                f"has {n_slots} slots, and the command line starts {self._launch.n_ranks} ranks",
                where="Autotuner(active_resources)",
                fix="choose the slots by --include or --num_gpus",
            )

    def tune(self) -> None:
        """Searches, and writes the best configuration and the command with it. Raises ConfigError as a search does."""
        self._words = tune(self._launch, has_accelerator=find_devices() is not None)

    def print_tuning_results(self) -> None:
        """Prints the table of ``tune``. Raises StateError before it."""
        self._best("print_tuning_results")
        record = json.loads((Path(self.results_dir) / RECORDS).read_text(encoding="utf-8"))
        write_line(as_text(record), sys.stdout)

    def write_optimal_config(self) -> None:
        """Without effect, because ``tune`` has written it. Raises StateError before it."""
        self._best("write_optimal_config")

    def run_after_tuning(self) -> None:
        """Starts the script with the best configuration, and waits for it. Raises StateError before ``tune``."""
        launch(self._best("run_after_tuning"))

    def _best(self, method: str) -> list[str]:
        if self._words is None:
            raise StateError("nothing was tuned yet", where=f"Autotuner.{method}", fix="call tune() first")
        return self._words

    def metric(self) -> str:
        return self.autotuning_config.metric

    def fast_enabled(self) -> bool:
        return self.autotuning_config.fast

    def max_train_batch_size(self) -> int | None:
        return self.autotuning_config.max_train_batch_size

    def mp_size(self) -> int:
        return self.autotuning_config.mp_size

    def max_train_micro_batch_size_per_gpu(self) -> int:
        """The smaller of the section's and what its ``max_train_batch_size`` leaves for a rank."""
        most, whole = self.autotuning_config.max_train_micro_batch_size_per_gpu, self.max_train_batch_size()
        if not whole:
            return most
        n_copies = self._launch.n_ranks // self.mp_size()
        return min(most, max(whole // (self.get_gas_from_user_config() * max(n_copies, 1)), 1))

    def min_train_micro_batch_size_per_gpu(self) -> int:
        return self.autotuning_config.min_train_micro_batch_size_per_gpu

    def num_tuning_micro_batch_sizes(self) -> int:
        return self.autotuning_config.num_tuning_micro_batch_sizes

    def fp16_enabled(self) -> bool:
        section = self.user_config.get("fp16")
        return isinstance(section, Mapping) and section.get("enabled") is True

    def get_gpu_memory_info(self) -> int | None:
        """Free bytes of a rank's device; None where ranks train on the CPU."""
        return machine_memory(self._launch.n_local).device

    def get_gas_from_user_config(self) -> int:
        """The accumulation steps of the configuration, or of the script's own option where they are "auto"; else 1."""
        found = self.user_config.get(ACCUMULATION)
        if found == "auto":
            found = int(self.get_val_from_user_args(ACCUMULATION) or 1)
        return found if isinstance(found, int) else 1

    def get_val_from_user_args(self, ds_name: str) -> str | None:
        """The number that the script's arguments give the option of a key, by ``arg_mappings``; None without it."""
        flag = (self.autotuning_config.arg_mappings or {}).get(ds_name)
        words = self._launch.arguments
        value = words[words.index(flag) + 1] if flag in words[:-1] else ""
        return value if value.isnumeric() else None


class ResourceManager:
    """Runs experiments one after the other. Each uses all ranks of the command line.

    args: as for ``Autotuner``. hosts, num_gpus_per_node: kept, without effect. results_dir: the folder of the
    experiments' folders. arg_mappings: dotted key of the configuration -> the script's option.
    """

    def __init__(
        self,
        args: Namespace,
        hosts: Iterable[str],
        num_gpus_per_node: int,
        results_dir: str,
        exps_dir: str,
        arg_mappings: Mapping[str, str] | None,
    ) -> None:
        self.args, self.hosts, self.num_gpus_per_node = args, list(hosts), num_gpus_per_node
        self.results_dir, self.exps_dir = results_dir, exps_dir
        self.arg_mappings = {key.strip(): flag.strip() for key, flag in (arg_mappings or {}).items()}
        self.experiment_queue: list[dict[str, Any]] = []
        self.finished_experiments: dict[int, tuple[dict[str, Any], str | None]] = {}
        """Number of an experiment -> (the experiment, why it failed)."""
        self.exp_paths: set[str] = set()
        self.experiment_count = 0
        self._launch = _launch_of(args)

    def schedule_experiments(self, exp_paths: Iterable[str]) -> None:
        """Reads files of experiments, {"name": ..., "ds_config": ...}, that were not read before.

        Raises ConfigError for a file that is none.
        """
        for path in exp_paths:
            if path in self.exp_paths:
                continue
            found, _ = read_source(path)
            if not isinstance(found.get("name"), str) or not isinstance(found.get("ds_config"), Mapping):
                raise ConfigError("has no name and no ds_config", where=str(path), fix="write both")
            self.exp_paths.add(path)
            exp = {**found, "exp_id": self.experiment_count, "result_dir": str(Path(self.results_dir) / found["name"])}
            self.experiment_count += 1
            self.experiment_queue.append(exp)

    def run(self) -> None:
        """Runs what is scheduled. Experiments that have a result of the same configuration are not run again."""
        while self.experiment_queue:
            exp = self.experiment_queue.pop(0)
            config = {**exp["ds_config"], "autotuning": {**exp["ds_config"].get("autotuning", {}), "enabled": True}}
            folder = Path(exp["result_dir"]).absolute()
            exp["ds_config"] = {**config, "autotuning": {**config["autotuning"], "metric_path": metric_path(folder)}}
            result = run_experiment(Candidate(exp["name"], config, {}, ""), self._launch, folder, self.arg_mappings)
            if result.metrics is not None:
                exp["results"] = result.metrics
            self.finished_experiments[exp["exp_id"]] = exp, result.problem or None

    def parse_results(self, metric: str) -> tuple[dict[str, Any] | None, float | None]:
        """(the best experiment, its metric): the smallest time, or the largest rate; (None, None) without a result."""
        best: tuple[dict[str, Any] | None, float | None] = None, None
        for exp, _ in self.finished_experiments.values():
            value = exp.get("results", {}).get(metric)
            if value is not None and is_better(metric, value, best[1]):
                best = exp, value
        return best

    def clear(self) -> None:
        """Forgets what is scheduled."""
        self.experiment_queue = []
