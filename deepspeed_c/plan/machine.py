"""Descriptions of machines: the rates of a rank, the links between ranks, and the time of one operator.

``machines/`` has machines of published data sheets, each number with its source. ``calibrate.py`` measures this one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_c.config.source import read_source
from deepspeed_c.engine.experiment import write_json
from deepspeed_c.errors import ConfigError

__all__ = [
    "FLOW",
    "PULL",
    "File",
    "LinkLevel",
    "Machine",
    "Operator",
    "operator_ns",
    "read_machine",
    "shipped_machines",
    "write_machine",
]

FLOW, PULL = "flow", "pull"

_SHIPPED = Path(__file__).with_name("machines")
_DTYPES = ("fp32", "bf16", "fp16", "fp8")
_DEVICES = ("cpu", "cuda")
# The C core computes with 64 bits.
_MOST = (1 << 63) - 1


class LinkLevel(NamedTuple):
    """One level of the tree of links. The lowest level joins the ranks of a host."""

    name: str
    n_below: int
    """Ranks of a host at the lowest level, then hosts of a rack, and so on. 0: as the command line says, or all that
    are left."""
    bytes_per_s: int
    """Rate of one port in each direction: the port of a rank at the lowest level, of a host at the next."""
    latency_ns: int
    """Latency of one step of a ring (FLOW), or of one collective (PULL)."""
    inner_bytes_per_s: int
    """Limit of all that passes through this level at once. 0: no limit."""
    mode: str
    """FLOW: transfers run beside computation. PULL: each rank moves the bytes itself while it waits."""


class File(NamedTuple):
    """The disk of a host, which its ranks share."""

    read_bytes_per_s: int
    write_bytes_per_s: int
    latency_ns: int


class Machine(NamedTuple):
    """A host of ranks, and its links to others. Each rate is a rank's own while all ranks of its host work."""

    name: str
    source: str
    """Of the numbers."""
    device: str
    """``cpu`` or ``cuda``."""
    flops: Mapping[str, float]
    """FLOP/s of large matrix products, by the name of the dtype: fp32, bf16, fp16, fp8."""
    product_curve: tuple[tuple[float, float], ...]
    """Points (FLOPs of one product, share of ``flops`` that it reaches), in increasing order of FLOPs."""
    memory_bytes_per_s: float
    memory_bytes: int
    operator_ns: int
    """Time of starting one operator."""
    update_bytes_per_s: float
    """Bytes of gradients and states that a fused optimizer reads and writes in a second."""
    links: tuple[LinkLevel, ...]
    """The lowest level first. Empty for a machine of one rank."""
    copy_bytes_per_s: float
    """Between device and host, in each direction. 0: the memory of the device is the host's."""
    file: File | None
    operators: Mapping[str, int]
    """Measured time in ns by signature."""
    sources: Mapping[str, str]
    """Sources of single numbers, by the name of the field."""


class Operator(NamedTuple):
    """One call of an operator in a step."""

    signature: str
    """Key of ``Machine.operators``: the operator's name with the dtypes and shapes of its arguments."""
    flops: int
    n_bytes: int
    """Bytes that it reads and writes."""
    dtype: str
    """Name of the dtype of a product's factors."""
    is_product: bool


def shipped_machines() -> list[str]:
    """The names of the machines that the package has."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def read_machine(name_or_path: str) -> Machine:
    """Reads a machine that the package has, by name, or a file.

    Raises ConfigError for an unknown name, a file that cannot be read, unknown and missing keys, and values of the
    wrong type or out of range.
    """
    shipped = shipped_machines()
    path = _SHIPPED / f"{name_or_path}.json" if name_or_path in shipped else Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"{name_or_path!r} is neither a file nor one of {', '.join(shipped)}",
            where="machine",
            fix="write the path of a machine's file, or one of these names",
        )
    return Machine(**_record(_MACHINE)(read_source(path).keys, str(path)))


def write_machine(machine: Machine, path: str | Path) -> None:
    """Writes a file that ``read_machine`` reads. Raises OSError."""
    fields = {**machine._asdict(), "links": [link._asdict() for link in machine.links]}
    write_json(path, {**fields, "file": None if machine.file is None else machine.file._asdict()})


def operator_ns(machine: Machine, operator: Operator) -> int:
    """The time of an operator in ns, rounded up. Without a measured time it is the longer of two, the time of its
    product and the time of its bytes, plus the time of its start.

    Raises ConfigError if the machine has no rate for products of that dtype.
    """
    measured = machine.operators.get(operator.signature)
    if measured is not None:
        return measured
    seconds = operator.n_bytes / machine.memory_bytes_per_s
    if operator.is_product and operator.flops > 0:
        rate = machine.flops.get(operator.dtype)
        if rate is None:
            raise ConfigError(
                f"has no rate for products of {operator.dtype} ({operator.signature})",
                where=f"machine {machine.name}: flops",
                fix=f"add {operator.dtype!r} to flops, or train with one of {', '.join(machine.flops)}",
            )
        seconds = max(seconds, operator.flops / (rate * _reached(machine.product_curve, operator.flops)))
    return math.ceil(seconds * 1e9) + machine.operator_ns


def _reached(curve: Sequence[tuple[float, float]], flops: int) -> float:
    """The share of the rate for a product, interpolated between the logarithms of points. Beyond an end of the curve it
    is the share at that end."""
    i = bisect_right(curve, flops, key=lambda point: point[0])
    if i in (0, len(curve)):
        return curve[max(i - 1, 0)][1]
    (low, share), (high, next_share) = curve[i - 1], curve[i]
    way = math.log(flops / low) / math.log(high / low)
    return math.exp(math.log(share) * (1 - way) + math.log(next_share) * way)


# A reader of one value: (value, its place in the file) -> the value as a field has it.
_Reader = Callable[[Any, str], Any]


def _refuse(value: Any, where: str, wanted: str) -> ConfigError:
    return ConfigError(f"is {value!r}", where=where, fix=f"write {wanted}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _refuse(value, where, "text")
    return value


def _one_of(*names: str) -> _Reader:
    def read(value: Any, where: str) -> str:
        if value not in names:
            raise _refuse(value, where, f"one of {', '.join(names)}")
        return value

    return read


def _number(least: float, *, most: float = _MOST, is_whole: bool = False, may_be_least: bool = True) -> _Reader:
    """A reader of numbers from ``least`` to ``most``. A whole number may be written as 4e11."""
    kind = "a whole number" if is_whole else "a number"
    wanted = f"{kind} {'of at least' if may_be_least else 'above'} {least}, at most {most}"

    def read(value: Any, where: str) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # NaN fails both comparisons.
        if not is_number or not least <= value <= most or (value == least and not may_be_least):
            raise _refuse(value, where, wanted)
        if is_whole and value != int(value):
            raise _refuse(value, where, wanted)
        return int(value) if is_whole else float(value)

    return read


def _record(fields: Mapping[str, _Reader]) -> _Reader:
    """A reader of an object that has exactly these keys."""

    def read(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _refuse(value, where, f"an object with the keys {', '.join(fields)}")
        for key in value:
            if key not in fields:
                raise ConfigError("is unknown", where=f"{where}: {key}", fix=f"known keys are {', '.join(fields)}")
        for key in fields:
            if key not in value:
                raise ConfigError("is missing", where=f"{where}: {key}", fix="add it, as the shipped machines have it")
        return {key: reader(value[key], f"{where}: {key}") for key, reader in fields.items()}

    return read


def _table_of(reader: _Reader, names: Sequence[str] = ()) -> _Reader:
    """A reader of an object whose values are alike. names: the keys that it may have; any, if there are none."""

    def read(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _refuse(value, where, "an object")
        for key in value:
            if names and key not in names:
                raise ConfigError("is unknown", where=f"{where}: {key}", fix=f"known keys are {', '.join(names)}")
        return {key: reader(each, f"{where}: {key}") for key, each in value.items()}

    return read


def _list_of(reader: _Reader) -> _Reader:
    def read(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise _refuse(value, where, "a list")
        return [reader(each, f"{where}[{i}]") for i, each in enumerate(value)]

    return read


def _flops(value: Any, where: str) -> dict[str, float]:
    found = _table_of(_RATE, _DTYPES)(value, where)
    if not found:
        raise _refuse(value, where, f"a rate for at least one of {', '.join(_DTYPES)}")
    return found


def _curve(value: Any, where: str) -> tuple[tuple[float, float], ...]:
    points = []
    for i, point in enumerate(_list_of(_list_of(_RATE))(value, where)):
        if len(point) != 2 or point[1] > 1 or (points and point[0] <= points[-1][0]):
            wanted = "a pair [FLOPs, share], with more FLOPs than the pair before, and a share of at most 1"
            raise _refuse(value[i], f"{where}[{i}]", wanted)
        points.append((point[0], point[1]))
    if not points:
        raise _refuse(value, where, "at least one pair [FLOPs, share]")
    return tuple(points)


def _links(value: Any, where: str) -> tuple[LinkLevel, ...]:
    return tuple(LinkLevel(**link) for link in _list_of(_record(_LINK))(value, where))


def _file(value: Any, where: str) -> File | None:
    return None if value is None else File(**_record(_FILE)(value, where))


_RATE = _number(0, may_be_least=False)
_WHOLE = _number(0, is_whole=True)
_WHOLE_RATE = _number(1, is_whole=True)
_FILE = {"read_bytes_per_s": _WHOLE_RATE, "write_bytes_per_s": _WHOLE_RATE, "latency_ns": _WHOLE}
_LINK = {
    "name": _text,
    "n_below": _WHOLE,
    "bytes_per_s": _WHOLE_RATE,
    "latency_ns": _WHOLE,
    "inner_bytes_per_s": _WHOLE,
    "mode": _one_of(FLOW, PULL),
}
_MACHINE = {
    "name": _text,
    "source": _text,
    "device": _one_of(*_DEVICES),
    "flops": _flops,
    "product_curve": _curve,
    "memory_bytes_per_s": _RATE,
    "memory_bytes": _WHOLE_RATE,
    "operator_ns": _WHOLE,
    "update_bytes_per_s": _RATE,
    "links": _links,
    "copy_bytes_per_s": _number(0),
    "file": _file,
    "operators": _table_of(_WHOLE),
    "sources": _table_of(_text, Machine._fields),
}
