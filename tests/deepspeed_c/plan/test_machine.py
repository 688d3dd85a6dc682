"""Machines: the shipped files, what a reader refuses, and the time of an operator by formulas of its own."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest

from deepspeed_c.errors import ConfigError
from deepspeed_c.plan.machine import Machine, Operator, operator_ns, read_machine, shipped_machines, write_machine

# Numbers that each data sheet prints: FLOP/s of bf16, bytes/s and bytes of the memory, Gbit/s of a host's network.
SHEETS = {
    "a100": (312e12, 2.039e12, 80e9, 8 * 200),
    "epyc-9654": (14.7456e12, 460.8e9, 384e9, 100),
    "h100": (989.4e12, 3.35e12, 80e9, 8 * 400),
    "h200": (989.4e12, 4.8e12, 141e9, 8 * 400),
}
# Fields that say what the machine is, or that are empty.
UNSOURCED = {"name", "source", "device", "operators", "sources"}


def fields_of(machine: Machine, tmp_path) -> dict:
    write_machine(machine, tmp_path / "written.json")
    return json.loads((tmp_path / "written.json").read_text())


def read_with(tmp_path, change) -> Machine:
    """Reads the file of a shipped machine after ``change`` has edited its fields."""
    fields = fields_of(read_machine("h100"), tmp_path)
    change(fields)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(fields))
    return read_machine(str(path))


def toy(**more) -> Machine:
    """A machine whose times are easy to compute by hand."""
    curve = ((1e3, 0.125), (1e5, 0.5), (1e6, 1.0))
    return read_machine("h100")._replace(
        flops={"fp32": 1e9}, product_curve=curve, memory_bytes_per_s=1e9, operator_ns=7, **more
    )


def test_shipped_machines_have_the_numbers_of_their_sheets():
    assert shipped_machines() == sorted(SHEETS)
    for name, (bf16, memory_rate, memory, network) in SHEETS.items():
        machine = read_machine(name)
        found = (machine.flops["bf16"], machine.memory_bytes_per_s, machine.memory_bytes)
        assert found == (bf16, memory_rate, memory), (name, found)
        assert machine.links[-1].bytes_per_s == network * 1e9 / 8, (name, machine.links[-1])
        assert machine.name == name and machine.links[-1].n_below == 0


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_each_shipped_number_has_a_source(name):
    machine = read_machine(name)
    numbers = {key for key, value in machine._asdict().items() if value not in (0, None)} - UNSOURCED
    assert set(machine.sources) == numbers, set(machine.sources) ^ numbers


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_a_written_machine_is_read_again(name, tmp_path):
    machine = read_machine(name)._replace(operators={"aten.add.Tensor(f32[3])": 1234}, file=None)
    write_machine(machine, tmp_path / "folder" / "machine.json")
    assert read_machine(str(tmp_path / "folder" / "machine.json")) == machine


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'h1000' is neither a file nor one of a100, epyc-9654, h100, h200"):
        read_machine("h1000")


def put(key, value):
    return lambda fields: fields.__setitem__(key, value)


def put_in_link(key, value):
    return lambda fields: fields["links"][1].__setitem__(key, value)


REFUSALS = [
    (put("speed", 1), "changed.json: speed: is unknown"),
    (lambda fields: fields.pop("operator_ns"), "changed.json: operator_ns: is missing"),
    (put_in_link("width", 1), r"links\[1\]: width: is unknown"),
    (lambda fields: fields["links"][0].pop("mode"), r"links\[0\]: mode: is missing"),
    (put_in_link("mode", "push"), r"links\[1\]: mode: is 'push'(.|\n)*one of flow, pull"),
    (put_in_link("bytes_per_s", 0), r"links\[1\]: bytes_per_s: is 0"),
    (put_in_link("latency_ns", 1.5), r"links\[1\]: latency_ns: is 1.5(.|\n)*a whole number"),
    (put_in_link("n_below", True), r"links\[1\]: n_below: is True"),
    (put_in_link("n_below", -1), r"links\[1\]: n_below: is -1"),
    (put("links", {}), "links: is {}(.|\n)*a list"),
    (put("links", [3]), r"links\[0\]: is 3(.|\n)*an object"),
    (put("device", "tpu"), "device: is 'tpu'"),
    (put("name", ""), "name: is ''"),
    (put("flops", {}), "flops: is {}"),
    (put("flops", {"fp64": 1.0}), "flops: fp64: is unknown"),
    (put("flops", {"fp32": -1.0}), "flops: fp32: is -1.0"),
    (put("flops", {"fp32": "fast"}), "flops: fp32: is 'fast'"),
    (put("memory_bytes_per_s", float("nan")), "memory_bytes_per_s: is nan"),
    (put("memory_bytes_per_s", float("inf")), "memory_bytes_per_s: is inf"),
    (put("memory_bytes", 1 << 63), "memory_bytes: is 9223372036854775808"),
    (put("update_bytes_per_s", 0), "update_bytes_per_s: is 0"),
    (put("copy_bytes_per_s", -1), "copy_bytes_per_s: is -1"),
    (put("product_curve", []), r"product_curve: is \[\]"),
    (put("product_curve", [[1e6, 0.5], [1e6, 0.6]]), r"product_curve\[1\]: is \[1000000.0, 0.6\]"),
    (put("product_curve", [[1e6, 1.5]]), r"product_curve\[0\]"),
    (put("product_curve", [[1e6, 0]]), r"product_curve\[0\]\[1\]: is 0"),
    (put("product_curve", [[1e6]]), r"product_curve\[0\]"),
    (put("file", {"read_bytes_per_s": 1}), "file: write_bytes_per_s: is missing"),
    (put("file", 3), "file: is 3"),
    (put("operators", {"aten.mm": -5}), "operators: aten.mm: is -5"),
    (put("sources", {"weight": "a scale"}), "sources: weight: is unknown"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[text for _, text in REFUSALS])
def test_a_bad_file_is_refused_with_its_key(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message) as found:
        read_with(tmp_path, change)
    assert found.value.fix and "changed.json" in found.value.where


def test_a_file_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="list.json"):
        read_machine(str(tmp_path / "list.json"))


def test_whole_numbers_may_have_exponents(tmp_path):
    machine = read_with(tmp_path, put_in_link("bytes_per_s", 4e11))
    assert machine.links[1].bytes_per_s == 400_000_000_000 and isinstance(machine.links[1].bytes_per_s, int)


def test_a_measured_operator_has_its_measured_time():
    operator = Operator("aten.mm.default(f32[8,8])", 10**9, 10**9, "fp64", is_product=True)
    assert operator_ns(toy(operators={operator.signature: 41}), operator) == 41


@pytest.mark.parametrize("n_bytes", [0, 1, 997, 10**9])
def test_an_operator_without_a_product_takes_the_time_of_its_bytes(n_bytes):
    # A byte takes 1 ns, and the start 7 ns. FLOPs of other operators are not the machine's FLOPs of products.
    assert operator_ns(toy(), Operator("aten.add", 10**12, n_bytes, "fp32", is_product=False)) == n_bytes + 7


@pytest.mark.parametrize(
    ("flops", "share"),
    [
        (1, Fraction(1, 8)),
        (1000, Fraction(1, 8)),
        (10_000, Fraction(1, 4)),  # half way between the logarithms of both points
        (100_000, Fraction(1, 2)),
        (1_000_000, Fraction(1)),
        (10**9, Fraction(1)),
    ],
)
def test_a_product_takes_the_time_of_its_share_of_the_rate(flops, share):
    wanted = math.ceil(flops / share) + 7
    found = operator_ns(toy(), Operator("aten.mm", flops, 0, "fp32", is_product=True))
    # The share is computed with logarithms, and the time is rounded up.
    assert wanted <= found <= wanted + 1, (found, wanted)


def test_the_longer_of_products_and_bytes_counts():
    few, many = (operator_ns(toy(), Operator("aten.mm", 10**6, n, "fp32", is_product=True)) for n in (10, 10**7))
    assert (few, many) == (10**6 + 7, 10**7 + 7)


def test_more_flops_never_take_less_time():
    for name in SHEETS:
        machine = read_machine(name)
        times = [operator_ns(machine, Operator("mm", 2**e, 0, "bf16", is_product=True)) for e in range(8, 46)]
        assert times == sorted(times), (name, times)


def test_a_product_without_a_rate_is_refused():
    with pytest.raises(ConfigError, match="no rate for products of bf16 ") as found:
        operator_ns(toy(), Operator("aten.mm.default(bf16[8,8])", 10, 10, "bf16", is_product=True))
    assert "fp32" in found.value.fix and "flops" in found.value.where


def test_an_empty_product_takes_its_start():
    assert operator_ns(toy(), Operator("aten.mm", 0, 0, "bf16", is_product=True)) == 7
