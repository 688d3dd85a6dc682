"""io/bench.py: rates and ratios follow from times, our contenders really move the bytes, fio gets the right arguments,
and its output is parsed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_c.io.bench import FIO_ENGINES, FioError, MeasuredRates, Settings, compare, find_fio, fio, ours, summary
from deepspeed_c.io.scratch import scratch

# Records its arguments and prints a report like fio's, after a line of text that some versions print.
FAKE_FIO = """#!{python}
import json, sys
open({log!r}, "a").write(json.dumps(sys.argv[1:]) + "\\n")
options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
if options["ioengine"] == "io_uring":
    print("fio: engine io_uring not loadable", file=sys.stderr)
    raise SystemExit(1)
job = {{"io_bytes": int(options["size"]) - {missing}, "bw_bytes": {speed}}}
print("note: both iodepth")
print(json.dumps({{"jobs": [{{options["rw"]: job}}]}}))
"""


def fake_fio(folder: Path, speed: int = 1000, missing: int = 0) -> str:
    path = folder / "fio"
    path.write_text(FAKE_FIO.format(python=sys.executable, log=str(folder / "log"), speed=speed, missing=missing))
    path.chmod(0o755)
    return str(path)


def test_rates_are_bytes_over_seconds_and_ratios_are_of_one_round():
    seconds = {
        "a": {"write": [99, 1.0, 2.0, 4.0], "read": [99, 0.5, 0.5, 0.5]},
        "fio x": {"write": [99, 2.0, 1.0, 1.0], "read": [99, 1.0, 1.0, 1.0]},
        "fio y": {"write": [99, 4.0, 4.0, 0.5], "read": [99, 2.0, 2.0, 0.25]},
    }
    order = []

    def contender(name):
        def transfer(direction):
            order.append((direction, name))
            return seconds[name][direction].pop(0)

        return transfer

    rates = compare({name: contender(name) for name in seconds}, 8, 3)
    assert rates.absent == {}
    assert rates.rounds["a"] == {"write": [8, 4, 2], "read": [16, 16, 16]}  # the first round does not count
    assert rates.best_fio("write") == [4, 8, 16] and rates.best_fio("read") == [8, 8, 32]
    assert order[6:12] == [(d, name) for d in ("write", "read") for name in seconds]
    row = next(row for row in summary(rates) if (row["contender"], row["direction"]) == ("a", "write"))
    assert (row["ratio_to_fio"], row["ratio_to_fio_min"], row["ratio_to_fio_max"]) == (0.5, 0.125, 2)
    assert (row["gb_per_s"], row["gb_per_s_max"]) == (0.0, 0.0)  # 4e-9, to four digits


def test_without_fio_there_is_no_ratio():
    rates = MeasuredRates({"a": {"write": [2e9], "read": [3e9]}}, {})
    assert rates.best_fio("read") is None
    assert [row["ratio_to_fio"] for row in summary(rates)] == [None, None]
    assert [row["gb_per_s"] for row in summary(rates)] == [2, 3]


def test_a_fio_that_fails_is_left_out(tmp_path):
    program = fake_fio(tmp_path)
    with scratch(str(tmp_path), 8192) as file:
        settings = Settings("auto", 4096, 5)
        contenders = {f"fio {engine}": fio(program, engine, file, settings) for engine in FIO_ENGINES}
        rates = compare(contenders, 8192, 2)
        path = file.path
    assert rates.absent == {"fio io_uring": "fio: engine io_uring not loadable"}
    assert rates.rounds == {"fio libaio": {"write": [1000, 1000], "read": [1000, 1000]}}
    words = json.loads((tmp_path / "log").read_text().splitlines()[0])
    assert {"--rw=write", "--bs=4096", "--iodepth=5", "--size=8192", "--direct=1", f"--filename={path}"} <= set(words)


def test_a_fio_that_moves_too_little_or_is_not_there(tmp_path):
    with scratch(str(tmp_path), 8192) as file:
        with pytest.raises(FioError, match="8191 of 8192"):
            fio(fake_fio(tmp_path, missing=1), "libaio", file, Settings())("read")
        with pytest.raises(FioError, match="No such file"):
            fio(str(tmp_path / "missing"), "libaio", file, Settings())("read")


@pytest.mark.parametrize("shift", [0, 1])
def test_ours_moves_the_bytes(tmp_path, shift):
    n_bytes = 3 * 65536
    tensor = torch.randint(0, 256, (n_bytes + shift,), dtype=torch.uint8)[shift:]
    wanted = tensor.clone()
    with scratch(str(tmp_path), n_bytes) as file:
        transfer = ours(file, tensor, Settings("auto", 65536, 4).handle())
        assert transfer("write") > 0
        assert Path(file.path).read_bytes() == wanted.numpy().tobytes()
        tensor.zero_()
        assert transfer("read") > 0
    assert torch.equal(tensor, wanted)


@pytest.mark.skipif(find_fio() is None, reason="fio is not installed")
def test_the_installed_fio_is_understood(tmp_path):
    n_bytes = 1 << 20
    with scratch(str(tmp_path), n_bytes) as file:
        contenders = {
            f"fio {engine}": fio(find_fio(), engine, file, Settings("auto", 65536, 4)) for engine in FIO_ENGINES
        }
        rates = compare(contenders, n_bytes, 1)
    assert set(rates.rounds) | set(rates.absent) == set(contenders)
    assert all(rate > 0 for found in rates.rounds.values() for values in found.values() for rate in values)
