"""A memory budget for activations, and the choice of layers and operators to recompute so that activations fit into it.

The first forward with inputs of given shapes recomputes everything, and is measured. A C core (``dsc/recompute.h``)
then finds the plan that adds the least time. A layer is identified by its label and the number of its call in a
forward.

The budget counts the bytes that layers keep between forward and backward, and the additional bytes of one layer while
it runs again. It does not count gradients and other memory of the model.
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
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.env import read_env
from deepspeed_c.errors import ConfigError, OffloadError, RankMismatchError
from deepspeed_c.logging import logger
from deepspeed_c.offload.place import raise_together
from deepspeed_c.quantity import as_binary, parse_bytes
from deepspeed_c.recompute.frames import NO_BACKWARD
from deepspeed_c.recompute.operators import MeasuredLayer, MeasuredOperator

__all__ = [
    "KEEP",
    "MEASURE",
    "N_ON_THE_WAY",
    "RECOMPUTE",
    "Budget",
    "BudgetPlan",
    "BudgetRole",
    "Tier",
    "Treatment",
    "find_plan",
    "read_budget",
]

KEEP, RECOMPUTE, MEASURE = "keep", "recompute", "measure"
# Share of the free memory for the budget: allocators need some spare memory.
_AUTO_SHARE = 0.9
# Inputs count as different when a dimension differs by more than this share.
_CHANGE = 0.1
# Bytes that are moved before the first plan, to measure the speed.
_PROBED_BYTES = 4 << 20
_KEY = "activation_checkpointing.budget"


# How many layers' inputs are on their way to a tier or back while a layer runs, besides the inputs of that layer: one
# each way.
N_ON_THE_WAY = 2
_HOST, _FILE = "cpu", "nvme"


class Tier(NamedTuple):
    """A place for inputs of layers outside the computing device's memory."""

    bytes_per_s: float  # to the tier, and the same on the way back, beside the computation
    thread_bytes_per_s: float = math.inf  # of the share of the transfer that occupies the computing thread


class Treatment(NamedTuple):
    """How a plan treats one layer.

    choice: KEEP or RECOMPUTE, or the name of a tier where its inputs wait.
    operators: numbers of the layer's expensive operators whose outputs are kept, if the layer is run again.
    """

    choice: str
    operators: tuple[int, ...] = ()


class BudgetPlan(NamedTuple):
    """How each layer of a forward is treated. Numbers refer to the layers given to ``find_plan``."""

    budget_bytes: int
    smallest_bytes: int
    peak_bytes: int
    added_ns: int
    bound_ns: int  # every plan adds at least this time
    all_ns: int  # time that recomputing everything adds
    labels: tuple[str, ...]
    treatments: tuple[Treatment, ...]
    n_elems: int  # in the first layer's inputs

    def table(self, layers: Sequence[MeasuredLayer] = ()) -> str:
        """One line for each run of consecutive layers with the same treatment."""
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
    """The budget in bytes, "auto", or None. Raises ConfigError for anything else."""
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
    """The plan in the file ``path``; None if there is no such file. Raises ConfigError for any other content."""
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
    """The time that moving a layer's inputs to ``tier`` and back adds. A transfer is hidden while another such layer
    computes. A hundredth of it is counted in any case, so that nothing moves without a gain.
    """
    way = 1e9 * layer.movable_bytes / tier.bytes_per_s
    return int(1e9 * layer.movable_bytes / tier.thread_bytes_per_s + 2 * max(way - layer.ns, 0) + way / 50)


def _choices(layer: MeasuredLayer, tiers: Mapping[str, Tier], *, may_mix: bool) -> tuple[Any, list[int], list[str]]:
    """(the core's description of a layer, the operator of each further group of choices, the tier of the inputs for
    each choice of the first group).
    """
    may_mix &= not layer.sends
    kept = [i for i, op in enumerate(layer.operators) if may_mix and op.may_keep and op.n_bytes and op.ns]
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
    whole = [] if layer.sends else [(layer.saved_bytes, 0, 0)]
    return (0, whole, groups), kept, [RECOMPUTE, *tiers]


def _reserve(layers: Sequence[MeasuredLayer], tiers: Mapping[str, Tier]) -> int:
    """Bytes of inputs on their way to a tier or back, beside the inputs of the running layer."""
    return N_ON_THE_WAY * max((layer.movable_bytes for layer in layers), default=0) if tiers else 0


def smallest_budget(layers: Sequence[MeasuredLayer], tiers: Mapping[str, Tier] | None = None) -> int:
    """The smallest number of bytes for which there is a plan."""
    found = [
        _C.recompute_smallest([_choices(layer, each, may_mix=True)[0] for layer in layers]) + _reserve(layers, each)
        for each in _attempts(tiers)
    ]
    return min(found)


def _attempts(tiers: Mapping[str, Tier] | None) -> list[Mapping[str, Tier]]:
    """The sets of tiers to try. Without tiers no memory is reserved for inputs on their way, so a smaller budget may
    do.
    """
    return [{}, tiers] if tiers else [{}]


def find_plan(
    layers: Sequence[MeasuredLayer],
    budget_bytes: int,
    *,
    tiers: Mapping[str, Tier] | None = None,
    may_mix: bool = True,
) -> BudgetPlan:
    """The plan that adds the least time. Raises ConfigError, with the smallest possible budget, where no plan fits.

    tiers: places outside the memory of the computing device where inputs may wait. may_mix: outputs of some operators
    of a recomputed layer may be kept.
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


Key = tuple[str, int]
"""A call of a layer in a forward: the layer's label, and the number of the call among the calls with that label."""
Shapes = tuple[tuple[int, ...], ...]


def keys_of(labels: Sequence[str]) -> list[Key]:
    """The key of each call, in order."""
    counts: dict[str, int] = {}
    keys = []
    for label in labels:
        keys.append((label, counts.get(label, 0)))
        counts[label] = keys[-1][1] + 1
    return keys


def unite(forwards: Sequence[Sequence[MeasuredLayer]]) -> list[MeasuredLayer]:
    """The layers that any of several forwards ran. Each layer has its largest numbers in any of them.

    The order agrees with the order of every forward, so the bytes up to a layer are at least the bytes in any forward.
    If forwards ran the layers in different orders, all layers are run again.
    """
    order: list[Key] = []
    found: dict[Key, list[MeasuredLayer]] = {}
    has_order = True
    for layers in forwards:
        keys = keys_of([layer.label for layer in layers])
        place = {key: i for i, key in enumerate(order)}
        known = [place[key] for key in keys if key in place]
        has_order &= known == sorted(known)
        merged: list[Key] = []
        begin = 0
        for key in keys:
            end = place.get(key, -1) + 1
            merged += order[begin:end] if end else [key]
            begin = max(begin, end)
        order = list(dict.fromkeys(merged + order[begin:]))
        for key, layer in zip(keys, layers):
            found.setdefault(key, []).append(layer)
    largest = [_largest(found[key]) for key in order]
    return largest if has_order else [layer._replace(sends=True) for layer in largest]


def _largest(layers: Sequence[MeasuredLayer]) -> MeasuredLayer:
    names = [op.name for op in layers[0].operators]
    # Tokens may have gone to other experts: the same number is then another operator's in another forward.
    are_same = all([op.name for op in layer.operators] == names for layer in layers)
    of_layers = [layer.operators for layer in layers] if are_same else []
    operators = tuple(
        MeasuredOperator(
            ops[0].name,
            max(op.n_bytes for op in ops),
            max(op.ns for op in ops),
            any(op.is_saved for op in ops),
            all(op.may_keep for op in ops),
        )
        for ops in zip(*of_layers)
    )
    numbers = (max(getattr(layer, name) for layer in layers) for name in ("n_elems", "input_bytes", "saved_bytes"))
    ns = max(_rest_ns(layer) for layer in layers) if are_same else max(layer.ns for layer in layers)
    movable_bytes, sends = min(layer.movable_bytes for layer in layers), any(layer.sends for layer in layers)
    return MeasuredLayer(
        layers[0].label, *numbers, ns + sum(op.ns for op in operators), operators, movable_bytes, sends
    )


def _rest_ns(layer: MeasuredLayer) -> int:
    """Nanoseconds of the layer outside its expensive operators.

    For each operator its largest time, or its median, is taken separately, so the operators' sum may exceed the layer's
    measured time. Subtracting the sum from that time would leave nothing for the other operators. Then running the
    layer again with all expensive outputs kept would seem to cost as little as keeping the layer.
    """
    return layer.ns - sum(op.ns for op in layer.operators)


def _steadied(layers: Sequence[MeasuredLayer]) -> list[MeasuredLayer]:
    """Gives layers that do the same work the same time: the median of their times. A first call takes longer than later
    calls.
    """

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
    ns = median([_rest_ns(other) for other in alike]) + sum(op.ns for op in operators)
    return layer._replace(ns=ns, operators=operators)


def _free_bytes() -> int:
    """Free bytes of this rank's device. The ranks of a host share the CPU's memory, so each rank counts its part of it."""
    accelerator = get_accelerator()
    free = accelerator.available_memory()
    return free // read_env().local_world_size if accelerator.device_name() == "cpu" else free


def _is_covered(shapes: Shapes, by: Shapes) -> bool:
    """Whether no dimension in ``shapes`` is larger than in ``by`` by more than a tenth."""
    return len(shapes) == len(by) and all(
        len(a) == len(b) and all(x <= (1 + _CHANGE) * y for x, y in zip(a, b)) for a, b in zip(shapes, by)
    )


def shapes_of(tensors: Sequence[torch.Tensor]) -> Shapes:
    return tuple([t.shape for t in tensors])


class _Measured:
    """Forwards of one stage with similar inputs: the measured layers, and the plan for them."""

    def __init__(self, name: str, *, is_pinned: bool = False) -> None:
        self.name, self.is_pinned = name, is_pinned  # pinned: a file gives the plan for all inputs
        self.inputs: list[Shapes] = []  # inputs of the model
        self.given: dict[Key, list[Shapes]] = {}  # inputs of each layer
        self.layers: list[MeasuredLayer] = []
        self.is_stale = False  # a forward ran other layers, or layers with larger inputs
        self.plan: BudgetPlan | None = None
        self.treatments: dict[Key, Treatment] = {}

    def use_plan(self, plan: BudgetPlan | None) -> None:
        self.plan = plan
        self.treatments = {} if plan is None else dict(zip(keys_of(plan.labels), plan.treatments))

    def has_seen(self, key: Key, shapes: Shapes) -> bool:
        given = self.given.get(key, ())
        # This runs in each call of a layer, mostly for the very shapes that were measured.
        return shapes in given or any(_is_covered(shapes, seen) for seen in given)


class _Within:
    """The context of a planned layer's call. Such contexts are never nested, so one object serves all calls."""

    __slots__ = ("is_entered",)

    def __init__(self) -> None:
        self.is_entered = False

    def __enter__(self) -> None:
        self.is_entered = True

    def __exit__(self, *error: object) -> None:
        self.is_entered = False


class BudgetRole(NamedTuple):
    """This rank's role among the ranks that plan."""

    peers: Collectives | None = None
    """The ranks that must follow the same plan; None: no others."""
    stages: Sequence[str] = ("",)
    """Names of this rank's stages. Each stage has its own file."""
    is_first: bool = True
    """Whether this rank is the first of the ranks with the same layers."""


class Budget:
    """The budget of one engine: its measurements, and the plans that its forwards follow.

    Each rank plans by itself and waits for no other rank in a forward. Only if recomputed layers communicate (they
    gather weights, or sum over tensor-parallel ranks), the ranks concerned decide together at the beginning of a
    forward, which all of them reach. A layer in which the caller's code calls collectives is always recomputed, on all
    ranks.

    comm: all ranks.
    """

    def __init__(
        self,
        section: ActivationCheckpointing,
        comm: Collectives | None = None,
        role: BudgetRole = BudgetRole(),  # noqa: B008  (immutable)
    ) -> None:
        peers, stages, self._is_first = role
        self._comm = comm
        self._peers = None if peers is None or peers.world_size == 1 else peers
        self._wanted = read_budget(section)
        self._path = section.budget_plan
        # With "check" values are compared module by module, so all modules have to run.
        self._may_mix = not (section.use_reentrant or section.check)
        device = section.offload.device
        self._tier = device if device != "none" else _HOST if section.cpu_checkpointing else None
        self._tiers: dict[str, Tier] = {}
        self._free_bytes: int | None = None  # for "auto": free bytes after the first step
        self._n_in_flight, self._is_told = 1, False
        self._known: list[_Measured] = []
        self._pinned = {} if self._path is None else self._read_pinned(stages)
        self._followed: _Measured | None = next(iter(self._pinned.values()), None)
        self.plan: BudgetPlan | None = None if self._followed is None else self._followed.plan
        self._layers: list[MeasuredLayer] = []
        self._given: dict[Key, Shapes] = {}
        self._counted: set[int] = set()
        self._is_measuring = self._is_forward = False
        self.within = _Within()
        """The context around a planned layer. Layers inside that layer are not counted."""
        self._n_calls: dict[str, int] = {}

    def _path_of(self, name: str) -> str:
        return f"{self._path}.stage{name}" if name else str(self._path)

    def _read_pinned(self, stages: Sequence[str]) -> dict[str, _Measured]:
        """The plans in the files of this rank's stages, by stage. Collective: raises on all ranks where one rank's file
        holds no plan, or another plan.
        """
        plans: dict[str, BudgetPlan | None] = {}
        problem = None
        try:
            for name in stages:
                plans[name] = plan = read_plan(self._path_of(name))
                if plan is not None:
                    self._refuse_unknown_tiers(plan)
        except ConfigError as error:
            problem = error
        where = f"activation_checkpointing.budget_plan: {self._path}"
        if self._comm is not None:
            raise_together(problem, ConfigError, where, self._comm)
            texts = {name: "" if plan is None else json.dumps(plan.as_json()) for name, plan in plans.items()}
            of_ranks = self._comm.gather_objects({name: zlib.crc32(text.encode()) for name, text in texts.items()})
            for name in sorted({name for found in of_ranks for name in found}):
                sums = [found[name] for found in of_ranks if name in found]
                if len(set(sums)) > 1:
                    raise RankMismatchError(
                        f"ranks have read other plans: checksums {sums} (0: there is no such file)",
                        where=where,
                        fix="let it be the same file on all ranks",
                    )
        elif problem is not None:
            raise problem
        pinned = {}
        for name, plan in plans.items():
            if plan is not None:
                pinned[name] = _Measured(name, is_pinned=True)
                pinned[name].use_plan(plan)
        return pinned

    def _refuse_unknown_tiers(self, plan: BudgetPlan) -> None:
        unknown = {t.choice for t in plan.treatments} - {KEEP, RECOMPUTE, self._tier}
        if unknown:
            raise ConfigError(
                f"inputs wait on {', '.join(map(repr, sorted(unknown)))} there, which the section does not offer",
                where=f"activation_checkpointing.budget_plan: {self._path}",
                fix='set "offload" (or "cpu_checkpointing") as it was, or remove the file: it is then written anew',
            )

    def set_probe(self, probe: Callable[[int], Tier | None]) -> None:
        """probe: moves the given number of bytes to the place where inputs may wait, and back, and returns the speeds;
        None if there is no such place.

        Collective: the speeds of the slowest rank count. Raises OffloadError on all ranks where it fails on one.
        """
        if self._tier is None:
            return
        found, problem = None, None
        try:
            found = probe(_PROBED_BYTES)
        except OffloadError as error:
            problem = error
        if self._comm is not None:
            raise_together(problem, OffloadError, _KEY, self._comm)
        if problem is not None:
            raise problem
        of_ranks = [found] if self._comm is None else self._comm.gather_objects(found)
        if all(tier is not None for tier in of_ranks):
            self._tiers = {self._tier: Tier(*(min(speeds) for speeds in zip(*of_ranks)))}

    def expect(self, n_in_flight: int) -> None:
        """Announces the largest number of forwards that will wait for their backwards at once. Each gets an equal part
        of the budget. Must be called while no forward waits.
        """
        if n_in_flight != self._n_in_flight:
            for known in self._known:
                known.use_plan(None)
        self._n_in_flight, self._is_told = n_in_flight, True
        self._look_at_memory()

    @contextmanager
    def forward(self, inputs: Sequence[torch.Tensor] = (), name: str = "") -> Iterator[None]:
        """A forward of the model whose layers are counted. All peers begin it together. name: the stage's name."""
        self._is_forward, self._n_calls = True, {}
        self._layers, self._given, self._counted = [], {}, set()
        try:
            self._begin(shapes_of(inputs), name)
            yield
            if self._is_measuring:
                self._learn()
        finally:
            self._is_forward = self.within.is_entered = self._is_measuring = False
            self._counted = set()

    def treatment(self, label: str, tensors: Sequence[torch.Tensor]) -> Treatment | None:
        """The treatment of the next layer. None for a layer within a planned layer, or outside a forward."""
        # A forward may contain a backward pass (for a gradient penalty), which runs layers and the layers within them
        # again.
        if not self._is_forward or self.within.is_entered or torch._C._current_graph_task_id() != NO_BACKWARD:
            return None
        n = self._n_calls.get(label, 0)
        self._n_calls[label] = n + 1
        key, known = (label, n), self._followed
        if self._is_measuring:
            self._given[key] = shapes_of(tensors)
            return Treatment(MEASURE)
        if known.plan is None:
            return Treatment(RECOMPUTE)
        treatment = known.treatments.get(key)
        if known.is_pinned:
            if treatment is None:
                self._refuse(sum(self._n_calls.values()) - 1, label)
            return treatment
        if treatment is None or not known.has_seen(key, shapes_of(tensors)):
            known.is_stale = True
            # Peers have to follow the same plan, and learn of the change when the next forward begins.
            if treatment is None or self._peers is None:
                return Treatment(RECOMPUTE)
        return treatment

    def _refuse(self, i: int, label: str) -> None:
        known = self.plan.labels[i] if i < len(self.plan.labels) else "no more"
        raise ConfigError(
            f"layer {i} of the forward is {label}, and {known} in the plan",
            where=f"activation_checkpointing.budget_plan: {self._path}",
            fix="remove the file: it is then written anew",
        )

    @property
    def is_within(self) -> bool:
        """Whether a layer of the plan runs."""
        return self.within.is_entered

    @property
    def counted(self) -> set[int]:
        """Storages that this forward's measurement has counted."""
        return self._counted

    def note(self, layer: MeasuredLayer) -> None:
        self._layers.append(layer)

    def _begin(self, inputs: Shapes, name: str) -> None:
        if name in self._pinned:
            self._followed = self._pinned[name]
            self.plan = self._followed.plan
            return
        if not self._is_told:
            self._look_at_memory()
        known = self._find(inputs, name)
        is_new = known is None or known.is_stale or not any(_is_covered(inputs, seen) for seen in known.inputs)
        if self._peers is not None:
            is_new = bool(max(self._peers.gather_numbers(int(is_new), label="activation budget")))
        self._is_measuring = is_new
        if known is None:
            known = _Measured(name)
            self._known.append(known)
        if is_new and inputs not in known.inputs:
            known.inputs.append(inputs)
        self._followed = known
        if not is_new and known.plan is None:
            self._make(known)
        self.plan = known.plan

    def _find(self, inputs: Shapes, name: str) -> _Measured | None:
        """The entry for ``inputs`` of stage ``name``. Peers have one plan for all inputs, since inputs may change on
        some ranks only.
        """
        of_stage = [known for known in self._known if known.name == name]
        if self._peers is not None:
            return of_stage[0] if of_stage else None
        alike = (k for k in of_stage if any(_is_covered(inputs, i) and _is_covered(i, inputs) for i in k.inputs))
        return next(alike, None)

    def _look_at_memory(self) -> None:
        """Reads the free memory after the first step: states and gradients are allocated by then."""
        if self._wanted != "auto" or self._free_bytes is not None or not any(known.layers for known in self._known):
            return
        free = _free_bytes()
        self._free_bytes = free if self._peers is None else min(self._peers.gather_numbers(free, label=_KEY))

    def _learn(self) -> None:
        """Learns from the forward that was measured."""
        known, peers = self._followed, self._peers
        of_ranks = [self._layers] if peers is None else peers.gather_objects(self._layers)
        if self._comm is None or self._comm.world_size in (1, len(of_ranks)):
            # No other rank follows another plan.
            of_ranks = [[layer._replace(sends=False) for layer in layers] for layers in of_ranks]
        layers = unite([known.layers, *(_steadied(each) for each in of_ranks)])
        known.layers, known.is_stale = layers, False
        for key, shapes in self._given.items():
            if not known.has_seen(key, shapes):
                known.given.setdefault(key, []).append(shapes)
        known.use_plan(None)
        if self._wanted == "auto" and self._free_bytes is None:
            self.plan = BudgetPlan(0, 0, 0, 0, 0, 0, (), (), 0)
            return
        self._make(known)

    def _make(self, known: _Measured) -> None:
        if not known.layers:
            known.use_plan(BudgetPlan(0, 0, 0, 0, 0, 0, (), (), 0))
            return
        budget = self._wanted
        if budget == "auto":
            if self._free_bytes is None:
                return
            budget = int(_AUTO_SHARE * self._free_bytes)
        budget //= self._n_in_flight
        tiers = self._tiers if any(layer.movable_bytes for layer in known.layers) else {}
        smallest = smallest_budget(known.layers, tiers)
        if smallest > budget:
            logger.warning(
                "rank %d: activation_checkpointing.budget: %d bytes (%s) for a forward are less than the %d (%s) that its"
                " layers need with everything recomputed, for inputs of %s: the smallest plan is followed. Give more, a"
                " smaller micro-batch, or partition_activations or cpu_checkpointing",
                0 if self._comm is None else self._comm.rank,
                budget,
                as_binary(budget),
                smallest,
                as_binary(smallest),
                tuple(map(tuple, known.inputs[-1])),
            )
        plan = find_plan(known.layers, max(budget, smallest), tiers=tiers, may_mix=self._may_mix)
        plan = plan._replace(budget_bytes=budget)
        known.use_plan(plan)
        self.plan = plan
        if self._is_first:
            logger.info(plan.table(known.layers))
            if self._path is not None:
                _write_plan(self._path_of(known.name), plan)
