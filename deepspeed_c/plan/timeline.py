"""Computes the bytes of activations over one step, for each way to keep them, from the saved tensors of a traced
forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import ConfigError
from deepspeed_c.plan.activations import Segment, Traced
from deepspeed_c.quantity import parse_bytes
from deepspeed_c.recompute.budget import KEEP, RECOMPUTE, Tier, Treatment, find_plan, smallest_budget
from deepspeed_c.recompute.recomputer import bytes_of

__all__ = ["HeldBytes", "Option", "options_of"]

# A budget that no activations exceed.
_ALL = 1 << 60
# Assumed bandwidth of one rank to the host, and to the disks of its node. A run measures the real bandwidth.
_TIERS = {"cpu": Tier(25e9), "nvme": Tier(5e9)}


class HeldBytes(NamedTuple):
    """The bytes at the end of a segment of the forward, or during the backward of a segment."""

    label: str
    is_backward: bool
    nbytes: int  # bytes in the device's memory
    host_nbytes: int = 0  # bytes in host memory, if the device has its own memory
    nvme_nbytes: int = 0


class Option(NamedTuple):
    """One way to keep activations, or the reason why it is not possible."""

    name: str
    moments: tuple[HeldBytes, ...]
    run_again: float  # the fraction of the layers' time that recomputing adds
    wire_bytes: int = 0  # bytes that a rank sends to its tensor-parallel group in a forward and its backward
    refusal: str = ""

    def peak(self, *, is_backward: bool | None = None) -> int:
        """The most bytes in the device's memory during forward (False), backward (True) or both (None)."""
        found = (m.nbytes for m in self.moments if is_backward in (None, m.is_backward))
        return max(found, default=0)

    @property
    def host_peak(self) -> int:
        return max((m.host_nbytes for m in self.moments), default=0)

    @property
    def nvme_peak(self) -> int:
        return max((m.nvme_nbytes for m in self.moments), default=0)


class _HowInputsWait(NamedTuple):
    """How inputs of recomputed layers are kept until the backward."""

    place: str = "device"  # "device", "cpu" or "nvme"
    n_cut: int = 1  # number of tensor-parallel ranks that they are cut over
    max_in_cpu: int = 0


def options_of(
    traced: Traced, section: ActivationCheckpointing, *, n_tensor: int = 1, is_host: bool = False
) -> tuple[list[Option], int]:
    """(an option for each key of the section, the index of the configured option).

    n_tensor: number of tensor-parallel ranks. is_host: the CPU computes, in host memory. If the section names no
    budget, the budget is half way between keeping and recomputing everything.
    """
    step = _Step(traced, is_host=is_host)
    again = [Treatment(RECOMPUTE)] * len(traced.layers)
    asked = _HowInputsWait(
        section.offload.device
        if section.offload.device != "none"
        else "cpu"
        if section.cpu_checkpointing
        else "device",
        n_tensor if section.partition_activations else 1,
        bytes_of(section.offload.max_in_cpu),
    )
    found = {"none": step.option("none", [Treatment(KEEP)] * len(again), _HowInputsWait(), 0.0)}
    if again:
        ways = {
            "recomputed": _HowInputsWait(),
            "partitioned": _HowInputsWait(n_cut=n_tensor),
            "cpu": _HowInputsWait("cpu"),
            "nvme": _HowInputsWait("nvme", max_in_cpu=asked.max_in_cpu),
        }
        for name, way in ways.items():
            found[name] = step.option(name, again, way, 1.0)
            found[name] = found[name]._replace(refusal=_refusal(name, n_tensor, is_host=is_host))
        found["budget"] = _of_budget(step, traced, section, asked)
    if section.layers is None or not again:
        chosen = "none"
    elif section.budget is not None:
        chosen = "budget"
    else:
        chosen = next((name for name, way in ways.items() if way == asked), "as configured")
        if chosen == "as configured":
            found[chosen] = step.option(chosen, again, asked, 1.0)
    return list(found.values()), list(found).index(chosen)


def _refusal(name: str, n_tensor: int, *, is_host: bool) -> str:
    if name == "partitioned" and n_tensor == 1:
        return "as recomputed: there are no tensor-parallel ranks (--tp)"
    return "as recomputed: the inputs are in host memory already" if name == "cpu" and is_host else ""


def _of_budget(step: _Step, traced: Traced, section: ActivationCheckpointing, waiting: _HowInputsWait) -> Option:
    layers = traced.layers
    # Inputs that the plan does not move stay on the device.
    tiers = {waiting.place: _TIERS[waiting.place]} if step.has_place(waiting.place) else {}
    waiting = waiting._replace(place="device", max_in_cpu=0 if step.is_host else waiting.max_in_cpu)
    keep_bytes = find_plan(layers, _ALL).peak_bytes
    if isinstance(section.budget, int):
        budget = section.budget
    elif section.budget not in (None, "auto"):
        budget = parse_bytes(section.budget, "activation_checkpointing.budget")
    else:
        budget = (keep_bytes + smallest_budget(layers)) // 2
    try:
        plan = find_plan(layers, budget, tiers=tiers)
    except ConfigError as error:
        return Option("budget", (), 0.0, 0, error.what)
    return step.option("budget", plan.treatments, waiting, plan.added_ns / max(plan.all_ns, 1))


class _Held:
    """The bytes of the storages that are held now. A storage counts once, even if it is held several times."""

    def __init__(self) -> None:
        self._n: Counter[object] = Counter()
        self.nbytes = 0

    def has(self, key: object) -> bool:
        return self._n[key] > 0

    def take(self, key: object, nbytes: int) -> None:
        self._n[key] += 1
        if self._n[key] == 1:
            self.nbytes += nbytes

    def free(self, key: object, nbytes: int) -> None:
        self._n[key] -= 1
        if self._n[key] == 0:
            self.nbytes -= nbytes


class _Step:
    """One forward and its backward, segment by segment."""

    def __init__(self, traced: Traced, *, is_host: bool) -> None:
        self._segments, self.is_host, self._wire_bytes = traced.segments, is_host, traced.wire_bytes
        self._layers = [i for i, segment in enumerate(self._segments) if segment.measured is not None]

    def has_place(self, name: str) -> bool:
        """Whether inputs can be moved to this place. They cannot be moved to the memory that they are in already."""
        return name == "nvme" or (name == "cpu" and not self.is_host)

    def option(self, name: str, treatments: Sequence[Treatment], way: _HowInputsWait, run_again: float) -> Option:
        """treatments: one for each layer, in order."""
        chosen = {i: each for i, each in zip(self._layers, treatments, strict=True) if each.choice != KEEP}
        sent = self._wire_bytes + sum(self._segments[i].wire_bytes for i in chosen)
        if way.n_cut > 1:
            whole = sum(n for given in self._moved(chosen, way).values() for n in given.values())
            sent += whole * (way.n_cut - 1) // way.n_cut  # bytes of the gather
        return Option(name, self._moments(chosen, way), run_again, sent)

    def _moments(self, chosen: Mapping[int, Treatment], way: _HowInputsWait) -> tuple[HeldBytes, ...]:
        """chosen: the treatments of recomputed layers, by index of the segment."""
        moved = self._moved(chosen, way)
        places, waiting = self._places(chosen, moved, way)
        held = _Held()
        kept: list[list[tuple[object, int]]] = []
        moments: list[HeldBytes] = []
        elsewhere = {"cpu": 0, "nvme": 0}
        # Backward begins at the last recomputed layer. The inputs of this layer are not moved.
        last = max(chosen, default=-1)
        for i, segment in enumerate(self._segments):
            kept.append(self._kept(i, segment, chosen.get(i), moved, places, way))
            for key, nbytes in kept[i]:
                held.take(key, nbytes)
            if i in waiting and i != last:
                elsewhere[places[i]] += waiting[i]
            near = self._near(i, moved, held)
            moments.append(HeldBytes(segment.label, False, held.nbytes + sum(near.values()), *elsewhere.values()))
        for i, segment in reversed(list(enumerate(self._segments))):
            near = self._near(i, moved, held)
            more = sum(near.values())
            if i in chosen:
                new = sum(n for s, n in segment.saved.items() if not held.has(s) and s not in near)
                at_hand = [segment.measured.operators[n] for n in chosen[i].operators]
                more += max(new - sum(op.n_bytes for op in at_hand if op.is_saved), 0)
            moments.append(HeldBytes(segment.label, True, held.nbytes + more, *elsewhere.values()))
            for key, nbytes in kept[i]:
                held.free(key, nbytes)
            if i in waiting and i != last:
                elsewhere[places[i]] -= waiting[i]
        return tuple(moments)

    def _moved(self, chosen: Mapping[int, Treatment], way: _HowInputsWait) -> dict[int, dict[int, int]]:
        """Inputs of recomputed layers that are moved or cut: layer -> storage -> bytes of the whole input."""
        found = {}
        for i, treatment in chosen.items():
            if self._place_of(treatment, way) != "device" or way.n_cut > 1:
                given = self._segments[i].given
                found[i] = {storage: n for storage, n in given.items() if storage in self._segments[i].movable}
        return found

    def _places(
        self, chosen: Mapping[int, Treatment], moved: Mapping[int, Mapping[int, int]], way: _HowInputsWait
    ) -> tuple[dict[int, str], dict[int, int]]:
        """(the place of each layer's inputs, bytes of inputs outside the device's memory). Inputs for NVMe stay in host
        memory while ``max_in_cpu`` has room for them. A tensor that several layers get is moved once."""
        places: dict[int, str] = {}
        waiting: dict[int, int] = {}
        seen: set[int] = set()
        room = way.max_in_cpu
        for i, treatment in chosen.items():
            new = {storage: n for storage, n in moved.get(i, {}).items() if storage not in seen}
            seen.update(new)
            nbytes = sum(-(-n // way.n_cut) for n in new.values())
            place = self._place_of(treatment, way)
            if place == "nvme" and nbytes <= room:
                room -= nbytes
                place = "device" if self.is_host else "cpu"
            places[i] = place
            if place != "device":
                waiting[i] = nbytes
        return places, waiting

    def _place_of(self, treatment: Treatment, way: _HowInputsWait) -> str:
        place = treatment.choice if treatment.choice in ("cpu", "nvme") else way.place
        return "device" if place == "cpu" and self.is_host else place

    def _kept(
        self,
        i: int,
        segment: Segment,
        treatment: Treatment | None,
        moved: Mapping[int, Mapping[int, int]],
        places: Mapping[int, str],
        way: _HowInputsWait,
    ) -> list[tuple[object, int]]:
        """Bytes of a segment that are in the device's memory until its backward ends."""
        if treatment is None:
            return list(segment.saved.items())
        found: list[tuple[object, int]] = []
        for storage, nbytes in segment.given.items():
            if storage not in moved.get(i, {}):
                found.append((storage, nbytes))
            elif places[i] == "device":
                is_cut = way.n_cut > 1
                found.append(((storage, "part") if is_cut else storage, -(-nbytes // way.n_cut)))
        return found + [((i, n), segment.measured.operators[n].n_bytes) for n in treatment.operators]

    def _near(self, i: int, moved: Mapping[int, Mapping[int, int]], held: _Held) -> dict[int, int]:
        """The whole inputs of the last two layers up to segment ``i``. The inputs of the last layer have not been moved
        yet, or are needed. The inputs of the layer before it are being moved."""
        newest = [j for j in self._layers if j <= i][-2:]
        found = {storage: n for j in newest for storage, n in moved.get(j, {}).items()}
        return {storage: n for storage, n in found.items() if not held.has(storage)}
