"""The script in a checkpoint's folder is executable and small, and works from any working directory."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from deepspeed_c.checkpoint.native.save import write_native
from deepspeed_c.checkpoint.tools.zero_to_fp32_script import NAME, write_script
from tests import fresh
from tests.deepspeed_c.checkpoint.memory_source import adam_checkpoint
from tests.waits import ran


def test_it_is_written_once_and_replaced_when_it_differs(tmp_path):
    path = tmp_path / NAME
    write_script(str(tmp_path))
    assert os.access(path, os.X_OK) and os.listdir(tmp_path) == [NAME]
    before = os.stat(path).st_ino
    write_script(str(tmp_path))
    assert os.stat(path).st_ino == before
    for spoil in (lambda: path.write_text("old"), lambda: path.chmod(0o644)):
        spoil()
        write_script(str(tmp_path))
        assert os.access(path, os.X_OK) and "deepspeed_c" in path.read_text()


def test_it_converts_the_checkpoint_beside_it(tmp_path):
    source = adam_checkpoint()
    write_native(source, str(tmp_path), "step10")
    (tmp_path / "latest").write_text("step10")
    write_script(str(tmp_path))
    env = {**os.environ, "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")}
    done = ran([f"./{NAME}", ".", "out", "-d"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(got["embed.weight"], source.values["master", "embed.weight"])


@pytest.mark.parametrize("what", ["latest", "package"])
def test_what_goes_wrong_is_said(tmp_path, what):
    write_script(str(tmp_path))
    code = (
        "import sys, runpy\nsys.argv[1:] = ['.', 'out']\n"
        + ("sys.modules['deepspeed_c'] = None\n" if what == "package" else "")
        + f"runpy.run_path({NAME!r}, run_name='__main__')"
    )
    done = fresh.run(["-c", code], cwd=tmp_path, has_package=False)
    assert done.returncode == 1
    assert ("holds no checkpoint" if what == "latest" else "pip install") in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
