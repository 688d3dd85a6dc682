"""No key is accepted and then ignored: code reads it, or the schema says why it changes nothing, or it is refused."""

import ast
from pathlib import Path

import pytest

import deepspeed_c
from deepspeed_c.config.features import FEATURES
from deepspeed_c.config.optim import OPTIMIZERS
from deepspeed_c.config.schedule import SCHEDULES
from deepspeed_c.config.schema import walk
from deepspeed_c.monitor import MONITORS

ROOT = Path(deepspeed_c.__file__).parent
# Files that do not act on the values of keys: some read, check and print all keys alike; the others are DeepSpeed's
# getters and objects, which pass values on.
NO_READERS = {
    *(
        ROOT / "config" / f"{name}.py"
        for name in ("checks", "coerce", "config", "docs", "keys", "load", "resolve", "schema")
    ),
    ROOT / "engine" / "getters.py",
    *(ROOT / "compat").glob("*.py"),
}
# Key that has an effect without a reader in the package -> how it has the effect.
ELSEWHERE = {
    "autotuning.metric_path": "an experiment reads it by the engine's getter, which knows the default file",
    "zero_force_ds_cpu_optimizer": "Config.forces_own_optimizer reads it, with whether the user wrote it",
    "data_types.param_dtype": "a value that contradicts fp16.enabled and bf16.enabled is an error (checks.py)",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "accelerate and the Trainer read it by the engine's getter",
}
PARAMS = ("optimizer.params.", "scheduler.params.")


def attributes_read():
    """Every name that follows a dot somewhere in the package, or that getattr is called with."""
    found = set()
    for path in ROOT.rglob("*.py"):
        if path not in NO_READERS:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.add(node.attr)
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                    found |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return found


def keys_read():
    """Every key of the sections that the sampler, the curricula and the choice of an elastic batch get as mappings, as
    DeepSpeed's classes do."""
    files = [*(ROOT / "data").glob("*.py"), ROOT / "config" / "elasticity.py"]
    trees = [ast.parse(path.read_text()) for path in files]
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


# The sections of monitors are looked up by the names of their backends.
READ = attributes_read() | set(MONITORS) | keys_read()
# The features that are refused. A key that only tunes one of them does no harm.
REFUSED = {field.info.feature for _, field in walk() if field.info.is_switch and not field.info.is_built} | {
    kind.feature for kind in (*OPTIMIZERS.values(), *SCHEDULES.values())
}
KEYS = [(path, field) for path, field in walk() if not path.startswith(PARAMS)]


def test_the_walk_sees_all_keys_and_the_search_finds_readers():
    assert len(list(walk())) > 590 and len(KEYS) > 380
    assert {"stage", "reduce_bucket_size", "cpuadam_cores_perc"} <= READ
    assert not {"legacy_stage1", "use_gds", "no_such_key"} & READ


@pytest.mark.parametrize("status", ["acts", "inherent", "later"])
def test_each_key_has_a_reader_or_a_reason_or_is_refused(status):
    keys = [(path, field) for path, field in KEYS if field.info.status == status]
    assert keys
    if status == "acts":
        unread = [path for path, field in keys if field.attribute not in READ]
        assert sorted(unread) == sorted(ELSEWHERE)
    elif status == "inherent":
        assert all(field.info.inherent for _, field in keys)
    else:
        unrefused = [path for path, field in keys if field.info.feature not in REFUSED]
        assert unrefused == []
        assert all(not FEATURES[field.info.feature].is_built for _, field in keys)


@pytest.mark.parametrize("kinds", [OPTIMIZERS, SCHEDULES], ids=["optimizers", "schedules"])
def test_parameters_go_to_a_constructor_or_are_refused(kinds):
    """Parameters that are accepted go to a constructor. Tests of the constructors (test_build, test_lr_schedules) check
    their effect."""
    for kind in kinds.values():
        assert kind.params is not None or kind.feature is None or kind.feature in REFUSED, kind.name
