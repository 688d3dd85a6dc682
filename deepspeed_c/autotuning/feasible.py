"""Which candidates fit: the planner computes the memory of a rank for each, before anything is started.

The script runs on the meta device in a process of its own (``planning.py``), so that whatever it does to its process
ends with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_c.autotuning.experiment import Launch, metric_path
from deepspeed_c.autotuning.space import Candidate
from deepspeed_c.engine.experiment import write_json
from deepspeed_c.quantity import as_binary

__all__ = ["Memory", "MemoryNeed", "Plans", "plan_candidates", "shape_of"]


class Memory(NamedTuple):
    """Bytes that one rank may use."""

    device: int | None
    """None: ranks train on the CPU, in host memory."""
    host: int | None
    """None: unknown."""


class MemoryNeed(NamedTuple):
    """The plan of one candidate: what a rank needs, or why there is no plan."""

    device: int = 0
    """Bytes of device memory; 0 on the CPU."""
    host: int = 0
    """Bytes of host memory, with what a process takes before it has a model."""
    buckets: str = ""
    """How many buckets of gradients, of how many bytes, and how many elements are gathered at once: candidates that
    differ in bucket sizes alone and agree in this run alike."""
    refusal: str = ""
    """Why the candidate cannot run."""
    unknown: str = ""
    """Why it could not be planned."""
    work: dict[str, Any] | None = None
    """A rank's work in a step, as fields of ``bound.StepWork``; None or empty: unknown."""
    ignores: bool = False
    """Whether the script passes another configuration to ``initialize`` than it is given."""

    def excess(self, memory: Memory) -> str:
        """Why the candidate is left out, with the bytes; "" if it fits, or is not known not to."""
        if self.refusal or self.unknown:
            return self.refusal
        for name in ("device", "host"):
            needs, has = getattr(self, name), getattr(memory, name)
            if has is not None and needs > has:
                return f"needs {needs} bytes of {name} memory a rank ({as_binary(needs)}), has {has} ({as_binary(has)})"
        return ""


class Plans(NamedTuple):
    """The plans of all candidates, the memory of a rank, and the model."""

    needs: dict[str, MemoryNeed]
    """By name."""
    memory: Memory
    model: str = ""
    """How many parameters the model has, and a digest of their names and shapes; "" if no model was found."""


def shape_of(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """The shape of a sample, from the inputs of an experiment that ran; None if they do not show it."""
    for each in metrics.get("inputs") or ():
        n_samples, *rest = each["shape"] or [0]
        if n_samples == metrics.get("train_micro_batch_size_per_gpu"):
            if each["is_floating_point"]:
                return {"sample": rest}
            return {"n_tokens": rest[0]} if len(rest) == 1 else None
    return None


def plan_candidates(
    candidates: Sequence[Candidate],
    arguments: Sequence[Sequence[str]],
    launch: Launch,
    folder: Path,
    shape: dict[str, Any] | None = None,
) -> Plans:
    """Plans each candidate.

    arguments: of the script, for each candidate. shape: of a sample (``shape_of``); None: activations are not counted.
    folder: for the output of the script. If its process fails, every candidate is unknown.
    """
    request = folder / "request.json"
    jobs = [
        {
            "name": each.name,
            "group": each.group,
            "arguments": list(words),
            "n_samples": each.micro_batch,
            "metric_path": metric_path(folder.parent / each.name),
        }
        for each, words in zip(candidates, arguments, strict=True)
    ]
    write_json(
        request,
        {
            "script": launch.script,
            "n_ranks": launch.n_ranks,
            "n_local": launch.n_local,
            "jobs": jobs,
            "shape": shape,
            "answer": str(folder / "answer.json"),
        },
    )
    (folder / "answer.json").unlink(missing_ok=True)
    with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
        command = [sys.executable, "-m", "deepspeed_c.autotuning.planning", str(request)]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False).returncode
    try:
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    except OSError:
        why = f"the planner ended with exit code {code}: {folder / 'stderr.log'}"
        return Plans({each.name: MemoryNeed(unknown=why) for each in candidates}, Memory(None, None))
    needs = {name: MemoryNeed(**plan) for name, plan in answer["plans"].items()}
    return Plans(needs, Memory(**answer["memory"]), answer["model"])
