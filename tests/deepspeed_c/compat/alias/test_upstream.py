"""Every module and name of DeepSpeed's imports under both package names, alone and by a star."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_c.compat.alias.install import SHIM

ROOT = Path(__file__).resolve().parents[4]

# Each name by `from module import name`, before and apart from the star of its module.
IMPORT_ALL = """
import json
import deepspeed
from deepspeed_c.compat.alias.upstream import upstream
table, failures, n = upstream(), [], 0

def attempt(code):
    try: exec(code, namespace := {})
    except Exception as error: failures.append(f"{code}: {type(error).__name__}: {error}"); return {}
    return namespace

for top in ("deepspeed", "deepspeed_c"):
    for module, own in table.modules.items():
        path = module.replace("deepspeed", top, 1)
        attempt(f"import {path}")
        names = table.public_names(module)
        for name in sorted({*names, *own}):
            attempt(f"from {path} import {name}")
            n += 1
        if module != "deepspeed" and (lacking := names - attempt(f"from {path} import *").keys()):
            failures.append(f"from {path} import *: lacks {sorted(lacking)}")
print("RESULT " + json.dumps([n, failures]))
"""


@pytest.fixture(scope="module")
def result():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SHIM, str(ROOT)])},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def test_every_name_imports_under_both_package_names(result):
    n, failures = result
    assert n > 20000
    assert not failures, f"{len(failures)} of {n} fail:\n" + "\n".join(failures[:40])


UNDER_OUR_NAME = """
import deepspeed_c
from deepspeed_c.moe.layer import MoE
from deepspeed_c.compression.compress import init_compression
from deepspeed_c.compat.alias.unbuilt import Unbuilt, unbuilt
assert deepspeed_c.moe.layer.MoE is MoE is unbuilt("deepspeed.moe.layer", "MoE") is deepspeed_c.runtime.engine.MoE
assert isinstance(deepspeed_c.init_inference, Unbuilt) and not hasattr(deepspeed_c, "nothing")
assert deepspeed_c.PipelineModule is deepspeed_c.runtime.pipe.module.PipelineModule
try: import deepspeed_c.moe.nothing
except ModuleNotFoundError as error: print(error)
"""


def test_paths_of_what_is_not_built_answer_without_the_alias():
    done = subprocess.run(
        [sys.executable, "-c", UNDER_OUR_NAME], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "deepspeed_c.moe.nothing" in done.stdout, done
