"""Tests the package as a user installs it: from a wheel that is built from an archive of the sources, in a new
environment, with another working folder.

Every other test runs on the linked install, which has files that a wheel may lack. The objects of the linked install are reused (DSC_BUILD_DIR), so that nothing is compiled twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.limit(900, reason="builds a wheel and an environment, maybe beside other builds")

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 850
NOT_SOURCES = shutil.ignore_patterns(
    *(
        ".git",
        ".venv",
        "build",
        "dist",
        "out",
        "logs",
        "results",
        "*.egg-info",
        "__pycache__",
        ".pytest_cache",
        ".ruff_cache",
    ),
    *("*.so", "*.o", "*.a", "*.pyc"),
)

# Imports the listed modules, then trains on each rank and writes and reads a file with the I/O engine.
TRAIN = """
import importlib, json, os, sys
import torch
import deepspeed_c
modules, folder = json.load(open(sys.argv[1])), sys.argv[2]
if os.environ["RANK"] == "0":
    for name in modules:
        importlib.import_module(name)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 3}}
losses = []
with deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0] as engine:
    x = torch.randn(8, 16)
    for _ in range(5):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
from deepspeed_c.ops.aio import aio_handle
data, back = torch.randn(1000), torch.zeros(1000)
path, handle = os.path.join(folder, "data" + os.environ["RANK"]), aio_handle()
handle.sync_pwrite(data, path)
handle.sync_pread(back, path)
assert torch.equal(data, back)
assert losses[-1] < losses[0] and all(name in sys.modules for name in modules if os.environ["RANK"] == "0"), losses
os.write(1, (json.dumps([deepspeed_c.__file__, deepspeed_c.__version__, losses]) + chr(10)).encode())
"""


def run(*command: object, cwd: Path, code: int = 0, **environment: str) -> str:
    """The standard output of a command, which has to exit with ``code``. This checkout is not on the command's path."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**env, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, (
        f"{command} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def backend(hook: str, cwd: Path, out: Path, **environment: str) -> Path:
    """Calls a hook of the build backend like pip.

    Returns the archive that the hook makes from the sources in ``cwd``.
    """
    out.mkdir(exist_ok=True)
    name = run(
        sys.executable,
        "-c",
        f"from setuptools.build_meta import {hook} as f; print(f({str(out)!r}))",
        cwd=cwd,
        **environment,
    ).split()[-1]
    return out / name


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """The archive of the sources, made in a copy without build outputs, like a clone."""
    folder = tmp_path_factory.mktemp("archive")
    shutil.copytree(ROOT, folder / "clone", ignore=NOT_SOURCES, symlinks=True)
    return backend("build_sdist", folder / "clone", folder / "out")


@pytest.fixture(scope="module")
def unpacked(archive, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (only,) = folder.iterdir()
    return only


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    kept = ROOT / "build" / "objects"
    if kept.is_dir():
        # A copy, so that objects compiled from the archive are not mistaken for the checkout's.
        shutil.copytree(kept, folder / "objects")
    has_cuda = (ROOT / "deepspeed_c" / "libdsc_cuda.so").is_file()
    return backend(
        "build_wheel",
        unpacked,
        folder / "out",
        DSC_BUILD_DIR=str(folder / "objects"),
        DSC_BUILD_CUDA=str(int(has_cuda)),
    )


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel in it, and torch from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    run(
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
        wheel,
        cwd=folder.parent,
    )
    (site,) = folder.glob("lib/python*/site-packages")
    # Folders named in a .pth file are only searched for modules: .pth files inside them, such as the linked install's,
    # have no effect.
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "tests_torch.pth").write_text("\n".join(others) + "\n")
    return folder


def wanted_in_wheel() -> set[str]:
    """The files of the packages' folders that the wheel has to contain."""
    wanted = set()
    for folder, name in (("deepspeed_c", "deepspeed_c"), ("ops", "deepspeed_c/ops")):
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            if path.is_file() and not {"__pycache__", "binding"} & set(inside.parts):
                wanted.add(f"{name}/{inside.as_posix()}")
    return wanted


def test_the_archive_has_the_sources_as_they_are(unpacked):
    for folder in ("csrc", "ops", "deepspeed_c", "tests", "docs", "examples", "benchmarks", "scripts"):
        ignored = {"build", "__pycache__", "results"}
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT)
            if path.is_file() and not ignored & set(inside.parts) and path.suffix not in (".so", ".o", ".a", ".pyc"):
                assert (unpacked / inside).is_file(), f"{inside} is not in the archive"
                assert (unpacked / inside).read_bytes() == path.read_bytes(), inside
    for name in ("LICENSE", "README.md", "Makefile", "constraints.txt", "pyproject.toml", "setup.py"):
        assert (unpacked / name).is_file(), name


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
        metadata = next(
            file.read(name).decode() for name in names if name.startswith("deepspeed_c-") and name.endswith("/METADATA")
        )
    info = {name for name in names if name.startswith("deepspeed_c-")}
    assert wanted_in_wheel() - (names - info) == set(), "not in the wheel"
    assert names - info - wanted_in_wheel() == set(), "in the wheel only"
    assert any(name.endswith("licenses/LICENSE") for name in info)
    version = (ROOT / "deepspeed_c" / "_version.py").read_text().split('"')[-2]
    assert f"\nVersion: {version}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata


def test_the_wheel_keeps_the_cores_inside(wheel):
    """The extension built in place exports the cores for tests. The shipped extension exports only the module."""
    plug = b"dsc_aio_plug_backend"
    with zipfile.ZipFile(wheel) as file:
        (shipped,) = (file.read(name) for name in file.namelist() if re.fullmatch(r"deepspeed_c/_C\..*so", name))
    (in_place,) = (ROOT / "deepspeed_c").glob("_C.*.so")
    assert b"PyInit__C" in shipped and plug not in shipped
    assert plug in in_place.read_bytes()


def modules(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        paths = [
            Path(name)
            for name in file.namelist()
            if name.endswith(".py") and not {"shim", "bin"} & set(name.split("/"))
        ]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    # Programs are left out: modules started by `python -m`, and a script that is copied into checkpoints.
    return [
        name
        for name in names
        if not name.endswith((".__main__", ".launcher.bind", "deepspeed_c.guard", ".zero_to_fp32_script"))
    ]


def test_the_installed_package_is_whole_and_trains(installed, wheel, tmp_path):
    program = installed / "bin" / "deepspeed_c"
    report = json.loads(run(program, "report", "--json", cwd=tmp_path))
    assert Path(report["package"]["folder"]).is_relative_to(installed) and report["package"]["modules"] == "all there"
    has_cuda = (ROOT / "deepspeed_c" / "libdsc_cuda.so").is_file()
    assert report["cuda library"]["built"] == has_cuda and report["cuda library"].get("loads", False) == has_cuda
    listed = tmp_path / "modules.json"
    listed.write_text(json.dumps(modules(wheel)))
    assert len(modules(wheel)) > 100
    (tmp_path / "train.py").write_text(TRAIN)
    lines = run(program, "--num_procs", "2", "--no_local_rank", "train.py", listed, tmp_path, cwd=tmp_path).splitlines()
    said = [json.loads(line) for line in lines if line.startswith('["')]
    assert len(said) == 2 and said[0] == said[1] and Path(said[0][0]).is_relative_to(installed), lines
    # DeepSpeed's programs are executable after unpacking, and none of them is in the environment's folder of programs.
    assert "--num_gpus" in run(program, "run", "deepspeed", "--help", cwd=tmp_path)
    assert json.loads(run(program, "run", "ds_report", "--json", cwd=tmp_path))["package"] == report["package"]
    assert not list((installed / "bin").glob("d*s*peed")) and not list((installed / "bin").glob("ds*"))
    (site,) = installed.glob("lib/python*/site-packages")
    shutil.move(site / "deepspeed_c" / "engine" / "engine.py", tmp_path)
    assert "missing: deepspeed_c.engine.engine" in run(program, "report", cwd=tmp_path, code=1)
    shutil.move(tmp_path / "engine.py", site / "deepspeed_c" / "engine")
