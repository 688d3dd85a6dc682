"""The times of products: measured once, kept in a file, and measured again where the file is of no use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from deepspeed_c.ops import product_times as module
from deepspeed_c.ops.product_times import ProductTimes, keep_times, product_times
from deepspeed_c.ops.products import widen_products

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[torch.dtype]:
    """The dtypes measured, in an empty cache folder; a measurement finds 2 s and 1 s."""
    dtypes: list[torch.dtype] = []

    def measure(dtype: torch.dtype) -> ProductTimes:
        dtypes.append(dtype)
        return ProductTimes(2.0, 1.0)

    monkeypatch.setattr(module, "_measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return dtypes


def file_of(folder: Path) -> Path:
    (path,) = (folder / "deepspeed_c").iterdir()
    return path


def test_each_dtype_is_measured_once(measured: list[torch.dtype], tmp_path: Path) -> None:
    for _ in range(3):
        for dtype in HALVES:
            assert product_times(dtype) == (2.0, 1.0)
    assert measured == list(HALVES)
    assert len(json.loads(file_of(tmp_path).read_text())) == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", "{}", '{"KEY": [1.0]}', '{"KEY": "ab"}', '{"KEY": [0.0, 1.0]}', '{"KEY": [NaN, 1.0]}', "\udcff"]
)  # fmt: skip
def test_a_spoilt_file_is_measured_again(measured: list[torch.dtype], tmp_path: Path, text: str) -> None:
    product_times(torch.bfloat16)
    path = file_of(tmp_path)
    (key,) = json.loads(path.read_text())
    path.write_bytes(text.replace("KEY", key).encode("utf-8", "surrogateescape"))
    assert product_times(torch.bfloat16) == (2.0, 1.0) and len(measured) == 2
    assert product_times(torch.bfloat16) == (2.0, 1.0) and len(measured) == 2
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    "name, value",
    [
        ("ONEDNN_MAX_CPU_ISA", "SSE41"),
        ("processor_name", lambda: "another processor"),
        ("__version__", "0.0.0"),
        ("torch version", "3.0"),
        ("capability", lambda: "VSX"),
        ("isa", lambda: "mmx"),
    ],
)
def test_another_machine_or_version_is_measured(
    measured: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    product_times(torch.bfloat16)
    if name.isupper():
        monkeypatch.setenv(name, value)
    else:
        places = {
            "torch version": (torch, "__version__"),
            "capability": (torch.backends.cpu, "get_cpu_capability"),
            "isa": (module._C, "cpu_isa"),
        }
        monkeypatch.setattr(*places.get(name, (module, name)), value)
    product_times(torch.bfloat16)
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    measured: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for n_measured in (1, 2):
        assert product_times(torch.float16) == (2.0, 1.0) and len(measured) == n_measured


def test_without_the_variable_the_file_lies_at_home(
    measured: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    product_times(torch.float16)
    assert file_of(tmp_path / "home" / ".cache").exists()


def test_slow_is_longer_by_half() -> None:
    assert [ProductTimes(t, 2.0).is_torch_slow for t in (1.0, 2.99, 3.0, 50.0)] == [False, False, True, True]
    assert str(ProductTimes(0.25, 0.0005)) == "by deepspeed_c: 250.00 ms in torch, 0.50 ms in deepspeed_c"
    assert str(ProductTimes(0.0005, 0.001)).startswith("by torch: 0.50 ms")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_measurement_takes_each_side_by_its_own_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widened products would give torch the time of the core."""
    from deepspeed_c.ops import products

    end = widen_products(HALVES)
    monkeypatch.setattr(products, "_product", lambda *args: pytest.fail("torch's product was ours"))
    try:
        times = module._measure(dtype)
    finally:
        end()
    print(dtype, times)
    assert min(times) > 0


def test_kept_times_are_those_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_times(torch.bfloat16, ProductTimes(4.0, 0.5))
    assert product_times(torch.bfloat16) == (4.0, 0.5)
