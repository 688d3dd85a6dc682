"""Which candidates fit: the planner computes the memory of a rank for each, before anything is started.

The script runs on the meta device in a process of its own (``python -m deepspeed_c.autotuning.feasible REQUEST``), so
that whatever it does to its process ends with it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_c.autotuning.experiment import Launch, metric_path
from deepspeed_c.autotuning.space import Candidate
from deepspeed_c.cgroups import memory_left
from deepspeed_c.config.source import GivenConfig
from deepspeed_c.engine.experiment import write_json
from deepspeed_c.quantity import as_binary

__all__ = ["Memory", "MemoryNeed", "Plans", "machine_memory", "plan_candidates", "shape_of"]


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


def machine_memory(n_local: int) -> Memory:
    """The memory of one of ``n_local`` ranks of this host. Host memory is what the host and the process's cgroups have
    left, shared evenly."""
    import torch

    from deepspeed_c.accelerator import get_accelerator

    device = None
    if torch.accelerator.is_available():
        device = min(get_accelerator().available_memory(i) for i in range(torch.accelerator.device_count()))
    left = [found for found in (memory_left(), _available()) if found is not None]
    return Memory(device, min(left) // n_local if left else None)


def _available() -> int | None:
    from deepspeed_c.profile.timers import measure_memory

    return measure_memory().host_available_bytes


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
        command = [sys.executable, "-m", "deepspeed_c.autotuning.feasible", str(request)]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False).returncode
    try:
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    except OSError:
        why = f"the planner ended with exit code {code}: {folder / 'stderr.log'}"
        return Plans({each.name: MemoryNeed(unknown=why) for each in candidates}, Memory(None, None))
    needs = {name: MemoryNeed(**plan) for name, plan in answer["plans"].items()}
    return Plans(needs, Memory(**answer["memory"]), answer["model"])


def main(path: str) -> None:
    """Plans the candidates of a request file, and writes its answer file."""
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    memory = machine_memory(request["n_local"])
    plans: dict[str, dict[str, Any]] = {}
    found = _Models(request)
    by_group: dict[str, dict[str, Any]] = {}
    for job in request["jobs"]:
        if request["shape"] is None and job["group"] in by_group:
            # Without activations the memory does not depend on the batch.
            plans[job["name"]] = by_group[job["group"]]
            continue
        plan = _plan(job, request, found, "cpu" if memory.device is None else "cuda")
        plans[job["name"]] = by_group[job["group"]] = plan._asdict()
    write_json(request["answer"], {"plans": plans, "memory": memory._asdict(), "model": found.known_as})


class _Models:
    """The models that a script passes to ``initialize``, one for each group of candidates."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._script, self._n_ranks = request["script"], request["n_ranks"]
        self._found: dict[str, Any] = {}
        self._products: dict[tuple[Any, ...], int] = {}
        self.known_as = ""
        """``Plans.model`` of the first model."""
        self.base_bytes = 0
        """Host memory of a process that is about to call ``initialize``: interpreter, libraries, the script's data."""

    def find(self, job: dict[str, Any]) -> Any:
        """The model of the job's group and the script's configuration; None if the script passes another configuration
        than it is given. Raises ModelError."""
        from deepspeed_c.config import read_config
        from deepspeed_c.plan.script import find_model
        from deepspeed_c.profile.timers import resident_bytes

        if job["group"] in self._found:
            return self._found[job["group"]]
        model = find_model(self._script, job["arguments"], self._n_ranks)
        if not self.base_bytes:
            self.base_bytes = resident_bytes() or 0
        self.known_as = self.known_as or _known_as(model.model)
        source = model.read_source()
        if source is None or not _is_given(source, job["metric_path"]):
            return None
        if isinstance(model.model_parameters, Iterator):  # each plan reads them
            model = model._replace(model_parameters=list(model.model_parameters))
        if read_config(source).tensor_parallel_size[0] == 1:  # otherwise a plan cuts the model
            self._found[job["group"]] = model, source
        return model, source

    def work_of(self, job: dict[str, Any], batch: Any, table: Any, device_type: str) -> dict[str, Any]:
        """Counts the work of a step. A micro-batch of one size and dtype is traced once, because the other keys of a
        configuration do not change its products."""
        from deepspeed_c.autotuning.work import state_work, trace_products
        from deepspeed_c.config import read_config
        from deepspeed_c.engine.precision import Precision

        if job["group"] not in self._found or table.n_tensor > 1:
            return {}
        model, source = self._found[job["group"]]
        read = read_config(source)
        config = read.resolve(world_size=self._n_ranks, batch="skip")
        flops = 0
        if batch is not None and read.sequence_parallel_size == 1:
            precision = Precision(config, model.model)
            key = (batch, precision.dtype, precision.autocast_dtype, table.sizes.numel)
            if key not in self._products:
                self._products[key] = trace_products(model.model, batch, precision, device_type)
            flops = self._products[key]
        n_trained = sum(p.numel for p in table.sizes.params if p.group is not None and p.n_expert_ranks == 1)
        work = state_work(table.rows[table.chosen].plan, n_trained, config, device_type)
        return work._replace(flops=flops)._asdict()


def _known_as(model: Any) -> str:
    params = dict(model.named_parameters())
    shapes = json.dumps({name: list(p.shape) for name, p in params.items()})
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:8]
    return f"{sum(p.numel() for p in params.values())} elements in {len(params)} parameters, digest {digest}"


def _plan(job: dict[str, Any], request: dict[str, Any], found: _Models, device_type: str) -> MemoryNeed:
    from deepspeed_c.errors import ConfigError, DeepSpeedCError
    from deepspeed_c.plan.activations import ForwardShape
    from deepspeed_c.plan.table import plan_table

    try:
        planned = found.find(job)
        if planned is None:
            return MemoryNeed(ignores=True)
        model, source = planned
        shape = request["shape"]
        batch = None
        if shape is not None:
            sample = None if shape.get("sample") is None else tuple(shape["sample"])
            batch = ForwardShape(job["n_samples"], shape.get("n_tokens"), sample)
        table = plan_table(
            source,
            request["n_ranks"],
            model=model.model,
            optimizer=model.optimizer,
            model_parameters=model.model_parameters,
            is_sharded=model.is_sharded,
            device_type=device_type,
            batch=batch,
            every_stage=False,
        )
    except ConfigError as error:
        return MemoryNeed(refusal=str(error))
    except DeepSpeedCError as error:
        return MemoryNeed(unknown=str(error))
    row = table.rows[table.chosen]
    if row.plan is None:
        return MemoryNeed(refusal=row.refusal)
    device = row.plan.peak.nbytes
    host = max(phase.host_nbytes for phase in row.plan.phases.values())
    buckets = f"{row.plan.n_buckets} of {row.plan.largest_unit_bytes}, {row.plan.window_elems}"
    work = found.work_of(job, batch, table, device_type)
    if device_type == "cpu":
        return MemoryNeed(host=found.base_bytes + device + host, buckets=buckets, work=work)
    return MemoryNeed(device, found.base_bytes + host, buckets, work=work)


def _is_given(config: GivenConfig, path: str) -> bool:
    section = config.keys.get("autotuning")
    return isinstance(section, dict) and section.get("metric_path") == path


if __name__ == "__main__":
    main(sys.argv[1])
