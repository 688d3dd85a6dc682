"""Optimizers and schedules by name: the known names, and the checks of their parameters."""

import ast
import inspect
from pathlib import Path

import pytest

from deepspeed_c.config import load_config, problems_of
from deepspeed_c.config.optim import OPTIMIZERS, Kind, find_torch_optimizer
from deepspeed_c.config.schedule import SCHEDULES
from deepspeed_c.config.schema import fields_of


def optimizer(kind, **params):
    return load_config({"optimizer": {"type": kind, "params": params}}, world_size=1, batch="skip").optimizer


def problem(section, kind, **params):
    (only,) = problems_of({section: {"type": kind, "params": params}}, batch="skip")
    return only


@pytest.mark.parametrize(
    "kind", ["Adam", "AdamW", "Lamb", "Lion", "Adagrad", "SGD", "Muon", "RMSprop", "NAdam", "Adafactor"]
)
def test_name_in_any_case(kind):
    for spelt in (kind, kind.lower(), kind.upper()):
        assert optimizer(spelt, lr=0.1).type == kind
        assert dict(optimizer(spelt, lr="0.1", weight_decay="auto").params)["lr"] in (0.1, "0.1")


@pytest.mark.parametrize(
    "wrong, right", [("AdmW", "AdamW"), ("Adaw", "Adam"), ("SDG", "SGD"), ("Loin", "Lion"), ("Muoon", "Muon")]
)
def test_unknown_optimizer_names_the_nearest(wrong, right):
    error = problem("optimizer", wrong)
    assert error.where == "optimizer.type" and right in error.fix, str(error)


def test_unknown_schedule_names_the_nearest():
    error = problem("scheduler", "WarmUpCosinLR")
    assert error.where == "scheduler.type" and "WarmupCosineLR" in error.fix
    assert "LRRangeTest" in problem("scheduler", "zzzzzzzzzz").fix


@pytest.mark.parametrize("value", [None, 3, ["Adam"], True])
def test_type_must_be_a_name(value):
    (error,) = problems_of({"optimizer": {"type": value}}, batch="skip")
    assert error.where == "optimizer.type"


@pytest.mark.parametrize("tree", [{}, {"params": {"lr": 1}}])
def test_type_must_be_there(tree):
    (error,) = problems_of({"optimizer": tree}, batch="skip")
    assert error.where == "optimizer.type" and "missing" in error.what


@pytest.mark.parametrize("params", [[1], "lr", 3])
def test_params_must_be_a_section(params):
    (error,) = problems_of({"optimizer": {"type": "Adam", "params": params}}, batch="skip")
    assert error.where == "optimizer.params"


def test_params_hold_what_was_written_and_no_defaults():
    assert dict(optimizer("AdamW", lr="1e-3", betas=[0.9, "0.95"]).params) == {"lr": 1e-3, "betas": (0.9, 0.95)}
    assert dict(optimizer("AdamW").params) == {}
    assert dict(load_config({"optimizer": {"type": "AdamW"}}, world_size=1, batch="skip").optimizer.params) == {}


@pytest.mark.parametrize(
    "kind, params",
    [
        ("Adam", {"lr": -1}), ("Adam", {"betas": [0.9]}), ("Adam", {"betas": [0.9, 1.0]}),
        ("Adam", {"betas": [-0.1, 0.9]}), ("Adam", {"eps": float("nan")}), ("Lamb", {"max_coeff": 0}),
        ("Muon", {"momentum": 1}), ("SGD", {"nesterov": "maybe"}), ("Lion", {"weight_decay": -1}),
    ],
)  # fmt: skip
def test_params_out_of_range(kind, params):
    error = problem("optimizer", kind, **params)
    assert error.where == f"optimizer.params.{next(iter(params))}"


def test_parameter_of_another_optimizer_is_unknown():
    assert problem("optimizer", "Lion", eps=1e-8).where == "optimizer.params.eps"
    assert "momentum" in problem("optimizer", "SGD", momentun=0.9).fix


def test_max_grad_norm_is_pointed_to_gradient_clipping():
    for kind in ("Adam", "Lamb", "RMSprop"):
        error = problem("optimizer", kind, max_grad_norm=1.0)
        assert error.where == "optimizer.params.max_grad_norm" and "gradient_clipping" in error.fix


def test_torch_classes_take_whatever_is_written():
    config = load_config(
        {"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9, "lr": "auto", "x-a": 1, "new_in_torch": [1, 2]}}},
        world_size=1,
        batch="skip",
    )
    assert dict(config.optimizer.params) == {"alpha": 0.9, "new_in_torch": (1, 2)}
    assert config.source_of("optimizer.params.alpha") == "user"
    assert config.source_of("optimizer.params.lr") == "auto"


def test_all_of_torch_is_known():
    import torch

    for name in dir(torch.optim):
        candidate = getattr(torch.optim, name)
        if inspect.isclass(candidate) and issubclass(candidate, torch.optim.Optimizer) and name != "Optimizer":
            assert name.lower() in OPTIMIZERS, f"add {name} to the table"


def test_class_of_a_later_torch_is_found(monkeypatch):
    import torch

    class Brandnew(torch.optim.SGD):
        pass

    monkeypatch.setattr(torch.optim, "Brandnew", Brandnew, raising=False)
    assert find_torch_optimizer("brandnew") == Kind("Brandnew")
    assert optimizer("brandNEW", lr=1).type == "Brandnew"
    assert find_torch_optimizer("Optimizer") is None
    assert find_torch_optimizer("lr_scheduler") is None


def test_params_of_torch_optimizers_are_those_of_torch():
    import torch

    for name in ("SGD", "Adagrad"):
        theirs = inspect.signature(getattr(torch.optim, name)).parameters
        ours = OPTIMIZERS[name.lower()].params()
        for field in set(ours.__struct_fields__) - {"state_dtype"}:  # only this package has it
            assert field in theirs, (name, field)
            assert getattr(ours, field) == theirs[field].default, (name, field)


@pytest.mark.parametrize(
    "kind", [kind for kind in SCHEDULES.values() if kind.params is not None], ids=lambda kind: kind.name
)
def test_schedule(kind):
    required = {"total_num_steps": 10, "cycle_min_lr": 0.1, "cycle_max_lr": [0.2, 0.3]}
    params = {name: value for name, value in required.items() if name in kind.params.__struct_fields__}
    config = load_config({"scheduler": {"type": kind.name.lower(), "params": params}}, world_size=1, batch="skip")
    assert config.scheduler.type == kind.name
    assert set(config.scheduler.params) == set(params)
    for missing in params:
        rest = {name: value for name, value in params.items() if name != missing}
        assert problem("scheduler", kind.name, **rest).where == f"scheduler.params.{missing}"


def test_warmup_of_no_steps_is_allowed_and_less_is_not():
    config = load_config(
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, world_size=1, batch="skip"
    )
    assert config.scheduler.params["warmup_num_steps"] == 0
    assert problem("scheduler", "WarmupLR", warmup_num_steps=-1).where == "scheduler.params.warmup_num_steps"


@pytest.mark.parametrize(
    "kind, params, key",
    [
        ("WarmupLR", {"warmup_type": 3}, "warmup_type"),
        ("WarmupLR", {"total_num_steps": 5}, "total_num_steps"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        ("OneCycle", {"cycle_min_lr": "low", "cycle_max_lr": 1}, "cycle_min_lr"),
    ],
)
def test_schedule_params_are_checked(kind, params, key):
    assert problem("scheduler", kind, **params).where == f"scheduler.params.{key}"


def test_keys_without_effect_are_shown_and_not_passed_on():
    tree = {"optimizer": {"type": "SGD", "params": {"lr": 1, "foreach": True, "fused": None}}}
    config = load_config(tree, world_size=1, batch="skip")
    assert dict(config.optimizer.params) == {"lr": 1.0}
    (row,) = [row for row in config.rows() if row.key == "optimizer.params.foreach"]
    assert (row.value, row.source) == ("true", "user") and row.note.startswith("no effect")
    assert config.resolved_dict()["optimizer"]["params"]["foreach"] is True
    again = load_config(config.resolved_dict(), world_size=1, batch="skip")
    assert again.lines() == config.lines()


def constructor_arguments(file, name):
    """The arguments of a class of ops. They are read from its source, because an import needs the compiled
    extension."""
    path = Path(__file__).resolve().parents[3] / "ops" / file
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            (init,) = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
            return {argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)}
    raise AssertionError(f"ops/{file} has no class {name}")


@pytest.mark.parametrize(
    "kind, file, name, by_the_engine",
    [
        *(("AdamW", "adam.py", "FusedAdam", {"torch_adam", "foreach"}), ("Lamb", "lamb.py", "FusedLamb", set())),
        *(("Lion", "lion.py", "FusedLion", set()), ("Adagrad", "adagrad.py", "DeepSpeedCPUAdagrad", set())),
        *(("SGD", "sgd.py", "FusedSGD", set()), ("Muon", "muon.py", "Muon", {"muon_lr", "adam_lr"})),
    ],
)
def test_what_acts_is_what_the_constructor_takes(kind, file, name, by_the_engine):
    acting = {key for key, field in fields_of(OPTIMIZERS[kind.lower()].params).items() if field.info.status == "acts"}
    assert acting - by_the_engine <= constructor_arguments(file, name)
    assert by_the_engine <= acting
