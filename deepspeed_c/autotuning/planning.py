"""``python -m deepspeed_c.autotuning.planning REQUEST``: the process in which the script of a search runs on the meta
device, and in which the memory of each candidate is planned. ``feasible.py`` starts it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.autotuning.feasible import Memory, MemoryNeed
from deepspeed_c.autotuning.work import state_work, trace_products
from deepspeed_c.cgroups import memory_left
from deepspeed_c.config import read_config
from deepspeed_c.config.source import GivenConfig
from deepspeed_c.engine.experiment import write_json
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import ConfigError, DeepSpeedCError
from deepspeed_c.plan.activations import ForwardShape
from deepspeed_c.plan.script import find_model
from deepspeed_c.plan.table import plan_table
from deepspeed_c.profile.timers import measure_memory, resident_bytes

__all__ = ["machine_memory", "main"]


def machine_memory(n_local: int) -> Memory:
    """The memory of one of ``n_local`` ranks of this host. Host memory is what the host and the process's cgroups have
    left, shared evenly."""
    device = None
    if torch.accelerator.is_available():
        device = min(get_accelerator().available_memory(i) for i in range(torch.accelerator.device_count()))
    left = [found for found in (memory_left(), _available()) if found is not None]
    return Memory(device, min(left) // n_local if left else None)


def _available() -> int | None:
    return measure_memory().host_available_bytes


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
        read = read_config(source)
        is_cut = read.tensor_parallel_size[0] > 1 or read.resolve(world_size=1, batch="skip").expert_parallel.enabled
        if not is_cut:  # otherwise a plan cuts the model
            self._found[job["group"]] = model, source
        return model, source

    def work_of(self, job: dict[str, Any], batch: Any, table: Any, device_type: str) -> dict[str, Any]:
        """Counts the work of a step. A micro-batch of one size and dtype is traced once, because the other keys of a
        configuration do not change its products."""
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
