"""The alias is found when other packages look for DeepSpeed and is installed before the first of them looks. It never
hides a real DeepSpeed unless that is asked for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import deepspeed_c
from deepspeed_c.compat.alias import install
from deepspeed_c.compat.alias.install import BIN, FORCE, SHIM, environment, find_real, install_as_deepspeed
from deepspeed_c.compat.alias.version import API_VERSION
from deepspeed_c.errors import AliasError
from tests.waits import ran

ROOT = Path(__file__).resolve().parents[4]
TIMEOUT_SECONDS = 300


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Makes this process look as if nothing had imported DeepSpeed yet, and restores everything afterwards."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != SHIM])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("PYTHONPATH", FORCE):
        os.environ.pop(name, None)
    for name in [*install._DECIDE_AT_IMPORT, "deepspeed", "mii"]:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def real(tmp_path):
    """A foreign package named deepspeed, on the path of this process."""
    folder = tmp_path / "site"
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text("__version__ = '0.19.6'\n")
    sys.path.append(str(folder))
    return str(folder / "deepspeed" / "__init__.py")


def state():
    return list(sys.path), dict(os.environ)


def run(code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return ran(
        [sys.executable, *options, "-c", code], timeout=TIMEOUT_SECONDS, env={**os.environ, **variables}, cwd="/"
    )


def test_it_is_found_as_others_look_for_it_and_nothing_is_imported():
    assert importlib.util.find_spec("deepspeed") is None and find_real("deepspeed") is None
    install_as_deepspeed()
    assert importlib.util.find_spec("deepspeed").origin == os.path.join(SHIM, "deepspeed", "__init__.py")
    assert importlib.metadata.version("deepspeed") == API_VERSION
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert "deepspeed" in importlib.metadata.packages_distributions()
    assert "deepspeed" not in sys.modules


def test_version_passes_every_gate_of_the_stack_and_is_that_of_the_folder():
    from packaging import version  # pytest needs this module too

    ours = version.parse(API_VERSION)
    assert ours.public == "0.19.6" and ours.local == f"c{deepspeed_c._version.__version__}"
    assert ours >= version.parse("0.18.2") and not ours < version.parse("0.15.2")
    (folder,) = Path(SHIM).glob("deepspeed-*.dist-info")
    assert folder.name == f"deepspeed-{API_VERSION}.dist-info", f"rename {folder}"
    assert f"\nVersion: {API_VERSION}\n" in (folder / "METADATA").read_text()


def test_twice_is_once():
    install_as_deepspeed()
    once = state()
    install_as_deepspeed()
    assert state() == once
    assert sys.path.count(SHIM) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, [SHIM]), ("", [SHIM]), ("/a:/b", [SHIM, "/a", "/b"]), (f"/a:{SHIM}", [SHIM, "/a"]),
        (":/a", [SHIM, "", "/a"]),  # the working folder stays
    ],
)  # fmt: skip
def test_path_of_the_children(before, after):
    environ = {"PATH": "/bin"} | ({} if before is None else {"PYTHONPATH": before})
    variables = {"PYTHONPATH": ":".join(after), "PATH": f"{BIN}:/bin", "DSC_ALIAS_PYTHON": sys.executable}
    assert environment(environ) == variables
    assert environment(environ, force=True) == {**variables, FORCE: "1"}
    assert environment({**environ, **variables}) == variables  # a second call adds nothing
    assert environment({})["PATH"] == f"{BIN}:{os.defpath}"


def test_folder_that_no_path_can_hold(monkeypatch):
    monkeypatch.setattr(install, "SHIM", "/a:b/shim")
    with pytest.raises(AliasError, match="/a:b/shim cannot be put on PYTHONPATH"):
        environment({})


@pytest.mark.parametrize("module", install._DECIDE_AT_IMPORT)
def test_too_late(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    before = state()
    with pytest.raises(AliasError, match="has been imported already") as error:
        install_as_deepspeed()
    assert install._DECIDE_AT_IMPORT[module] in error.value.what and "deepspeed_c run" in error.value.fix
    assert state() == before


def test_not_too_late_where_it_was_visible_from_the_start(monkeypatch):
    sys.path.insert(0, SHIM)  # as `deepspeed_c run` does
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    install_as_deepspeed()


def test_not_too_late_where_a_real_one_was_visible(real, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    install_as_deepspeed(force=True)


def test_real_one_is_refused_by_its_path(real):
    before = state()
    with pytest.raises(AliasError, match="a real DeepSpeed is installed") as error:
        install_as_deepspeed()
    assert real in error.value.what and "force=True" in error.value.fix
    assert state() == before


def test_real_one_is_hidden_on_demand(real):
    install_as_deepspeed(force=True)
    assert importlib.metadata.version("deepspeed") == API_VERSION and os.environ[FORCE] == "1"
    assert find_real("deepspeed") == real


def test_real_one_of_an_editable_install_is_found(monkeypatch):
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return ModuleSpec(name, None, origin="/src/deepspeed/__init__.py") if name == "deepspeed" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert find_real("deepspeed") == "/src/deepspeed/__init__.py"


def test_real_one_that_has_been_imported_cannot_be_hidden(monkeypatch):
    module = types.ModuleType("deepspeed")
    module.__file__ = "/x/deepspeed/__init__.py"
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    for force in (False, True):
        with pytest.raises(AliasError, match="imported already, from /x/deepspeed/__init__.py"):
            install_as_deepspeed(force=force)


def test_folder_of_configuration_files_is_no_deepspeed(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero3.json").write_text("{}")
    sys.path.insert(0, str(tmp_path))
    assert find_real("deepspeed") is None
    install_as_deepspeed()


def test_shim_of_another_installation_is_no_real_deepspeed(tmp_path):
    other = tmp_path / "deepspeed_c" / "compat" / "alias" / "shim"
    (other / "deepspeed").mkdir(parents=True)
    (other / "deepspeed" / "__init__.py").write_text("")
    sys.path.append(str(other))
    assert find_real("deepspeed") is None


# ---- the import of the shim, in a process of its own ----


def test_child_refuses_to_hide_a_real_one_that_only_it_sees(real):
    path = os.pathsep.join([SHIM, str(ROOT), os.path.dirname(os.path.dirname(real))])
    # The error is no ImportError: code that tries to import deepspeed must not go on without it.
    code = "try: import deepspeed\nexcept ImportError: print('went on')\nelse: print(deepspeed.__name__)"
    refused = run(code, PYTHONPATH=path)
    assert refused.returncode == 1 and refused.stdout == "", refused
    assert "AliasError" in refused.stderr and real in refused.stderr and FORCE in refused.stderr
    assert run(code, PYTHONPATH=path, **{FORCE: "1"}).stdout == "deepspeed_c\n"


def test_interpreter_without_deepspeed_c_says_so():
    done = run("try: import deepspeed\nexcept ImportError: pass", "-S", PYTHONPATH=SHIM)
    assert done.returncode == 1 and f"{sys.executable} has no deepspeed_c" in done.stderr, done


def test_wheel_has_the_folder(tmp_path):
    """build_py copies the Python files and the data of a wheel."""
    done = ran(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)], cwd=ROOT, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    built, source = tmp_path / "deepspeed_c" / "compat" / "alias" / "shim", Path(SHIM)

    def files(folder):
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        return {name for name in found if "__pycache__" not in name}

    assert files(built) == files(source) and len(files(source)) == 6
