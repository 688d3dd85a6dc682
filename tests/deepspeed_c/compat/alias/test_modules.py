"""Every path and name of the table leads to its object, in one process that sees the alias. Errors for missing names
tell what to use instead."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from deepspeed_c.compat.alias.install import SHIM
from deepspeed_c.compat.alias.modules import ABSENT, MODULES, NAMES
from tests import fresh
from tests.waits import ran

ROOT = Path(__file__).resolve().parents[4]
TIMEOUT_SECONDS = 300

# Names that transformers, accelerate, peft, trl and Lightning use after only `import deepspeed`, as they write them.
REACHED = [
    "deepspeed.initialize", "deepspeed.init_distributed", "deepspeed.DeepSpeedEngine", "deepspeed.__version__",
    "deepspeed.add_config_arguments", "deepspeed.zero.Init", "deepspeed.zero.GatheredParameters",
    "deepspeed.zero.register_external_parameter",
    "deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor",
    "deepspeed.runtime.zero.partition_parameters._orig_torch_arange",
    "deepspeed.runtime.zero.partition_parameters.get_accelerator",
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.AVAILABLE",
    "deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES", "deepspeed.runtime.engine.DeepSpeedEngine",
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer", "deepspeed.comm.get_rank", "deepspeed.comm.is_initialized",
    "deepspeed.comm.init_distributed", "deepspeed.accelerator.get_accelerator", "deepspeed.utils.logger.setLevel",
    "deepspeed.utils.logging.logger.setLevel", "deepspeed.utils.is_initialized", "deepspeed.utils.set_z3_leaf_modules",
    "deepspeed.utils.safe_get_full_grad", "deepspeed.utils.groups._get_sequence_parallel_group",
    "deepspeed.utils.groups._get_sequence_parallel_rank", "deepspeed.utils.groups._get_sequence_parallel_world_size",
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
    "deepspeed.utils.zero_to_fp32.get_model_state_file", "deepspeed.utils.zero_to_fp32.get_optim_files",
    "deepspeed.ops.adam.DeepSpeedCPUAdam", "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad",
    "deepspeed.ops.lion.DeepSpeedCPULion", "deepspeed.ops.aio.AsyncIOBuilder", "deepspeed.ops.__compatible_ops__",
    "deepspeed.checkpoint.utils.clone_tensors_for_torch_save", "deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME",
    "deepspeed.launcher.runner.fetch_hostfile", "deepspeed.launcher.runner._parse_hostfile",
    "deepspeed.launcher.constants.PDSH_LAUNCHER", "deepspeed.launcher.launch.main", "deepspeed.__version_major__",
    "deepspeed.__git_hash__", "deepspeed.log_dist", "deepspeed.logger", "deepspeed.dist.get_world_size",
]  # fmt: skip

# Code that uses names that DeepSpeed lacks -> the error that Python requires: ImportError or AttributeError.
MISSING = {
    "import deepspeed.moe.nothing": "import", "from deepspeed.runtime import nothing": "import",
    "from deepspeed.runtime.engine import nothing": "import", "from deepspeed.utils import no_such_name": "import",
    "from deepspeed.launcher.runner import nothing": "import", "from deepspeed.moe.layer import nothing": "import",
    "import deepspeed.zero.nothing": "import", "deepspeed.nothing": "attribute",
    "deepspeed.runtime.nothing": "attribute", "deepspeed.runtime.engine.nothing": "attribute",
    "deepspeed.launcher.runner.nothing": "attribute", "deepspeed.moe.layer.nothing": "attribute",
}  # fmt: skip

# Runs in a process that starts with the alias on its path. Prints one JSON object, which the tests below check.
SCRIPT = """
import functools, importlib, importlib.util, json, sys, types
import deepspeed, mii
result = {"read": []}
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).endswith("upstream.tsv") and result["read"].append(1))
result |= {"is": deepspeed is sys.modules["deepspeed_c"], "torch": "torch" in sys.modules}

# Attributes first, before anything has imported a submodule by its name
unreached = []
for path in REACHED:
    try: functools.reduce(getattr, path.split(".")[1:], deepspeed)
    except AttributeError as error: unreached.append(str(error))
result["unreached"] = unreached

from deepspeed_c.compat.alias.unbuilt import Unbuilt

wrong = []
for upstream, ours in MODULES.items():
    module = importlib.import_module(upstream)
    by_attribute = functools.reduce(getattr, upstream.split(".")[1:], sys.modules[upstream.partition(".")[0]])
    # A function of its module's name is what the attribute means, as in DeepSpeed
    is_function = by_attribute is getattr(module, upstream.rpartition(".")[2], None)
    if not (module is sys.modules[ours] is importlib.import_module(ours)): wrong.append([upstream, repr(module)])
    if by_attribute is not module and not is_function: wrong.append([upstream, repr(by_attribute)])
    if module.__spec__.name != ours or module.__name__ != ours or module.__spec__.origin != module.__file__: wrong.append([upstream, repr(module.__spec__)])
for upstream, names in NAMES.items():
    module = importlib.import_module(upstream)
    for name, ours in names.items():
        path, _, attribute = ours.partition(":")
        target = importlib.import_module(path)
        if getattr(module, name) is not (getattr(target, attribute) if attribute else target): wrong.append([upstream, name])
        if name not in dir(module): wrong.append([upstream, name, "dir"])
result["wrong"] = wrong

missing = {}
for code in MISSING:
    try: exec(code, {"deepspeed": deepspeed}); missing[code] = None
    except Exception as error:
        missing[code] = [type(error).__name__, isinstance(error, ImportError), isinstance(error, AttributeError), str(error)]
result["missing"] = missing

# A hint for what is there would be out of date
stale = []
for path in ABSENT:
    module, _, name = path.rpartition(".")
    try: found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError): continue
    # Of a module that is here the hint is for the names that it lacks
    if not isinstance(found, (types.ModuleType, Unbuilt)): stale.append(path)
result["stale"] = stale

# A document alone is no advice
from deepspeed_c.compat.alias.unbuilt import ELSEWHERE, instead_of
from deepspeed_c.compat.alias.upstream import upstream
unadvised = []
for path in upstream().modules:
    module = importlib.import_module(path)
    for name in upstream().public_names(path):
        if isinstance(getattr(module, name), Unbuilt) and instead_of(f"{path}.{name}") == ELSEWHERE: unadvised.append(f"{path}.{name}")
result["unadvised"] = unadvised

# One object under both names: what is replaced through one is replaced for all
import deepspeed.runtime.zero.partition_parameters as upstream_name
import deepspeed_c.zero.weights.init as our_name
upstream_name.zero_wrapper_for_fp_tensor_constructor = "replaced"
result["replaced"] = vars(our_name)["zero_wrapper_for_fp_tensor_constructor"]

# No file of ours is loaded a second time
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("deepspeed_c") and getattr(module, "__file__", None)]
result["twice"] = sorted({file for file in files if files.count(file) > 1})
result["strange"] = sorted(name for name, module in sys.modules.items() if name.startswith(("deepspeed.", "mii.")) and module.__name__.startswith(("deepspeed.", "mii.")) and getattr(module, "__file__", None))
result["function"] = type(deepspeed.utils.z3_leaf_module).__name__
result["has"] = [hasattr(deepspeed, "nothing"), hasattr(deepspeed.utils, "nothing"), hasattr(deepspeed.utils, "groups")]
result["probed"] = getattr(importlib.util.find_spec("deepspeed.ops.adam"), "name", None)

# Another deepspeed in its place: ours keeps out of it
sys.modules["deepspeed"] = types.ModuleType("deepspeed"); sys.modules["deepspeed"].__path__ = []
for name in [name for name in sys.modules if name.startswith("deepspeed.")]: del sys.modules[name]
try: import deepspeed.zero; result["inactive"] = None
except ModuleNotFoundError as error: result["inactive"] = str(error)
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def seen():
    tables = {"REACHED": REACHED, "MISSING": list(MISSING), "MODULES": MODULES, "NAMES": NAMES, "ABSENT": ABSENT}
    code = "".join(f"{name} = {table!r}\n" for name, table in tables.items()) + SCRIPT
    done = ran(
        [sys.executable, "-"],
        input=code,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SHIM, str(ROOT)])},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_this_package_and_costs_no_torch(seen):
    assert seen["is"] is True and seen["torch"] is False


def test_what_the_stack_reaches_for_is_there_without_an_import_of_its_own(seen):
    assert seen["unreached"] == []


def test_modules_and_names_are_the_objects_of_the_table(seen):
    assert seen["wrong"] == []


@pytest.mark.parametrize("code", MISSING)
def test_what_is_not_here_says_so_and_what_to_use(code, seen):
    assert seen["missing"][code] is not None, "it is here: take it off the list"
    name, is_import, is_attribute, text = seen["missing"][code]
    assert (is_import, is_attribute) == (MISSING[code] == "import", MISSING[code] == "attribute"), text
    assert name == ("MissingModuleError" if is_import else "MissingNameError")
    assert text.startswith("deepspeed.") and "is not part of this version of deepspeed_c" in text and "\nFix: " in text


def test_missing_names_are_those_that_were_asked_for(seen):
    texts = {code: answer[3].split(":")[0] for code, answer in seen["missing"].items()}
    assert texts["from deepspeed.runtime.engine import nothing"] == "deepspeed.runtime.engine.nothing"
    # The message is that of the longest known path.
    assert ABSENT["deepspeed.moe"] in seen["missing"]["import deepspeed.moe.nothing"][3]


def test_table_of_upstream_is_read_once(seen):
    assert len(seen["read"]) == 1, seen["read"]


def test_no_hint_is_out_of_date(seen):
    assert seen["stale"] == [], "these are here now: take them out of ABSENT"


def test_every_name_that_is_not_built_has_advice_and_no_document_alone(seen):
    assert seen["unadvised"] == []
    assert [path for path, advice in ABSENT.items() if advice.startswith("docs/")] == []


def test_one_object_under_both_names(seen):
    assert seen["replaced"] == "replaced"
    assert seen["twice"] == [] and seen["strange"] == []


def test_asking_by_way_of_trial(seen):
    assert seen["has"] == [False, False, True]
    assert seen["probed"] == "deepspeed_c.ops.adam"


def test_function_of_its_modules_name_stays_a_function(seen):
    assert seen["function"] == "function"


def test_finder_keeps_out_of_another_deepspeed(seen):
    assert seen["inactive"] == "No module named 'deepspeed.zero'"


def test_table_names_files_that_are_there_and_no_path_twice():
    """Needs no torch, so it is the first test to fail when a file is moved."""
    targets = {*MODULES.values(), *(ours.partition(":")[0] for names in NAMES.values() for ours in names.values())}
    for module in sorted(targets):
        top, _, rest = module.partition(".")
        part, _, below = rest.partition(".")
        folder = ROOT / "ops" / below.replace(".", "/") if part == "ops" else ROOT / top / rest.replace(".", "/")
        assert folder.with_suffix(".py").is_file() or (folder / "__init__.py").is_file(), module
    for path in [*MODULES, *NAMES, *ABSENT]:
        assert path.split(".")[0] in ("deepspeed", "mii"), path


WITHOUT_ALIAS = """
import importlib, sys
import deepspeed_c
assert "deepspeed" not in sys.modules
assert deepspeed_c.runtime.zero.partition_parameters.ZeroParamStatus is deepspeed_c.zero.weights.param.ZeroParamStatus
from deepspeed_c.pipe.module import PipelineModule as same
from deepspeed_c.runtime.pipe.module import PipelineModule
assert PipelineModule is same
from deepspeed_c.compat.alias.modules import MODULES, NAMES
n = 0
for path in sorted({*MODULES, *NAMES}):
    if path.startswith(("deepspeed.runtime", "deepspeed.module_inject")):
        module = importlib.import_module(path.replace("deepspeed", "deepspeed_c", 1))
        for name in NAMES.get(path, ()):
            getattr(module, name)
            n += 1
assert "deepspeed" not in sys.modules
try:
    import deepspeed_c.runtime.nothing
except ImportError as error:
    assert "not part of this version" in str(error) and error.name == "deepspeed_c.runtime.nothing", error
print(n)
"""


def test_paths_of_runtime_answer_under_our_own_name():
    done = fresh.run(["-c", WITHOUT_ALIAS], has_package=False)
    assert done.returncode == 0 and int(done.stdout) > 50, done.stderr


def test_a_module_whose_file_is_not_there_is_named() -> None:
    """A broken installation. The import of a module of ours must not lead to itself for ever."""
    from deepspeed_c.compat.alias.finder import spec_of_ours
    from deepspeed_c.errors import MissingModuleError

    spec = spec_of_ours("deepspeed_c.ops")
    with pytest.raises(MissingModuleError, match="deepspeed_c.ops.*its file is not there") as raised:
        spec.loader.create_module(spec)
    assert raised.value.name == "deepspeed_c.ops"
