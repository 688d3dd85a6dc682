"""The results folder: every candidate with what came of it, a table, and the best configuration with its command."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_c.autotuning.experiment import Launch, Result, arguments_for, config_index, last_lines
from deepspeed_c.autotuning.feasible import MemoryNeed
from deepspeed_c.autotuning.picture import draw
from deepspeed_c.autotuning.search import is_better
from deepspeed_c.autotuning.show import RECORDS, UNITS, as_text
from deepspeed_c.autotuning.space import ACCUMULATION, TRAIN_BATCH, Candidate, Space
from deepspeed_c.engine.experiment import write_json
from deepspeed_c.errors import ConfigError

__all__ = ["Records"]

_N_LAST = 6
# What a script says, or how it ends, for want of memory.
_MEMORY = re.compile(r"out ?of ?memory|can't allocate memory|MemoryError|exit code (-9|137)\b", re.IGNORECASE)
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


class Records:
    """The candidates of one search. The file ``records.json`` is written anew after each of them."""

    def __init__(self, space: Space, launch: Launch) -> None:
        """Raises ConfigError if the folder holds the results of another script or of other arguments."""
        section = space.section
        self._section, self._launch, self._mappings = section, launch, space.mappings
        self._unmapped = sorted(space.autos - {TRAIN_BATCH} - set(space.mappings))
        self.folder, self._exps = Path(section.results_dir).absolute(), Path(section.exps_dir).absolute()
        self._rows: dict[str, dict[str, Any]] = {}
        self._best: tuple[Candidate, float] | None = None
        self._is_finished = False
        self._model = ""
        self._earlier = self._read_earlier()
        self._refuse_others(self._identity())

    def _identity(self) -> dict[str, Any]:
        i, _ = config_index(self._launch.arguments)
        others = [word for j, word in enumerate(self._launch.arguments) if j != i]
        return {
            "script": str(Path(self._launch.script).absolute()) if self._launch.is_file else self._launch.script,
            "arguments": others,
            "n_ranks": self._launch.n_ranks,
        }

    def _read_earlier(self) -> dict[str, Any]:
        path = self.folder / RECORDS
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(earlier, dict):
                raise TypeError("its content is not that of a search")
            return earlier
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}",
                where="autotuning.results_dir",
                fix="name another folder, or remove that file",
            ) from error

    def _refuse_others(self, identity: dict[str, Any]) -> None:
        earlier = self._earlier
        other = [key for key in identity if earlier and earlier.get(key) != identity[key]]
        if other:
            raise ConfigError(
                f"{self.folder} holds the results of another run: its {other[0]} is {earlier.get(other[0])!r},"
                f" not {identity[other[0]]!r}",
                where="autotuning.results_dir",
                fix="name another folder for results_dir and exps_dir, or remove both",
            )

    def begin(self, model: str) -> None:
        """Removes the experiments of a finished search, if its section says so. model: ``Plans.model``.

        Raises ConfigError if the folder holds the results of another model. A model that was not found is not compared.
        """
        earlier, self._model = self._earlier, model
        if model and earlier.get("model"):
            self._refuse_others({"model": model})
        if earlier.get("is_finished") and self._section.overwrite:
            # A finished search begins anew; an interrupted one goes on with the experiments that it has.
            for row in earlier.get("experiments", ()):
                folder = self._exps / row["name"]
                if (folder / "exp.json").is_file():
                    shutil.rmtree(folder)

    @property
    def best(self) -> tuple[Candidate, float] | None:
        """The best candidate so far and its metric."""
        return self._best

    def leave_out(
        self, candidate: Candidate, reason: str, planned: MemoryNeed | None, status: str = "left out"
    ) -> None:
        """Records a candidate that is not tried. status: "left out", or "pruned" if it can run."""
        self._rows[candidate.name] = self._row(candidate, planned, status=status, problem=reason)

    def add(self, candidate: Candidate, result: Result, planned: MemoryNeed | None) -> bool:
        """Records an experiment. Returns whether it is the best so far."""
        metric = self._section.metric
        value = result.value(metric)
        self._rows[candidate.name] = self._row(
            candidate,
            planned,
            status="failed" if value is None else "ran",
            value=value,
            problem=result.problem,
            seconds=result.seconds,
            metrics=result.metrics,
        )
        is_best = value is not None and is_better(metric, value, None if self._best is None else self._best[1])
        if is_best:
            self._best = candidate, value
        self.write(is_finished=False)
        return is_best

    def repeats_an_error(self) -> bool:
        """Whether the first two experiments have ended with the same error: the script fails whatever is tried.

        Too little memory is no such error, since another candidate may need less.
        """
        tried = [row for row in self._rows.values() if row["status"] in ("ran", "failed")]
        if [row["status"] for row in tried[:2]] != ["failed"] * 2:
            return False
        first, second = ((row["problem"], self._last_words(row["name"])) for row in tried[:2])
        return first == second and bool(first[1]) and not _MEMORY.search(" ".join(first))

    def _last_words(self, name: str) -> str:
        """The end of an experiment's output, without numbers and its name, so that equal errors read alike."""
        lines = last_lines(self._exps / name / "stderr.log", _N_LAST)
        return _NUMBER.sub("N", "\n".join(lines).replace(name, "NAME"))

    def _row(self, candidate: Candidate, planned: MemoryNeed | None, **facts: Any) -> dict[str, Any]:
        plan = None if planned is None else {key: value for key, value in planned._asdict().items() if value}
        return {"name": candidate.name, "choices": dict(candidate.choices), "plan": plan, **facts}

    def write(self, *, is_finished: bool) -> None:
        """Writes ``records.json``."""
        self._is_finished = is_finished
        write_json(self.folder / RECORDS, self._record())

    def _record(self) -> dict[str, Any]:
        return {
            **self._identity(),
            "model": self._model,
            "metric": self._section.metric,
            "is_finished": self._is_finished,
            "best": None if self._best is None else self._best[0].name,
            "experiments": list(self._rows.values()),
        }

    def table(self) -> str:
        """The search as a table."""
        return as_text(self._record())

    def finish(self) -> list[str]:
        """Writes the table, the picture and the best configuration. Returns the words that start the script with it.

        Raises ConfigError if no experiment succeeded.
        """
        self.write(is_finished=True)
        if self._best is None:
            failed = [row for row in self._rows.values() if row["status"] == "failed"]
            what = "no candidate fits" if not failed else f"none of {len(failed)} experiments succeeded"
            if self.repeats_an_error():
                what = "the first 2 experiments ended with the same error, at which the search stops"
            first = (failed or list(self._rows.values()))[0]
            logs = _end_of(self._exps / first["name"] / "stderr.log") if failed else ""
            raise ConfigError(
                f"{what}; {first['name']}: {first['problem']}{logs}",
                where="--autotuning",
                fix=_fix_of(failed, logs, self._unmapped),
            )
        candidate, _ = self._best
        config = {key: value for key, value in candidate.config.items() if key != "autotuning"}
        path = self.folder / "ds_config_optimal.json"
        write_json(path, config)
        arguments = arguments_for(self._launch.arguments, str(path), config, self._mappings)
        (self.folder / "cmd_optimal.txt").write_text(self._launch.shown(arguments) + "\n", encoding="utf-8")
        (self.folder / "summary.txt").write_text(self.table() + "\n", encoding="utf-8")
        picture = draw(self._record(), UNITS[self._section.metric])
        (self.folder / "summary.svg").write_text(picture, encoding="utf-8")
        return [*self._launch.options, self._launch.script, *arguments]


def _fix_of(failed: Sequence[Mapping[str, Any]], logs: str, unmapped: Sequence[str]) -> str:
    """What helps if no experiment succeeded. failed: their rows, none if no candidate fits. logs: the end of the first
    one's output. unmapped: keys that are "auto", and whose values no option of the script takes."""
    said = " ".join([logs, *(row["problem"] for row in failed)])
    if not failed or _MEMORY.search(said):
        return "allow smaller micro-batches or a higher stage"
    fix = "correct what the script's output says"
    if failed[0]["choices"].get(ACCUMULATION) == "auto":
        fix += f', or write a number for {ACCUMULATION}: "auto" is filled in by the Trainer of transformers alone'
    if unmapped:
        fix += f", or name the script's own options for {' and '.join(unmapped)} in autotuning.arg_mappings"
    return fix


def _end_of(path: Path) -> str:
    """The last lines of an output, and where it is."""
    return "".join(f"\n    {line.strip()}" for line in [f"the end of {path}:", *last_lines(path, _N_LAST)])
