"""``mii`` means deepspeed_c.mii beside ``deepspeed``: found, imported, refused and hidden in the same way."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from deepspeed_c.compat.alias import install
from deepspeed_c.compat.alias.install import FORCE, SHIM, find_real, install_as_deepspeed
from deepspeed_c.compat.alias.version import MII_VERSION
from deepspeed_c.errors import AliasError
from deepspeed_c.launcher.main import main
from tests.waits import ran

ROOT = Path(__file__).resolve().parents[4]
TIMEOUT_SECONDS = 300


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Makes this process look as if nothing had imported DeepSpeed or MII yet, and restores everything afterwards."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != SHIM])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("PYTHONPATH", FORCE):
        os.environ.pop(name, None)
    for name in [*install._DECIDE_AT_IMPORT, "deepspeed", "mii"]:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def real(tmp_path):
    """A foreign package named mii, on the path of this process."""
    folder = tmp_path / "site" / "mii"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("__version__ = '0.3.3'\n")
    sys.path.append(str(folder.parent))
    return str(folder / "__init__.py")


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([SHIM, str(ROOT)]), **variables}
    return ran([sys.executable, "-c", code], timeout=TIMEOUT_SECONDS, env=env, cwd="/")


def test_it_is_found_with_its_version_and_nothing_is_imported():
    assert importlib.util.find_spec("mii") is None and find_real("mii") is None
    install_as_deepspeed()
    assert importlib.util.find_spec("mii").origin == os.path.join(SHIM, "mii", "__init__.py")
    assert importlib.metadata.version("deepspeed-mii") == MII_VERSION
    assert "mii" not in sys.modules
    (folder,) = Path(SHIM).glob("deepspeed_mii-*.dist-info")
    assert folder.name == f"deepspeed_mii-{MII_VERSION}.dist-info", f"rename {folder}"
    assert f"\nVersion: {MII_VERSION}\n" in (folder / "METADATA").read_text()


# Prints the modules that an import of mii has loaded, and compares the objects under both names.
IMPORTS = """
import json, sys
before = set(sys.modules)
import mii
loaded = sorted({name.partition(".")[0] for name in sys.modules.keys() - before})
heavy = [name for name in ("torch", "transformers", "numpy", "pydantic", "msgspec", "asyncio") if name in loaded]
from mii.config import ModelConfig
from mii.batching import MIIPipeline
from mii.batching.data_classes import Response
import mii.version, mii.constants, deepspeed_c.mii.config
late = [name for name in ("transformers", "pydantic") if name in sys.modules]
same = [
    mii is sys.modules["deepspeed_c.mii"], mii.config is deepspeed_c.mii.config, ModelConfig is mii.ModelConfig,
    Response is mii.Response, MIIPipeline is mii.MIIPipeline, callable(mii.pipeline), mii.batching.MIIPipeline is MIIPipeline,
    mii.constants.GRPC_MAX_MSG_SIZE == 2**27, mii.legacy.constants.LB_MAX_WORKER_THREADS == 32,
    mii.get_supported_models.__module__ == "deepspeed_c.mii.models",
]
import deepspeed_c.mii.pipeline
same.append(callable(mii.pipeline))
print(json.dumps([heavy, late, same, mii.__version__, mii.version.__version__, "deepspeed" in sys.modules]))
"""


def test_import_is_light_and_gives_one_object_under_both_names():
    done = run(IMPORTS)
    assert done.returncode == 0, done.stderr
    heavy, late, same, version, again, has_deepspeed = json.loads(done.stdout)
    assert heavy == [] and late == [] and has_deepspeed is False
    assert all(same), same
    assert version == again == MII_VERSION


# Each row: an expression of MII's legacy or of Azure, and words of the advice.
LEGACY = [
    ("mii.deploy(task='text-generation', model='x', deployment_name='y')", "mii.serve"),
    ("mii.mii_query_handle('y')", "mii.client"),
    ("mii.terminate('y')", "terminate_server"),
    ("mii.MIIServer(None)", "mii.serve"),
    ("mii.aml_output_path('y')", "container"),
    ("mii.aml_related.utils.generate_aml_scripts()", "container"),
    ("mii.legacy.MIIConfig()", "mii.pipeline"),
    ("mii.config.get_mii_config('y')", "mii.client"),
    ("mii.grpc_related.modelresponse_server.ModelResponse()", "JSON"),
]
REFUSALS = f"""
import json, mii
rows = []
for code, _ in {LEGACY!r}:
    try: eval(code); rows.append(None)
    except NotImplementedError as error: rows.append([type(error).__name__, str(error)])
for code in ("import mii.nothing", "from mii import nothing", "from mii.config import nothing", "mii.nothing"):
    try: exec(code); rows.append(None)
    except (ImportError, AttributeError) as error: rows.append([type(error).__name__, str(error)])
print(json.dumps([rows, [hasattr(mii, "nothing"), repr(mii.deploy)]]))
"""


def test_legacy_names_and_azures_raise_with_advice_when_called():
    done = run(REFUSALS)
    assert done.returncode == 0, done.stderr
    rows, (has_nothing, shown) = json.loads(done.stdout)
    for (code, words), (kind, text) in zip(LEGACY, rows):
        assert kind == "FeatureError" and words in text.partition("\nFix: ")[2], (code, text)
    kinds = [kind for kind, _ in rows[len(LEGACY) :]]
    assert kinds == ["MissingModuleError"] * 3 + ["MissingNameError"] and has_nothing is False
    assert all(text.startswith("mii.") and "\nFix: " in text for _, text in rows)
    assert "of MII, not part of this version" in shown


def test_names_answer_without_the_alias():
    code = """
import sys, deepspeed_c.mii as ours
from deepspeed_c.mii.batching.data_classes import Response
assert Response is ours.Response and ours.backend.client.MIIClient is ours.MIIClient
try: ours.deploy()
except NotImplementedError as error: print(error)
assert not {"deepspeed", "mii"} & sys.modules.keys()
"""
    done = run(code, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and "mii.serve" in done.stdout, done


def test_real_one_is_refused_by_its_path_and_hidden_on_demand(real):
    before = list(sys.path), dict(os.environ)
    with pytest.raises(AliasError, match="a real MII is installed") as error:
        install_as_deepspeed()
    assert real in error.value.what and "pip uninstall deepspeed-mii" in error.value.fix
    assert (list(sys.path), dict(os.environ)) == before
    install_as_deepspeed(force=True)
    assert importlib.util.find_spec("mii").origin == os.path.join(SHIM, "mii", "__init__.py")
    assert os.environ[FORCE] == "1" and find_real("mii") == real


def test_real_one_that_has_been_imported_cannot_be_hidden(monkeypatch):
    module = types.ModuleType("mii")
    module.__file__ = "/x/mii/__init__.py"
    monkeypatch.setitem(sys.modules, "mii", module)
    for force in (False, True):
        with pytest.raises(AliasError, match="MII has been imported already, from /x/mii/__init__.py"):
            install_as_deepspeed(force=force)


def test_child_refuses_to_hide_a_real_one_that_only_it_sees(real):
    path = os.pathsep.join([SHIM, str(ROOT), os.path.dirname(os.path.dirname(real))])
    code = "try: import mii\nexcept ImportError: print('went on')\nelse: print(mii.__name__)"
    refused = run(code, PYTHONPATH=path)
    assert refused.returncode == 1 and refused.stdout == "", refused
    assert "AliasError" in refused.stderr and real in refused.stderr and FORCE in refused.stderr
    assert run(code, PYTHONPATH=path, **{FORCE: "1"}).stdout == "deepspeed_c.mii\n"


def test_interpreter_without_deepspeed_c_says_so():
    code = [sys.executable, "-S", "-c", "try: import mii\nexcept ImportError: pass"]
    done = ran(code, timeout=TIMEOUT_SECONDS, env={**os.environ, "PYTHONPATH": SHIM}, cwd="/")
    assert done.returncode == 1 and f"{sys.executable} has no deepspeed_c" in done.stderr, done


@pytest.mark.parametrize("command", [["run", "echo", "ran"], ["env"]])
def test_command_stops_with_the_path_of_a_real_one(command, real, capsys):
    assert main(command) == 3
    out, err = capsys.readouterr()
    assert out == "" and real in err and "--force" in err


def test_finder_keeps_out_of_another_mii():
    code = """
import sys, types, mii, deepspeed
sys.modules["mii"] = types.ModuleType("mii"); sys.modules["mii"].__path__ = []
import deepspeed.moe.layer
try: import mii.config
except ModuleNotFoundError as error: print(error)
"""
    done = run(code)
    assert done.stdout == "No module named 'mii.config'\n", done
