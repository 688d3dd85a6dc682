"""Every module and name of DeepSpeed and MII can be imported under both package names, by name and by a star."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import deepspeed_c
from deepspeed_c.compat.alias.finder import our_path
from deepspeed_c.compat.alias.install import SHIM
from deepspeed_c.compat.alias.modules import MODULES, NAMES
from deepspeed_c.compat.alias.upstream import FILES, upstream
from tests import fresh

ROOT = Path(__file__).resolve().parents[4]


def run(code: str, cwd: Path, *above: str) -> subprocess.CompletedProcess[str]:
    """Run a program that uses this package. above: folders that come before the package on the path (SHIM: the program
    uses both names)."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*above, str(ROOT)])}
    return fresh.run(["-c", code], cwd=cwd, env=env, has_package=False)


ATTEMPTS = """
import json, sys
from deepspeed_c.compat.alias.finder import our_path
from deepspeed_c.compat.alias.upstream import upstream
table, failures, n = upstream(), [], 0

def attempt(code):
    try: exec(code, namespace := {})
    except Exception as error: failures.append(f"{code}: {type(error).__name__}: {error}"); return {}
    return namespace
"""

# Imports each name by `from module import name`, and then by the star of its module.
IMPORT_ALL = (
    f"""
import deepspeed, mii
{ATTEMPTS}"""
    + """
for is_ours in (False, True):
    for module, own in table.modules.items():
        path = our_path(module) if is_ours else module
        attempt(f"import {path}")
        names = table.public_names(module)
        for name in sorted({*names, *own}):
            attempt(f"from {path} import {name}")
            n += 1
        if "." in module and (lacking := names - attempt(f"from {path} import *").keys()):
            failures.append(f"from {path} import *: lacks {sorted(lacking)}")
print("RESULT " + json.dumps([n, failures]))
"""
)


@pytest.fixture(scope="module")
def result():
    done = run(IMPORT_ALL, Path("/"), SHIM)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def test_every_name_imports_under_both_package_names(result):
    n, failures = result
    assert n > 20000
    assert not failures, f"{len(failures)} of {n} fail:\n" + "\n".join(failures[:40])


WITHOUT_ALIAS = (
    ATTEMPTS
    + """
# Modules at the end of the table first: what stands at its beginning would load ours by their own paths
for module, own in reversed(table.modules.items()):
    path = our_path(module)
    names = table.public_names(module)
    for each in [f"import {path}", *(f"from {path} import {name}" for name in sorted(names | own.keys()))]:
        attempt(each)
        n += 1
    if "." in module and (lacking := names - attempt(f"from {path} import *").keys()):
        failures.append(f"from {path} import *: lacks {sorted(lacking)}")
assert not {"deepspeed", "mii"} & sys.modules.keys()
print("RESULT " + json.dumps([n, failures]))
"""
)


def test_every_name_imports_without_the_alias():
    done = run(WITHOUT_ALIAS, ROOT)
    assert done.returncode == 0, done.stderr
    n, failures = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert n > 10000
    assert not failures, f"{len(failures)} of {n} fail:\n" + "\n".join(failures[:40])


def test_our_modules_at_paths_of_deepspeed_are_known():
    paths = {our_path(path) for path in [*upstream().modules, *NAMES, *MODULES]}
    files = [path.relative_to(ROOT) for path in (ROOT / "deepspeed_c").rglob("*.py")]
    files += [Path("deepspeed_c") / path.relative_to(ROOT) for path in (ROOT / "ops").rglob("*.py")]
    ours = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files}
    assert deepspeed_c._SHARED_PATHS == (paths & ours) - {"deepspeed_c"}


# Uses many of the names that are built, and no other name.
TRAINS = """
import sys
read = []
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).endswith("upstream.tsv") and read.append(1))
import NAME as ds
import torch
from NAME.accelerator import get_accelerator
from NAME.comm import get_rank
from NAME.ops.adam import DeepSpeedCPUAdam, FusedAdam
from NAME.runtime.engine import DeepSpeedEngine
from NAME.runtime.zero.partition_parameters import ZeroParamStatus
from NAME.utils import groups, logger, safe_get_full_fp32_param, set_z3_leaf_modules
ds.init_distributed("gloo", init_method="file://STORE", rank=0, world_size=1)
for stage in (0, 3):
    with ds.zero.Init(enabled=stage == 3):
        model = torch.nn.Linear(8, 4)
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}}
    engine, *_ = ds.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    with ds.zero.GatheredParameters([*engine.module.parameters()]):
        pass
    engine.save_checkpoint("FOLDER", tag=f"{stage}")
    engine.load_checkpoint("FOLDER", tag=f"{stage}")
    ds.comm.barrier()
assert isinstance(engine, DeepSpeedEngine) and engine.global_steps == 2
assert not read, "upstream.tsv was read"
assert len(ds.moe.ep_router.TokenChoiceTopKRouter.__name__) == 21 and read == [1], read
"""


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_c"])
def test_program_that_uses_what_is_built_does_not_read_the_table(name, tmp_path):
    code = TRAINS.replace("NAME", name).replace("STORE", f"{tmp_path}/store").replace("FOLDER", str(tmp_path))
    done = run(code, tmp_path, SHIM)
    assert done.returncode == 0, done.stderr[-3000:]


UNDER_OUR_NAME = """
import deepspeed_c
from deepspeed_c.moe.layer import MoE
from deepspeed_c.compression.compress import init_compression
from deepspeed_c.compat.alias.unbuilt import Unbuilt, unbuilt
from deepspeed_c.moe.ep_router import TokenChoiceTopKRouter
from deepspeed_c.moe.sharded_moe import MOELayer, TopKGate, drop_tokens, top2gating
assert deepspeed_c.moe.layer.MoE is MoE is deepspeed_c.runtime.engine.MoE
assert deepspeed_c.moe.layer.MOELayer is MOELayer and deepspeed_c.moe.layer.TopKGate is TopKGate
assert TokenChoiceTopKRouter is unbuilt("deepspeed.moe.ep_router", "TokenChoiceTopKRouter")
assert isinstance(deepspeed_c.moe.ep_router.TokenChoiceTopKRouter, Unbuilt) and not hasattr(deepspeed_c, "nothing")
assert deepspeed_c.PipelineModule is deepspeed_c.runtime.pipe.module.PipelineModule
try: import deepspeed_c.moe.nothing
except ModuleNotFoundError as error: print(error)
"""


def test_paths_of_what_is_not_built_answer_without_the_alias():
    done = run(UNDER_OUR_NAME, ROOT)
    assert done.returncode == 0 and "deepspeed_c.moe.nothing" in done.stdout, done


def test_tables_are_in_archives_and_wheels():
    (line,) = [
        each
        for each in (ROOT / "pyproject.toml").read_text().splitlines()
        if each.startswith('"deepspeed_c.compat.alias"')
    ]
    archived = (ROOT / "MANIFEST.in").read_text().splitlines()
    for name in ("upstream.tsv", "mii.tsv"):
        assert f'"{name}"' in line
        assert f"include deepspeed_c/compat/alias/{name}" in archived
    folder = ROOT / "deepspeed_c" / "compat" / "alias"
    assert FILES == (str(folder / "upstream.tsv"), str(folder / "mii.tsv"))
