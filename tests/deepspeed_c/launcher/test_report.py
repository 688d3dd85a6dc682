"""`deepspeed_c report`, with and without the compiled part."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import types
from typing import ClassVar

import pytest
import torch

from deepspeed_c.launcher import report


class ShmEnd:
    """Stands in for one end of memory that ranks share."""

    opened: ClassVar[list[ShmEnd]] = []
    refusal = ""

    def __init__(self, rank, n_ranks, timeout_s):
        self.address, self.seen = f"end {rank} of {n_ranks}", []
        ShmEnd.opened.append(self)

    def attach(self, addresses):
        if ShmEnd.refusal:
            raise NotImplementedError(ShmEnd.refusal)
        assert addresses == ["end 0 of 2", "end 1 of 2"]

    def close(self):
        ShmEnd.opened.remove(self)


@pytest.fixture
def extension(monkeypatch, tmp_path):
    """A stand-in for the compiled module, so that the report is also tested where the module is not built."""
    module = types.ModuleType("deepspeed_c._C")
    module.__file__ = str(tmp_path / "_C.so")
    module.build_info = lambda: {
        "version": "9.9.9",
        "compiler": "cc 1",
        "cuda": True,
        "fast": False,
        "stable_abi": True,
    }
    module.cpu_isas = lambda: [("scalar", True), ("avx2", True), ("avx512", False)]
    module.cpu_isa = lambda: "avx2"
    module.pool_n_threads = lambda: 37
    module.ShmGroup = ShmEnd
    module.aio_backends = lambda: [("libaio", False, "the kernel says no"), ("threads", True, ""), ("sync", True, "")]
    monkeypatch.setitem(sys.modules, "deepspeed_c._C", module)
    return module


def test_text(extension, capsys):
    assert report.main([]) == 0
    text = capsys.readouterr().out
    values = {
        line[2:].split("  ")[0].strip(): line.rsplit("  ", 1)[1] for line in text.splitlines() if line[:2] == "  "
    }
    assert values["torch"] == torch.__version__
    assert values["instruction sets built"] == "scalar, avx2, avx512"
    assert values["... that run here"] == "scalar, avx2"
    assert values["... in use"] == "avx2"
    assert values["threads of an optimizer step"] == "37"
    assert (values["fast"], values["stable_abi"]) == ("no", "yes")
    assert values["uring"] == "not built: the compiler found no header of it"
    assert values["libaio"] == "built, not usable: the kernel says no"
    assert (values["threads"], values["sync"]) == ("built, usable", "built, usable")
    assert values["auto takes"] == "threads"
    assert values["shared memory"] == "usable between ranks of this host" and ShmEnd.opened == []
    said = "through shared memory inside a host, over gloo between hosts"
    assert values["CPU tensors of ranks on several hosts"] == said
    assert values["gloo"] == ("yes" if torch.distributed.is_gloo_available() else "no")
    columns = {
        line.index(value) for line in text.splitlines() for value in [line.rsplit("  ", 1)[-1]] if line[:2] == "  "
    }
    assert len(columns) == 1, text


def test_ranks_that_could_not_share_memory(extension, capsys, monkeypatch):
    monkeypatch.setattr(ShmEnd, "refusal", "the kernel has no pidfd_getfd")
    assert report.main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)["communication"]
    assert said["shared memory"] == "not between ranks: the kernel has no pidfd_getfd" and ShmEnd.opened == []
    assert said["CPU tensors of such ranks"] == said["CPU tensors of ranks on several hosts"] == "over gloo"


def test_json(extension, capsys):
    assert report.main(["--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["package"]["extension"] == extension.__file__
    assert values["cuda library"] == {"built": True, "file": "not there"}
    assert values["cpu"]["cores"].startswith(f"{os.cpu_count()}, ")
    assert abs(values["clock"]["seconds"] - time.time()) < 200
    with pytest.raises(SystemExit):
        report.main(["--ssh_port", "22"])


def test_io_backends_are_those_that_a_handle_has():
    from deepspeed_c.ops import aio

    values = report.gather()[0]["i/o backends"]
    usable = [name for name, what in values.items() if what == "built, usable"]
    assert usable == [backend.name for backend in aio.backends() if backend.is_usable]
    assert values["auto takes"] == aio.aio_handle().backend == usable[0]


def test_threads_are_those_of_the_pool(monkeypatch):
    extension = importlib.import_module("deepspeed_c._C")
    assert report.gather()[0]["cpu"]["threads of an optimizer step"] == extension.pool_n_threads()
    monkeypatch.setenv("DSC_NUM_THREADS", "all")
    extension.pool_resize(0)
    try:
        assert "DSC_NUM_THREADS: is 'all'" in report.gather()[0]["cpu"]["threads of an optimizer step"]
    finally:
        monkeypatch.undo()
        extension.pool_resize(0)


def test_cuda_library_that_does_not_load(extension, tmp_path):
    (tmp_path / report.CUDA_LIBRARY).write_bytes(b"no ELF file")
    values, _ = report.gather()
    assert values["cuda library"]["loads"].startswith("no: "), values["cuda library"]


def test_missing_extension(monkeypatch, capsys):
    def refuse(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert report.main([]) == report.EXIT_NOT_WHOLE
    text = capsys.readouterr().out
    assert "missing or does not load" in text and "pip install" in text
    assert "torch" in text and "total" in text  # the rest of the report is there


def test_nvcc_that_does_not_run(monkeypatch, tmp_path):
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "does not run" in report._nvcc()
    program.unlink()
    assert report._nvcc() == "not found"


def test_bad_option(capsys):
    with pytest.raises(SystemExit):
        report.main(["--nope"])
    assert "--nope" in capsys.readouterr().err


def test_modules_that_others_import_and_that_are_not_there(tmp_path):
    package = tmp_path / "deepspeed_c"
    for name, text in {
        "__init__.py": "from .errors import E\nfrom deepspeed_c import _C\n",
        "errors.py": "import os\nimport torch.nn\n",
        "a/__init__.py": "",
        "a/b.py": "def f():\n    from deepspeed_c.engine.engine import Engine\n    from . import c\n    from ..gone import x\n",
        "a/c.py": "import deepspeed_c.a.b\nfrom deepspeed_c.ops.adam import Adam\nfrom deepspeed_c._C import x\n",
    }.items():
        (package / name).parent.mkdir(exist_ok=True, parents=True)
        (package / name).write_text(text)
    ops = tmp_path / "ops"
    ops.mkdir()
    (ops / "__init__.py").write_text("")
    folders = {"deepspeed_c": package, "deepspeed_c.ops": ops}
    assert report._missing_modules(folders) == ["deepspeed_c.engine.engine", "deepspeed_c.gone", "deepspeed_c.ops.adam"]
    (ops / "adam.py").touch()
    (package / "gone.py").touch()
    (package / "engine").mkdir()
    (package / "engine" / "engine.py").touch()
    assert report._missing_modules(folders) == []
    assert report._missing_modules({**folders, "deepspeed_c.ops": None}) == ["deepspeed_c.ops", "deepspeed_c.ops.adam"]


def test_a_package_that_is_not_whole_says_so(extension, monkeypatch, capsys):
    monkeypatch.setattr(report, "_missing_modules", lambda folders: ["deepspeed_c.engine.engine"])
    assert report.main([]) == report.EXIT_NOT_WHOLE
    assert "missing: deepspeed_c.engine.engine. Fix: install the package again" in capsys.readouterr().out
