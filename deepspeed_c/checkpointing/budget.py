"""A number of bytes that activations may take: which layers are recomputed, and which of their operators, to fit it.

The first forward recomputes everything, and is measured. A C core (``dsc/recompute.h``) then finds the plan that adds
the least time, from numbers that all ranks agree on. Layers are known by their number among the calls of a forward.

What counts are the bytes that layers keep between their forward and their backward, and what one of them holds besides
while it is run again; not gradients, nor what the rest of the model keeps.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.checkpointing.frames import NO_BACKWARD
from deepspeed_c.checkpointing.operators import MeasuredLayer, MeasuredOperator
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.env import read_env
from deepspeed_c.errors import ConfigError, OffloadError, RankMismatchError
from deepspeed_c.logging import logger
from deepspeed_c.offload.place import raise_together
from deepspeed_c.quantity import as_binary, parse_bytes

__all__ = [
    "KEEP",
    "MEASURE",
    "N_ON_THE_WAY",
    "RECOMPUTE",
    "Budget",
    "BudgetPlan",
    "Tier",
    "Treatment",
    "find_plan",
    "read_budget",
]

KEEP, RECOMPUTE, MEASURE = "keep", "recompute", "measure"
# Of what is free, that part stays: allocators need room to move in.
_AUTO_SHARE = 0.9
# A plan is remade when the elements of a forward's first inputs change by more than this part.
_CHANGE = 0.1
_KEY = "activation_checkpointing.budget"


# Inputs that are on their way to a tier, and back, while a layer runs: one each, besides its own.
N_ON_THE_WAY = 2
_HOST, _FILE = "cpu", "nvme"


class Tier(NamedTuple):
    """A place other than the memory that computes, where inputs of layers may wait."""

    bytes_per_s: float  # there, and as much back, beside the computation
    thread_bytes_per_s: float = math.inf  # that the computing thread itself spends on it


class Treatment(NamedTuple):
    """What happens to one layer.

    choice: KEEP or RECOMPUTE, or the name of a tier where its inputs wait.
    operators: numbers of its expensive operators whose outputs are kept, if it is run again.
    """

    choice: str
    operators: tuple[int, ...] = ()


class BudgetPlan(NamedTuple):
    """How each layer of a forward is treated. Numbers are of ``find_plan``'s layers."""

    budget_bytes: int
    smallest_bytes: int
    peak_bytes: int
    added_ns: int
    bound_ns: int  # no plan adds less
    all_ns: int  # that recomputing everything adds
    labels: tuple[str, ...]
    treatments: tuple[Treatment, ...]
    n_elems: int  # of the first layer's inputs

    def table(self, layers: Sequence[MeasuredLayer] = ()) -> str:
        """One line for each run of layers that are treated alike."""
        head = (
            f"activation budget: {as_binary(self.peak_bytes)} of {as_binary(self.budget_bytes)} at the peak (at least"
            f" {as_binary(self.smallest_bytes)}), {self.added_ns / 1e6:.3g} of {self.all_ns / 1e6:.3g} ms of operators are run again"
        )
        lines = [head]
        begin = 0
        for i, treatment in enumerate(self.treatments):
            if i + 1 < len(self.treatments) and self.treatments[i + 1] == treatment:
                continue
            name = self.labels[begin] if begin == i else f"{self.labels[begin]} .. {self.labels[i]}"
            lines.append(f"  {name} ({i + 1 - begin}): {_words(treatment, layers[i] if layers else None)}")
            begin = i + 1
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        found = self._asdict()
        found["treatments"] = [[t.choice, list(t.operators)] for t in self.treatments]
        return {"version": 1, **found, "labels": list(self.labels)}


def _words(treatment: Treatment, layer: MeasuredLayer | None) -> str:
    if treatment.choice == KEEP:
        return "kept"
    where = "recomputed" if treatment.choice == RECOMPUTE else f"recomputed, inputs on {treatment.choice}"
    if not treatment.operators:
        return where
    if layer is None:
        return f"{where} but for {len(treatment.operators)} operators"
    names = [layer.operators[i].name for i in treatment.operators]
    counts = {name: names.count(name) for name in names}
    return f"{where} but for " + ", ".join(f"{n} {name}" if n > 1 else name for name, n in counts.items())


def read_budget(section: ActivationCheckpointing) -> int | str | None:
    """Bytes, "auto", or None. Raises ConfigError for anything else."""
    budget = section.budget
    if budget is None or budget == "auto":
        return budget
    n_bytes = parse_bytes(budget, _KEY) if isinstance(budget, str) else budget
    if not 0 < n_bytes < 1 << 62:
        raise ConfigError(
            f"{budget!r} is not a number of bytes > 0", where=_KEY, fix='write "6GiB", 6000000000 or "auto"'
        )
    return n_bytes


def read_plan(path: str) -> BudgetPlan | None:
    """The plan that a file has; None where there is no such file. Raises ConfigError for what is no plan."""
    where = f"activation_checkpointing.budget_plan: {path}"
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        version = found.pop("version")
        treatments = tuple(
            Treatment(choice, tuple(map(int, operators))) for choice, operators in found.pop("treatments")
        )
        plan = BudgetPlan(**{**found, "labels": tuple(found["labels"])}, treatments=treatments)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"is no plan: {error}", where=where, fix="remove the file: it is then written anew"
        ) from error
    if (
        version != 1
        or len(plan.labels) != len(treatments)
        or any(t.choice not in (KEEP, RECOMPUTE, _HOST, _FILE) for t in treatments)
    ):
        raise ConfigError("is not a plan of this version", where=where, fix="remove the file: it is then written anew")
    return plan


def _write_plan(path: str, plan: BudgetPlan) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    part = f"{path}.{os.getpid()}"
    try:
        os.makedirs(folder, exist_ok=True)
        with open(part, "w", encoding="utf-8") as file:
            json.dump(plan.as_json(), file, indent=1)
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error}",
            where=f"activation_checkpointing.budget_plan: {path}",
            fix="name a file in a folder that can be written to",
        ) from error


def _moved_ns(layer: MeasuredLayer, tier: Tier) -> int:
    """What it takes to have a layer's inputs wait there. A way is hidden as far as another such layer computes
    meanwhile; a hundredth is counted in any case, so that nothing moves for nothing."""
    way = 1e9 * layer.movable_bytes / tier.bytes_per_s
    return int(1e9 * layer.movable_bytes / tier.thread_bytes_per_s + 2 * max(way - layer.ns, 0) + way / 50)


def _choices(layer: MeasuredLayer, tiers: Mapping[str, Tier], *, may_mix: bool) -> tuple[Any, list[int], list[str]]:
    """(what the core takes of a layer, its operators by group, where its inputs are by choice of the first group)."""
    kept = [i for i, op in enumerate(layer.operators) if may_mix and op.may_keep and op.n_bytes]
    saved_there = sum(layer.operators[i].n_bytes for i in kept if layer.operators[i].is_saved)
    transient = max(layer.saved_bytes - saved_there, 0)
    ns = max(layer.ns - sum(layer.operators[i].ns for i in kept), 0)
    groups = [[(layer.input_bytes, transient, ns)]]
    moved = layer.movable_bytes
    for tier in tiers.values():
        groups[0].append((layer.input_bytes - moved, moved + transient, ns + _moved_ns(layer, tier)))
    for i in kept:
        op = layer.operators[i]
        groups.append([(0, op.n_bytes if op.is_saved else 0, op.ns), (op.n_bytes, 0, 0)])
    return (0, [(layer.saved_bytes, 0, 0)], groups), kept, [RECOMPUTE, *tiers]


def _reserve(layers: Sequence[MeasuredLayer], tiers: Mapping[str, Tier]) -> int:
    """Bytes of what is on its way to a tier or back, beside the inputs of the layer that runs."""
    return N_ON_THE_WAY * max((layer.movable_bytes for layer in layers), default=0) if tiers else 0


def smallest_budget(layers: Sequence[MeasuredLayer], tiers: Mapping[str, Tier] | None = None) -> int:
    """Bytes that a budget has to have at least."""
    found = [
        _C.recompute_smallest([_choices(layer, each, may_mix=True)[0] for layer in layers]) + _reserve(layers, each)
        for each in _attempts(tiers)
    ]
    return min(found)


def _attempts(tiers: Mapping[str, Tier] | None) -> list[Mapping[str, Tier]]:
    """Without tiers there is nothing on its way."""
    return [{}, tiers] if tiers else [{}]


def find_plan(
    layers: Sequence[MeasuredLayer],
    budget_bytes: int,
    *,
    tiers: Mapping[str, Tier] | None = None,
    may_mix: bool = True,
) -> BudgetPlan:
    """The plan that adds the least time. Raises ConfigError, with the smallest possible budget, where none fits.

    tiers: places other than the memory that computes, where inputs may wait.
    may_mix: operators of a recomputed layer may be kept.
    """
    plans, smallest = [], 1 << 62
    for each in _attempts(tiers):
        found = [_choices(layer, each, may_mix=may_mix) for layer in layers]
        reserve = _reserve(layers, each)
        needed = _C.recompute_smallest([one[0] for one in found]) + reserve
        smallest = min(smallest, needed)
        if needed <= budget_bytes:
            plans.append(_solve(layers, found, budget_bytes, reserve))
    if not plans:
        raise ConfigError(
            f"{budget_bytes} bytes ({as_binary(budget_bytes)}) are less than the {smallest} ({as_binary(smallest)})"
            " that the layers need with everything recomputed",
            where=_KEY,
            fix=f"give {smallest} or more, a smaller micro-batch, or partition_activations or cpu_checkpointing",
        )
    return min(plans, key=lambda plan: (plan.added_ns, plan.peak_bytes))._replace(smallest_bytes=smallest)


def _solve(
    layers: Sequence[MeasuredLayer], found: Sequence[tuple[Any, list[int], list[str]]], budget_bytes: int, reserve: int
) -> BudgetPlan:
    table = [one[0] for one in found]
    treated, peak_bytes, added_ns, bound_ns, _ = _C.recompute_plan(table, budget_bytes - reserve)
    treatments = []
    for (whole, groups), (_, kept, places) in zip(treated, found):
        if whole >= 0:
            treatments.append(Treatment(KEEP))
        else:
            treatments.append(Treatment(places[groups[0]], tuple(i for i, pick in zip(kept, groups[1:]) if pick)))
    return BudgetPlan(
        budget_bytes,
        0,
        peak_bytes + reserve,
        added_ns,
        bound_ns,
        _C.recompute_peak(table, [(-1, [0] * len(groups)) for _, _, groups in table])[1],
        tuple(layer.label for layer in layers),
        tuple(treatments),
        layers[0].n_elems if layers else 0,
    )


def _agree(of_ranks: Sequence[Sequence[MeasuredLayer]]) -> list[MeasuredLayer]:
    """The largest numbers of all ranks. Raises RankMismatchError where they ran other layers."""
    forms = [[(layer.label, [op.name for op in layer.operators]) for layer in layers] for layers in of_ranks]
    for rank, form in enumerate(forms):
        if form != forms[0]:
            raise RankMismatchError(
                f"ranks 0 and {rank} ran {len(forms[0])} and {len(form)} layers, or other operators in them",
                where=_KEY,
                fix="let all ranks run the same layers, or name those to recompute without a budget",
            )
    return [_largest(same) for same in zip(*of_ranks)]


def _largest(layers: Sequence[MeasuredLayer]) -> MeasuredLayer:
    operators = tuple(
        MeasuredOperator(
            ops[0].name,
            max(op.n_bytes for op in ops),
            max(op.ns for op in ops),
            any(op.is_saved for op in ops),
            all(op.may_keep for op in ops),
        )
        for ops in zip(*(layer.operators for layer in layers))
    )
    numbers = (
        max(getattr(layer, name) for layer in layers) for name in ("n_elems", "input_bytes", "saved_bytes", "ns")
    )
    return MeasuredLayer(layers[0].label, *numbers, operators, min(layer.movable_bytes for layer in layers))


def _steadied(layers: Sequence[MeasuredLayer]) -> list[MeasuredLayer]:
    """Layers that do the same take the same time: the median of them. A first call takes longer than others."""

    def form(layer: MeasuredLayer) -> tuple:
        return layer.saved_bytes, tuple(op._replace(ns=0) for op in layer.operators)

    alike: dict[tuple, list[MeasuredLayer]] = {}
    for layer in layers:
        alike.setdefault(form(layer), []).append(layer)
    return [_with_median(layer, alike[form(layer)]) for layer in layers]


def _with_median(layer: MeasuredLayer, alike: Sequence[MeasuredLayer]) -> MeasuredLayer:
    def median(values: Sequence[int]) -> int:
        return sorted(values)[len(values) // 2]

    operators = tuple(
        op._replace(ns=median([other.operators[i].ns for other in alike])) for i, op in enumerate(layer.operators)
    )
    return layer._replace(ns=median([other.ns for other in alike]), operators=operators)


def _free_bytes() -> int:
    """Of this rank's device. The CPU's memory is that of all ranks of this host, each of which takes a part."""
    accelerator = get_accelerator()
    free = accelerator.available_memory()
    return free // read_env().local_world_size if accelerator.device_name() == "cpu" else free


class Budget:
    """The budget of one engine: what it has measured, and the plan that its forwards follow.

    comm: ranks that must do the same. Reentrant layers are kept or recomputed as a whole.
    """

    def __init__(self, section: ActivationCheckpointing, comm: Collectives | None) -> None:
        self._comm = comm
        self._wanted = read_budget(section)
        self._path = section.budget_plan
        # Values are compared module by module, all of which have to run.
        self._may_mix = not (section.use_reentrant or section.check)
        device = section.offload.device
        self._tier = device if device != "none" else _HOST if section.cpu_checkpointing else None
        self._probe: Callable[[int], Tier | None] = lambda n_bytes: None
        self._tiers: dict[str, Tier] = {}
        self.plan: BudgetPlan | None = None if self._path is None else read_plan(self._path)
        self._is_pinned = self.plan is not None
        if self._is_pinned:
            self._refuse_unknown_tiers()
        self._has_compared = False
        self._layers: list[MeasuredLayer] = []
        self._layers_to_plan: list[MeasuredLayer] | None = None
        self._counted: set[int] = set()
        self._is_measuring = self._is_forward = self._is_within = False
        self._n = 0
        self._measured_elems = 0

    def _refuse_unknown_tiers(self) -> None:
        unknown = {t.choice for t in self.plan.treatments} - {KEEP, RECOMPUTE, self._tier}
        if unknown:
            raise ConfigError(
                f"inputs wait on {', '.join(map(repr, sorted(unknown)))} there, which the section does not offer",
                where=f"activation_checkpointing.budget_plan: {self._path}",
                fix='set "offload" (or "cpu_checkpointing") as it was, or remove the file: it is then written anew',
            )

    def lend(self, probe: Callable[[int], Tier | None]) -> None:
        """probe: moves so many bytes to where inputs may wait, and back, and says how fast; None: there is no place."""
        self._probe = probe

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward of the model, whose layers are counted."""
        self._is_forward, self._is_measuring, self._n = True, False, 0
        self._layers, self._counted = [], set()
        try:
            yield
            if self._is_measuring:
                self._remake()
        finally:
            self._is_forward = self._is_within = False
            self._counted = set()

    def treatment(self, label: str, tensors: Sequence[torch.Tensor]) -> Treatment | None:
        """How the next layer is treated; None for one within another, or outside of a forward."""
        # A forward may have a pass of its own (a gradient penalty), which runs layers again with those within them.
        if not self._is_forward or self._is_within or torch._C._current_graph_task_id() != NO_BACKWARD:
            return None
        i, self._n = self._n, self._n + 1
        if i == 0:
            self._begin(sum(t.numel() for t in tensors))
        if self._is_measuring:
            return Treatment(MEASURE)
        # More layers than were measured, or others, are recomputed.
        if i >= len(self.plan.treatments) or self.plan.labels[i] != label:
            if self._is_pinned:
                self._refuse(i, label)
            return Treatment(RECOMPUTE)
        return self.plan.treatments[i]

    def _refuse(self, i: int, label: str) -> None:
        known = self.plan.labels[i] if i < len(self.plan.labels) else "no more"
        raise ConfigError(
            f"layer {i} of the forward is {label}, and {known} in the plan",
            where=f"activation_checkpointing.budget_plan: {self._path}",
            fix="remove the file: it is then written anew",
        )

    @contextmanager
    def within(self) -> Iterator[None]:
        """The layer runs: those within it are not counted."""
        before, self._is_within = self._is_within, True
        try:
            yield
        finally:
            self._is_within = before

    @property
    def is_within(self) -> bool:
        """A layer of the plan runs."""
        return self._is_within

    @property
    def counted(self) -> set[int]:
        """Storages that this forward's measurement has counted."""
        return self._counted

    def note(self, layer: MeasuredLayer) -> None:
        self._layers.append(layer)

    def _begin(self, n_elems: int) -> None:
        if self._path is not None and not self._has_compared:
            self._compare_plans()
        if self._is_pinned:
            return
        if self._wanted == "auto" and self._layers_to_plan is not None:
            self._make(self._layers_to_plan)
        n_elems = max(self._of_all(n_elems))
        before = self._measured_elems
        self._is_measuring = self.plan is None or abs(n_elems - before) > _CHANGE * before
        if self._is_measuring:
            self._measured_elems = n_elems

    def _of_all(self, number: int) -> list[int]:
        return [number] if self._comm is None else self._comm.gather_numbers(number, label="activation budget")

    def _compare_plans(self) -> None:
        self._has_compared = True
        sums = self._of_all(0 if self.plan is None else zlib.crc32(json.dumps(self.plan.as_json()).encode()))
        if len(set(sums)) > 1:
            raise RankMismatchError(
                f"ranks have read other plans: checksums {sums} (0: there is no such file)",
                where=f"activation_checkpointing.budget_plan: {self._path}",
                fix="let it be the same file on all ranks",
            )

    def _remake(self) -> None:
        layers = self._layers if self._comm is None else _agree(self._comm.gather_objects(self._layers))
        layers = _steadied(layers)
        self._tiers = self._find_tiers(max((layer.movable_bytes for layer in layers), default=0))
        if self._wanted == "auto" and self.plan is None:
            # What is free is known when the first step is over, and states and gradients have their memory.
            self._layers_to_plan = layers
            self.plan = BudgetPlan(0, 0, 0, 0, 0, 0, (), (), 0)
            return
        self._make(layers)

    def _find_tiers(self, n_bytes: int) -> dict[str, Tier]:
        """Where inputs may wait, as fast as the slowest rank finds it."""
        if self._tier is None or n_bytes == 0:
            return {}
        found, problem = None, None
        try:
            found = self._probe(n_bytes)
        except OffloadError as error:
            problem = error
        if self._comm is not None:
            raise_together(problem, OffloadError, _KEY, self._comm)
        if problem is not None:
            raise problem
        of_ranks = [found] if self._comm is None else self._comm.gather_objects(found)
        if any(tier is None for tier in of_ranks):
            return {}
        return {self._tier: Tier(*(min(speeds) for speeds in zip(*of_ranks)))}

    def _make(self, layers: list[MeasuredLayer]) -> None:
        self._layers_to_plan = None
        budget = self._wanted
        if budget == "auto":
            free = min(self._of_all(_free_bytes()))
            budget = max(int(_AUTO_SHARE * free), smallest_budget(layers, self._tiers))
        self.plan = find_plan(layers, budget, tiers=self._tiers, may_mix=self._may_mix)
        is_first = self._comm is None or self._comm.rank == 0
        if is_first:
            logger.info(self.plan.table(layers))
        if self._path is not None and is_first:
            _write_plan(self._path, self.plan)
