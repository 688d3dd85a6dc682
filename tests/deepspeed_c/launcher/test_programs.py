"""DeepSpeed's programs under ``deepspeed_c run``: each exists and is ours. Outside of ``deepspeed_c run`` none is on
the path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from deepspeed_c.compat.alias.install import BIN, FORCE
from deepspeed_c.launcher.programs import PROGRAMS, main

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_SECONDS = 300


def run(*command, cwd="/", **variables):
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_c", "run", *command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != FORCE}
        | {"PYTHONPATH": str(ROOT)}
        | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def test_each_program_has_a_file_that_can_be_executed_and_names_it():
    files = sorted(path for path in Path(BIN).iterdir() if path.is_file())  # leaves out the folder of bytecode
    assert [path.name for path in files] == sorted([*PROGRAMS, "zero_to_fp32.py"])
    for path in files:
        assert os.access(path, os.X_OK), path
        assert path.suffix == ".py" or f' {path.name} "$@"' in path.read_text()


def test_nothing_of_these_names_is_in_the_environment_of_the_interpreter():
    scripts = Path(sys.executable).parent
    assert [name for name in PROGRAMS if (scripts / name).exists()] == []


SCRIPT = """
import os, sys, deepspeed
deepspeed.init_distributed(verbose=False)
word = " ".join([deepspeed.__name__, *sys.argv[1:]])
line = f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {word}" + chr(10)
os.write(1, line.encode())  # in one piece: print writes the end of a line by itself, and the other rank may come between
"""


def test_deepspeed_launches_ranks_that_see_the_alias(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run("deepspeed", "--num_gpus", "2", "--no_local_rank", "train.py", "--deepspeed", "a b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if " of 2: " in line)
    assert lines == [f"{rank} of 2: deepspeed_c --deepspeed a b" for rank in range(2)], done.stdout


def test_a_shell_that_a_program_starts_finds_them_too(tmp_path):
    """accelerate starts `deepspeed` by its name, from a Python process."""
    code = "import shutil, subprocess, sys; sys.exit(subprocess.run([shutil.which('deepspeed'), '--help']).returncode)"
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0 and "--num_gpus" in done.stdout, done.stderr
    assert shutil.which("deepspeed") is None or not shutil.which("deepspeed").startswith(str(ROOT))


def test_exit_code_of_a_script_is_that_of_the_program(tmp_path):
    (tmp_path / "fails.py").write_text("import sys; sys.exit(7)")
    done = run("deepspeed", "--num_procs", "1", "fails.py", cwd=tmp_path)
    assert done.returncode == 7, done.stderr


def test_report_and_weights(tmp_path):
    done = run("ds_report", "--json")
    assert done.returncode == 0 and '"deepspeed_c"' in done.stdout, done.stderr
    done = run("zero_to_fp32.py", str(tmp_path / "nothing"), str(tmp_path / "out"))
    assert done.returncode == 1 and "nothing" in done.stderr and "Traceback" not in done.stderr


def test_what_is_not_there_says_so(capsys):
    assert main(["ds_bench", "-x"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "ds_bench" in err and "is not part of this version" in err and "Fix: " in err


def test_ds_io_is_io_bench_by_other_names(monkeypatch):
    from deepspeed_c.launcher import programs

    seen = []
    monkeypatch.setattr(programs, "deepspeed_c_main", lambda words: seen.append(words) or 0)
    words = ["--folder", "/d", "--io_size", "1G", "--read", "--queue_depth", "64", "--io_parallel", "2", "--loops", "5"]
    assert main(["ds_io", *words]) == 0
    assert main(["ds_nvme_tune", "--nvme_dir", "/d"]) == 0
    bench = ["--size", "1GiB", "--block", "1MiB", "--depth", "64", "--parallelism", "2", "--rounds", "5"]
    assert seen == [["io", "bench", "/d", *bench], ["io", "tune", "/d"]]


def test_ds_io_measures(tmp_path, capsys):
    options = ["--folder", str(tmp_path), "--io_size", "4M", "--loops", "1", "--queue_depth", "4"]
    assert main(["ds_io", *options]) == 0
    assert "write" in capsys.readouterr().out
